//! A comparison of all blocks in DRAM with their checksums, by a caller.

use cascade_tier::CallOptions;

use crate::Store;
use crate::drive::scrub::{ScrubReport, scrub_step};

impl Store {
    /// Compares every block in DRAM with its checksum now, and computes missing checksums. Damaged
    /// blocks are counted and dropped from DRAM; they are misses unless a lower tier has them.
    pub fn scrub(&self, options: CallOptions) -> ScrubReport {
        let core = self.core();
        let call = core.call(options);
        let mut all = ScrubReport::default();
        let mut at = Some(0);
        while let Some(from) = at {
            if call.deadline.has_passed(&*core.clock) {
                return all;
            }
            let (step, next) = scrub_step(core, from);
            all.blocks += step.blocks;
            all.bytes += step.bytes;
            all.damaged += step.damaged;
            at = next;
        }
        all.is_complete = true;
        all
    }
}
