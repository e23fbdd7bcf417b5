//! Put of slabs that the caller has filled, such as the second phase of a two-phase put.

use std::time::Duration;

use cascade_block::{BlockKey, DigestMode};
use cascade_tier::{CallOptions, Put, PutOutcome, PutSlab};

use crate::Store;
use crate::calls::put::PutBatch;
use crate::shared::StoreCore;
use crate::shared::call::CallContext;
use crate::shared::hold::KEYS_PER_HOLD;

impl Store {
    /// As [`Store::put_slabs`], for a caller that needs permission to wait: `may_wait` is called
    /// before the call hashes, reads a lower tier or waits for one, and only then. If it returns
    /// false, the blocks that need it fail with [`cascade_tier::StoreError::Timeout`].
    pub fn put_slabs_with(
        &self,
        batch: Vec<PutSlab>,
        options: CallOptions,
        mut may_wait: impl FnMut() -> bool,
    ) -> Vec<PutOutcome> {
        self.core().put_slabs(batch, options, &mut may_wait)
    }
}

impl StoreCore {
    /// Publishes blocks that the caller wrote in place, without a copy. See
    /// [`crate::Store::put_slabs_with`].
    pub(crate) fn put_slabs(
        &self,
        batch: Vec<PutSlab>,
        options: CallOptions,
        may_wait: &mut dyn FnMut() -> bool,
    ) -> Vec<PutOutcome> {
        let mut slabs = Vec::with_capacity(batch.len());
        let mut puts = Vec::with_capacity(batch.len());
        for put in batch {
            puts.push(put_of_slab(&put));
            slabs.push(put.slab.seal());
        }
        // The slabs move no more, so that their bytes can be borrowed.
        for (put, slab) in puts.iter_mut().zip(&slabs) {
            put.bytes = slab;
        }
        let at_once = CallOptions { timeout: Some(Duration::ZERO), ..options };
        let waits = self.waits_for_writes()
            || !self.pipeline.has_dram
            || self.config.digest != DigestMode::Off;
        let mut has_permission = waits && may_wait();
        let first = if waits && !has_permission { at_once } else { options };
        self.put_all(&puts, first, |puts, undecided| {
            for (at, round) in undecided.chunks(KEYS_PER_HOLD).enumerate() {
                if puts.fail_if_late(&undecided[at * KEYS_PER_HOLD..], &*self.clock) {
                    break;
                }
                // No back-pressure here: the slabs are allocated already, so waiting would free no
                // memory. `reserve` and `prepare` have waited for the backlog.
                let Some(mut state) = self.lock_within(round.len(), puts.call) else {
                    puts.fail_if_late(&undecided[at * KEYS_PER_HOLD..], &*self.clock);
                    break;
                };
                state.charge_keys(round);
                let now = self.timestamps(&mut state);
                for at in round {
                    self.publish_new(&mut state, puts, *at, &slabs[*at], now);
                }
                self.note_decided(&mut state, puts, now);
            }
            self.notify_movers();
            if !waits && !has_permission && self.has_to_read(puts) {
                has_permission = may_wait();
                puts.call = self.call(if has_permission { options } else { at_once });
            }
        })
    }

    /// Whether blocks without an outcome have to be compared with bytes that are only in a lower
    /// tier.
    fn has_to_read(&self, puts: &PutBatch<'_>) -> bool {
        let undecided = puts.undecided();
        let keys: Vec<BlockKey> = undecided.iter().map(|at| puts.batch[*at].key).collect();
        !keys.is_empty() && !self.can_read_without_waiting(&keys, puts.call)
    }

    /// Whether a read of these blocks can be served from memory alone. False if the deadline passes
    /// before it is known.
    fn can_read_without_waiting(&self, keys: &[BlockKey], call: CallContext) -> bool {
        if self.stages.is_empty() {
            return true;
        }
        let now_unix_ms = self.clock.unix_ms();
        keys.chunks(KEYS_PER_HOLD).all(|keys| {
            let mut found = Vec::with_capacity(keys.len());
            let Some(mut state) = self.lock_within(keys.len(), call) else { return false };
            state.charge_keys(keys);
            state.catalog.find_batch(keys, &mut found);
            self.needs_no_wait(&state, &found, now_unix_ms)
        })
    }
}

/// A put with the properties of a slab and without its bytes.
fn put_of_slab<'a>(slab: &PutSlab) -> Put<'a> {
    Put {
        key: slab.key,
        bytes: &[],
        parent: slab.parent,
        namespace: slab.namespace,
        is_prefix: slab.is_prefix,
        is_partial: slab.is_partial,
        ttl_ms: slab.ttl_ms,
    }
}
