//! Leases: a client that reads blocks through a mapping of its own, while the holds of a node keep
//! them.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use cascade_memory::{Attachment, Lender, Slab};
use cascade_runtime::now;
use cascade_store::Store;
use cascade_store::holds::{HeldMemory, Hold, HoldGuard, Holds};

use crate::content::{Content, IN_HOST_MEMORY};

/// The leases of one client, on both sides: what the node holds for it, and its own mapping.
pub(crate) struct Leases {
    holds: Holds<NoGuard>,
    mapping: Arc<Attachment>,
    next: u64,
    kept: VecDeque<(u32, Content, Lease)>,
}

/// A lease as its client knows it.
#[derive(Debug, Clone)]
pub(crate) struct Lease {
    number: u64,
    offset: usize,
    length: usize,
    mapping: Arc<Attachment>,
}

/// The holds of a simulation have no records on disk.
#[derive(Debug)]
struct NoGuard;

impl HoldGuard for NoGuard {
    fn release_all(guards: impl IntoIterator<Item = Self>) {
        guards.into_iter().for_each(drop);
    }

    fn keep(self) {}
}

/// The client of a simulation releases its holds by itself.
#[derive(Debug)]
struct NoLender;

impl Lender for NoLender {
    fn release_hold(&self, _: u64) {}
}

impl Leases {
    pub(crate) fn new(store: &Store) -> Self {
        let region = store.region();
        let host = region.host().expect(IN_HOST_MEMORY);
        let file = host.file().try_clone().expect("the process may open one more file");
        let mapping = Attachment::map(file.into(), region.bytes(), false, Arc::new(NoLender));
        Self {
            holds: Holds::default(),
            mapping: mapping.expect("the memory of a store can be mapped"),
            next: 0,
            kept: VecDeque::new(),
        }
    }

    /// Grants leases of the slabs of a call, by their place in it. With `is_given_up`, the client
    /// has released all numbers of the call before they are granted, and gets none.
    pub(crate) fn grant(
        &mut self,
        count: usize,
        is_given_up: bool,
        slab: impl Fn(usize) -> Option<Slab>,
    ) -> Vec<(usize, Lease)> {
        let count = u32::try_from(count).expect("a batch is short");
        let begun = self.holds.begin_grants(self.next, count);
        let numbers = begun.expect("the numbers are new");
        self.next = numbers.end;
        if is_given_up {
            Hold::release_all(self.holds.release(vec![numbers.clone()]));
        }
        let mut leased = Vec::new();
        let holds = numbers.clone().enumerate().filter_map(|(at, number)| {
            let slab = slab(at)?;
            let (offset, length) = (slab.offset(), slab.len());
            let mapping = Arc::clone(&self.mapping);
            leased.push((at, Lease { number, offset, length, mapping }));
            Some((number, Hold::new(HeldMemory::Lease(slab), None, now())))
        });
        let refused = self.holds.grant(&numbers, holds);
        leased.retain(|(_, lease)| refused.iter().all(|(number, _)| *number != lease.number));
        drop(refused);
        self.holds.finish_grants(&numbers);
        leased
    }

    /// Keeps a lease, to look at its bytes again later.
    pub(crate) fn keep(&mut self, lease: Lease, key: u32, content: Content) {
        self.kept.push_back((key, content, lease));
    }

    /// Takes the oldest lease, if there are more than so many, or more bytes.
    pub(crate) fn oldest(
        &mut self,
        most: usize,
        bytes_max: usize,
    ) -> Option<(u32, Content, Lease)> {
        let bytes: usize = self.kept.iter().map(|(_, _, lease)| lease.length).sum();
        if self.kept.len() > most || bytes > bytes_max { self.kept.pop_front() } else { None }
    }

    /// Ends a lease.
    pub(crate) fn end(&mut self, lease: &Lease) {
        let numbers = lease.number..lease.number + 1;
        Hold::release_all(self.holds.release(vec![numbers]));
    }
}

impl Lease {
    /// The bytes that the client reads through its mapping.
    pub(crate) fn bytes(&self) -> Slab {
        let lent = self.mapping.sealed(self.number, self.offset, self.length);
        lent.expect("a slab of the pool lies in its mapping")
    }
}

impl fmt::Debug for Leases {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Leases").field("kept", &self.kept).finish_non_exhaustive()
    }
}
