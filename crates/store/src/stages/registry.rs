//! The registry of the stages that a pipeline may name, including third parties'.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use cascade_tier::StoreError;
use cascade_tier::tier::Tier;

use super::{FakeTier, StageContext, open_files};

/// Makes a stage for one store.
pub type StageFactory =
    Arc<dyn Fn(&StageContext<'_>) -> Result<Arc<dyn Tier>, StoreError> + Send + Sync>;

/// Stages by name. The default registry has `Files` and `Fake`.
#[derive(Clone)]
pub struct StageRegistry {
    factories: BTreeMap<String, StageFactory>,
}

impl StageRegistry {
    /// Adds or replaces a stage. Pipelines may write its name in any case.
    pub fn register(&mut self, name: &str, factory: StageFactory) {
        self.factories.insert(name.to_lowercase(), factory);
    }

    /// Whether a stage has this name.
    pub fn contains(&self, name: &str) -> bool {
        self.factories.contains_key(&name.to_lowercase())
    }

    /// All names that a pipeline may use.
    pub fn names(&self) -> Vec<String> {
        let own = ["dram", "cache", "empty", "posix"].map(str::to_owned);
        own.into_iter().chain(self.factories.keys().cloned()).collect()
    }

    pub(crate) fn make(
        &self,
        name: &str,
        context: &StageContext<'_>,
    ) -> Result<Arc<dyn Tier>, StoreError> {
        let factory = self.factories.get(name).expect("the pipeline was checked against this");
        factory(context)
    }
}

impl Default for StageRegistry {
    fn default() -> Self {
        let mut registry = Self { factories: BTreeMap::new() };
        registry.register("files", Arc::new(open_files));
        registry.register("fake", Arc::new(|_| Ok(Arc::new(FakeTier::default()))));
        registry
    }
}

impl fmt::Debug for StageRegistry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.factories.keys()).finish()
    }
}
