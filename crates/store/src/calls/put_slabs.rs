//! Put of slabs that the caller has filled, such as the second phase of a two-phase put.

use std::time::Duration;

use cascade_block::{BlockKey, DigestMode};
use cascade_memory::RegionKind;
use cascade_tier::{CallOptions, Put, PutOutcome, PutSlab};

use crate::Store;
use crate::calls::put::PutBatch;
use crate::calls::put_check::Admission;
use crate::calls::put_facts::PutBytes;
use crate::calls::resident_views::needs_no_wait;
use crate::calls::write_through::waits_for_writes;
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
        put_slabs(self.core(), batch, options, &mut may_wait)
    }
}

/// Publishes blocks that the caller wrote in place, without a copy. See
/// [`crate::Store::put_slabs_with`].
pub(crate) fn put_slabs(
    core: &StoreCore,
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
    let is_on_device = core.pool.kind() == RegionKind::Device;
    for (put, slab) in puts.iter_mut().zip(&slabs) {
        if slab.kind() != core.pool.kind() || (is_on_device && !slab.is_of(&core.pool)) {
            // `reserve` and `prepare` give none of these.
            let refused = || PutOutcome::Failed(core.not_host_memory("put a slab"));
            return slabs.iter().map(|_| refused()).collect();
        }
        put.bytes = slab.host().unwrap_or_default();
    }
    let bytes =
        if is_on_device { PutBytes::on_device(&puts, &slabs) } else { PutBytes::of_puts(&puts) };
    let at_once = CallOptions { timeout: Some(Duration::ZERO), ..options };
    let waits = waits_for_writes(core)
        || !core.pipeline.keeps_in_memory
        || core.config.digest != DigestMode::Off;
    let mut has_permission = waits && may_wait();
    let first = if waits && !has_permission { at_once } else { options };
    PutBatch::new(core, &puts, bytes, first).run(|puts, undecided| {
        for (at, round) in undecided.chunks(KEYS_PER_HOLD).enumerate() {
            if puts.fail_if_late(&undecided[at * KEYS_PER_HOLD..]) {
                break;
            }
            // No back-pressure here: the slabs are allocated already, so waiting would free no
            // memory. `reserve` and `prepare` have waited for the backlog.
            let Some(mut state) = core.lock_within(round.len(), puts.call) else {
                puts.fail_if_late(&undecided[at * KEYS_PER_HOLD..]);
                break;
            };
            state.charge_keys(round);
            let admission = Admission::new(core, &mut state);
            for at in round {
                puts.publish_new(&mut state, *at, &slabs[*at], admission);
            }
            puts.note_decided(&mut state, admission.now);
        }
        core.notify_movers();
        if !waits && !has_permission && has_to_read(core, puts) {
            has_permission = may_wait();
            puts.call = core.call(if has_permission { options } else { at_once });
        }
    })
}

/// Whether blocks without an outcome have to be compared with bytes that are only in a lower
/// tier.
fn has_to_read(core: &StoreCore, puts: &PutBatch<'_>) -> bool {
    let undecided = puts.undecided();
    let keys: Vec<BlockKey> = undecided.iter().map(|at| puts.batch[*at].key).collect();
    !keys.is_empty() && !can_read_without_waiting(core, &keys, puts.call)
}

/// Whether a read of these blocks can be served from memory alone. False if the deadline passes
/// before it is known.
fn can_read_without_waiting(core: &StoreCore, keys: &[BlockKey], call: CallContext) -> bool {
    if core.stages.is_empty() {
        return true;
    }
    let now_unix_ms = core.clock.unix_ms();
    keys.chunks(KEYS_PER_HOLD).all(|keys| {
        let mut found = Vec::with_capacity(keys.len());
        let Some(mut state) = core.lock_within(keys.len(), call) else { return false };
        state.charge_keys(keys);
        state.catalog.find_batch(keys, &mut found);
        needs_no_wait(core, &state, &found, now_unix_ms)
    })
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
