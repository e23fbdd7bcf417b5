//! What other caches would have hit on the same requests, from metadata alone.

use std::collections::HashSet;

use cascade_store::PolicyKind;
use cascade_store::eviction::policy;

use crate::replay::result::{Ceilings, SweepPoint};
use crate::study::{StudyOptions, optimum, replay_metadata, replay_watched};
use crate::trace::Trace;

/// Sizes of DRAM that are tried, as powers of two of this run's.
const SWEEP: std::ops::RangeInclusive<i32> = -3..=3;

/// A trace, a policy and a size of DRAM.
#[derive(Debug)]
pub struct Study<'a> {
    /// What is asked.
    pub trace: &'a Trace,
    /// What chooses victims.
    pub policy: PolicyKind,
    /// Blocks that fit.
    pub dram_blocks: u64,
    /// Whether a last partial block is taken.
    pub admits_partial: bool,
}

impl Study<'_> {
    /// Leading hits of each request.
    pub fn hits_by_request(&self) -> Vec<u64> {
        let mut all = vec![0; self.trace.requests.len()];
        let mut watch = |request: usize, hits: usize| all[request] = hits as u64;
        let policy = policy(self.policy);
        replay_watched(self.trace, policy, self.dram_blocks, &self.options(), &mut watch);
        all
    }

    /// Hit rates of other caches, and of this policy at other sizes. Of all requests: a warm-up
    /// is part of them.
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

/// How many blocks of each request a cache without limit hits, unbroken from the request's start.
pub fn endless_cache_hits(trace: &Trace) -> Vec<u64> {
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
    use crate::trace::{Source, parse};

    use super::*;

    #[test]
    fn an_endless_cache_hits_only_while_unbroken() {
        let line = |ids: [u64; 3]| {
            let lengths = "\"input_length\":1536,\"output_length\":1";
            format!("{{\"timestamp\":0,{lengths},\"hash_ids\":{ids:?}}}")
        };
        let lines = [[0, 1, 9], [0, 2, 1], [3, 0, 1]].map(line).join("\n");
        let trace = parse("t", &[Source { name: "t", bytes: lines.as_bytes() }]).unwrap();
        assert_eq!(endless_cache_hits(&trace), [0, 1, 0]);
    }
}
