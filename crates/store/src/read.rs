//! Get and view: from DRAM at once, from below with one fetch however many callers wait.

use std::sync::MutexGuard;

use cascade_block::{BlockKey, Deadline};
use cascade_memory::{Slab, SlabMut};

use crate::catalog::{Address, Awaits, ContentIndex, KeyIndex};
use crate::node::{NoSlab, Node};
use crate::stage::{Load, Loaded, StageError};
use crate::state::{NameChange, State};
use crate::{CallOptions, GetOutcome, StoreError, ViewOutcome};

/// Blocks that one step of a copying get holds in DRAM at most.
const GET_STEP: usize = 64;
/// How often a read follows a block that moved or was damaged before it is a miss.
const TRIES_MAX: u32 = 4;

/// Who asks: decides what is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Purpose {
    /// A caller that will use the bytes.
    Use,
    /// A hint that somebody will.
    Prefetch,
    /// The store itself.
    Inspect,
}

/// A block of one read that is not settled yet.
#[derive(Debug, Clone, Copy)]
struct Wanted {
    index: usize,
    key: BlockKey,
}

/// A block to fetch from below.
struct Fetch {
    wanted: Wanted,
    from: Source,
    slab: SlabMut,
}

/// Where a block was fetched from.
#[derive(Debug, Clone, Copy)]
struct Source {
    content: ContentIndex,
    generation: u32,
    stage: usize,
    address: Address,
}

impl Source {
    /// The content, and what tells it from later ones at its index.
    fn place(self) -> (ContentIndex, u32) {
        (self.content, self.generation)
    }
}

/// What one look at the catalog found.
#[derive(Default)]
struct Plan {
    fetches: Vec<Fetch>,
    /// Somebody else fetches these, or this caller has no room for them yet.
    waiting: Vec<Wanted>,
}

/// One read under way.
struct Reading {
    outcomes: Vec<Option<ViewOutcome>>,
    purpose: Purpose,
    options: CallOptions,
    deadline: Deadline,
}

impl Node {
    pub(crate) fn view(&self, keys: &[BlockKey], options: CallOptions) -> Vec<ViewOutcome> {
        let outcomes = self.read(keys, options, Purpose::Use);
        self.count_gets(keys.len(), outcomes.iter().map(Served::of_view));
        outcomes
    }

    /// As `view`, but for the store itself: it counts as nobody's access.
    pub(crate) fn view_uncounted(
        &self,
        keys: &[BlockKey],
        options: CallOptions,
    ) -> Vec<ViewOutcome> {
        self.read(keys, options, Purpose::Inspect)
    }

    pub(crate) fn prefetch_now(&self, keys: &[BlockKey], options: CallOptions) {
        for step in keys.chunks(GET_STEP) {
            drop(self.read(step, options, Purpose::Prefetch));
        }
    }

    pub(crate) fn get(
        &self,
        keys: &[BlockKey],
        buffers: &mut [&mut [u8]],
        options: CallOptions,
    ) -> Vec<GetOutcome> {
        assert_eq!(keys.len(), buffers.len(), "one buffer for each key");
        let mut outcomes = Vec::with_capacity(keys.len());
        let mut tiers = Vec::with_capacity(keys.len());
        let batch_bytes = buffers.iter().map(|buffer| buffer.len()).sum();
        for (step, buffers) in keys.chunks(GET_STEP).zip(buffers.chunks_mut(GET_STEP)) {
            let views = self.read(step, options, Purpose::Use);
            for ((key, view), buffer) in step.iter().zip(views).zip(buffers) {
                // What did not fit beside the others of its step may fit alone.
                let view = match view {
                    ViewOutcome::Failed(StoreError::NoRoom { .. }) => {
                        self.view_again(*key, options)
                    }
                    settled => settled,
                };
                tiers.push(Served::of_view(&view));
                outcomes.push(copy_out(view, buffer, batch_bytes));
            }
        }
        self.count_gets(keys.len(), tiers.into_iter());
        outcomes
    }

    fn view_again(&self, key: BlockKey, options: CallOptions) -> ViewOutcome {
        let mut views = self.read(&[key], options, Purpose::Use);
        views.pop().expect("one outcome for one key")
    }

    fn read(&self, keys: &[BlockKey], options: CallOptions, purpose: Purpose) -> Vec<ViewOutcome> {
        let mut reading = Reading {
            outcomes: keys.iter().map(|_| None).collect(),
            purpose,
            options,
            deadline: self.deadline(options),
        };
        let mut wanted: Vec<Wanted> =
            keys.iter().enumerate().map(|(index, key)| Wanted { index, key: *key }).collect();
        let mut tries = 0;
        while !wanted.is_empty() {
            let state = self.lock();
            let (state, plan) = self.plan(state, &wanted, &mut reading);
            self.release(state);
            if plan.fetches.is_empty() && plan.waiting.is_empty() {
                break;
            }
            let progressed = !plan.fetches.is_empty();
            let again = self.fetch(plan.fetches, &mut reading);
            tries += u32::from(!again.is_empty());
            if tries == TRIES_MAX {
                for wanted in &again {
                    reading.outcomes[wanted.index] = Some(ViewOutcome::Miss);
                }
                wanted = plan.waiting;
            } else {
                wanted = [again, plan.waiting].concat();
            }
            if !progressed && !self.wait_for_others(&wanted, &mut reading) {
                break;
            }
        }
        let settled = reading.outcomes.into_iter();
        settled.map(|outcome| outcome.unwrap_or(ViewOutcome::Miss)).collect()
    }

    /// Sorts the wanted blocks into hits, misses, fetches of ours and fetches of others.
    fn plan<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        wanted: &[Wanted],
        reading: &mut Reading,
    ) -> (MutexGuard<'a, State>, Plan) {
        let now = self.policy_now(&state);
        let now_unix_ms = self.clock.unix_ms();
        let keys: Vec<BlockKey> = wanted.iter().map(|wanted| wanted.key).collect();
        let mut found = Vec::with_capacity(keys.len());
        state.catalog.find_batch(&keys, &mut found);
        let mut plan = Plan::default();
        for (wanted, mut found) in wanted.iter().zip(found) {
            if state.is_closed {
                let closed = ViewOutcome::Failed(StoreError::Closed);
                reading.outcomes[wanted.index] = Some(closed);
                continue;
            }
            // Room taken for an earlier block of this batch may have evicted this one.
            if !plan.fetches.is_empty() {
                found = state.catalog.find(&wanted.key);
            }
            let live = found.and_then(|_| state.find_live(&wanted.key, now_unix_ms));
            let Some(key) = live else {
                reading.outcomes[wanted.index] = Some(ViewOutcome::Miss);
                continue;
            };
            if let Some(slab) = resident(&mut state, key, now, reading.purpose) {
                let hit = ViewOutcome::Hit { slab, tier: self.tier_name(0) };
                reading.outcomes[wanted.index] = Some(hit);
                continue;
            }
            let (again, settled) = self.plan_fetch(state, *wanted, key, &mut plan, reading);
            state = again;
            if let Some(outcome) = settled {
                reading.outcomes[wanted.index] = Some(outcome);
            }
        }
        (state, plan)
    }

    fn plan_fetch<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        wanted: Wanted,
        key: KeyIndex,
        plan: &mut Plan,
        reading: &Reading,
    ) -> (MutexGuard<'a, State>, Option<ViewOutcome>) {
        let index = state.catalog.entry(key).content;
        let content = state.catalog.content_mut(index);
        if content.is_loading {
            plan.waiting.push(wanted);
            return (state, None);
        }
        let Some((stage, address)) = content.fastest_lower() else {
            return (state, Some(ViewOutcome::Miss));
        };
        content.is_loading = true;
        let (bytes, generation) = (content.bytes as usize, content.generation);
        let own = plan.fetches.len() as u64;
        let (again, slab) = self.take_slab(state, bytes, own, None, reading.deadline);
        state = again;
        match slab {
            Ok(slab) => {
                let from = Source { content: index, generation, stage, address };
                plan.fetches.push(Fetch { wanted, from, slab });
                (state, None)
            }
            Err(why) => {
                if let Some(content) = state.catalog.live_content((index, generation)) {
                    content.is_loading = false;
                }
                if !plan.fetches.is_empty() && why == NoSlab::Full {
                    plan.waiting.push(wanted);
                    return (state, None);
                }
                let error = self.no_slab_error(&state, why, bytes, reading.options);
                (state, Some(ViewOutcome::Failed(error)))
            }
        }
    }

    /// Reads from the lower stages and settles what came. Returns what has to be looked up again.
    fn fetch(&self, fetches: Vec<Fetch>, reading: &mut Reading) -> Vec<Wanted> {
        let mut again = Vec::new();
        let mut by_stage: Vec<Vec<Fetch>> = self.stages.iter().map(|_| Vec::new()).collect();
        for fetch in fetches {
            by_stage[fetch.from.stage].push(fetch);
        }
        for (stage, fetches) in by_stage.into_iter().enumerate() {
            if fetches.is_empty() {
                continue;
            }
            let mut loads = Vec::with_capacity(fetches.len());
            let mut places = Vec::with_capacity(fetches.len());
            for Fetch { wanted, from, slab } in fetches {
                places.push((wanted, from));
                loads.push(Load { key: wanted.key, address: from.address, slab });
            }
            let loaded = self.stages[stage].load(loads, reading.deadline);
            let mut state = self.lock();
            for ((wanted, from), loaded) in places.into_iter().zip(loaded) {
                state.slabs_out -= 1;
                match self.settle(&mut state, &wanted, from, loaded, reading) {
                    Some(outcome) => reading.outcomes[wanted.index] = Some(outcome),
                    None => again.push(wanted),
                }
            }
            self.release(state);
            self.announce_change();
        }
        again
    }

    /// Enters what a stage answered. Nothing means: look it up again.
    fn settle(
        &self,
        state: &mut State,
        wanted: &Wanted,
        from: Source,
        loaded: Loaded,
        reading: &Reading,
    ) -> Option<ViewOutcome> {
        if let Some(content) = state.catalog.live_content(from.place()) {
            content.is_loading = false;
        }
        let tier = self.tier_name(1 + from.stage);
        match loaded {
            Loaded::Hit(slab) => {
                let slab = slab.seal();
                self.promote(state, wanted, from, &slab, reading.purpose);
                Some(ViewOutcome::Hit { slab, tier })
            }
            Loaded::Failed(StageError::Timeout) => {
                Some(ViewOutcome::Failed(self.timeout_error("read from a tier", reading.options)))
            }
            Loaded::Failed(error) => Some(ViewOutcome::Failed(StoreError::Tier {
                tier,
                operation: "read a block",
                source: std::sync::Arc::new(error),
            })),
            Loaded::Gone if self.stages[from.stage].keeps_names_only() => Some(ViewOutcome::Miss),
            Loaded::Gone => {
                forget_address(state, wanted, from);
                None
            }
            Loaded::Damaged => {
                state.counters.damaged_blocks += 1;
                forget_address(state, wanted, from);
                None
            }
        }
    }

    /// A block that came from below stays in DRAM, if the policy wants that and it was not deleted
    /// meanwhile.
    fn promote(
        &self,
        state: &mut State,
        wanted: &Wanted,
        from: Source,
        slab: &Slab,
        purpose: Purpose,
    ) {
        let Some(content) = state.catalog.live_content(from.place()) else { return };
        content.referenced |= 1 << from.stage;
        state.counters.promoted_blocks += 1;
        state.counters.promoted_bytes += slab.len() as u64;
        if !self.pipeline.has_dram || !state.eviction.policy().promotes_hits() {
            return;
        }
        let now = self.policy_now(state);
        state.put_slab(from.content, slab.clone());
        let Some(key) = state.catalog.find(&wanted.key) else {
            let heir = state.catalog.keys_of(from.content)[0];
            return state.make_resident(heir, now);
        };
        state.make_resident(key, now);
        let entry = state.catalog.entry_mut(key);
        match purpose {
            Purpose::Use => entry.awaits = Awaits::Nothing,
            Purpose::Prefetch => {
                entry.awaits = Awaits::FirstUse;
                state.counters.prefetched_blocks += 1;
            }
            Purpose::Inspect => {}
        }
    }

    /// Waits for other callers' fetches. False when the deadline passed.
    fn wait_for_others(&self, wanted: &[Wanted], reading: &mut Reading) -> bool {
        let (state, in_time) = self.wait_changed(self.lock(), reading.deadline);
        drop(state);
        if !in_time {
            for wanted in wanted {
                let late = self.timeout_error("wait for another reader's fetch", reading.options);
                reading.outcomes[wanted.index] = Some(ViewOutcome::Failed(late));
            }
        }
        in_time
    }

    fn count_gets(&self, gets: usize, served: impl Iterator<Item = Served>) {
        let mut state = self.lock();
        state.counters.gets += gets as u64;
        for served in served {
            match served {
                Served::Hit { tier, bytes } => {
                    let tier = (0..=self.stages.len())
                        .find(|at| self.tier_name(*at) == tier)
                        .expect("hits come from tiers of this pipeline");
                    state.counters.hits += 1;
                    state.counters.bytes_read += bytes;
                    state.tier_hits[tier].0 += 1;
                    state.tier_hits[tier].1 += bytes;
                }
                Served::Miss => state.counters.misses += 1,
                Served::Failed => state.counters.get_failures += 1,
            }
        }
    }
}

/// An outcome as the counters see it.
enum Served {
    Hit { tier: crate::TierName, bytes: u64 },
    Miss,
    Failed,
}

impl Served {
    fn of_view(view: &ViewOutcome) -> Self {
        match view {
            ViewOutcome::Hit { slab, tier } => Self::Hit { tier, bytes: slab.len() as u64 },
            ViewOutcome::Miss => Self::Miss,
            ViewOutcome::Failed(_) => Self::Failed,
        }
    }
}

fn resident(
    state: &mut State,
    key: KeyIndex,
    now: std::time::Duration,
    purpose: Purpose,
) -> Option<Slab> {
    let content = state.catalog.entry(key).content;
    let slab = state.catalog.content(content).slab.clone()?;
    if purpose == Purpose::Use {
        state.touch(key, now);
    }
    Some(slab)
}

/// The block is not where the catalog says: that address is forgotten, if it still says so.
fn forget_address(state: &mut State, wanted: &Wanted, from: Source) {
    let Some(content) = state.catalog.live_content(from.place()) else { return };
    if content.address(from.stage) == Some(from.address) {
        content.set_address(from.stage, None);
        state.names[from.stage].push(NameChange::Remove(wanted.key, from.address));
        state.forget_if_nowhere(from.content);
    }
}

fn copy_out(view: ViewOutcome, buffer: &mut [u8], batch_bytes: usize) -> GetOutcome {
    match view {
        ViewOutcome::Hit { slab, .. } if slab.len() > buffer.len() => {
            GetOutcome::TooShort { needed_bytes: slab.len() }
        }
        ViewOutcome::Hit { slab, tier } => {
            let bytes = slab.len();
            cascade_memory::copy_out(&mut buffer[..bytes], &slab, batch_bytes);
            GetOutcome::Hit { bytes, tier }
        }
        ViewOutcome::Miss => GetOutcome::Miss,
        ViewOutcome::Failed(error) => GetOutcome::Failed(error),
    }
}
