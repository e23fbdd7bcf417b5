//! Erasing a store: every block leaves every tier, and what held it is zeroed.

use std::collections::HashSet;

use cascade_block::with_causes;
use cascade_memory::Wiped;

use crate::call::Call;
use crate::catalog::LOWER_STAGES_MAX;
use crate::history::{History, Loss};
use crate::node::Node;
use crate::stage::StageErased;
use crate::state::{NameChange, State};
use crate::{CallOptions, StoreError, TierName};

/// What erasing a store did, and what it could not.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Erased {
    /// What each tier had, fast to slow.
    pub tiers: Vec<TierErased>,
    /// The pool: freed memory that was zeroed, and what was not.
    pub memory: Wiped,
    /// What is left, and why; empty when everything is gone.
    pub left: Vec<Left>,
}

/// What one tier had.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TierErased {
    /// The tier.
    pub tier: TierName,
    /// Blocks that it had.
    pub blocks: u64,
    /// Their bytes, each content counted once.
    pub bytes: u64,
    /// Files that were overwritten and removed.
    pub files_removed: u64,
    /// Bytes of them that were overwritten.
    pub overwritten_bytes: u64,
}

/// Something that resisted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Left {
    /// What: a file, a tier, memory.
    pub what: String,
    /// Why.
    pub why: String,
}

impl Erased {
    /// Whether nothing is left.
    pub fn is_complete(&self) -> bool {
        self.left.is_empty()
    }

    fn leave(&mut self, what: impl Into<String>, why: impl Into<String>) {
        self.left.push(Left { what: what.into(), why: why.into() });
    }
}

impl Node {
    /// Forgets every block, waits for what is under way, erases the stages and zeroes the pool.
    pub(crate) fn erase(&self, options: CallOptions) -> Result<Erased, StoreError> {
        let call = self.call(options);
        let mut state = self.lock();
        if state.is_closing {
            return Err(StoreError::Closed);
        }
        if std::mem::replace(&mut state.is_erasing, true) {
            return Err(StoreError::Erasing);
        }
        let mut erased = Erased { tiers: self.forget_all(&mut state), ..Erased::default() };
        let mut removed = Removed::default();
        removed.take(&mut state);
        drop(state);
        self.forget_watched();
        self.announce_change();
        self.announce_work();
        self.pool.begin_wipe();
        self.wait_quiet(&mut erased, &mut removed, call);
        self.wait_for_late_calls(&mut erased, call);
        self.erase_stages(&mut erased, removed, call);
        self.wipe(&mut erased, call);
        let mut state = self.lock();
        if let Some(ledger) = &state.ledger {
            ledger.wipe_free();
        }
        state.is_erasing = false;
        drop(state);
        Ok(erased)
    }

    /// Empties the catalog and what the policy remembers; says what each tier had.
    fn forget_all(&self, state: &mut State) -> Vec<TierErased> {
        let tier = |at| TierErased { tier: self.tier_name(at), ..TierErased::default() };
        let mut tiers: Vec<_> = (0..=self.stages.len()).map(tier).collect();
        let mut counted = HashSet::new();
        for key in state.catalog.all_keys() {
            let index = state.catalog.entry(key).content;
            let content = state.catalog.content(index);
            let is_first = counted.insert(index);
            let bytes = if is_first { u64::from(content.bytes) } else { 0 };
            let in_dram = content.slab.is_some();
            for (at, tier) in tiers.iter_mut().enumerate() {
                let has = match at {
                    0 => in_dram,
                    at => content.address(at - 1).is_some(),
                };
                tier.blocks += u64::from(has);
                tier.bytes += if has { bytes } else { 0 };
            }
        }
        state.forget_all(Loss::Deleted);
        // Ghost lists and histories know keys of blocks that are gone.
        state.eviction = self.new_eviction();
        state.history = History::new(self.clock.unix_ms(), self.seed);
        state.prefetched.clear();
        state.prefetched_bytes = 0;
        state.lacking = Default::default();
        state.retries = [0; LOWER_STAGES_MAX];
        tiers
    }

    /// Waits until no call and no mover holds a block.
    fn wait_quiet(&self, erased: &mut Erased, removed: &mut Removed, call: Call) {
        let mut state = self.lock();
        loop {
            removed.take(&mut state);
            let is_settled = |stage: usize| {
                let (blocks, names) = (&state.blocks_tickets[stage], &state.names_tickets[stage]);
                blocks.settled == blocks.pushed && names.settled == names.pushed
            };
            if state.slabs_out + state.scrubbing == 0 && (0..self.stages.len()).all(is_settled) {
                state.forgiven = state.unwritten;
                return;
            }
            let (again, in_time) = self.wait_changed(state, call);
            state = again;
            if !in_time {
                let why = "they did not end before the deadline, and may still write";
                return erased.leave("calls and writes under way", why);
            }
        }
    }

    /// Waits for calls to stages that their callers have given up: one that stores goes on writing.
    /// For half of the time that is left, so that one that hangs for good leaves some for the rest.
    fn wait_for_late_calls(&self, erased: &mut Erased, call: Call) {
        let wait = call.half(&*self.clock);
        for stage in &self.stages {
            let mut in_time = true;
            while stage.stuck_calls() > 0 && in_time {
                in_time = self.wait_changed(self.lock(), wait).1;
            }
            if !in_time {
                let why = "calls that have not come back, and may still write";
                erased.leave(format!("tier {}", stage.name()), why);
            }
        }
    }

    fn erase_stages(&self, erased: &mut Erased, removed: Removed, call: Call) {
        for ((at, stage), removed) in self.stages.iter().enumerate().zip(removed.0) {
            let left_before = erased.left.len();
            match stage.erase(call.deadline) {
                Ok(StageErased { files_removed, overwritten_bytes, left }) => {
                    let tier = &mut erased.tiers[1 + at];
                    tier.files_removed = files_removed;
                    tier.overwritten_bytes = overwritten_bytes;
                    erased.left.extend(left);
                }
                Err(error) => {
                    erased.leave(format!("tier {}", stage.name()), with_causes(&error));
                }
            }
            if erased.left.len() > left_before {
                // Then it forgets block by block what it can, or all would be back after a restart.
                let mut state = self.lock();
                for change in removed {
                    state.push_name(at, change);
                }
                self.release(state);
            }
        }
    }

    fn wipe(&self, erased: &mut Erased, call: Call) {
        let mut may_go_on = || !call.deadline.has_passed(&*self.clock);
        let mut wiped = self.pool.wipe(&mut may_go_on);
        let held_before = wiped.held_bytes;
        let mut state = self.lock();
        let kernel_bytes = self.warm.as_ref().map_or(0, |warm| warm.holders.kernel_bytes());
        while wiped.held_bytes > kernel_bytes {
            let (again, in_time) = self.wait_changed(state, call);
            state = again;
            // Holders of an earlier run end without a word.
            self.sweep_holders();
            wiped.held_bytes = self.pool.stats().reserved_bytes.min(held_before);
            if !in_time {
                break;
            }
        }
        drop(state);
        if held_before > 0 && wiped.held_bytes <= kernel_bytes {
            // Whoever gave it back has zeroed it, unless it was on its way when this began.
            wiped = self.pool.wipe(&mut may_go_on);
        }
        erased.memory = wiped;
        if wiped.left_bytes > 0 {
            let why = format!("{} bytes were not zeroed before the deadline", wiped.left_bytes);
            erased.leave("memory of the pool", why);
        }
        let kernel_bytes = kernel_bytes.min(wiped.held_bytes);
        if kernel_bytes > 0 {
            let why = format!(
                "the kernel may still write {kernel_bytes} bytes for a process that was killed; \
                 erase again after a restart"
            );
            erased.leave("memory of the pool", why);
        }
        if wiped.held_bytes > kernel_bytes {
            let bytes = wiped.held_bytes - kernel_bytes;
            let why = format!("{bytes} bytes are held by readers; zeroed when they come back");
            erased.leave("memory of the pool", why);
        }
    }
}

/// Names that the stages need not be told to forget if they are erased.
#[derive(Default)]
struct Removed([Vec<NameChange>; LOWER_STAGES_MAX]);

impl Removed {
    fn take(&mut self, state: &mut State) {
        for (stage, removed) in self.0.iter_mut().enumerate() {
            state.names_tickets[stage].settled += state.names[stage].len() as u64;
            let is_removal = |change: &NameChange| matches!(change, NameChange::Remove(..));
            removed.extend(state.names[stage].drain(..).filter(is_removal));
        }
    }
}
