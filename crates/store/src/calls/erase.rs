//! Erase: removes every block from every tier, and overwrites its bytes.

use cascade_block::with_causes;
use cascade_memory::WipeReport;
use cascade_tier::tier::{EraseOutcome, NotErased};
use cascade_tier::{CallOptions, StoreError, TierName};

use crate::calls::clear::remove_cleared;
use crate::core::catalog::LOWER_STAGES_MAX;
use crate::core::history::Loss;
use crate::core::pending::KeyChange;
use crate::core::state::StoreState;
use crate::shared::StoreCore;
use crate::shared::call::CallContext;
use crate::shared::hold::KEYS_PER_HOLD;
use crate::shared::room::note_freed_slabs;

/// Result of erasing a store.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EraseReport {
    /// What was erased in each tier, fast to slow.
    pub tiers: Vec<TierEraseReport>,
    /// The pool: memory that was zeroed, and memory that was not.
    pub memory: WipeReport,
    /// What was not erased, with the reason; empty if the erase is complete.
    pub left: Vec<NotErased>,
}

/// What was erased in one tier.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TierEraseReport {
    /// The tier.
    pub tier: TierName,
    /// Number of blocks.
    pub blocks: u64,
    /// Bytes of the blocks, each content counted once.
    pub bytes: u64,
    /// Files that were overwritten and removed.
    pub files_removed: u64,
    /// Bytes that were overwritten in these files.
    pub overwritten_bytes: u64,
}

impl EraseReport {
    /// Whether everything was erased.
    pub fn is_complete(&self) -> bool {
        self.left.is_empty()
    }

    fn add_not_erased(&mut self, what: impl Into<String>, why: impl Into<String>) {
        self.left.push(NotErased { what: what.into(), why: why.into() });
    }
}

/// An erase of the whole store.
pub(crate) struct Erase<'a> {
    core: &'a StoreCore,
    call: CallContext,
    erased: EraseReport,
    removed: CancelledRemovals,
}

impl<'a> Erase<'a> {
    pub(crate) fn new(core: &'a StoreCore, options: CallOptions) -> Self {
        let (erased, removed) = (EraseReport::default(), CancelledRemovals::default());
        Self { core, call: core.call(options), erased, removed }
    }

    /// Forgets every block, waits for calls in flight, erases the stages and zeroes the pool.
    ///
    /// The order matters: `is_erasing` refuses new puts and reads, so that calls in flight end;
    /// only then does no thread write to a stage or a slab, and stages and memory can be erased.
    pub(crate) fn run(mut self) -> Result<EraseReport, StoreError> {
        let (core, call) = (self.core, self.call);
        let mut state = core.lock_or_time_out("erase", call)?;
        if state.is_closing {
            return Err(StoreError::Closed);
        }
        if std::mem::replace(&mut state.is_erasing, true) {
            return Err(StoreError::Erasing);
        }
        state.erases += 1;
        state.are_removals_cancelled = true;
        state.make_all_absent();
        core.unlock(state);
        self.erased.tiers = self.empty_catalog();
        let lower = &core.tier_names()[1..=core.stages.len()];
        core.insight.replace(&core.config, core.pipeline.memory_tier(), lower);
        core.notify_changed();
        core.notify_movers();
        // Before the waits: slabs of calls in flight are on no free list yet, and are zeroed when
        // they are freed.
        core.pool.begin_wipe();
        self.wait_for_calls();
        self.wait_for_stuck_calls();
        self.erase_stages();
        core.lock().are_removals_cancelled = false;
        // Flushes wait for this.
        core.notify_changed();
        self.wipe();
        let mut state = core.lock();
        // The records of the erased blocks were cleared, but still contain their keys and digests.
        let mut wiped = 0;
        while let Some(next) = state.ledger.as_ref().and_then(|ledger| ledger.wipe_free(wiped)) {
            wiped = next;
            drop(state);
            state = core.lock_for(KEYS_PER_HOLD);
        }
        state.is_erasing = false;
        drop(state);
        Ok(self.erased)
    }

    /// Removes all keys, and empties the eviction policy and the history. Returns what each tier
    /// had.
    fn empty_catalog(&mut self) -> Vec<TierEraseReport> {
        let core = self.core;
        let tier = |at| TierEraseReport { tier: core.tier_name(at), ..TierEraseReport::default() };
        let mut tiers: Vec<_> = (0..=core.stages.len()).map(tier).collect();
        let mut count = |state: &StoreState, key| {
            let content = state.catalog.content(state.catalog.entry(key).content);
            // Each content once, with its last key.
            let bytes = if content.key_count == 1 { u64::from(content.bytes) } else { 0 };
            let in_dram = content.slab.is_some();
            for (at, tier) in tiers.iter_mut().enumerate() {
                let has = match at {
                    0 => in_dram,
                    at => content.has_address(at - 1),
                };
                tier.blocks += u64::from(has);
                tier.bytes += if has { bytes } else { 0 };
            }
        };
        loop {
            // In the same holds as the removals of keys: no mover sends these.
            remove_cleared(core, Loss::Deleted, &mut count, |state| self.removed.take(state));
            let mut state = core.lock();
            if state.catalog.key_count() == 0 && state.catalog.cleared_keys() == 0 {
                // Ghost lists and the history contain keys of former blocks.
                let emptied = state.take_traces(core.new_eviction(), core.clock.unix_ms());
                drop(state);
                // Without the lock: they are as large as the store was.
                drop(emptied);
                return tiers;
            }
            // A call that began before the erase has put a block meanwhile.
            state.make_all_absent();
            core.unlock(state);
        }
    }

    /// Waits until no call, mover or scrubber holds a block.
    fn wait_for_calls(&mut self) {
        let (core, call) = (self.core, self.call);
        let mut state = core.lock();
        loop {
            // Calls in flight can still queue key changes; those are not sent to the stages.
            self.removed.take(&mut state);
            state = core.end_full_hold(state);
            if state.has_key_changes() {
                continue;
            }
            // A mover settles a ticket only after the reply of its stage: with all settled, no
            // mover waits for a write. Timed-out calls are left to `wait_for_stuck_calls`.
            note_freed_slabs(core, &mut state);
            let is_settled = |stage: usize| {
                let (blocks, names) =
                    (&state.lower[stage].block_tickets, &state.lower[stage].key_tickets);
                blocks.settled == blocks.pushed && names.settled == names.pushed
            };
            if state.memory.slabs_in_flight + state.blocks_in_scrub == 0
                && (0..core.stages.len()).all(is_settled)
            {
                // Later flushes do not report failed writes of erased blocks.
                state.failures_before_erase = state.write_failures;
                return;
            }
            let (again, in_time) = core.wait_for_change(state, call);
            state = again;
            if !in_time {
                let why = "they did not end before the deadline, and may still write";
                return self.erased.add_not_erased("calls and writes in flight", why);
            }
        }
    }

    /// Waits for calls that outlast their deadlines: a late call to store blocks still writes.
    /// Waits for at most half of the remaining time, so that a call that hangs forever leaves time
    /// for the other steps.
    fn wait_for_stuck_calls(&mut self) {
        let (core, call) = (self.core, self.call);
        let wait = call.half(&*core.clock);
        for stage in &core.stages {
            let mut in_time = true;
            while stage.stuck_calls() > 0 && in_time {
                in_time = core.wait_for_change(core.lock(), wait).1;
            }
            if !in_time {
                let why = "calls to it have not come back, and may still write";
                self.erased.add_not_erased(format!("tier {}", stage.name()), why);
            }
        }
    }

    fn erase_stages(&mut self) {
        let (core, call) = (self.core, self.call);
        for ((at, stage), removed) in
            core.stages.iter().enumerate().zip(std::mem::take(&mut self.removed.0))
        {
            let left_before = self.erased.left.len();
            match stage.erase(call.deadline) {
                Ok(EraseOutcome { files_removed, overwritten_bytes, left }) => {
                    let tier = &mut self.erased.tiers[1 + at];
                    tier.files_removed = files_removed;
                    tier.overwritten_bytes = overwritten_bytes;
                    self.erased.left.extend(left);
                }
                Err(error) => {
                    self.erased
                        .add_not_erased(format!("tier {}", stage.name()), with_causes(&error));
                }
            }
            if self.erased.left.len() > left_before {
                // The stage is not erased: remove its blocks one by one. Otherwise they would all
                // be back after a restart.
                core.in_holds(None, &removals(removed), |state, change| {
                    state.push_key_change(at, *change);
                });
            }
        }
    }

    /// Zeroes the memory of the pool: first the free memory. Then waits until the deadline for
    /// readers to release the rest, which is zeroed on release.
    fn wipe(&mut self) {
        let (core, call) = (self.core, self.call);
        let mut has_time = || !call.deadline.has_passed(&*core.clock);
        let mut wiped = core.pool.wipe(&mut has_time);
        let held_before = wiped.held_bytes;
        let mut state = core.lock();
        // Memory that the kernel may still write for a killed process is held until a restart:
        // waiting for it would only use up the deadline.
        let kernel_bytes = core.warm.as_ref().map_or(0, |warm| warm.holders.kernel_bytes());
        while wiped.held_bytes > kernel_bytes {
            let (again, in_time) = core.wait_for_change(state, call);
            state = again;
            // Processes that hold memory of an earlier run end without a notification.
            drop(state);
            if let Some(warm) = &core.warm {
                warm.sweep(&*core.clock);
            }
            state = core.lock();
            wiped.held_bytes = core.pool.stats().reserved_bytes.min(held_before);
            if !in_time {
                break;
            }
        }
        drop(state);
        if held_before > 0 && wiped.held_bytes <= kernel_bytes {
            // Memory released during a wipe is zeroed on release. Memory whose release began before
            // the wipe is not: zero it now.
            wiped = core.pool.wipe(&mut has_time);
        }
        self.erased.memory = wiped;
        if wiped.unwiped_bytes > 0 {
            let why = format!("{} bytes were not zeroed before the deadline", wiped.unwiped_bytes);
            self.erased.add_not_erased("memory of the pool", why);
        }
        let kernel_bytes = kernel_bytes.min(wiped.held_bytes);
        if kernel_bytes > 0 {
            let why = format!(
                "the kernel may still write {kernel_bytes} bytes for a process that was killed; \
                 erase again after a restart"
            );
            self.erased.add_not_erased("memory of the pool", why);
        }
        if wiped.held_bytes > kernel_bytes {
            let bytes = wiped.held_bytes - kernel_bytes;
            let why = format!("{bytes} bytes are held by readers; zeroed when released");
            self.erased.add_not_erased("memory of the pool", why);
        }
    }
}

/// Queued key changes that were not sent. Their removals are needed only for a stage that cannot be
/// erased.
#[derive(Default)]
struct CancelledRemovals([Vec<Vec<KeyChange>>; LOWER_STAGES_MAX]);

impl CancelledRemovals {
    /// Takes a part of the queues of key changes.
    fn take(&mut self, state: &mut StoreState) {
        for (stage, taken) in self.0.iter_mut().enumerate().take(state.lower.len()) {
            let changes = state.cancel_key_changes(stage);
            if !changes.is_empty() {
                taken.push(changes);
            }
        }
    }
}

fn removals(changes: Vec<Vec<KeyChange>>) -> Vec<KeyChange> {
    let is_removal = |change: &KeyChange| matches!(change, KeyChange::Remove(..));
    changes.into_iter().flatten().filter(is_removal).collect()
}
