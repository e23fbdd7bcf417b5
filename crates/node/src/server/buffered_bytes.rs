//! The bytes that connections buffer: incomplete messages, and answers that clients have not read.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Mutex;

use super::lock;

/// The limit of all connections. A process may use as many bytes as remain for the others.
const BYTES_MAX: usize = 256 << 20;

#[derive(Debug, Default)]
struct BufferedTotals {
    all: usize,
    of_process: HashMap<i32, usize>,
}

/// The buffered bytes of all connections, in all and by process.
#[derive(Debug, Default)]
pub(super) struct BufferedBytes(Mutex<BufferedTotals>);

impl BufferedBytes {
    /// Updates the bytes of one connection of a process. False if the process exceeds its limit,
    /// which is the bytes that remain under `BYTES_MAX`. So a single process gets half of
    /// `BYTES_MAX`, the next one half of the rest, and so on.
    pub(super) fn update(&self, process: i32, before: usize, now: usize) -> bool {
        let mut totals = lock(&self.0);
        // `before` is part of both totals, so the subtraction comes first and does not underflow.
        totals.all = totals.all - before + now;
        let mut of_process = match totals.of_process.entry(process) {
            Entry::Occupied(entry) => entry,
            Entry::Vacant(entry) => entry.insert_entry(0),
        };
        *of_process.get_mut() = *of_process.get() - before + now;
        let bytes = *of_process.get();
        // Processes without buffered bytes have no entry, so the map does not grow with past
        // clients.
        if bytes == 0 {
            of_process.remove();
        }
        // Shrinking is always fine: the limit can drop below what a process already uses.
        now <= before || bytes <= BYTES_MAX.saturating_sub(totals.all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_process_gets_half_of_the_limit_and_the_next_half_of_the_rest() {
        let (buffered, mib) = (BufferedBytes::default(), 1 << 20);
        let add = |process, pieces: std::ops::Range<usize>| {
            pieces.map(|_| buffered.update(process, 0, mib)).take_while(|fits| *fits).count()
        };
        assert_eq!(add(1, 0..1000), 128);
        // The update over the limit counts until its connection is closed.
        assert!(buffered.update(1, mib, 0));
        assert_eq!(add(2, 0..1000), 64);
        for _ in 0..128 {
            assert!(buffered.update(1, mib, 0));
        }
        for _ in 0..65 {
            buffered.update(2, mib, 0);
        }
        let totals = lock(&buffered.0);
        assert!(totals.all == 0 && totals.of_process.is_empty(), "{totals:?}");
    }
}
