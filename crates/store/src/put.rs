//! Put: take slabs, copy outside the lock, publish under it.
//!
//! A block is in the catalog only once its bytes are complete, so a reader never meets one that is
//! half written, and a writer that dies leaves nothing behind but a slab that its drop returns.

use std::sync::MutexGuard;

use cascade_block::{BlockKey, Clock, Digest, DigestMode};
use cascade_memory::{Slab, SlabMut};

use crate::call::{Call, HOLD_KEYS};
use crate::catalog::{ContentIndex, NewKey};
use crate::eviction::{Incoming, Slot};
use crate::known::Known;
use crate::node::{Moment, NoSlab, Node};
use crate::outcome::PutSlab;
use crate::stage::BlockFacts;
use crate::state::{NameChange, State};
use crate::{CallOptions, DeclineReason, Put, PutOutcome, StoreError, WritePolicy};

/// Most bytes that one round of a put holds outside the catalog.
const ROUND_BYTES: usize = 16 << 20;
/// Most blocks in one round.
const ROUND_BLOCKS: usize = 64;
/// How often a put begins anew with blocks that other callers put and delete under it.
const PASSES_MAX: u32 = 3;
/// Most names that wait for a stage before puts wait too.
const NAMES_WAITING_MAX: usize = 64 << 10;

/// A block that was taken: its slab is filled by the caller and then published.
struct Taken {
    index: usize,
    slab: SlabMut,
}

/// One put under way.
struct Putting<'a> {
    batch: &'a [Put<'a>],
    digests: Vec<Option<Digest>>,
    outcomes: Vec<Option<PutOutcome>>,
    call: Call,
}

impl Putting<'_> {
    /// The blocks of which nothing is known yet.
    fn open(&self) -> Vec<usize> {
        (0..self.batch.len()).filter(|at| self.outcomes[*at].is_none()).collect()
    }

    /// Gives these up if the deadline has passed.
    fn is_given_up(&mut self, open: &[usize], clock: &dyn Clock) -> bool {
        if !self.call.is_late(clock) {
            return false;
        }
        for at in open {
            let late = self.call.timeout_error("put all blocks of a batch");
            self.outcomes[*at] = Some(PutOutcome::Failed(late));
        }
        true
    }
}

/// A block that wants room.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Arriving<'a> {
    pub(crate) put: &'a Put<'a>,
    /// Its length; its bytes may be elsewhere still.
    pub(crate) bytes: usize,
    /// What it hangs on in DRAM.
    pub(crate) parent: Option<Slot>,
}

impl Node {
    pub(crate) fn put(&self, batch: &[Put<'_>], options: CallOptions) -> Vec<PutOutcome> {
        // Hashing comes before copying: bytes that are known already are never moved.
        self.put_all(batch, options, |putting, open| {
            let mut rest = open;
            while !rest.is_empty() && !putting.is_given_up(rest, &*self.clock) {
                let (taken, done) = self.take_round(putting, rest);
                rest = &rest[done..];
                self.fill_and_publish(putting, taken);
            }
        })
    }

    /// Publishes blocks that the caller wrote in place: nothing is copied, whatever the outcome.
    pub(crate) fn put_slabs(&self, batch: Vec<PutSlab>, options: CallOptions) -> Vec<PutOutcome> {
        let mut slabs = Vec::with_capacity(batch.len());
        let mut facts = Vec::with_capacity(batch.len());
        for put in batch {
            facts.push(put.facts());
            slabs.push(put.slab.seal());
        }
        let puts: Vec<Put<'_>> =
            facts.iter().zip(&slabs).map(|(facts, slab)| Put { bytes: slab, ..*facts }).collect();
        self.put_all(&puts, options, |putting, open| {
            for (at, round) in open.chunks(ROUND_BLOCKS).enumerate() {
                if putting.is_given_up(&open[at * ROUND_BLOCKS..], &*self.clock) {
                    break;
                }
                // Their memory is taken, so waiting for the writers would free none: whoever gave
                // the slabs out has waited for them.
                let mut state = self.lock();
                let now = self.moment(&mut state);
                for at in round {
                    self.publish_new(&mut state, putting, *at, &slabs[*at], now);
                }
            }
            self.announce_work();
        })
    }

    /// Puts blocks; `put_open` settles those of the indices that it is given, or leaves them to be
    /// compared with what is there under their keys.
    fn put_all(
        &self,
        batch: &[Put<'_>],
        options: CallOptions,
        mut put_open: impl FnMut(&mut Putting<'_>, &[usize]),
    ) -> Vec<PutOutcome> {
        let outcomes = batch.iter().map(|_| None).collect();
        let digests = vec![None; batch.len()];
        let mut putting = Putting { batch, digests, outcomes, call: self.call(options) };
        self.hash(&mut putting);
        for _ in 0..PASSES_MAX {
            let open = putting.open();
            if open.is_empty() {
                break;
            }
            put_open(&mut putting, &open);
            // Keys that are there without a digest to go by are told apart by their bytes. One
            // that is gone again by then is new in the next pass.
            self.compare_open(&mut putting);
        }
        let Putting { outcomes, call, .. } = putting;
        let restless = || PutOutcome::Failed(call.timeout_error("put a key that others delete"));
        let outcomes = outcomes.into_iter().map(|outcome| outcome.unwrap_or_else(restless));
        self.finish_put(batch, outcomes.collect(), call)
    }

    /// A slab to write a block into, outside any batch.
    pub(crate) fn reserve(
        &self,
        bytes: usize,
        options: CallOptions,
    ) -> Result<SlabMut, StoreError> {
        let call = self.call(options);
        let (state, has_room) = self.wait_for_writers(self.lock(), call);
        if state.is_closing {
            return Err(StoreError::Closed);
        }
        if state.is_erasing {
            return Err(StoreError::Erasing);
        }
        if !has_room {
            return Err(self.busy_error(&state));
        }
        let (mut state, slab) = self.take_slab(state, bytes, false, None, call);
        let slab = slab.map_err(|why| self.no_slab_error(&state, why, bytes, call))?;
        // From here on the slab is the caller's: nobody waits for it to come back.
        state.slabs_out -= 1;
        Ok(slab)
    }

    /// Names the blocks by their bytes, if that is on, as far as there is time.
    fn hash(&self, putting: &mut Putting<'_>) {
        let DigestMode::On(algorithm) = self.config.digest else { return };
        let open = putting.open();
        for at in 0..open.len() {
            if putting.is_given_up(&open[at..], &*self.clock) {
                return;
            }
            putting.digests[at] = Some(Digest::of(algorithm, putting.batch[at].bytes));
        }
    }

    /// Decides blocks until a round is full. Returns slabs to fill, and how many were decided.
    fn take_round(&self, putting: &mut Putting<'_>, open: &[usize]) -> (Vec<Taken>, usize) {
        let mut taken: Vec<Taken> = Vec::new();
        let mut taken_bytes = 0;
        let mut declined: Option<(BlockKey, DeclineReason)> = None;
        // The block before in its chain, if this round took it, and what it hangs on.
        let mut hanging: Option<(BlockKey, Option<Slot>)> = None;
        let mut state = self.lock();
        let now = self.moment(&mut state);
        for (done, at) in open.iter().enumerate() {
            if taken.len() == ROUND_BLOCKS || taken_bytes >= ROUND_BYTES || done == HOLD_KEYS {
                self.release(state);
                return (taken, done);
            }
            let put = &putting.batch[*at];
            match self.known(&mut state, put, putting.digests[*at], now) {
                Known::Settled(outcome) => putting.outcomes[*at] = Some(outcome),
                Known::Compare => {}
                // Without its parent a block is never asked for.
                Known::New if declined.is_some_and(|(key, _)| put.parent == Some(key)) => {
                    let (_, reason) = declined.expect("just asked");
                    declined = Some((put.key, reason));
                    putting.outcomes[*at] = Some(PutOutcome::Declined(reason));
                }
                Known::New => {
                    let (bytes, holds_some) = (put.bytes.len(), !taken.is_empty());
                    let parent = resident_ancestor(&state, put, hanging);
                    let arriving = Arriving { put, bytes, parent };
                    let (again, slab) = self.take_worth(state, arriving, holds_some, putting.call);
                    state = again;
                    match slab {
                        Ok(slab) => {
                            hanging = Some((put.key, parent));
                            taken_bytes += slab.len();
                            taken.push(Taken { index: *at, slab });
                        }
                        // What this round holds may be all that is in the way.
                        Err(_) if !taken.is_empty() => {
                            self.release(state);
                            return (taken, done);
                        }
                        Err(why) => {
                            let outcome = self.not_taken(&state, why, bytes, putting.call);
                            if let PutOutcome::Declined(reason) = outcome {
                                declined = Some((put.key, reason));
                            }
                            putting.outcomes[*at] = Some(outcome);
                        }
                    }
                }
            }
        }
        self.release(state);
        (taken, open.len())
    }

    /// Takes a slab for a put. Where no tier is below, a block that is worth less than all that is
    /// resident is not taken; otherwise it has to pass through DRAM on its way down.
    pub(crate) fn take_worth<'a>(
        &'a self,
        state: MutexGuard<'a, State>,
        arriving: Arriving<'_>,
        holds_some: bool,
        call: Call,
    ) -> (MutexGuard<'a, State>, Result<SlabMut, NoSlab>) {
        let Arriving { put, bytes, parent } = arriving;
        if !self.stages.is_empty() {
            if holds_some && self.is_behind(&state) {
                return (state, Err(NoSlab::Late));
            }
            let (state, has_room) = self.wait_for_writers(state, call);
            if !has_room {
                return (state, Err(NoSlab::Late));
            }
            return self.take_slab(state, bytes, holds_some, None, call);
        }
        let incoming = Incoming {
            owner: u32::MAX,
            fingerprint: self.seed.of_key(&put.key),
            parent,
            bytes: u32::try_from(bytes).expect("longer blocks were refused"),
            is_protected: put.is_prefix,
        };
        self.take_slab(state, bytes, holds_some, Some(&incoming), call)
    }

    /// Whether too much waits to be written down.
    pub(crate) fn is_behind(&self, state: &State) -> bool {
        state.pending_total() >= self.dirty_bytes_max || state.names_waiting() >= NAMES_WAITING_MAX
    }

    /// Back-pressure: a put waits while too much waits to be written down.
    fn wait_for_writers<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        call: Call,
    ) -> (MutexGuard<'a, State>, bool) {
        while self.is_behind(&state) {
            self.suspect_those_behind(&mut state);
            // What this very call has queued may be unknown to its mover.
            self.announce_work();
            let (again, in_time) = self.wait_changed(state, call);
            state = again;
            if !in_time {
                return (state, false);
            }
        }
        (state, true)
    }

    fn fill_and_publish(&self, putting: &mut Putting<'_>, taken: Vec<Taken>) {
        let sealed: Vec<_> = taken
            .into_iter()
            .map(|Taken { index, mut slab }| {
                cascade_memory::copy_in(&mut slab, putting.batch[index].bytes);
                (index, slab.seal())
            })
            .collect();
        if sealed.is_empty() {
            return;
        }
        let mut state = self.lock();
        let now = self.moment(&mut state);
        for (index, slab) in sealed {
            state.slabs_out -= 1;
            self.publish_new(&mut state, putting, index, &slab, now);
        }
        drop(state);
        self.announce_work();
        self.announce_change();
    }

    /// Publishes a block, unless another thread has put the same key or bytes meanwhile.
    fn publish_new(
        &self,
        state: &mut State,
        putting: &mut Putting<'_>,
        index: usize,
        slab: &Slab,
        now: Moment,
    ) {
        let (put, digest) = (&putting.batch[index], putting.digests[index]);
        putting.outcomes[index] = match self.known(state, put, digest, now) {
            Known::Settled(outcome) => Some(outcome),
            Known::Compare => None,
            Known::New => Some(self.publish(state, put, digest, slab.clone(), (putting.call, now))),
        };
    }

    fn compare_open(&self, putting: &mut Putting<'_>) {
        let open = putting.open();
        let blocks: Vec<_> =
            open.iter().map(|at| (putting.batch[*at].key, putting.batch[*at].bytes)).collect();
        for (at, is_same) in open.iter().zip(self.compare(&blocks, putting.call)) {
            putting.outcomes[*at] = compared(is_same);
        }
    }

    /// The bytes are known under another key: this key is linked to them.
    pub(crate) fn deduplicate(
        &self,
        state: &mut State,
        put: &Put<'_>,
        digest: Option<Digest>,
        (content, now): (ContentIndex, Moment),
    ) -> PutOutcome {
        let facts = self.facts(put, digest);
        let key = state.catalog.link(&new_key(&facts), content);
        state.history.forget(&put.key);
        if state.catalog.content(content).slab.is_some() {
            state.record(key, Some(&facts));
            state.make_resident(key, now.policy);
        }
        for stage in 0..self.stages.len() {
            // A content that is still queued gets its other names when it is written.
            if let Some(address) = state.catalog.content(content).address(stage) {
                state.push_name(stage, NameChange::Add(facts, address));
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
        (call, now): (Call, Moment),
    ) -> PutOutcome {
        let facts = self.facts(put, digest);
        let bytes = u64::from(facts.bytes);
        state.counters.bytes_written += bytes;
        let (key, content) = if let Some(key) = state.catalog.find(&put.key) {
            // Only shed stages have it, and its digest is the same: they keep it where it is.
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
        state.put_slab(content, slab, Some(&facts));
        for stage in 0..self.stages.len() {
            if state.catalog.content(content).address(stage).is_none() {
                state.push_block(stage, facts, content);
            }
        }
        state.make_resident(key, now.policy);
        PutOutcome::Stored
    }

    fn finish_put(
        &self,
        batch: &[Put<'_>],
        mut outcomes: Vec<PutOutcome>,
        call: Call,
    ) -> Vec<PutOutcome> {
        if self.config.write == WritePolicy::Through || !self.pipeline.has_dram {
            for (put, outcome) in batch.iter().zip(&mut outcomes) {
                if let Err(error) = self.wait_written(put, outcome, call) {
                    *outcome = PutOutcome::Failed(error);
                }
            }
        }
        for (batch, outcomes) in batch.chunks(HOLD_KEYS).zip(outcomes.chunks(HOLD_KEYS)) {
            let mut state = self.lock();
            let now = self.policy_now(&state);
            for (put, outcome) in batch.iter().zip(outcomes) {
                state.count_put(&put.key, outcome);
            }
            drop(state);
            self.insight().shadows.put(now, batch, outcomes);
        }
        outcomes
    }

    pub(crate) fn not_taken(
        &self,
        state: &State,
        why: NoSlab,
        bytes: usize,
        call: Call,
    ) -> PutOutcome {
        match why {
            NoSlab::TooLarge => PutOutcome::Declined(DeclineReason::TooLarge),
            NoSlab::Full => PutOutcome::Declined(DeclineReason::Full),
            NoSlab::WorthLess => PutOutcome::Declined(DeclineReason::WorthLess),
            NoSlab::Late | NoSlab::Erasing => {
                PutOutcome::Failed(self.no_slab_error(state, why, bytes, call))
            }
        }
    }

    pub(crate) fn no_slab_error(
        &self,
        state: &State,
        why: NoSlab,
        bytes: usize,
        call: Call,
    ) -> StoreError {
        match why {
            NoSlab::TooLarge => StoreError::Config {
                setting: "dram",
                reason: format!("a block of {bytes} bytes is larger than the pool"),
            },
            NoSlab::Late if state.pending_total() > 0 => self.busy_error(state),
            NoSlab::Erasing => StoreError::Erasing,
            NoSlab::Late => call.timeout_error("take room in DRAM"),
            NoSlab::Full | NoSlab::WorthLess => StoreError::NoRoom { needed_bytes: bytes },
        }
    }

    /// Names the stage that is furthest behind.
    fn busy_error(&self, state: &State) -> StoreError {
        let stages = 0..self.stages.len();
        let behind = stages.max_by_key(|stage| state.pending_bytes[*stage]);
        StoreError::Busy {
            tier: self.tier_name(behind.map_or(0, |stage| 1 + stage)),
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

/// What a block hangs on in DRAM: its parent, or what that will hang on once this round is in. It
/// must not go for the block itself: then all that follows would be of no use.
pub(crate) fn resident_ancestor(
    state: &State,
    put: &Put<'_>,
    hanging: Option<(BlockKey, Option<Slot>)>,
) -> Option<Slot> {
    let parent = put.parent?;
    match state.catalog.find(&parent) {
        Some(found) => state.catalog.entry(found).slot(),
        None => hanging.filter(|(key, _)| *key == parent).and_then(|(_, slot)| slot),
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

/// What a comparison says about a put; nothing if the key is gone again.
fn compared(is_same: Result<Option<bool>, StoreError>) -> Option<PutOutcome> {
    match is_same {
        Ok(Some(true)) => Some(PutOutcome::Present),
        Ok(Some(false)) => Some(PutOutcome::Conflict),
        Ok(None) => None,
        Err(error) => Some(PutOutcome::Failed(error)),
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
