//! The statistics of a store, gathered from all its parts.

use cascade_tier::{StoreStats, TierHits, TierName};

use crate::core::state::StoreState;
use crate::shared::StoreCore;

/// The current statistics.
pub(super) fn statistics(core: &StoreCore) -> StoreStats {
    // Before the lock: each stage may take up to a second to respond.
    let stages = core.stages.iter().map(|stage| (stage.name(), stage.stats()));
    let stages: Vec<_> = stages.collect();
    let stuck = core.stages.iter().map(|stage| (stage.name(), stage.stuck_calls()));
    let stuck: Vec<_> = stuck.collect();
    let sources = core.sources.list.iter().map(|it| (it.name(), it.stats())).collect();
    let pool = core.pool.stats();
    // Lets the probers check for hanging calls now, so that the next statistics are current.
    core.wake_probers();
    let (shadows, shadow_bytes) = core.insight().figures();
    let warm = core.warm.as_ref();
    let notes = core.pipeline.notes.iter().chain(warm.iter().flat_map(|warm| &warm.notes));
    let mut state = core.lock();
    core.add_call_counts(&mut state);
    let eviction = state.memory.eviction.stats();
    StoreStats {
        counters: state.counters,
        hits_by_tier: hits_by_tier(core, &state),
        keys: state.catalog.key_count() as u64,
        contents: state.catalog.content_count() as u64,
        content_bytes: state.content_bytes,
        dram_blocks: state.memory.eviction.blocks().len() as u64,
        dram_bytes: state.memory.used_bytes,
        protected_blocks: eviction.protected_blocks,
        protection_refused: eviction.protection_refused,
        catalog_bytes: state.metadata_bytes() as u64,
        pending_bytes: state.pending_total(),
        lock_holds: core.lock_holds(),
        pool,
        stage_blocks: (0..stages.len()).map(|at| state.catalog.stage_blocks(at)).collect(),
        stages,
        health: stuck
            .into_iter()
            .zip(&state.lower)
            .map(|((name, stuck_calls), tier)| (name, tier.breaker.health(stuck_calls)))
            .collect(),
        sources,
        shadows,
        insight_bytes: (shadow_bytes + state.history.memory_bytes()) as u64,
        warm: warm.map(|warm| warm.stats(&state)),
        notes: notes.cloned().collect(),
    }
}

/// Hits of DRAM, of the stages and of the sources.
fn hits_by_tier(core: &StoreCore, state: &StoreState) -> Vec<TierHits> {
    let sources = (0..core.sources.list.len()).map(|at| {
        let hits = state.source_hits.get(at).copied().unwrap_or_default();
        (hits, state.source_matches.get(at).copied().unwrap_or_default())
    });
    let tiers = state.tier_hits.iter().copied().zip(state.tier_matches);
    let all = tiers.take(1 + core.stages.len()).chain(sources);
    let named = core.tier_names().iter().zip(all);
    let hits = |(tier, ((blocks, bytes), matched_blocks)): (&TierName, _)| TierHits {
        tier,
        blocks,
        bytes,
        matched_blocks,
    };
    named.map(hits).collect()
}
