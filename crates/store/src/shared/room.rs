//! Room for a block: a free slab, or one that eviction or other calls free, and room in the queues
//! of writes.

use cascade_memory::{Slab, SlabMut};
use cascade_tier::StoreError;

use crate::core::eviction::{AncestorSearch, Incoming};
use crate::core::state::{EvictionResult, StoreState};
use crate::shared::StoreCore;
use crate::shared::call::CallContext;
use crate::shared::hold::{KEYS_PER_HOLD, StateGuard};

/// Most releases of slabs that one hold of the lock applies.
const RELEASES_PER_HOLD: usize = 256;

/// Backlog of key changes of one stage at which puts wait.
/// Deduplicated puts and deletions queue changes without bytes: the limit of bytes does not bound
/// them.
const KEY_CHANGES_WAITING_MAX: usize = 64 << 10;

/// Why no slab was allocated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AllocationFailure {
    /// The block is larger than DRAM.
    TooLarge,
    /// Every resident block is pinned or being read, and nothing in flight will free memory.
    Full,
    /// The policy values every evictable block more.
    WorthLess,
    /// Memory will become free, but did not before the deadline.
    TimedOut,
    /// The store is being erased.
    Erasing,
}

/// Gets room for the blocks of one call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Room<'a> {
    pub(crate) core: &'a StoreCore,
    call: CallContext,
}

impl<'a> Room<'a> {
    pub(crate) fn new(core: &'a StoreCore, call: CallContext) -> Self {
        Self { core, call }
    }

    /// Allocates a slab for a put or a load, and evicts blocks as needed. With `incoming`, evicts
    /// only blocks that the policy values less. A caller that already holds slabs does not wait for
    /// more: two such callers could wait for each other forever.
    pub(crate) fn allocate(
        self,
        mut state: StateGuard<'a>,
        bytes: usize,
        holds_some: bool,
        incoming: Option<&Incoming>,
    ) -> (StateGuard<'a>, Result<SlabMut, AllocationFailure>) {
        let Self { core, call } = self;
        if bytes > core.pool.capacity_bytes() {
            return (state, Err(AllocationFailure::TooLarge));
        }
        let mut ancestors = AncestorSearch::default();
        // Each round tries in order: free memory, memory of dead processes, eviction, waiting.
        loop {
            if state.is_erasing {
                return (state, Err(AllocationFailure::Erasing));
            }
            note_freed_slabs(core, &mut state);
            // The caller decrements the counter when it publishes, drops or hands out the slab.
            // Until then other calls wait for this memory instead of failing.
            if has_block_room(core, &state)
                && let Some(slab) = core.pool.allocate(bytes)
            {
                state.memory.slabs_in_flight += 1;
                return (state, Ok(slab));
            }
            // Before eviction, because this costs no block. Without the lock: it reads `/proc`.
            if let Some(warm) = core.warm.as_ref().filter(|warm| warm.is_sweep_due(&*core.clock)) {
                core.unlock(state);
                warm.sweep(&*core.clock);
                state = core.lock();
                continue;
            }
            let now = core.policy_now(&state);
            let has_more = apply_releases(core, &mut state);
            match state.evict_one(now, incoming, &mut ancestors) {
                EvictionResult::Evicted => {
                    // A large block may take the place of many small ones.
                    state = core.end_full_hold(state);
                    continue;
                }
                EvictionResult::NoneEvictable if !has_more => {}
                EvictionResult::Searching | EvictionResult::NoneEvictable => {
                    if call.deadline.has_passed(&*core.clock) {
                        return (state, Err(AllocationFailure::TimedOut));
                    }
                    // The search goes on in another hold of the lock, after those who wait for it.
                    core.unlock(state);
                    state = core.lock_for(KEYS_PER_HOLD);
                    continue;
                }
                EvictionResult::AllWorthMore => return (state, Err(AllocationFailure::WorthLess)),
            }
            // Slabs in flight, writes, a clear and the scrubber free memory or make blocks
            // evictable soon. Without any of these, waiting is pointless.
            if holds_some
                || (state.pending_total() == 0
                    && state.memory.slabs_in_flight == 0
                    && state.blocks_in_scrub == 0
                    && state.catalog.cleared_keys() == 0)
            {
                return (state, Err(AllocationFailure::Full));
            }
            let (again, in_time) = core.wait_for_change(state, call);
            state = again;
            if !in_time {
                return (state, Err(AllocationFailure::TimedOut));
            }
        }
    }

    /// Whether the write backlog is at its limit.
    pub(crate) fn is_backlogged(self, state: &StoreState) -> bool {
        // The new block itself does not count, so that one larger than the limit can be put.
        state.pending_total() >= self.core.dirty_bytes_max()
            || state.key_changes_waiting() >= KEY_CHANGES_WAITING_MAX
    }

    /// Back-pressure: waits while the write backlog is at its limit. False if the deadline passed.
    pub(crate) fn wait_for_backlog(self, mut state: StateGuard<'a>) -> (StateGuard<'a>, bool) {
        while self.is_backlogged(&state) {
            // The stage may hang. A failed probe opens its circuit, which drops the queue and ends
            // this wait.
            state.probe_backlogged_stages(self.core.clock.monotonic());
            // This call may have queued blocks without waking the movers.
            self.core.notify_movers();
            let (again, in_time) = self.core.wait_for_change(state, self.call);
            state = again;
            if !in_time {
                return (state, false);
            }
        }
        (state, true)
    }

    /// The error of a call for which no slab was allocated.
    pub(crate) fn error(
        self,
        state: &StoreState,
        failure: AllocationFailure,
        bytes: usize,
    ) -> StoreError {
        match failure {
            AllocationFailure::TooLarge => StoreError::Config {
                setting: "dram",
                reason: format!("a block of {bytes} bytes is larger than the pool"),
            },
            // Queued writes are the reason: a block is not evictable until every stage has it.
            AllocationFailure::TimedOut if state.pending_total() > 0 => self.busy_error(state),
            AllocationFailure::Erasing => StoreError::Erasing,
            AllocationFailure::TimedOut => self.call.timeout_error("allocate memory"),
            AllocationFailure::Full | AllocationFailure::WorthLess => {
                StoreError::NoRoom { needed_bytes: bytes }
            }
        }
    }

    /// The error of back-pressure; names the stage with the largest backlog.
    pub(crate) fn busy_error(self, state: &StoreState) -> StoreError {
        let stages = 0..self.core.stages.len();
        let slowest = stages.max_by_key(|stage| state.lower[*stage].pending_bytes);
        StoreError::Busy {
            tier: self.core.tier_name(slowest.map_or(0, |stage| 1 + stage)),
            pending_bytes: state.pending_total(),
        }
    }
}

/// Makes blocks candidates for eviction again that readers have released. Returns whether there
/// are more.
pub(crate) fn apply_releases(core: &StoreCore, state: &mut StoreState) -> bool {
    let mut tokens = std::mem::take(&mut state.memory.released);
    let has_more = core.pool.take_released(RELEASES_PER_HOLD, &mut tokens);
    for token in tokens.drain(..) {
        state.note_released(token);
    }
    state.memory.released = tokens;
    has_more
}

/// Frees slabs in flight without the lock.
pub(crate) fn free_unpublished<T>(core: &StoreCore, slabs: &mut Vec<(T, Slab)>) {
    let count = slabs.len() as u64;
    // First: the memory is free for each thread that reads the new number.
    slabs.clear();
    core.state.note_freed(count);
    core.notify_changed();
}

/// Subtracts the slabs that puts have freed without the lock.
pub(crate) fn note_freed_slabs(core: &StoreCore, state: &mut StoreState) {
    state.memory.slabs_in_flight -= core.state.take_freed();
}

fn has_block_room(core: &StoreCore, state: &StoreState) -> bool {
    let most = core.config.dram_blocks.unwrap_or(u64::MAX);
    // Slabs in flight count, because each becomes a block without another check.
    (state.memory.eviction.blocks().len() as u64).saturating_add(state.memory.slabs_in_flight)
        < most
}
