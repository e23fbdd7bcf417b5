//! How many bytes of reads a call keeps in flight: as many as the device completes one by one.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes at first, and the least. With 4 MiB a disk of several GiB/s works for about a millisecond
/// while the caller checks and copies what was read before.
const BYTES_MIN: usize = 4 << 20;
/// Most bytes. The queue depth is the other limit.
const BYTES_MAX: usize = 256 << 20;

/// The limit of the bytes of reads that a call has in flight.
///
/// Some devices report the completion of all requests in their queue at once, when the last of them
/// is done: the block devices of some virtual machines work through their queue and interrupt at
/// its end. If a call gives such a device all its reads, it can check and copy the first block only
/// after the last is read, and the device then has no work. So the limit starts small. It grows as
/// long as reads complete while others are in flight, and shrinks when all complete together.
#[derive(Debug)]
pub(super) struct ReadWindow {
    bytes: AtomicUsize,
}

impl ReadWindow {
    pub(super) fn new() -> Self {
        Self { bytes: AtomicUsize::new(BYTES_MIN) }
    }

    /// Whether another read may start beside those in flight.
    pub(super) fn has_room(&self, in_flight_bytes: usize) -> bool {
        in_flight_bytes < self.bytes()
    }

    /// Notes what one wait for completions has ended: of `before` transfers, which read `bytes`,
    /// `left` are still in flight.
    pub(super) fn note(&self, before: usize, bytes: usize, left: usize) {
        let window = self.bytes();
        if bytes == 0 {
            return;
        }
        if left > 0 && bytes >= window {
            self.set(window.saturating_mul(2).min(BYTES_MAX));
        } else if left == 0 && before > 1 {
            self.set((window.min(bytes) / 2).max(BYTES_MIN));
        }
    }

    fn bytes(&self) -> usize {
        // Relaxed: calls of several threads share it as a hint; it orders nothing.
        self.bytes.load(Ordering::Relaxed)
    }

    fn set(&self, bytes: usize) {
        self.bytes.store(bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    /// The window after calls of 16 reads of 2 MiB to a device that ends `together` at once.
    fn window_after(calls: usize, together: usize) -> usize {
        let window = ReadWindow::new();
        for _ in 0..calls {
            let (mut waiting, mut in_flight) = (16, 0);
            while waiting + in_flight > 0 {
                while waiting > 0 && window.has_room(in_flight * 2 * MIB) {
                    (waiting, in_flight) = (waiting - 1, in_flight + 1);
                }
                let before = in_flight;
                in_flight -= together.min(before);
                window.note(before, before * 2 * MIB, in_flight);
            }
        }
        window.bytes()
    }

    #[test]
    fn reads_that_complete_one_by_one_widen_the_window() {
        assert!(window_after(1, 1) >= 32 * MIB);
        assert!(window_after(100, 1) <= BYTES_MAX);
    }

    /// All 16 reads of a get were in flight and completed together: nothing was checked or copied
    /// while the disk worked, and 2 MiB blocks came at 83 % of its speed.
    #[test]
    fn reads_that_complete_together_keep_the_window_small() {
        assert_eq!(window_after(100, usize::MAX), BYTES_MIN);
        let window = ReadWindow { bytes: AtomicUsize::new(64 * MIB) };
        window.note(16, 32 * MIB, 0);
        assert_eq!(window.bytes(), 16 * MIB, "half of what completed together");
        window.note(1, 16 * MIB, 0);
        assert_eq!(window.bytes(), 16 * MIB, "a single read says nothing");
        window.note(16, 0, 0);
        assert_eq!(window.bytes(), 16 * MIB, "writes say nothing");
    }
}
