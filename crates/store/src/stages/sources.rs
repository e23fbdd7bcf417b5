//! The sources of a store, behind their guards.

use std::sync::{Arc, PoisonError};

use cascade_block::BlockKey;
use cascade_runtime::{Clock, LeafMutex};
use cascade_tier::{StoreError, TierName};

use super::source_guard::GuardedSource;
use super::source_list::SourceList;
use crate::HealthConfig;
use crate::core::bound::KEYS_PER_HOLD;
use crate::core::located::LocatedBlocks;

/// Most sources of a store: bits of a mask.
const SOURCES_MAX: usize = u8::BITS as usize;

/// The sources of a store, and what they have said.
#[derive(Debug, Default)]
pub(crate) struct Sources {
    pub(crate) list: Vec<GuardedSource>,
    located: LeafMutex<LocatedBlocks>,
}

impl Sources {
    /// Checks the list, and puts a guard around each source.
    pub(crate) fn guarded(
        list: &SourceList,
        tiers: &[TierName],
        health: HealthConfig,
        clock: &Arc<dyn Clock>,
    ) -> Result<Self, StoreError> {
        let bad = |reason| Err(StoreError::Config { setting: "sources", reason });
        if list.all().len() > SOURCES_MAX {
            return bad(format!("{} sources; the maximum is {SOURCES_MAX}", list.all().len()));
        }
        let mut names = tiers.to_vec();
        for source in list.all() {
            let name = source.name();
            if names.contains(&name) {
                return bad(format!("two tiers or sources are named {name:?}; rename the source"));
            }
            names.push(name);
        }
        let guarded = |source| GuardedSource::new(Arc::clone(source), health, clock);
        Ok(Self { list: list.all().iter().map(guarded).collect(), located: LeafMutex::default() })
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// A bit for each source.
    pub(crate) fn mask(&self) -> u8 {
        u8::try_from((1u16 << self.list.len()) - 1).expect("at most eight sources")
    }

    /// Uses the hints, under their lock.
    pub(crate) fn with_hints<T>(&self, use_hints: impl FnOnce(&mut LocatedBlocks) -> T) -> T {
        use_hints(&mut self.located.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whether a source has said lately that it has this block.
    pub(crate) fn is_located(&self, key: &BlockKey, clock: &dyn Clock) -> bool {
        self.located_bytes(key, clock).is_some()
    }

    /// The length of a block that a source has, according to what it said lately.
    pub(crate) fn located_bytes(&self, key: &BlockKey, clock: &dyn Clock) -> Option<usize> {
        if self.is_empty() {
            return None;
        }
        let now = clock.monotonic();
        let hint = self.with_hints(|hints| hints.get(key, now));
        hint.map(|found| found.block.facts.bytes as usize)
    }

    /// Whether a lookup has matched one of these blocks in a source: then the read of the batch is
    /// the load of that lookup.
    pub(crate) fn has_matched(&self, keys: &[BlockKey], clock: &dyn Clock) -> bool {
        if self.is_empty() {
            return false;
        }
        let now = clock.monotonic();
        let is_matched = |hints: &mut LocatedBlocks, keys: &[BlockKey]| {
            let mut found = keys.iter().filter_map(|key| hints.get(key, now));
            !hints.is_empty() && found.any(|found| found.is_matched)
        };
        let mut parts = keys.chunks(KEYS_PER_HOLD);
        parts.any(|keys| self.with_hints(|hints| is_matched(hints, keys)))
    }
}
