//! Put: take slabs, copy outside the lock, publish under it.
//!
//! A block is in the catalog only once its bytes are complete, so a reader never meets one that is
//! half written, and a writer that dies leaves nothing behind but a slab that its drop returns.

use std::sync::MutexGuard;

use cascade_block::{BlockKey, Deadline, Digest, DigestMode};
use cascade_memory::{Slab, SlabMut};

use crate::catalog::{ContentIndex, NewKey};
use crate::eviction::{Incoming, Removal};
use crate::node::{NoSlab, Node};
use crate::outcome::PutSlab;
use crate::stage::BlockFacts;
use crate::state::{NameChange, Pending, State};
use crate::{CallOptions, DeclineReason, Put, PutOutcome, StoreError, WritePolicy};

/// Most bytes that one round of a put holds outside the catalog.
const ROUND_BYTES: usize = 16 << 20;
/// Most blocks in one round.
const ROUND_BLOCKS: usize = 64;

/// A block that was taken: its slab is filled by the caller and then published.
struct Taken {
    index: usize,
    slab: SlabMut,
}

/// What the rounds of one put have in common.
struct Round<'a> {
    batch: &'a [Put<'a>],
    digests: &'a [Option<Digest>],
    options: CallOptions,
    deadline: Deadline,
}

/// What the catalog says about a block before its bytes are copied.
enum Known {
    /// Nothing: it needs a slab.
    New,
    /// The outcome is certain.
    Settled(PutOutcome),
    /// The key is there; its bytes have to be compared.
    Compare,
}

impl Node {
    pub(crate) fn put(&self, batch: &[Put<'_>], options: CallOptions) -> Vec<PutOutcome> {
        let deadline = self.deadline(options);
        let mut outcomes: Vec<Option<PutOutcome>> = batch.iter().map(|_| None).collect();
        // Hashing comes before copying: bytes that are known already are never moved.
        let digests: Vec<_> = batch.iter().map(|put| self.digest(put.bytes)).collect();
        let round = Round { batch, digests: &digests, options, deadline };
        let mut at = 0;
        while at < batch.len() {
            let (taken, next) = self.take_round(&round, at, &mut outcomes);
            at = next;
            self.fill_and_publish(&round, taken, &mut outcomes);
        }
        for (put, outcome) in batch.iter().zip(&mut outcomes) {
            if outcome.is_none() {
                *outcome = Some(self.compare(put, options));
            }
        }
        let keys: Vec<BlockKey> = batch.iter().map(|put| put.key).collect();
        self.finish_put(&keys, outcomes, options)
    }

    /// Publishes blocks that the caller wrote in place.
    pub(crate) fn put_slabs(&self, batch: Vec<PutSlab>, options: CallOptions) -> Vec<PutOutcome> {
        let keys: Vec<BlockKey> = batch.iter().map(|put| put.key).collect();
        let mut outcomes = Vec::with_capacity(batch.len());
        for put in batch {
            // The bytes are in place: nothing is copied, whatever the outcome.
            let facts = put.facts();
            let slab = put.slab.seal();
            let facts = Put { bytes: &slab, ..facts };
            let digest = self.digest(facts.bytes);
            let mut state = self.lock();
            let outcome = match self.known(&mut state, &facts, digest) {
                Known::Settled(outcome) => outcome,
                Known::New => self.publish(&mut state, &facts, digest, slab.clone()),
                Known::Compare => {
                    drop(state);
                    self.compare(&facts, options)
                }
            };
            outcomes.push(Some(outcome));
        }
        self.announce_work();
        self.finish_put(&keys, outcomes, options)
    }

    /// A slab to write a block into, outside any batch.
    pub(crate) fn reserve(
        &self,
        bytes: usize,
        options: CallOptions,
    ) -> Result<SlabMut, StoreError> {
        let deadline = self.deadline(options);
        let state = self.lock();
        if state.is_closed {
            return Err(StoreError::Closed);
        }
        let (mut state, slab) = self.take_slab(state, bytes, 0, None, deadline);
        let slab = slab.map_err(|why| self.no_slab_error(&state, why, bytes, options))?;
        // From here on the slab is the caller's: nobody waits for it to come back.
        state.slabs_out -= 1;
        Ok(slab)
    }

    fn digest(&self, bytes: &[u8]) -> Option<Digest> {
        match self.config.digest {
            DigestMode::Off => None,
            DigestMode::On(algorithm) => Some(Digest::of(algorithm, bytes)),
        }
    }

    /// Decides blocks from `at` on until a round is full. Returns slabs to fill and where to go on.
    fn take_round(
        &self,
        round: &Round<'_>,
        mut at: usize,
        outcomes: &mut [Option<PutOutcome>],
    ) -> (Vec<Taken>, usize) {
        let Round { batch, digests, options, deadline } = *round;
        let mut taken = Vec::new();
        let mut taken_bytes = 0;
        let mut state = self.lock();
        while at < batch.len() && taken.len() < ROUND_BLOCKS && taken_bytes < ROUND_BYTES {
            let put = &batch[at];
            match self.known(&mut state, put, digests[at]) {
                Known::Settled(outcome) => outcomes[at] = Some(outcome),
                Known::Compare => {}
                Known::New => {
                    if !taken.is_empty() && state.pending_total() >= self.dirty_bytes_max {
                        break;
                    }
                    let (again, room) = self.wait_for_writers(state, deadline);
                    state = again;
                    let own = taken.len() as u64;
                    let (again, slab) = if room {
                        self.take_worth(state, put, own, deadline)
                    } else {
                        (state, Err(NoSlab::Late))
                    };
                    state = again;
                    match slab {
                        Ok(slab) => {
                            taken_bytes += slab.len();
                            taken.push(Taken { index: at, slab });
                        }
                        // What this round holds may be all that is in the way.
                        Err(_) if !taken.is_empty() => break,
                        Err(why) => outcomes[at] = Some(self.not_taken(&state, why, put, options)),
                    }
                }
            }
            at += 1;
        }
        self.release(state);
        (taken, at)
    }

    /// Takes a slab for a put. Where no tier is below, a block that is worth less than all that is
    /// resident is not taken; otherwise it has to pass through DRAM on its way down.
    fn take_worth<'a>(
        &'a self,
        state: MutexGuard<'a, State>,
        put: &Put<'_>,
        own: u64,
        deadline: Deadline,
    ) -> (MutexGuard<'a, State>, Result<SlabMut, NoSlab>) {
        if !self.stages.is_empty() {
            return self.take_slab(state, put.bytes.len(), own, None, deadline);
        }
        let parent = put.parent.and_then(|parent| state.catalog.find(&parent));
        let incoming = Incoming {
            owner: u32::MAX,
            fingerprint: put.key.fingerprint(),
            parent: parent.and_then(|parent| state.catalog.entry(parent).slot()),
            bytes: u32::try_from(put.bytes.len()).expect("longer blocks were refused"),
            is_protected: put.is_prefix,
        };
        self.take_slab(state, put.bytes.len(), own, Some(&incoming), deadline)
    }

    /// Back-pressure: a put waits while too much waits to be written down.
    fn wait_for_writers<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        deadline: Deadline,
    ) -> (MutexGuard<'a, State>, bool) {
        while state.pending_total() >= self.dirty_bytes_max {
            let (again, in_time) = self.wait_changed(state, deadline);
            state = again;
            if !in_time {
                return (state, false);
            }
        }
        (state, true)
    }

    fn fill_and_publish(
        &self,
        round: &Round<'_>,
        taken: Vec<Taken>,
        outcomes: &mut [Option<PutOutcome>],
    ) {
        let sealed: Vec<_> = taken
            .into_iter()
            .map(|Taken { index, mut slab }| {
                cascade_memory::copy_in(&mut slab, round.batch[index].bytes);
                (index, round.digests[index], slab.seal())
            })
            .collect();
        if sealed.is_empty() {
            return;
        }
        let mut state = self.lock();
        for (index, digest, slab) in sealed {
            state.slabs_out -= 1;
            let put = &round.batch[index];
            // Another thread may have put the same key or bytes meanwhile.
            outcomes[index] = match self.known(&mut state, put, digest) {
                Known::Settled(outcome) => Some(outcome),
                Known::Compare => None,
                Known::New => Some(self.publish(&mut state, put, digest, slab)),
            };
        }
        drop(state);
        self.announce_work();
        self.announce_change();
    }

    fn refused(&self, state: &State, put: &Put<'_>) -> Known {
        let declined = |reason| Known::Settled(PutOutcome::Declined(reason));
        if state.is_closed {
            return Known::Settled(PutOutcome::Failed(StoreError::Closed));
        }
        if !state.has_dram && self.stages.is_empty() {
            return declined(DeclineReason::Empty);
        }
        if put.is_partial && !self.config.admit_partial {
            return declined(DeclineReason::Partial);
        }
        if u32::try_from(put.bytes.len()).is_err() {
            return declined(DeclineReason::TooLarge);
        }
        Known::New
    }

    fn known(&self, state: &mut State, put: &Put<'_>, digest: Option<Digest>) -> Known {
        let now_unix_ms = self.clock.unix_ms();
        if let Some(key) = state.find_live(&put.key, now_unix_ms) {
            let content = state.catalog.entry(key).content;
            if state.catalog.content(content).bytes as usize != put.bytes.len() {
                return Known::Settled(PutOutcome::Conflict);
            }
            return match (digest, state.catalog.digest_of(content)) {
                (Some(new), Some(old)) if new == *old => Known::Settled(PutOutcome::Present),
                (Some(_), Some(_)) => Known::Settled(PutOutcome::Conflict),
                _ => Known::Compare,
            };
        }
        if let Known::Settled(outcome) = self.refused(state, put) {
            return Known::Settled(outcome);
        }
        match digest.and_then(|digest| state.catalog.find_digest(&digest)) {
            Some(content) => Known::Settled(self.deduplicate(state, put, digest, content)),
            None => Known::New,
        }
    }

    /// The bytes are known under another key: this key is linked to them.
    fn deduplicate(
        &self,
        state: &mut State,
        put: &Put<'_>,
        digest: Option<Digest>,
        content: ContentIndex,
    ) -> PutOutcome {
        let facts = self.facts(put, digest);
        let key = state.catalog.link(&new_key(&facts), content);
        if state.catalog.content(content).slab.is_some() {
            state.make_resident(key, self.policy_now(state));
        }
        for stage in 0..self.stages.len() {
            // A content that is still queued gets its other names when it is written.
            if let Some(address) = state.catalog.content(content).address(stage) {
                state.names[stage].push(NameChange::Add(facts, address));
            }
        }
        PutOutcome::Deduplicated
    }

    fn publish(
        &self,
        state: &mut State,
        put: &Put<'_>,
        digest: Option<Digest>,
        slab: Slab,
    ) -> PutOutcome {
        let facts = self.facts(put, digest);
        let (key, content) = state.catalog.insert(&new_key(&facts), facts.bytes, digest);
        let bytes = u64::from(facts.bytes);
        state.content_bytes += bytes;
        state.counters.bytes_written += bytes;
        state.put_slab(content, slab);
        let generation = state.catalog.content(content).generation;
        for stage in 0..self.stages.len() {
            state.catalog.content_mut(content).dirty |= 1 << stage;
            state.pending_bytes[stage] += bytes;
            state.queues[stage].push_back(Pending { facts, content, generation });
        }
        state.make_resident(key, self.policy_now(state));
        PutOutcome::Stored
    }

    /// The key is there without a digest to go by: its bytes are compared, read back if need be.
    fn compare(&self, put: &Put<'_>, options: CallOptions) -> PutOutcome {
        let views = self.view_uncounted(&[put.key], options);
        match views.into_iter().next() {
            Some(crate::ViewOutcome::Hit { slab, .. }) if *slab == *put.bytes => {
                PutOutcome::Present
            }
            Some(crate::ViewOutcome::Hit { .. }) => PutOutcome::Conflict,
            Some(crate::ViewOutcome::Failed(error)) => PutOutcome::Failed(error),
            // It was damaged, has expired or was only a name: the new bytes take its place.
            Some(crate::ViewOutcome::Miss) | None => self.put_again(put, options),
        }
    }

    fn put_again(&self, put: &Put<'_>, options: CallOptions) -> PutOutcome {
        let deadline = self.deadline(options);
        let mut state = self.lock();
        if let Some(key) = state.catalog.find(&put.key) {
            let content = state.catalog.entry(key).content;
            if state.catalog.content(content).fastest_lower().is_some() {
                // A stage that keeps names without bytes: the name is all there is to compare.
                return PutOutcome::Present;
            }
            state.forget(key, Removal::Deleted);
        }
        let (state, slab) = self.take_slab(state, put.bytes.len(), 0, None, deadline);
        let mut slab = match slab {
            Ok(slab) => slab,
            Err(why) => return self.not_taken(&state, why, put, options),
        };
        drop(state);
        cascade_memory::copy_in(&mut slab, put.bytes);
        let digest = self.digest(put.bytes);
        let mut state = self.lock();
        state.slabs_out -= 1;
        let outcome = match self.known(&mut state, put, digest) {
            Known::Settled(outcome) => outcome,
            Known::New => self.publish(&mut state, put, digest, slab.seal()),
            // A third writer came in between; its bytes are the old data now.
            Known::Compare => PutOutcome::Present,
        };
        drop(state);
        self.announce_work();
        outcome
    }

    fn finish_put(
        &self,
        keys: &[BlockKey],
        outcomes: Vec<Option<PutOutcome>>,
        options: CallOptions,
    ) -> Vec<PutOutcome> {
        let mut outcomes: Vec<PutOutcome> =
            outcomes.into_iter().map(|outcome| outcome.expect("every block was decided")).collect();
        if self.config.write == WritePolicy::Through || !self.pipeline.has_dram {
            self.wait_written(keys, &mut outcomes, options);
        }
        let mut state = self.lock();
        state.counters.puts += outcomes.len() as u64;
        for outcome in &outcomes {
            let counters = &mut state.counters;
            *match outcome {
                PutOutcome::Stored => &mut counters.stored,
                PutOutcome::Deduplicated => &mut counters.deduplicated,
                PutOutcome::Present => &mut counters.present,
                PutOutcome::Conflict => &mut counters.conflicts,
                PutOutcome::Declined(_) => &mut counters.declined,
                PutOutcome::Failed(_) => &mut counters.put_failures,
            } += 1;
        }
        outcomes
    }

    /// Write-through: a block counts as stored once no stage has it queued any more.
    fn wait_written(&self, keys: &[BlockKey], outcomes: &mut [PutOutcome], options: CallOptions) {
        let deadline = self.deadline(options);
        let mut state = self.lock();
        for (key, outcome) in keys.iter().zip(outcomes) {
            let names_bytes = matches!(outcome, PutOutcome::Deduplicated);
            if !names_bytes && !matches!(outcome, PutOutcome::Stored) {
                continue;
            }
            *outcome = loop {
                let Some(found) = state.catalog.find(key) else {
                    break PutOutcome::Failed(self.stage_refused());
                };
                let content = state.catalog.content(state.catalog.entry(found).content);
                if content.dirty == 0 && (state.knows_names() || !names_bytes) {
                    let everywhere = (0..self.stages.len()).all(|s| content.address(s).is_some());
                    break if everywhere {
                        if names_bytes { PutOutcome::Deduplicated } else { PutOutcome::Stored }
                    } else {
                        PutOutcome::Failed(self.stage_refused())
                    };
                }
                let (again, in_time) = self.wait_changed(state, deadline);
                state = again;
                if !in_time {
                    break PutOutcome::Failed(self.timeout_error("put", options));
                }
            };
        }
    }

    fn stage_refused(&self) -> StoreError {
        let error = self.last_stage_error();
        let tier = self.tier_name(1.min(self.stages.len()));
        StoreError::Tier { tier, operation: "write a block", source: error }
    }

    fn not_taken(&self, state: &State, why: NoSlab, put: &Put<'_>, o: CallOptions) -> PutOutcome {
        match why {
            NoSlab::TooLarge => PutOutcome::Declined(DeclineReason::TooLarge),
            NoSlab::Full => PutOutcome::Declined(DeclineReason::Full),
            NoSlab::WorthLess => PutOutcome::Declined(DeclineReason::WorthLess),
            NoSlab::Late => PutOutcome::Failed(self.no_slab_error(state, why, put.bytes.len(), o)),
        }
    }

    pub(crate) fn no_slab_error(
        &self,
        state: &State,
        why: NoSlab,
        bytes: usize,
        options: CallOptions,
    ) -> StoreError {
        let pending_bytes = state.pending_total();
        match why {
            NoSlab::TooLarge => StoreError::Config {
                setting: "dram",
                reason: format!("a block of {bytes} bytes is larger than the pool"),
            },
            NoSlab::Late if pending_bytes > 0 => {
                StoreError::Busy { tier: self.tier_name(1.min(self.stages.len())), pending_bytes }
            }
            NoSlab::Late => self.timeout_error("take room in DRAM", options),
            NoSlab::Full | NoSlab::WorthLess => StoreError::NoRoom { needed_bytes: bytes },
        }
    }

    fn facts(&self, put: &Put<'_>, digest: Option<Digest>) -> BlockFacts {
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

fn new_key(facts: &BlockFacts) -> NewKey {
    NewKey {
        key: facts.key,
        parent: facts.parent,
        is_prefix: facts.is_prefix,
        expires_unix_ms: facts.expires_unix_ms.unwrap_or(0),
    }
}

impl PutSlab {
    fn facts(&self) -> Put<'static> {
        Put {
            key: self.key,
            bytes: &[],
            parent: self.parent,
            namespace: self.namespace,
            is_prefix: self.is_prefix,
            is_partial: self.is_partial,
            ttl_ms: self.ttl_ms,
        }
    }
}
