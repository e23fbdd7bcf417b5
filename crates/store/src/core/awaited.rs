//! The writes that write-through puts wait for, with their results.
//!
//! A put asks for the result of its own block: its key may stand for another block by the time that
//! the put looks, and a stage may have dropped the block again to make room.

use std::collections::BTreeMap;

use crate::core::catalog::{ContentIndex, LOWER_STAGES_MAX};
use cascade_tier::tier::TierError;

/// A content, with its generation: a later content can reuse the index.
pub(crate) type Place = (ContentIndex, u32);

/// Contents whose writes puts wait for. A tree, because a hash table would grow in one hold of the
/// store's lock.
#[derive(Debug, Default)]
pub(crate) struct AwaitedWrites(BTreeMap<Place, Awaited>);

/// The latest result of the write of one content to each stage.
#[derive(Debug, Default)]
struct Awaited {
    waiters: u32,
    results: [Option<Result<(), TierError>>; LOWER_STAGES_MAX],
}

impl AwaitedWrites {
    /// A put begins to wait for the writes of this content.
    pub(crate) fn begin(&mut self, place: Place) {
        self.0.entry(place).or_default().waiters += 1;
    }

    /// A put no longer waits.
    pub(crate) fn end(&mut self, place: Place) {
        if let Some(awaited) = self.0.get_mut(&place) {
            awaited.waiters -= 1;
            if awaited.waiters == 0 {
                self.0.remove(&place);
            }
        }
    }

    /// A stage has written the content, or failed to.
    pub(crate) fn note<T>(&mut self, place: Place, stage: usize, result: &Result<T, TierError>) {
        if let Some(awaited) = self.0.get_mut(&place) {
            awaited.results[stage] = Some(result.as_ref().map(drop).map_err(Clone::clone));
        }
    }

    /// The result of the latest write since a put has begun to wait.
    pub(crate) fn result(&self, place: Place, stage: usize) -> Option<&Result<(), TierError>> {
        self.0.get(&place)?.results[stage].as_ref()
    }
}
