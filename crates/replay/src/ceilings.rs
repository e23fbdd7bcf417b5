//! Hit rates of other caches on the same requests, computed from keys only.

use std::collections::HashSet;

use cascade_store::PolicyKind;
use cascade_store::eviction::policy;

use crate::result::{Ceilings, SweepPoint};
use crate::study::{StudyOptions, optimum, replay_metadata, replay_with_callback};
use crate::trace::Trace;

/// DRAM capacities to simulate: this run's capacity times 2 to these powers.
const SWEEP: std::ops::RangeInclusive<i32> = -3..=3;

/// A trace, a policy and the capacity of DRAM.
#[derive(Debug)]
pub struct DramStudy<'a> {
    /// The requests.
    pub trace: &'a Trace,
    /// The eviction policy.
    pub policy: PolicyKind,
    /// Capacity in blocks.
    pub dram_blocks: u64,
    /// Whether the last block of a request is admitted when it is not full.
    pub admits_partial: bool,
}

impl DramStudy<'_> {
    /// Leading hits of each request.
    pub fn hits_by_request(&self) -> Vec<u64> {
        let mut all = vec![0; self.trace.requests.len()];
        let mut record = |request: usize, hits: usize| all[request] = hits as u64;
        let policy = policy(self.policy);
        replay_with_callback(self.trace, policy, self.dram_blocks, &self.options(), &mut record);
        all
    }

    /// Hit rates of other caches, and of this policy at other capacities, over all requests
    /// including the warm-up.
    pub fn ceilings(&self, block_bytes: u64) -> (Ceilings, Vec<SweepPoint>) {
        let mut ceilings = Ceilings::default();
        let mut sweep: Vec<SweepPoint> = Vec::new();
        for power in SWEEP {
            let dram_blocks = if power < 0 {
                self.dram_blocks >> power.unsigned_abs()
            } else {
                self.dram_blocks << power
            };
            let is_new = sweep.last().is_none_or(|last| last.dram_blocks < dram_blocks);
            if dram_blocks == 0 || !is_new {
                continue;
            }
            let point = self.point(dram_blocks, block_bytes);
            match power {
                0 => {
                    ceilings.dram_alone = Some(point.hit_rate);
                    ceilings.optimum = Some(point.optimum);
                }
                1 => ceilings.dram_doubled = Some(point.hit_rate),
                _ => (),
            }
            sweep.push(point);
        }
        (ceilings, sweep)
    }

    fn point(&self, dram_blocks: u64, block_bytes: u64) -> SweepPoint {
        let replayed =
            replay_metadata(self.trace, policy(self.policy), dram_blocks, &self.options());
        SweepPoint {
            dram_blocks,
            dram_bytes: dram_blocks * block_bytes,
            hit_rate: replayed.hit_rate(),
            optimum: optimum(self.trace, dram_blocks).hit_rate(),
        }
    }

    fn options(&self) -> StudyOptions {
        StudyOptions { admit_partial: self.admits_partial, ..StudyOptions::default() }
    }
}

/// Leading hits of each request in an unbounded cache.
pub fn unbounded_cache_hits(trace: &Trace) -> Vec<u64> {
    let mut seen = HashSet::new();
    let hits = trace.requests.iter().map(|request| {
        let leading = request.blocks.iter().take_while(|block| seen.contains(*block)).count();
        seen.extend(request.blocks.iter().copied());
        leading as u64
    });
    hits.collect()
}

#[cfg(test)]
mod tests {
    use crate::trace::{ReadOptions, TraceSource, parse};

    use super::*;

    #[test]
    fn an_unbounded_cache_counts_leading_hits_only() {
        let line = |ids: [u64; 3]| {
            let lengths = "\"input_length\":1536,\"output_length\":1";
            format!("{{\"timestamp\":0,{lengths},\"hash_ids\":{ids:?}}}")
        };
        let lines = [[0, 1, 9], [0, 2, 1], [3, 0, 1]].map(line).join("\n");
        let source = TraceSource { name: "t", bytes: lines.as_bytes() };
        let trace = parse("t", &[source], ReadOptions::default()).unwrap();
        assert_eq!(unbounded_cache_hits(&trace), [0, 1, 0]);
    }
}
