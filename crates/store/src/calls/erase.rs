//! Erase: removes every block from every tier, and overwrites its bytes.

use cascade_block::with_causes;
use cascade_memory::WipeReport;
use cascade_tier::tier::{EraseOutcome, NotErased};
use cascade_tier::{CallOptions, StoreError, TierName};

use crate::core::catalog::LOWER_STAGES_MAX;
use crate::core::history::Loss;
use crate::core::pending::KeyChange;
use crate::core::state::StoreState;
use crate::shared::StoreCore;
use crate::shared::call::CallContext;
use crate::shared::hold::KEYS_PER_HOLD;

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

impl StoreCore {
    /// Forgets every block, waits for calls in flight, erases the stages and zeroes the pool.
    ///
    /// The order matters: `is_erasing` refuses new puts and reads, so that calls in flight end;
    /// only then does no thread write to a stage or a slab, and stages and memory can be erased.
    pub(crate) fn erase(&self, options: CallOptions) -> Result<EraseReport, StoreError> {
        let call = self.call(options);
        let mut state = self.lock_or_time_out("erase", call)?;
        if state.is_closing {
            return Err(StoreError::Closed);
        }
        if std::mem::replace(&mut state.is_erasing, true) {
            return Err(StoreError::Erasing);
        }
        state.erases += 1;
        state.are_removals_cancelled = true;
        state.make_all_absent();
        self.unlock(state);
        let mut removed = CancelledRemovals::default();
        let tiers = self.empty_catalog(&mut removed);
        let mut erased = EraseReport { tiers, ..EraseReport::default() };
        self.reset_insight();
        self.notify_changed();
        self.notify_movers();
        // Before the waits: slabs of calls in flight are on no free list yet, and are zeroed when
        // they are freed.
        self.pool.begin_wipe();
        self.wait_for_calls(&mut erased, &mut removed, call);
        self.wait_for_stuck_calls(&mut erased, call);
        self.erase_stages(&mut erased, removed, call);
        self.lock().are_removals_cancelled = false;
        // Flushes wait for this.
        self.notify_changed();
        self.wipe(&mut erased, call);
        let mut state = self.lock();
        // The records of the erased blocks were cleared, but still contain their keys and digests.
        let mut wiped = 0;
        while let Some(next) = state.ledger.as_ref().and_then(|ledger| ledger.wipe_free(wiped)) {
            wiped = next;
            drop(state);
            state = self.lock_for(KEYS_PER_HOLD);
        }
        state.is_erasing = false;
        drop(state);
        Ok(erased)
    }

    /// Removes all keys, and empties the eviction policy and the history. Returns what each tier
    /// had.
    fn empty_catalog(&self, removed: &mut CancelledRemovals) -> Vec<TierEraseReport> {
        let tier = |at| TierEraseReport { tier: self.tier_name(at), ..TierEraseReport::default() };
        let mut tiers: Vec<_> = (0..=self.stages.len()).map(tier).collect();
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
            self.remove_cleared(Loss::Deleted, &mut count, |state| removed.take(state));
            let mut state = self.lock();
            if state.catalog.key_count() == 0 && state.catalog.cleared_keys() == 0 {
                // Ghost lists and the history contain keys of former blocks.
                let emptied = state.take_traces(self.new_eviction(), self.clock.unix_ms());
                drop(state);
                // Without the lock: they are as large as the store was.
                drop(emptied);
                return tiers;
            }
            // A call that began before the erase has put a block meanwhile.
            state.make_all_absent();
            self.unlock(state);
        }
    }

    /// Waits until no call, mover or scrubber holds a block.
    fn wait_for_calls(
        &self,
        erased: &mut EraseReport,
        removed: &mut CancelledRemovals,
        call: CallContext,
    ) {
        let mut state = self.lock();
        loop {
            // Calls in flight can still queue key changes; those are not sent to the stages.
            removed.take(&mut state);
            state = self.end_full_hold(state);
            if state.has_key_changes() {
                continue;
            }
            // A mover settles a ticket only after the reply of its stage: with all settled, no
            // mover waits for a write. Timed-out calls are left to `wait_for_stuck_calls`.
            self.note_freed_slabs(&mut state);
            let is_settled = |stage: usize| {
                let (blocks, names) =
                    (&state.lower[stage].block_tickets, &state.lower[stage].key_tickets);
                blocks.settled == blocks.pushed && names.settled == names.pushed
            };
            if state.slabs_in_flight + state.blocks_in_scrub == 0
                && (0..self.stages.len()).all(is_settled)
            {
                // Later flushes do not report failed writes of erased blocks.
                state.failures_before_erase = state.write_failures;
                return;
            }
            let (again, in_time) = self.wait_for_change(state, call);
            state = again;
            if !in_time {
                let why = "they did not end before the deadline, and may still write";
                return erased.add_not_erased("calls and writes in flight", why);
            }
        }
    }

    /// Waits for calls that outlast their deadlines: a late call to store blocks still writes.
    /// Waits for at most half of the remaining time, so that a call that hangs forever leaves time
    /// for the other steps.
    fn wait_for_stuck_calls(&self, erased: &mut EraseReport, call: CallContext) {
        let wait = call.half(&*self.clock);
        for stage in &self.stages {
            let mut in_time = true;
            while stage.stuck_calls() > 0 && in_time {
                in_time = self.wait_for_change(self.lock(), wait).1;
            }
            if !in_time {
                let why = "calls to it have not come back, and may still write";
                erased.add_not_erased(format!("tier {}", stage.name()), why);
            }
        }
    }

    fn erase_stages(
        &self,
        erased: &mut EraseReport,
        removed: CancelledRemovals,
        call: CallContext,
    ) {
        for ((at, stage), removed) in self.stages.iter().enumerate().zip(removed.0) {
            let left_before = erased.left.len();
            match stage.erase(call.deadline) {
                Ok(EraseOutcome { files_removed, overwritten_bytes, left }) => {
                    let tier = &mut erased.tiers[1 + at];
                    tier.files_removed = files_removed;
                    tier.overwritten_bytes = overwritten_bytes;
                    erased.left.extend(left);
                }
                Err(error) => {
                    erased.add_not_erased(format!("tier {}", stage.name()), with_causes(&error));
                }
            }
            if erased.left.len() > left_before {
                // The stage is not erased: remove its blocks one by one. Otherwise they would all
                // be back after a restart.
                self.in_holds(None, &removals(removed), |state, change| {
                    state.push_key_change(at, *change);
                });
            }
        }
    }

    /// Zeroes the memory of the pool: first the free memory. Then waits until the deadline for
    /// readers to release the rest, which is zeroed on release.
    fn wipe(&self, erased: &mut EraseReport, call: CallContext) {
        let mut has_time = || !call.deadline.has_passed(&*self.clock);
        let mut wiped = self.pool.wipe(&mut has_time);
        let held_before = wiped.held_bytes;
        let mut state = self.lock();
        // Memory that the kernel may still write for a killed process is held until a restart:
        // waiting for it would only use up the deadline.
        let kernel_bytes = self.warm.as_ref().map_or(0, |warm| warm.holders.kernel_bytes());
        while wiped.held_bytes > kernel_bytes {
            let (again, in_time) = self.wait_for_change(state, call);
            state = again;
            // Processes that hold memory of an earlier run end without a notification.
            drop(state);
            self.release_dead_holders();
            state = self.lock();
            wiped.held_bytes = self.pool.stats().reserved_bytes.min(held_before);
            if !in_time {
                break;
            }
        }
        drop(state);
        if held_before > 0 && wiped.held_bytes <= kernel_bytes {
            // Memory released during a wipe is zeroed on release. Memory whose release began before
            // the wipe is not: zero it now.
            wiped = self.pool.wipe(&mut has_time);
        }
        erased.memory = wiped;
        if wiped.unwiped_bytes > 0 {
            let why = format!("{} bytes were not zeroed before the deadline", wiped.unwiped_bytes);
            erased.add_not_erased("memory of the pool", why);
        }
        let kernel_bytes = kernel_bytes.min(wiped.held_bytes);
        if kernel_bytes > 0 {
            let why = format!(
                "the kernel may still write {kernel_bytes} bytes for a process that was killed; \
                 erase again after a restart"
            );
            erased.add_not_erased("memory of the pool", why);
        }
        if wiped.held_bytes > kernel_bytes {
            let bytes = wiped.held_bytes - kernel_bytes;
            let why = format!("{bytes} bytes are held by readers; zeroed when released");
            erased.add_not_erased("memory of the pool", why);
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
