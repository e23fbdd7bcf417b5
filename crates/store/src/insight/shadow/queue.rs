//! A shadow of the file tier: a queue over a sample's names, reclaimed a segment at a time, oldest
//! first, that keeps blocks in use (`docs/decisions/0006-file-tier-eviction.md`).

use std::collections::{HashMap, VecDeque};

use super::Sample;

/// Rounds of one reclaim that keep blocks in use; after them, room has priority.
const ROUNDS_KEEPING: u32 = 4;

#[derive(Debug, Clone, Copy)]
struct QueueEntry {
    fingerprint: u64,
    bytes: u32,
    /// Distinguishes an entry from later ones of the same block.
    stamp: u32,
}

#[derive(Debug, Clone, Copy)]
struct QueuedBlock {
    stamp: u32,
    is_referenced: bool,
    is_protected: bool,
}

#[derive(Debug)]
pub(super) struct FilesShadow {
    entries: VecDeque<QueueEntry>,
    blocks: HashMap<u64, QueuedBlock>,
    used_bytes: u64,
    capacity_bytes: u64,
    segment_bytes: u64,
    stamp: u32,
}

impl FilesShadow {
    /// A shadow of a tier of `capacity_bytes`. As the tier does, it keeps one segment free.
    pub(super) fn new(capacity_bytes: u64, segment_bytes: u64) -> Self {
        Self {
            entries: VecDeque::new(),
            blocks: HashMap::new(),
            used_bytes: 0,
            capacity_bytes: capacity_bytes.saturating_sub(segment_bytes).max(1),
            segment_bytes: segment_bytes.max(1),
            stamp: 0,
        }
    }

    pub(super) fn holds(&self, fingerprint: u64) -> bool {
        self.blocks.contains_key(&fingerprint)
    }

    pub(super) fn len(&self) -> usize {
        self.blocks.len()
    }

    pub(super) fn memory_bytes(&self) -> usize {
        /// Overhead per entry of a `std` hash map.
        const CONTROL_BYTES: usize = 1;
        self.entries.capacity() * size_of::<QueueEntry>()
            + self.blocks.capacity() * (size_of::<(u64, QueuedBlock)>() + CONTROL_BYTES)
    }

    /// A block was read from here.
    pub(super) fn mark_referenced(&mut self, fingerprint: u64) {
        if let Some(block) = self.blocks.get_mut(&fingerprint) {
            block.is_referenced = true;
        }
    }

    /// Inserts a block, unless it is present.
    pub(super) fn insert(
        &mut self,
        fingerprint: u64,
        bytes: u32,
        is_protected: bool,
        is_in_dram: &dyn Fn(u64) -> bool,
    ) {
        if let Some(block) = self.blocks.get_mut(&fingerprint) {
            block.is_protected |= is_protected;
            return;
        }
        let mut rounds = 0;
        // An empty queue ends the loop, also for a block larger than the capacity.
        while self.used_bytes + u64::from(bytes) > self.capacity_bytes && !self.entries.is_empty() {
            self.reclaim_segment(rounds < ROUNDS_KEEPING, is_in_dram);
            rounds += 1;
        }
        self.stamp = self.stamp.wrapping_add(1);
        let block = QueuedBlock { stamp: self.stamp, is_referenced: false, is_protected };
        self.blocks.insert(fingerprint, block);
        self.push(QueueEntry { fingerprint, bytes, stamp: self.stamp });
    }

    /// Forgets a block; its bytes are freed with its segment.
    pub(super) fn remove(&mut self, fingerprint: u64) {
        self.blocks.remove(&fingerprint);
    }

    fn push(&mut self, entry: QueueEntry) {
        self.used_bytes += u64::from(entry.bytes);
        self.entries.push_back(entry);
    }

    fn reclaim_segment(&mut self, may_keep: bool, is_in_dram: &dyn Fn(u64) -> bool) {
        let mut taken = 0;
        let mut kept = Vec::new();
        while taken < self.segment_bytes
            && let Some(entry) = self.entries.pop_front()
        {
            taken += u64::from(entry.bytes);
            let block = self.blocks.get_mut(&entry.fingerprint);
            // The block was deleted since, and perhaps put again: this entry only takes space.
            let Some(block) = block.filter(|block| block.stamp == entry.stamp) else {
                continue;
            };
            // A reference is used up by the round that it survives; protection is not.
            let is_used = std::mem::take(&mut block.is_referenced) || block.is_protected;
            if may_keep && (is_used || is_in_dram(entry.fingerprint)) {
                kept.push(entry);
            } else {
                self.blocks.remove(&entry.fingerprint);
            }
        }
        // Kept entries are added again as the newest, with their stamps.
        self.used_bytes -= taken;
        for entry in kept {
            self.push(entry);
        }
    }

    /// Drops blocks outside a sample half as large, and halves the capacity.
    pub(super) fn thin(&mut self, sample: Sample) {
        self.entries.retain(|entry| sample.holds(entry.fingerprint));
        self.blocks.retain(|fingerprint, _| sample.holds(*fingerprint));
        // Counted again, because entries of deleted blocks hold bytes, too.
        self.used_bytes = self.entries.iter().map(|entry| u64::from(entry.bytes)).sum();
        self.capacity_bytes = (self.capacity_bytes / 2).max(1);
        self.segment_bytes = (self.segment_bytes / 2).max(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nowhere(_: u64) -> bool {
        false
    }

    #[test]
    fn reclaim_drops_the_oldest_segment_and_keeps_a_read_block_once() {
        let mut queue = FilesShadow::new(8 + 2, 2);
        (0..8).for_each(|block| queue.insert(block, 1, false, &nowhere));
        queue.mark_referenced(0);
        queue.insert(8, 1, false, &nowhere);
        assert!(queue.holds(0) && !queue.holds(1) && queue.holds(2) && queue.holds(8));
        (9..17).for_each(|block| queue.insert(block, 1, false, &nowhere));
        assert!(!queue.holds(0), "a reference keeps a block for one round");
    }

    #[test]
    fn a_block_in_dram_is_kept_for_a_bounded_number_of_rounds() {
        let mut queue = FilesShadow::new(4 + 1, 1);
        (0..4).for_each(|block| queue.insert(block, 1, false, &nowhere));
        queue.insert(4, 1, false, &|block| block == 0);
        assert!(queue.holds(0) && !queue.holds(1));
        queue.insert(5, 1, false, &|_| true);
        assert!(queue.holds(5) && queue.len() == 4);
    }

    #[test]
    fn a_deleted_block_can_be_put_again() {
        let mut queue = FilesShadow::new(4 + 1, 1);
        queue.insert(7, 1, false, &nowhere);
        queue.remove(7);
        assert!(!queue.holds(7));
        (0..3).for_each(|block| queue.insert(block, 1, false, &nowhere));
        queue.insert(7, 1, false, &nowhere);
        assert!(queue.holds(7) && queue.len() == 4, "the bytes of the first are freed");
    }
}
