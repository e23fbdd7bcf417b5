//! The core of a store: its state, pool and stages, and how its threads wait for each other.

pub(crate) mod call;
pub(crate) mod call_counts;
pub(crate) mod hold;

use std::sync::Arc;
use std::time::Duration;

use cascade_block::FingerprintSeed;
use cascade_memory::{Pool, Slab, SlabMut};
use cascade_runtime::{Clock, Condvar, Deadline, LeafMutex, Mutex, random_u64};
use cascade_tier::tier::{BlockFacts, TierError};
use cascade_tier::{CallOptions, StoreError, TierName};

use crate::StoreConfig;
use crate::core::catalog::{LOWER_STAGES_MAX, NewKey};
use crate::core::eviction;
use crate::core::eviction::{AncestorSearch, Eviction, EvictionLimits, Incoming};
use crate::core::history::History;
use crate::core::pending::KeyChange;
use crate::core::state::{EvictionResult, StoreState};
use crate::durable::ledger::Recovered;
use crate::durable::named_pool::{NamedPool, OpenedPool, open_pool};
use crate::insight::traffic::Insight;
use crate::shared::call::CallContext;
use crate::shared::call_counts::CallCounts;
use crate::shared::hold::{KEYS_PER_HOLD, StateGuard, StateLock};
use crate::stages::guard::Guarded;
use crate::stages::source_guard::GuardedSource;
use crate::stages::sources::Sources;
use crate::stages::{Pipeline, StageContext, StageRegistry, encryption};

/// Poll interval of waits, for events without a notification, such as the drop of a view.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Most releases of slabs that one hold of the lock applies.
const RELEASES_PER_HOLD: usize = 256;

/// The core of a store, shared by its handles and its threads.
#[derive(Debug)]
pub(crate) struct StoreCore {
    pub(crate) config: StoreConfig,
    pub(crate) pipeline: Pipeline,
    pub(crate) clock: Arc<dyn Clock>,
    /// Secret seed of the hash tables: callers must not be able to choose keys that collide.
    pub(crate) seed: FingerprintSeed,
    pub(crate) pool: Pool,
    pub(crate) stages: Vec<Guarded>,
    /// Who else may have blocks.
    pub(crate) sources: Sources,
    /// DRAM first, then the stages, then the sources.
    tier_names: Vec<TierName>,
    pub(crate) dirty_bytes_max: u64,
    /// The named pool, if there is one.
    pub(crate) warm: Option<NamedPool>,
    state: StateLock,
    pub(crate) call_counts: LeafMutex<CallCounts>,
    /// Traffic statistics. A lock of its own, never taken while the lock of the state is held.
    pub(crate) insight: Mutex<Insight>,
    /// Notified when something changes that a call may wait for.
    changed: Condvar,
    /// Notified when a queue has work for a mover.
    work: Condvar,
    /// Wakes the probers early: a stage is suspect, statistics are requested, or the store closes.
    prober_wakeup: Condvar,
}

/// The time when a call took the lock, read once for its whole batch: reading the clocks for each
/// block would cost more than the lookup.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Timestamps {
    /// Time of day.
    pub(crate) unix_ms: u64,
    /// Time of the eviction policy.
    pub(crate) policy: Duration,
}

/// Why no slab was allocated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AllocationFailure {
    /// The block is larger than the pool.
    TooLarge,
    /// Every resident block is pinned or being read, and nothing in flight will free memory.
    Full,
    /// The policy values every evictable block more.
    WorthLess,
    /// Memory will become free, but did not before the deadline.
    TimedOut,
    /// The store is being erased.
    Erasing,
}

impl StoreCore {
    pub(crate) fn new(
        config: StoreConfig,
        registry: &StageRegistry,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, StoreError> {
        config.check()?;
        let pipeline = Pipeline::parse(&config.pipeline, registry)?;
        let OpenedPool { pool, ledger, recovered, warm } = open_pool(&config, &pipeline, &*clock)?;
        let context = StageContext { config: &config, pool: &pool, clock: &clock };
        let make = |name| encryption::protect(registry.make(name, &context)?, &context);
        let made = pipeline.lower.iter().map(|name| make(name));
        let guarded = |stage| Guarded::new(stage, &clock);
        let stages = made.map(|made| made.map(guarded)).collect::<Result<Vec<_>, _>>()?;
        let seed = FingerprintSeed::new(match config.hash_seed {
            Some(number) => number,
            None => random_number("hash_seed")?,
        });
        let history = History::new(clock.unix_ms(), seed);
        let (eviction, lower) = (new_eviction(&config), stages.len());
        let mut state = StoreState::new(
            eviction,
            pipeline.has_dram,
            lower,
            history,
            (config.health, seed),
            &*clock,
        );
        state.ledger = ledger;
        state.next_epoch = random_number("changes_max")?;
        for (at, stage) in stages.iter().enumerate() {
            state.key_only_stages |= u8::from(stage.keeps_names_only()) << at;
        }
        let dirty_bytes_max = config.dirty_bytes_max.unwrap_or(config.dram_bytes / 4);
        let names: Vec<TierName> = stages.iter().map(Guarded::name).collect();
        let insight = Mutex::new(Insight::new(&config, pipeline.has_dram, &names, seed));
        let state = StateLock::new(state, config.holds.clone());
        let tier_names: Vec<TierName> = std::iter::once("dram").chain(names).collect();
        let sources = Sources::guarded(&config.sources, &tier_names, config.health, &clock)?;
        let source_names = sources.list.iter().map(GuardedSource::name);
        let mut core = Self {
            tier_names: tier_names.iter().copied().chain(source_names).collect(),
            config,
            pipeline,
            clock,
            seed,
            pool,
            stages,
            sources,
            dirty_bytes_max,
            warm,
            state,
            call_counts: LeafMutex::default(),
            insight,
            changed: Condvar::new(),
            work: Condvar::new(),
            prober_wakeup: Condvar::new(),
        };
        core.recover(recovered);
        Ok(core)
    }

    /// Tracks its caller: a world that cannot go on reports where the lock was taken.
    #[track_caller]
    pub(crate) fn lock(&self) -> StateGuard<'_> {
        self.state.lock()
    }

    /// A new, empty eviction state.
    pub(crate) fn new_eviction(&self) -> Eviction {
        new_eviction(&self.config)
    }

    /// Whether a thread panicked while it held the lock.
    pub(crate) fn is_poisoned(&self) -> bool {
        self.state.is_poisoned()
    }

    /// Waits until something changes, or for the poll interval. False if the deadline has passed.
    #[track_caller]
    pub(crate) fn wait_for_change<'a>(
        &'a self,
        state: StateGuard<'a>,
        call: CallContext,
    ) -> (StateGuard<'a>, bool) {
        let now = self.clock.monotonic();
        if now >= call.deadline.time() {
            return (state, false);
        }
        // True also without a change, after the poll interval: callers check their condition in a
        // loop.
        let until = Deadline::at(call.deadline.time().min(now.saturating_add(POLL_INTERVAL)));
        (self.state.wait(state, &self.changed, Some((until, &*self.clock))), true)
    }

    /// As `wait_for_change`, with an error if the deadline has passed.
    pub(crate) fn wait_or_time_out<'a>(
        &'a self,
        state: StateGuard<'a>,
        operation: &'static str,
        call: CallContext,
    ) -> Result<StateGuard<'a>, StoreError> {
        let (state, in_time) = self.wait_for_change(state, call);
        if in_time { Ok(state) } else { Err(call.timeout_error(operation)) }
    }

    /// Waits until the stages have recorded the key changes that were queued when `tickets` were
    /// read.
    pub(crate) fn wait_for_key_changes<'a>(
        &'a self,
        mut state: StateGuard<'a>,
        tickets: [u64; LOWER_STAGES_MAX],
        operation: &'static str,
        call: CallContext,
    ) -> Result<StateGuard<'a>, StoreError> {
        // A stage with an open write circuit gets its changes when the circuit closes; nothing
        // waits for that.
        let is_awaited = |state: &StoreState, at: usize| {
            !state.is_write_circuit_open(at) && state.lower[at].key_tickets.settled < tickets[at]
        };
        while (0..self.stages.len()).any(|at| is_awaited(&state, at)) {
            self.notify_movers();
            state = self.wait_or_time_out(state, operation, call)?;
        }
        Ok(state)
    }

    /// Waits for work for a mover, or for the store to close.
    pub(crate) fn wait_for_work<'a>(&'a self, state: StateGuard<'a>) -> StateGuard<'a> {
        self.state.wait(state, &self.work, None)
    }

    /// Waits until the next check of a prober is due, or until it is woken.
    pub(crate) fn wait_for_prober_wakeup<'a>(
        &'a self,
        state: StateGuard<'a>,
        time: Duration,
    ) -> StateGuard<'a> {
        let until = Deadline::after(&*self.clock, time);
        self.state.wait(state, &self.prober_wakeup, Some((until, &*self.clock)))
    }

    pub(crate) fn wake_probers(&self) {
        self.prober_wakeup.notify_all();
    }

    /// Pauses a mover for this time, or until there is new work or the store closes.
    pub(crate) fn pause<'a>(&'a self, state: StateGuard<'a>, time: Duration) {
        let until = Deadline::after(&*self.clock, time);
        drop(self.state.wait(state, &self.work, Some((until, &*self.clock))));
    }

    /// The error of a stage that did not store a block, with the last error of the stage.
    pub(crate) fn stage_error(
        &self,
        state: &StoreState,
        stage: usize,
        operation: &'static str,
    ) -> StoreError {
        let source = Arc::new(state.lower[stage].last_error.clone().unwrap_or(TierError::NoResult));
        StoreError::Tier { tier: self.stages[stage].name(), operation, source }
    }

    pub(crate) fn notify_changed(&self) {
        self.changed.notify_all();
    }

    pub(crate) fn notify_movers(&self) {
        self.work.notify_all();
    }

    pub(crate) fn call(&self, options: CallOptions) -> CallContext {
        let timeout = options.timeout.unwrap_or(self.config.timeout);
        CallContext::new(&*self.clock, timeout, options.writer)
    }

    /// The current time of the eviction policy.
    pub(crate) fn policy_now(&self, state: &StoreState) -> Duration {
        state.policy_time.unwrap_or_else(|| self.clock.monotonic())
    }

    /// The current time; also sets it in the history.
    pub(crate) fn timestamps(&self, state: &mut StoreState) -> Timestamps {
        let unix_ms = self.clock.unix_ms();
        state.history.set_time(unix_ms);
        Timestamps { unix_ms, policy: self.policy_now(state) }
    }

    /// The tier that hits in memory count for. Without a DRAM stage only blocks queued for writing
    /// are in memory; those count for the first stage.
    pub(crate) fn memory_tier(&self) -> usize {
        usize::from(!self.pipeline.has_dram && !self.stages.is_empty())
    }

    pub(crate) fn tier_names(&self) -> &[TierName] {
        &self.tier_names
    }

    pub(crate) fn tier_name(&self, tier: usize) -> TierName {
        self.tier_names[tier]
    }

    /// Allocates a slab for a put or a load, and evicts blocks as needed. With `incoming`, evicts
    /// only blocks that the policy values less. A caller that already holds slabs does not wait for
    /// more: two such callers could wait for each other forever.
    pub(crate) fn allocate_slab<'a>(
        &'a self,
        mut state: StateGuard<'a>,
        bytes: usize,
        holds_some: bool,
        incoming: Option<&Incoming>,
        call: CallContext,
    ) -> (StateGuard<'a>, Result<SlabMut, AllocationFailure>) {
        if bytes > self.pool.region().bytes() {
            return (state, Err(AllocationFailure::TooLarge));
        }
        let mut ancestors = AncestorSearch::default();
        // Each round tries in order: free memory, memory of dead processes, eviction, waiting.
        loop {
            if state.is_erasing {
                return (state, Err(AllocationFailure::Erasing));
            }
            self.note_freed_slabs(&mut state);
            // The caller decrements the counter when it publishes, drops or hands out the slab.
            // Until then other calls wait for this memory instead of failing.
            if self.has_block_room(&state)
                && let Some(slab) = self.pool.allocate(bytes)
            {
                state.slabs_in_flight += 1;
                return (state, Ok(slab));
            }
            // Before eviction, because this costs no block. Without the lock: it reads `/proc`.
            if self.is_sweep_of_holders_due() {
                self.unlock(state);
                self.release_dead_holders();
                state = self.lock();
                continue;
            }
            let now = self.policy_now(&state);
            let has_more = self.apply_releases(&mut state);
            match state.evict_one(now, incoming, &mut ancestors) {
                EvictionResult::Evicted => {
                    // A large block may take the place of many small ones.
                    state = self.end_full_hold(state);
                    continue;
                }
                EvictionResult::NoneEvictable if !has_more => {}
                EvictionResult::Searching | EvictionResult::NoneEvictable => {
                    if call.deadline.has_passed(&*self.clock) {
                        return (state, Err(AllocationFailure::TimedOut));
                    }
                    // The search goes on in another hold of the lock, after those who wait for it.
                    self.unlock(state);
                    state = self.lock_for(KEYS_PER_HOLD);
                    continue;
                }
                EvictionResult::AllWorthMore => return (state, Err(AllocationFailure::WorthLess)),
            }
            // Slabs in flight, writes, a clear and the scrubber free memory or make blocks
            // evictable soon. Without any of these, waiting is pointless.
            if holds_some
                || (state.pending_total() == 0
                    && state.slabs_in_flight == 0
                    && state.blocks_in_scrub == 0
                    && state.catalog.cleared_keys() == 0)
            {
                return (state, Err(AllocationFailure::Full));
            }
            let (again, in_time) = self.wait_for_change(state, call);
            state = again;
            if !in_time {
                return (state, Err(AllocationFailure::TimedOut));
            }
        }
    }

    /// Makes blocks candidates for eviction again that readers have released. Returns whether there
    /// are more.
    fn apply_releases(&self, state: &mut StoreState) -> bool {
        let mut tokens = std::mem::take(&mut state.released);
        let has_more = self.pool.take_released(RELEASES_PER_HOLD, &mut tokens);
        for token in tokens.drain(..) {
            state.note_released(token);
        }
        state.released = tokens;
        has_more
    }

    /// Frees slabs in flight without the lock.
    pub(crate) fn free_unpublished<T>(&self, slabs: &mut Vec<(T, Slab)>) {
        let count = slabs.len() as u64;
        // First: the memory is free for each thread that reads the new number.
        slabs.clear();
        self.state.note_freed(count);
        self.notify_changed();
    }

    /// Subtracts the slabs that puts have freed without the lock.
    pub(crate) fn note_freed_slabs(&self, state: &mut StoreState) {
        state.slabs_in_flight -= self.state.take_freed();
    }

    fn has_block_room(&self, state: &StoreState) -> bool {
        let most = self.config.dram_blocks.unwrap_or(u64::MAX);
        // Slabs in flight count, because each becomes a block without another check.
        (state.eviction.blocks().len() as u64).saturating_add(state.slabs_in_flight) < most
    }

    /// Releases the lock, and wakes the movers if key changes are queued.
    pub(crate) fn unlock(&self, state: StateGuard<'_>) {
        let has_names = state.has_key_changes();
        // First, so that a mover does not wake up only to wait for the lock.
        drop(state);
        if has_names {
            self.notify_movers();
        }
    }

    /// Restores the blocks of an earlier run: first from DRAM, then from the stages. The order
    /// matters: the block in DRAM is at least as new, and is kept where the copy of a stage cannot
    /// be shown to be the same.
    fn recover(&mut self, recovered: Vec<Recovered>) {
        let started = self.clock.monotonic();
        let restored = self.restore_dram(&mut self.lock(), recovered);
        self.count_restored(started);
        let mut state = self.lock();
        let state = &mut *state;
        let now_unix_ms = self.clock.unix_ms();
        let mut parents = Vec::new();
        for (at, stage) in self.stages.iter().enumerate() {
            for (facts, address) in stage.recover() {
                if facts.expires_unix_ms.is_some_and(|expires| expires <= now_unix_ms) {
                    // The stage still has the block, and would return it at every start.
                    state.push_key_change(at, KeyChange::Remove(facts.key, address));
                    continue;
                }
                // The ledger recorded this address for the block in DRAM: the bytes are the same.
                if restored.is_stored_at(&facts.key, at, address)
                    && let Some(key) = state.catalog.find(&facts.key)
                {
                    let content = state.catalog.entry(key).content;
                    state.catalog.set_address(content, at, Some(address));
                    continue;
                }
                insert_recovered(state, at, &facts, address);
                parents.extend(facts.parent.map(|parent| (facts.key, parent)));
            }
        }
        // Parents last: a block can come before its parent, or from a faster stage.
        for (key, parent) in parents {
            if let Some(key) = state.catalog.find(&key) {
                state.catalog.set_parent(key, &parent);
            }
        }
        // Last: only now are the addresses in all stages known.
        self.queue_unwritten(state, &restored);
    }
}

/// The error of a stage as an error of the store.
pub(crate) fn tier_error(stage: &Guarded, operation: &'static str, error: TierError) -> StoreError {
    StoreError::Tier { tier: stage.name(), operation, source: Arc::new(error) }
}

/// An unpredictable number, for the part of the store with this setting.
fn random_number(setting: &'static str) -> Result<u64, StoreError> {
    random_u64().map_err(|_| StoreError::Config {
        setting,
        reason: "the operating system returned no random number; see its log".to_owned(),
    })
}

fn new_eviction(config: &StoreConfig) -> Eviction {
    let limits = EvictionLimits {
        capacity_bytes: config.dram_bytes,
        protected_percent: config.protected_percent,
        admit_partial: config.admit_partial,
    };
    Eviction::new(eviction::policy(config.policy), limits)
}

/// Adds one block of a stage to the catalog. Its checksum is compared when it is read.
fn insert_recovered(
    state: &mut StoreState,
    stage: usize,
    facts: &BlockFacts,
    address: cascade_tier::tier::Address,
) {
    debug_assert!(stage < LOWER_STAGES_MAX, "the pipeline limits the number of stages");
    let new = NewKey {
        key: facts.key,
        parent: None,
        is_prefix: facts.is_prefix,
        expires_unix_ms: facts.expires_unix_ms.unwrap_or(0),
    };
    if let Some(key) = state.catalog.find(&facts.key) {
        // A faster tier has this key already. If the bytes cannot be shown to be the same, drop the
        // slower copy, because it may be older.
        let content = state.catalog.entry(key).content;
        let is_same = state.catalog.content(content).bytes == facts.bytes
            && !state.catalog.content(content).has_address(stage)
            && facts.digest.is_some()
            && facts.digest.as_ref() == state.catalog.digest_of(content);
        if is_same {
            state.set_address(content, stage, address);
        } else {
            state.push_key_change(stage, KeyChange::Remove(facts.key, address));
        }
        return;
    }
    let known = facts.digest.and_then(|digest| state.catalog.find_digest(&digest));
    let known = known.filter(|content| state.catalog.content(*content).bytes == facts.bytes);
    let content = if let Some(content) = known {
        state.catalog.link(&new, content);
        content
    } else {
        state.content_bytes += u64::from(facts.bytes);
        state.catalog.insert(&new, facts.bytes, facts.digest).1
    };
    // One address for each stage: a stage that has further copies of the content finds them by
    // their keys.
    if !state.catalog.content(content).has_address(stage) {
        state.catalog.set_address(content, stage, Some(address));
    }
}
