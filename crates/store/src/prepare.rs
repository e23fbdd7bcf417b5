//! Calls for a caller that moves the bytes itself, in another process: slabs ahead of a put, and
//! reads that never wait.

use std::time::Duration;

use cascade_block::{BlockKey, DigestMode};
use cascade_memory::Region;

use crate::call::{Call, HOLD_KEYS};
use crate::eviction::Slot;
use crate::known::Known;
use crate::node::Node;
use crate::outcome::{Prepared, PutOutcome};
use crate::put::{Arriving, resident_ancestor};
use crate::{
    CallOptions, DeclineReason, Put, Store, StoreError, TierName, ViewOutcome, WritePolicy,
};

/// Most bytes of slabs that one call gives out: a batch of large blocks is several calls, so that
/// their copies and the next call's evictions overlap between workers.
const BATCH_BYTES: usize = 64 << 20;

impl Store {
    /// Decides blocks of a put whose bytes, `lengths` long, are in another process: says where to
    /// write each, if anywhere. Gives slabs of `bytes_max` bytes in all at most; what comes after
    /// the last that fits is to be asked for again ([`Prepared::Later`]). `Put::bytes` is not
    /// looked at. With a timeout of zero it never waits: what would have to, fails with
    /// [`StoreError::Timeout`] or [`StoreError::Busy`] and is not counted, and all after the first
    /// of these is to be asked for again.
    ///
    /// # Panics
    /// If there are not as many lengths as blocks.
    pub fn prepare(
        &self,
        batch: &[Put<'_>],
        lengths: &[usize],
        bytes_max: usize,
        options: CallOptions,
    ) -> Vec<Prepared> {
        assert_eq!(batch.len(), lengths.len(), "one length for each block");
        let bounds = Bounds {
            bytes_max,
            call: self.node().call(options),
            may_wait: options.timeout != Some(Duration::ZERO),
        };
        self.node().prepare(batch, lengths, bounds, &mut Chain::default())
    }

    /// As [`Store::prepare`], for a caller that fills all slabs before it seals any: every block
    /// gets a slab or is settled, all by one deadline, and what this very call holds makes no
    /// later block wait. A key that is there with as many bytes is [`PutOutcome::Present`],
    /// whatever they are.
    ///
    /// # Panics
    /// If there are not as many lengths as blocks.
    pub fn prepare_whole(
        &self,
        batch: &[Put<'_>],
        lengths: &[usize],
        options: CallOptions,
    ) -> Vec<Prepared> {
        assert_eq!(batch.len(), lengths.len(), "one length for each block");
        self.node().prepare_whole(batch, lengths, options)
    }

    /// Counts puts that were settled by who asked [`Store::prepare`]: compared, or given up.
    pub fn count_settled(&self, present: u64, conflicts: u64, failures: u64) {
        self.node().count_settled(present, conflicts, failures);
    }

    /// Views on blocks for comparing them: counted as nobody's access, and nothing is brought up.
    pub fn inspect(&self, keys: &[BlockKey], options: CallOptions) -> Vec<ViewOutcome> {
        self.node().inspect(keys, options)
    }

    /// Whether [`Store::view`] of these blocks would be answered without reading a lower tier.
    pub fn reads_at_once(&self, keys: &[BlockKey]) -> bool {
        self.node().reads_at_once(keys)
    }

    /// Whether [`Store::put_slabs`] of these blocks would be answered without hashing them, reading
    /// a lower tier or waiting for one.
    pub fn puts_at_once(&self, keys: &[BlockKey]) -> bool {
        self.node().puts_at_once(keys)
    }

    /// Whether a thread panicked while it changed what the store knows of its blocks: whatever else
    /// is asked panics too, and only a new store helps.
    pub fn is_broken(&self) -> bool {
        self.node().is_broken()
    }

    /// The tiers, fast to slow, DRAM first whether or not it is one of the pipeline.
    pub fn tier_names(&self) -> &[TierName] {
        self.node().tier_names()
    }

    /// The shared memory that all blocks in DRAM lie in, to map it in another process.
    pub fn region(&self) -> &Region {
        self.node().pool.region()
    }
}

/// What one step of a preparation may take.
#[derive(Clone, Copy)]
struct Bounds {
    bytes_max: usize,
    call: Call,
    /// Whether the caller asks again with time to wait for what would have to.
    may_wait: bool,
}

/// What the blocks after a step have to know of those before.
#[derive(Default)]
struct Chain {
    /// The last block that was refused.
    declined: Option<(BlockKey, DeclineReason)>,
    /// The block before in its chain, if this call took it, and what it hangs on.
    hanging: Option<(BlockKey, Option<Slot>)>,
}

impl Node {
    /// Decides each block of a put whose bytes the caller writes before it seals any; see
    /// [`crate::Store::prepare_whole`].
    fn prepare_whole(
        &self,
        batch: &[Put<'_>],
        lengths: &[usize],
        options: CallOptions,
    ) -> Vec<Prepared> {
        let bounds = Bounds { bytes_max: usize::MAX, call: self.call(options), may_wait: true };
        let mut chain = Chain::default();
        let mut all = Vec::with_capacity(batch.len());
        while all.len() < batch.len() {
            // A step always decides its first block: what is held by then is no reason to put it
            // off.
            let (rest, lengths) = (&batch[all.len()..], &lengths[all.len()..]);
            if bounds.call.is_late(&*self.clock) {
                let late = || bounds.call.timeout_error("prepare all blocks of a batch");
                let late = rest.iter().map(|_| Prepared::Settled(PutOutcome::Failed(late())));
                all.extend(late);
                self.count_settled(0, 0, rest.len() as u64);
                break;
            }
            let step = self.prepare(rest, lengths, bounds, &mut chain);
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

    /// Decides each block of a put whose bytes are `lengths` long and elsewhere; see
    /// [`crate::Store::prepare`].
    fn prepare(
        &self,
        batch: &[Put<'_>],
        lengths: &[usize],
        Bounds { bytes_max, call, may_wait }: Bounds,
        Chain { declined, hanging }: &mut Chain,
    ) -> Vec<Prepared> {
        let mut prepared = Vec::with_capacity(batch.len());
        let mut taken = 0;
        let mut state = self.lock();
        let now = self.moment(&mut state);
        for (put, bytes) in batch.iter().zip(lengths).take(HOLD_KEYS) {
            if taken > 0 && taken + bytes > bytes_max.min(BATCH_BYTES) {
                break;
            }
            let next = match self.known_by_length(&mut state, put, *bytes, None, now) {
                Known::Settled(outcome) => Prepared::Settled(outcome),
                Known::Compare => Prepared::Compare,
                // Without its parent a block is never asked for.
                Known::New if declined.is_some_and(|(key, _)| put.parent == Some(key)) => {
                    let (_, reason) = declined.expect("just asked");
                    *declined = Some((put.key, reason));
                    Prepared::Settled(PutOutcome::Declined(reason))
                }
                // What is larger than the pool is declined for that, below.
                Known::New if *bytes > bytes_max && *bytes <= self.pool.region().bytes() => {
                    Prepared::Settled(PutOutcome::Declined(DeclineReason::Full))
                }
                Known::New => {
                    let parent = resident_ancestor(&state, put, *hanging);
                    let arriving = Arriving { put, bytes: *bytes, parent };
                    let (again, slab) = self.take_worth(state, arriving, taken > 0, call);
                    state = again;
                    match slab {
                        Ok(slab) => {
                            // From here on it is the caller's: nobody waits for it to come back.
                            state.slabs_out -= 1;
                            taken += slab.len().max(1);
                            *hanging = Some((put.key, parent));
                            Prepared::Slab(slab)
                        }
                        // What this batch holds may be all that is in the way.
                        Err(_) if taken > 0 => break,
                        Err(why) => Prepared::Settled(self.not_taken(&state, why, *bytes, call)),
                    }
                }
            };
            if let Prepared::Settled(outcome) = &next {
                if let PutOutcome::Declined(reason) = outcome {
                    *declined = Some((put.key, *reason));
                }
                if !may_wait && is_late(outcome) {
                    prepared.push(next);
                    break;
                }
                state.count_put(&put.key, outcome);
            }
            prepared.push(next);
        }
        self.release(state);
        self.insight().shadows.declined(now.policy, batch, lengths, &prepared);
        prepared.resize_with(batch.len(), || Prepared::Later);
        prepared
    }

    /// Whether a read of these blocks would be answered from memory alone.
    pub(crate) fn reads_at_once(&self, keys: &[BlockKey]) -> bool {
        if self.stages.is_empty() {
            return true;
        }
        let now_unix_ms = self.clock.unix_ms();
        keys.chunks(HOLD_KEYS).all(|keys| {
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

    /// Whether a put of these blocks, written in place, would be answered without waiting.
    pub(crate) fn puts_at_once(&self, keys: &[BlockKey]) -> bool {
        let waits_for_tiers = self.config.write == WritePolicy::Through
            || !self.pipeline.has_dram
            || self.config.digest != DigestMode::Off;
        !waits_for_tiers && self.reads_at_once(keys)
    }

    /// Views for a comparison: counted nowhere, nothing is brought up.
    pub(crate) fn inspect(&self, keys: &[BlockKey], options: CallOptions) -> Vec<ViewOutcome> {
        self.read_to_compare(keys, self.call(options))
    }
}

/// Whether an outcome only says that the deadline passed: a caller that asked without time to wait
/// asks again with it, and only that counts.
fn is_late(outcome: &PutOutcome) -> bool {
    matches!(outcome, PutOutcome::Failed(StoreError::Timeout { .. } | StoreError::Busy { .. }))
}
