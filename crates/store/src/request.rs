//! A request: the chain of blocks that one prompt needs, and what its caller knows about it.

use std::time::Duration;

use cascade_block::BlockKey;

pub use crate::eviction::Hints;

/// One lookup of a whole chain.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// The prompt's blocks, root first.
    pub keys: &'a [BlockKey],
    /// Whether the last key names a partly filled block.
    pub partial_tail: bool,
    /// What the caller knows of the future.
    pub hints: Hints,
    /// When it arrived, on a scale of the caller's that never goes back. A replay gives the times
    /// of its trace; from then on the policy goes by these. Default: the store's clock, now.
    pub at: Option<Duration>,
}

impl<'a> Request<'a> {
    /// A request for full blocks, without hints.
    pub fn new(keys: &'a [BlockKey]) -> Self {
        Self { keys, partial_tail: false, hints: Hints::default(), at: None }
    }
}
