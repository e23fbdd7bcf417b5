//! Prefetch: promotes the blocks of hints in the background, within the rate of the mover.

use std::sync::mpsc::Receiver;
use std::sync::{Mutex, PoisonError};

use cascade_block::BlockKey;

use crate::calls::read::ReadPurpose;
use crate::drive::mover::RateLimiter;
use crate::shared::StoreCore;
use crate::{CallOptions, ViewOutcome};

/// Executes prefetch hints until the channel is closed.
pub(crate) fn run_prefetch(core: &StoreCore, hints: &Mutex<Receiver<Vec<BlockKey>>>) {
    let mut rate_limiter = RateLimiter::new(core);
    loop {
        // An idle thread waits for a hint with the lock held, the others wait for the lock: only
        // these threads take it. Closing the store drops the sender, which ends every wait.
        let hint = hints.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(keys) = hint else { return };
        core.prefetch_now(&keys, &mut |bytes| rate_limiter.wait_for(core, bytes));
    }
}

impl StoreCore {
    /// Promotes blocks in steps. Calls `pace` with the bytes of each step, to limit the rate.
    fn prefetch_now(&self, keys: &[BlockKey], pace: &mut dyn FnMut(u64)) {
        let mut rest = keys;
        while !rest.is_empty() {
            let (step, later) = rest.split_at(self.step_keys(rest));
            let views = self.read(step, self.call(CallOptions::default()), ReadPurpose::Prefetch);
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
}
