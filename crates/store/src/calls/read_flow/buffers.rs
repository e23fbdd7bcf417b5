//! The buffers of a copying get, and the blocks in DRAM that are to be copied to them.

use std::collections::VecDeque;
use std::sync::Arc;

use cascade_memory::{Slab, SlabMut};
use cascade_tier::{GetOutcome, TierName};

use super::PendingRead;
use super::copies::{Copies, Copy, copy_block};

/// With at least so many bytes to copy from DRAM while blocks are being loaded, a call starts a
/// second thread, which costs some 30 microseconds.
const SECOND_THREAD_BYTES_MIN: usize = 8 << 20;

/// The buffers of a copying get, and what was copied to them.
pub(super) struct CallerBuffers<'a, 'b> {
    pub(super) buffers: &'a mut [&'b mut [u8]],
    pub(super) copied: Vec<Option<GetOutcome>>,
    pub(super) batch_bytes: usize,
    /// Blocks in DRAM that are not copied yet, and their bytes.
    pub(super) hits: VecDeque<(usize, Slab, TierName)>,
    pub(super) hit_bytes: usize,
    /// Blocks in DRAM to look up again, because the call holds enough others. With their lengths.
    pub(super) deferred: VecDeque<(PendingRead, usize)>,
    /// Copies that a second thread makes, too.
    pub(super) copies: Option<Arc<Copies<'b>>>,
}

impl<'a, 'b> CallerBuffers<'a, 'b> {
    pub(super) fn new(buffers: &'a mut [&'b mut [u8]]) -> Self {
        let batch_bytes = buffers.iter().map(|buffer| buffer.len()).sum();
        let copied = buffers.iter().map(|_| None).collect();
        let (hits, deferred) = (VecDeque::new(), VecDeque::new());
        Self { buffers, copied, batch_bytes, hits, hit_bytes: 0, deferred, copies: None }
    }

    pub(super) fn copy(&mut self, index: usize, block: &Slab, tier: TierName) {
        let copy = |target: &mut [u8]| block.copy_to_in_batch(target, self.batch_bytes);
        self.copied[index] = Some(copy_block(self.buffers[index], block.len(), tier, copy));
    }

    /// As [`Self::copy`], from a slab that a stage has just read into.
    pub(super) fn copy_loaded(&mut self, index: usize, block: &SlabMut, tier: TierName) {
        let copy = |target: &mut [u8]| block.copy_to_in_batch(target, self.batch_bytes);
        self.copied[index] = Some(copy_block(self.buffers[index], block.len(), tier, copy));
    }

    /// Bytes of all slabs that the call has yet to copy from.
    pub(super) fn held_bytes(&self) -> usize {
        self.hit_bytes + self.copies.as_ref().map_or(0, |copies| copies.bytes())
    }

    /// Whether a second thread pays for the copies of blocks in DRAM.
    pub(super) fn wants_second_thread(&self) -> bool {
        let deferred = || self.deferred.iter().map(|(_, bytes)| bytes).sum::<usize>();
        self.hit_bytes + deferred() >= SECOND_THREAD_BYTES_MIN
    }

    /// Gives all blocks in DRAM to both threads, and makes one of the copies. Returns whether there
    /// was one.
    pub(super) fn copy_shared(&mut self) -> bool {
        let Some(copies) = &self.copies else { return false };
        self.hit_bytes = 0;
        for (index, slab, tier) in self.hits.drain(..) {
            let buffer = std::mem::take(&mut self.buffers[index]);
            copies.add(Copy { index, slab, tier, buffer });
        }
        copies.copy_one()
    }

    /// Takes the copies of a second thread that has ended.
    pub(super) fn end_copies(&mut self, copies: &Copies<'b>) {
        self.copies = None;
        for (index, buffer, outcome) in copies.take_done() {
            self.buffers[index] = buffer;
            self.copied[index] = Some(outcome);
        }
    }
}
