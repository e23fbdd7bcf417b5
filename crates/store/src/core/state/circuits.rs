//! What an open circuit of a stage means for the state: blocks that cannot be read, and blocks and
//! key changes that wait until the write circuit closes.

use std::time::Duration;

use super::StoreState;
use crate::core::catalog::Content;
use crate::core::circuit::Direction;
use crate::core::pending::{KeyChange, PendingWrite};
use crate::core::queue::Queue;

/// Maximum number of blocks listed as missing in a stage. Beyond it the oldest, which are evicted
/// first, are dropped from the list.
const UNSTORED_MAX: usize = 64 << 10;
/// Number of key changes queued for a stage with an open write circuit, beyond which the oldest are
/// dropped.
const KEY_CHANGES_MAX: usize = 32 << 10;
/// Key changes that are dropped for one that is queued, until there are no longer too many.
const DROPPED_PER_CHANGE: usize = 64;

impl StoreState {
    /// Whether the read circuit of a stage is open.
    pub(crate) fn is_read_circuit_open(&self, stage: usize) -> bool {
        self.open_read_circuits & (1 << stage) != 0
    }

    /// Whether the write circuit of a stage is open.
    pub(crate) fn is_write_circuit_open(&self, stage: usize) -> bool {
        self.open_write_circuits & (1 << stage) != 0
    }

    /// Whether a content cannot be read now: only stages with an open read circuit have its bytes.
    pub(crate) fn is_unreadable(&self, content: &Content) -> bool {
        if self.open_read_circuits == 0 || content.slab.is_some() {
            return false;
        }
        // Without a holder no open circuit hides the content.
        let holders = content.stages() & !self.key_only_stages;
        holders != 0 && holders & !self.open_read_circuits == 0
    }

    /// Requests probes of the stages with a backlog, because a put waits for them.
    pub(crate) fn probe_backlogged_stages(&mut self, now: Duration) {
        for tier in &mut self.lower {
            if tier.pending_bytes > 0 || !tier.key_changes.is_empty() {
                tier.breaker.suspect(Direction::Writes, now);
            }
        }
    }

    /// The longest queue of key changes among the stages with a closed write circuit.
    pub(crate) fn key_changes_waiting(&self) -> usize {
        // Puts must not wait for a stage with an open circuit: its queue shrinks only when the
        // circuit closes.
        let healthy = (0..self.lower.len()).filter(|stage| !self.is_write_circuit_open(*stage));
        healthy.map(|stage| self.lower[stage].key_changes.len()).max().unwrap_or(0)
    }

    /// Lists a block that a stage should have, but does not have.
    pub(crate) fn note_unstored(&mut self, stage: usize, pending: PendingWrite) {
        let tier = &mut self.lower[stage];
        if tier.unstored.len() == UNSTORED_MAX {
            tier.unstored.pop_front();
            tier.requeue_count = tier.requeue_count.min(UNSTORED_MAX - 1);
        }
        tier.unstored.push_back(pending);
    }

    /// Puts failed key changes back at the front of the queue: their order matters.
    pub(crate) fn requeue_key_changes(&mut self, stage: usize, failed: Queue<KeyChange>) {
        // They may be too many with those that were queued meanwhile, until more are queued.
        self.lower[stage].key_changes.prepend(failed);
    }

    /// Limits the queue of key changes while the write circuit is open. The effect of dropped
    /// changes shows after a restart: a deleted block is back, or a key is missing.
    pub(crate) fn limit_key_changes(&mut self, stage: usize) {
        if !self.is_write_circuit_open(stage)
            || self.lower[stage].key_changes.len() < KEY_CHANGES_MAX
        {
            return;
        }
        let dropped = self.lower[stage].key_changes.pop_some(DROPPED_PER_CHANGE);
        self.charge_keys(&dropped);
        // Dropped changes settle their tickets: a flush must not wait for them.
        self.settle_key_changes(stage, &dropped);
        let count = dropped.len() as u64;
        self.counters.name_failures += count;
        self.write_failures.count(stage, count);
    }

    /// Queues blocks that a stage should have and that are still in DRAM, up to `bytes_max`. Called
    /// when the mover's queue is empty, so that puts do not wait for these blocks.
    pub(crate) fn requeue_unstored(&mut self, stage: usize, bytes_max: u64) {
        let mut bytes = 0;
        while self.lower[stage].requeue_count > 0
            && !self.is_hold_full()
            && bytes < bytes_max
            && !self.is_write_circuit_open(stage)
        {
            self.lower[stage].requeue_count -= 1;
            self.charge(1);
            let Some(pending) = self.lower[stage].unstored.pop_front() else { continue };
            let place = (pending.content, pending.generation);
            // Since it was listed, the block may have been deleted, evicted, or put and queued
            // again.
            let is_unstored = self.catalog.live_content(place).is_some_and(|content| {
                let is_queued = content.dirty & (1 << stage) != 0;
                content.slab.is_some() && !content.has_address(stage) && !is_queued
            });
            if is_unstored {
                bytes += u64::from(pending.facts.bytes);
                self.push_block_with_tries(stage, pending.facts, pending.content, pending.tries);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use cascade_block::{BlockKey, FingerprintSeed};
    use cascade_runtime::ManualClock;
    use cascade_tier::tier::Address;

    use super::*;
    use crate::core::eviction::{Eviction, EvictionLimits, policy};
    use crate::core::history::History;
    use crate::core::memory_tier::MemoryTier;
    use crate::{HealthConfig, PolicyKind};

    /// Half of 32,768 changes were dropped in one hold of the lock.
    #[test]
    fn few_key_changes_are_dropped_at_once_while_a_circuit_is_open() {
        let limits =
            EvictionLimits { capacity_bytes: 0, protected_percent: 0, admit_partial: false };
        let seed = FingerprintSeed::new(1);
        let mut state = StoreState::new(
            MemoryTier::new("dram", true, Eviction::new(policy(PolicyKind::Lru), limits)),
            1,
            History::new(0, seed),
            (HealthConfig::default(), seed),
            &ManualClock::default(),
        );
        let change = KeyChange::Remove(BlockKey::from_bytes([1; 32]), Address(1));
        let many = vec![change; KEY_CHANGES_MAX];
        state.lower[0].key_tickets.pushed = 2 * KEY_CHANGES_MAX as u64;
        state.lower[0].key_changes = many.clone().into();
        state.open_write_circuits = 1;
        state.requeue_key_changes(0, many.into());
        let mut pushes = 0;
        while state.lower[0].key_changes.len() > KEY_CHANGES_MAX {
            let (before, cost) = (state.lower[0].key_changes.len(), state.cost);
            state.push_key_change(0, change);
            let dropped = before + 1 - state.lower[0].key_changes.len();
            assert!((1..=256).contains(&dropped), "{dropped} dropped at once");
            assert_eq!(u32::try_from(dropped), Ok(state.cost - cost));
            pushes += 1;
        }
        assert!(pushes > 100);
        let dropped = state.lower[0].key_tickets.settled;
        assert_eq!(dropped, state.counters.name_failures);
        assert_eq!(
            state.lower[0].key_tickets.pushed - dropped,
            state.lower[0].key_changes.len() as u64
        );
    }
}
