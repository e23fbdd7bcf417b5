//! The sources in the configuration of a store.

use std::sync::Arc;

use cascade_tier::source::Source;

/// The sources of a store, in the order of preference. Equal if they are the same objects.
#[derive(Debug, Clone, Default)]
pub struct SourceList(Vec<Arc<dyn Source>>);

impl SourceList {
    /// A list of these sources. At most eight, each with a name of its own.
    pub fn new(sources: Vec<Arc<dyn Source>>) -> Self {
        Self(sources)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn all(&self) -> &[Arc<dyn Source>] {
        &self.0
    }
}

impl PartialEq for SourceList {
    fn eq(&self, other: &Self) -> bool {
        let is_same = |(one, other): (&Arc<_>, &Arc<_>)| Arc::ptr_eq(one, other);
        self.0.len() == other.0.len() && self.0.iter().zip(&other.0).all(is_same)
    }
}

impl Eq for SourceList {}
