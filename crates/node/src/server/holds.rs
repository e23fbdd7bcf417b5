//! What one client holds of the pool: slabs it writes and blocks it reads.
//!
//! A client numbers its holds and says which it no longer needs. It may say so before the node has
//! granted them: its call ran out of time, and it gives back whatever that call still brings.

use std::collections::HashMap;

use cascade_memory::{Slab, SlabMut};
use cascade_wire::HoldRange;

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

impl Held {
    /// What it counts towards the client's share.
    fn bytes(&self) -> u64 {
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
    /// Those that the client gave back already.
    returned: Vec<HoldRange>,
}

/// What a client holds.
#[derive(Debug, Default)]
pub(super) struct Holds {
    held: HashMap<u64, Held>,
    bytes: u64,
    coming: Vec<Coming>,
    is_over: bool,
}

impl Holds {
    /// Bytes that the client holds.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// How many pieces it holds, and how many of them it writes.
    pub(super) fn counts(&self) -> (usize, usize) {
        let writes = |held: &&Held| matches!(held, Held::Slab(_));
        (self.held.len(), self.held.values().filter(writes).count())
    }

    /// A call that may grant these numbers begins. False if one of them is in use or the client is
    /// gone.
    pub(super) fn expect(&mut self, range: HoldRange) -> bool {
        let is_coming = self.coming.iter().any(|coming| overlap(coming.range, range));
        let is_held = !self.held.is_empty() && numbers(range).any(|hold| self.has(hold));
        if is_coming || is_held || self.is_over {
            return false;
        }
        self.coming.push(Coming { range, returned: Vec::new() });
        true
    }

    fn has(&self, hold: u64) -> bool {
        self.held.contains_key(&hold)
    }

    /// Grants a hold. Gives it back when the client has returned it meanwhile, or is gone: dropping
    /// it is the caller's, outside the lock.
    pub(super) fn grant(&mut self, hold: u64, held: Held) -> Option<Held> {
        let is_returned = self
            .coming
            .iter()
            .any(|coming| coming.returned.iter().any(|range| numbers(*range).contains(&hold)));
        if is_returned || self.is_over {
            return Some(held);
        }
        self.bytes += held.bytes();
        let earlier = self.held.insert(hold, held);
        debug_assert!(earlier.is_none(), "expect() refuses numbers in use");
        earlier
    }

    /// The call that was to grant these numbers is over.
    pub(super) fn expected(&mut self, range: HoldRange) {
        self.coming.retain(|coming| coming.range != range);
    }

    /// The client no longer needs these. Dropping them is the caller's.
    pub(super) fn release(&mut self, range: HoldRange) -> Vec<Held> {
        for coming in &mut self.coming {
            if overlap(coming.range, range) {
                coming.returned.push(range);
            }
        }
        let taken: Vec<Held> = if self.held.len() < range.count as usize {
            let numbers = numbers(range);
            self.held.extract_if(|hold, _| numbers.contains(hold)).map(|(_, held)| held).collect()
        } else {
            numbers(range).filter_map(|hold| self.held.remove(&hold)).collect()
        };
        self.bytes -= taken.iter().map(Held::bytes).sum::<u64>();
        taken
    }

    /// Takes a slab that the client has written.
    pub(super) fn take_slab(&mut self, hold: u64) -> Option<SlabMut> {
        if !matches!(self.held.get(&hold), Some(Held::Slab(_))) {
            return None;
        }
        let held = self.held.remove(&hold)?;
        self.bytes -= held.bytes();
        match held {
            Held::Slab(slab) => Some(slab),
            Held::Lease(_) => None,
        }
    }

    /// The client is gone: all that it held, and nothing is granted any more.
    pub(super) fn end(&mut self) -> Vec<Held> {
        self.is_over = true;
        self.bytes = 0;
        self.held.drain().map(|(_, held)| held).collect()
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

    fn slab(pool: &Pool) -> Held {
        Held::Slab(pool.allocate(4096).expect("the pool is large enough"))
    }

    const CALL: HoldRange = HoldRange { first: 10, count: 4 };

    #[test]
    fn what_is_returned_before_it_is_granted_goes_back_at_once() {
        let (pool, mut holds) = (pool(), Holds::default());
        assert!(holds.expect(CALL));
        assert!(holds.grant(10, slab(&pool)).is_none());
        // The client's deadline passes: it returns the whole call through another connection.
        assert_eq!(holds.release(CALL).len(), 1);
        assert!(holds.grant(11, slab(&pool)).is_some(), "nobody waits for it any more");
        holds.expected(CALL);
        assert_eq!((holds.bytes(), holds.counts()), (0, (0, 0)));
        drop(holds);
        assert_eq!(pool.stats().requested_bytes, 0);
    }

    #[test]
    fn numbers_in_use_are_not_granted_again() {
        let (pool, mut holds) = (pool(), Holds::default());
        assert!(holds.expect(CALL));
        assert!(!holds.expect(HoldRange { first: 13, count: 1 }), "coming");
        assert!(holds.grant(12, slab(&pool)).is_none());
        holds.expected(CALL);
        assert!(!holds.expect(HoldRange { first: 12, count: 1 }), "held");
        assert!(holds.expect(HoldRange { first: 13, count: 9 }));
        assert_eq!(holds.bytes(), 4096);
        assert!(holds.take_slab(13).is_none());
        assert!(holds.take_slab(12).is_some());
        assert_eq!(holds.bytes(), 0);
    }

    #[test]
    fn nothing_is_granted_to_a_client_that_is_gone() {
        let (pool, mut holds) = (pool(), Holds::default());
        assert!(holds.expect(CALL));
        assert!(holds.grant(10, slab(&pool)).is_none());
        assert_eq!(holds.end().len(), 1);
        assert!(holds.grant(11, slab(&pool)).is_some());
        assert!(!holds.expect(HoldRange { first: 50, count: 1 }));
    }
}
