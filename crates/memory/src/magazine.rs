//! Magazines: lock-free caches of free extents of the sizes in use, in front of the heap.
//!
//! The table of sizes is a hint and may be stale at any moment. An extent carries its own length:
//! if a magazine changes its size while a thread pops from it, the thread gets an extent of another
//! length, notices, and frees it to the heap. Ownership passes through the queues alone.

use crate::heap::Extent;
use crate::sync::{ArrayQueue, AtomicUsize, Ordering};

/// Sizes that have a magazine at a time. Stores have one or two block sizes, tails a few more.
const MAGAZINES: usize = if cfg!(loom) { 1 } else { 16 };

/// Most extents in a magazine: those of a batch of 256 blocks, and a refill. A batch that is put
/// when another was freed then takes nothing from the heap, which costs several times as much.
const EXTENTS_MAX: usize = if cfg!(loom) { 2 } else { 256 + 2 * MOVED_MAX };

/// Most extents that the heap's lock is held for at a time to fill a magazine, or to make room.
const MOVED_MAX: usize = 32;

/// A magazine holds at most this share of the pool.
const CAPACITY_DIVISOR: usize = 16;

#[derive(Debug)]
pub(crate) struct Magazines {
    /// The size that each magazine serves; 0 while unclaimed.
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

    /// How many extents of this size a magazine may hold; 0 for sizes that are too large.
    pub(crate) fn limit(&self, bytes: usize) -> usize {
        (self.bytes_max / bytes).min(EXTENTS_MAX)
    }

    /// How many extents of this size move between magazine and heap at a time: half of the limit,
    /// so that both allocations and releases find some.
    pub(crate) fn moved(&self, bytes: usize) -> usize {
        (self.limit(bytes) / 2).min(MOVED_MAX)
    }

    /// A free extent from the magazine of this size. Its length may differ: see the module.
    pub(crate) fn pop(&self, bytes: usize) -> Option<Extent> {
        self.queue(bytes)?.pop()
    }

    /// Caches a free extent, or returns it if its size has no magazine or a full one.
    pub(crate) fn push(&self, extent: Extent) -> Result<(), Extent> {
        match self.queue(extent.bytes) {
            // Other threads may push after the check, so the limit is approximate. The queue's
            // capacity is exact.
            Some(queue) if queue.len() < self.limit(extent.bytes) => queue.push(extent),
            _ => Err(extent),
        }
    }

    /// Claims a magazine for this size unless it has one. Returns whether it has one now.
    ///
    /// Not concurrently with itself or `drain`: the pool calls both under the heap's lock.
    pub(crate) fn claim(&self, bytes: usize) -> bool {
        if self.limit(bytes) == 0 {
            return false;
        }
        let unclaimed = || self.sizes.iter().find(|size| size.load(Ordering::Relaxed) == 0);
        // Relaxed, here and below: a size is a hint and guards no memory.
        self.queue(bytes).is_some()
            || unclaimed().map(|size| size.store(bytes, Ordering::Relaxed)).is_some()
    }

    /// Empties all magazines and clears their sizes.
    pub(crate) fn drain(&self, mut into: impl FnMut(Extent)) {
        for (size, queue) in self.sizes.iter().zip(&self.queues) {
            // A thread that read the size before may still push. Its extent stays in the queue
            // until the next drain or pop; who pops checks its length.
            size.store(0, Ordering::Relaxed);
            while let Some(extent) = queue.pop() {
                into(extent);
            }
        }
    }

    /// Removes some extents of a full magazine, so that the next releases find room.
    pub(crate) fn drain_some(&self, bytes: usize, mut into: impl FnMut(Extent)) {
        let Some(queue) = self.queue(bytes) else { return };
        for extent in std::iter::from_fn(|| queue.pop()).take(self.moved(bytes)) {
            into(extent);
        }
    }

    fn queue(&self, bytes: usize) -> Option<&ArrayQueue<Extent>> {
        let index = self.sizes.iter().position(|size| size.load(Ordering::Relaxed) == bytes)?;
        Some(&self.queues[index])
    }
}

/// Every interleaving of two or three threads. One of them stands for the holder of the heap's
/// lock.
#[cfg(all(test, loom))]
mod loom_models {
    use std::sync::Arc;

    use loom::thread;

    use super::*;

    fn extent(offset: usize, bytes: usize) -> Extent {
        Extent { offset, bytes }
    }

    /// Everything that the threads hold and the magazines keep, by offset.
    fn all(magazines: &Magazines, held: impl IntoIterator<Item = Extent>) -> Vec<usize> {
        let mut offsets: Vec<usize> = held.into_iter().map(|extent| extent.offset).collect();
        magazines.drain(|extent| offsets.push(extent.offset));
        offsets.sort_unstable();
        offsets
    }

    #[test]
    fn loom_no_extent_is_lost_or_duplicated_while_sizes_change() {
        loom::model(|| {
            let magazines = Arc::new(Magazines::new(1 << 20));
            assert!(magazines.claim(64));
            magazines.push(extent(0, 64)).expect("there is room");
            let user = {
                let magazines = Arc::clone(&magazines);
                thread::spawn(move || {
                    let taken = magazines.pop(64)?;
                    magazines.push(taken).err()
                })
            };
            // The holder of the heap's lock assigns the only magazine to another size.
            let mut heap = Vec::new();
            magazines.drain(|extent| heap.push(extent));
            assert!(magazines.claim(128));
            heap.extend(magazines.push(extent(64, 128)).err());
            heap.extend(user.join().expect("the user finishes"));
            assert_eq!(all(&magazines, heap), [0, 64]);
        });
    }

    #[test]
    fn loom_two_users_never_hold_the_same_extent() {
        loom::model(|| {
            let magazines = Arc::new(Magazines::new(1 << 20));
            assert!(magazines.claim(64));
            magazines.push(extent(0, 64)).expect("there is room");
            magazines.push(extent(64, 64)).expect("there is room");
            let other = {
                let magazines = Arc::clone(&magazines);
                thread::spawn(move || magazines.pop(64))
            };
            let ours = magazines.pop(64);
            let mut heap = Vec::new();
            magazines.drain(|extent| heap.push(extent));
            heap.extend(ours);
            heap.extend(other.join().expect("the other user finishes"));
            assert_eq!(all(&magazines, heap), [0, 64]);
        });
    }
}
