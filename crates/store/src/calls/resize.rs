//! Changes the size of DRAM while the store is in use, within the pool's region.

use std::sync::Arc;

use cascade_memory::MemoryError;
use cascade_tier::StoreError;

use crate::StoreConfig;
use crate::core::eviction::AncestorSearch;
use crate::core::state::EvictionResult;
use crate::shared::call::CallContext;
use crate::shared::hold::{KEYS_PER_HOLD, StateGuard};
use crate::shared::room::{apply_releases, note_freed_slabs};
use crate::shared::{StoreCore, tier_error};

/// Makes DRAM smaller or larger. Returns its capacity: it is above `capacity_bytes` if blocks that
/// cannot be evicted kept the memory until the deadline.
pub(crate) fn resize(
    core: &StoreCore,
    capacity_bytes: u64,
    call: CallContext,
) -> Result<u64, StoreError> {
    StoreConfig { dram_bytes: capacity_bytes, ..core.config.clone() }.check()?;
    let target = usize::try_from(capacity_bytes).expect("the check includes the address space");
    core.pool.check_resizable().map_err(refused)?;
    let before = core.pool.capacity_bytes();
    let outcome = if target > before {
        core.pool.restore(target - before).map(drop).map_err(refused)
    } else {
        shrink(core, target, call)
    };
    core.pool.count_huge_pages();
    // Also after a failure, which may have changed a part.
    let capacity_bytes = core.memory_bytes();
    core.lock().memory.eviction.set_capacity(capacity_bytes);
    core.insight().shadows.resize(core.pipeline.memory, capacity_bytes);
    // Puts may wait for room.
    core.notify_changed();
    outcome.map(|()| capacity_bytes)
}

fn refused(error: MemoryError) -> StoreError {
    StoreError::Resize(Arc::new(error))
}

/// Gives free memory back to the system, and evicts blocks as needed, until DRAM has its new size
/// or the deadline passes.
fn shrink(core: &StoreCore, target: usize, call: CallContext) -> Result<(), StoreError> {
    for stage in &core.stages {
        let released = stage.release_pool(call.deadline);
        released.map_err(|error| tier_error(stage, "end the registration of memory", error))?;
    }
    core.pool.release_again().map_err(refused)?;
    let mut ancestors = AncestorSearch::default();
    let mut state = core.lock_for(KEYS_PER_HOLD);
    loop {
        let excess = core.pool.capacity_bytes().saturating_sub(target);
        if excess == 0 || call.has_timed_out(&*core.clock) {
            return Ok(());
        }
        if state.is_closing {
            return Err(StoreError::Closed);
        }
        if state.is_erasing {
            return Err(StoreError::Erasing);
        }
        note_freed_slabs(core, &mut state);
        // Under the lock, so that no put takes what was evicted for this. Giving it back takes
        // longer and needs no lock.
        let withheld = core.pool.withhold(excess);
        if withheld.bytes() > 0 {
            core.unlock(state);
            withheld.release().map_err(refused)?;
            state = core.lock_for(KEYS_PER_HOLD);
            continue;
        }
        let (again, has_progress) = evict(core, state, excess as u64, &mut ancestors);
        state = core.end_full_hold(again);
        if !has_progress {
            // Blocks become evictable when they are written, or released by their readers.
            core.notify_movers();
            let (again, in_time) = core.wait_for_change(state, call);
            state = again;
            if !in_time {
                return Ok(());
            }
        }
    }
}

/// Evicts blocks of this many bytes, or as many as one hold of the lock may. Returns whether it
/// has done something, so that another call may do more.
fn evict<'a>(
    core: &'a StoreCore,
    mut state: StateGuard<'a>,
    bytes: u64,
    ancestors: &mut AncestorSearch,
) -> (StateGuard<'a>, bool) {
    if let Some(warm) = core.warm.as_ref().filter(|warm| warm.is_sweep_due(&*core.clock)) {
        // Memory of dead processes costs no block. Without the lock: it reads `/proc`.
        core.unlock(state);
        warm.sweep(&*core.clock);
        return (core.lock_for(KEYS_PER_HOLD), true);
    }
    let until = state.memory.used_bytes.saturating_sub(bytes);
    let now = core.policy_now(&state);
    while state.memory.used_bytes > until && !state.is_hold_full() {
        let has_more = apply_releases(core, &mut state);
        match state.evict_one(now, None, ancestors) {
            EvictionResult::Evicted => {}
            EvictionResult::Searching => return (state, true),
            EvictionResult::NoneEvictable | EvictionResult::AllWorthMore => {
                return (state, has_more);
            }
        }
    }
    (state, true)
}
