//! The holds of one client: the slabs that it writes and the leases with which it reads.
//!
//! The client numbers its holds and releases them by number. It can release a hold before the node
//! grants it: when a call times out at the client, the client releases all holds of that call.

mod granted;

use std::collections::HashSet;
use std::ops::Range;
use std::time::Duration;

use cascade_memory::{Slab, SlabMut};
use cascade_runtime::{Plant, is_planted};
use cascade_tier::StoreError;

use crate::HeldPiece;
use granted::GrantedHolds;

/// Minimum number of bytes that a hold counts towards a client's share.
const COUNTED_BYTES_MIN: usize = 1024;

/// Pool memory that a client holds.
#[derive(Debug)]
pub enum HeldMemory {
    /// The client writes to it.
    Slab(SlabMut),
    /// The client reads from it.
    Lease(Slab),
}

/// Something that exists as long as the hold, such as its record in a ledger.
pub trait HoldGuard: Sized {
    /// Releases several at once.
    fn release_all(guards: impl IntoIterator<Item = Self>);

    /// Lets what it guards outlive this process.
    fn keep(self);
}

/// A granted hold. The field order matters: the guard is released before the memory returns to the
/// pool, where another client could get it.
#[derive(Debug)]
pub struct Hold<G> {
    guard: Option<G>,
    memory: HeldMemory,
    /// When it was granted.
    since: Duration,
}

impl<G: HoldGuard> Hold<G> {
    /// A hold granted at a time.
    pub fn new(memory: HeldMemory, guard: Option<G>, since: Duration) -> Self {
        Self { guard, memory, since }
    }

    /// The bytes that it counts towards the client's share.
    #[inline]
    pub fn bytes(&self) -> u64 {
        self.memory.bytes()
    }

    /// Releases holds of one client: their guards first, then their memory.
    pub fn release_all(mut all: Vec<Self>) {
        G::release_all(all.iter_mut().filter_map(|hold| hold.guard.take()));
        drop(all);
    }
}

impl HeldMemory {
    /// Its description for the ledger.
    #[inline]
    pub fn piece(&self) -> HeldPiece {
        match self {
            Self::Slab(slab) => HeldPiece::reservation(slab),
            Self::Lease(slab) => HeldPiece::lease(slab),
        }
    }

    /// The bytes that it counts towards the client's share.
    #[inline]
    pub fn bytes(&self) -> u64 {
        counted_bytes(match self {
            Self::Slab(slab) => slab.len(),
            Self::Lease(slab) => slab.len(),
        })
    }
}

/// The bytes that a hold of this length counts towards the client's share. The minimum bounds the
/// number of small holds: each takes more of the pool and of the node's memory than its length.
#[inline]
pub fn counted_bytes(bytes: usize) -> u64 {
    bytes.max(COUNTED_BYTES_MIN) as u64
}

/// A call in flight that may grant holds.
#[derive(Debug)]
struct PendingCall {
    numbers: Range<u64>,
    /// The holds that the client released early. A set, because it may release one repeatedly.
    released: HashSet<u64>,
}

/// The totals of a client's holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HoldTotals {
    /// Number of leases.
    pub leases: usize,
    /// Bytes of their blocks.
    pub leased_bytes: u64,
    /// Number of slabs that the client writes.
    pub reservations: usize,
    /// Bytes of these slabs.
    pub reserved_bytes: u64,
    /// When the oldest lease was granted.
    pub oldest_lease: Option<Duration>,
}

/// The holds of a client by number.
#[derive(Debug)]
pub struct Holds<G> {
    held: GrantedHolds<G>,
    bytes: u64,
    pending: Vec<PendingCall>,
    /// No number from this one on was used yet. Clients count up, so most numbers need no lookup.
    first_unused: u64,
    is_closed: bool,
}

impl<G> Default for Holds<G> {
    fn default() -> Self {
        Self {
            held: GrantedHolds::default(),
            bytes: 0,
            pending: Vec::new(),
            first_unused: 0,
            is_closed: false,
        }
    }
}

impl<G: HoldGuard> Holds<G> {
    /// The bytes that the client holds, as counted towards its share.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The totals of all holds.
    pub fn totals(&self) -> HoldTotals {
        let mut totals = HoldTotals::default();
        for Hold { memory, since, .. } in self.held.iter() {
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

    /// Registers a call that may grant so many numbers from the first one on, and returns them.
    ///
    /// # Errors
    /// A number is in use or out of range, or the holds are closed.
    pub fn begin_grants(&mut self, first: u64, count: u32) -> Result<Range<u64>, StoreError> {
        let end = first.checked_add(u64::from(count)).ok_or_else(invalid_number)?;
        let numbers = first..end;
        if numbers.start < self.first_unused {
            // The numbers of a call in flight are not in `held` yet.
            let is_pending = self.pending.iter().any(|call| overlap(&call.numbers, &numbers));
            if is_pending || !self.held.make_way(&numbers) {
                return Err(invalid_number());
            }
        }
        if self.is_closed {
            return Err(StoreError::Closed);
        }
        // Calls may arrive out of order on several connections, so the mark never goes back.
        self.first_unused = self.first_unused.max(end);
        self.pending.push(PendingCall { numbers: numbers.clone(), released: HashSet::new() });
        Ok(numbers)
    }

    /// Grants the holds of a call, which [`Self::begin_grants`] has registered, by their numbers.
    /// Returns those that the client released early, and all if the holds are closed; the caller
    /// drops them outside the lock.
    pub fn grant(
        &mut self,
        numbers: &Range<u64>,
        holds: impl IntoIterator<Item = (u64, Hold<G>)>,
    ) -> Vec<(u64, Hold<G>)> {
        let Self { held, bytes, pending, is_closed, .. } = self;
        // A client that gave up a call has released its holds. To grant one now would keep its
        // memory until the session ends.
        let call = pending.iter().find(|call| call.numbers == *numbers);
        let Some(call) = call.filter(|_| !*is_closed) else {
            return holds.into_iter().collect();
        };
        let group = held.group(numbers);
        let mut refused = Vec::new();
        for (number, hold) in holds {
            if call.released.contains(&number) {
                refused.push((number, hold));
                continue;
            }
            if is_planted(Plant::OutlivingLease) && matches!(hold.memory, HeldMemory::Lease(_)) {
                continue;
            }
            let added = hold.bytes();
            let held_already = group.insert(number, hold);
            debug_assert!(held_already.is_none(), "begin_grants() refuses numbers in use");
            *bytes += if held_already.is_none() { added } else { 0 };
            refused.extend(held_already.map(|hold| (number, hold)));
        }
        refused
    }

    /// Removes a call that no longer grants holds.
    pub fn finish_grants(&mut self, numbers: &Range<u64>) {
        self.pending.retain(|call| call.numbers != *numbers);
        self.held.finish(numbers);
    }

    /// Releases holds, and those that calls in flight may still grant. The caller drops the
    /// returned ones outside the lock.
    ///
    /// The client chooses number and length of the ranges, and they may overlap. They are merged
    /// first, so that the work is bounded by the length of the message and the number of holds.
    pub fn release(&mut self, ranges: Vec<Range<u64>>) -> Vec<Hold<G>> {
        let ranges = merge_ranges(ranges);
        for call in &mut self.pending {
            let numbers = &call.numbers;
            // Only numbers of the call are kept: a released range may be far longer.
            let first = ranges.partition_point(|range| range.end <= numbers.start);
            let overlapping = ranges[first..].iter().take_while(|it| it.start < numbers.end);
            call.released.extend(
                overlapping.flat_map(|it| it.start.max(numbers.start)..it.end.min(numbers.end)),
            );
        }
        let mut released = Vec::new();
        for range in &ranges {
            self.held.remove(range, &mut released);
        }
        self.bytes -= released.iter().map(Hold::bytes).sum::<u64>();
        released
    }

    /// Takes slabs that the client has written, in the order of these numbers; none for a number
    /// that is not a slab. The caller releases the ledger record of a slab before the slab.
    pub fn take_slabs(
        &mut self,
        numbers: impl IntoIterator<Item = u64>,
        mut take: impl FnMut(Option<(SlabMut, Option<G>)>),
    ) {
        let Self { held, bytes, .. } = self;
        held.take_slabs(numbers, |hold| {
            take(hold.and_then(|Hold { guard, memory, .. }| match memory {
                HeldMemory::Slab(slab) => {
                    *bytes -= counted_bytes(slab.len());
                    Some((slab, guard))
                }
                HeldMemory::Lease(_) => None,
            }));
        });
    }

    /// Whether nothing is granted any more.
    pub fn is_closed(&self) -> bool {
        self.is_closed
    }

    /// Closes the holds when the node stops. The memory stays held, and the ledger records stay for
    /// the next run.
    pub fn retain(&mut self) {
        self.is_closed = true;
        for hold in self.held.iter_mut() {
            if let Some(guard) = hold.guard.take() {
                guard.keep();
            }
        }
    }

    /// Closes the holds when the client is gone. Returns all of them.
    pub fn close(&mut self) -> Vec<Hold<G>> {
        // Calls in flight see `is_closed` and get their holds back from `grant`.
        self.is_closed = true;
        self.bytes = 0;
        self.held.take_all()
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

/// The same numbers in ascending order, each in one range only.
fn merge_ranges(mut merged: Vec<Range<u64>>) -> Vec<Range<u64>> {
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

fn overlap(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start < other.end && other.start < one.end
}

#[cfg(test)]
mod tests;
