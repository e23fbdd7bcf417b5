//! Magazines: free extents of the sizes in use, in front of the heap, without locks.
//!
//! The table of sizes is a hint and may be stale at any moment: an extent carries its own length,
//! so a magazine that changed its size under a slow thread gives an extent of the wrong length,
//! which the caller sees and returns to the heap. Ownership passes through the queues alone.

use std::sync::atomic::{AtomicUsize, Ordering};

use crossbeam_queue::ArrayQueue;

use crate::heap::Extent;

/// Sizes that have a magazine at a time. Stores have one or two block sizes, tails a few more.
const MAGAZINES: usize = 16;

/// Most extents in a magazine.
const EXTENTS_MAX: usize = 64;

/// A magazine holds at most this share of the pool.
const CAPACITY_DIVISOR: usize = 16;

#[derive(Debug)]
pub(crate) struct Magazines {
    /// The size each magazine serves; 0 while nobody has claimed it.
    sizes: [AtomicUsize; MAGAZINES],
    queues: [ArrayQueue<Extent>; MAGAZINES],
    bytes_max: usize,
}

impl Magazines {
    pub(crate) fn new(capacity_bytes: usize) -> Self {
        Self {
            sizes: std::array::from_fn(|_| AtomicUsize::new(0)),
            queues: std::array::from_fn(|_| ArrayQueue::new(EXTENTS_MAX)),
            bytes_max: capacity_bytes / CAPACITY_DIVISOR,
        }
    }

    /// How many extents of that size may lie in a magazine; none of sizes that are too large.
    pub(crate) fn limit(&self, bytes: usize) -> usize {
        (self.bytes_max / bytes).min(EXTENTS_MAX)
    }

    /// A free extent from the magazine of that size. Its length may differ: see above.
    pub(crate) fn pop(&self, bytes: usize) -> Option<Extent> {
        self.queue(bytes)?.pop()
    }

    /// Keeps a free extent, or gives it back when its size has no magazine or a full one.
    pub(crate) fn push(&self, extent: Extent) -> Result<(), Extent> {
        match self.queue(extent.bytes) {
            Some(queue) if queue.len() < self.limit(extent.bytes) => queue.push(extent),
            _ => Err(extent),
        }
    }

    /// Claims a magazine for that size unless it has one; whether it has one now.
    ///
    /// For one caller at a time, together with `drain`: the pool calls both under its heap's lock.
    pub(crate) fn claim(&self, bytes: usize) -> bool {
        if self.limit(bytes) == 0 {
            return false;
        }
        let unclaimed = || self.sizes.iter().find(|size| size.load(Ordering::Relaxed) == 0);
        // Relaxed, here and below: a size is a hint and guards no memory.
        self.queue(bytes).is_some()
            || unclaimed().map(|size| size.store(bytes, Ordering::Relaxed)).is_some()
    }

    /// Empties all magazines and forgets their sizes.
    pub(crate) fn drain(&self, mut into: impl FnMut(Extent)) {
        for (size, queue) in self.sizes.iter().zip(&self.queues) {
            size.store(0, Ordering::Relaxed);
            while let Some(extent) = queue.pop() {
                into(extent);
            }
        }
    }

    /// Takes half of a full magazine out, so that the next releases find room.
    pub(crate) fn drain_half(&self, bytes: usize, mut into: impl FnMut(Extent)) {
        let Some(queue) = self.queue(bytes) else { return };
        for extent in std::iter::from_fn(|| queue.pop()).take(self.limit(bytes) / 2) {
            into(extent);
        }
    }

    fn queue(&self, bytes: usize) -> Option<&ArrayQueue<Extent>> {
        let index = self.sizes.iter().position(|size| size.load(Ordering::Relaxed) == bytes)?;
        Some(&self.queues[index])
    }
}
