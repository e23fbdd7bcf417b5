//! Prefetch: promotes the blocks of hints in the background, within the rate of the mover.

use std::collections::VecDeque;
use std::sync::PoisonError;

use cascade_block::BlockKey;
use cascade_runtime::{Condvar, Mutex, MutexGuard};
use cascade_tier::{CallOptions, ViewOutcome};

use crate::calls::read::Reads;
use crate::calls::read_flow::ReadPurpose;
use crate::drive::rate_limiter::RateLimiter;
use crate::shared::StoreCore;

/// Maximum length of the queue of hints; further hints are declined.
const HINTS_MAX: usize = 64;

/// Hints that wait for a prefetch thread.
#[derive(Debug, Default)]
pub(crate) struct PrefetchQueue {
    hints: Mutex<QueuedHints>,
    /// Notified for each hint, and when the queue is closed.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct QueuedHints {
    waiting: VecDeque<Vec<BlockKey>>,
    is_closed: bool,
}

impl PrefetchQueue {
    /// Adds a hint. Returns false if the queue is full or closed.
    pub(crate) fn push(&self, keys: Vec<BlockKey>) -> bool {
        let mut hints = self.lock();
        if hints.is_closed || hints.waiting.len() >= HINTS_MAX {
            return false;
        }
        hints.waiting.push_back(keys);
        drop(hints);
        self.changed.notify_one();
        true
    }

    /// Declines all further hints. Those that wait are still executed.
    pub(crate) fn close(&self) {
        self.lock().is_closed = true;
        self.changed.notify_all();
    }

    /// Waits for the next hint. `None` once the queue is closed and empty.
    fn pop(&self) -> Option<Vec<BlockKey>> {
        let mut hints = self.lock();
        loop {
            if let Some(keys) = hints.waiting.pop_front() {
                return Some(keys);
            }
            if hints.is_closed {
                return None;
            }
            hints = self.changed.wait(hints).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn lock(&self) -> MutexGuard<'_, QueuedHints> {
        self.hints.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Executes prefetch hints until the queue is closed and empty.
pub(crate) fn run_prefetch(core: &StoreCore, hints: &PrefetchQueue) {
    let mut rate_limiter = RateLimiter::new(core);
    while let Some(keys) = hints.pop() {
        prefetch_now(core, &keys, &mut |bytes| rate_limiter.wait_for(core, bytes));
    }
}

/// Promotes blocks in steps. Calls `pace` with the bytes of each step, to limit the rate.
fn prefetch_now(core: &StoreCore, keys: &[BlockKey], pace: &mut dyn FnMut(u64)) {
    let mut rest = keys;
    while !rest.is_empty() {
        let reads = Reads::new(core, core.call(CallOptions::default()));
        let (step, later) = rest.split_at(reads.step_keys(rest));
        let views = reads.read(step, ReadPurpose::Prefetch);
        let bytes = views.iter().map(|view| match view {
            ViewOutcome::Hit { slab, .. } => slab.len() as u64,
            ViewOutcome::Miss | ViewOutcome::Failed(_) => 0,
        });
        let bytes = bytes.sum();
        // The views would prevent the eviction of these blocks while `pace` waits.
        drop(views);
        pace(bytes);
        rest = later;
    }
}
