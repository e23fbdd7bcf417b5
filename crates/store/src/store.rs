//! The store's public API: batches in, an outcome for each block out, a deadline on every call.

mod block_store;
mod statistics;

use std::sync::{Arc, PoisonError};

use cascade_block::{BlockKey, Manifest, Namespace, NamespaceId};
use cascade_memory::{DeviceMemory, SlabMut};
use cascade_runtime::thread::{Builder, JoinHandle};
use cascade_runtime::{Clock, Deadline, Mutex, SystemClock};
use cascade_tier::tier::TierError;
use cascade_tier::{
    CallOptions, GetOutcome, Put, PutOutcome, PutSlab, Request, StoreError, StoreStats, TierName,
    ViewOutcome,
};

use crate::calls::clear::{clear, remove_cleared};
use crate::calls::erase::Erase;
use crate::calls::flush::Flush;
use crate::calls::lookup::Lookup;
use crate::calls::prefetch::{PrefetchQueue, run_prefetch};
use crate::calls::put::{put, reserve};
use crate::calls::read::Reads;
use crate::calls::resident_views::failed_views;
use crate::calls::resize::resize;
use crate::core::catalog::Content;
use crate::core::flush_mark::FlushMark;
use crate::core::history::Loss;
use crate::core::state::StoreState;
use crate::drive::{mover, prober, scrub, settle, source_prober};
use crate::durable::ledger::Recovered;
use crate::durable::recovery::recover;
use crate::shared::hold::KEYS_PER_HOLD;
use crate::shared::{StoreCore, tier_error};
use crate::stages::StageRegistry;
use crate::stages::source_guard::GuardedSource;
use crate::{EraseReport, StoreConfig};

/// Threads that execute prefetch hints.
const PREFETCH_THREADS: usize = 2;

/// Keeps blocks in the tiers of a pipeline. Clones are handles on the same store; dropping the
/// last handle closes it.
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
/// let ViewOutcome::Hit { slab, .. } = &views[0] else { panic!("it was put") };
/// assert_eq!(slab.host(), Some(&b"keys and values"[..]));
/// # Ok::<(), cascade_store::StoreError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Store(Arc<StoreInner>);

/// Shared by all handles; owns the threads of the store.
#[derive(Debug)]
struct StoreInner {
    core: Arc<StoreCore>,
    prefetch: Arc<PrefetchQueue>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Store {
    /// Opens a store with the built-in stages and the system clock.
    pub fn open(config: StoreConfig) -> Result<Self, StoreError> {
        Self::open_with(config, &StageRegistry::default(), Arc::new(SystemClock))
    }

    /// Opens a store with the stages of a registry and a given clock.
    pub fn open_with(
        config: StoreConfig,
        registry: &StageRegistry,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, StoreError> {
        Self::start(StoreCore::new(config, None, registry, clock)?)
    }

    /// Opens a store in the memory of a device. Its pipeline has `Hbm` in place of `Dram`, and
    /// `StoreConfig::dram_bytes` is the length of that memory. Blocks are put and read by copies.
    /// Calls that give access to blocks in place give slabs without host bytes if other processes
    /// can map the memory, and else fail with [`StoreError::NotHostMemory`].
    ///
    /// # Errors
    /// As [`Store::open_with`]; or if a named pool or sources are configured.
    pub fn open_on_device(
        config: StoreConfig,
        device: Arc<dyn DeviceMemory>,
        registry: &StageRegistry,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, StoreError> {
        Self::start(StoreCore::new(config, Some(device), registry, clock)?)
    }

    fn start((mut core, recovered): (StoreCore, Vec<Recovered>)) -> Result<Self, StoreError> {
        recover(&mut core, recovered);
        let core = Arc::new(core);
        let prefetch = Arc::new(PrefetchQueue::default());
        // Before the threads: if one of them cannot be started, dropping this ends the others.
        let inner = StoreInner {
            core: Arc::clone(&core),
            prefetch: Arc::clone(&prefetch),
            threads: Mutex::new(Vec::new()),
        };
        let threads = start_threads(&core, &prefetch)
            .map_err(|error| StoreError::Threads { source: Arc::new(error) })?;
        inner.threads.lock().unwrap_or_else(PoisonError::into_inner).extend(threads);
        Ok(Self(Arc::new(inner)))
    }

    pub(crate) fn core(&self) -> &StoreCore {
        &self.0.core
    }

    /// The configuration of the store.
    pub fn config(&self) -> &StoreConfig {
        &self.core().config
    }

    /// Stores blocks: copies their bytes into the first tier. Waits while the write backlog is at
    /// its limit.
    pub fn put(&self, batch: &[Put<'_>], options: CallOptions) -> Vec<PutOutcome> {
        put(self.core(), batch, options)
    }

    /// Allocates a slab, to write a block in place. The caller fills the slab and passes it to
    /// [`Store::put_slabs`]. As a put, this call waits while the write backlog is at its limit;
    /// the later put of the slab does not wait for it.
    pub fn reserve(&self, bytes: usize, options: CallOptions) -> Result<SlabMut, StoreError> {
        reserve(self.core(), bytes, options)
    }

    /// Stores blocks that the caller wrote in place, without a copy.
    pub fn put_slabs(&self, batch: Vec<PutSlab>, options: CallOptions) -> Vec<PutOutcome> {
        self.put_slabs_with(batch, options, || true)
    }

    /// Copies each block into its buffer. Never writes past the length of the block.
    ///
    /// # Panics
    /// If the numbers of buffers and keys differ.
    pub fn get(
        &self,
        keys: &[BlockKey],
        buffers: &mut [&mut [u8]],
        options: CallOptions,
    ) -> Vec<GetOutcome> {
        let core = self.core();
        Reads::new(core, core.call(options)).get(keys, buffers)
    }

    /// Views of blocks, without a copy. The bytes of a view never change while it is held, even if
    /// the block is evicted or deleted; dropping the last view of a block frees its memory.
    pub fn view(&self, keys: &[BlockKey], options: CallOptions) -> Vec<ViewOutcome> {
        let core = self.core();
        if let Err(error) = core.check_in_place("view blocks") {
            return failed_views(keys, &error);
        }
        Reads::new(core, core.call(options)).view(keys)
    }

    /// Passes hints about a chain to the eviction policy outside a request, such as the end of its
    /// session or a queued request for it. Does not count as an access.
    pub fn hint(&self, request: &Request<'_>) {
        Lookup { core: self.core(), request }.hint();
    }

    /// Whether each block can be read from any tier. Does not count as an access. False for blocks
    /// that could not be looked up within the timeout of the store.
    pub fn contains(&self, keys: &[BlockKey]) -> Vec<bool> {
        self.map_contents(keys, |state, content| {
            content.is_some_and(|content| !state.is_unreadable(content))
        })
    }

    /// The tiers that have each block, fast to slow. Does not count as an access.
    pub fn locate(&self, keys: &[BlockKey]) -> Vec<Vec<TierName>> {
        let core = self.core();
        self.map_contents(keys, |state, content| {
            let Some(content) = content else { return Vec::new() };
            let memory = content.slab.is_some().then_some(state.memory.name);
            let lower = (0..core.stages.len())
                .filter(|at| content.has_address(*at) && !state.is_read_circuit_open(*at))
                .map(|stage| core.tier_name(1 + stage));
            memory.into_iter().chain(lower).collect()
        })
    }

    /// The blocks that DRAM does not have, and a readable lower tier or a source has. A source only
    /// if it has said so lately.
    fn only_below_dram(&self, keys: &[BlockKey]) -> Vec<BlockKey> {
        let core = self.core();
        let stages = core.stages.len();
        let is_below = self.map_contents(keys, |state, content| {
            let is_readable = |content: &Content| {
                let at_stage = |at: &usize| content.has_address(*at);
                (0..stages).filter(at_stage).any(|at| !state.is_read_circuit_open(at))
            };
            content.map(|content| content.slab.is_none() && is_readable(content))
        });
        let is_wanted = |(key, is_below): &(&BlockKey, Option<bool>)| {
            is_below.unwrap_or_else(|| core.sources.is_located(key, &*core.clock))
        };
        let below = keys.iter().zip(is_below).filter(is_wanted);
        below.map(|(key, _)| *key).collect()
    }

    /// Applies a function to the content of each block: `None` if it is unknown or has expired.
    /// Beyond the timeout of the store, the rest is not looked up.
    fn map_contents<T: Default>(
        &self,
        keys: &[BlockKey],
        map: impl Fn(&StoreState, Option<&Content>) -> T,
    ) -> Vec<T> {
        let now_unix_ms = self.core().clock.unix_ms();
        let mut results = Vec::with_capacity(keys.len());
        let mut found = Vec::with_capacity(keys.len().min(KEYS_PER_HOLD));
        let (mut call, count) = (None, keys.len());
        for keys in keys.chunks(KEYS_PER_HOLD) {
            let Some(mut state) = self.core().lock_in_time(keys.len(), &mut call) else { break };
            state.charge_keys(keys);
            state.catalog.find_batch(keys, &mut found);
            let content_of = |found| {
                let entry = state.catalog.entry(found);
                let is_known = !state.is_closed && !entry.has_expired(now_unix_ms);
                is_known.then(|| state.catalog.content(entry.content))
            };
            let found = found.drain(..);
            results.extend(found.map(|key: Option<_>| map(&state, key.and_then(content_of))));
        }
        results.resize_with(count, T::default);
        results
    }

    /// Pins blocks: a pinned block is not evicted from DRAM. Pins are counted and do not expire;
    /// each needs its own `unpin`. Returns for each block whether it was pinned; false if the store
    /// does not have it.
    pub fn pin(&self, keys: &[BlockKey]) -> Vec<bool> {
        self.change_pins(keys, |_, pins| pins.checked_add(1))
    }

    /// Pins a block of at most `bytes_max` bytes. Returns its length if it was pinned.
    pub fn pin_within(&self, key: &BlockKey, bytes_max: u64) -> Option<u32> {
        let mut bytes = None;
        let pinned = self.change_pins(&[*key], |content, pins| {
            let is_short = u64::from(content.bytes) <= bytes_max;
            bytes = Some(content.bytes);
            pins.checked_add(1).filter(|_| is_short)
        });
        bytes.filter(|_| pinned[0])
    }

    /// Removes one pin of each block. Returns for each block whether it had a pin.
    pub fn unpin(&self, keys: &[BlockKey]) -> Vec<bool> {
        self.change_pins(keys, |_, pins| pins.checked_sub(1))
    }

    fn change_pins(
        &self,
        keys: &[BlockKey],
        mut change: impl FnMut(&Content, u16) -> Option<u16>,
    ) -> Vec<bool> {
        let core = self.core();
        let now_unix_ms = core.clock.unix_ms();
        let mut change_one = |state: &mut StoreState, key: &BlockKey, now| {
            let found = state.find_live(key, now_unix_ms).filter(|_| !state.is_closed);
            let Some(found) = found else { return false };
            let content = state.catalog.entry(found).content;
            if state.catalog.content(content).slab.is_some() {
                // The content may be resident under another key only. The policy can evict that
                // key; with a slot of its own, the pinned key keeps the content in DRAM.
                state.make_resident(found, now);
            }
            let pins = state.catalog.entry(found).pins;
            let changed = change(state.catalog.content(content), pins);
            let entry = state.catalog.entry_mut(found);
            // Unchanged at the limits: the result for this block is then false.
            entry.pins = changed.unwrap_or(entry.pins);
            if changed == Some(0) {
                state.release_key(found);
            }
            changed.is_some()
        };
        let mut changed = Vec::with_capacity(keys.len());
        for keys in keys.chunks(KEYS_PER_HOLD) {
            let mut state = core.lock_for(keys.len());
            state.charge_keys(keys);
            state.history.set_time(now_unix_ms);
            let now = core.policy_now(&state);
            changed.extend(keys.iter().map(|key| change_one(&mut state, key, now)));
            core.unlock(state);
        }
        // An allocation may wait for a block that is no longer pinned.
        core.notify_changed();
        changed
    }

    /// Removes blocks from every tier, also pinned ones. Views that are held keep their bytes.
    /// Returns for each block whether the store had it; false for one that has expired. Takes
    /// effect at once; a persistent stage has recorded the removal after the next flush.
    pub fn delete(&self, keys: &[BlockKey]) -> Vec<bool> {
        let core = self.core();
        let mut deleted = Vec::with_capacity(keys.len());
        let mut now_unix_ms = None;
        core.in_holds(None, keys, |state, key| {
            state.fetching.cancel(key);
            // A removal that is queued after the close began might not reach the stages.
            let now_unix_ms = *now_unix_ms.get_or_insert_with(|| core.clock.unix_ms());
            let is_open = !state.is_closing;
            let found = if is_open { state.find_live(key, now_unix_ms) } else { None };
            deleted.push(found.inspect(|found| state.forget(*found, Loss::Deleted)).is_some());
        });
        core.notify_changed();
        for keys in keys.chunks(KEYS_PER_HOLD) {
            core.insight().shadows.remove(keys);
        }
        deleted
    }

    /// Removes every block from every tier. All are absent at once; returns when they are removed.
    pub fn clear(&self) {
        clear(self.core());
    }

    /// Returns once every block put so far is written to all lower stages and would survive a
    /// restart. Fails if a stage failed to store blocks since the last flush; those blocks stay in
    /// DRAM until they are evicted.
    pub fn flush(&self, options: CallOptions) -> Result<(), StoreError> {
        Flush::new(self.core(), options).flush()
    }

    /// As [`Store::flush`], for one of several callers: fails if a stage failed to store blocks
    /// since `reported`. Updates `reported` to include the failures that this call reports.
    pub fn flush_since(
        &self,
        reported: &mut FlushMark,
        options: CallOptions,
    ) -> Result<(), StoreError> {
        Flush::new(self.core(), options).since(reported)
    }

    /// The mark for a new caller: it includes only failures that some flush has reported. The
    /// first flush of the caller therefore reports all others, which may be its own from before a
    /// reconnect.
    pub fn flush_mark(&self) -> FlushMark {
        self.core().lock().reported_failures
    }

    /// Promotes blocks to DRAM in the background, because they will be read soon. Returns the
    /// number of blocks accepted: those that only lower tiers have, or a source according to the
    /// latest lookup; or zero while the queue is full.
    pub fn prefetch(&self, keys: &[BlockKey]) -> usize {
        let core = self.core();
        if !core.pipeline.keeps_in_memory || !core.has_places_below_dram() {
            return 0;
        }
        let below = self.only_below_dram(keys);
        if below.is_empty() {
            return 0;
        }
        let accepted = below.len();
        if self.0.prefetch.push(below) { accepted } else { 0 }
    }

    /// Stores the manifest of a namespace beside its blocks, so that later readers know what the
    /// blocks were computed for. Call it once, before the first put.
    pub fn register(&self, namespace: &Namespace, options: CallOptions) -> Result<(), StoreError> {
        let deadline = self.core().call(options).deadline;
        self.core().insight().register(namespace);
        let mut registered = Ok(());
        // Try every stage and report the first error.
        for stage in &self.core().stages {
            let stored = stage.register(namespace, deadline);
            registered = registered
                .and(stored.map_err(|error| tier_error(stage, "store a manifest", error)));
        }
        registered
    }

    /// Whether a namespace was registered since the store was opened.
    pub fn is_namespace_registered(&self, namespace: &NamespaceId) -> bool {
        self.core().insight().is_registered(namespace)
    }

    /// The manifests of all namespaces that may have blocks here. To explain a miss, compare them
    /// with the caller's own manifest by [`Manifest::difference`].
    pub fn manifests(
        &self,
        options: CallOptions,
    ) -> Result<Vec<(NamespaceId, Manifest)>, StoreError> {
        let deadline = self.core().call(options).deadline;
        let mut all = Vec::new();
        for stage in &self.core().stages {
            let listed = stage.manifests(deadline);
            all.extend(listed.map_err(|error| tier_error(stage, "list manifests", error))?);
        }
        all.extend(self.core().insight().manifests());
        all.sort_by_key(|(id, _)| *id);
        all.dedup_by_key(|(id, _)| *id);
        Ok(all)
    }

    /// Removes every block from every tier and overwrites its bytes: memory is zeroed, files are
    /// overwritten before they are removed. Meanwhile puts fail with [`StoreError::Erasing`] and
    /// reads are misses; afterwards the store is empty and usable. Continues after a failure; the
    /// result lists what was not erased.
    pub fn erase(&self, options: CallOptions) -> Result<EraseReport, StoreError> {
        Erase::new(self.core(), options).run()
    }

    /// Changes the capacity of a tier until the store is closed. Returns its capacity.
    ///
    /// - DRAM: evicts blocks, and gives their memory back to the system until the deadline. Blocks
    ///   that are pinned, read or not written yet stay; if they keep DRAM above its new size, that
    ///   is the capacity, and a later call goes on. At most the size at opening. No other process
    ///   may have registered the region with a device; see [`Store::pin_memory`].
    /// - A tier below DRAM, such as `files`: its capacity is the new one at once. What it holds
    ///   above that is removed in the background, oldest blocks first and no more than needed.
    ///
    /// # Errors
    /// If there is no such tier, its capacity is fixed, or the value is out of range.
    pub fn resize(
        &self,
        tier: &str,
        capacity_bytes: u64,
        options: CallOptions,
    ) -> Result<u64, StoreError> {
        let core = self.core();
        if tier == core.pipeline.memory {
            return resize(core, capacity_bytes, core.call(options));
        }
        let stage = core.stages.iter().find(|stage| stage.name() == tier);
        let stage = stage.ok_or_else(|| StoreError::Config {
            setting: "pipeline",
            reason: format!("it has no stage {tier:?}"),
        })?;
        let resized = stage.resize(capacity_bytes, core.call(options).deadline);
        resized.map_err(|error| tier_error(stage, "change the capacity", error))?;
        core.insight().shadows.resize(stage.name(), capacity_bytes);
        core.notify_movers();
        Ok(capacity_bytes)
    }

    /// The size of the first tier now, such as DRAM.
    pub fn memory_bytes(&self) -> u64 {
        self.core().memory_bytes()
    }

    /// From now on DRAM keeps its size, because a device may have its pages registered: it would
    /// use those after DRAM got others.
    pub fn pin_memory(&self) {
        self.core().pool.pin();
    }

    /// The current statistics.
    pub fn stats(&self) -> StoreStats {
        statistics::statistics(self.core())
    }

    /// Flushes and stops. Later calls fail with [`StoreError::Closed`]; views that are held stay
    /// valid.
    pub fn close(&self) -> Result<(), StoreError> {
        self.0.close()
    }
}

impl StoreInner {
    /// Stops accepting blocks, writes the queued blocks, and stops the threads. Blocks that cannot
    /// be written within the store's timeout are dropped from the queues, so that closing ends
    /// soon after the timeout even if a stage hangs.
    fn close(&self) -> Result<(), StoreError> {
        // Held until the end: a second close returns only after the first.
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        if std::mem::replace(&mut self.core.lock().is_closing, true) {
            return Ok(());
        }
        // Ends the prefetch threads.
        self.prefetch.close();
        // Before the flush: a clear that is under way queues removals for the stages.
        remove_cleared(&self.core, Loss::Cleared, |_, _| {}, |_| {});
        // Before `is_closed`, while the movers still write.
        let flushed = Flush::new(&self.core, CallOptions::default()).flush();
        // In short holds, because the queues may be long.
        for stage in 0..self.core.stages.len() {
            let mut state = self.core.lock();
            state = settle::fail_queue(&self.core, state, stage, &TierError::Timeout);
            while !state.cancel_key_changes(stage).is_empty() {
                state = self.core.end_full_hold(state);
            }
        }
        self.core.sources.list.iter().for_each(GuardedSource::end_all_waits);
        // Under one hold of the lock: a mover or caller that sees `is_closed` also sees empty
        // queues and settled tickets, and stops waiting.
        let mut state = self.core.lock();
        state.is_closed = true;
        for stage in 0..self.core.stages.len() {
            settle::settle_queue(&mut state, stage, &TierError::Timeout);
            // Otherwise the joins below could wait for a stage that hangs.
            self.core.stages[stage].end_all_waits();
            // Those that were queued since.
            while !state.cancel_key_changes(stage).is_empty() {}
        }
        drop(state);
        self.core.notify_movers();
        self.core.notify_changed();
        self.core.wake_probers();
        for thread in threads.drain(..) {
            // The panic handler has reported a thread that panicked; closing continues.
            drop(thread.join());
        }
        // Not longer than a probe: the caller of close() should not wait for a stage that hangs.
        let config = &self.core.config;
        let time = config.timeout.min(config.health.probe_timeout);
        let deadline = Deadline::after(&*self.core.clock, time);
        self.core.stages.iter().for_each(|stage| stage.close(deadline));
        self.core.sources.list.iter().for_each(|source| source.close(deadline));
        let warm = self.core.warm.as_ref();
        flushed.and(warm.map_or(Ok(()), |warm| warm.close(config.keep_pool)))
    }
}

impl Drop for StoreInner {
    fn drop(&mut self) {
        // `lock` would panic, and a second panic during unwinding aborts the process.
        if self.core.is_poisoned() {
            return;
        }
        // A caller that needs the result of the flush calls close() itself.
        drop(self.close());
    }
}

fn start_threads(
    core: &Arc<StoreCore>,
    prefetch: &Arc<PrefetchQueue>,
) -> std::io::Result<Vec<JoinHandle<()>>> {
    let mut threads = Vec::new();
    threads.extend(scrub::start(core)?);
    for stage in 0..core.stages.len() {
        threads.push(mover::start(core, stage)?);
        threads.push(prober::start(core, stage)?);
    }
    for source in 0..core.sources.list.len() {
        threads.push(source_prober::start(core, source)?);
    }
    for _ in 0..if core.has_places_below_dram() { PREFETCH_THREADS } else { 0 } {
        let (core, prefetch) = (Arc::clone(core), Arc::clone(prefetch));
        let thread = Builder::new()
            .name("cascade-prefetch".to_owned())
            .spawn(move || run_prefetch(&core, &prefetch))?;
        threads.push(thread);
    }
    Ok(threads)
}
