//! A request: the chain of blocks of one prompt, with the caller's hints.

use std::time::Duration;

use cascade_block::BlockKey;

use crate::Hints;

/// One lookup of a whole chain.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// The prompt's blocks, root first.
    pub keys: &'a [BlockKey],
    /// Whether the last block is only partly filled.
    pub partial_tail: bool,
    /// What the caller knows about future requests.
    pub hints: Hints,
    /// Arrival time on a monotonic scale of the caller. A replay passes the times of its trace;
    /// from then on the eviction policy uses these. Default: the current time of the store's clock.
    pub at: Option<Duration>,
}

impl<'a> Request<'a> {
    /// A request for full blocks, without hints.
    pub fn new(keys: &'a [BlockKey]) -> Self {
        Self { keys, partial_tail: false, hints: Hints::default(), at: None }
    }
}
