//! What watches a store's traffic beside its decisions: shadows, hot prefixes, known namespaces.
//!
//! It has a lock of its own, taken after the state's is free again, so that watching never keeps
//! the state's. Two requests may come in the other order here; the figures do not mind.

use std::collections::BTreeMap;
use std::sync::{MutexGuard, PoisonError};

use cascade_block::{BlockKey, Manifest, Namespace, NamespaceId, Seed};

use crate::catalog::KeyIndex;
use crate::hot::HotPrefixes;
use crate::node::Node;
use crate::shadow::{Answered, ShadowFigure, Shadows};
use crate::state::State;
use crate::{Store, StoreConfig, TierName};

/// Namespaces whose manifests are remembered; stages keep the others.
const NAMESPACES_MAX: usize = 1024;

/// A prefix that many requests share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HotPrefix {
    /// Its last block.
    pub key: BlockKey,
    /// Blocks from the root to it, itself included.
    pub depth_blocks: u32,
    /// Requests that found it whole over the last 15 to 30 minutes, since it is watched.
    pub hits: u64,
    /// Its blocks in each tier, fast to slow, as far as its chain is known.
    pub tiers: Vec<TierBytes>,
}

/// What a tier has of a chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TierBytes {
    /// The tier.
    pub tier: TierName,
    /// Blocks in it.
    pub blocks: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// Everything that watches.
#[derive(Debug)]
pub(crate) struct Insight {
    pub(crate) shadows: Shadows,
    hot: HotPrefixes,
    registered: BTreeMap<NamespaceId, Manifest>,
}

impl Insight {
    pub(crate) fn new(
        config: &StoreConfig,
        has_dram: bool,
        lower: &[TierName],
        seed: Seed,
    ) -> Self {
        Self {
            shadows: Shadows::new(config, has_dram, lower, seed),
            hot: HotPrefixes::new(seed),
            registered: BTreeMap::new(),
        }
    }

    /// A chain was looked up.
    pub(crate) fn request(&mut self, answered: &Answered<'_>) {
        self.shadows.request(answered);
        self.hot.request(answered.at, answered.keys, answered.matched);
    }

    /// A namespace is about to be used.
    pub(crate) fn register(&mut self, namespace: &Namespace) {
        if self.registered.len() < NAMESPACES_MAX {
            self.registered.insert(namespace.id(), namespace.manifest().clone());
        }
    }

    /// Whether a namespace was registered since the start.
    pub(crate) fn knows(&self, namespace: &NamespaceId) -> bool {
        self.registered.contains_key(namespace)
    }

    /// The namespaces that were registered since the start.
    pub(crate) fn manifests(&self) -> impl Iterator<Item = (NamespaceId, Manifest)> {
        self.registered.iter().map(|(id, manifest)| (*id, manifest.clone()))
    }

    /// What the shadows say, and the memory of all that watches.
    pub(crate) fn figures(&self) -> (Vec<ShadowFigure>, usize) {
        let bytes = self.shadows.memory_bytes() + self.hot.memory_bytes();
        (self.shadows.figures(), bytes)
    }
}

impl Store {
    /// The prefixes that most requests went through of late, most first. Nested ones are listed
    /// each. A prefix counts from when it was first seen to be shared, so its hits are never more
    /// than they were.
    pub fn hot_prefixes(&self, count: usize) -> Vec<HotPrefix> {
        let node = self.node();
        let watched = node.insight().hot.most(count);
        let state = node.lock();
        let describe = |watched: crate::hot::Watched| HotPrefix {
            key: watched.key,
            depth_blocks: watched.depth,
            hits: watched.hits(),
            tiers: node.tiers_of_chain(&state, &watched.key, watched.depth),
        };
        watched.into_iter().map(describe).collect()
    }
}

impl Node {
    /// Begins to watch anew: nothing is known of what was asked for before.
    pub(crate) fn forget_watched(&self) {
        let lower = &self.tier_names()[1..];
        *self.insight() = Insight::new(&self.config, self.pipeline.has_dram, lower, self.seed);
    }

    pub(crate) fn insight(&self) -> MutexGuard<'_, Insight> {
        // Figures that a panic left half counted are still only figures.
        self.insight.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The tiers that have the bytes of a content and are used, by their numbers, fast to slow.
    pub(crate) fn tiers_with(&self, state: &State, key: KeyIndex) -> Vec<usize> {
        let content = state.catalog.content(state.catalog.entry(key).content);
        let memory = content.slab.is_some().then_some(0);
        let has_it = |stage: &usize| content.address(*stage).is_some() && !state.is_shed(*stage);
        let lower = (0..self.stages.len()).filter(has_it);
        memory.into_iter().chain(lower.map(|stage| 1 + stage)).collect()
    }

    fn tiers_of_chain(&self, state: &State, key: &BlockKey, depth: u32) -> Vec<TierBytes> {
        let mut sums = vec![(0_u64, 0_u64); 1 + self.stages.len()];
        let mut at = state.catalog.find(key);
        for _ in 0..depth {
            let Some(found) = at else { break };
            let content = state.catalog.entry(found).content;
            let bytes = u64::from(state.catalog.content(content).bytes);
            for tier in self.tiers_with(state, found) {
                sums[tier].0 += 1;
                sums[tier].1 += bytes;
            }
            at = state.catalog.parent_of(found);
        }
        let held = sums.into_iter().enumerate().filter(|(_, (blocks, _))| *blocks > 0);
        held.map(|(tier, (blocks, bytes))| TierBytes { tier: self.tier_name(tier), blocks, bytes })
            .collect()
    }
}
