//! The sources of a store, behind their guards.

use std::sync::{Arc, PoisonError};

use cascade_runtime::{Clock, LeafMutex};
use cascade_tier::{StoreError, TierName};

use super::source_guard::GuardedSource;
use super::source_list::SourceList;
use crate::HealthConfig;
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
}
