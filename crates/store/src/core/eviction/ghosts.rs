//! Ghosts: a fingerprint and a number for each remembered block that is not resident.

const NONE: u32 = u32::MAX;

#[derive(Debug, Clone, Copy)]
struct GhostEntry {
    fingerprint: u64,
    value: u32,
    /// The next entry of the same bucket, or the entry itself for a hole.
    next: u32,
}

/// A ring of ghosts with a hash index; the oldest is forgotten first. 20 to 24 bytes an entry.
///
/// A ghost that is taken out leaves a hole, which is reused when the ring wraps round.
#[derive(Debug, Default)]
pub struct Ghosts {
    /// Entries from `oldest` on, wrapping round at `entries.len()`.
    entries: Vec<GhostEntry>,
    buckets: Vec<u32>,
    oldest: usize,
    /// Entries between the oldest and the newest, holes included.
    span: usize,
    live: usize,
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

    /// Memory of ring and index.
    pub fn memory_bytes(&self) -> usize {
        self.entries.capacity() * size_of::<GhostEntry>()
            + self.buckets.capacity() * size_of::<u32>()
    }

    /// Adds the newest ghost to a ring of at most `slots` entries (at least one, fewer than 2^32).
    /// Returns the ghost that was forgotten to make room.
    pub fn push(&mut self, fingerprint: u64, value: u32, slots: usize) -> Option<(u64, u32)> {
        let slots = slots.clamp(1, NONE as usize - 1);
        let mut forgotten = None;
        // Holes at the oldest end are free entries: without them the ring may not be full.
        self.drop_holes();
        if self.span >= self.entries.len() {
            // The ring doubles up to `slots`, so that memory follows use.
            if self.entries.len() < slots {
                self.resize((self.entries.len() * 2).clamp(16.min(slots), slots));
            } else {
                forgotten = self.pop();
            }
        }
        let index = self.wrap(self.oldest + self.span);
        let bucket = self.bucket(fingerprint);
        let next = self.buckets[bucket];
        self.entries[index] = GhostEntry { fingerprint, value, next };
        self.buckets[bucket] = narrow(index);
        self.span += 1;
        self.live += 1;
        forgotten
    }

    /// Forgets the oldest ghost and returns it.
    pub fn pop(&mut self) -> Option<(u64, u32)> {
        self.drop_holes();
        if self.live == 0 {
            return None;
        }
        let GhostEntry { fingerprint, value, .. } = self.entries[self.oldest];
        self.unlink(self.oldest);
        self.drop_holes();
        Some((fingerprint, value))
    }

    /// The number of a ghost.
    pub fn get(&self, fingerprint: u64) -> Option<u32> {
        self.find(fingerprint).map(|index| self.entries[index].value)
    }

    /// Changes the number of a ghost, if there is one.
    pub fn set(&mut self, fingerprint: u64, value: u32) -> bool {
        let found = self.find(fingerprint);
        found.inspect(|index| self.entries[*index].value = value).is_some()
    }

    /// Removes a ghost and returns its number.
    pub fn take(&mut self, fingerprint: u64) -> Option<u32> {
        let index = self.find(fingerprint)?;
        let value = self.entries[index].value;
        self.unlink(index);
        Some(value)
    }

    fn wrap(&self, index: usize) -> usize {
        if index < self.entries.len() { index } else { index - self.entries.len() }
    }

    fn bucket(&self, fingerprint: u64) -> usize {
        // Fibonacci hashing: fingerprints may be small numbers in studies. The mask keeps it small.
        let mixed = fingerprint.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        usize::try_from(mixed).expect("32 bits fit") & (self.buckets.len() - 1)
    }

    fn find(&self, fingerprint: u64) -> Option<usize> {
        // Before the first push there are no buckets to index.
        if self.live == 0 {
            return None;
        }
        let mut index = self.buckets[self.bucket(fingerprint)];
        while index != NONE {
            let entry = &self.entries[index as usize];
            if entry.fingerprint == fingerprint {
                return Some(index as usize);
            }
            index = entry.next;
        }
        None
    }

    fn is_hole(&self, index: usize) -> bool {
        self.entries[index].next as usize == index
    }

    fn drop_holes(&mut self) {
        while self.span > 0 && self.is_hole(self.oldest) {
            self.oldest = self.wrap(self.oldest + 1);
            self.span -= 1;
        }
    }

    /// Takes an entry out of its bucket and makes it a hole.
    fn unlink(&mut self, index: usize) {
        let this = narrow(index);
        let bucket = self.bucket(self.entries[index].fingerprint);
        let next = self.entries[index].next;
        if self.buckets[bucket] == this {
            self.buckets[bucket] = next;
        } else {
            // The entry is in its bucket's chain, so the walk ends.
            let mut before = self.buckets[bucket] as usize;
            while self.entries[before].next != this {
                before = self.entries[before].next as usize;
            }
            self.entries[before].next = next;
        }
        // A link to itself marks a hole: no chain contains one.
        self.entries[index].next = this;
        self.live -= 1;
    }

    /// Moves all ghosts into a larger ring, without the holes.
    fn resize(&mut self, slots: usize) {
        let hole = |index: usize| GhostEntry { fingerprint: 0, value: 0, next: narrow(index) };
        let old = std::mem::take(&mut self.entries);
        let (oldest, span) = (self.oldest, self.span);
        self.entries = (0..slots).map(hole).collect();
        self.buckets = vec![NONE; slots.next_power_of_two()];
        (self.oldest, self.span, self.live) = (0, 0, 0);
        // From the oldest on, so that the order is kept.
        for at in oldest..oldest + span {
            let index = if at < old.len() { at } else { at - old.len() };
            let entry = old[index];
            if entry.next as usize != index {
                let forgotten = self.push(entry.fingerprint, entry.value, slots);
                debug_assert!(forgotten.is_none(), "the new ring is larger");
            }
        }
    }
}

fn narrow(index: usize) -> u32 {
    u32::try_from(index).expect("a ring has fewer than u32::MAX slots")
}
