//! A hash table from 64-bit fingerprints to 32-bit indices, in 256 shards that grow one by one.
//!
//! The key stays in the caller's entry, so a slot costs eight bytes, and a lookup is two memory
//! accesses (slot, entry) that a batch can overlap. Growing one shard of 256 keeps the pause at ten
//! million keys under a millisecond. Linear probing; removal shifts later slots back.

use cascade_memory::prefetch;

const SHARD_BITS: u32 = 8;
const SHARDS: usize = 1 << SHARD_BITS;
const SLOTS_MIN: usize = 8;

/// Fingerprints to indices.
#[derive(Debug)]
pub(crate) struct KeyTable {
    shards: Vec<Shard>,
}

#[derive(Debug, Default)]
struct Shard {
    /// Tag in the high half, index + 1 in the low half; zero is free. Length: a power of two.
    slots: Vec<u64>,
    len: usize,
}

impl KeyTable {
    pub(crate) fn new() -> Self {
        Self { shards: (0..SHARDS).map(|_| Shard::default()).collect() }
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        self.shards.iter().map(|shard| shard.slots.capacity() * size_of::<u64>()).sum()
    }

    /// The index under this fingerprint for which `is_it` holds.
    pub(crate) fn find(&self, fingerprint: u64, is_it: impl Fn(u32) -> bool) -> Option<u32> {
        let shard = &self.shards[shard_of(fingerprint)];
        let tag = tag_of(fingerprint);
        let mut at = shard.home(tag)?;
        loop {
            let slot = shard.slots[at];
            if slot == 0 {
                return None;
            }
            // Tags may be equal for different keys, so the caller compares the key itself.
            if tag_in(slot) == tag && is_it(index_in(slot)) {
                return Some(index_in(slot));
            }
            at = shard.after(at);
        }
    }

    /// Prefetches the slot where the search for a fingerprint starts.
    pub(crate) fn prefetch(&self, fingerprint: u64) {
        let shard = &self.shards[shard_of(fingerprint)];
        if let Some(home) = shard.home(tag_of(fingerprint)) {
            prefetch(&shard.slots[home]);
        }
    }

    /// The index in the home slot, if its tag matches: almost always the right one, with one read.
    pub(crate) fn candidate(&self, fingerprint: u64) -> Option<u32> {
        let shard = &self.shards[shard_of(fingerprint)];
        let slot = shard.slots[shard.home(tag_of(fingerprint))?];
        (slot != 0 && tag_in(slot) == tag_of(fingerprint)).then(|| index_in(slot))
    }

    /// Adds an index, which must not be present.
    pub(crate) fn insert(&mut self, fingerprint: u64, index: u32) {
        let shard = &mut self.shards[shard_of(fingerprint)];
        // At most seven eighths are in use, so each search meets a free slot and ends.
        if (shard.len + 1) * 8 > shard.slots.len() * 7 {
            shard.grow();
        }
        shard.place(pack(tag_of(fingerprint), index));
        shard.len += 1;
    }

    /// Removes an index, which must be present.
    pub(crate) fn remove(&mut self, fingerprint: u64, index: u32) {
        let was_present = self.remove_if_present(fingerprint, index);
        assert!(was_present, "a removed index is present");
    }

    /// Removes an index if it is present; returns whether it was.
    pub(crate) fn remove_if_present(&mut self, fingerprint: u64, index: u32) -> bool {
        let shard = &mut self.shards[shard_of(fingerprint)];
        let wanted = pack(tag_of(fingerprint), index);
        let Some(mut at) = shard.home(tag_of(fingerprint)) else { return false };
        while shard.slots[at] != wanted {
            if shard.slots[at] == 0 {
                return false;
            }
            at = shard.after(at);
        }
        shard.close_gap(at);
        shard.len -= 1;
        true
    }
}

impl Shard {
    fn home(&self, tag: u32) -> Option<usize> {
        (!self.slots.is_empty()).then(|| tag as usize & (self.slots.len() - 1))
    }

    fn after(&self, at: usize) -> usize {
        (at + 1) & (self.slots.len() - 1)
    }

    fn place(&mut self, slot: u64) {
        let mut at = tag_in(slot) as usize & (self.slots.len() - 1);
        while self.slots[at] != 0 {
            at = self.after(at);
        }
        self.slots[at] = slot;
    }

    fn grow(&mut self) {
        let larger = (self.slots.len() * 2).max(SLOTS_MIN);
        // The tags are in the slots, so growth reads no entry.
        let old = std::mem::replace(&mut self.slots, vec![0; larger]);
        old.into_iter().filter(|slot| *slot != 0).for_each(|slot| self.place(slot));
    }

    /// Moves later slots of the run back, so that no search ends early at the gap.
    fn close_gap(&mut self, mut gap: usize) {
        let mask = self.slots.len() - 1;
        let mut at = self.after(gap);
        while self.slots[at] != 0 {
            // A slot may move into the gap only if that is not before its home. Distances are
            // modulo the length, because a run may wrap round.
            let home = tag_in(self.slots[at]) as usize & mask;
            let from_home = at.wrapping_sub(home) & mask;
            let from_gap = at.wrapping_sub(gap) & mask;
            if from_home >= from_gap {
                self.slots[gap] = self.slots[at];
                gap = at;
            }
            at = self.after(at);
        }
        self.slots[gap] = 0;
    }
}

fn shard_of(fingerprint: u64) -> usize {
    // The upper bits, which the tag does not have: tags stay spread within a shard.
    (fingerprint >> (64 - SHARD_BITS)) as usize
}

fn tag_of(fingerprint: u64) -> u32 {
    low_half(fingerprint)
}

fn pack(tag: u32, index: u32) -> u64 {
    (u64::from(tag) << 32) | (u64::from(index) + 1)
}

fn tag_in(slot: u64) -> u32 {
    (slot >> 32) as u32
}

fn index_in(slot: u64) -> u32 {
    low_half(slot) - 1
}

#[expect(clippy::cast_possible_truncation, reason = "the low half is what is wanted")]
fn low_half(word: u64) -> u32 {
    word as u32
}
