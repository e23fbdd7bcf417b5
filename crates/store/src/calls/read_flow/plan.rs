//! What becomes of each block of a read: decided under the lock, in pieces.

use cascade_block::BlockKey;
use cascade_memory::Slab;
use cascade_tier::{StoreError, ViewOutcome};

use super::{Fetch, KEYS_AGAIN_MAX, KEYS_PER_PIECE, PendingRead, ReadCall, ReadPurpose};
use crate::calls::fetch_source::FetchSource;
use crate::calls::read_counters::count_direct_requests;
use crate::core::catalog::KeyIndex;
use crate::core::state::StoreState;
use crate::shared::hold::StateGuard;
use crate::shared::room::{AllocationFailure, Room};

impl<'f> ReadCall<'f, '_, '_> {
    /// Looks up blocks until there is one to load, or none is left to look up: blocks in DRAM are
    /// copied while a stage loads.
    pub(super) fn plan_some(&mut self) {
        self.flow.is_blocked = false;
        loop {
            if !self.plan_piece(true) {
                return;
            }
            let has_planned = self.flow.planned.iter().any(|loads| !loads.is_empty());
            if self.flow.target.is_none()
                || self.flow.queued.is_empty()
                || has_planned
                || self.flow.is_blocked
                || self.flow.call.has_timed_out(&*self.core.clock)
            {
                return;
            }
        }
    }

    /// Looks up blocks again that were in DRAM. Returns false if the deadline passed before the
    /// call got the lock: the blocks stay deferred.
    pub(super) fn plan_deferred(&mut self) -> bool {
        let count = self.flow.deferred_count().min(KEYS_PER_PIECE);
        self.flow.reserve(count);
        let Some(state) = self.core.lock_within(count, self.flow.call) else { return false };
        let pending = self.flow.take_deferred();
        let state = self.plan(state, pending, false);
        self.core.unlock(state);
        true
    }

    /// Looks up the next blocks and plans their loads, under one hold of the lock. Returns false if
    /// the deadline passed before the call got the lock: the blocks stay queued.
    pub(super) fn plan_piece(&mut self, may_wait: bool) -> bool {
        let is_again = self.flow.queued.front().is_some_and(|pending| pending.is_counted);
        let keys_max = if is_again { KEYS_AGAIN_MAX } else { KEYS_PER_PIECE };
        let count = self.flow.queued.len().min(keys_max);
        self.flow.reserve(count);
        let Some(state) = self.core.lock_within(count, self.flow.call) else { return false };
        let pending: Vec<PendingRead> = self.flow.queued.drain(..count).collect();
        let state = self.plan(state, pending, may_wait);
        self.core.unlock(state);
        true
    }

    /// Decides the pending blocks: hit in DRAM, miss, fetch by this call, or wait for the fetch of
    /// another call. Those for which the call has no room yet are queued again, and all behind the
    /// first of these.
    fn plan(
        &mut self,
        mut state: StateGuard<'f>,
        mut pending: Vec<PendingRead>,
        may_wait: bool,
    ) -> StateGuard<'f> {
        let now = self.core.policy_now(&state);
        let now_unix_ms = self.core.clock.unix_ms();
        state.history.set_time(now_unix_ms);
        let stamp = state.history.stamp();
        let keys: Vec<BlockKey> = pending.iter().map(|pending| pending.key).collect();
        let mut found = Vec::with_capacity(keys.len());
        state.charge_keys(&keys);
        state.catalog.find_batch(&keys, &mut found);
        self.count_first_lookups(&mut state, &mut pending, &found, now_unix_ms);
        let tier = self.core.tier_name(self.core.memory_tier());
        let mut may_have_changed = state.is_closed;
        let mut rest = pending.into_iter().zip(found);
        // No more loads, but blocks in DRAM may follow, to be copied while these are under way.
        let mut later = Vec::new();
        for (pending, mut found) in rest.by_ref() {
            if state.is_closed {
                self.flow.settle(&pending, ViewOutcome::Failed(StoreError::Closed));
                continue;
            }
            // An allocation for an earlier block of this batch may have evicted this one, or
            // released the lock: look it up again.
            let has_expired = |key| state.catalog.entry(key).has_expired(now_unix_ms);
            if may_have_changed || found.is_some_and(has_expired) {
                found = state.find_live(&pending.key, now_unix_ms);
                may_have_changed = true;
            }
            let Some(key) = found else {
                self.plan_absent(&mut state, pending);
                continue;
            };
            let content = state.catalog.content(state.catalog.entry(key).content);
            if content.slab.is_some() && self.flow.defer(&pending, content.bytes as usize) {
                continue;
            }
            if let Some(slab) = resident(&mut state, key, now, stamp, self.flow.purpose) {
                self.flow.settle_resident(&pending, slab, tier);
                continue;
            }
            if self.flow.is_blocked() {
                self.flow.stop_at(pending);
                break;
            }
            if self.flow.is_full() {
                later.push(pending);
                continue;
            }
            may_have_changed = true;
            let (again, settled) = self.plan_fetch(state, pending, key, may_wait);
            state = again;
            if let Some(outcome) = settled {
                self.flow.settle(&pending, outcome);
            }
            if self.flow.is_blocked() {
                break;
            }
        }
        // In their order, and behind the block for which there was no room.
        later.extend(self.flow.take_stopped());
        later.extend(rest.map(|(pending, _)| pending));
        self.flow.queue_again(later);
        state
    }

    /// Counts the blocks that no lookup of this call has counted as requested.
    fn count_first_lookups(
        &mut self,
        state: &mut StoreState,
        pending: &mut [PendingRead],
        found: &[Option<KeyIndex>],
        now_unix_ms: u64,
    ) {
        let counted = pending.iter().take_while(|pending| pending.is_counted).count();
        if !state.is_closed && counted < pending.len() {
            let (tier, is_load) = (self.core.memory_tier(), &mut self.flow.is_load);
            count_direct_requests(state, &found[counted..], now_unix_ms, tier, is_load);
        }
        for pending in pending {
            pending.is_counted = true;
        }
    }

    /// Plans the read of a block from the fastest usable stage: marks the content as loading and
    /// allocates a slab. Returns an outcome instead if no stage is usable or no slab is available.
    fn plan_fetch(
        &mut self,
        mut state: StateGuard<'f>,
        pending: PendingRead,
        key: KeyIndex,
        may_wait: bool,
    ) -> (StateGuard<'f>, Option<ViewOutcome>) {
        let (index, open_circuits) = (state.catalog.entry(key).content, state.open_read_circuits);
        let content = state.catalog.content(index);
        if content.is_loading {
            self.flow.waiting.push(pending);
            return (state, None);
        }
        let fastest = state.catalog.fastest_lower_except(index, pending.avoid | open_circuits);
        let Some((stage, address)) = fastest else {
            let is_unreadable =
                pending.circuit_opened || content.fastest_stage_except(pending.avoid).is_some();
            // If a stage that has the block failed, the outcome is that failure, not a miss.
            let failure = self.flow.outcomes[pending.index].take();
            if failure.is_none() && is_unreadable && self.flow.purpose == ReadPurpose::Use {
                state.counters.shed_gets += 1;
            }
            return (state, Some(failure.unwrap_or(ViewOutcome::Miss)));
        };
        // Set before the allocation, which can release the lock: other callers then wait for this
        // fetch and do not start their own.
        let content = state.catalog.content_mut(index);
        content.is_loading = true;
        let (bytes, generation) = (content.bytes as usize, content.generation);
        let holds_some = self.flow.holds_some() || !may_wait;
        let room = Room::new(self.core, self.flow.call);
        let (again, slab) = room.allocate(state, bytes, holds_some, None);
        state = again;
        match slab {
            Ok(mut slab) => {
                let place = (index, generation);
                let from = FetchSource::new(&state, place, (stage, address), pending.key);
                // After a kill of this process, the kernel may still write into the slab.
                if let Some(warm) = &self.core.warm {
                    warm.holders.record_load(&mut slab);
                }
                self.flow.plan(Fetch { pending, from, slab });
                (state, None)
            }
            Err(failure) => {
                if let Some(content) = state.catalog.live_content((index, generation)) {
                    // Other callers wait for this mark, and only this call can clear it.
                    content.is_loading = false;
                }
                // The slabs of this call may be the reason: look again after their fetches.
                if holds_some && failure != AllocationFailure::TooLarge {
                    self.flow.postpone(pending);
                    return (state, None);
                }
                if failure == AllocationFailure::Erasing {
                    return (state, Some(ViewOutcome::Miss));
                }
                let error = room.error(&state, failure, bytes);
                (state, Some(ViewOutcome::Failed(error)))
            }
        }
    }
}

/// The slab of a block in DRAM. A read for use counts as an access.
pub(in crate::calls) fn resident(
    state: &mut StoreState,
    key: KeyIndex,
    now: std::time::Duration,
    stamp: u32,
    purpose: ReadPurpose,
) -> Option<Slab> {
    let content = state.catalog.entry(key).content;
    let content = state.catalog.content_mut(content);
    let slab = content.slab.clone()?;
    if purpose == ReadPurpose::Use {
        content.note_use(stamp);
        state.touch(key, now);
    }
    Some(slab)
}
