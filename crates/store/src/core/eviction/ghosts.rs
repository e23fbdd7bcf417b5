//! Ghosts: a fingerprint and a number for each remembered block that is not resident.

use std::collections::VecDeque;

use super::chunks::Chunks;

const NONE: u32 = u32::MAX;
const CHUNK_BITS: u32 = 10;
/// Entries of one chunk: 16 KiB.
const CHUNK: usize = 1 << CHUNK_BITS;
/// Holes at the oldest end that one operation frees. Each operation makes at most one.
const HOLES_PER_PUSH: usize = 64;
/// Buckets that one push adds, until there is one for each ghost.
const BUCKETS_PER_PUSH: usize = 2;
/// Most entries for each ghost of the limit, if holes of earlier generations are in the way.
const SPAN_MAX: usize = 4;
/// Limit of the first ghosts; it doubles up to the number that the caller gives.
const LIMIT_MIN: usize = 16;

#[derive(Debug, Clone, Copy)]
struct GhostEntry {
    fingerprint: u64,
    /// For a hole: the generation in which it was made.
    value: u32,
    /// The next entry of the same bucket, or the entry itself for a hole.
    next: u32,
}

/// A queue of ghosts with a hash index; the oldest is forgotten first. About 20 bytes an entry.
///
/// It grows by chunks and by single buckets, so that no push moves more than a few entries. A ghost
/// that is taken out leaves a hole, which is freed when it is the oldest. Holes count towards the
/// limit until that grows.
#[derive(Debug, Default)]
pub struct Ghosts {
    /// By number. An entry keeps its place, which is its chunk's number and its place in that.
    chunks: Vec<Vec<GhostEntry>>,
    /// The numbers of the chunks with entries, oldest first.
    order: VecDeque<u32>,
    /// The numbers of empty chunks.
    spare: Vec<u32>,
    /// Freed entries of the oldest chunk.
    freed: usize,
    /// Entries between the oldest and the newest, holes included.
    span: usize,
    live: usize,
    /// Holes that were made since the limit grew last.
    holes: usize,
    /// Number of times that the limit has grown.
    generation: u32,
    /// How many ghosts and holes there may be; grows up to that of the caller.
    limit: usize,
    /// The newest entry of each bucket. A linear hash table: buckets are split one by one, in
    /// their order.
    buckets: Chunks<u32>,
    /// Entries that were moved to another bucket, and holes that were freed.
    #[cfg(test)]
    steps: usize,
}

impl Ghosts {
    /// Number of ghosts.
    pub fn len(&self) -> usize {
        self.live
    }

    /// Whether there are no ghosts.
    pub fn is_empty(&self) -> bool {
        self.live == 0
    }

    /// Memory of entries and index.
    pub fn memory_bytes(&self) -> usize {
        let entries: usize = self.chunks.iter().map(Vec::capacity).sum();
        entries * size_of::<GhostEntry>() + self.buckets.memory_bytes()
    }

    /// Adds the newest ghost. At most `slots` ghosts and holes are kept (at least one, fewer than
    /// 2^31). Returns the ghost that was forgotten to make room.
    pub fn push(&mut self, fingerprint: u64, value: u32, slots: usize) -> Option<(u64, u32)> {
        let slots = slots.clamp(1, NONE as usize / 2);
        let mut forgotten = None;
        // Holes at the oldest end are free entries: without them there may be room.
        self.free_holes(HOLES_PER_PUSH);
        if self.live + self.holes >= self.limit {
            // The limit doubles up to `slots`, so that memory follows use.
            if self.limit < slots {
                self.limit = (self.limit * 2).clamp(LIMIT_MIN.min(slots), slots);
                self.generation = self.generation.wrapping_add(1);
                self.holes = 0;
            } else {
                forgotten = self.pop();
            }
        }
        if self.span > SPAN_MAX * slots.max(self.limit) && forgotten.is_none() {
            // Many holes of earlier generations are behind old ghosts.
            forgotten = self.pop();
        }
        for _ in 0..BUCKETS_PER_PUSH {
            if self.buckets.len() <= self.live {
                self.add_bucket();
            }
        }
        let bucket = self.bucket(fingerprint);
        let next = self.buckets[bucket];
        self.buckets[bucket] = self.add_entry(GhostEntry { fingerprint, value, next });
        self.span += 1;
        self.live += 1;
        forgotten
    }

    /// Forgets the oldest ghost and returns it.
    pub fn pop(&mut self) -> Option<(u64, u32)> {
        if self.live == 0 {
            return None;
        }
        // Ends at a ghost, because there is one.
        self.free_holes(usize::MAX);
        let oldest = self.oldest();
        let GhostEntry { fingerprint, value, .. } = *self.entry(oldest);
        self.unlink(oldest);
        self.free_holes(HOLES_PER_PUSH);
        Some((fingerprint, value))
    }

    /// The number of a ghost.
    pub fn get(&self, fingerprint: u64) -> Option<u32> {
        self.find(fingerprint).map(|at| self.entry(at).value)
    }

    /// Changes the number of a ghost, if there is one.
    pub fn set(&mut self, fingerprint: u64, value: u32) -> bool {
        let found = self.find(fingerprint);
        found.inspect(|at| self.entry_mut(*at).value = value).is_some()
    }

    /// Removes a ghost and returns its number.
    pub fn take(&mut self, fingerprint: u64) -> Option<u32> {
        let at = self.find(fingerprint)?;
        let value = self.entry(at).value;
        self.unlink(at);
        Some(value)
    }

    fn entry(&self, at: u32) -> &GhostEntry {
        &self.chunks[(at >> CHUNK_BITS) as usize][at as usize & (CHUNK - 1)]
    }

    fn entry_mut(&mut self, at: u32) -> &mut GhostEntry {
        &mut self.chunks[(at >> CHUNK_BITS) as usize][at as usize & (CHUNK - 1)]
    }

    /// Puts an entry behind the newest one, and returns its place.
    fn add_entry(&mut self, entry: GhostEntry) -> u32 {
        let newest = self.order.back().copied();
        let chunk = match newest.filter(|chunk| self.chunks[*chunk as usize].len() < CHUNK) {
            Some(chunk) => chunk,
            None => self.add_chunk(),
        };
        let entries = &mut self.chunks[chunk as usize];
        entries.push(entry);
        (chunk << CHUNK_BITS) | narrow(entries.len() - 1)
    }

    fn add_chunk(&mut self) -> u32 {
        let chunk = self.spare.pop().unwrap_or_else(|| {
            // The first chunk grows with its use: most tiers of a test or a shadow are small.
            let reserved = if self.chunks.is_empty() { 0 } else { CHUNK };
            self.chunks.push(Vec::with_capacity(reserved));
            narrow(self.chunks.len() - 1)
        });
        self.order.push_back(chunk);
        chunk
    }

    /// The place of the oldest entry; there must be one.
    fn oldest(&self) -> u32 {
        (self.order[0] << CHUNK_BITS) | narrow(self.freed)
    }

    /// Frees the holes at the oldest end, at most so many.
    fn free_holes(&mut self, most: usize) {
        for _ in 0..most {
            if self.span == 0 {
                return;
            }
            let (at, entry) = (self.oldest(), *self.entry(self.oldest()));
            if entry.next != at {
                return;
            }
            self.holes -= usize::from(entry.value == self.generation);
            self.span -= 1;
            self.freed += 1;
            #[cfg(test)]
            self.count_step();
            if self.freed == CHUNK {
                self.freed = 0;
                let chunk = self.order.pop_front().expect("it has the oldest entry");
                self.chunks[chunk as usize].clear();
                self.spare.push(chunk);
            }
        }
    }

    fn bucket(&self, fingerprint: u64) -> usize {
        let (hash, count) = (hash(fingerprint), self.buckets.len());
        let mask = count.next_power_of_two() - 1;
        let bucket = hash & mask;
        // Not all buckets of the smaller half are split yet.
        if bucket < count { bucket } else { bucket & (mask >> 1) }
    }

    /// Adds a bucket, and moves those entries of the bucket that it is split from that belong to
    /// it, in their order.
    fn add_bucket(&mut self) {
        let added = self.buckets.len();
        self.buckets.push(NONE);
        if added == 0 {
            return;
        }
        let half = (added + 1).next_power_of_two() / 2;
        let mut at = std::mem::replace(&mut self.buckets[added - half], NONE);
        // The last entry of the bucket that is split, and of the new one.
        let mut last = [NONE, NONE];
        while at != NONE {
            let entry = *self.entry(at);
            let is_moved = hash(entry.fingerprint) & half != 0;
            match &mut last[usize::from(is_moved)] {
                &mut NONE => self.buckets[if is_moved { added } else { added - half }] = at,
                last => self.entry_mut(*last).next = at,
            }
            last[usize::from(is_moved)] = at;
            self.entry_mut(at).next = NONE;
            at = entry.next;
            #[cfg(test)]
            self.count_step();
        }
    }

    fn find(&self, fingerprint: u64) -> Option<u32> {
        // Before the first push there are no buckets to index.
        if self.live == 0 {
            return None;
        }
        let mut at = self.buckets[self.bucket(fingerprint)];
        while at != NONE {
            let entry = self.entry(at);
            if entry.fingerprint == fingerprint {
                return Some(at);
            }
            at = entry.next;
        }
        None
    }

    /// Takes an entry out of its bucket and makes it a hole.
    fn unlink(&mut self, at: u32) {
        let GhostEntry { fingerprint, next, .. } = *self.entry(at);
        let bucket = self.bucket(fingerprint);
        if self.buckets[bucket] == at {
            self.buckets[bucket] = next;
        } else {
            // The entry is in its bucket's chain, so the walk ends.
            let mut before = self.buckets[bucket];
            while self.entry(before).next != at {
                before = self.entry(before).next;
            }
            self.entry_mut(before).next = next;
        }
        // A link to itself marks a hole: no chain contains one.
        let generation = self.generation;
        let entry = self.entry_mut(at);
        (entry.next, entry.value) = (at, generation);
        self.live -= 1;
        self.holes += 1;
    }

    #[cfg(test)]
    fn count_step(&mut self) {
        self.steps += 1;
    }
}

/// The part of a fingerprint that chooses its bucket.
fn hash(fingerprint: u64) -> usize {
    // Fibonacci hashing: fingerprints may be small numbers in studies.
    let mixed = fingerprint.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    usize::try_from(mixed).expect("32 bits fit")
}

fn narrow(index: usize) -> u32 {
    u32::try_from(index).expect("there are fewer than u32::MAX entries")
}

#[cfg(test)]
mod tests;
