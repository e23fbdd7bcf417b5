//! What one client holds of the pool: slabs it writes and blocks it reads.
//!
//! A client numbers its holds and says which it no longer needs. It may say so before the node has
//! granted them: its call ran out of time, and it gives back whatever that call still brings.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use cascade_memory::{Slab, SlabMut};
use cascade_store::{HeldId, HeldPiece, StoreError};
use cascade_wire::HoldRange;
use foldhash::fast::RandomState;

use crate::tenants::Tenant;

/// Least that a hold counts towards a client's share, in bytes.
const COUNTED_MIN: usize = 1024;

/// A piece of the pool in a client's hands.
#[derive(Debug)]
pub(super) enum Held {
    /// It writes there.
    Slab(SlabMut),
    /// It reads there.
    Lease(Slab),
}

/// What stands in a tenant's ledger about a piece, so that a node after this one leaves it alone.
/// Taken back when dropped.
#[derive(Debug)]
pub(super) struct Note {
    tenant: Arc<Tenant>,
    id: Option<HeldId>,
}

impl Note {
    pub(super) fn new(tenant: Arc<Tenant>, id: HeldId) -> Self {
        Self { tenant, id: Some(id) }
    }

    /// Takes the notes of one session back, so of one tenant: all at once, where dropping them
    /// would take the ledger's lock for each.
    pub(super) fn take_back(notes: impl IntoIterator<Item = Self>) {
        let mut tenant = None;
        let mut id_of = |mut note: Self| {
            tenant.get_or_insert_with(|| Arc::clone(&note.tenant));
            note.id.take()
        };
        let ids: Vec<HeldId> = notes.into_iter().filter_map(&mut id_of).collect();
        if let Some(tenant) = tenant {
            tenant.store().unhold(ids);
        }
    }
}

impl Drop for Note {
    fn drop(&mut self) {
        if let Some(id) = self.id.take() {
            self.tenant.store().unhold([id]);
        }
    }
}

/// A piece that was granted. The note goes before the piece: its memory is noted while it is held.
#[derive(Debug)]
pub(super) struct Granted {
    note: Option<Note>,
    held: Held,
    /// When it was granted.
    since: Duration,
}

impl Granted {
    pub(super) fn new(held: Held, note: Option<Note>, since: Duration) -> Self {
        Self { note, held, since }
    }

    /// What it counts towards the client's share.
    pub(super) fn bytes(&self) -> u64 {
        self.held.bytes()
    }

    /// Gives pieces of one session back.
    pub(super) fn give_back(mut all: Vec<Self>) {
        Note::take_back(all.iter_mut().filter_map(|granted| granted.note.take()));
        drop(all);
    }
}

impl Held {
    /// What it is in a ledger.
    pub(super) fn piece(&self) -> HeldPiece {
        match self {
            Self::Slab(slab) => HeldPiece::reservation(slab),
            Self::Lease(slab) => HeldPiece::lease(slab),
        }
    }

    /// What it counts towards the client's share.
    pub(super) fn bytes(&self) -> u64 {
        counted(match self {
            Self::Slab(slab) => slab.len(),
            Self::Lease(slab) => slab.len(),
        })
    }
}

/// What a piece of that length counts: the smallest do not count for nothing, so that a client
/// cannot hold without end.
pub(super) fn counted(bytes: usize) -> u64 {
    bytes.max(COUNTED_MIN) as u64
}

/// A call that will grant holds.
#[derive(Debug)]
struct Coming {
    range: HoldRange,
    /// Those of them that the client gave back already, however often it says so.
    returned: HashSet<u64>,
}

/// What a client holds, in sums.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Sums {
    pub(super) leases: usize,
    pub(super) leased_bytes: u64,
    pub(super) reservations: usize,
    pub(super) reserved_bytes: u64,
    /// When the oldest lease was granted.
    pub(super) oldest_lease: Option<Duration>,
}

/// What a client holds. Each number is hashed four times on its way, so by a hash that is cheap; it
/// is keyed, because a client chooses its numbers.
#[derive(Debug, Default)]
pub(super) struct Holds {
    held: HashMap<u64, Granted, RandomState>,
    bytes: u64,
    coming: Vec<Coming>,
    /// No number from here on was ever used. Clients count up, so most numbers need no look.
    unused: u64,
    is_over: bool,
}

impl Holds {
    /// Bytes that the client holds.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// What a status says of it.
    pub(super) fn sums(&self) -> Sums {
        let mut sums = Sums::default();
        for Granted { held, since, .. } in self.held.values() {
            match held {
                Held::Slab(slab) => {
                    sums.reservations += 1;
                    sums.reserved_bytes += slab.len() as u64;
                }
                Held::Lease(slab) => {
                    sums.leases += 1;
                    sums.leased_bytes += slab.len() as u64;
                    let oldest = sums.oldest_lease.get_or_insert(*since);
                    *oldest = (*oldest).min(*since);
                }
            }
        }
        sums
    }

    /// A call that may grant these numbers begins. Refused if one of them is in use or none at all,
    /// or if the client is gone.
    pub(super) fn expect(&mut self, range: HoldRange) -> Result<(), StoreError> {
        let end = range.first.checked_add(u64::from(range.count)).ok_or_else(numbers_in_use)?;
        if range.first < self.unused {
            let is_coming = self.coming.iter().any(|coming| overlap(coming.range, range));
            if is_coming || numbers(range).any(|hold| self.held.contains_key(&hold)) {
                return Err(numbers_in_use());
            }
        }
        if self.is_over {
            return Err(StoreError::Closed);
        }
        self.unused = self.unused.max(end);
        self.coming.push(Coming { range, returned: HashSet::new() });
        Ok(())
    }

    /// Grants a hold. Gives it back when the client has returned it meanwhile, or is gone: dropping
    /// it is the caller's, outside the lock.
    pub(super) fn grant(&mut self, hold: u64, granted: Granted) -> Option<Granted> {
        let is_returned = self.coming.iter().any(|coming| coming.returned.contains(&hold));
        if is_returned || self.is_over {
            return Some(granted);
        }
        self.bytes += granted.held.bytes();
        let earlier = self.held.insert(hold, granted);
        debug_assert!(earlier.is_none(), "expect() refuses numbers in use");
        earlier
    }

    /// The call that was to grant these numbers is over.
    pub(super) fn expected(&mut self, range: HoldRange) {
        self.coming.retain(|coming| coming.range != range);
    }

    /// The client no longer needs these. Giving them back is the caller's.
    pub(super) fn release(&mut self, range: HoldRange) -> Vec<Granted> {
        for coming in &mut self.coming {
            let (coming_now, back) = (numbers(coming.range), numbers(range));
            let both = coming_now.start.max(back.start)..coming_now.end.min(back.end);
            coming.returned.extend(both);
        }
        let taken: Vec<Granted> = if self.held.len() < range.count as usize {
            let numbers = numbers(range);
            self.held.extract_if(|hold, _| numbers.contains(hold)).map(|(_, it)| it).collect()
        } else {
            numbers(range).filter_map(|hold| self.held.remove(&hold)).collect()
        };
        self.bytes -= taken.iter().map(|it| it.held.bytes()).sum::<u64>();
        taken
    }

    /// Takes a slab that the client has written. Its note stays until the block is in the catalog.
    pub(super) fn take_slab(&mut self, hold: u64) -> Option<(SlabMut, Option<Note>)> {
        let Entry::Occupied(entry) = self.held.entry(hold) else { return None };
        if !matches!(entry.get().held, Held::Slab(_)) {
            return None;
        }
        let Granted { note, held, .. } = entry.remove();
        self.bytes -= held.bytes();
        match held {
            Held::Slab(slab) => Some((slab, note)),
            Held::Lease(_) => None,
        }
    }

    /// Whether the client is gone.
    pub(super) fn is_over(&self) -> bool {
        self.is_over
    }

    /// The node stops: nothing is granted any more. What is held stays, and so do the notes, for
    /// the run after this one.
    pub(super) fn keep(&mut self) {
        self.is_over = true;
        for granted in self.held.values_mut() {
            if let Some(mut note) = granted.note.take() {
                note.id = None;
            }
        }
    }

    /// The client is gone: all that it held, and nothing is granted any more.
    pub(super) fn end(&mut self) -> Vec<Granted> {
        self.is_over = true;
        self.bytes = 0;
        self.held.drain().map(|(_, granted)| granted).collect()
    }
}

fn numbers_in_use() -> StoreError {
    StoreError::Config {
        setting: "hold",
        reason: "the client uses a number again that it still holds, or there are no more"
            .to_owned(),
    }
}

fn numbers(range: HoldRange) -> std::ops::Range<u64> {
    range.first..range.first.saturating_add(u64::from(range.count))
}

fn overlap(one: HoldRange, other: HoldRange) -> bool {
    let (one, other) = (numbers(one), numbers(other));
    one.start < other.end && other.start < one.end
}

#[cfg(test)]
mod tests {
    use cascade_memory::{HugePages, Pool, PoolConfig};

    use super::*;

    fn pool() -> Pool {
        let config =
            PoolConfig { capacity_bytes: 1 << 20, huge_pages: HugePages::Never, populate: false };
        Pool::new(&config).expect("a MiB is there")
    }

    fn slab(pool: &Pool) -> Granted {
        let slab = pool.allocate(4096).expect("the pool is large enough");
        Granted::new(Held::Slab(slab), None, Duration::ZERO)
    }

    const CALL: HoldRange = HoldRange { first: 10, count: 4 };

    #[test]
    fn what_is_returned_before_it_is_granted_goes_back_at_once() {
        let (pool, mut holds) = (pool(), Holds::default());
        holds.expect(CALL).expect("the numbers are new");
        assert!(holds.grant(10, slab(&pool)).is_none());
        // The client's deadline passes: it returns the whole call through another connection.
        assert_eq!(holds.release(CALL).len(), 1);
        assert!(holds.grant(11, slab(&pool)).is_some(), "nobody waits for it any more");
        holds.expected(CALL);
        assert_eq!((holds.bytes(), holds.sums()), (0, Sums::default()));
        drop(holds);
        assert_eq!(pool.stats().requested_bytes, 0);
    }

    #[test]
    fn numbers_in_use_are_not_granted_again() {
        let (pool, mut holds) = (pool(), Holds::default());
        holds.expect(CALL).expect("the numbers are new");
        assert!(holds.expect(HoldRange { first: 13, count: 1 }).is_err(), "coming");
        assert!(holds.grant(12, slab(&pool)).is_none());
        holds.expected(CALL);
        assert!(holds.expect(HoldRange { first: 12, count: 1 }).is_err(), "held");
        holds.expect(HoldRange { first: 13, count: 9 }).expect("the call of 13 is over");
        assert_eq!(holds.bytes(), 4096);
        assert!(holds.take_slab(13).is_none());
        assert!(holds.take_slab(12).is_some());
        assert_eq!(holds.bytes(), 0);
    }

    #[test]
    fn numbers_in_any_order_are_told_from_those_in_use() {
        let (pool, mut holds) = (pool(), Holds::default());
        holds.expect(CALL).expect("the numbers are new");
        assert!(holds.grant(12, slab(&pool)).is_none());
        holds.expected(CALL);
        holds.expect(HoldRange { first: 2, count: 8 }).expect("below those before");
        assert!(holds.expect(HoldRange { first: 5, count: 1 }).is_err(), "coming");
        assert!(holds.expect(HoldRange { first: 11, count: 9 }).is_err(), "held");
        assert!(holds.expect(HoldRange { first: u64::MAX, count: 1 }).is_err(), "no such number");
        holds.expect(HoldRange { first: u64::MAX - 1, count: 1 }).expect("the last one");
    }

    #[test]
    fn nothing_is_granted_to_a_client_that_is_gone() {
        let (pool, mut holds) = (pool(), Holds::default());
        holds.expect(CALL).expect("the numbers are new");
        assert!(holds.grant(10, slab(&pool)).is_none());
        assert_eq!(holds.end().len(), 1);
        assert!(holds.grant(11, slab(&pool)).is_some());
        assert!(holds.expect(HoldRange { first: 50, count: 1 }).is_err());
    }

    /// A client that gave the same numbers back again and again while a call was under way had the
    /// node remember each time: its memory grew without bound.
    #[test]
    fn giving_back_again_and_again_costs_no_memory() {
        let (pool, mut holds) = (pool(), Holds::default());
        holds.expect(CALL).expect("the numbers are new");
        for _ in 0..1000 {
            assert!(holds.release(HoldRange { first: 0, count: 60_000 }).is_empty());
        }
        assert_eq!(holds.coming[0].returned.len(), 4);
        assert!(holds.grant(13, slab(&pool)).is_some(), "it was given back ahead");
    }

    /// A hold of one byte takes 64 of the pool. Counted by length, a client could hold all of it.
    #[test]
    fn a_tiny_block_counts_with_what_it_takes_of_the_pool() {
        let (pool, mut holds) = (pool(), Holds::default());
        holds.expect(CALL).expect("the numbers are new");
        let tiny = pool.allocate(1).expect("the pool is empty");
        assert!(holds.grant(10, Granted::new(Held::Slab(tiny), None, Duration::ZERO)).is_none());
        assert_eq!(holds.bytes(), COUNTED_MIN as u64);
    }
}
