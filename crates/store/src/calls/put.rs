//! Put: allocate slabs, copy outside the lock, publish under it.
//!
//! A block enters the catalog only once its bytes are complete, so that no reader sees a partly
//! written block. A writer that fails leaves only a slab, which returns to the pool when dropped.

use std::time::Duration;

use cascade_block::{BlockKey, Digest, DigestMode};
use cascade_memory::{Slab, SlabMut};
use cascade_runtime::{Clock, Plant, is_planted};
use cascade_tier::tier::BlockFacts;
use cascade_tier::{CallOptions, DeclineReason, Put, PutOutcome, StoreError};

use crate::calls::put_check::PutCheck;
use crate::core::awaited::Place;
use crate::core::catalog::{ContentIndex, KeyIndex, NewKey};
use crate::core::eviction::{Incoming, Slot};
use crate::core::state::StoreState;
use crate::shared::call::CallContext;
use crate::shared::hold::{KEYS_PER_HOLD, StateGuard};
use crate::shared::{AllocationFailure, StoreCore, Timestamps};

/// Maximum bytes that one round of a put holds outside the catalog.
const ROUND_BYTES: usize = 16 << 20;
/// Maximum number of blocks in one round.
const ROUND_BLOCKS: usize = 64;
/// Attempts for blocks that other callers put and delete concurrently.
const ATTEMPTS_MAX: u32 = 3;
/// Backlog of key changes of one stage at which puts wait.
/// Deduplicated puts and deletions queue changes without bytes: the limit of bytes does not bound
/// them.
const KEY_CHANGES_WAITING_MAX: usize = 64 << 10;

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

/// State of one put call.
pub(super) struct PutBatch<'a> {
    pub(super) batch: &'a [Put<'a>],
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

impl PutBatch<'_> {
    /// The blocks without an outcome so far.
    pub(super) fn undecided(&self) -> Vec<usize> {
        (0..self.batch.len()).filter(|at| self.outcomes[*at].is_none()).collect()
    }

    /// If the deadline has passed, fails these blocks and returns true.
    pub(super) fn fail_if_late(&mut self, undecided: &[usize], clock: &dyn Clock) -> bool {
        if !self.call.has_timed_out(clock) {
            return false;
        }
        for at in undecided {
            let late = self.call.timeout_error("put all blocks of a batch");
            self.outcomes[*at] = Some(PutOutcome::Failed(late));
        }
        true
    }
}

/// A new block that needs a slab.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PutCandidate<'a> {
    pub(crate) put: &'a Put<'a>,
    /// Length of the block; `put.bytes` is empty in a two-phase put.
    pub(crate) bytes: usize,
    /// The nearest resident ancestor.
    pub(crate) ancestor: Option<Slot>,
}

impl StoreCore {
    pub(crate) fn put(&self, batch: &[Put<'_>], options: CallOptions) -> Vec<PutOutcome> {
        let mut round = Round::default();
        // `put_all` hashes before this copies, so that bytes already present are never copied.
        self.put_all(batch, options, |puts, undecided| {
            let mut rest = undecided;
            while !rest.is_empty() && !puts.fail_if_late(rest, &*self.clock) {
                let done = self.allocate_round(puts, rest, &mut round.allocated);
                rest = &rest[done..];
                self.fill_and_publish(puts, &mut round);
            }
        })
    }

    /// Puts blocks. `put_undecided` decides the blocks with the given indices. A block with a
    /// present key gets no outcome there: its bytes are compared afterwards.
    pub(super) fn put_all(
        &self,
        batch: &[Put<'_>],
        options: CallOptions,
        mut put_undecided: impl FnMut(&mut PutBatch<'_>, &[usize]),
    ) -> Vec<PutOutcome> {
        let outcomes = batch.iter().map(|_| None).collect();
        let digests = vec![None; batch.len()];
        let call = self.call(options);
        let awaited = Vec::new();
        let noted = (0, Duration::ZERO);
        let mut puts = PutBatch { batch, digests, outcomes, declined: None, awaited, noted, call };
        self.hash(&mut puts);
        for _ in 0..ATTEMPTS_MAX {
            let undecided = puts.undecided();
            if undecided.is_empty() {
                break;
            }
            put_undecided(&mut puts, &undecided);
            // Without digests, a present key is compared by its bytes. If the key was deleted in
            // the meantime, the comparison has no result and the next attempt puts a new block.
            self.compare_undecided(&mut puts);
        }
        let PutBatch { outcomes, mut awaited, noted, call, .. } = puts;
        // Only a key that others deleted in every attempt, between the check and the comparison,
        // has no outcome here.
        let retries_exhausted = || {
            let operation = "put a key that other callers delete";
            PutOutcome::Failed(call.timeout_error(operation))
        };
        let outcomes =
            outcomes.into_iter().map(|outcome| outcome.unwrap_or_else(retries_exhausted));
        awaited.sort_unstable_by_key(|(index, _)| *index);
        self.end_put(batch, outcomes.collect(), (&awaited, noted), call)
    }

    /// Allocates a slab outside any batch, to write a block in place.
    pub(crate) fn reserve(
        &self,
        bytes: usize,
        options: CallOptions,
    ) -> Result<SlabMut, StoreError> {
        let call = self.call(options);
        let state = self.lock_or_time_out("allocate memory in DRAM", call)?;
        let (state, has_room) = self.wait_for_backlog(state, call);
        if state.is_closing {
            return Err(StoreError::Closed);
        }
        if state.is_erasing {
            return Err(StoreError::Erasing);
        }
        if !has_room {
            return Err(self.busy_error(&state));
        }
        let (mut state, slab) = self.allocate_slab(state, bytes, false, None, call);
        let slab = slab.map_err(|failure| self.allocation_error(&state, failure, bytes, call))?;
        // The caller owns the slab now and may keep it for any time: no allocation waits for it.
        state.slabs_in_flight -= 1;
        Ok(slab)
    }

    /// Computes the digests of the blocks, if digests are on, until the deadline.
    fn hash(&self, puts: &mut PutBatch<'_>) {
        let DigestMode::On(algorithm) = self.config.digest else { return };
        let undecided = puts.undecided();
        // Without the lock, so that hashing a large batch delays no other call.
        for at in 0..undecided.len() {
            if puts.fail_if_late(&undecided[at..], &*self.clock) {
                return;
            }
            puts.digests[at] = Some(Digest::of(algorithm, puts.batch[at].bytes));
        }
    }

    /// Decides blocks until a round is full. Adds slabs to fill, and returns how many blocks were
    /// decided.
    fn allocate_round(
        &self,
        puts: &mut PutBatch<'_>,
        undecided: &[usize],
        allocated: &mut Vec<AllocatedBlock>,
    ) -> usize {
        let (keys, mut allocated_bytes) = (undecided.len().min(ROUND_BLOCKS), 0);
        allocated.reserve(keys);
        // The last block that got a slab in this round, and its nearest resident ancestor.
        let mut previous: Option<(BlockKey, Option<Slot>)> = None;
        let Some(mut state) = self.lock_within(keys, puts.call) else {
            puts.fail_if_late(undecided, &*self.clock);
            return undecided.len();
        };
        let now = self.timestamps(&mut state);
        for (done, at) in undecided.iter().enumerate() {
            // Both limits are checked before the block is decided, and need an earlier one: every
            // round decides at least one block, also one that is larger than a round.
            let is_full = allocated.len() == ROUND_BLOCKS || allocated_bytes >= ROUND_BYTES;
            if is_full || state.is_hold_full() {
                self.unlock(state);
                return done;
            }
            state.charge(1);
            let put = &puts.batch[*at];
            match self.check_put(&mut state, put, puts.digests[*at], now) {
                PutCheck::Settled(outcome) => puts.outcomes[*at] = Some(outcome),
                PutCheck::Compare => {}
                // A lookup stops at a missing parent, so that this block could never be matched.
                PutCheck::New(_)
                    if puts.declined.is_some_and(|(key, _)| put.parent == Some(key)) =>
                {
                    let (_, reason) = puts.declined.expect("the guard has checked it");
                    puts.declined = Some((put.key, reason));
                    puts.outcomes[*at] = Some(PutOutcome::Declined(reason));
                }
                PutCheck::New(_) => {
                    let (bytes, holds_some) = (put.bytes.len(), !allocated.is_empty());
                    let ancestor = resident_ancestor(&state, put, previous);
                    let candidate = PutCandidate { put, bytes, ancestor };
                    let (again, slab) =
                        self.allocate_for_put(state, candidate, holds_some, puts.call);
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
                            self.unlock(state);
                            return done;
                        }
                        Err(failure) => {
                            let outcome =
                                self.outcome_without_slab(&state, failure, bytes, puts.call);
                            if let PutOutcome::Declined(reason) = outcome {
                                puts.declined = Some((put.key, reason));
                            }
                            puts.outcomes[*at] = Some(outcome);
                        }
                    }
                }
            }
        }
        self.unlock(state);
        undecided.len()
    }

    /// Allocates a slab for a put. Without a lower tier, a block is declined if the policy values
    /// all resident blocks more. With lower tiers every block is admitted, because DRAM is on its
    /// way to them.
    pub(crate) fn allocate_for_put<'a>(
        &'a self,
        state: StateGuard<'a>,
        candidate: PutCandidate<'_>,
        holds_some: bool,
        call: CallContext,
    ) -> (StateGuard<'a>, Result<SlabMut, AllocationFailure>) {
        let PutCandidate { put, bytes, ancestor } = candidate;
        if !self.stages.is_empty() {
            // Ends the round instead of waiting: other calls may wait for the slabs that this call
            // holds. Publishing them releases them.
            if holds_some && self.is_backlogged(&state) {
                return (state, Err(AllocationFailure::TimedOut));
            }
            let (state, has_room) = self.wait_for_backlog(state, call);
            if !has_room {
                return (state, Err(AllocationFailure::TimedOut));
            }
            return self.allocate_slab(state, bytes, holds_some, None, call);
        }
        let incoming = Incoming {
            // The block gets the index of its key only when it is published.
            owner: u32::MAX,
            fingerprint: self.seed.of_key(&put.key),
            parent: ancestor,
            bytes: u32::try_from(bytes).expect("longer blocks were refused"),
            is_protected: put.is_prefix,
        };
        self.allocate_slab(state, bytes, holds_some, Some(&incoming), call)
    }

    /// Whether the write backlog is at its limit.
    pub(crate) fn is_backlogged(&self, state: &StoreState) -> bool {
        // The new block itself does not count, so that one larger than the limit can be put.
        state.pending_total() >= self.dirty_bytes_max
            || state.key_changes_waiting() >= KEY_CHANGES_WAITING_MAX
    }

    /// Back-pressure: waits while the write backlog is at its limit. False if the deadline passed.
    fn wait_for_backlog<'a>(
        &'a self,
        mut state: StateGuard<'a>,
        call: CallContext,
    ) -> (StateGuard<'a>, bool) {
        while self.is_backlogged(&state) {
            // The stage may hang. A failed probe opens its circuit, which drops the queue and ends
            // this wait.
            self.probe_backlogged_stages(&mut state);
            // This call may have queued blocks without waking the movers.
            self.notify_movers();
            let (again, in_time) = self.wait_for_change(state, call);
            state = again;
            if !in_time {
                return (state, false);
            }
        }
        (state, true)
    }

    /// Copies the bytes without the lock, then publishes all blocks of the round under it.
    fn fill_and_publish(&self, puts: &mut PutBatch<'_>, round: &mut Round) {
        let Round { allocated, sealed } = round;
        let fill = |AllocatedBlock { index, mut slab }: AllocatedBlock| {
            cascade_memory::copy_in(&mut slab, puts.batch[index].bytes);
            (index, slab.seal())
        };
        sealed.extend(allocated.drain(..).map(fill));
        if sealed.is_empty() {
            return;
        }
        if is_planted(Plant::EarlyPublish) {
            self.publish_unfilled(puts, sealed);
            return sealed.clear();
        }
        let Some(mut state) = self.lock_within(sealed.len(), puts.call) else {
            let late: Vec<usize> = sealed.iter().map(|(index, _)| *index).collect();
            puts.fail_if_late(&late, &*self.clock);
            return self.free_unpublished(sealed);
        };
        state.charge_keys(sealed);
        let now = self.timestamps(&mut state);
        for (index, slab) in sealed.drain(..) {
            // Under the same hold of the lock as the publication: an allocation that counts what
            // may become free never misses this slab.
            state.slabs_in_flight -= 1;
            self.publish_new(&mut state, puts, index, &slab, now);
        }
        self.note_decided(&mut state, puts, now);
        drop(state);
        self.notify_movers();
        self.notify_changed();
    }

    /// Publishes a block, unless another thread has put the same key or the same bytes meanwhile.
    pub(super) fn publish_new(
        &self,
        state: &mut StoreState,
        puts: &mut PutBatch<'_>,
        index: usize,
        slab: &Slab,
        now: Timestamps,
    ) {
        let (put, digest) = (&puts.batch[index], puts.digests[index]);
        puts.outcomes[index] = match self.check_put(state, put, digest, now) {
            PutCheck::Settled(outcome) => Some(outcome),
            PutCheck::Compare => None,
            PutCheck::New(known) => {
                let block = (put, digest, slab.clone());
                let place = self.publish(state, block, known, (puts.call, now));
                if self.waits_for_writes() {
                    state.awaited.begin(place);
                    puts.awaited.push((index, place));
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
    pub(super) fn note_decided(
        &self,
        state: &mut StoreState,
        puts: &mut PutBatch<'_>,
        now: Timestamps,
    ) {
        // A put that waits for its writes may still fail.
        if self.waits_for_writes() {
            return;
        }
        let first = puts.noted.0;
        let outcomes = puts.outcomes[first..].iter().map_while(Option::as_ref);
        for (put, outcome) in puts.batch[first..].iter().zip(outcomes).take(KEYS_PER_HOLD) {
            state.note_unstored_put(&put.key, outcome);
            puts.noted.0 += 1;
        }
        puts.noted.1 = now.policy;
    }

    fn compare_undecided(&self, puts: &mut PutBatch<'_>) {
        let undecided = puts.undecided();
        let blocks: Vec<_> =
            undecided.iter().map(|at| (puts.batch[*at].key, puts.batch[*at].bytes)).collect();
        for (at, is_same) in undecided.iter().zip(self.compare(&blocks, puts.call)) {
            puts.outcomes[*at] = outcome_of_comparison(is_same);
        }
    }

    /// Links a key to a content that is already present under another key.
    pub(crate) fn deduplicate(
        &self,
        state: &mut StoreState,
        put: &Put<'_>,
        digest: Option<Digest>,
        (content, now): (ContentIndex, Timestamps),
    ) -> PutOutcome {
        let facts = self.facts(put, digest);
        let key = state.catalog.link(&new_key(&facts), content);
        state.history.forget(&put.key);
        if state.catalog.content(content).slab.is_some() {
            state.record(key, Some(&facts));
            state.make_resident(key, now.policy);
        }
        // The new key is the first one.
        let other = state.catalog.each_key_of(content).nth(1);
        let other = state.catalog.entry(other.expect("the content had a key")).key;
        let place = (content, state.catalog.content(content).generation);
        for stage in 0..self.stages.len() {
            // For a content that is still queued, the mover adds its other keys after the write.
            if let Some(address) = state.catalog.content(content).address(stage) {
                state.push_addition(stage, facts, address, (place, other));
            }
        }
        PutOutcome::Deduplicated
    }

    /// Adds a block to the catalog, queues it for all stages that do not have it, and makes it
    /// resident.
    fn publish(
        &self,
        state: &mut StoreState,
        (put, digest, slab): (&Put<'_>, Option<Digest>, Slab),
        known: Option<KeyIndex>,
        (call, now): (CallContext, Timestamps),
    ) -> Place {
        let facts = self.facts(put, digest);
        let bytes = u64::from(facts.bytes);
        state.counters.bytes_written += bytes;
        let (key, content) = if let Some(key) = known {
            // Only stages with an open read circuit have the block, and its digest is the same:
            // their copies stay, and this put brings the bytes back to DRAM.
            (key, state.catalog.entry(key).content)
        } else {
            state.content_bytes += bytes;
            state.catalog.insert(&new_key(&facts), facts.bytes, digest)
        };
        state.history.forget(&put.key);
        let put_stamp = state.history.stamp();
        let entry = state.catalog.content_mut(content);
        entry.put_stamp = put_stamp;
        entry.writer = call.writer.map_or(0, |writer| writer.0.get());
        let place = (content, entry.generation);
        state.put_slab(content, slab, Some(&facts));
        for stage in 0..self.stages.len() {
            if state.catalog.content(content).address(stage).is_none() {
                state.push_block(stage, facts, content);
            }
        }
        state.make_resident(key, now.policy);
        place
    }

    /// The outcome of a put for which no slab was allocated.
    pub(crate) fn outcome_without_slab(
        &self,
        state: &StoreState,
        failure: AllocationFailure,
        bytes: usize,
        call: CallContext,
    ) -> PutOutcome {
        match failure {
            AllocationFailure::TooLarge => PutOutcome::Declined(DeclineReason::TooLarge),
            AllocationFailure::Full => PutOutcome::Declined(DeclineReason::Full),
            AllocationFailure::WorthLess => PutOutcome::Declined(DeclineReason::WorthLess),
            AllocationFailure::TimedOut | AllocationFailure::Erasing => {
                PutOutcome::Failed(self.allocation_error(state, failure, bytes, call))
            }
        }
    }

    pub(crate) fn allocation_error(
        &self,
        state: &StoreState,
        failure: AllocationFailure,
        bytes: usize,
        call: CallContext,
    ) -> StoreError {
        match failure {
            AllocationFailure::TooLarge => StoreError::Config {
                setting: "dram",
                reason: format!("a block of {bytes} bytes is larger than the pool"),
            },
            // Queued writes are the reason: a block is not evictable until every stage has it.
            AllocationFailure::TimedOut if state.pending_total() > 0 => self.busy_error(state),
            AllocationFailure::Erasing => StoreError::Erasing,
            AllocationFailure::TimedOut => call.timeout_error("allocate memory in DRAM"),
            AllocationFailure::Full | AllocationFailure::WorthLess => {
                StoreError::NoRoom { needed_bytes: bytes }
            }
        }
    }

    /// The error of back-pressure; names the stage with the largest backlog.
    fn busy_error(&self, state: &StoreState) -> StoreError {
        let stages = 0..self.stages.len();
        let slowest = stages.max_by_key(|stage| state.pending_bytes[*stage]);
        StoreError::Busy {
            tier: self.tier_name(slowest.map_or(0, |stage| 1 + stage)),
            pending_bytes: state.pending_total(),
        }
    }

    pub(crate) fn facts(&self, put: &Put<'_>, digest: Option<Digest>) -> BlockFacts {
        let expires = put.ttl_ms.map(|ttl| self.clock.unix_ms().saturating_add(ttl));
        BlockFacts {
            key: put.key,
            digest,
            parent: put.parent,
            namespace: put.namespace,
            bytes: u32::try_from(put.bytes.len()).expect("longer blocks were refused"),
            is_prefix: put.is_prefix,
            expires_unix_ms: expires,
        }
    }
}

/// The nearest resident ancestor of a new block: its parent, or for a parent that got its slab in
/// this round and is not published yet, the ancestor of the parent. The ancestor must not be
/// evicted to make room for the block: without it, no lookup would match the block.
pub(crate) fn resident_ancestor(
    state: &StoreState,
    put: &Put<'_>,
    previous: Option<(BlockKey, Option<Slot>)>,
) -> Option<Slot> {
    let parent = put.parent?;
    // First, because most blocks of a batch follow the block before them.
    if let Some((_, slot)) = previous.filter(|(key, _)| *key == parent) {
        return slot;
    }
    state.catalog.find(&parent).and_then(|found| state.catalog.entry(found).slot())
}

fn new_key(facts: &BlockFacts) -> NewKey {
    NewKey {
        key: facts.key,
        parent: facts.parent,
        is_prefix: facts.is_prefix,
        expires_unix_ms: facts.expires_unix_ms.unwrap_or(0),
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
