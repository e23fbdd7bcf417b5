//! Studies of eviction policies: traces replayed with keys only, compared with the optimum.
//!
//! A replay calls the store's eviction code as the store does: first the request, then for each
//! missing block, root first, an eviction if the tier is full, and the insertion. Only leading hits
//! of a request count as hits; all its blocks count as requested.

mod curve;
mod events;
mod generated;
mod optimum;
mod replay;
mod shadow;
mod table;

use std::path::Path;

use crate::trace::{Trace, TraceError};
pub use curve::{ReuseDistances, reuse_distances};
pub use events::{HintSet, ReplayEvents};
pub use generated::generated;
pub use optimum::optimum;
pub use replay::{replay_metadata, replay_with_callback};
pub use shadow::{ShadowCell, ShadowRow, ShadowTier, shadow_markdown, shadow_row};
pub use table::{PolicyRow, StudiedPolicy, StudyTable, TraceTable, studied_policies, study_table};

/// The options of a replay.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct StudyOptions {
    /// Whether the last block of a request is admitted when it is not full.
    pub admit_partial: bool,
    /// Hints that an engine would give, computed from the later requests of the trace.
    pub hints: HintSet,
}

/// The result of a replay.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct StudyResult {
    /// Name of the policy.
    pub policy: String,
    /// Capacity in blocks.
    pub capacity_blocks: u64,
    /// Requests of the trace.
    pub requests: u64,
    /// Blocks of all requests, including partial blocks.
    pub blocks_requested: u64,
    /// Leading blocks that were hits.
    pub blocks_hit: u64,
    /// Leading hits of each request, in order.
    #[serde(skip)]
    pub hits_of_requests: Vec<u32>,
    /// Blocks inserted.
    pub blocks_inserted: u64,
    /// Blocks evicted.
    pub blocks_evicted: u64,
    /// Requests with at least one declined block.
    pub requests_declined: u64,
    /// Memory of the block table and the policy at the end.
    pub memory_bytes: u64,
}

impl StudyResult {
    /// `blocks_hit` over `blocks_requested`; zero if nothing was requested.
    pub fn hit_rate(&self) -> f64 {
        ratio(self.blocks_hit, self.blocks_requested)
    }
}

/// A quotient of counts; zero if the divisor is zero.
#[expect(clippy::cast_precision_loss, reason = "counts of blocks stay far below 2^52")]
fn ratio(count: u64, of: u64) -> f64 {
    if of == 0 { 0.0 } else { count as f64 / of as f64 }
}

/// The studied capacities, in percent of the unique blocks of a trace.
pub const SIZES_PERCENT: [u64; 6] = [1, 2, 5, 10, 25, 50];

/// The traces of the project's `data/traces` directory, and a generated one.
///
/// # Errors
/// As [`Trace::read`].
pub fn bundled_traces(directory: &Path) -> Result<Vec<Trace>, TraceError> {
    Ok(vec![
        Trace::read(&directory.join("mooncake/conversation_trace.jsonl"))?,
        Trace::read(&directory.join("agents"))?,
        generated(1),
    ])
}
