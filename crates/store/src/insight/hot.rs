//! Hot prefixes: the chains that many recent requests share, in a few kilobytes.
//!
//! The last matched block of a request is where it diverges from earlier ones; that block is
//! watched. Every later request that contains a watched block counts as a hit on it. A new watched
//! block replaces the one with the fewest hits among a few, so frequent ones stay.

use std::collections::HashMap;
use std::time::Duration;

use cascade_block::{BlockKey, FingerprintSeed};

/// Most watched prefixes.
const WATCHED_MAX: usize = 192;
/// Watched prefixes searched for the one with the fewest hits, which is replaced.
const SEARCHED: usize = 8;
/// Half of the window, as for the shadow caches.
const HALF: Duration = Duration::from_secs(15 * 60);
/// Size of the filter that rules out most blocks without a hash lookup.
const MARKS: usize = 4096;

/// One watched prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WatchedPrefix {
    pub(crate) key: BlockKey,
    /// Blocks from the root to this one, inclusive.
    pub(crate) depth: u32,
    current: u64,
    before: u64,
}

impl WatchedPrefix {
    /// Requests through it in the window.
    pub(crate) fn hits(&self) -> u64 {
        self.current + self.before
    }
}

#[derive(Debug)]
pub(crate) struct HotPrefixes {
    seed: FingerprintSeed,
    watched: Vec<WatchedPrefix>,
    places: HashMap<u64, usize>,
    /// Number of watched blocks per filter mark.
    marks: Box<[u8; MARKS]>,
    search_start: usize,
    half_since: Duration,
}

impl HotPrefixes {
    pub(crate) fn new(seed: FingerprintSeed) -> Self {
        Self {
            seed,
            watched: Vec::new(),
            places: HashMap::new(),
            marks: Box::new([0; MARKS]),
            search_start: 0,
            half_since: Duration::ZERO,
        }
    }

    /// Some blocks that a request matched, in their order. Returns whether the last is watched.
    pub(crate) fn note(&mut self, now: Duration, keys: &[BlockKey]) -> bool {
        self.advance(now);
        let mut is_last_watched = false;
        for key in keys {
            is_last_watched = false;
            if self.marks[self.mark(key)] == 0 {
                continue;
            }
            if let Some(place) = self.place(key) {
                self.watched[place].current += 1;
                is_last_watched = true;
            }
        }
        is_last_watched
    }

    /// All blocks that a request matched. Watches the last one, if it `is_watched` not yet.
    pub(crate) fn end_request(&mut self, keys: &[BlockKey], is_watched: bool) {
        // The request that makes a prefix watched is its first hit.
        if let Some(last) = keys.last().filter(|_| !is_watched) {
            self.watch(*last, keys.len());
        }
    }

    /// The prefixes with the most hits, most first.
    pub(crate) fn top(&self, count: usize) -> Vec<WatchedPrefix> {
        let mut all = self.watched.clone();
        // Of nested prefixes with equal hits, the deeper one is more specific.
        all.sort_by_key(|one| (std::cmp::Reverse((one.hits(), one.depth)), one.key));
        all.retain(|one| one.hits() > 0);
        all.truncate(count);
        all
    }

    /// The last blocks of all prefixes with hits.
    pub(crate) fn keys(&self) -> Vec<BlockKey> {
        self.watched.iter().filter(|one| one.hits() > 0).map(|one| one.key).collect()
    }

    /// Memory of the watched prefixes.
    pub(crate) fn memory_bytes(&self) -> usize {
        let places = self.places.capacity() * (size_of::<(u64, usize)>() + 1);
        let watched = self.watched.capacity() * size_of::<WatchedPrefix>();
        size_of::<Self>() + watched + places + MARKS
    }

    fn place(&self, key: &BlockKey) -> Option<usize> {
        let place = *self.places.get(&self.seed.of_key(key))?;
        (self.watched[place].key == *key).then_some(place)
    }

    fn watch(&mut self, key: BlockKey, depth: usize) {
        let depth = u32::try_from(depth).unwrap_or(u32::MAX);
        let new = WatchedPrefix { key, depth, current: 1, before: 0 };
        let fingerprint = self.seed.of_key(&key);
        if self.places.contains_key(&fingerprint) {
            // Another block with the same fingerprint is watched; the table holds one of them.
            return;
        }
        let place = if self.watched.len() < WATCHED_MAX {
            self.watched.push(new);
            self.watched.len() - 1
        } else {
            let searched =
                (self.search_start..self.search_start + SEARCHED).map(|at| at % WATCHED_MAX);
            // Advancing by the searched length compares every place once in `WATCHED_MAX /
            // SEARCHED` replacements.
            self.search_start = (self.search_start + SEARCHED) % WATCHED_MAX;
            let least = searched.min_by_key(|at| self.watched[*at].hits());
            let place = least.expect("several were searched");
            let old = std::mem::replace(&mut self.watched[place], new);
            self.places.remove(&self.seed.of_key(&old.key));
            let mark = self.mark(&old.key);
            // Several watched blocks may share a mark, so it is counted down, not cleared.
            self.marks[mark] -= 1;
            place
        };
        self.places.insert(fingerprint, place);
        let mark = self.mark(&key);
        self.marks[mark] += 1;
    }

    #[expect(clippy::cast_possible_truncation, reason = "the low bits are wanted")]
    fn mark(&self, key: &BlockKey) -> usize {
        self.seed.of_key(key) as usize % MARKS
    }

    fn advance(&mut self, now: Duration) {
        let age = now.saturating_sub(self.half_since);
        if age < HALF {
            return;
        }
        // `before` is the half that ends now. After two halves, `current` ended before that one
        // began.
        for watched in &mut self.watched {
            watched.before = if age < 2 * HALF { watched.current } else { 0 };
            watched.current = 0;
        }
        self.half_since = now;
    }
}

const _: () = assert!(WATCHED_MAX < u8::MAX as usize, "a mark counts them all");

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(name: u8, blocks: u8) -> Vec<BlockKey> {
        let key = |block: u8| {
            let mut bytes = [0; 32];
            bytes[..2].copy_from_slice(&[name, block]);
            BlockKey::from_bytes(bytes)
        };
        (0..blocks).map(key).collect()
    }

    fn request(hot: &mut HotPrefixes, now: Duration, keys: &[BlockKey], matched: usize) {
        let is_watched = hot.note(now, &keys[..matched]);
        hot.end_request(&keys[..matched], is_watched);
    }

    #[test]
    fn a_shared_prefix_ranks_above_the_blocks_of_single_sessions() {
        let mut hot = HotPrefixes::new(FingerprintSeed::new(1));
        let shared = chain(0, 3);
        for session in 1..=200 {
            let keys = [shared.clone(), chain(session, 4)].concat();
            request(&mut hot, Duration::ZERO, &keys, 3);
            request(&mut hot, Duration::ZERO, &keys, 7);
        }
        let top = hot.top(2);
        assert_eq!((top[0].key, top[0].depth, top[0].hits()), (shared[2], 3, 400));
        assert!(top[1].hits() < 3, "{top:?}");
    }

    #[test]
    fn hits_leave_the_window_with_time() {
        let mut hot = HotPrefixes::new(FingerprintSeed::new(1));
        let keys = chain(1, 2);
        (0..5).for_each(|_| request(&mut hot, Duration::ZERO, &keys, 2));
        assert_eq!(hot.top(9)[0].hits(), 5);
        request(&mut hot, Duration::from_secs(16 * 60), &keys, 2);
        assert_eq!(hot.top(9)[0].hits(), 6);
        request(&mut hot, Duration::from_secs(120 * 60), &keys, 1);
        assert_eq!(hot.top(9).iter().map(WatchedPrefix::hits).sum::<u64>(), 1);
    }
}
