//! The sources in the configuration of a store.

use std::sync::Arc;

use cascade_runtime::Clock;
use cascade_tier::source::Source;
use cascade_tier::{StoreError, TierName};

use crate::HealthConfig;
use crate::calls::sources::{SOURCES_MAX, Sources};
use crate::stages::source_guard::GuardedSource;

/// The sources of a store, in the order of preference. Equal if they are the same objects.
#[derive(Debug, Clone, Default)]
pub struct SourceList(Vec<Arc<dyn Source>>);

impl SourceList {
    /// A list of these sources. At most eight, each with a name of its own.
    pub fn new(sources: Vec<Arc<dyn Source>>) -> Self {
        Self(sources)
    }

    /// Checks the list, and puts a guard around each source.
    pub(crate) fn guarded(
        &self,
        tiers: &[TierName],
        health: HealthConfig,
        clock: &Arc<dyn Clock>,
    ) -> Result<Sources, StoreError> {
        let bad = |reason| Err(StoreError::Config { setting: "sources", reason });
        if self.0.len() > SOURCES_MAX {
            return bad(format!("{} sources; the maximum is {SOURCES_MAX}", self.0.len()));
        }
        let mut names = tiers.to_vec();
        for source in &self.0 {
            let name = source.name();
            if names.contains(&name) {
                return bad(format!("two tiers or sources are named {name:?}; rename the source"));
            }
            names.push(name);
        }
        let guarded = |source| GuardedSource::new(Arc::clone(source), health, clock);
        Ok(Sources::new(self.0.iter().map(guarded).collect()))
    }
}

impl PartialEq for SourceList {
    fn eq(&self, other: &Self) -> bool {
        let is_same = |(one, other): (&Arc<_>, &Arc<_>)| Arc::ptr_eq(one, other);
        self.0.len() == other.0.len() && self.0.iter().zip(&other.0).all(is_same)
    }
}

impl Eq for SourceList {}
