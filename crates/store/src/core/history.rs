//! The history of lost blocks: why each latest one is absent, in bounded memory.

use std::fmt;

use cascade_block::{BlockKey, FingerprintSeed};
use cascade_tier::DeclineReason;

use crate::core::eviction::{Ghosts, RemovalReason};

/// Most losses remembered, the latest ones: 1.5 MiB.
const EVENTS_MAX: usize = 64 << 10;

/// Why a block is absent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Loss {
    /// Evicted from DRAM with no tier below, and not read since its put.
    EvictedUnread,
    /// Evicted from DRAM with no tier below, after at least one read.
    EvictedRead,
    /// Evicted from DRAM with no tier below; protected, but there was no other candidate.
    EvictedProtected,
    /// Evicted from DRAM before a lower tier had written it.
    EvictedUnwritten,
    /// Evicted from DRAM after the lower tier had reclaimed its copy.
    EvictedReclaimed,
    /// Reclaimed by the lower tier after DRAM had evicted it.
    Reclaimed,
    /// Not written by the only tier that could have kept it.
    Unwritten,
    /// Its bytes failed their checksum when they were read.
    Damaged,
    /// The tier that had it no longer has it.
    Vanished,
    /// Deleted by a caller.
    Deleted,
    /// Deleted when a caller cleared the store.
    Cleared,
    /// Its expiry time passed.
    Expired,
    /// Declined: a request's last partial block.
    DeclinedPartial,
    /// Declined: larger than a tier can hold.
    DeclinedTooLarge,
    /// Declined: all of DRAM was pinned or held by views.
    DeclinedFull,
    /// Declined: every resident block was worth more, and no tier is below.
    DeclinedWorthLess,
    /// Declined: the pipeline keeps nothing.
    DeclinedEmpty,
    /// Its put failed.
    PutFailed,
}

/// Every loss with its description; the index in the list is its number.
const LOSSES: [(Loss, &str); 18] = [
    (Loss::EvictedUnread, "evicted from DRAM for room; it had not been read since it was put"),
    (Loss::EvictedRead, "evicted from DRAM for room; it had been read since it was put"),
    (Loss::EvictedProtected, "evicted from DRAM for room; protected, but no other block could go"),
    (Loss::EvictedUnwritten, "evicted from DRAM for room; no tier below had written it"),
    (Loss::EvictedReclaimed, "evicted from DRAM for room; the tier below had reclaimed its copy"),
    (Loss::Reclaimed, "reclaimed by the tier below for room; DRAM had evicted it before"),
    (Loss::Unwritten, "not written by the only tier that could have kept it"),
    (Loss::Damaged, "dropped: its bytes failed their checksum"),
    (Loss::Vanished, "missing from the tier that had it"),
    (Loss::Deleted, "deleted by a caller"),
    (Loss::Cleared, "deleted when the store was cleared"),
    (Loss::Expired, "expired"),
    (Loss::DeclinedPartial, "declined: a request's last partial block"),
    (Loss::DeclinedTooLarge, "declined: larger than a tier can hold"),
    (Loss::DeclinedFull, "declined: all of DRAM was pinned or held by views"),
    (Loss::DeclinedWorthLess, "declined: every resident block was worth more"),
    (Loss::DeclinedEmpty, "declined: the pipeline keeps nothing"),
    (Loss::PutFailed, "its put failed"),
];

impl Loss {
    /// The reason that is passed to the eviction policy.
    pub(crate) fn removal(self) -> RemovalReason {
        match self {
            Self::EvictedUnread
            | Self::EvictedRead
            | Self::EvictedProtected
            | Self::EvictedUnwritten
            | Self::EvictedReclaimed
            | Self::Reclaimed
            | Self::Unwritten => RemovalReason::Evicted,
            _ => RemovalReason::Deleted,
        }
    }

    fn number(self) -> u32 {
        let place = LOSSES.iter().position(|(loss, _)| *loss == self);
        u32::try_from(place.expect("every loss is in the list")).expect("a short list")
    }
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(LOSSES[self.number() as usize].1)
    }
}

impl From<DeclineReason> for Loss {
    fn from(reason: DeclineReason) -> Self {
        match reason {
            DeclineReason::Partial => Self::DeclinedPartial,
            DeclineReason::TooLarge => Self::DeclinedTooLarge,
            DeclineReason::Full => Self::DeclinedFull,
            DeclineReason::WorthLess => Self::DeclinedWorthLess,
            DeclineReason::Empty => Self::DeclinedEmpty,
        }
    }
}

/// Bits of a number that encode the loss; the others count seconds since the store was opened.
const LOSS_BITS: u32 = 5;
/// Latest time that a number can hold: after more than four years.
const SECONDS_MAX: u64 = (1 << (u32::BITS - LOSS_BITS)) - 1;
const _: () = assert!(LOSSES.len() <= 1 << LOSS_BITS, "every loss has a number");

/// The latest losses, by key.
#[derive(Debug)]
pub(crate) struct History {
    /// Loss and time, in one number each.
    losses: Ghosts,
    seed: FingerprintSeed,
    opened_unix_ms: u64,
    /// The latest time set, in seconds since the store was opened.
    now: u64,
}

impl History {
    pub(crate) fn new(opened_unix_ms: u64, seed: FingerprintSeed) -> Self {
        Self { losses: Ghosts::default(), seed, opened_unix_ms, now: 0 }
    }

    /// Sets the time of the losses recorded next. Called once after the state's lock is taken:
    /// reading the clock for every block would cost more than recording it.
    pub(crate) fn set_time(&mut self, unix_ms: u64) {
        self.now = unix_ms.saturating_sub(self.opened_unix_ms) / 1000;
    }

    /// Records that a block was lost or not stored.
    pub(crate) fn record(&mut self, key: &BlockKey, why: Loss) {
        let seconds = self.now.min(SECONDS_MAX);
        let number = u32::try_from(seconds << LOSS_BITS).expect("within the maximum");
        let fingerprint = self.seed.of_key(key);
        // One entry for each key: the push makes it the youngest.
        self.losses.take(fingerprint);
        self.losses.push(fingerprint, number | why.number(), EVENTS_MAX);
    }

    /// Forgets the loss of a block that is stored again.
    pub(crate) fn forget(&mut self, key: &BlockKey) {
        self.losses.take(self.seed.of_key(key));
    }

    /// Why a block is absent, and since when (milliseconds since 1970, to the second).
    pub(crate) fn loss_of(&self, key: &BlockKey) -> Option<(Loss, u64)> {
        let number = self.losses.get(self.seed.of_key(key))?;
        // In range, because `record` made the number. It never leaves the process, so that the
        // order of the list may change.
        let (why, _) = LOSSES[(number & ((1 << LOSS_BITS) - 1)) as usize];
        let seconds = u64::from(number >> LOSS_BITS);
        Some((why, self.opened_unix_ms + seconds * 1000))
    }

    /// The time set last, as blocks keep it: seconds since opening plus one; zero is never.
    pub(crate) fn stamp(&self) -> u32 {
        u32::try_from(self.now + 1).unwrap_or(u32::MAX)
    }

    /// The time of a stamp, in milliseconds since 1970.
    pub(crate) fn unix_ms_of(&self, stamp: u32) -> Option<u64> {
        let seconds = u64::from(stamp.checked_sub(1)?);
        Some(self.opened_unix_ms + seconds * 1000)
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        self.losses.memory_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(number: u64) -> BlockKey {
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&number.to_le_bytes());
        BlockKey::from_bytes(bytes)
    }

    #[test]
    fn the_latest_loss_of_a_block_is_reported_until_it_is_stored_again() {
        let opened = 5_000;
        let mut history = History::new(opened, FingerprintSeed::new(1));
        for (seconds, (why, text)) in (1..).zip(LOSSES) {
            history.set_time(opened + seconds * 1000);
            history.record(&key(1), why);
            assert_eq!(history.loss_of(&key(1)), Some((why, opened + seconds * 1000)));
            assert_eq!(why.to_string(), text);
        }
        history.forget(&key(1));
        assert_eq!(history.loss_of(&key(1)), None);
    }

    #[test]
    fn the_oldest_losses_are_forgotten_first() {
        let mut history = History::new(0, FingerprintSeed::new(1));
        let count = EVENTS_MAX as u64 + 10;
        (0..count).for_each(|number| history.record(&key(number), Loss::Deleted));
        assert!((0..10).all(|number| history.loss_of(&key(number)).is_none()));
        assert!((10..count).all(|number| history.loss_of(&key(number)).is_some()));
        assert!(history.memory_bytes() <= 3 << 19, "{}", history.memory_bytes());
    }

    #[test]
    fn the_time_of_a_loss_saturates_after_many_years() {
        let mut history = History::new(0, FingerprintSeed::new(1));
        history.set_time((SECONDS_MAX + 77) * 1000);
        history.record(&key(1), Loss::Expired);
        let (why, at) = history.loss_of(&key(1)).expect("it was recorded");
        assert_eq!((why, at / 1000), (Loss::Expired, SECONDS_MAX));
        assert_eq!(history.unix_ms_of(0), None);
    }
}
