//! A store's statistics as plain dictionaries, named as in the store.

use cascade_store::stage::StageStats;
use cascade_store::{Counters, Stats};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Enters fields of a struct under their own names.
macro_rules! set_fields {
    ($dict:expr, $from:expr, $($field:ident),+ $(,)?) => {
        $($dict.set_item(stringify!($field), &$from.$field)?;)+
    };
}

/// The dictionary that `cascadekv.stats.Stats` describes.
pub(crate) fn to_dict<'py>(py: Python<'py>, stats: &Stats) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    set_counters(&dict, &stats.counters)?;
    let hits_by_tier = PyDict::new(py);
    for hits in &stats.hits_by_tier {
        let tier = PyDict::new(py);
        set_fields!(tier, hits, blocks, bytes);
        hits_by_tier.set_item(hits.tier, tier)?;
    }
    dict.set_item("hits_by_tier", hits_by_tier)?;
    set_fields!(dict, stats, keys, contents, content_bytes, dram_blocks, dram_bytes);
    set_fields!(dict, stats, pending_bytes);
    let pool = PyDict::new(py);
    set_fields!(pool, stats.pool, capacity_bytes, requested_bytes, reserved_bytes, huge_bytes);
    dict.set_item("pool", pool)?;
    let stages = PyDict::new(py);
    for (tier, stage) in &stats.stages {
        stages.set_item(tier, stage_dict(py, stage)?)?;
    }
    dict.set_item("stages", stages)?;
    set_fields!(dict, stats, notes);
    Ok(dict)
}

fn set_counters(dict: &Bound<'_, PyDict>, counters: &Counters) -> PyResult<()> {
    set_fields!(dict, counters, requests, blocks_requested, blocks_matched);
    set_fields!(dict, counters, gets, hits, misses, get_failures, bytes_read);
    set_fields!(dict, counters, puts, stored, deduplicated, present, conflicts, declined);
    set_fields!(dict, counters, put_failures, bytes_written);
    set_fields!(dict, counters, evicted_blocks, evicted_bytes, lost_blocks);
    set_fields!(dict, counters, demoted_blocks, demoted_bytes, promoted_blocks, promoted_bytes);
    set_fields!(dict, counters, demote_failures, remove_failures, reclaimed_blocks);
    set_fields!(dict, counters, damaged_blocks, prefetched_blocks, prefetched_used);
    Ok(())
}

fn stage_dict<'py>(py: Python<'py>, stage: &StageStats) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    set_fields!(dict, stage, used_bytes, capacity_bytes, creates, damaged_blocks, notes);
    Ok(dict)
}
