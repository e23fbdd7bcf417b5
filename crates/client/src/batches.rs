//! Puts and reads: batches of calls, and copies between the caller's memory and the pool.

mod copies;
mod rounds;
mod seals;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use cascade_block::BlockKey;
use cascade_memory::SlabMut;
use cascade_runtime::{Deadline, SystemClock};
use cascade_tier::{
    CallOptions, DeclineReason, GetOutcome, PrepareOutcome, Put, PutOutcome, PutSlab, StoreError,
    ViewOutcome,
};
use cascade_wire::{
    Answer, BLOCKS_MAX, BlockToPrepare, Call, Lease, LeasePurpose, PreparedBlock, SealedBlock,
};

use crate::client::{ClientInner, node_timeout_ms};
use crate::session::Link;
use copies::Copies;
use rounds::{defer, next_round};
use seals::{CopiedBlocks, settle};

/// How often a put retries blocks that others put and delete concurrently.
const PASSES_MAX: u32 = 3;
/// A copying get holds at most one half of what a client may hold.
const GET_SHARE_DIVISOR: usize = 2;
/// Pause between two attempts to lease one block while the client's share is exhausted.
const ROOM_PAUSE: Duration = Duration::from_millis(1);

/// One batch in flight: its link, deadline and timeout.
pub(crate) struct Batch {
    pub(crate) link: Arc<Link>,
    pub(crate) deadline: Deadline,
    pub(crate) time: Duration,
}

impl Batch {
    pub(crate) fn node_timeout_ms(&self) -> u32 {
        node_timeout_ms(self.deadline.remaining(&SystemClock).min(self.time))
    }

    fn is_late(&self) -> bool {
        self.deadline.has_passed(&SystemClock)
    }

    fn timeout_error(&self, operation: &'static str) -> StoreError {
        let timeout_ms = u64::try_from(self.time.as_millis()).unwrap_or(u64::MAX);
        StoreError::Timeout { operation, timeout_ms }
    }

    /// Reports the outcomes of puts that the client decided itself, for the node's counters.
    fn report_settled(&self, present: u32, conflicts: u32, failures: u32) {
        if (present, conflicts, failures) == (0, 0, 0) {
            return;
        }
        let settled = Call::Settled { present, conflicts, failures };
        // If it fails, only counts are lost.
        drop(self.link.session.send(vec![settled], self.deadline));
    }
}

impl ClientInner {
    pub(crate) fn begin(&self, options: CallOptions) -> Result<Batch, StoreError> {
        let (deadline, time) = self.deadline(options);
        let link = self.link_or_reconnect(deadline)?;
        Ok(Batch { link, deadline, time })
    }

    pub(crate) fn put(&self, batch: &[Put<'_>], options: CallOptions) -> Vec<PutOutcome> {
        let on = match self.begin(options) {
            Ok(on) => on,
            Err(error) => return batch.iter().map(|_| PutOutcome::Failed(error.clone())).collect(),
        };
        let mut outcomes: Vec<Option<PutOutcome>> = batch.iter().map(|_| None).collect();
        for (outcome, put) in outcomes.iter_mut().zip(batch) {
            // A length in a message has 32 bits.
            if u32::try_from(put.bytes.len()).is_err() {
                *outcome = Some(PutOutcome::Declined(DeclineReason::TooLarge));
            }
        }
        // A pass prepares, copies and seals the undecided blocks, then compares those whose keys
        // are already stored. A block that is deleted before its comparison stays undecided and
        // takes another pass. Rounds end: the node decides at least one block of each, or it fails.
        for _ in 0..PASSES_MAX {
            let mut compare = Vec::new();
            let mut is_compared = vec![false; batch.len()];
            let mut open: VecDeque<usize> =
                (0..batch.len()).filter(|at| outcomes[*at].is_none()).collect();
            while let Some(round) = next_round(&mut open) {
                if on.is_late() {
                    for at in round.into_iter().chain(open) {
                        outcomes[at] = Some(PutOutcome::Failed(on.timeout_error("prepare a put")));
                    }
                    break;
                }
                match self.put_round(&on, batch, &round, &mut outcomes) {
                    Ok(to_compare) => {
                        for at in &to_compare {
                            is_compared[*at] = true;
                        }
                        compare.extend(to_compare);
                    }
                    Err(error) => {
                        for at in &round {
                            outcomes[*at].get_or_insert_with(|| PutOutcome::Failed(error.clone()));
                        }
                    }
                }
                defer(&mut open, &round, |at| outcomes[at].is_none() && !is_compared[at]);
            }
            if compare.is_empty() {
                break;
            }
            self.compare(&on, batch, &compare, &mut outcomes);
        }
        let retries_exhausted =
            || PutOutcome::Failed(on.timeout_error("put a block that others keep deleting"));
        outcomes.into_iter().map(|outcome| outcome.unwrap_or_else(retries_exhausted)).collect()
    }

    /// Prepares blocks, copies them into their slabs and seals them. Returns the blocks whose keys
    /// are present and whose bytes have to be compared.
    fn put_round(
        &self,
        on: &Batch,
        batch: &[Put<'_>],
        round: &[usize],
        outcomes: &mut [Option<PutOutcome>],
    ) -> Result<Vec<usize>, StoreError> {
        let blocks =
            round.iter().map(|at| prepare_request(&batch[*at], batch[*at].bytes.len())).collect();
        let (first_hold, prepared) = self.prepared_blocks(on, blocks)?;
        let is_slab = |prepared: &PreparedBlock| matches!(prepared, PreparedBlock::Slab { .. });
        let to_fill = round.iter().zip(&prepared).filter(|(_, prepared)| is_slab(prepared));
        let bytes = to_fill.map(|(at, _)| batch[*at].bytes.len()).sum();
        let mut copied = CopiedBlocks::of_round(round.len(), bytes);
        let (mut compare, mut early) = (Vec::new(), None);
        let mut copies = Copies::new(on);
        for ((at, hold), prepared) in round.iter().zip(first_hold..).zip(prepared) {
            let put = &batch[*at];
            match prepared {
                PreparedBlock::Slab { offset } => {
                    // Without a slab of this process, which would release the hold when it is
                    // dropped: the seal consumes the hold, or `seal` releases it.
                    if let Err(error) = self.copy_into(on, offset, put.bytes, &mut copies) {
                        on.link.session.release_range(hold, 1);
                        outcomes[*at] = Some(PutOutcome::Failed(error));
                        continue;
                    }
                    let block = seal(put, hold, put.bytes.len());
                    // A write-through node would wait for the tiers once for each seal.
                    if copied.push(*at, block) && !on.link.welcome.writes_through {
                        early = self.begin_early_seal(on, copied.take(), outcomes);
                    }
                }
                PreparedBlock::Settled(outcome) => outcomes[*at] = Some(outcome),
                PreparedBlock::Compare => compare.push(*at),
                PreparedBlock::Later => {}
            }
        }
        self.end_early_seal(on, early, outcomes);
        let (sealed, placed) = copied.take();
        if !sealed.is_empty() {
            settle(outcomes, &placed, self.seal(on, sealed));
        }
        Ok(compare)
    }

    /// Prepares the blocks of one message: a slab or an outcome for each.
    fn prepare_round(
        &self,
        on: &Batch,
        blocks: Vec<BlockToPrepare>,
    ) -> Result<Vec<PrepareOutcome>, StoreError> {
        // Kept here, because the call consumes the blocks and the answer has no lengths.
        let lengths: Vec<usize> = blocks.iter().map(|block| block.bytes as usize).collect();
        let (first_hold, prepared) = self.prepared_blocks(on, blocks)?;
        let place = |((block, bytes), hold): ((_, &usize), u64)| {
            Ok(match block {
                PreparedBlock::Slab { offset } => {
                    PrepareOutcome::Slab(self.lent_slab(&on.link, hold, offset, *bytes)?)
                }
                PreparedBlock::Settled(outcome) => PrepareOutcome::Settled(outcome),
                PreparedBlock::Compare => PrepareOutcome::Compare,
                PreparedBlock::Later => PrepareOutcome::Deferred,
            })
        };
        let prepared: Result<Vec<_>, _> =
            prepared.into_iter().zip(&lengths).zip(first_hold..).map(place).collect();
        if prepared.is_err() {
            // Slabs of the valid blocks are dropped too and release their holds. A second release
            // has no effect, because numbers are never reused.
            on.link.session.release_range(first_hold, lengths.len());
        }
        prepared
    }

    /// Copies a block to where the node wants it.
    fn copy_into(
        &self,
        on: &Batch,
        offset: u64,
        bytes: &[u8],
        copies: &mut Copies<'_>,
    ) -> Result<(), StoreError> {
        // No seal is sent after the deadline.
        if copies.are_late(bytes.len()) {
            return Err(on.timeout_error("copy a put"));
        }
        let offset = usize::try_from(offset).map_err(|_| self.outside_pool())?;
        let is_copied = on.link.attachment.fill(offset, bytes).map_err(StoreError::Device)?;
        is_copied.then_some(()).ok_or_else(|| self.outside_pool())
    }

    /// The node's answer for each of the blocks of one message, and the hold of the first: that of
    /// each next block has the next number. The caller has the holds of those that got slabs.
    fn prepared_blocks(
        &self,
        on: &Batch,
        blocks: Vec<BlockToPrepare>,
    ) -> Result<(u64, Vec<PreparedBlock>), StoreError> {
        let count = blocks.len();
        let first_hold = on.link.session.allocate_holds(count);
        let call = Call::Prepare { timeout_ms: on.node_timeout_ms(), first_hold, blocks };
        let answer = self.call_on(&on.link, "prepare a put", &call, on.deadline, on.time);
        let error = match answer {
            Ok(Answer::Prepared(blocks)) if blocks.len() == count => {
                return Ok((first_hold, blocks));
            }
            Ok(other) => self.unexpected_answer(&other),
            Err(error) => error,
        };
        // The node may have granted slabs, or may still grant them: release all of them.
        on.link.session.release_range(first_hold, count);
        Err(error)
    }

    /// Slabs for blocks that the caller fills before it seals any. A key that is already stored is
    /// reported as present without comparing bytes.
    pub(crate) fn prepare(
        &self,
        batch: &[Put<'_>],
        lengths: &[usize],
        options: CallOptions,
    ) -> Vec<PrepareOutcome> {
        assert_eq!(batch.len(), lengths.len(), "one length for each block");
        let settled = |outcome| Some(PrepareOutcome::Settled(outcome));
        let on = match self.begin(options) {
            Ok(on) => on,
            Err(error) => {
                let failed = |_| PrepareOutcome::Settled(PutOutcome::Failed(error.clone()));
                return batch.iter().map(failed).collect();
            }
        };
        let mut all: Vec<Option<PrepareOutcome>> = batch.iter().map(|_| None).collect();
        for (one, bytes) in all.iter_mut().zip(lengths) {
            if u32::try_from(*bytes).is_err() {
                *one = settled(PutOutcome::Declined(DeclineReason::TooLarge));
            }
        }
        let mut open: VecDeque<usize> = (0..batch.len()).filter(|at| all[*at].is_none()).collect();
        while let Some(round) = next_round(&mut open) {
            if on.is_late() {
                for at in round.into_iter().chain(open) {
                    all[at] = settled(PutOutcome::Failed(on.timeout_error("prepare a put")));
                }
                break;
            }
            // One answer grants a bounded number of slabs; deferred blocks start the next round.
            // The node decides at least the first block of each round, and rounds fail at the
            // deadline, so the loop ends.
            let blocks =
                round.iter().map(|at| prepare_request(&batch[*at], lengths[*at])).collect();
            let mut present = 0;
            match self.prepare_round(&on, blocks) {
                Ok(prepared) => {
                    for (at, prepared) in round.iter().zip(prepared) {
                        all[*at] = match prepared {
                            PrepareOutcome::Compare => {
                                present += 1;
                                settled(PutOutcome::Present)
                            }
                            PrepareOutcome::Deferred => None,
                            decided => Some(decided),
                        };
                    }
                }
                Err(error) => {
                    for at in &round {
                        all[*at] = settled(PutOutcome::Failed(error.clone()));
                    }
                }
            }
            // The node cannot count these: for it the key was only to be compared.
            on.report_settled(present, 0, 0);
            defer(&mut open, &round, |at| all[at].is_none());
        }
        all.into_iter().map(|one| one.expect("every block was decided")).collect()
    }

    fn lent_slab(
        &self,
        link: &Link,
        hold: u64,
        offset: u64,
        bytes: usize,
    ) -> Result<SlabMut, StoreError> {
        let offset = usize::try_from(offset).ok();
        let slab = offset.and_then(|offset| link.attachment.writable(hold, offset, bytes));
        slab.ok_or_else(|| self.outside_pool())
    }

    fn outside_pool(&self) -> StoreError {
        self.unavailable("the node granted memory outside its pool".to_owned())
    }

    fn unavailable(&self, reason: String) -> StoreError {
        StoreError::Unavailable { socket: self.socket(), reason }
    }

    /// Compares stored blocks with the bytes to be put. Blocks deleted meanwhile stay undecided.
    fn compare(
        &self,
        on: &Batch,
        batch: &[Put<'_>],
        blocks: &[usize],
        outcomes: &mut [Option<PutOutcome>],
    ) {
        let mut rest = blocks;
        while !rest.is_empty() {
            let (mut present, mut conflicts, mut failures) = (0, 0, 0);
            let lengths = rest.iter().map(|at| batch[*at].bytes.len());
            let step = &rest[..on.link.step(lengths)];
            let keys: Vec<BlockKey> = step.iter().map(|at| batch[*at].key).collect();
            let views = self.lease_step(on, LeasePurpose::Compare, &keys);
            // The step may have got shorter, to fit the share of the client.
            let (step, later) = rest.split_at(views.len());
            rest = later;
            for (at, view) in step.iter().zip(views) {
                let is_equal = match view {
                    ViewOutcome::Hit { slab, .. } => slab
                        .bytes_or_copy()
                        .map(|stored| Some(*stored == *batch[*at].bytes))
                        .map_err(StoreError::Device),
                    ViewOutcome::Miss => Ok(None),
                    ViewOutcome::Failed(error) => Err(error),
                };
                let (outcome, count) = match is_equal {
                    Ok(None) => continue,
                    Ok(Some(true)) => (PutOutcome::Present, &mut present),
                    Ok(Some(false)) => (PutOutcome::Conflict, &mut conflicts),
                    Err(error) => (PutOutcome::Failed(error), &mut failures),
                };
                *count += 1;
                outcomes[*at] = Some(outcome);
            }
            // One report for each step: the node accepts at most the blocks of one message.
            on.report_settled(present, conflicts, failures);
        }
    }

    pub(crate) fn reserve(
        &self,
        bytes: usize,
        options: CallOptions,
    ) -> Result<SlabMut, StoreError> {
        let on = self.begin(options)?;
        let hold = on.link.session.allocate_holds(1);
        let call = Call::Reserve { timeout_ms: on.node_timeout_ms(), hold, bytes: bytes as u64 };
        let reserved = match self.call_on(&on.link, "reserve a slab", &call, on.deadline, on.time) {
            Ok(Answer::Slab { offset }) => self.lent_slab(&on.link, hold, offset, bytes),
            Ok(other) => Err(self.unexpected_answer(&other)),
            Err(error) => Err(error),
        };
        if reserved.is_err() {
            on.link.session.release_range(hold, 1);
        }
        reserved
    }

    pub(crate) fn put_slabs(&self, batch: Vec<PutSlab>, options: CallOptions) -> Vec<PutOutcome> {
        let on = match self.begin(options) {
            Ok(on) => on,
            Err(error) => return batch.iter().map(|_| PutOutcome::Failed(error.clone())).collect(),
        };
        let mut outcomes: Vec<Option<PutOutcome>> = batch.iter().map(|_| None).collect();
        let (mut sealed, mut placed) = (Vec::new(), Vec::new());
        for (at, put) in batch.into_iter().enumerate() {
            let PutSlab { key, slab, parent, namespace, is_prefix, is_partial, ttl_ms } = put;
            let bytes = slab.len();
            let facts = Put { bytes: &[], key, parent, namespace, is_prefix, is_partial, ttl_ms };
            if let Ok(hold) = slab.into_hold(&on.link.attachment) {
                sealed.push(seal(&facts, hold, bytes));
                placed.push(at);
            } else {
                // Its hold belongs to another session: the node has no such hold.
                let reason =
                    "the slab was reserved before the node restarted, or from another store"
                        .to_owned();
                outcomes[at] = Some(PutOutcome::Failed(self.unavailable(reason)));
            }
        }
        let mut settled = Vec::with_capacity(placed.len());
        for step in sealed.chunks(BLOCKS_MAX) {
            settled.extend(self.seal(&on, step.to_vec()));
        }
        for (at, outcome) in placed.into_iter().zip(settled) {
            outcomes[at] = Some(outcome);
        }
        outcomes.into_iter().map(|outcome| outcome.expect("every block was settled")).collect()
    }

    pub(crate) fn view(&self, keys: &[BlockKey], options: CallOptions) -> Vec<ViewOutcome> {
        let on = match self.begin(options) {
            Ok(on) => on,
            Err(StoreError::Closed) => {
                return keys.iter().map(|_| ViewOutcome::Failed(StoreError::Closed)).collect();
            }
            // An unavailable node is a miss, not an error: the caller recomputes the blocks.
            Err(_) => return keys.iter().map(|_| ViewOutcome::Miss).collect(),
        };
        keys.chunks(BLOCKS_MAX).flat_map(|step| self.lease(&on, LeasePurpose::Use, step)).collect()
    }

    pub(crate) fn get(
        &self,
        keys: &[BlockKey],
        buffers: &mut [&mut [u8]],
        options: CallOptions,
    ) -> Vec<GetOutcome> {
        assert_eq!(keys.len(), buffers.len(), "one buffer for each key");
        let on = match self.begin(options) {
            Ok(on) => on,
            Err(StoreError::Closed) => {
                return keys.iter().map(|_| GetOutcome::Failed(StoreError::Closed)).collect();
            }
            Err(_) => return keys.iter().map(|_| GetOutcome::Miss).collect(),
        };
        let mut outcomes = Vec::with_capacity(keys.len());
        while outcomes.len() < keys.len() {
            let done = outcomes.len();
            let step = on.link.step(buffers[done..].iter().map(|buffer| buffer.len()));
            let views = self.lease_step(&on, LeasePurpose::Use, &keys[done..done + step]);
            // The total decides whether the copies bypass the cache.
            let total = views.iter().map(|view| match view {
                ViewOutcome::Hit { slab, .. } => slab.len(),
                ViewOutcome::Miss | ViewOutcome::Failed(_) => 0,
            });
            let total = total.sum();
            for (view, buffer) in views.into_iter().zip(&mut buffers[done..]) {
                outcomes.push(match view {
                    // Nothing is copied: a truncated block would be a wrong answer.
                    ViewOutcome::Hit { slab, .. } if slab.len() > buffer.len() => {
                        GetOutcome::TooShort { needed_bytes: slab.len() }
                    }
                    ViewOutcome::Hit { slab, tier } => {
                        match slab.copy_to_in_batch(&mut buffer[..slab.len()], total) {
                            Ok(()) => GetOutcome::Hit { bytes: slab.len(), tier },
                            Err(error) => GetOutcome::Failed(StoreError::Device(error)),
                        }
                    }
                    ViewOutcome::Miss => GetOutcome::Miss,
                    ViewOutcome::Failed(error) => GetOutcome::Failed(error),
                });
            }
        }
        outcomes
    }

    /// Leases the first blocks of `keys`, as many as fit the client's share. While other calls of
    /// this client use up the share, it retries with half as many until the deadline.
    fn lease_step(&self, on: &Batch, purpose: LeasePurpose, keys: &[BlockKey]) -> Vec<ViewOutcome> {
        // Each retry halves the step, so a few of them lead to single blocks.
        let mut step = keys.len();
        loop {
            let views = self.lease(on, purpose, &keys[..step]);
            // A block longer than the whole share never fits, so it is not retried.
            let share = on.link.welcome.hold_bytes_max;
            let is_full = |view: &ViewOutcome| match view {
                ViewOutcome::Failed(StoreError::NoRoom { needed_bytes }) => {
                    *needed_bytes as u64 <= share
                }
                ViewOutcome::Failed(StoreError::Limit { most, .. }) => *most > 0,
                _ => false,
            };
            // At the deadline the views are returned as they are, with the failures in them.
            let has_time = !on.deadline.remaining(&SystemClock).is_zero();
            if !has_time || !views.iter().any(is_full) {
                return views;
            }
            // Release before waiting: two calls that wait for each other would deadlock.
            drop(views);
            if step == 1 {
                std::thread::park_timeout(ROOM_PAUSE);
            }
            step = step.div_ceil(2);
        }
    }

    pub(crate) fn lease(
        &self,
        on: &Batch,
        purpose: LeasePurpose,
        keys: &[BlockKey],
    ) -> Vec<ViewOutcome> {
        // The client numbers the holds, so it can release those of a call without an answer.
        let first_hold = on.link.session.allocate_holds(keys.len());
        let timeout_ms = on.node_timeout_ms();
        let call = Call::Lease { timeout_ms, first_hold, purpose, keys: keys.to_vec() };
        let answer = self.call_on(&on.link, "read blocks", &call, on.deadline, on.time);
        let error = match answer {
            Ok(Answer::Leases(leases)) if leases.len() == keys.len() => {
                return self.views(&on.link, first_hold, leases);
            }
            Ok(other) => self.unexpected_answer(&other),
            Err(error) => error,
        };
        on.link.session.release_range(first_hold, keys.len());
        let one = || match &error {
            StoreError::Unavailable { .. } => ViewOutcome::Miss,
            error => ViewOutcome::Failed(error.clone()),
        };
        keys.iter().map(|_| one()).collect()
    }

    pub(crate) fn views(
        &self,
        link: &Link,
        first_hold: u64,
        leases: Vec<Lease>,
    ) -> Vec<ViewOutcome> {
        let view = |(hold, lease)| match lease {
            Lease::Hit { offset, bytes, tier } => {
                let offset = usize::try_from(offset).ok();
                let slab =
                    offset.and_then(|offset| link.attachment.sealed(hold, offset, bytes as usize));
                if let (Some(slab), Some(tier)) = (slab, link.tiers.get(usize::from(tier))) {
                    ViewOutcome::Hit { slab, tier }
                } else {
                    // Without a slab, no drop releases the hold.
                    link.session.release_range(hold, 1);
                    let reason = "the node leased memory outside its pool".to_owned();
                    ViewOutcome::Failed(self.unavailable(reason))
                }
            }
            Lease::Miss => ViewOutcome::Miss,
            Lease::Failed(error) => ViewOutcome::Failed(error),
        };
        (first_hold..).zip(leases).map(view).collect()
    }
}

impl Link {
    /// How many of the blocks fit the share of one step, at least one.
    fn step(&self, lengths: impl Iterator<Item = usize>) -> usize {
        let share =
            usize::try_from(self.welcome.hold_bytes_max).unwrap_or(usize::MAX) / GET_SHARE_DIVISOR;
        let mut left = share;
        let fits = |bytes: &usize| {
            let fits = *bytes <= left;
            left = left.saturating_sub(*bytes);
            fits
        };
        // At least one, or the caller would not advance. The node decides about a block that is
        // longer than the share.
        lengths.take_while(fits).take(BLOCKS_MAX).count().max(1)
    }
}

fn prepare_request(put: &Put<'_>, bytes: usize) -> BlockToPrepare {
    BlockToPrepare {
        key: put.key,
        parent: put.parent,
        bytes: u32::try_from(bytes).expect("longer blocks were declined"),
        is_prefix: put.is_prefix,
        is_partial: put.is_partial,
    }
}

fn seal(put: &Put<'_>, hold: u64, bytes: usize) -> SealedBlock {
    SealedBlock {
        hold,
        bytes: u32::try_from(bytes).unwrap_or(u32::MAX),
        key: put.key,
        parent: put.parent,
        namespace: put.namespace,
        is_prefix: put.is_prefix,
        is_partial: put.is_partial,
        ttl_ms: put.ttl_ms,
    }
}
