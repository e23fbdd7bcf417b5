//! Get and view: from DRAM at once, from below with one fetch however many callers wait.

use std::sync::MutexGuard;

use cascade_block::{BlockKey, Clock};
use cascade_memory::{Slab, SlabMut};

use crate::call::{Call, HOLD_KEYS};
use crate::catalog::{Address, Awaits, ContentIndex, KeyIndex};
use crate::health::Direction;
use crate::history::Loss;
use crate::node::{NoSlab, Node};
use crate::shedding::Verdict;
use crate::stage::{Load, Loaded, StageError};
use crate::state::{NameChange, State};
use crate::tally::Served;
use crate::{CallOptions, GetOutcome, StoreError, ViewOutcome};

/// A copying get holds at most this share of DRAM at a time.
const GET_SHARE: usize = 8;
/// Most bytes that it copies between two looks at its deadline.
const GET_BYTES: usize = 256 << 20;
/// Blocks that prefetch brought up are spared until their first use in this share of DRAM.
const PREFETCHED_SHARE: u64 = 4;
/// How often a read follows a block that moved or was damaged before it is a miss.
const TRIES_MAX: u32 = 4;

/// Who asks: decides what is counted and what stays in DRAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Purpose {
    /// A caller that will use the bytes.
    Use,
    /// The same caller again, for a block that had no room beside the others of its batch.
    Retry,
    /// A hint that somebody will.
    Prefetch,
    /// The store itself, to compare.
    Inspect,
}

/// A block of one read that is not settled yet.
#[derive(Debug, Clone, Copy)]
struct Wanted {
    index: usize,
    key: BlockKey,
    /// Bit per lower stage that failed, or keeps only its name.
    avoid: u8,
    /// A stage that has it was shed while it was asked.
    was_shed: bool,
    tries: u32,
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
    /// The blocks count as requested when they are looked for the first time.
    is_first_look: bool,
    call: Call,
}

impl Reading {
    fn settle(&mut self, wanted: &Wanted, outcome: ViewOutcome) {
        self.outcomes[wanted.index] = Some(outcome);
    }

    /// Gives these up if the deadline has passed.
    fn is_given_up(&mut self, wanted: &[Wanted], clock: &dyn Clock) -> bool {
        if !self.call.is_late(clock) {
            return false;
        }
        for wanted in wanted {
            let late = self.call.timeout_error("read all blocks of a batch");
            self.settle(wanted, ViewOutcome::Failed(late));
        }
        true
    }
}

impl Node {
    pub(crate) fn view(&self, keys: &[BlockKey], options: CallOptions) -> Vec<ViewOutcome> {
        let outcomes = self.read(keys, self.call(options), Purpose::Use);
        self.count_gets(keys.len(), outcomes.iter().map(Served::of_view));
        outcomes
    }

    pub(crate) fn read_to_compare(&self, keys: &[BlockKey], call: Call) -> Vec<ViewOutcome> {
        self.read(keys, call, Purpose::Inspect)
    }

    /// Whether each block's bytes are these; nothing where the block is not here. Counts as
    /// nobody's access, and brings nothing up.
    pub(crate) fn compare(
        &self,
        blocks: &[(BlockKey, &[u8])],
        call: Call,
    ) -> Vec<Result<Option<bool>, StoreError>> {
        let mut results = Vec::with_capacity(blocks.len());
        while results.len() < blocks.len() {
            let rest = &blocks[results.len()..];
            if call.is_late(&*self.clock) {
                let late = || Err(call.timeout_error("compare all blocks of a batch"));
                results.extend(rest.iter().map(|_| late()));
                break;
            }
            let keys: Vec<BlockKey> = rest.iter().take(HOLD_KEYS).map(|(key, _)| *key).collect();
            let step = &keys[..self.step(&keys)];
            for (view, (_, bytes)) in self.read(step, call, Purpose::Inspect).into_iter().zip(rest)
            {
                results.push(match view {
                    ViewOutcome::Hit { slab, .. } => Ok(Some(*slab == **bytes)),
                    ViewOutcome::Miss => Ok(None),
                    ViewOutcome::Failed(error) => Err(error),
                });
            }
        }
        results
    }

    /// Brings blocks up, a step at a time; tells `pace` how many bytes each step was.
    pub(crate) fn prefetch_now(&self, keys: &[BlockKey], pace: &mut dyn FnMut(u64)) {
        let mut rest = keys;
        while !rest.is_empty() {
            let (step, later) = rest.split_at(self.step(rest));
            let views = self.read(step, self.call(CallOptions::default()), Purpose::Prefetch);
            let bytes = views.iter().map(|view| match view {
                ViewOutcome::Hit { slab, .. } => slab.len() as u64,
                ViewOutcome::Miss | ViewOutcome::Failed(_) => 0,
            });
            let bytes = bytes.sum();
            drop(views);
            pace(bytes);
            rest = later;
        }
    }

    pub(crate) fn get(
        &self,
        keys: &[BlockKey],
        buffers: &mut [&mut [u8]],
        options: CallOptions,
    ) -> Vec<GetOutcome> {
        assert_eq!(keys.len(), buffers.len(), "one buffer for each key");
        let call = self.call(options);
        let batch_bytes = buffers.iter().map(|buffer| buffer.len()).sum();
        let mut outcomes = Vec::with_capacity(keys.len());
        while outcomes.len() < keys.len() {
            let at = outcomes.len();
            if call.is_late(&*self.clock) {
                let late = || GetOutcome::Failed(call.timeout_error("get all blocks of a batch"));
                outcomes.extend(keys[at..].iter().map(|_| late()));
                break;
            }
            let step = &keys[at..at + self.step(&keys[at..])];
            let views = self.read(step, call, Purpose::Use);
            for ((key, view), buffer) in step.iter().zip(views).zip(&mut buffers[at..]) {
                // What did not fit beside the others of its step may fit alone.
                let view = match view {
                    ViewOutcome::Failed(StoreError::NoRoom { .. }) => {
                        let mut alone = self.read(&[*key], call, Purpose::Retry);
                        alone.pop().expect("one outcome for one key")
                    }
                    settled => settled,
                };
                outcomes.push(copy_out(view, buffer, batch_bytes));
            }
        }
        self.count_gets(keys.len(), outcomes.iter().map(Served::of_get));
        outcomes
    }

    /// How many of the leading keys to read in one step, so that their blocks take no more than a
    /// share of DRAM; at least one.
    fn step(&self, keys: &[BlockKey]) -> usize {
        let keys = &keys[..keys.len().min(HOLD_KEYS)];
        let most = (self.pool.region().bytes() / GET_SHARE).min(GET_BYTES);
        let mut found = Vec::with_capacity(keys.len());
        let state = self.lock();
        state.catalog.find_batch(keys, &mut found);
        let mut bytes = 0;
        let mut fits = |found: &Option<KeyIndex>| {
            let content = found.map(|key| state.catalog.content(state.catalog.entry(key).content));
            bytes += content.map_or(0, |content| content.bytes as usize);
            bytes <= most
        };
        found.iter().take_while(|found| fits(found)).count().max(1)
    }

    fn read(&self, keys: &[BlockKey], call: Call, purpose: Purpose) -> Vec<ViewOutcome> {
        let outcomes = keys.iter().map(|_| None).collect();
        let is_first_look = purpose == Purpose::Use;
        let purpose = if purpose == Purpose::Retry { Purpose::Use } else { purpose };
        let mut reading = Reading { outcomes, purpose, is_first_look, call };
        let wanted = |(index, key): (usize, &BlockKey)| {
            let key = *key;
            Wanted { index, key, avoid: 0, was_shed: false, tries: 0 }
        };
        let mut wanted: Vec<Wanted> = keys.iter().enumerate().map(wanted).collect();
        // Of the wanted ones in a row, so many only wait for other callers' fetches.
        let mut idle = 0;
        while !wanted.is_empty() {
            // Those that were not looked at yet come before those that have to wait.
            let later = wanted.split_off(wanted.len().min(HOLD_KEYS));
            let state = self.lock();
            let (state, plan) = self.plan(state, &wanted, &mut reading);
            self.release(state);
            idle = if plan.waiting.len() < wanted.len() { 0 } else { idle + wanted.len() };
            let again = self.fetch(plan.fetches, &mut reading);
            wanted = later;
            wanted.extend(again);
            wanted.extend(plan.waiting);
            if reading.is_given_up(&wanted, &*self.clock) {
                break;
            }
            if idle >= wanted.len() && !wanted.is_empty() {
                idle = 0;
                if !self.wait_for_others(&wanted, &mut reading) {
                    break;
                }
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
        state.history.tell_time(now_unix_ms);
        let stamp = state.history.stamp();
        let keys: Vec<BlockKey> = wanted.iter().map(|wanted| wanted.key).collect();
        let mut found = Vec::with_capacity(keys.len());
        state.catalog.find_batch(&keys, &mut found);
        if std::mem::take(&mut reading.is_first_look) && !state.is_closed {
            state.count_direct_requests(&found, now_unix_ms, self.memory_tier());
        }
        let tier = self.tier_name(self.memory_tier());
        let mut plan = Plan::default();
        let mut may_have_changed = state.is_closed;
        for (wanted, mut found) in wanted.iter().zip(found) {
            if state.is_closed {
                reading.settle(wanted, ViewOutcome::Failed(StoreError::Closed));
                continue;
            }
            // Room taken for an earlier block of this batch may have evicted this one.
            let has_expired = |key| state.catalog.entry(key).has_expired(now_unix_ms);
            if may_have_changed || found.is_some_and(has_expired) {
                found = state.find_live(&wanted.key, now_unix_ms);
                may_have_changed = true;
            }
            let Some(key) = found else {
                reading.settle(wanted, ViewOutcome::Miss);
                continue;
            };
            if let Some(slab) = resident(&mut state, key, now, stamp, reading.purpose) {
                reading.settle(wanted, ViewOutcome::Hit { slab, tier });
                continue;
            }
            may_have_changed = true;
            let (again, settled) = self.plan_fetch(state, *wanted, key, &mut plan, reading);
            state = again;
            if let Some(outcome) = settled {
                reading.settle(wanted, outcome);
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
        reading: &mut Reading,
    ) -> (MutexGuard<'a, State>, Option<ViewOutcome>) {
        let (index, shed) = (state.catalog.entry(key).content, state.shed);
        let content = state.catalog.content_mut(index);
        if content.is_loading {
            plan.waiting.push(wanted);
            return (state, None);
        }
        let Some((stage, address)) = content.fastest_lower_but(wanted.avoid | shed) else {
            let is_shed = wanted.was_shed || content.fastest_lower_but(wanted.avoid).is_some();
            // A failure of a stage that has the block, if there was one, is told already.
            let told = reading.outcomes[wanted.index].take();
            if told.is_none() && is_shed && reading.purpose == Purpose::Use {
                state.counters.shed_gets += 1;
            }
            return (state, Some(told.unwrap_or(ViewOutcome::Miss)));
        };
        content.is_loading = true;
        let (bytes, generation) = (content.bytes as usize, content.generation);
        let holds_some = !plan.fetches.is_empty();
        let (again, slab) = self.take_slab(state, bytes, holds_some, None, reading.call);
        state = again;
        match slab {
            Ok(mut slab) => {
                let from = Source { content: index, generation, stage, address };
                // The kernel may write into the slab after this process was killed.
                self.note_load(&mut slab);
                plan.fetches.push(Fetch { wanted, from, slab });
                (state, None)
            }
            Err(why) => {
                if let Some(content) = state.catalog.live_content((index, generation)) {
                    content.is_loading = false;
                }
                if holds_some {
                    plan.waiting.push(wanted);
                    return (state, None);
                }
                if why == NoSlab::Erasing {
                    return (state, Some(ViewOutcome::Miss));
                }
                let error = self.no_slab_error(&state, why, bytes, reading.call);
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
            let time = reading.call.deadline.remaining(&*self.clock);
            let loaded = self.stages[stage].load(loads, reading.call.deadline);
            let verdict = Verdict::of_load(&loaded, time >= self.config.health.probe_timeout);
            let now_unix_ms = self.clock.unix_ms();
            let mut state = self.lock();
            self.judge(&mut state, stage, Direction::Reads, verdict);
            state.history.tell_time(now_unix_ms);
            for ((mut wanted, from), loaded) in places.into_iter().zip(loaded) {
                state.slabs_out -= 1;
                if !self.settle(&mut state, &mut wanted, from, loaded, reading) {
                    again.push(wanted);
                }
            }
            self.release(state);
            self.announce_change();
        }
        again
    }

    /// Enters what a stage answered. False: the block has to be looked up again.
    fn settle(
        &self,
        state: &mut State,
        wanted: &mut Wanted,
        from: Source,
        loaded: Loaded,
        reading: &mut Reading,
    ) -> bool {
        if let Some(content) = state.catalog.live_content(from.place()) {
            content.is_loading = false;
        }
        let tier = self.tier_name(1 + from.stage);
        match loaded {
            Loaded::Hit(slab) => {
                let slab = slab.seal();
                self.promote(state, wanted, from, &slab, reading.purpose);
                reading.settle(wanted, ViewOutcome::Hit { slab, tier });
                return true;
            }
            // What is slow is not asked twice: a slower stage would be later still.
            Loaded::Failed(StageError::Timeout) => {
                let late = reading.call.timeout_error("read from a tier");
                reading.settle(wanted, ViewOutcome::Failed(late));
                return true;
            }
            Loaded::Failed(StageError::Shed) => {
                wanted.avoid |= 1 << from.stage;
                wanted.was_shed = true;
            }
            Loaded::Failed(error) => {
                wanted.avoid |= 1 << from.stage;
                let (operation, source) = ("read a block", std::sync::Arc::new(error));
                let failure = StoreError::Tier { tier, operation, source };
                reading.settle(wanted, ViewOutcome::Failed(failure));
            }
            Loaded::Gone if self.stages[from.stage].keeps_names_only() => {
                wanted.avoid |= 1 << from.stage;
            }
            Loaded::Gone => forget_name(state, wanted, from),
            Loaded::Damaged => {
                state.counters.damaged_blocks += 1;
                forget_address(state, from, Loss::Damaged);
            }
        }
        wanted.tries += 1;
        if wanted.tries >= TRIES_MAX {
            let told = reading.outcomes[wanted.index].take();
            reading.settle(wanted, told.unwrap_or(ViewOutcome::Miss));
        }
        wanted.tries >= TRIES_MAX
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
        // Only if the key still names this content and the content still lies there: the stage was
        // asked by key, and that may have come to mean other bytes meanwhile.
        let named = state.catalog.find(&wanted.key);
        let names_it = |key: &KeyIndex| state.catalog.entry(*key).content == from.content;
        let Some(key) = named.filter(names_it) else { return };
        let stamp = state.history.stamp();
        let Some(content) = state.catalog.live_content(from.place()) else { return };
        let has_moved = content.address(from.stage) != Some(from.address);
        if has_moved || purpose == Purpose::Inspect {
            return;
        }
        content.referenced |= 1 << from.stage;
        if purpose == Purpose::Use {
            content.note_use(stamp);
        }
        if !self.pipeline.has_dram || !state.eviction.policy().promotes_hits() {
            return;
        }
        state.counters.promoted_blocks += 1;
        state.counters.promoted_bytes += slab.len() as u64;
        let now = self.policy_now(state);
        state.put_slab(from.content, slab.clone(), None);
        state.make_resident(key, now);
        if state.catalog.content(from.content).key_count > 1 {
            // A pin holds the content whichever of its names brought it up.
            for other in state.catalog.keys_of(from.content) {
                if state.catalog.entry(other).pins > 0 {
                    state.make_resident(other, now);
                }
            }
        }
        if purpose == Purpose::Prefetch {
            state.counters.prefetched_blocks += 1;
            state.spare_prefetched(key, self.config.dram_bytes / PREFETCHED_SHARE);
        } else {
            state.catalog.entry_mut(key).awaits = Awaits::Nothing;
        }
    }

    /// Waits for other callers' fetches. False when the deadline passed.
    fn wait_for_others(&self, wanted: &[Wanted], reading: &mut Reading) -> bool {
        let (state, in_time) = self.wait_changed(self.lock(), reading.call);
        drop(state);
        if !in_time {
            for wanted in wanted {
                let late = reading.call.timeout_error("wait for another reader's fetch");
                reading.settle(wanted, ViewOutcome::Failed(late));
            }
        }
        in_time
    }
}

fn resident(
    state: &mut State,
    key: KeyIndex,
    now: std::time::Duration,
    stamp: u32,
    purpose: Purpose,
) -> Option<Slab> {
    let content = state.catalog.entry(key).content;
    let content = state.catalog.content_mut(content);
    let slab = content.slab.clone()?;
    if purpose == Purpose::Use {
        content.note_use(stamp);
        state.touch(key, now);
    }
    Some(slab)
}

/// The block's bytes are no longer where the catalog says: the address goes, for all its names.
fn forget_address(state: &mut State, from: Source, why: Loss) {
    let Some(content) = state.catalog.live_content(from.place()) else { return };
    if content.address(from.stage) == Some(from.address) {
        state.clear_address(from.content, from.stage);
        for key in state.catalog.keys_of(from.content) {
            let name = state.catalog.entry(key).key;
            state.push_name(from.stage, NameChange::Remove(name, from.address));
        }
        state.forget_if_nowhere(from.content, why);
    }
}

/// The stage does not know the block under this name. If it is the only one, the bytes are gone.
/// If there are others, the name may be on its way to the stage; else this name alone goes.
fn forget_name(state: &mut State, wanted: &Wanted, from: Source) {
    let Some(content) = state.catalog.live_content(from.place()) else { return };
    if content.address(from.stage) != Some(from.address) {
        return;
    }
    if content.key_count == 1 {
        return forget_address(state, from, Loss::Vanished);
    }
    let tickets = state.names_tickets[from.stage];
    if tickets.settled == tickets.pushed
        && let Some(key) = state.catalog.find(&wanted.key)
        && state.catalog.entry(key).content == from.content
    {
        state.forget(key, Loss::Vanished);
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
