//! Bytes of unfinished messages and of answers not taken, of all connections and of each process.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Mutex;

use super::lock;

/// Most of them in all. One process may have as many as it leaves to the others.
const BYTES_MAX: usize = 256 << 20;

#[derive(Debug, Default)]
struct Sums {
    all: usize,
    of_process: HashMap<i32, usize>,
}

/// What waits, in sums.
#[derive(Debug, Default)]
pub(super) struct Waiting(Mutex<Sums>);

impl Waiting {
    /// What waits on a connection of a process is another amount now. False if that is more than
    /// the process may have: one alone has half, and the next one half of the rest.
    pub(super) fn change(&self, process: i32, before: usize, now: usize) -> bool {
        let mut sums = lock(&self.0);
        sums.all = sums.all - before + now;
        let mut of_process = match sums.of_process.entry(process) {
            Entry::Occupied(entry) => entry,
            Entry::Vacant(entry) => entry.insert_entry(0),
        };
        *of_process.get_mut() = *of_process.get() - before + now;
        let has = *of_process.get();
        if has == 0 {
            of_process.remove();
        }
        now <= before || has <= BYTES_MAX.saturating_sub(sums.all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_process_leaves_half_to_the_others() {
        let (waiting, mib) = (Waiting::default(), 1 << 20);
        let take = |process, pieces: std::ops::Range<usize>| {
            pieces.map(|_| waiting.change(process, 0, mib)).take_while(|fits| *fits).count()
        };
        assert_eq!(take(1, 0..1000), 128);
        // The one too many of the first is still counted until its connection is closed.
        assert!(waiting.change(1, mib, 0));
        assert_eq!(take(2, 0..1000), 64);
        for _ in 0..128 {
            assert!(waiting.change(1, mib, 0));
        }
        for _ in 0..65 {
            waiting.change(2, mib, 0);
        }
        let sums = lock(&waiting.0);
        assert!(sums.all == 0 && sums.of_process.is_empty(), "{sums:?}");
    }
}
