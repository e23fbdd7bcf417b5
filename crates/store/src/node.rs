//! A node: the state, what it works on, and how its threads wait for each other.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cascade_block::{Clock, Seed};
use cascade_memory::{Pool, SlabMut};

use ring::rand::{SecureRandom as _, SystemRandom};

use crate::call::Call;
use crate::catalog::{LOWER_STAGES_MAX, NewKey};
use crate::eviction::{self, Eviction, Incoming, Limits};
use crate::history::History;
use crate::insight::Insight;
use crate::ledger::Recovered;
use crate::pipeline::Pipeline;
use crate::stage::guarded::Guarded;
use crate::stage::{BlockFacts, Registry, StageContext, StageError, encrypted};
use crate::state::{Evicted, NameChange, State};
use crate::warm::{OpenedPool, Warm, open_pool};
use crate::{CallOptions, StoreConfig, StoreError, TierName};

/// How often a wait looks again for what nobody announces, such as a view that was dropped.
const RECHECK: Duration = Duration::from_millis(5);

/// Shared by the handles, the movers and the prefetch threads.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) config: StoreConfig,
    pub(crate) pipeline: Pipeline,
    pub(crate) clock: Arc<dyn Clock>,
    /// What no caller knows: keys are found by hashes that depend on it.
    pub(crate) seed: Seed,
    pub(crate) pool: Pool,
    pub(crate) stages: Vec<Guarded>,
    /// Of DRAM, then of the stages.
    tier_names: Vec<TierName>,
    pub(crate) dirty_bytes_max: u64,
    /// What an earlier run left, if the pool has a name.
    pub(crate) warm: Option<Warm>,
    state: Mutex<State>,
    /// What watches the traffic; a lock of its own, never taken while the state's is held.
    pub(crate) insight: Mutex<Insight>,
    /// Something changed that a caller may wait for.
    changed: Condvar,
    /// A queue has work for a mover.
    work: Condvar,
    /// Probers look: a stage is suspected, somebody asks how they are, or the store closes.
    look: Condvar,
}

/// When a caller got the lock: asking the clocks for every block would cost more than looking it
/// up.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Moment {
    /// By the time of day.
    pub(crate) unix_ms: u64,
    /// By the policy's clock.
    pub(crate) policy: Duration,
}

/// Why there is no slab.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoSlab {
    /// The block is larger than the pool.
    TooLarge,
    /// All that is resident is pinned or being read, and nothing under way will free any.
    Full,
    /// All that may go is worth more.
    WorthLess,
    /// Room will come, but did not in time.
    Late,
    /// Everything is being erased.
    Erasing,
}

impl Node {
    pub(crate) fn new(
        config: StoreConfig,
        registry: &Registry,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, StoreError> {
        config.check()?;
        let pipeline = Pipeline::parse(&config.pipeline, registry)?;
        let OpenedPool { pool, ledger, recovered, warm } =
            open_pool(&config, pipeline.has_dram, &*clock)?;
        let context = StageContext { config: &config, pool: &pool, clock: &clock };
        let make = |name| encrypted::protect(registry.make(name, &context)?, &context);
        let made = pipeline.lower.iter().map(|name| make(name));
        let guarded = |stage| Guarded::new(stage, &clock);
        let stages = made.map(|made| made.map(guarded)).collect::<Result<Vec<_>, _>>()?;
        let seed = Seed::new(match config.hash_seed {
            Some(number) => number,
            None => random_number()?,
        });
        let history = History::new(clock.unix_ms(), seed);
        let (eviction, lower) = (new_eviction(&config), stages.len());
        let mut state =
            State::new(eviction, pipeline.has_dram, lower, history, (config.health, seed), &*clock);
        state.ledger = ledger;
        for (at, stage) in stages.iter().enumerate() {
            state.names_only |= u8::from(stage.keeps_names_only()) << at;
        }
        let dirty_bytes_max = config.dirty_bytes_max.unwrap_or(config.dram_bytes / 4);
        let names: Vec<TierName> = stages.iter().map(Guarded::name).collect();
        let insight = Mutex::new(Insight::new(&config, pipeline.has_dram, &names, seed));
        let mut node = Self {
            tier_names: std::iter::once("dram").chain(names).collect(),
            config,
            pipeline,
            clock,
            seed,
            pool,
            stages,
            dirty_bytes_max,
            warm,
            state: Mutex::new(state),
            insight,
            changed: Condvar::new(),
            work: Condvar::new(),
            look: Condvar::new(),
        };
        node.recover(recovered);
        Ok(node)
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        // A panic while the lock was held is a broken invariant; going on could serve wrong bytes.
        self.state.lock().expect("no thread of the store panics while it holds the state")
    }

    /// An eviction that knows nothing yet.
    pub(crate) fn new_eviction(&self) -> Eviction {
        new_eviction(&self.config)
    }

    /// Whether a thread panicked while it held the state: then nothing can be said of it any more.
    pub(crate) fn is_broken(&self) -> bool {
        self.state.is_poisoned()
    }

    /// Waits until something changes, for the rest of the deadline at most. False once it passed.
    pub(crate) fn wait_changed<'a>(
        &self,
        state: MutexGuard<'a, State>,
        call: Call,
    ) -> (MutexGuard<'a, State>, bool) {
        let left = call.deadline.remaining(&*self.clock);
        if left.is_zero() {
            return (state, false);
        }
        let waited = self.changed.wait_timeout(state, left.min(RECHECK));
        (waited.unwrap_or_else(PoisonError::into_inner).0, true)
    }

    /// As `wait_changed`, but late is an error.
    pub(crate) fn wait_in_time<'a>(
        &self,
        state: MutexGuard<'a, State>,
        operation: &'static str,
        call: Call,
    ) -> Result<MutexGuard<'a, State>, StoreError> {
        let (state, in_time) = self.wait_changed(state, call);
        if in_time { Ok(state) } else { Err(call.timeout_error(operation)) }
    }

    /// Waits until the stages know the names that were queued when `tickets` were drawn.
    pub(crate) fn wait_names<'a>(
        &self,
        mut state: MutexGuard<'a, State>,
        tickets: [u64; LOWER_STAGES_MAX],
        operation: &'static str,
        call: Call,
    ) -> Result<MutexGuard<'a, State>, StoreError> {
        // A stage that is shed learns them when it is back, and nobody waits for that.
        let is_awaited = |state: &State, at: usize| {
            !state.is_write_shed(at) && state.names_tickets[at].settled < tickets[at]
        };
        while (0..LOWER_STAGES_MAX).any(|at| is_awaited(&state, at)) {
            self.announce_work();
            state = self.wait_in_time(state, operation, call)?;
        }
        Ok(state)
    }

    /// A mover waits until there is work, or the store closes.
    pub(crate) fn wait_work<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.work.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// A prober rests for that time, or until there is a reason to look.
    pub(crate) fn wait_look<'a>(
        &self,
        state: MutexGuard<'a, State>,
        time: Duration,
    ) -> MutexGuard<'a, State> {
        self.look.wait_timeout(state, time).unwrap_or_else(PoisonError::into_inner).0
    }

    pub(crate) fn announce_look(&self) {
        self.look.notify_all();
    }

    /// A mover rests for that time, or until there may be a reason not to.
    pub(crate) fn pause(&self, state: MutexGuard<'_, State>, time: Duration) {
        drop(self.work.wait_timeout(state, time));
    }

    /// A stage did not take a block; why, as far as it said.
    pub(crate) fn stage_error(
        &self,
        state: &State,
        stage: usize,
        operation: &'static str,
    ) -> StoreError {
        let source = Arc::new(state.last_errors[stage].clone().unwrap_or(StageError::NoAnswer));
        StoreError::Tier { tier: self.stages[stage].name(), operation, source }
    }

    pub(crate) fn announce_change(&self) {
        self.changed.notify_all();
    }

    pub(crate) fn announce_work(&self) {
        self.work.notify_all();
    }

    pub(crate) fn call(&self, options: CallOptions) -> Call {
        let timeout = options.timeout.unwrap_or(self.config.timeout);
        Call::new(&*self.clock, timeout, options.writer)
    }

    /// The time that the policy goes by.
    pub(crate) fn policy_now(&self, state: &State) -> Duration {
        state.policy_time.unwrap_or_else(|| self.clock.monotonic())
    }

    /// This moment, which the history is told too.
    pub(crate) fn moment(&self, state: &mut State) -> Moment {
        let unix_ms = self.clock.unix_ms();
        state.history.tell_time(unix_ms);
        Moment { unix_ms, policy: self.policy_now(state) }
    }

    /// The tier that serves what is in memory: without a DRAM stage that is only what waits to be
    /// written to the first one below.
    pub(crate) fn memory_tier(&self) -> usize {
        usize::from(!self.pipeline.has_dram && !self.stages.is_empty())
    }

    pub(crate) fn tier_names(&self) -> &[TierName] {
        &self.tier_names
    }

    pub(crate) fn tier_name(&self, tier: usize) -> TierName {
        self.tier_names[tier]
    }

    /// Takes a slab for a put or a load, evicting as needed; for an incoming block, only what is
    /// worth less. A caller that holds slabs already does not wait for more: two such callers
    /// would wait for each other.
    pub(crate) fn take_slab<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        bytes: usize,
        holds_some: bool,
        incoming: Option<&Incoming>,
        call: Call,
    ) -> (MutexGuard<'a, State>, Result<SlabMut, NoSlab>) {
        if bytes > self.pool.region().bytes() {
            return (state, Err(NoSlab::TooLarge));
        }
        loop {
            if state.is_erasing {
                return (state, Err(NoSlab::Erasing));
            }
            if self.has_block_room(&state)
                && let Some(slab) = self.pool.allocate(bytes)
            {
                state.slabs_out += 1;
                return (state, Ok(slab));
            }
            if self.sweep_holders() {
                continue;
            }
            let now = self.policy_now(&state);
            match state.evict_one(now, incoming) {
                Evicted::One => continue,
                Evicted::NothingWorthLess => return (state, Err(NoSlab::WorthLess)),
                Evicted::NothingUsable => {}
            }
            if holds_some
                || (state.pending_total() == 0 && state.slabs_out == 0 && state.scrubbing == 0)
            {
                return (state, Err(NoSlab::Full));
            }
            let (again, in_time) = self.wait_changed(state, call);
            state = again;
            if !in_time {
                return (state, Err(NoSlab::Late));
            }
        }
    }

    fn has_block_room(&self, state: &State) -> bool {
        let most = self.config.dram_blocks.unwrap_or(u64::MAX);
        (state.eviction.blocks().len() as u64).saturating_add(state.slabs_out) < most
    }

    /// Gives the lock free, and wakes the movers if there are names to tell the stages.
    pub(crate) fn release(&self, state: MutexGuard<'_, State>) {
        let has_names = state.names.iter().any(|names| !names.is_empty());
        drop(state);
        if has_names {
            self.announce_work();
        }
    }

    /// Takes over what DRAM and the stages kept from an earlier run, DRAM first: where a stage's
    /// block cannot be shown to be the same, the one in DRAM is at least as new.
    fn recover(&mut self, recovered: Vec<Recovered>) {
        let started = self.clock.monotonic();
        let revived = self.revive(&mut self.lock(), recovered);
        self.count_revived(started);
        let mut state = self.lock();
        let state = &mut *state;
        let now_unix_ms = self.clock.unix_ms();
        let mut parents = Vec::new();
        for (at, stage) in self.stages.iter().enumerate() {
            for (facts, address) in stage.recover() {
                if facts.expires_unix_ms.is_some_and(|expires| expires <= now_unix_ms) {
                    state.push_name(at, NameChange::Remove(facts.key, address));
                    continue;
                }
                if revived.is_stored_at(&facts.key, at, address)
                    && let Some(key) = state.catalog.find(&facts.key)
                {
                    let content = state.catalog.entry(key).content;
                    state.catalog.set_address(content, at, Some(address));
                    continue;
                }
                adopt(state, at, &facts, address);
                parents.extend(facts.parent.map(|parent| (facts.key, parent)));
            }
        }
        for (key, parent) in parents {
            if let Some(key) = state.catalog.find(&key) {
                state.catalog.set_parent(key, &parent);
            }
        }
        self.requeue(state, &revived);
    }
}

/// What a stage said to a call, as an error of the store.
pub(crate) fn tier_error(
    stage: &Guarded,
    operation: &'static str,
    error: StageError,
) -> StoreError {
    StoreError::Tier { tier: stage.name(), operation, source: Arc::new(error) }
}

/// A number that nobody can guess.
fn random_number() -> Result<u64, StoreError> {
    let mut bytes = [0; 8];
    SystemRandom::new().fill(&mut bytes).map_err(|_| StoreError::Config {
        setting: "hash_seed",
        reason: "the system gave no random number; look at its log".to_owned(),
    })?;
    Ok(u64::from_le_bytes(bytes))
}

fn new_eviction(config: &StoreConfig) -> Eviction {
    let limits = Limits {
        capacity_bytes: config.dram_bytes,
        protected_percent: config.protected_percent,
        admit_partial: config.admit_partial,
    };
    Eviction::new(eviction::policy(config.policy), limits)
}

/// Enters one recovered block. The stage vouches for the key; bytes are checked when read.
fn adopt(state: &mut State, stage: usize, facts: &BlockFacts, address: crate::stage::Address) {
    debug_assert!(stage < LOWER_STAGES_MAX, "the pipeline has at most that many stages");
    let new = NewKey {
        key: facts.key,
        parent: None,
        is_prefix: facts.is_prefix,
        expires_unix_ms: facts.expires_unix_ms.unwrap_or(0),
    };
    if let Some(key) = state.catalog.find(&facts.key) {
        // A faster stage has this key already. The same bytes may be in both; if these cannot be
        // shown to be the same, the slower copy goes: it may be older.
        let content = state.catalog.entry(key).content;
        let is_same = state.catalog.content(content).bytes == facts.bytes
            && state.catalog.content(content).address(stage).is_none()
            && facts.digest.is_some()
            && facts.digest.as_ref() == state.catalog.digest_of(content);
        if is_same {
            state.set_address(content, stage, address);
        } else {
            state.push_name(stage, NameChange::Remove(facts.key, address));
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
    if state.catalog.content(content).address(stage).is_none() {
        state.catalog.set_address(content, stage, Some(address));
    }
}
