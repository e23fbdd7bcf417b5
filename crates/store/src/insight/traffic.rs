//! The traffic statistics of a store, as one value for one lock.

use std::collections::BTreeMap;

use cascade_block::{BlockKey, FingerprintSeed, Manifest, Namespace, NamespaceId};
use cascade_tier::{ShadowFigure, TierName};

use crate::StoreConfig;
use crate::insight::hot::HotPrefixes;
use crate::insight::shadow::{ChainLookup, Shadows};

/// Maximum number of manifests that are kept in memory; stages keep the others.
const NAMESPACES_MAX: usize = 1024;

/// All traffic statistics.
#[derive(Debug)]
pub(crate) struct Insight {
    pub(crate) shadows: Shadows,
    pub(crate) hot: HotPrefixes,
    registered: BTreeMap<NamespaceId, Manifest>,
}

impl Insight {
    pub(crate) fn new(
        config: &StoreConfig,
        has_dram: bool,
        lower: &[TierName],
        seed: FingerprintSeed,
    ) -> Self {
        Self {
            shadows: Shadows::new(config, has_dram, lower, seed),
            hot: HotPrefixes::new(seed),
            registered: BTreeMap::new(),
        }
    }

    /// A chain was looked up.
    pub(crate) fn request(&mut self, lookup: &ChainLookup<'_>) {
        self.shadows.request(lookup);
        self.hot.request(lookup.at, lookup.keys, lookup.matched);
    }

    /// Registers a namespace before its first use.
    pub(crate) fn register(&mut self, namespace: &Namespace) {
        if self.registered.len() < NAMESPACES_MAX {
            self.registered.insert(namespace.id(), namespace.manifest().clone());
        }
    }

    /// Whether a namespace was registered since the start.
    pub(crate) fn is_registered(&self, namespace: &NamespaceId) -> bool {
        self.registered.contains_key(namespace)
    }

    /// The namespaces that were registered since the start.
    pub(crate) fn manifests(&self) -> impl Iterator<Item = (NamespaceId, Manifest)> {
        self.registered.iter().map(|(id, manifest)| (*id, manifest.clone()))
    }

    /// The last blocks of all hot prefixes.
    pub(crate) fn hot_keys(&self) -> Vec<BlockKey> {
        self.hot.keys()
    }

    /// The results of the shadows, and the memory of all statistics.
    pub(crate) fn figures(&self) -> (Vec<ShadowFigure>, usize) {
        let bytes = self.shadows.memory_bytes() + self.hot.memory_bytes();
        (self.shadows.figures(), bytes)
    }
}
