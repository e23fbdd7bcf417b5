//! Calls for a caller that copies the bytes itself, in another process: the first phase of a
//! two-phase put, and checks whether a call would have to wait.

use std::time::Duration;

use cascade_block::{BlockKey, DigestMode};
use cascade_memory::Region;

use crate::call_context::{CallContext, KEYS_PER_LOCK};
use crate::eviction::Slot;
use crate::known::Known;
use crate::node::Node;
use crate::outcome::{Prepared, PutOutcome};
use crate::put::{PutCandidate, resident_ancestor};
use crate::{
    CallOptions, DeclineReason, Put, Store, StoreError, TierName, ViewOutcome, WritePolicy,
};

/// Maximum bytes of slabs in one step. A batch of large blocks takes several steps, so that the
/// copies of one step overlap with the evictions of the next.
const BATCH_BYTES: usize = 64 << 20;

impl Store {
    /// First phase of a two-phase put, for blocks whose bytes are in another process: allocates a
    /// slab of the given length for each new block, and decides the others. Ignores `Put::bytes`.
    /// The slabs take at most `bytes_max` bytes together; the blocks after the last that fits are
    /// [`Prepared::Later`], to be prepared in a further call.
    ///
    /// With a timeout of zero the call never waits. The first block that would have to wait fails
    /// with [`StoreError::Timeout`] or [`StoreError::Busy`] and is not counted; all blocks after it
    /// are [`Prepared::Later`].
    ///
    /// # Panics
    /// If the numbers of lengths and blocks differ.
    pub fn prepare(
        &self,
        batch: &[Put<'_>],
        lengths: &[usize],
        bytes_max: usize,
        options: CallOptions,
    ) -> Vec<Prepared> {
        assert_eq!(batch.len(), lengths.len(), "one length for each block");
        let limits = StepLimits {
            bytes_max,
            call: self.node().call(options),
            may_wait: options.timeout != Some(Duration::ZERO),
        };
        self.node().prepare(batch, lengths, limits, &mut ChainProgress::default())
    }

    /// As [`Store::prepare`], for a caller that fills all slabs before it seals any: every block
    /// gets a slab or an outcome, all within one deadline. The slabs of this call never make its
    /// later blocks wait. A key that is present with the same length is [`PutOutcome::Present`];
    /// its bytes are not compared.
    ///
    /// # Panics
    /// If the numbers of lengths and blocks differ.
    pub fn prepare_whole(
        &self,
        batch: &[Put<'_>],
        lengths: &[usize],
        options: CallOptions,
    ) -> Vec<Prepared> {
        assert_eq!(batch.len(), lengths.len(), "one length for each block");
        self.node().prepare_whole(batch, lengths, options)
    }

    /// Counts puts that the caller of [`Store::prepare`] completed itself: by a comparison, or by
    /// giving them up.
    pub fn count_settled(&self, present: u64, conflicts: u64, failures: u64) {
        self.node().count_settled(present, conflicts, failures);
    }

    /// Views of blocks for a comparison. Does not count as an access, and promotes nothing.
    pub fn inspect(&self, keys: &[BlockKey], options: CallOptions) -> Vec<ViewOutcome> {
        self.node().inspect(keys, options)
    }

    /// Whether [`Store::view`] of these blocks can be served without reading a lower tier.
    pub fn reads_at_once(&self, keys: &[BlockKey]) -> bool {
        self.node().reads_at_once(keys)
    }

    /// Whether [`Store::put_slabs`] of these blocks can be served without hashing, and without
    /// reading a lower tier or waiting for one.
    pub fn puts_at_once(&self, keys: &[BlockKey]) -> bool {
        self.node().puts_at_once(keys)
    }

    /// Whether a thread panicked while it held the lock of the store. Every further call panics
    /// too; the caller has to open a new store.
    pub fn is_broken(&self) -> bool {
        self.node().is_broken()
    }

    /// The names of the tiers, fast to slow. DRAM is first, even if the pipeline does not have it.
    pub fn tier_names(&self) -> &[TierName] {
        self.node().tier_names()
    }

    /// The shared memory of all blocks in DRAM, to map it in another process.
    pub fn region(&self) -> &Region {
        self.node().pool.region()
    }
}

/// Limits of one step of a preparation.
#[derive(Clone, Copy)]
struct StepLimits {
    bytes_max: usize,
    call: CallContext,
    /// False for a timeout of zero: the caller repeats the call, with time, for blocks that wait.
    may_wait: bool,
}

/// What a step passes on to the next step of the same batch.
#[derive(Default)]
struct ChainProgress {
    /// The last block that was declined.
    declined: Option<(BlockKey, DeclineReason)>,
    /// The last block that got a slab, and its nearest resident ancestor.
    previous: Option<(BlockKey, Option<Slot>)>,
}

impl Node {
    /// See [`crate::Store::prepare_whole`].
    fn prepare_whole(
        &self,
        batch: &[Put<'_>],
        lengths: &[usize],
        options: CallOptions,
    ) -> Vec<Prepared> {
        let limits = StepLimits { bytes_max: usize::MAX, call: self.call(options), may_wait: true };
        let mut chain = ChainProgress::default();
        let mut all = Vec::with_capacity(batch.len());
        while all.len() < batch.len() {
            // A step always decides its first block, so that this loop ends: slabs of earlier
            // steps do not count against the limits of a step.
            let (rest, lengths) = (&batch[all.len()..], &lengths[all.len()..]);
            if limits.call.has_timed_out(&*self.clock) {
                let late = || limits.call.timeout_error("prepare all blocks of a batch");
                let late = rest.iter().map(|_| Prepared::Settled(PutOutcome::Failed(late())));
                all.extend(late);
                self.count_settled(0, 0, rest.len() as u64);
                break;
            }
            let step = self.prepare(rest, lengths, limits, &mut chain);
            all.extend(step.into_iter().take_while(|one| !matches!(one, Prepared::Later)));
        }
        let mut present = 0;
        for prepared in &mut all {
            if matches!(prepared, Prepared::Compare) {
                *prepared = Prepared::Settled(PutOutcome::Present);
                present += 1;
            }
        }
        if present > 0 {
            self.count_settled(present, 0, 0);
        }
        all
    }

    fn count_settled(&self, present: u64, conflicts: u64, failures: u64) {
        let mut state = self.lock();
        let counters = &mut state.counters;
        counters.puts += present + conflicts + failures;
        counters.present += present;
        counters.conflicts += conflicts;
        counters.put_failures += failures;
    }

    /// One step of a preparation: see [`crate::Store::prepare`].
    fn prepare(
        &self,
        batch: &[Put<'_>],
        lengths: &[usize],
        StepLimits { bytes_max, call, may_wait }: StepLimits,
        ChainProgress { declined, previous }: &mut ChainProgress,
    ) -> Vec<Prepared> {
        let mut prepared = Vec::with_capacity(batch.len());
        let mut allocated_bytes = 0;
        let mut state = self.lock();
        let now = self.moment(&mut state);
        for (put, bytes) in batch.iter().zip(lengths).take(KEYS_PER_LOCK) {
            if allocated_bytes > 0 && allocated_bytes + bytes > bytes_max.min(BATCH_BYTES) {
                break;
            }
            let next = match self.known_by_length(&mut state, put, *bytes, None, now) {
                Known::Settled(outcome) => Prepared::Settled(outcome),
                Known::Compare => Prepared::Compare,
                // A lookup stops at a missing parent, so that this block could never be matched.
                Known::New if declined.is_some_and(|(key, _)| put.parent == Some(key)) => {
                    let (_, reason) = declined.expect("the guard has checked it");
                    *declined = Some((put.key, reason));
                    Prepared::Settled(PutOutcome::Declined(reason))
                }
                // A block larger than the pool is declined as `TooLarge` by the allocation below.
                Known::New if *bytes > bytes_max && *bytes <= self.pool.region().bytes() => {
                    Prepared::Settled(PutOutcome::Declined(DeclineReason::Full))
                }
                Known::New => {
                    let ancestor = resident_ancestor(&state, put, *previous);
                    let candidate = PutCandidate { put, bytes: *bytes, ancestor };
                    let holds_some = allocated_bytes > 0;
                    let (again, slab) = self.allocate_for_put(state, candidate, holds_some, call);
                    state = again;
                    match slab {
                        Ok(slab) => {
                            // The caller owns the slab now: no allocation waits for it.
                            state.slabs_in_flight -= 1;
                            allocated_bytes += slab.len().max(1);
                            *previous = Some((put.key, ancestor));
                            Prepared::Slab(slab)
                        }
                        // The slabs of this step may be the reason: let the caller seal them first.
                        Err(_) if holds_some => break,
                        Err(failure) => {
                            let outcome = self.outcome_without_slab(&state, failure, *bytes, call);
                            Prepared::Settled(outcome)
                        }
                    }
                }
            };
            if let Prepared::Settled(outcome) = &next {
                if let PutOutcome::Declined(reason) = outcome {
                    *declined = Some((put.key, *reason));
                }
                // The caller repeats the call with time to wait; only that call counts.
                if !may_wait && would_wait(outcome) {
                    prepared.push(next);
                    break;
                }
                state.count_put(&put.key, outcome);
            }
            prepared.push(next);
        }
        self.unlock(state);
        self.insight().shadows.declined(now.policy, batch, lengths, &prepared);
        prepared.resize_with(batch.len(), || Prepared::Later);
        prepared
    }

    /// Whether a read of these blocks can be served from memory alone.
    pub(crate) fn reads_at_once(&self, keys: &[BlockKey]) -> bool {
        if self.stages.is_empty() {
            return true;
        }
        let now_unix_ms = self.clock.unix_ms();
        keys.chunks(KEYS_PER_LOCK).all(|keys| {
            let mut found = Vec::with_capacity(keys.len());
            let state = self.lock();
            state.catalog.find_batch(keys, &mut found);
            found.into_iter().flatten().all(|key| {
                let entry = state.catalog.entry(key);
                let content = state.catalog.content(entry.content);
                entry.has_expired(now_unix_ms)
                    || content.slab.is_some()
                    || state.is_out_of_reach(content)
            })
        })
    }

    /// Whether a put of these blocks, written in place, can be served without waiting.
    pub(crate) fn puts_at_once(&self, keys: &[BlockKey]) -> bool {
        let waits_for_tiers = self.config.write == WritePolicy::Through
            || !self.pipeline.has_dram
            || self.config.digest != DigestMode::Off;
        !waits_for_tiers && self.reads_at_once(keys)
    }

    /// Views for a comparison: not counted, and nothing is promoted.
    pub(crate) fn inspect(&self, keys: &[BlockKey], options: CallOptions) -> Vec<ViewOutcome> {
        self.read_to_compare(keys, self.call(options))
    }
}

/// Whether a put failed only because it would have had to wait beyond its deadline.
fn would_wait(outcome: &PutOutcome) -> bool {
    matches!(outcome, PutOutcome::Failed(StoreError::Timeout { .. } | StoreError::Busy { .. }))
}
