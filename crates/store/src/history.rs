//! What became of blocks that are not here: the latest events, in a fixed amount of memory.

use std::fmt;

use cascade_block::{BlockKey, Seed};

use crate::DeclineReason;
use crate::eviction::{Ghosts, Removal};

/// Blocks whose end is remembered, the latest ones: a megabyte and a half at most.
const EVENTS_MAX: usize = 64 << 10;

/// Why a block is not here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Loss {
    /// DRAM needed room, no tier is below, and it had not been read since it was put.
    EvictedUnread,
    /// DRAM needed room and no tier is below; it had been read.
    EvictedRead,
    /// DRAM needed room and no tier is below; it was protected, but nothing else could go.
    EvictedProtected,
    /// DRAM needed room, and no tier below had taken it.
    EvictedUnwritten,
    /// DRAM needed room, and the tier below had given up its copy before.
    EvictedReclaimed,
    /// The tier below needed room, and DRAM had let it go before.
    Reclaimed,
    /// The only tier that could have kept it did not take it.
    Unwritten,
    /// Its bytes failed their check when they were read back.
    Damaged,
    /// The tier that had it no longer knew it.
    Vanished,
    /// Somebody deleted it.
    Deleted,
    /// Somebody cleared the store.
    Cleared,
    /// Its time was over.
    Expired,
    /// It was offered and not taken: a request's last partial block.
    DeclinedPartial,
    /// It was offered and not taken: larger than a tier can hold.
    DeclinedTooLarge,
    /// It was offered and not taken: all of DRAM was pinned or held by views.
    DeclinedFull,
    /// It was offered and not taken: everything resident was worth more, and no tier is below.
    DeclinedWorthLess,
    /// It was offered and not taken: the pipeline keeps nothing.
    DeclinedEmpty,
    /// It was offered, and the put failed.
    PutFailed,
}

/// Every loss with what is said of it; the place in the list is its number.
const LOSSES: [(Loss, &str); 18] = [
    (Loss::EvictedUnread, "evicted from DRAM for room; it had not been read since it was put"),
    (Loss::EvictedRead, "evicted from DRAM for room; it had been read since it was put"),
    (Loss::EvictedProtected, "evicted from DRAM for room; protected, but nothing else could go"),
    (Loss::EvictedUnwritten, "evicted from DRAM for room; no tier below had taken it"),
    (Loss::EvictedReclaimed, "evicted from DRAM for room; the tier below had given it up before"),
    (Loss::Reclaimed, "given up by the tier below for room; DRAM had evicted it before"),
    (Loss::Unwritten, "not taken by the only tier that could have kept it"),
    (Loss::Damaged, "dropped: its bytes failed their check"),
    (Loss::Vanished, "gone from the tier that had it"),
    (Loss::Deleted, "deleted by a caller"),
    (Loss::Cleared, "deleted when the store was cleared"),
    (Loss::Expired, "expired"),
    (Loss::DeclinedPartial, "not taken: a request's last partial block"),
    (Loss::DeclinedTooLarge, "not taken: larger than a tier can hold"),
    (Loss::DeclinedFull, "not taken: all of DRAM was pinned or held by views"),
    (Loss::DeclinedWorthLess, "not taken: everything resident was worth more"),
    (Loss::DeclinedEmpty, "not taken: the pipeline keeps nothing"),
    (Loss::PutFailed, "its put failed"),
];

impl Loss {
    /// What the policy is told.
    pub(crate) fn removal(self) -> Removal {
        match self {
            Self::EvictedUnread
            | Self::EvictedRead
            | Self::EvictedProtected
            | Self::EvictedUnwritten
            | Self::EvictedReclaimed
            | Self::Reclaimed
            | Self::Unwritten => Removal::Evicted,
            _ => Removal::Deleted,
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

/// Bits of an event's number that say why; the others count seconds since the store was opened.
const LOSS_BITS: u32 = 5;
const SECONDS_MAX: u64 = (1 << (u32::BITS - LOSS_BITS)) - 1;
const _: () = assert!(LOSSES.len() <= 1 << LOSS_BITS, "every loss has a number");

/// The latest ends of blocks, by key.
#[derive(Debug)]
pub(crate) struct History {
    /// Why and when, in one number each.
    ends: Ghosts,
    seed: Seed,
    opened_unix_ms: u64,
    /// The latest moment that it was told, in seconds since the store was opened.
    now: u64,
}

impl History {
    pub(crate) fn new(opened_unix_ms: u64, seed: Seed) -> Self {
        Self { ends: Ghosts::default(), seed, opened_unix_ms, now: 0 }
    }

    /// Whoever takes the state's lock and may note something tells the time first: asking a clock
    /// for every block would cost more than noting it.
    pub(crate) fn tell_time(&mut self, unix_ms: u64) {
        self.now = unix_ms.saturating_sub(self.opened_unix_ms) / 1000;
    }

    /// A block has gone, or did not come.
    pub(crate) fn note(&mut self, key: &BlockKey, why: Loss) {
        let seconds = self.now.min(SECONDS_MAX);
        let number = u32::try_from(seconds << LOSS_BITS).expect("within the maximum");
        let fingerprint = self.seed.of_key(key);
        self.ends.take(fingerprint);
        self.ends.push(fingerprint, number | why.number(), EVENTS_MAX);
    }

    /// A block has come.
    pub(crate) fn forget(&mut self, key: &BlockKey) {
        self.ends.take(self.seed.of_key(key));
    }

    /// Why a block is not here, and since when (milliseconds since 1970, to the second).
    pub(crate) fn end_of(&self, key: &BlockKey) -> Option<(Loss, u64)> {
        let number = self.ends.get(self.seed.of_key(key))?;
        let (why, _) = LOSSES[(number & ((1 << LOSS_BITS) - 1)) as usize];
        let seconds = u64::from(number >> LOSS_BITS);
        Some((why, self.opened_unix_ms + seconds * 1000))
    }

    /// This moment as blocks keep it: seconds since the store was opened, plus one; zero is never.
    pub(crate) fn stamp(&self) -> u32 {
        u32::try_from(self.now + 1).unwrap_or(u32::MAX)
    }

    /// The moment of a stamp, in milliseconds since 1970.
    pub(crate) fn unix_ms_of(&self, stamp: u32) -> Option<u64> {
        let seconds = u64::from(stamp.checked_sub(1)?);
        Some(self.opened_unix_ms + seconds * 1000)
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        self.ends.memory_bytes()
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
    fn the_latest_end_of_a_block_is_told_and_a_new_beginning_ends_it() {
        let opened = 5_000;
        let mut history = History::new(opened, Seed::new(1));
        for (seconds, (why, text)) in (1..).zip(LOSSES) {
            history.tell_time(opened + seconds * 1000);
            history.note(&key(1), why);
            assert_eq!(history.end_of(&key(1)), Some((why, opened + seconds * 1000)));
            assert_eq!(why.to_string(), text);
        }
        history.forget(&key(1));
        assert_eq!(history.end_of(&key(1)), None);
    }

    #[test]
    fn the_oldest_ends_are_forgotten_first() {
        let mut history = History::new(0, Seed::new(1));
        let count = EVENTS_MAX as u64 + 10;
        (0..count).for_each(|number| history.note(&key(number), Loss::Deleted));
        assert!((0..10).all(|number| history.end_of(&key(number)).is_none()));
        assert!((10..count).all(|number| history.end_of(&key(number)).is_some()));
        assert!(history.memory_bytes() <= 3 << 19, "{}", history.memory_bytes());
    }

    #[test]
    fn a_store_of_many_years_does_not_wrap() {
        let mut history = History::new(0, Seed::new(1));
        history.tell_time((SECONDS_MAX + 77) * 1000);
        history.note(&key(1), Loss::Expired);
        let (why, at) = history.end_of(&key(1)).expect("it was noted");
        assert_eq!((why, at / 1000), (Loss::Expired, SECONDS_MAX));
        assert_eq!(history.unix_ms_of(0), None);
    }
}
