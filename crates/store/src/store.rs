//! The store: what callers hold. Batches in, a result per block out, a deadline on every call.

use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use cascade_block::{BlockKey, Clock, Deadline, Manifest, Namespace, NamespaceId, SystemClock};
use cascade_memory::SlabMut;

use crate::call::HOLD_KEYS;
use crate::catalog::{Content, KeyIndex};
use crate::eviction::Asked;
use crate::history::Loss;
use crate::node::{Node, tier_error};
use crate::outcome::PutSlab;
use crate::shadow::Answered;
use crate::stage::{Registry, StageError};
use crate::state::State;
use crate::stats::{Stats, TierHits};
use crate::{
    CallOptions, Erased, GetOutcome, PrefixMatch, Put, PutOutcome, Request, StoreConfig,
    StoreError, TierName, ViewOutcome, mover, prober, scrub,
};

/// Prefetch hints that may wait; more are declined.
const PREFETCH_QUEUE: usize = 64;
/// Threads that follow prefetch hints.
const PREFETCH_THREADS: usize = 2;

/// Keeps blocks in the tiers of a pipeline. Clones are handles on the same store; the last one to
/// go closes it.
///
/// ```
/// use cascade_block::{Manifest, Namespace, TenantSecret};
/// use cascade_store::{CallOptions, Put, PutOutcome, Store, StoreConfig, ViewOutcome};
///
/// let config = StoreConfig { dram_bytes: 8 << 20, ..StoreConfig::default() };
/// let store = Store::open(config)?;
/// let manifest = Manifest::new().with("weights", "example");
/// let namespace = Namespace::new(manifest, &TenantSecret::new("secret"));
/// let key = namespace.key_of_id(b"sys_prompt_v1");
///
/// let outcomes = store.put(&[Put::new(key, b"keys and values")], CallOptions::default());
/// assert!(matches!(outcomes[0], PutOutcome::Stored));
/// let views = store.view(&[key], CallOptions::default());
/// assert!(matches!(&views[0], ViewOutcome::Hit { slab, .. } if **slab == *b"keys and values"));
/// # Ok::<(), cascade_store::StoreError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Store(Arc<Handle>);

/// Owns the node's threads.
#[derive(Debug)]
struct Handle {
    node: Arc<Node>,
    prefetch: Mutex<Option<SyncSender<Vec<BlockKey>>>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Store {
    /// Opens a store with the stages that come with Cascade, on the machine's clock.
    pub fn open(config: StoreConfig) -> Result<Self, StoreError> {
        Self::open_with(config, &Registry::default(), Arc::new(SystemClock))
    }

    /// Opens a store with stages of the caller's and a clock of the caller's.
    pub fn open_with(
        config: StoreConfig,
        registry: &Registry,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, StoreError> {
        let node = Arc::new(Node::new(config, registry, clock)?);
        let (sender, receiver) = sync_channel(PREFETCH_QUEUE);
        let handle = Handle {
            node: Arc::clone(&node),
            prefetch: Mutex::new(Some(sender)),
            threads: Mutex::new(Vec::new()),
        };
        let threads = start_threads(&node, receiver)
            .map_err(|error| StoreError::Threads { source: Arc::new(error) })?;
        handle.threads.lock().unwrap_or_else(PoisonError::into_inner).extend(threads);
        Ok(Self(Arc::new(handle)))
    }

    pub(crate) fn node(&self) -> &Node {
        &self.0.node
    }

    /// The settings it was opened with.
    pub fn config(&self) -> &StoreConfig {
        &self.node().config
    }

    /// Stores blocks: copies their bytes into the first tier.
    pub fn put(&self, batch: &[Put<'_>], options: CallOptions) -> Vec<PutOutcome> {
        self.node().put(batch, options)
    }

    /// A slab to write a block into in place; give it to [`Store::put_slabs`] when it is full. As
    /// a put, it waits while too much waits to be written down; the put of the slab does not.
    pub fn reserve(&self, bytes: usize, options: CallOptions) -> Result<SlabMut, StoreError> {
        self.node().reserve(bytes, options)
    }

    /// Stores blocks that were written in place: nothing is copied.
    pub fn put_slabs(&self, batch: Vec<PutSlab>, options: CallOptions) -> Vec<PutOutcome> {
        self.node().put_slabs(batch, options)
    }

    /// Copies blocks into the caller's buffers, one each. Never writes past a block's length.
    ///
    /// # Panics
    /// If there are not as many buffers as keys.
    pub fn get(
        &self,
        keys: &[BlockKey],
        buffers: &mut [&mut [u8]],
        options: CallOptions,
    ) -> Vec<GetOutcome> {
        self.node().get(keys, buffers, options)
    }

    /// Views on blocks, without a copy. A view's bytes stay as they are while it is held, whatever
    /// is evicted, deleted or written meanwhile; the memory comes back when the last one goes.
    pub fn view(&self, keys: &[BlockKey], options: CallOptions) -> Vec<ViewOutcome> {
        self.node().view(keys, options)
    }

    /// How many leading blocks of a chain are here, and where. This is how the policy learns of
    /// requests: ask with the whole chain, then read what matched and put the rest.
    pub fn lookup_prefix(&self, request: &Request<'_>) -> PrefixMatch {
        let node = self.node();
        let now_unix_ms = node.clock.unix_ms();
        let mut found = Vec::with_capacity(request.keys.len());
        let mut state = node.lock();
        state.history.tell_time(now_unix_ms);
        state.policy_time = state.policy_time.max(request.at);
        let now = node.policy_now(&state);
        state.catalog.find_batch(request.keys, &mut found);
        let mut chain = Vec::with_capacity(request.keys.len());
        let mut tiers = Vec::new();
        let mut in_dram = 0;
        let mut is_unbroken = true;
        let mut has_forgotten = state.is_closed;
        for (key, mut found) in request.keys.iter().zip(found) {
            let expired = |found| state.catalog.entry(found).has_expired(now_unix_ms);
            if has_forgotten || found.is_some_and(expired) {
                found = if state.is_closed { None } else { state.find_live(key, now_unix_ms) };
                has_forgotten = true;
            }
            let Some(found) = found else {
                is_unbroken = false;
                chain.push(Asked { fingerprint: state.catalog.fingerprint(key), resident: None });
                continue;
            };
            let entry = state.catalog.entry(found);
            let (content, resident) = (entry.content, entry.slot());
            chain.push(Asked { fingerprint: state.catalog.fingerprint(key), resident });
            is_unbroken &= !state.is_out_of_reach(state.catalog.content(content));
            if is_unbroken {
                if state.has_dram {
                    state.announce(found);
                }
                state.catalog.entry_mut(found).note_matched();
                let content = state.catalog.content(content);
                in_dram += usize::from(content.slab.is_some() && in_dram == tiers.len());
                let lower = content.fastest_lower_but(state.shed);
                let lower = lower.map_or(0, |(stage, _)| 1 + stage);
                let tier = if content.slab.is_some() { 0 } else { lower };
                state.tier_matches[tier] += 1;
                tiers.push(node.tier_name(tier));
            }
        }
        if state.has_dram {
            state.eviction.request(now, &chain, request.partial_tail, &request.hints);
        }
        state.counters.requests += 1;
        state.counters.blocks_requested += request.keys.len() as u64;
        state.counters.blocks_matched += tiers.len() as u64;
        let block_bytes = state.typical_block_bytes();
        node.release(state);
        node.insight().request(&Answered {
            at: now,
            keys: request.keys,
            partial_tail: request.partial_tail,
            hints: &request.hints,
            in_dram,
            matched: tiers.len(),
            block_bytes,
        });
        PrefixMatch { tiers }
    }

    /// A lookup, and views on the leading blocks that it finds; one fewer round trip where the
    /// store is another process.
    pub fn acquire(&self, request: &Request<'_>, options: CallOptions) -> Vec<ViewOutcome> {
        let found = self.lookup_prefix(request).tiers.len();
        self.view(&request.keys[..found], options)
    }

    /// Tells the policy what became known of a chain after its request or ahead of the next: that
    /// its session ended, that a waiting request will ask for it. Counts as nobody's access.
    pub fn hint(&self, request: &Request<'_>) {
        let node = self.node();
        let mut found = Vec::with_capacity(request.keys.len());
        let mut state = node.lock();
        state.policy_time = state.policy_time.max(request.at);
        state.catalog.find_batch(request.keys, &mut found);
        let asked = |(key, found): (&BlockKey, Option<KeyIndex>)| Asked {
            fingerprint: state.catalog.fingerprint(key),
            resident: found.and_then(|found| state.catalog.entry(found).slot()),
        };
        let chain: Vec<_> = request.keys.iter().zip(found).map(asked).collect();
        let now = node.policy_now(&state);
        state.eviction.hint(now, &chain, &request.hints);
        drop(state);
        node.insight().shadows.hint(now, request.keys, &request.hints);
    }

    /// Whether each block is in any tier. Counts as nobody's access.
    pub fn contains(&self, keys: &[BlockKey]) -> Vec<bool> {
        self.of_each(keys, |state, content| {
            content.is_some_and(|content| !state.is_out_of_reach(content))
        })
    }

    /// The tiers that have each block, fast to slow. Counts as nobody's access.
    pub fn locate(&self, keys: &[BlockKey]) -> Vec<Vec<TierName>> {
        let node = self.node();
        self.of_each(keys, |state, content| {
            let Some(content) = content else { return Vec::new() };
            let dram = content.slab.is_some().then(|| node.tier_name(0));
            let lower = (0..node.stages.len())
                .filter(|at| content.address(*at).is_some() && !state.is_shed(*at))
                .map(|stage| node.tier_name(1 + stage));
            dram.into_iter().chain(lower).collect()
        })
    }

    /// Those that a lower tier has and DRAM has not.
    fn only_below(&self, keys: &[BlockKey]) -> Vec<BlockKey> {
        let stages = self.node().stages.len();
        let is_below = self.of_each(keys, |state, content| {
            content.filter(|content| content.slab.is_none()).is_some_and(|content| {
                (0..stages).any(|at| content.address(at).is_some() && !state.is_shed(at))
            })
        });
        let asked = keys.iter().zip(is_below);
        asked.filter(|(_, is_below)| *is_below).map(|(key, _)| *key).collect()
    }

    /// Asks about the content of each block, none where it is unknown or has expired.
    fn of_each<T>(&self, keys: &[BlockKey], of: impl Fn(&State, Option<&Content>) -> T) -> Vec<T> {
        let now_unix_ms = self.node().clock.unix_ms();
        let mut answers = Vec::with_capacity(keys.len());
        let mut found = Vec::with_capacity(keys.len().min(HOLD_KEYS));
        for keys in keys.chunks(HOLD_KEYS) {
            let state = self.node().lock();
            state.catalog.find_batch(keys, &mut found);
            let content_of = |found| {
                let entry = state.catalog.entry(found);
                let is_known = !state.is_closed && !entry.has_expired(now_unix_ms);
                is_known.then(|| state.catalog.content(entry.content))
            };
            let asked = found.drain(..);
            answers.extend(asked.map(|found: Option<_>| of(&state, found.and_then(content_of))));
        }
        answers
    }

    /// Keeps blocks from being evicted from DRAM until as many `unpin`s. True for those that are
    /// here. Pins are counted and do not expire.
    pub fn pin(&self, keys: &[BlockKey]) -> Vec<bool> {
        self.change_pins(keys, |_, pins| pins.checked_add(1))
    }

    /// Pins a block, if it is here and not longer than `bytes_max`. Returns its length.
    pub fn pin_within(&self, key: &BlockKey, bytes_max: u64) -> Option<u32> {
        let mut bytes = None;
        let pinned = self.change_pins(&[*key], |content, pins| {
            let is_short = u64::from(content.bytes) <= bytes_max;
            bytes = Some(content.bytes);
            pins.checked_add(1).filter(|_| is_short)
        });
        bytes.filter(|_| pinned[0])
    }

    /// Takes back one pin of each block. True for those that had one.
    pub fn unpin(&self, keys: &[BlockKey]) -> Vec<bool> {
        self.change_pins(keys, |_, pins| pins.checked_sub(1))
    }

    fn change_pins(
        &self,
        keys: &[BlockKey],
        mut change: impl FnMut(&Content, u16) -> Option<u16>,
    ) -> Vec<bool> {
        let node = self.node();
        let now_unix_ms = node.clock.unix_ms();
        let mut change_one = |state: &mut State, key: &BlockKey, now| {
            let found = state.find_live(key, now_unix_ms).filter(|_| !state.is_closed);
            let Some(found) = found else { return false };
            let content = state.catalog.entry(found).content;
            if state.catalog.content(content).slab.is_some() {
                // It may be in DRAM through another of its names, which eviction may take.
                state.make_resident(found, now);
            }
            let pins = state.catalog.entry(found).pins;
            let changed = change(state.catalog.content(content), pins);
            let entry = state.catalog.entry_mut(found);
            entry.pins = changed.unwrap_or(entry.pins);
            changed.is_some()
        };
        let mut changed = Vec::with_capacity(keys.len());
        for keys in keys.chunks(HOLD_KEYS) {
            let mut state = node.lock();
            state.history.tell_time(now_unix_ms);
            let now = node.policy_now(&state);
            changed.extend(keys.iter().map(|key| change_one(&mut state, key, now)));
            node.release(state);
        }
        node.announce_change();
        changed
    }

    /// Removes blocks from every tier, pinned ones too; views that are held keep their bytes.
    /// True for those that were here. Takes effect at once; a stage that survives restarts has
    /// written it down by the next flush.
    pub fn delete(&self, keys: &[BlockKey]) -> Vec<bool> {
        let node = self.node();
        let mut deleted = Vec::with_capacity(keys.len());
        for keys in keys.chunks(HOLD_KEYS) {
            let mut state = node.lock();
            if state.is_closing {
                break;
            }
            state.history.tell_time(node.clock.unix_ms());
            deleted.extend(keys.iter().map(|key| {
                let found = state.catalog.find(key);
                found.inspect(|found| state.forget(*found, Loss::Deleted)).is_some()
            }));
            node.release(state);
            node.announce_change();
            node.insight().shadows.remove(keys);
        }
        deleted.resize(keys.len(), false);
        deleted
    }

    /// Removes every block from every tier.
    pub fn clear(&self) {
        let node = self.node();
        let mut state = node.lock();
        if state.is_closing {
            return;
        }
        state.history.tell_time(node.clock.unix_ms());
        state.forget_all(Loss::Cleared);
        node.release(state);
        node.announce_change();
        node.insight().shadows.clear();
    }

    /// Hints that blocks will be read soon: brings them to DRAM in the background. Returns how many
    /// were accepted: those that are below DRAM, or none while too many hints wait.
    pub fn prefetch(&self, keys: &[BlockKey]) -> usize {
        let node = self.node();
        if !node.pipeline.has_dram || node.stages.is_empty() {
            return 0;
        }
        let below = self.only_below(keys);
        if below.is_empty() {
            return 0;
        }
        let accepted = below.len();
        let sender = self.0.prefetch.lock().unwrap_or_else(PoisonError::into_inner);
        match sender.as_ref().map(|sender| sender.try_send(below)) {
            Some(Ok(())) => accepted,
            Some(Err(TrySendError::Full(_) | TrySendError::Disconnected(_))) | None => 0,
        }
    }

    /// Keeps a namespace's manifest beside its blocks, so that whoever finds them later can tell
    /// what they were made for. Do it once, before the first put.
    pub fn register(&self, namespace: &Namespace, options: CallOptions) -> Result<(), StoreError> {
        let deadline = self.node().call(options).deadline;
        self.node().insight().register(namespace);
        let mut registered = Ok(());
        // One that fails keeps the others from nothing.
        for stage in &self.node().stages {
            let kept = stage.register(namespace, deadline);
            registered =
                registered.and(kept.map_err(|error| tier_error(stage, "keep a manifest", error)));
        }
        registered
    }

    /// Whether a namespace was registered since the store was opened.
    pub fn knows_namespace(&self, namespace: &NamespaceId) -> bool {
        self.node().insight().knows(namespace)
    }

    /// The manifests whose blocks may be here: to explain a miss, compare them with your own by
    /// [`Manifest::difference`].
    pub fn manifests(
        &self,
        options: CallOptions,
    ) -> Result<Vec<(NamespaceId, Manifest)>, StoreError> {
        let deadline = self.node().call(options).deadline;
        let mut all = Vec::new();
        for stage in &self.node().stages {
            let kept = stage.manifests(deadline);
            all.extend(kept.map_err(|e| tier_error(stage, "list its manifests", e))?);
        }
        all.extend(self.node().insight().manifests());
        all.sort_by_key(|(id, _)| *id);
        all.dedup_by_key(|(id, _)| *id);
        Ok(all)
    }

    /// Removes everything from every tier, and zeroes what held it: memory, and files before they
    /// are removed. Puts fail with [`StoreError::Erasing`] meanwhile and reads are misses;
    /// afterwards the store is empty and usable. Goes on after a failure: the result says what is
    /// left.
    pub fn erase(&self, options: CallOptions) -> Result<Erased, StoreError> {
        self.node().erase(options)
    }

    /// What it holds and did, at this moment.
    pub fn stats(&self) -> Stats {
        self.node().stats()
    }

    /// Flushes and stops. Later calls fail with [`StoreError::Closed`]; views that are held stay.
    pub fn close(&self) -> Result<(), StoreError> {
        self.0.close()
    }
}

impl Handle {
    /// Takes nothing new, writes down what is queued, and stops. What cannot be written by the
    /// store's timeout is given up: closing ends soon after it, whatever the stages do.
    fn close(&self) -> Result<(), StoreError> {
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        if std::mem::replace(&mut self.node.lock().is_closing, true) {
            return Ok(());
        }
        self.prefetch.lock().unwrap_or_else(PoisonError::into_inner).take();
        let flushed = self.node.flush(CallOptions::default());
        let mut state = self.node.lock();
        state.is_closed = true;
        for stage in 0..self.node.stages.len() {
            mover::give_up_queue(&mut state, stage, &StageError::Timeout);
            self.node.stages[stage].let_go();
            state.names_tickets[stage].settled += state.names[stage].len() as u64;
            state.names[stage].clear();
        }
        drop(state);
        self.node.announce_work();
        self.node.announce_change();
        self.node.announce_look();
        for thread in threads.drain(..) {
            // A thread that panicked has said so on stderr; closing goes on.
            drop(thread.join());
        }
        // As long as a probe gets: who waits for a close wants to go.
        let config = &self.node.config;
        let time = config.timeout.min(config.health.probe_timeout);
        let deadline = Deadline::after(&*self.node.clock, time);
        self.node.stages.iter().for_each(|stage| stage.close(deadline));
        flushed.and(self.node.end_pool())
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.node.is_broken() {
            return;
        }
        // Whoever needs to know whether the flush worked calls close().
        drop(self.close());
    }
}

impl Node {
    fn stats(&self) -> Stats {
        let stages = self.stages.iter().map(|stage| (stage.name(), stage.stats()));
        let stages: Vec<_> = stages.collect();
        let stuck = self.stages.iter().map(|stage| (stage.name(), stage.stuck_calls()));
        let stuck: Vec<_> = stuck.collect();
        let pool = self.pool.stats();
        // Whoever asks gets an answer that is no older than the last time somebody did.
        self.announce_look();
        let (shadows, watching_bytes) = self.insight().figures();
        let state = self.lock();
        let eviction = state.eviction.stats();
        let hits = |(tier, (blocks, bytes)): (usize, &(u64, u64))| TierHits {
            tier: self.tier_name(tier),
            blocks: *blocks,
            bytes: *bytes,
            matched_blocks: state.tier_matches[tier],
        };
        Stats {
            counters: state.counters,
            hits_by_tier: state.tier_hits[..=self.stages.len()]
                .iter()
                .enumerate()
                .map(hits)
                .collect(),
            keys: state.catalog.key_count() as u64,
            contents: state.catalog.content_count() as u64,
            content_bytes: state.content_bytes,
            dram_blocks: state.eviction.blocks().len() as u64,
            dram_bytes: state.dram_bytes,
            protected_blocks: eviction.protected_blocks,
            protection_refused: eviction.protection_refused,
            catalog_bytes: (state.catalog.memory_bytes() + state.eviction.memory_bytes()) as u64,
            pending_bytes: state.pending_total(),
            pool,
            stage_blocks: (0..stages.len()).map(|at| state.catalog.stage_blocks(at)).collect(),
            stages,
            health: stuck
                .into_iter()
                .zip(&state.breakers)
                .map(|((name, stuck_calls), breaker)| (name, breaker.health(stuck_calls)))
                .collect(),
            shadows,
            insight_bytes: (watching_bytes + state.history.memory_bytes()) as u64,
            warm: self.warm.as_ref().map(|warm| warm.stats(&state)),
            notes: self.pipeline.notes.iter().chain(self.warm_notes()).cloned().collect(),
        }
    }
}

fn start_threads(
    node: &Arc<Node>,
    hints: Receiver<Vec<BlockKey>>,
) -> std::io::Result<Vec<JoinHandle<()>>> {
    let mut threads = Vec::new();
    threads.extend(scrub::start(node)?);
    for stage in 0..node.stages.len() {
        threads.push(mover::start(node, stage)?);
        threads.push(prober::start(node, stage)?);
    }
    let hints = Arc::new(Mutex::new(hints));
    for _ in 0..if node.stages.is_empty() { 0 } else { PREFETCH_THREADS } {
        let (node, hints) = (Arc::clone(node), Arc::clone(&hints));
        let thread = std::thread::Builder::new()
            .name("cascade-prefetch".to_owned())
            .spawn(move || mover::run_prefetch(&node, &hints))?;
        threads.push(thread);
    }
    Ok(threads)
}
