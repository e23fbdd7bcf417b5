//! Hot prefixes, and the tiers that have their blocks.

use cascade_block::BlockKey;
use cascade_tier::TierName;

use crate::Store;
use crate::core::catalog::KeyIndex;
use crate::core::state::StoreState;
use crate::insight::hot::WatchedPrefix;
use crate::shared::StoreCore;
use crate::shared::hold::KEYS_PER_HOLD;

/// A prefix that many requests share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HotPrefix {
    /// Its last block.
    pub key: BlockKey,
    /// Blocks from the root to this one, inclusive.
    pub depth_blocks: u32,
    /// Requests that matched all of it in the last 15 to 30 minutes, since it is watched.
    pub hits: u64,
    /// Its blocks in each tier, fast to slow, as far as the chain is known.
    pub tiers: Vec<TierBytes>,
}

/// A chain's blocks in one tier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TierBytes {
    /// The tier.
    pub tier: TierName,
    /// Blocks in it.
    pub blocks: u64,
    /// Their bytes.
    pub bytes: u64,
}

impl Store {
    /// The prefixes with the most requests in the last 15 to 30 minutes, most first. Nested ones
    /// are listed separately. A prefix is counted from when it was first seen to be shared, so its
    /// hits are a lower bound.
    pub fn hot_prefixes(&self, count: usize) -> Vec<HotPrefix> {
        let core = self.core();
        // The guard ends with this statement: the two locks are never held together.
        let watched = core.insight().hot.top(count);
        let describe = |watched: WatchedPrefix| HotPrefix {
            key: watched.key,
            depth_blocks: watched.depth,
            hits: watched.hits(),
            tiers: tiers_of_chain(core, &watched.key, watched.depth),
        };
        watched.into_iter().map(describe).collect()
    }
}

/// The numbers of the tiers, fast to slow, that have a content's bytes and a closed read
/// circuit.
pub(crate) fn tiers_with(state: &StoreState, key: KeyIndex) -> Vec<usize> {
    let content = state.catalog.content(state.catalog.entry(key).content);
    let memory = content.slab.is_some().then_some(0);
    let has_it = |stage: &usize| content.has_address(*stage) && !state.is_read_circuit_open(*stage);
    let lower = (0..state.lower.len()).filter(has_it);
    memory.into_iter().chain(lower.map(|stage| 1 + stage)).collect()
}

/// Walks a chain up from its last block, in short holds of the lock: it may be of any length.
fn tiers_of_chain(core: &StoreCore, key: &BlockKey, depth: u32) -> Vec<TierBytes> {
    let mut sums = vec![(0_u64, 0_u64); 1 + core.stages.len()];
    let (mut next, mut left) = (Some(*key), depth);
    while let Some(key) = next.take() {
        let mut state = core.lock_for(KEYS_PER_HOLD);
        let mut at = state.catalog.find(&key);
        while let Some(found) = at.filter(|_| left > 0) {
            if state.is_hold_full() {
                // By its key: its index may be another key's after the lock was released.
                next = Some(state.catalog.entry(found).key);
                break;
            }
            state.charge(1);
            left -= 1;
            let content = state.catalog.entry(found).content;
            let bytes = u64::from(state.catalog.content(content).bytes);
            for tier in tiers_with(&state, found) {
                sums[tier].0 += 1;
                sums[tier].1 += bytes;
            }
            at = state.catalog.parent_of(found);
        }
    }
    let held = sums.into_iter().enumerate().filter(|(_, (blocks, _))| *blocks > 0);
    held.map(|(tier, (blocks, bytes))| TierBytes { tier: core.tier_name(tier), blocks, bytes })
        .collect()
}
