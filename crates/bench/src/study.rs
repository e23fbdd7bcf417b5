//! What a policy is worth: traces replayed on names alone, beside the best that any could do.
//!
//! A replay drives the store's own eviction as the store does: a request, then for each block that
//! was missing, root first, room is made and the block comes in. Hits count while they are unbroken
//! from the start of the request, and all blocks of a request count as requested.

mod curve;
mod foresight;
mod generated;
mod optimum;
mod replay;
mod shadow;
mod table;

use std::path::Path;

pub use curve::{ReuseDistances, reuse_distances};
pub use foresight::{Foresight, HintSet};
pub use generated::generated;
pub use optimum::optimum;
pub use replay::{replay_metadata, replay_watched};
pub use shadow::{ShadowCell, ShadowRow, ShadowTier, shadow_markdown, shadow_row};
pub use table::{Contender, Row, StudyTable, TraceTable, contenders, study_table};

use crate::trace::{Trace, TraceError};

/// How a replay is run.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct StudyOptions {
    /// Whether last partial blocks come in.
    pub admit_partial: bool,
    /// What the engine would tell, taken from the rest of the trace.
    pub hints: HintSet,
}

/// What came of a replay.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct StudyResult {
    /// The policy's name.
    pub policy: String,
    /// Blocks that fit.
    pub capacity_blocks: u64,
    /// Requests of the trace.
    pub requests: u64,
    /// Blocks of all requests, partial ones included.
    pub blocks_requested: u64,
    /// Blocks that were there, leading ones only.
    pub blocks_hit: u64,
    /// The same for each request, in order.
    #[serde(skip)]
    pub hits_of_requests: Vec<u32>,
    /// Blocks that came in.
    pub blocks_inserted: u64,
    /// Blocks that went to make room.
    pub blocks_evicted: u64,
    /// Requests of which at least one block was not taken.
    pub requests_declined: u64,
    /// Memory of the table of blocks and the policy at the end.
    pub memory_bytes: u64,
}

impl StudyResult {
    /// `blocks_hit` over `blocks_requested`; zero when nothing was requested.
    pub fn hit_rate(&self) -> f64 {
        ratio(self.blocks_hit, self.blocks_requested)
    }
}

/// A quotient of counts; zero when the divisor is.
#[expect(clippy::cast_precision_loss, reason = "counts of blocks stay far below 2^52")]
fn ratio(count: u64, of: u64) -> f64 {
    if of == 0 { 0.0 } else { count as f64 / of as f64 }
}

/// Capacities that are studied, in percent of a trace's different blocks.
pub const SIZES_PERCENT: [u64; 6] = [1, 2, 5, 10, 25, 50];

/// The traces that come with the project, from its `data/traces`, and a generated one.
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
