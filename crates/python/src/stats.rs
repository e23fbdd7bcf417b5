//! The statistics of a store as dictionaries with the names of the Rust fields.

use cascade_memory::PoolStats;
use cascade_store::{
    HealthState, ShadowFigure, ShadowRates, StageHealth, StoreCounters, StoreStats, TierHits,
    TierName,
};
use cascade_tier::tier::TierStats;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Sets the listed fields of a struct in a dictionary. Fields after `except` are left out.
///
/// All fields must be listed, so a new field of the struct is a compile error here.
macro_rules! set_fields {
    (
        $dict:expr, $from:expr,
        $struct:ident { $($field:ident),+ $(,)? } $(except $($no:ident),+)?
    ) => {
        let $struct { $($field,)+ $($($no: _,)+)? } = $from;
        $($dict.set_item(stringify!($field), $field)?;)+
    };
}

/// The dictionary that `cascadekv.stats.Stats` describes.
pub(crate) fn to_dict<'py>(py: Python<'py>, stats: &StoreStats) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    set_counters(&dict, &stats.counters)?;
    set_fields!(dict, stats, StoreStats {
        keys, contents, content_bytes, dram_blocks, dram_bytes, protected_blocks,
        protection_refused, catalog_bytes, pending_bytes,
        insight_bytes, notes,
    } except counters, hits_by_tier, lock_holds, pool, stages, stage_blocks, health, sources,
      shadows, warm);
    let by_tier = PyDict::new(py);
    for hits in &stats.hits_by_tier {
        by_tier.set_item(hits.tier, hits_dict(py, hits)?)?;
    }
    dict.set_item("hits_by_tier", by_tier)?;
    dict.set_item("pool", pool_dict(py, &stats.pool)?)?;
    dict.set_item("stages", stages_dict(py, stats)?)?;
    dict.set_item("health", health_dict(py, &stats.health)?)?;
    let shadows = stats.shadows.iter().map(|figure| shadow_dict(py, figure));
    dict.set_item("shadows", shadows.collect::<PyResult<Vec<_>>>()?)?;
    Ok(dict)
}

fn set_counters(dict: &Bound<'_, PyDict>, counters: &StoreCounters) -> PyResult<()> {
    set_fields!(
        dict,
        counters,
        StoreCounters {
            requests,
            blocks_requested,
            blocks_matched,
            direct_requested,
            direct_matched,
            gets,
            hits,
            misses,
            shed_gets,
            get_failures,
            bytes_read,
            puts,
            stored,
            deduplicated,
            present,
            conflicts,
            declined,
            put_failures,
            bytes_written,
            evicted_blocks,
            evicted_bytes,
            lost_blocks,
            demoted_blocks,
            demoted_bytes,
            promoted_blocks,
            promoted_bytes,
            demote_failures,
            shed_puts,
            demote_declines,
            name_failures,
            reclaimed_blocks,
            damaged_blocks,
            prefetched_blocks,
            prefetched_used,
        }
    );
    Ok(())
}

fn shadow_dict<'py>(py: Python<'py>, figure: &ShadowFigure) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    set_fields!(dict, figure, ShadowFigure {
        tier, capacity_percent, capacity_bytes, sampled_one_in,
    } except recent, since_start);
    for (name, rates) in [("recent", &figure.recent), ("since_start", &figure.since_start)] {
        let one = PyDict::new(py);
        set_fields!(
            one,
            rates,
            ShadowRates { blocks_requested, blocks_matched, blocks_simulated, blocks_predicted }
        );
        dict.set_item(name, one)?;
    }
    Ok(dict)
}

fn hits_dict<'py>(py: Python<'py>, hits: &TierHits) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    set_fields!(dict, hits, TierHits { blocks, bytes, matched_blocks } except tier);
    Ok(dict)
}

fn pool_dict<'py>(py: Python<'py>, pool: &PoolStats) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    set_fields!(
        dict,
        pool,
        PoolStats {
            capacity_bytes,
            requested_bytes,
            reserved_bytes,
            magazine_bytes,
            free_bytes,
            largest_free_bytes,
            huge_bytes,
        }
    );
    Ok(dict)
}

fn stages_dict<'py>(py: Python<'py>, stats: &StoreStats) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    for ((tier, stage), blocks) in stats.stages.iter().zip(&stats.stage_blocks) {
        let one = PyDict::new(py);
        one.set_item("blocks", blocks)?;
        set_fields!(
            one,
            stage,
            TierStats {
                used_bytes,
                capacity_bytes,
                files,
                damaged_blocks,
                damaged_structures,
                encryption,
                notes,
            }
        );
        dict.set_item(tier, one)?;
    }
    Ok(dict)
}

fn state_name(state: HealthState) -> &'static str {
    match state {
        HealthState::Healthy => "healthy",
        HealthState::Open => "open",
        HealthState::Probing => "probing",
    }
}

fn health_dict<'py>(
    py: Python<'py>,
    health: &[(TierName, StageHealth)],
) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    for (tier, health) in health {
        let one = PyDict::new(py);
        set_fields!(one, health, StageHealth {
            since_unix_ms, opened_count, last_error, stuck_calls,
        } except state, reads, writes);
        one.set_item("state", state_name(health.state))?;
        one.set_item("reads", state_name(health.reads.state))?;
        one.set_item("writes", state_name(health.writes.state))?;
        dict.set_item(tier, one)?;
    }
    Ok(dict)
}
