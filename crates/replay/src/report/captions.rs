//! The captions of the plots: what to conclude from each, computed from the result.

use cascade_block::ByteSize;

use crate::figures::{duration, percent, short_count};
use crate::result::{ReplayResult, ratio};

/// Caption of the hits over time.
pub(super) fn over_time(result: &ReplayResult) -> String {
    let shares = result.tiers().into_iter().map(|tier| {
        let hits = result.hits_by_tier.get(&tier).copied().unwrap_or(0);
        format!("{} came from {tier}", percent(ratio(hits as f64, result.blocks_requested as f64)))
    });
    let shares: Vec<String> = shares.collect();
    format!(
        "Of all requested blocks, {}; the engine had to compute the others. The gap between the \
         areas and the line is what a larger cache could gain.",
        shares.join(", ")
    )
}

/// Caption of the DRAM capacities.
pub(super) fn dram_sizes(result: &ReplayResult) -> String {
    let ceilings = &result.ceilings;
    let (Some(now), Some(twice)) = (ceilings.dram_alone, ceilings.dram_doubled) else {
        return "DRAM alone, from keys only.".to_owned();
    };
    let gain = (twice - now) * 100.0;
    let advice = if gain < 0.5 {
        "more DRAM does not help this traffic"
    } else {
        "compare that with the price of the memory"
    };
    format!(
        "Twice the DRAM of this run (the vertical line) would raise the hit rate of DRAM alone \
         from {} to {}, {gain:+.1} points: {advice}.",
        percent(now),
        percent(twice)
    )
}

/// Caption of the reuse distances.
pub(super) fn reuse(result: &ReplayResult) -> String {
    let reuse = &result.reuse;
    let first = percent(ratio(reuse.first_uses as f64, reuse.uses as f64));
    let most = reuse.hit_rates().last().map_or(0.0, |(_, rate)| *rate);
    let enough = reuse.hit_rates().into_iter().find(|(_, rate)| *rate > 0.0 && *rate >= most * 0.9);
    match enough {
        Some((bound, _)) => format!(
            "{first} of all uses are first uses, which no cache can hit. 90 % of the reuses come \
             within {} other blocks, so an LRU cache of that size would hit them.",
            short_count(bound)
        ),
        None => "No block is used twice, so a cache does not help this traffic.".to_owned(),
    }
}

/// Caption of the latencies.
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
        "Median time of a read: {}. A batch counts for the slowest tier in it. The check of its \
         bytes is not included.",
        reads.join(", ")
    )
}

/// Caption of the bytes moved.
pub(super) fn bytes(result: &ReplayResult) -> String {
    let requested = result.blocks_requested * result.payload.block_bytes;
    format!(
        "{} were requested, {} came from the cache. For {} at true size, multiply by {:.0}.",
        ByteSize(requested).rounded(),
        ByteSize(result.bytes_read).rounded(),
        result.payload.model,
        result.payload.scale,
    )
}
