//! Calls for a caller that copies the bytes itself, in another process: the first phase of a
//! two-phase put, and checks whether a call would have to wait.

use std::time::Duration;

use cascade_block::BlockKey;
use cascade_memory::Region;
use cascade_tier::{
    CallOptions, DeclineReason, PrepareOutcome, Put, PutOutcome, StoreError, TierName, ViewOutcome,
};

use crate::Store;
use crate::calls::put_check::{Admission, PutCheck};
use crate::calls::put_room::{PutCandidate, resident_ancestor};
use crate::calls::read::Reads;
use crate::calls::read_flow::ReadPurpose;
use crate::calls::resident_views::failed_views;
use crate::core::eviction::Slot;
use crate::shared::StoreCore;
use crate::shared::call::CallContext;
use crate::shared::call_counts::CallCounts;
use crate::shared::hold::{KEYS_PER_HOLD, StateGuard};
use crate::shared::room::Room;

/// Maximum bytes of slabs in one step. A batch of large blocks takes several steps, so that the
/// copies of one step overlap with the evictions of the next.
/// The first slab of a step is exempt, so that every step decides at least one block.
const BATCH_BYTES: usize = 64 << 20;

impl Store {
    /// First phase of a two-phase put, for blocks whose bytes are in another process: allocates a
    /// slab of the given length for each new block, and decides the others. Ignores `Put::bytes`.
    /// The slabs take at most `bytes_max` bytes together; the blocks after the last that fits are
    /// [`PrepareOutcome::Deferred`], to be prepared in a further call.
    ///
    /// With a timeout of zero the call never waits. The first block that would have to wait fails
    /// with [`StoreError::Timeout`] or [`StoreError::Busy`] and is not counted; all blocks after it
    /// are [`PrepareOutcome::Deferred`].
    ///
    /// # Panics
    /// If the numbers of lengths and blocks differ.
    pub fn prepare(
        &self,
        batch: &[Put<'_>],
        lengths: &[usize],
        bytes_max: usize,
        options: CallOptions,
    ) -> Vec<PrepareOutcome> {
        assert_eq!(batch.len(), lengths.len(), "one length for each block");
        if let Some(refused) = self.refused_preparation(batch) {
            return refused;
        }
        let limits = StepLimits {
            bytes_max,
            call: self.core().call(options),
            may_wait: options.timeout != Some(Duration::ZERO),
        };
        Preparation::new(self.core(), limits).step(batch, lengths)
    }

    /// As [`Store::prepare`], for a caller that fills all slabs before it seals any: every block
    /// gets a slab or an outcome, all within one deadline. The slabs of this call never make its
    /// later blocks wait. A key that is present with the same length is [`PutOutcome::Present`];
    /// its bytes are not compared.
    ///
    /// # Panics
    /// If the numbers of lengths and blocks differ.
    pub fn prepare_all(
        &self,
        batch: &[Put<'_>],
        lengths: &[usize],
        options: CallOptions,
    ) -> Vec<PrepareOutcome> {
        assert_eq!(batch.len(), lengths.len(), "one length for each block");
        if let Some(refused) = self.refused_preparation(batch) {
            return refused;
        }
        let call = self.core().call(options);
        let limits = StepLimits { bytes_max: usize::MAX, call, may_wait: true };
        Preparation::new(self.core(), limits).all(batch, lengths)
    }

    /// The outcomes if no caller can fill slabs in place.
    fn refused_preparation(&self, batch: &[Put<'_>]) -> Option<Vec<PrepareOutcome>> {
        let error = self.core().check_in_place("prepare blocks").err()?;
        let refused = |_| PrepareOutcome::Settled(PutOutcome::Failed(error.clone()));
        Some(batch.iter().map(refused).collect())
    }

    /// Counts puts that the caller of [`Store::prepare`] completed itself: by a comparison, or by
    /// giving them up.
    pub fn count_completed_puts(&self, present: u64, conflicts: u64, failures: u64) {
        count_completed_puts(self.core(), present, conflicts, failures);
    }

    /// Views of blocks for a comparison. Does not count as an access, and promotes nothing.
    pub fn peek(&self, keys: &[BlockKey], options: CallOptions) -> Vec<ViewOutcome> {
        let core = self.core();
        if let Err(error) = core.check_in_place("view blocks") {
            return failed_views(keys, &error);
        }
        Reads::new(core, core.call(options)).read(keys, ReadPurpose::Compare)
    }

    /// Whether a thread panicked while it held the lock of the store. Every further call panics
    /// too; the caller has to open a new store.
    pub fn is_poisoned(&self) -> bool {
        self.core().is_poisoned()
    }

    /// The names of the tiers, fast to slow, then of the sources. DRAM is first, even if the
    /// pipeline does not have it.
    pub fn tier_names(&self) -> &[TierName] {
        self.core().tier_names()
    }

    /// The shared memory of all blocks in DRAM, to map it in another process.
    pub fn region(&self) -> &Region {
        self.core().pool.region()
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

/// A preparation of a batch, in one or several steps.
struct Preparation<'a> {
    core: &'a StoreCore,
    limits: StepLimits,
    chain: ChainProgress,
}

impl<'a> Preparation<'a> {
    fn new(core: &'a StoreCore, limits: StepLimits) -> Self {
        Self { core, limits, chain: ChainProgress::default() }
    }

    /// See [`crate::Store::prepare_all`].
    fn all(mut self, batch: &[Put<'_>], lengths: &[usize]) -> Vec<PrepareOutcome> {
        let (core, call) = (self.core, self.limits.call);
        let mut all = Vec::with_capacity(batch.len());
        while all.len() < batch.len() {
            // A step always decides its first block, so that this loop ends: slabs of earlier
            // steps do not count against the limits of a step.
            let (rest, lengths) = (&batch[all.len()..], &lengths[all.len()..]);
            if call.has_timed_out(&*core.clock) {
                let late = || call.timeout_error("prepare all blocks of a batch");
                let late = rest.iter().map(|_| PrepareOutcome::Settled(PutOutcome::Failed(late())));
                all.extend(late);
                count_completed_puts(core, 0, 0, rest.len() as u64);
                break;
            }
            let step = self.step(rest, lengths);
            all.extend(step.into_iter().take_while(|one| !matches!(one, PrepareOutcome::Deferred)));
        }
        let mut present = 0;
        for prepared in &mut all {
            if matches!(prepared, PrepareOutcome::Compare) {
                *prepared = PrepareOutcome::Settled(PutOutcome::Present);
                present += 1;
            }
        }
        if present > 0 {
            count_completed_puts(core, present, 0, 0);
        }
        all
    }

    /// One step of a preparation: see [`crate::Store::prepare`].
    fn step(&mut self, batch: &[Put<'_>], lengths: &[usize]) -> Vec<PrepareOutcome> {
        let (core, call) = (self.core, self.limits.call);
        if let Some(state) = core.lock_within(batch.len(), call) {
            return self.step_locked(state, batch, lengths);
        }
        count_completed_puts(core, 0, 0, batch.len() as u64);
        let late = || PutOutcome::Failed(call.timeout_error("prepare all blocks of a batch"));
        batch.iter().map(|_| PrepareOutcome::Settled(late())).collect()
    }

    fn step_locked(
        &mut self,
        mut state: StateGuard<'a>,
        batch: &[Put<'_>],
        lengths: &[usize],
    ) -> Vec<PrepareOutcome> {
        let (core, StepLimits { bytes_max, call, may_wait }) = (self.core, self.limits);
        let ChainProgress { declined, previous } = &mut self.chain;
        let mut prepared = Vec::with_capacity(batch.len());
        let mut allocated_bytes = 0;
        let admission = Admission::new(core, &mut state);
        for (put, bytes) in batch.iter().zip(lengths).take(KEYS_PER_HOLD) {
            if allocated_bytes > 0 && allocated_bytes + bytes > bytes_max.min(BATCH_BYTES) {
                break;
            }
            state = core.end_full_hold(state);
            state.charge(1);
            let next = match admission.check(&mut state, put, *bytes, None) {
                PutCheck::Settled(outcome) => PrepareOutcome::Settled(outcome),
                PutCheck::Compare => PrepareOutcome::Compare,
                // A lookup stops at a missing parent, so that this block could never be matched.
                PutCheck::New(_) if declined.is_some_and(|(key, _)| put.parent == Some(key)) => {
                    let (_, reason) = declined.expect("the guard has checked it");
                    PrepareOutcome::Settled(PutOutcome::Declined(reason))
                }
                // A block larger than the pool is declined as `TooLarge` by the allocation below.
                PutCheck::New(_) if *bytes > bytes_max && *bytes <= core.pool.capacity_bytes() => {
                    PrepareOutcome::Settled(PutOutcome::Declined(DeclineReason::Full))
                }
                PutCheck::New(_) => {
                    let ancestor = resident_ancestor(&state, put, *previous);
                    let candidate = PutCandidate { put, bytes: *bytes, ancestor };
                    let (room, holds_some) = (Room::new(core, call), allocated_bytes > 0);
                    let (again, slab) = candidate.allocate(room, state, holds_some);
                    state = again;
                    match slab {
                        Ok(slab) => {
                            // The caller owns the slab now: no allocation waits for it.
                            state.memory.slabs_in_flight -= 1;
                            allocated_bytes += slab.len().max(1);
                            *previous = Some((put.key, ancestor));
                            PrepareOutcome::Slab(slab)
                        }
                        // The slabs of this step may be the reason: let the caller seal them first.
                        Err(_) if holds_some => break,
                        Err(failure) => {
                            let outcome = candidate.outcome_without_slab(room, &state, failure);
                            PrepareOutcome::Settled(outcome)
                        }
                    }
                }
            };
            if let PrepareOutcome::Settled(outcome) = &next {
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
        core.unlock(state);
        core.insight().shadows.declined(admission.now.policy, batch, lengths, &prepared);
        prepared.resize_with(batch.len(), || PrepareOutcome::Deferred);
        prepared
    }
}

fn count_completed_puts(core: &StoreCore, present: u64, conflicts: u64, failures: u64) {
    let mut counts = CallCounts::default();
    counts.counters.puts = present + conflicts + failures;
    counts.counters.present = present;
    counts.counters.conflicts = conflicts;
    counts.counters.put_failures = failures;
    core.count_call(&counts);
}

/// Whether a put failed only because it would have had to wait beyond its deadline.
fn would_wait(outcome: &PutOutcome) -> bool {
    matches!(outcome, PutOutcome::Failed(StoreError::Timeout { .. } | StoreError::Busy { .. }))
}
