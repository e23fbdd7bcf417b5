//! Put: allocate slabs, copy outside the lock, publish under it.
//!
//! A block enters the catalog only once its bytes are complete, so that no reader sees a partly
//! written block. A writer that fails leaves only a slab, which returns to the pool when dropped.

mod planted;

use std::time::Duration;

use cascade_block::{BlockKey, Digest, DigestMode};
use cascade_memory::{Slab, SlabMut};
use cascade_runtime::{Plant, is_planted};
use cascade_tier::{CallOptions, DeclineReason, Put, PutOutcome, StoreError};

use crate::calls::put_check::{Admission, PutCheck};
use crate::calls::put_end::DecidedPut;
use crate::calls::put_facts::{PutBytes, facts, new_key};
use crate::calls::put_room::{PutCandidate, resident_ancestor};
use crate::calls::read::Reads;
use crate::calls::write_through::waits_for_writes;
use crate::core::awaited::Place;
use crate::core::catalog::KeyIndex;
use crate::core::eviction::Slot;
use crate::core::state::StoreState;
use crate::shared::call::CallContext;
use crate::shared::hold::KEYS_PER_HOLD;
use crate::shared::room::{Room, free_unpublished};
use crate::shared::{StoreCore, Timestamps};

/// Maximum bytes that one round of a put holds outside the catalog.
const ROUND_BYTES: usize = 16 << 20;
/// Maximum number of blocks in one round.
const ROUND_BLOCKS: usize = 64;
/// Attempts for blocks that other callers put and delete concurrently.
const ATTEMPTS_MAX: u32 = 3;
/// A block with its slab, still to be filled and published.
struct AllocatedBlock {
    index: usize,
    slab: SlabMut,
}

/// The blocks of one round. All rounds of a put use the same memory.
#[derive(Default)]
struct Round {
    allocated: Vec<AllocatedBlock>,
    sealed: Vec<(usize, Slab)>,
}

/// Stores blocks: copies their bytes into the first tier.
pub(crate) fn put(core: &StoreCore, batch: &[Put<'_>], options: CallOptions) -> Vec<PutOutcome> {
    let mut round = Round::default();
    // `run` hashes before this copies, so that bytes already present are never copied.
    PutBatch::new(core, batch, PutBytes::of_puts(batch), options).run(|puts, undecided| {
        let mut rest = undecided;
        while !rest.is_empty() && !puts.fail_if_late(rest) {
            let done = puts.allocate_round(rest, &mut round.allocated);
            rest = &rest[done..];
            puts.fill_and_publish(&mut round);
        }
    })
}

/// Allocates a slab outside any batch, to write a block in place.
pub(crate) fn reserve(
    core: &StoreCore,
    bytes: usize,
    options: CallOptions,
) -> Result<SlabMut, StoreError> {
    core.check_in_place("reserve memory for a block")?;
    let call = core.call(options);
    let room = Room::new(core, call);
    let state = core.lock_or_time_out("allocate memory", call)?;
    let (state, has_room) = room.wait_for_backlog(state);
    if state.is_closing {
        return Err(StoreError::Closed);
    }
    if state.is_erasing {
        return Err(StoreError::Erasing);
    }
    if !has_room {
        return Err(room.busy_error(&state));
    }
    let (mut state, slab) = room.allocate(state, bytes, false, None);
    let slab = slab.map_err(|failure| room.error(&state, failure, bytes))?;
    // The caller owns the slab now and may keep it for any time: no allocation waits for it.
    state.memory.slabs_in_flight -= 1;
    Ok(slab)
}

/// State of one put call.
pub(super) struct PutBatch<'a> {
    core: &'a StoreCore,
    pub(super) batch: &'a [Put<'a>],
    bytes: PutBytes<'a>,
    digests: Vec<Option<Digest>>,
    outcomes: Vec<Option<PutOutcome>>,
    /// The last block that was declined. Its descendants are declined too, also in later rounds:
    /// there a child would look like a block without a parent and evict its own ancestors.
    declined: Option<(BlockKey, DeclineReason)>,
    /// The blocks that were stored, if the put waits for their writes.
    awaited: Vec<(usize, Place)>,
    /// The number of leading blocks whose outcomes the history knows, and when it learned the last.
    noted: (usize, Duration),
    pub(super) call: CallContext,
}

impl<'a> PutBatch<'a> {
    pub(super) fn new(
        core: &'a StoreCore,
        batch: &'a [Put<'a>],
        bytes: PutBytes<'a>,
        options: CallOptions,
    ) -> Self {
        let outcomes = batch.iter().map(|_| None).collect();
        let digests = vec![None; batch.len()];
        let call = core.call(options);
        let awaited = Vec::new();
        let noted = (0, Duration::ZERO);
        Self { core, batch, bytes, digests, outcomes, declined: None, awaited, noted, call }
    }

    /// Puts the blocks. `put_undecided` decides the blocks with the given indices. A block with a
    /// present key gets no outcome there: its bytes are compared afterwards.
    pub(super) fn run(
        mut self,
        mut put_undecided: impl FnMut(&mut Self, &[usize]),
    ) -> Vec<PutOutcome> {
        self.hash();
        for _ in 0..ATTEMPTS_MAX {
            let undecided = self.undecided();
            if undecided.is_empty() {
                break;
            }
            put_undecided(&mut self, &undecided);
            // Without digests, a present key is compared by its bytes. If the key was deleted in
            // the meantime, the comparison has no result and the next attempt puts a new block.
            self.compare_undecided();
        }
        let Self { core, batch, bytes, outcomes, mut awaited, noted, call, .. } = self;
        // Only a key that others deleted in every attempt, between the check and the comparison,
        // has no outcome here.
        let retries_exhausted = || {
            let operation = "put a key that other callers delete";
            PutOutcome::Failed(call.timeout_error(operation))
        };
        let outcomes =
            outcomes.into_iter().map(|outcome| outcome.unwrap_or_else(retries_exhausted));
        awaited.sort_unstable_by_key(|(index, _)| *index);
        DecidedPut { core, batch, bytes, outcomes: outcomes.collect(), call }.end(&awaited, noted)
    }

    /// The blocks without an outcome so far.
    pub(super) fn undecided(&self) -> Vec<usize> {
        (0..self.batch.len()).filter(|at| self.outcomes[*at].is_none()).collect()
    }

    /// If the deadline has passed, fails these blocks and returns true.
    pub(super) fn fail_if_late(&mut self, undecided: &[usize]) -> bool {
        if !self.call.has_timed_out(&*self.core.clock) {
            return false;
        }
        for at in undecided {
            let late = self.call.timeout_error("put all blocks of a batch");
            self.outcomes[*at] = Some(PutOutcome::Failed(late));
        }
        true
    }

    /// Computes the digests of the blocks, if digests are on, until the deadline.
    fn hash(&mut self) {
        let DigestMode::On(algorithm) = self.core.config.digest else { return };
        let undecided = self.undecided();
        // Without the lock, so that hashing a large batch delays no other call.
        for at in 0..undecided.len() {
            if self.fail_if_late(&undecided[at..]) {
                return;
            }
            match self.bytes.read(at) {
                Ok(bytes) => self.digests[at] = Some(Digest::of(algorithm, &bytes)),
                Err(error) => {
                    self.outcomes[at] = Some(PutOutcome::Failed(StoreError::Device(error)));
                }
            }
        }
    }

    /// Decides blocks until a round is full. Adds slabs to fill, and returns how many blocks were
    /// decided.
    fn allocate_round(
        &mut self,
        undecided: &[usize],
        allocated: &mut Vec<AllocatedBlock>,
    ) -> usize {
        let (keys, mut allocated_bytes) = (undecided.len().min(ROUND_BLOCKS), 0);
        allocated.reserve(keys);
        let (core, room) = (self.core, Room::new(self.core, self.call));
        // The last block that got a slab in this round, and its nearest resident ancestor.
        let mut previous: Option<(BlockKey, Option<Slot>)> = None;
        let Some(mut state) = core.lock_within(keys, self.call) else {
            self.fail_if_late(undecided);
            return undecided.len();
        };
        let admission = Admission::new(core, &mut state);
        for (done, at) in undecided.iter().enumerate() {
            // Both limits are checked before the block is decided, and need an earlier one: every
            // round decides at least one block, also one that is larger than a round.
            let is_full = allocated.len() == ROUND_BLOCKS || allocated_bytes >= ROUND_BYTES;
            if is_full || state.is_hold_full() {
                core.unlock(state);
                return done;
            }
            state.charge(1);
            let put = &self.batch[*at];
            match admission.check(&mut state, put, put.bytes.len(), self.digests[*at]) {
                PutCheck::Settled(outcome) => self.outcomes[*at] = Some(outcome),
                PutCheck::Compare => {}
                // A lookup stops at a missing parent, so that this block could never be matched.
                PutCheck::New(_)
                    if self.declined.is_some_and(|(key, _)| put.parent == Some(key)) =>
                {
                    let (_, reason) = self.declined.expect("the guard has checked it");
                    self.declined = Some((put.key, reason));
                    self.outcomes[*at] = Some(PutOutcome::Declined(reason));
                }
                PutCheck::New(_) => {
                    let (bytes, holds_some) = (put.bytes.len(), !allocated.is_empty());
                    let ancestor = resident_ancestor(&state, put, previous);
                    let candidate = PutCandidate { put, bytes, ancestor };
                    let (again, slab) = candidate.allocate(room, state, holds_some);
                    state = again;
                    match slab {
                        Ok(slab) => {
                            previous = Some((put.key, ancestor));
                            allocated_bytes += slab.len();
                            allocated.push(AllocatedBlock { index: *at, slab });
                        }
                        // The slabs of this round may be the reason: publish them first, then
                        // decide this block again.
                        Err(_) if !allocated.is_empty() => {
                            core.unlock(state);
                            return done;
                        }
                        Err(failure) => {
                            let outcome = candidate.outcome_without_slab(room, &state, failure);
                            if let PutOutcome::Declined(reason) = outcome {
                                self.declined = Some((put.key, reason));
                            }
                            self.outcomes[*at] = Some(outcome);
                        }
                    }
                }
            }
        }
        core.unlock(state);
        undecided.len()
    }

    /// Copies the bytes without the lock, then publishes all blocks of the round under it.
    fn fill_and_publish(&mut self, round: &mut Round) {
        let Round { allocated, sealed } = round;
        let mut failed = 0;
        for AllocatedBlock { index, mut slab } in allocated.drain(..) {
            match slab.fill_from(self.batch[index].bytes) {
                Ok(()) => sealed.push((index, slab.seal())),
                Err(error) => {
                    self.outcomes[index] = Some(PutOutcome::Failed(StoreError::Device(error)));
                    failed += 1;
                }
            }
        }
        if failed > 0 {
            self.core.lock().memory.slabs_in_flight -= failed;
            self.core.notify_changed();
        }
        if sealed.is_empty() {
            return;
        }
        if is_planted(Plant::EarlyPublish) {
            self.publish_unfilled(sealed);
            return sealed.clear();
        }
        let Some(mut state) = self.core.lock_within(sealed.len(), self.call) else {
            let late: Vec<usize> = sealed.iter().map(|(index, _)| *index).collect();
            self.fail_if_late(&late);
            return free_unpublished(self.core, sealed);
        };
        state.charge_keys(sealed);
        let admission = Admission::new(self.core, &mut state);
        for (index, slab) in sealed.drain(..) {
            // Under the same hold of the lock as the publication: an allocation that counts what
            // may become free never misses this slab.
            state.memory.slabs_in_flight -= 1;
            self.publish_new(&mut state, index, &slab, admission);
        }
        self.note_decided(&mut state, admission.now);
        drop(state);
        self.core.notify_movers();
        self.core.notify_changed();
    }

    /// Publishes a block, unless another thread has put the same key or the same bytes meanwhile.
    pub(super) fn publish_new(
        &mut self,
        state: &mut StoreState,
        index: usize,
        slab: &Slab,
        admission: Admission<'_>,
    ) {
        let (put, digest) = (&self.batch[index], self.digests[index]);
        self.outcomes[index] = match admission.check(state, put, slab.len(), digest) {
            PutCheck::Settled(outcome) => Some(outcome),
            PutCheck::Compare => None,
            PutCheck::New(known) => {
                let block = (put, digest, slab.clone());
                let place = self.publish(state, block, known, admission.now);
                if waits_for_writes(self.core) {
                    state.awaited.begin(place);
                    self.awaited.push((index, place));
                }
                // A present key keeps the lifetime of its first put, as if its bytes could be read.
                let outcome =
                    if known.is_some() { PutOutcome::Present } else { PutOutcome::Stored };
                Some(outcome)
            }
        };
    }

    /// Tells the history of the outcomes that are known under the same hold of the lock, in the
    /// order of the blocks.
    pub(super) fn note_decided(&mut self, state: &mut StoreState, now: Timestamps) {
        // A put that waits for its writes may still fail.
        if waits_for_writes(self.core) {
            return;
        }
        let first = self.noted.0;
        let outcomes = self.outcomes[first..].iter().map_while(Option::as_ref);
        for (put, outcome) in self.batch[first..].iter().zip(outcomes).take(KEYS_PER_HOLD) {
            state.note_unstored_put(&put.key, outcome);
            self.noted.0 += 1;
        }
        self.noted.1 = now.policy;
    }

    fn compare_undecided(&mut self) {
        let undecided = self.undecided();
        for piece in undecided.chunks(self.bytes.read_at_once()) {
            self.compare(piece);
        }
    }

    fn compare(&mut self, undecided: &[usize]) {
        let mut blocks = Vec::with_capacity(undecided.len());
        let mut compared = Vec::with_capacity(undecided.len());
        for at in undecided {
            match self.bytes.read(*at) {
                Ok(bytes) => {
                    blocks.push((self.batch[*at].key, bytes));
                    compared.push(*at);
                }
                Err(error) => {
                    self.outcomes[*at] = Some(PutOutcome::Failed(StoreError::Device(error)));
                }
            }
        }
        for (at, is_same) in compared.iter().zip(Reads::new(self.core, self.call).compare(&blocks))
        {
            self.outcomes[*at] = outcome_of_comparison(is_same);
        }
    }

    /// Adds a block to the catalog, queues it for all stages that do not have it, and makes it
    /// resident.
    fn publish(
        &self,
        state: &mut StoreState,
        (put, digest, slab): (&Put<'_>, Option<Digest>, Slab),
        known: Option<KeyIndex>,
        now: Timestamps,
    ) -> Place {
        let mut facts = facts(&*self.core.clock, put, slab.len(), digest);
        let bytes = u64::from(facts.bytes);
        state.counters.bytes_written += bytes;
        let (key, content) = if let Some(key) = known {
            // Only stages with an open read circuit have the block, and its digest is the same:
            // their copies stay, and this put brings the bytes back to DRAM. The lifetime and the
            // protection are those of the first put, also in the ledger and in other stages.
            let entry = state.catalog.entry(key);
            facts.expires_unix_ms = (entry.expires_unix_ms != 0).then_some(entry.expires_unix_ms);
            facts.is_prefix = entry.is_prefix();
            (key, entry.content)
        } else {
            state.content_bytes += bytes;
            state.catalog.insert(&new_key(&facts), facts.bytes, digest)
        };
        state.history.forget(&put.key);
        let put_stamp = state.history.stamp();
        let entry = state.catalog.content_mut(content);
        entry.put_stamp = put_stamp;
        entry.writer = self.call.writer.map_or(0, |writer| writer.0.get());
        let place = (content, entry.generation);
        state.put_slab(content, slab, Some(&facts));
        for stage in 0..self.core.stages.len() {
            if !state.catalog.content(content).has_address(stage) {
                state.push_block(stage, facts, content);
            }
        }
        state.make_resident(key, now.policy);
        place
    }
}

/// The outcome of a put after the comparison of bytes. `None` if the key was deleted meanwhile.
fn outcome_of_comparison(is_same: Result<Option<bool>, StoreError>) -> Option<PutOutcome> {
    match is_same {
        Ok(Some(true)) => Some(PutOutcome::Present),
        Ok(Some(false)) => Some(PutOutcome::Conflict),
        Ok(None) => None,
        Err(error) => Some(PutOutcome::Failed(error)),
    }
}
