//! The traffic statistics of a store, as one value for one lock.

use std::collections::BTreeMap;
use std::sync::{PoisonError, TryLockError};
use std::time::Duration;

use cascade_block::{BlockKey, FingerprintSeed, Manifest, Namespace, NamespaceId};
use cascade_runtime::{Mutex, MutexGuard};
use cascade_tier::{Hints, ShadowFigure, TierName};

use crate::StoreConfig;
use crate::core::bound::KEYS_PER_HOLD;
use crate::core::eviction::Visits;
use crate::insight::hot::HotPrefixes;
use crate::insight::shadow::{ChainLookup, Shadows};

#[cfg(test)]
mod tests;

/// Maximum number of manifests that are kept in memory; stages keep the others.
const NAMESPACES_MAX: usize = 1024;

/// All traffic statistics.
#[derive(Debug)]
pub(crate) struct Insight {
    pub(crate) shadows: Shadows,
    pub(crate) hot: HotPrefixes,
    registered: BTreeMap<NamespaceId, Manifest>,
}

/// The statistics and their lock, which a call takes for a part of a long chain at a time.
#[derive(Debug)]
pub(crate) struct InsightLock {
    insight: Mutex<Insight>,
    /// Held by the next thread that gets `insight` in turn. Without turns, a call that releases the
    /// lock and takes it again at once keeps it from those that wait.
    turn: Mutex<()>,
    seed: FingerprintSeed,
    /// How often it was taken.
    #[cfg(test)]
    holds: std::sync::atomic::AtomicUsize,
}

impl InsightLock {
    pub(crate) fn new(insight: Insight, seed: FingerprintSeed) -> Self {
        Self {
            insight: Mutex::new(insight),
            turn: Mutex::new(()),
            seed,
            #[cfg(test)]
            holds: std::sync::atomic::AtomicUsize::new(0),
        }
    }

    /// Takes the lock: at once if it is free, otherwise in turn.
    // After a panic the counts may be incomplete, but they are still valid statistics.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Insight> {
        let insight = match self.insight.try_lock() {
            Ok(insight) => insight,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return self.lock_in_turn(),
        };
        #[cfg(test)]
        self.holds.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        insight
    }

    fn lock_in_turn(&self) -> MutexGuard<'_, Insight> {
        let turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let insight = self.insight.lock().unwrap_or_else(PoisonError::into_inner);
        drop(turn);
        #[cfg(test)]
        self.holds.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        insight
    }

    /// Discards all statistics, as after an erase.
    pub(crate) fn replace(
        &self,
        config: &StoreConfig,
        memory: Option<TierName>,
        lower: &[TierName],
    ) {
        let mut new = Insight::new(config, memory, lower, self.seed);
        let mut insight = self.lock();
        new.shadows.succeed(&insight.shadows);
        *insight = new;
    }

    /// A chain was looked up.
    pub(crate) fn request(&self, lookup: &ChainLookup<'_>) {
        if lookup.keys.len() <= KEYS_PER_HOLD {
            return self.lock().request(lookup);
        }
        let mut request = self.lock().shadows.begin_request(lookup.block_bytes);
        request.select(lookup.keys, self.seed);
        self.in_holds(|insight, visits| {
            insight.shadows.continue_request(&mut request, lookup, visits)
        });
        let (matched, mut is_watched) = (&lookup.keys[..lookup.matched], false);
        let mut parts = matched.chunks(KEYS_PER_HOLD);
        self.in_holds(|insight, _| {
            let Some(part) = parts.next() else { return true };
            is_watched = insight.hot.note(lookup.at, part);
            false
        });
        self.lock().hot.end_request(matched, is_watched);
    }

    /// Hints for a chain arrived without a request for it.
    pub(crate) fn hint(&self, now: Duration, keys: &[BlockKey], hints: &Hints) {
        let mut hint = self.lock().shadows.begin_hint();
        hint.select(keys, self.seed);
        self.in_holds(|insight, visits| {
            insight.shadows.continue_hint(&mut hint, (now, hints), visits)
        });
    }

    /// Calls `handle` until it returns true, each time in a hold of the lock with few visits.
    fn in_holds(&self, mut handle: impl FnMut(&mut Insight, &mut Visits) -> bool) {
        let mut is_done = false;
        while !is_done {
            is_done = handle(&mut self.lock_in_turn(), &mut Visits::limited(KEYS_PER_HOLD));
        }
    }
}

impl Insight {
    pub(crate) fn new(
        config: &StoreConfig,
        memory: Option<TierName>,
        lower: &[TierName],
        seed: FingerprintSeed,
    ) -> Self {
        Self {
            shadows: Shadows::new(config, memory, lower, seed),
            hot: HotPrefixes::new(seed),
            registered: BTreeMap::new(),
        }
    }

    /// A chain was looked up: one that a hold of the lock may handle.
    fn request(&mut self, lookup: &ChainLookup<'_>) {
        self.shadows.request(lookup);
        let matched = &lookup.keys[..lookup.matched];
        let is_watched = self.hot.note(lookup.at, matched);
        self.hot.end_request(matched, is_watched);
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
