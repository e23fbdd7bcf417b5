//! The sentence below each plot: what to conclude from it, computed from the result.

use cascade_block::ByteSize;

use crate::replay::result::{ReplayResult, ratio};
use crate::replay::summary::{duration, percent, short_count};

/// Below the hits over time.
pub(super) fn over_time(result: &ReplayResult) -> String {
    let shares = result.tiers().into_iter().map(|tier| {
        let hits = result.hits_by_tier.get(&tier).copied().unwrap_or(0);
        format!("{} came from {tier}", percent(ratio(hits as f64, result.blocks_requested as f64)))
    });
    let shares: Vec<String> = shares.collect();
    format!(
        "Of all blocks asked for, {}; the rest had to be computed. The closer the areas come to \
         the line, the less there is left to gain.",
        shares.join(", ")
    )
}

/// Below the sizes of DRAM.
pub(super) fn dram_sizes(result: &ReplayResult) -> String {
    let ceilings = &result.ceilings;
    let (Some(now), Some(twice)) = (ceilings.dram_alone, ceilings.dram_doubled) else {
        return "DRAM alone, from metadata.".to_owned();
    };
    let gain = (twice - now) * 100.0;
    let advice = if gain < 0.5 {
        "more DRAM is not what this traffic lacks"
    } else {
        "weigh that against the price of the memory"
    };
    format!(
        "Twice the DRAM of this run (the upright line) would lift the hit rate of DRAM alone from \
         {} to {}, {gain:+.1} points: {advice}.",
        percent(now),
        percent(twice)
    )
}

/// Below the reuse distances.
pub(super) fn reuse(result: &ReplayResult) -> String {
    let reuse = &result.reuse;
    let first = percent(ratio(reuse.first_uses as f64, reuse.uses as f64));
    let most = reuse.hit_rates().last().map_or(0.0, |(_, rate)| *rate);
    let enough = reuse.hit_rates().into_iter().find(|(_, rate)| *rate > 0.0 && *rate >= most * 0.9);
    match enough {
        Some((bound, _)) => format!(
            "{first} of all uses are first uses, which no cache can serve. Nine of ten reuses come \
             within {} other blocks: an LRU of that size would have them.",
            short_count(bound)
        ),
        None => "No block is used twice: a cache gives this traffic nothing.".to_owned(),
    }
}

/// Below the latencies.
pub(super) fn latencies(result: &ReplayResult) -> String {
    let Some(latency) = &result.latency else { return String::new() };
    let reads = result.tiers().into_iter().filter_map(|tier| {
        let summary = latency.read.get(&tier)?;
        Some(format!("{} from {tier} (p99 {})", duration(summary.us_p50), duration(summary.us_p99)))
    });
    let reads: Vec<String> = reads.collect();
    if reads.is_empty() {
        return "Nothing was read.".to_owned();
    }
    format!(
        "The hits of a request are in memory after a median of {}. A batch counts for the slowest \
         tier in it; checking its bytes is not included.",
        reads.join(", ")
    )
}

/// Below the bytes moved.
pub(super) fn bytes(result: &ReplayResult) -> String {
    let asked = result.blocks_requested * result.payload.block_bytes;
    format!(
        "Of {} asked for, {} came from the cache. For {} at true size, multiply by {:.0}.",
        ByteSize(asked).rounded(),
        ByteSize(result.bytes_read).rounded(),
        result.payload.model,
        result.payload.scale,
    )
}
