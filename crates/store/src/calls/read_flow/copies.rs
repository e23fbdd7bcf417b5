//! Copies of blocks in DRAM to the caller's buffers, shared with a second thread.
//!
//! A call that loads blocks from a tier checks and copies these itself. While it copied large
//! blocks that are in DRAM, the tier would wait for it, and one thread cannot do both at the speed
//! of both.

use std::collections::VecDeque;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};

use cascade_memory::{DeviceError, Slab};
use cascade_runtime::{Condvar, Mutex, MutexGuard};
use cascade_tier::{GetOutcome, StoreError, TierName};

/// Second threads of all calls of a process at most. Two threads copy at the speed of the memory;
/// without this bound, 100 callers started 100 threads.
const SECOND_THREADS_MAX: usize = 4;

/// The second threads that are running.
static SECOND_THREADS: Threads = Threads::new();

/// Counts threads.
struct Threads(AtomicUsize);

impl Threads {
    const fn new() -> Self {
        Self(AtomicUsize::new(0))
    }

    /// Counts one more, unless there are as many as may be. Relaxed: it orders nothing else.
    fn begin(&self) -> Option<SecondThread<'_>> {
        let more = |running| (running < SECOND_THREADS_MAX).then_some(running + 1);
        let begun = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        begun.ok().map(|_| SecondThread(self))
    }
}

/// Permission for a second thread, until it is dropped.
pub(super) struct SecondThread<'t>(&'t Threads);

impl SecondThread<'static> {
    /// `None` while other calls have as many as there may be: then a call makes its copies itself.
    pub(super) fn begin() -> Option<Self> {
        SECOND_THREADS.begin()
    }
}

impl Drop for SecondThread<'_> {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A block in DRAM, and the buffer that it is copied to.
pub(super) struct Copy<'b> {
    pub(super) index: usize,
    pub(super) slab: Slab,
    pub(super) tier: TierName,
    pub(super) buffer: &'b mut [u8],
}

/// A buffer after the copy to it.
pub(super) type Copied<'b> = (usize, &'b mut [u8], GetOutcome);

/// The copies of one call.
pub(super) struct Copies<'b> {
    batch_bytes: usize,
    pending: Mutex<Pending<'b>>,
    changed: Condvar,
    /// Bytes of the slabs that wait or are being copied.
    bytes: AtomicUsize,
}

#[derive(Default)]
struct Pending<'b> {
    waiting: VecDeque<Copy<'b>>,
    done: Vec<Copied<'b>>,
    has_ended: bool,
}

/// Lets the second thread end, also if the call panics.
pub(super) struct EndsCopies<'c, 'b>(&'c Copies<'b>);

impl Drop for EndsCopies<'_, '_> {
    fn drop(&mut self) {
        self.0.lock().has_ended = true;
        self.0.changed.notify_all();
    }
}

impl<'b> Copies<'b> {
    pub(super) fn new(batch_bytes: usize) -> Self {
        let (pending, changed) = (Mutex::new(Pending::default()), Condvar::new());
        Self { batch_bytes, pending, changed, bytes: AtomicUsize::new(0) }
    }

    fn lock(&self) -> MutexGuard<'_, Pending<'b>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes of the slabs that wait or are being copied.
    pub(super) fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    pub(super) fn add(&self, copy: Copy<'b>) {
        self.bytes.fetch_add(copy.slab.len(), Ordering::Relaxed);
        self.lock().waiting.push_back(copy);
        self.changed.notify_one();
    }

    /// Makes one copy in this thread. Returns false if none waits.
    pub(super) fn copy_one(&self) -> bool {
        let next = self.lock().waiting.pop_front();
        next.map(|copy| self.copy(copy)).is_some()
    }

    /// Makes copies until the call has no more.
    pub(super) fn run(&self) {
        let mut pending = self.lock();
        loop {
            if let Some(copy) = pending.waiting.pop_front() {
                drop(pending);
                self.copy(copy);
                pending = self.lock();
            } else if pending.has_ended {
                return;
            } else {
                pending = self.changed.wait(pending).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    fn copy(&self, Copy { index, slab, tier, buffer }: Copy<'b>) {
        let copy = |target: &mut [u8]| slab.copy_to_in_batch(target, self.batch_bytes);
        let outcome = copy_block(buffer, slab.len(), tier, copy);
        self.bytes.fetch_sub(slab.len(), Ordering::Relaxed);
        drop(slab);
        self.lock().done.push((index, buffer, outcome));
    }

    /// Ends the second thread once all copies are made.
    pub(super) fn ends_on_drop(&self) -> EndsCopies<'_, 'b> {
        EndsCopies(self)
    }

    pub(super) fn take_done(&self) -> Vec<Copied<'b>> {
        std::mem::take(&mut self.lock().done)
    }
}

/// Copies a block of this length to its buffer, if it fits.
pub(super) fn copy_block(
    buffer: &mut [u8],
    bytes: usize,
    tier: TierName,
    copy: impl FnOnce(&mut [u8]) -> Result<(), DeviceError>,
) -> GetOutcome {
    if bytes > buffer.len() {
        return GetOutcome::TooShort { needed_bytes: bytes };
    }
    match copy(&mut buffer[..bytes]) {
        Ok(()) => GetOutcome::Hit { bytes, tier },
        Err(error) => GetOutcome::Failed(StoreError::Device(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn further_calls_get_no_second_thread() {
        let threads = Threads::new();
        let mut running: Vec<_> = (0..SECOND_THREADS_MAX).map(|_| threads.begin()).collect();
        assert!(running.iter().all(Option::is_some));
        assert!(threads.begin().is_none());
        running.pop();
        assert!(threads.begin().is_some(), "one has ended");
    }
}
