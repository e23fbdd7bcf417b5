//! The core of a store: its state, pool and stages, and how its threads wait for each other.

pub(crate) mod call;
pub(crate) mod call_counts;
pub(crate) mod hold;
pub(crate) mod room;

use std::sync::Arc;
use std::time::Duration;

use cascade_block::FingerprintSeed;
use cascade_memory::{DeviceMemory, Pool, RegionKind};
use cascade_runtime::{Clock, Condvar, Deadline, LeafMutex, MutexGuard, random_u64};
use cascade_tier::tier::TierError;
use cascade_tier::{CallOptions, StoreError, TierName};

use crate::StoreConfig;
use crate::core::catalog::LOWER_STAGES_MAX;
use crate::core::eviction;
use crate::core::eviction::{Eviction, EvictionLimits};
use crate::core::history::History;
use crate::core::memory_tier::MemoryTier;
use crate::core::state::StoreState;
use crate::durable::ledger::Recovered;
use crate::durable::named_pool::{NamedPool, OpenedPool, open_pool};
use crate::insight::traffic::{Insight, InsightLock};
use crate::shared::call::CallContext;
use crate::shared::call_counts::CallCounts;
use crate::shared::hold::{StateGuard, StateLock};
use crate::stages::guard::Guarded;
use crate::stages::source_guard::GuardedSource;
use crate::stages::sources::Sources;
use crate::stages::{Pipeline, StageContext, StageRegistry, encryption, staging};

/// Poll interval of waits, for events without a notification, such as the drop of a view.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

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
    /// The store's own memory first, then the stages, then the sources.
    tier_names: Vec<TierName>,
    /// The named pool, if there is one.
    pub(crate) warm: Option<NamedPool>,
    state: StateLock,
    pub(crate) call_counts: LeafMutex<CallCounts>,
    /// Traffic statistics. A lock of its own, never taken while the lock of the state is held.
    pub(crate) insight: InsightLock,
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

impl StoreCore {
    /// Returns also the blocks that an earlier run left in DRAM, to be recovered before all calls.
    pub(crate) fn new(
        mut config: StoreConfig,
        device: Option<Arc<dyn DeviceMemory>>,
        registry: &StageRegistry,
        clock: Arc<dyn Clock>,
    ) -> Result<(Self, Vec<Recovered>), StoreError> {
        if let Some(device) = &device {
            config.dram_bytes = device.bytes() as u64;
            check_for_device(&config)?;
        }
        config.check()?;
        let kind = if device.is_some() { RegionKind::Device } else { RegionKind::Host };
        let pipeline = Pipeline::parse_for(kind, &config.pipeline, registry)?;
        let OpenedPool { pool, ledger, recovered, warm } =
            open_pool(&config, device, &pipeline, &*clock)?;
        let context = StageContext { config: &config, pool: &pool, clock: &clock };
        let make = |name| {
            let protected = encryption::protect(registry.make(name, &context)?, &context)?;
            staging::stage(protected, &context)
        };
        let made = pipeline.lower.iter().map(|name| make(name));
        let guarded = |stage| Guarded::new(stage, &clock);
        let stages = made.map(|made| made.map(guarded)).collect::<Result<Vec<_>, _>>()?;
        let seed = FingerprintSeed::new(match config.hash_seed {
            Some(number) => number,
            None => random_number("hash_seed")?,
        });
        let history = History::new(clock.unix_ms(), seed);
        let eviction = new_eviction(&config, config.dram_bytes);
        let memory = MemoryTier::new(pipeline.memory, pipeline.keeps_in_memory, eviction);
        let mut state =
            StoreState::new(memory, stages.len(), history, (config.health, seed), &*clock);
        state.ledger = ledger;
        state.next_epoch = random_number("changes_max")?;
        for (at, stage) in stages.iter().enumerate() {
            state.key_only_stages |= u8::from(stage.keeps_names_only()) << at;
        }
        let names: Vec<TierName> = stages.iter().map(Guarded::name).collect();
        let insight = Insight::new(&config, pipeline.memory_tier(), &names, seed);
        let insight = InsightLock::new(insight, seed);
        let state = StateLock::new(state, config.holds.clone());
        let tier_names: Vec<TierName> = std::iter::once(pipeline.memory).chain(names).collect();
        let sources = Sources::guarded(&config.sources, &tier_names, config.health, &clock)?;
        let source_names = sources.list.iter().map(GuardedSource::name);
        let core = Self {
            tier_names: tier_names.iter().copied().chain(source_names).collect(),
            config,
            pipeline,
            clock,
            seed,
            pool,
            stages,
            sources,
            warm,
            state,
            call_counts: LeafMutex::default(),
            insight,
            changed: Condvar::new(),
            work: Condvar::new(),
            prober_wakeup: Condvar::new(),
        };
        Ok((core, recovered))
    }

    /// Tracks its caller: a world that cannot go on reports where the lock was taken.
    #[track_caller]
    pub(crate) fn lock(&self) -> StateGuard<'_> {
        self.state.lock()
    }

    /// A new, empty eviction state.
    pub(crate) fn new_eviction(&self) -> Eviction {
        new_eviction(&self.config, self.memory_bytes())
    }

    /// The size of the first tier.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.pool.capacity_bytes() as u64
    }

    /// Limit of the write backlog of all stages together.
    pub(crate) fn dirty_bytes_max(&self) -> u64 {
        self.config.dirty_bytes_max.unwrap_or(self.memory_bytes() / 4)
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

    /// Waits this long before a stage is asked again for what it has failed, or until the store
    /// closes. New work does not end the wait: a stage that fails at once would take a whole
    /// processor.
    pub(crate) fn wait_to_retry<'a>(&'a self, mut state: StateGuard<'a>, time: Duration) {
        let until = Deadline::after(&*self.clock, time);
        while !state.is_closed && !until.has_passed(&*self.clock) {
            state = self.state.wait(state, &self.work, Some((until, &*self.clock)));
        }
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

    pub(crate) fn insight(&self) -> MutexGuard<'_, Insight> {
        self.insight.lock()
    }

    /// The tier that hits in memory count for. Without a DRAM stage only blocks queued for writing
    /// are in memory; those count for the first stage.
    pub(crate) fn memory_tier(&self) -> usize {
        usize::from(!self.pipeline.keeps_in_memory && !self.stages.is_empty())
    }

    /// Whether a block that is not in DRAM may be read from somewhere else.
    pub(crate) fn has_places_below_dram(&self) -> bool {
        !self.stages.is_empty() || !self.sources.is_empty()
    }

    /// Refuses an operation that gives access to blocks in place, if they are in device memory that
    /// no other process maps. Callers of a store in shared device memory get slabs without host
    /// bytes, which devices copy.
    pub(crate) fn check_in_place(&self, operation: &'static str) -> Result<(), StoreError> {
        match self.pool.region().device() {
            Some(device) if device.shared().is_none() => Err(self.not_host_memory(operation)),
            Some(_) | None => Ok(()),
        }
    }

    pub(crate) fn not_host_memory(&self, operation: &'static str) -> StoreError {
        StoreError::NotHostMemory { operation, tier: self.tier_name(0) }
    }

    pub(crate) fn tier_names(&self) -> &[TierName] {
        &self.tier_names
    }

    pub(crate) fn tier_name(&self, tier: usize) -> TierName {
        self.tier_names[tier]
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

/// Refuses settings of a store in device memory that need its bytes in host memory.
fn check_for_device(config: &StoreConfig) -> Result<(), StoreError> {
    let setting = match config {
        config if config.pool_file.is_some() => "pool_file",
        config if !config.sources.is_empty() => "sources",
        _ => return Ok(()),
    };
    let reason = "not possible for a store in device memory; leave it out".to_owned();
    Err(StoreError::Config { setting, reason })
}

fn new_eviction(config: &StoreConfig, capacity_bytes: u64) -> Eviction {
    let limits = EvictionLimits {
        capacity_bytes,
        protected_percent: config.protected_percent,
        admit_partial: config.admit_partial,
    };
    Eviction::new(eviction::policy(config.policy), limits)
}
