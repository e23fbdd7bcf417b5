//! The holds of one client: the slabs that it writes and the leases with which it reads.
//!
//! The client numbers its holds and releases them by number. It can release a hold before the node
//! grants it: when a call times out at the client, the client releases all holds of that call.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use cascade_memory::{Slab, SlabMut};
use cascade_store::{HeldId, HeldPiece, StoreError};
use cascade_wire::HoldRange;
use foldhash::fast::RandomState;

use crate::tenants::Tenant;

/// Minimum number of bytes that a hold counts towards a client's share.
const COUNTED_BYTES_MIN: usize = 1024;

/// Pool memory that a client holds.
#[derive(Debug)]
pub(super) enum HeldMemory {
    /// The client writes to it.
    Slab(SlabMut),
    /// The client reads from it.
    Lease(Slab),
}

/// The record of a hold in the tenant's ledger. While it exists, the next run of the node does not
/// reuse the memory. It is removed on drop.
#[derive(Debug)]
pub(super) struct LedgerGuard {
    tenant: Arc<Tenant>,
    id: Option<HeldId>,
}

impl LedgerGuard {
    pub(super) fn new(tenant: Arc<Tenant>, id: HeldId) -> Self {
        Self { tenant, id: Some(id) }
    }

    /// Removes the records of one session, and so of one tenant. Takes the ledger's lock once;
    /// dropping the guards would take it for each.
    pub(super) fn release_all(guards: impl IntoIterator<Item = Self>) {
        let mut tenant = None;
        // `take` leaves nothing for the drop of the guard, which would take the lock again.
        let mut id_of = |mut guard: Self| {
            tenant.get_or_insert_with(|| Arc::clone(&guard.tenant));
            guard.id.take()
        };
        // All guards have the same tenant, so one store gets all ids.
        let ids: Vec<HeldId> = guards.into_iter().filter_map(&mut id_of).collect();
        if let Some(tenant) = tenant {
            tenant.store().release_held(ids);
        }
    }
}

impl Drop for LedgerGuard {
    fn drop(&mut self) {
        if let Some(id) = self.id.take() {
            self.tenant.store().release_held([id]);
        }
    }
}

/// A granted hold. The field order matters: the ledger record is removed before the memory returns
/// to the pool, where another client could get it.
#[derive(Debug)]
pub(super) struct ClientHold {
    ledger: Option<LedgerGuard>,
    memory: HeldMemory,
    /// When it was granted.
    since: Duration,
}

impl ClientHold {
    pub(super) fn new(memory: HeldMemory, ledger: Option<LedgerGuard>, since: Duration) -> Self {
        Self { ledger, memory, since }
    }

    /// The bytes that it counts towards the client's share.
    pub(super) fn bytes(&self) -> u64 {
        self.memory.bytes()
    }

    /// Releases holds of one session: their ledger records first, then their memory.
    pub(super) fn release_all(mut all: Vec<Self>) {
        LedgerGuard::release_all(all.iter_mut().filter_map(|hold| hold.ledger.take()));
        drop(all);
    }
}

impl HeldMemory {
    /// Its description for the ledger.
    pub(super) fn piece(&self) -> HeldPiece {
        match self {
            Self::Slab(slab) => HeldPiece::reservation(slab),
            Self::Lease(slab) => HeldPiece::lease(slab),
        }
    }

    /// The bytes that it counts towards the client's share.
    pub(super) fn bytes(&self) -> u64 {
        counted_bytes(match self {
            Self::Slab(slab) => slab.len(),
            Self::Lease(slab) => slab.len(),
        })
    }
}

/// The bytes that a hold of this length counts towards the client's share. The minimum bounds the
/// number of small holds: each takes more of the pool and of the node's memory than its length.
pub(super) fn counted_bytes(bytes: usize) -> u64 {
    bytes.max(COUNTED_BYTES_MIN) as u64
}

/// A call in flight that may grant holds.
#[derive(Debug)]
struct PendingCall {
    range: HoldRange,
    /// The holds that the client released early. A set, because it may release one repeatedly.
    released: HashSet<u64>,
}

/// The totals of a client's holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct HoldTotals {
    pub(super) leases: usize,
    pub(super) leased_bytes: u64,
    pub(super) reservations: usize,
    pub(super) reserved_bytes: u64,
    /// When the oldest lease was granted.
    pub(super) oldest_lease: Option<Duration>,
}

/// The holds of a client by number. Each number is hashed about four times in its life, so the hash
/// is a cheap one. It is keyed, because the client chooses the numbers.
#[derive(Debug, Default)]
pub(super) struct Holds {
    held: HashMap<u64, ClientHold, RandomState>,
    bytes: u64,
    pending: Vec<PendingCall>,
    /// No number from this one on was used yet. Clients count up, so most numbers need no lookup.
    first_unused: u64,
    is_closed: bool,
}

impl Holds {
    /// The bytes that the client holds, as counted towards its share.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn totals(&self) -> HoldTotals {
        let mut totals = HoldTotals::default();
        for ClientHold { memory, since, .. } in self.held.values() {
            match memory {
                HeldMemory::Slab(slab) => {
                    totals.reservations += 1;
                    totals.reserved_bytes += slab.len() as u64;
                }
                HeldMemory::Lease(slab) => {
                    totals.leases += 1;
                    totals.leased_bytes += slab.len() as u64;
                    let oldest = totals.oldest_lease.get_or_insert(*since);
                    *oldest = (*oldest).min(*since);
                }
            }
        }
        totals
    }

    /// Registers a call that may grant these numbers.
    ///
    /// # Errors
    /// A number is in use or out of range, or the holds are closed.
    pub(super) fn begin_grants(&mut self, range: HoldRange) -> Result<(), StoreError> {
        let end = range.first.checked_add(u64::from(range.count)).ok_or_else(invalid_number)?;
        if range.first < self.first_unused {
            // The numbers of a call in flight are not in `held` yet.
            let is_pending = self.pending.iter().any(|call| overlap(call.range, range));
            if is_pending || hold_numbers(range).any(|hold| self.held.contains_key(&hold)) {
                return Err(invalid_number());
            }
        }
        if self.is_closed {
            return Err(StoreError::Closed);
        }
        // Calls may arrive out of order on several connections, so the mark never goes back.
        self.first_unused = self.first_unused.max(end);
        self.pending.push(PendingCall { range, released: HashSet::new() });
        Ok(())
    }

    /// Grants a hold. Returns it if the client released it early or the holds are closed; the
    /// caller drops it outside the lock.
    pub(super) fn grant(&mut self, number: u64, hold: ClientHold) -> Option<ClientHold> {
        // A client that gave up a call has released its holds. To grant one now would keep its
        // memory until the session ends.
        let is_released = self.pending.iter().any(|call| call.released.contains(&number));
        if is_released || self.is_closed {
            return Some(hold);
        }
        self.bytes += hold.bytes();
        let earlier = self.held.insert(number, hold);
        debug_assert!(earlier.is_none(), "begin_grants() refuses numbers in use");
        earlier
    }

    /// Removes a call that no longer grants holds.
    pub(super) fn finish_grants(&mut self, range: HoldRange) {
        self.pending.retain(|call| call.range != range);
    }

    /// Releases holds, and those that calls in flight may still grant. The caller drops the
    /// returned ones outside the lock.
    ///
    /// The client chooses number and length of the ranges, and they may overlap. They are merged
    /// first, so that the work is bounded by the length of the message and the number of holds.
    pub(super) fn release(&mut self, ranges: &[HoldRange]) -> Vec<ClientHold> {
        let ranges = merge_ranges(ranges);
        for call in &mut self.pending {
            let numbers = hold_numbers(call.range);
            // Only numbers of the call are kept: a released range may be far longer.
            let first = ranges.partition_point(|range| range.end <= numbers.start);
            let overlapping = ranges[first..].iter().take_while(|it| it.start < numbers.end);
            call.released.extend(
                overlapping.flat_map(|it| it.start.max(numbers.start)..it.end.min(numbers.end)),
            );
        }
        let count = ranges.iter().map(|range| range.end - range.start).sum::<u64>();
        // Iterate over the smaller of the two.
        let released: Vec<ClientHold> = if (self.held.len() as u64) < count {
            let is_released = |hold: &u64, _: &mut ClientHold| {
                let at = ranges.partition_point(|range| range.end <= *hold);
                ranges.get(at).is_some_and(|range| range.contains(hold))
            };
            self.held.extract_if(is_released).map(|(_, hold)| hold).collect()
        } else {
            ranges.into_iter().flatten().filter_map(|hold| self.held.remove(&hold)).collect()
        };
        self.bytes -= released.iter().map(ClientHold::bytes).sum::<u64>();
        released
    }

    /// Takes a slab that the client has written. The caller releases its ledger record before the
    /// slab.
    pub(super) fn take_slab(&mut self, hold: u64) -> Option<(SlabMut, Option<LedgerGuard>)> {
        let Entry::Occupied(entry) = self.held.entry(hold) else { return None };
        // A lease stays held: its memory belongs to a block that is stored already.
        if !matches!(entry.get().memory, HeldMemory::Slab(_)) {
            return None;
        }
        // Looked at before it is removed, so that no path has to insert it again.
        let ClientHold { ledger, memory, .. } = entry.remove();
        self.bytes -= memory.bytes();
        match memory {
            HeldMemory::Slab(slab) => Some((slab, ledger)),
            HeldMemory::Lease(_) => None,
        }
    }

    /// Whether nothing is granted any more.
    pub(super) fn is_closed(&self) -> bool {
        self.is_closed
    }

    /// Closes the holds when the node stops. The memory stays held, and the ledger records stay for
    /// the next run.
    pub(super) fn retain(&mut self) {
        self.is_closed = true;
        for hold in self.held.values_mut() {
            // Without its id, the guard removes no record when it is dropped.
            if let Some(mut guard) = hold.ledger.take() {
                guard.id = None;
            }
        }
    }

    /// Closes the holds when the client is gone. Returns all of them.
    pub(super) fn close(&mut self) -> Vec<ClientHold> {
        // Calls in flight see `is_closed` and get their holds back from `grant`.
        self.is_closed = true;
        self.bytes = 0;
        self.held.drain().map(|(_, hold)| hold).collect()
    }
}

fn invalid_number() -> StoreError {
    StoreError::Config {
        setting: "hold",
        reason: "the client reuses the number of a hold that it has not released, or a number is \
                 out of range"
            .to_owned(),
    }
}

fn hold_numbers(range: HoldRange) -> Range<u64> {
    range.first..range.first.saturating_add(u64::from(range.count))
}

/// The same numbers in ascending order, each in one range only.
fn merge_ranges(ranges: &[HoldRange]) -> Vec<Range<u64>> {
    let mut merged: Vec<Range<u64>> = ranges.iter().copied().map(hold_numbers).collect();
    merged.sort_unstable_by_key(|range| range.start);
    // The closure gets the later range first. It removes that one after it extended the earlier.
    merged.dedup_by(|later, earlier| {
        let is_adjacent = later.start <= earlier.end;
        if is_adjacent {
            earlier.end = earlier.end.max(later.end);
        }
        is_adjacent
    });
    merged
}

fn overlap(one: HoldRange, other: HoldRange) -> bool {
    let (one, other) = (hold_numbers(one), hold_numbers(other));
    one.start < other.end && other.start < one.end
}

#[cfg(test)]
mod tests {
    use cascade_memory::{HugePages, Pool, PoolConfig};

    use super::*;

    fn pool() -> Pool {
        let config =
            PoolConfig { capacity_bytes: 1 << 20, huge_pages: HugePages::Never, populate: false };
        Pool::new(&config).expect("1 MiB can be allocated")
    }

    fn slab(pool: &Pool) -> ClientHold {
        let slab = pool.allocate(4096).expect("the pool is large enough");
        ClientHold::new(HeldMemory::Slab(slab), None, Duration::ZERO)
    }

    const CALL: HoldRange = HoldRange { first: 10, count: 4 };

    #[test]
    fn a_hold_that_is_released_early_is_not_granted() {
        let (pool, mut holds) = (pool(), Holds::default());
        holds.begin_grants(CALL).expect("the numbers are new");
        assert!(holds.grant(10, slab(&pool)).is_none());
        // The call times out at the client, which releases all its holds on another connection.
        assert_eq!(holds.release(&[CALL]).len(), 1);
        assert!(holds.grant(11, slab(&pool)).is_some(), "it was released early");
        holds.finish_grants(CALL);
        assert_eq!((holds.bytes(), holds.totals()), (0, HoldTotals::default()));
        drop(holds);
        assert_eq!(pool.stats().requested_bytes, 0);
    }

    #[test]
    fn numbers_in_use_are_refused() {
        let (pool, mut holds) = (pool(), Holds::default());
        holds.begin_grants(CALL).expect("the numbers are new");
        assert!(holds.begin_grants(HoldRange { first: 13, count: 1 }).is_err(), "pending");
        assert!(holds.grant(12, slab(&pool)).is_none());
        holds.finish_grants(CALL);
        assert!(holds.begin_grants(HoldRange { first: 12, count: 1 }).is_err(), "held");
        holds.begin_grants(HoldRange { first: 13, count: 9 }).expect("13 was not granted");
        assert_eq!(holds.bytes(), 4096);
        assert!(holds.take_slab(13).is_none());
        assert!(holds.take_slab(12).is_some());
        assert_eq!(holds.bytes(), 0);
    }

    #[test]
    fn numbers_need_not_count_up() {
        let (pool, mut holds) = (pool(), Holds::default());
        holds.begin_grants(CALL).expect("the numbers are new");
        assert!(holds.grant(12, slab(&pool)).is_none());
        holds.finish_grants(CALL);
        holds.begin_grants(HoldRange { first: 2, count: 8 }).expect("lower numbers are free");
        assert!(holds.begin_grants(HoldRange { first: 5, count: 1 }).is_err(), "pending");
        assert!(holds.begin_grants(HoldRange { first: 11, count: 9 }).is_err(), "held");
        let beyond = HoldRange { first: u64::MAX, count: 1 };
        assert!(holds.begin_grants(beyond).is_err(), "out of range");
        holds.begin_grants(HoldRange { first: u64::MAX - 1, count: 1 }).expect("the last number");
    }

    #[test]
    fn closed_holds_grant_nothing() {
        let (pool, mut holds) = (pool(), Holds::default());
        holds.begin_grants(CALL).expect("the numbers are new");
        assert!(holds.grant(10, slab(&pool)).is_none());
        assert_eq!(holds.close().len(), 1);
        assert!(holds.grant(11, slab(&pool)).is_some());
        assert!(holds.begin_grants(HoldRange { first: 50, count: 1 }).is_err());
    }

    /// A client released the same numbers again and again while a call was in flight. The node
    /// stored every release, and its memory grew without bound.
    #[test]
    fn repeated_early_releases_take_no_further_memory() {
        let (pool, mut holds) = (pool(), Holds::default());
        holds.begin_grants(CALL).expect("the numbers are new");
        for _ in 0..1000 {
            assert!(holds.release(&[HoldRange { first: 0, count: 60_000 }]).is_empty());
        }
        assert_eq!(holds.pending[0].released.len(), 4);
        assert!(holds.grant(13, slab(&pool)).is_some(), "it was released early");
    }

    /// Each range of a message was compared with all holds. With 65,536 wide ranges and 262,144
    /// holds, one message kept a thread of the node busy for minutes.
    #[test]
    fn a_message_of_many_wide_ranges_is_compared_once_with_all_holds() {
        let (pool, mut holds) = (pool(), Holds::default());
        holds.begin_grants(HoldRange { first: 100, count: 9000 }).expect("the numbers are new");
        for number in 100..9100 {
            let tiny = pool.allocate(1).expect("64 bytes each");
            let hold = ClientHold::new(HeldMemory::Slab(tiny), None, Duration::ZERO);
            assert!(holds.grant(number, hold).is_none());
        }
        let beyond = HoldRange { first: 9_000, count: u32::MAX };
        assert_eq!(holds.release(&vec![beyond; 65_536]).len(), 100);
        let ranges = [(105, 2), (100, 3), (104, 2), (0, 101), (8_999, 0)];
        let ranges = ranges.map(|(first, count)| HoldRange { first, count });
        assert_eq!(holds.release(&ranges).len(), 6, "100 to 102 and 104 to 106");
        assert!(holds.take_slab(103).is_some() && holds.take_slab(106).is_none());
        assert_eq!(holds.totals().reservations, 9000 - 100 - 6 - 1);
        assert_eq!(holds.bytes(), (holds.totals().reservations * COUNTED_BYTES_MIN) as u64);
    }

    /// A hold of one byte takes 64 bytes of the pool. Counted by length, a client could hold all of
    /// the pool.
    #[test]
    fn a_small_hold_counts_with_the_minimum() {
        let (pool, mut holds) = (pool(), Holds::default());
        holds.begin_grants(CALL).expect("the numbers are new");
        let tiny = pool.allocate(1).expect("the pool is empty");
        assert!(
            holds
                .grant(10, ClientHold::new(HeldMemory::Slab(tiny), None, Duration::ZERO))
                .is_none()
        );
        assert_eq!(holds.bytes(), COUNTED_BYTES_MIN as u64);
    }
}
