//! The part of a read call that sources serve: locate, fetch, verify, keep.
//!
//! Sources are called on their own threads, while the caller's thread reads from the tiers of the
//! store. Blocks come back through the call's [`Arrivals`] in any order.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use cascade_runtime::Deadline;
use cascade_tier::ViewOutcome;
use cascade_tier::tier::{BlockFacts, Load, LoadOutcome, TierError};
use cascade_tier::{StoreError, TierName};

use crate::calls::arrivals::{Arrivals, FetchQueue, FetchSide, FetchTask, end_call};
use crate::calls::sources::{Locate, LocateRound, note_source};
use crate::core::health_signal::HealthSignal;
use crate::core::located::FoundBlock;
use crate::core::state::StoreState;
use crate::shared::StoreCore;
use crate::shared::call_counts::at;
use crate::shared::room::{AllocationFailure, Room};
use crate::stages::source_guard::SourceCall;

use super::promotion::keep_fetched;
use super::{PendingRead, ReadCall, ReadFlow, ReadPurpose, is_long_enough};

/// Blocks that are planned in one hold of the lock.
const PLANNED_MAX: usize = 64;
/// What a block that is planned or has arrived costs a hold of the lock, in keys looked up.
const BLOCK_COST: u32 = 4;

/// What sources do for a read call.
#[derive(Debug, Default)]
pub(in crate::calls) struct SourceReads {
    /// Blocks that are not in the catalog, to be located.
    absent: Vec<PendingRead>,
    /// The question under way, with the blocks that no source has named yet.
    round: Option<(LocateRound, Vec<Option<PendingRead>>)>,
    rounds: u64,
    /// Located blocks without a slab.
    found: VecDeque<(PendingRead, FoundBlock)>,
    /// Blocks with a slab that no call to their source has yet, by source.
    tasks: Vec<VecDeque<FetchTask>>,
    /// Fetches in flight, by their number. No number is used twice: a late result of a cancelled
    /// call must not be taken for that of another block.
    fetches: BTreeMap<usize, Fetching>,
    next_number: usize,
    /// The call to each source that takes blocks.
    calls: Vec<Option<(SourceCall, Arc<FetchQueue>)>>,
    arrivals: Arc<Arrivals>,
    /// Whether a time-out is a failure of the source.
    is_long_enough: bool,
}

/// A fetch in flight.
#[derive(Debug, Clone, Copy)]
struct Fetching {
    pending: PendingRead,
    found: FoundBlock,
    /// Its number in the state of the store.
    mark: u64,
}

impl SourceReads {
    fn is_active(&self) -> bool {
        let is_idle = self.absent.is_empty() && self.round.is_none() && self.found.is_empty();
        !is_idle || !self.fetches.is_empty()
    }
}

impl ReadFlow<'_, '_> {
    /// Whether sources locate or fetch blocks for this call.
    pub(super) fn has_source_work(&self) -> bool {
        self.sources.as_ref().is_some_and(|sources| sources.is_active())
    }
}

impl ReadCall<'_, '_, '_> {
    /// Decides a block that is not in the catalog: a miss, unless a source may have it.
    pub(super) fn plan_absent(&mut self, state: &mut StoreState, pending: PendingRead) {
        let (core, flow) = (self.core, &mut *self.flow);
        let is_left = !core.sources.is_empty()
            && pending.asked != core.sources.mask()
            && flow.purpose != ReadPurpose::Compare
            // Such a call does only what needs no waiting.
            && !flow.call.is_immediate();
        if is_left && state.fetching.contains(&pending.key) {
            return flow.waiting.push(pending);
        }
        if is_left {
            let is_long_enough = is_long_enough(core, flow.call);
            let new = || Box::new(SourceReads { is_long_enough, ..SourceReads::default() });
            return flow.sources.get_or_insert_with(new).absent.push(pending);
        }
        // If a source that has the block failed, the outcome is that failure, not a miss.
        let failure = flow.outcomes[pending.index].take();
        if failure.is_none() && pending.circuit_opened && flow.purpose == ReadPurpose::Use {
            state.counters.shed_gets += 1;
        }
        flow.settle(&pending, failure.unwrap_or(ViewOutcome::Miss));
    }

    /// Reads from sources until something has arrived, or other blocks can be read. Returns true if
    /// there is nothing else to read.
    pub(super) fn read_from_sources(&mut self) -> bool {
        // Other blocks first, as far as there is memory for them.
        let has_other =
            !self.flow.queued.is_empty() && !self.flow.is_full() && !self.flow.is_blocked;
        self.run_sources(!has_other);
        // Other callers may have fetched these meanwhile.
        self.flow.queued.extend(std::mem::take(&mut self.flow.waiting));
        self.flow.copy_resident(usize::MAX);
        self.flow.give_views();
        if self.flow.call.has_timed_out(&*self.core.clock) {
            self.end_sources();
        }
        self.flow.queued.is_empty() && self.flow.has_source_work()
    }

    /// Takes what the sources have sent, and gives them more to do. With `may_wait`, waits for
    /// memory if the call holds none, or for something to arrive.
    pub(super) fn run_sources(&mut self, may_wait: bool) {
        let (core, flow) = (self.core, &mut *self.flow);
        let Some(mut reads) = flow.sources.take() else { return };
        let mut work = SourceWork { core, reads: &mut reads, flow: &mut *flow };
        work.take_arrivals();
        work.end_unusable_calls();
        work.locate_absent();
        work.plan_found(may_wait);
        work.start_fetches();
        let is_waiting = reads.round.is_some() || !reads.fetches.is_empty();
        let is_idle = flow.queued.is_empty() || flow.is_full() || flow.is_blocked;
        if may_wait && is_waiting && is_idle {
            let round = reads.round.as_ref().map(|(round, _)| round.until.time());
            let until = round
                .map_or(flow.call.deadline.time(), |round| round.min(flow.call.deadline.time()));
            reads.arrivals.wait(Deadline::at(until), &*core.clock);
            SourceWork { core, reads: &mut reads, flow: &mut *flow }.take_arrivals();
        }
        flow.sources = Some(reads);
    }

    /// Ends the calls to sources, after the read. Blocks without an outcome have timed out.
    pub(super) fn end_sources(&mut self) {
        let (core, flow) = (self.core, &mut *self.flow);
        let Some(mut reads) = flow.sources.take() else { return };
        let arrived = reads.arrivals.abandon();
        let mut work = SourceWork { core, reads: &mut reads, flow: &mut *flow };
        work.settle_fetched(arrived.ended);
        let numbers: Vec<usize> = reads.fetches.keys().copied().collect();
        let late = |number| (number, LoadOutcome::Failed(TierError::Timeout));
        reads.tasks.clear();
        for (_, queue) in reads.calls.drain(..).flatten() {
            drop(queue.end());
        }
        let mut work = SourceWork { core, reads: &mut reads, flow: &mut *flow };
        work.settle_fetched(numbers.into_iter().map(late).collect());
        let unplaced = reads.round.take().map(|(_, unplaced)| unplaced);
        let unplaced = unplaced.into_iter().flatten().flatten();
        let found = reads.found.drain(..).map(|(pending, _)| pending);
        for pending in reads.absent.drain(..).chain(unplaced).chain(found) {
            let late = flow.call.timeout_error("read a block from a source");
            flow.settle(&pending, ViewOutcome::Failed(late));
        }
        flow.fail_rest("read all blocks of a batch");
    }
}

/// What a read call does with its sources.
struct SourceWork<'f, 'a, 'b> {
    core: &'f StoreCore,
    reads: &'f mut SourceReads,
    flow: &'f mut ReadFlow<'a, 'b>,
}

impl SourceWork<'_, '_, '_> {
    fn take_arrivals(&mut self) {
        let core = self.core;
        let arrived = self.reads.arrivals.take();
        self.settle_fetched(arrived.ended);
        let Some((round, unplaced)) = &mut self.reads.round else { return };
        for (place, found) in round.apply(core, arrived.answers) {
            // None if a faster source has it, too.
            let Some(pending) = unplaced[place].take() else { continue };
            self.reads.found.push_back((pending, found));
        }
        if round.is_over() {
            for mut pending in unplaced.drain(..).flatten() {
                pending.asked = core.sources.mask();
                self.flow.queued.push_back(pending);
            }
            self.reads.round = None;
        }
    }

    /// Ends the calls to sources whose circuits have opened. Their blocks are looked up elsewhere.
    fn end_unusable_calls(&mut self) {
        let core = self.core;
        for source in 0..self.reads.calls.len() {
            let is_unusable = core.sources.list[source].is_unusable();
            let is_ended = |(call, _): &(SourceCall, _)| is_unusable || call.is_refused();
            if self.reads.calls[source].as_ref().is_some_and(is_ended) {
                let (_, queue) = self.reads.calls[source].take().expect("the guard has checked it");
                drop(queue.end());
                self.fail_fetches(source, &TierError::CircuitOpen);
            }
        }
    }

    /// Fails all blocks in flight from one source.
    fn fail_fetches(&mut self, source: usize, error: &TierError) {
        let of_source = self.reads.fetches.iter().filter(|(_, it)| it.found.source == source);
        let failed = |(number, _): (&usize, _)| (*number, LoadOutcome::Failed(error.clone()));
        let failed = of_source.map(failed).collect();
        self.settle_fetched(failed);
    }

    /// Finds hints of lookups for the absent blocks, and asks the sources about the others.
    fn locate_absent(&mut self) {
        let (core, reads, flow) = (self.core, &mut *self.reads, &mut *self.flow);
        if reads.absent.is_empty() {
            return;
        }
        let now = core.clock.monotonic();
        let unknown = core.sources.with_hints(|hints| {
            let mut unknown = Vec::new();
            for pending in reads.absent.drain(..) {
                let hint = hints.get(&pending.key, now);
                match hint.filter(|hint| pending.asked & (1 << hint.source) == 0) {
                    Some(found) => reads.found.push_back((pending, found)),
                    None => unknown.push(pending),
                }
            }
            unknown
        });
        // One question at a time: the next one has all blocks that were found absent meanwhile.
        if unknown.is_empty() || reads.round.is_some() {
            reads.absent = unknown;
            return;
        }
        let wanted: Vec<_> = unknown.iter().map(|pending| (pending.key, pending.asked)).collect();
        reads.rounds += 1;
        let locate = Locate { core, call: flow.call };
        let round = locate.start(&wanted, (reads.rounds, &reads.arrivals));
        reads.round = Some((round, unknown.into_iter().map(Some).collect()));
    }

    /// Allocates slabs for located blocks, as far as the call may hold them.
    fn plan_found(&mut self, may_wait: bool) {
        let (core, reads, flow) = (self.core, &mut *self.reads, &mut *self.flow);
        while !reads.found.is_empty() && !flow.is_full() && !flow.is_blocked() {
            let Some(mut state) = core.lock_within(PLANNED_MAX, flow.call) else { return };
            let now_unix_ms = core.clock.unix_ms();
            while !state.is_hold_full() && !flow.is_full() && !flow.is_blocked() {
                let Some((mut pending, found)) = reads.found.pop_front() else { break };
                state.charge(BLOCK_COST);
                let FoundBlock { source, block, .. } = found;
                if state.is_closed {
                    flow.settle(&pending, ViewOutcome::Failed(StoreError::Closed));
                    continue;
                }
                if state.fetching.contains(&pending.key) {
                    flow.waiting.push(pending);
                    continue;
                }
                // Another caller has put or fetched it.
                if state.find_live(&pending.key, now_unix_ms).is_some() {
                    flow.queued.push_back(pending);
                    continue;
                }
                if has_expired(&block.facts, now_unix_ms) {
                    pending.asked |= 1 << source;
                    reads.absent.push(pending);
                    continue;
                }
                let mark = state.fetching.begin(pending.key);
                let holds_some = flow.holds_some() || !may_wait;
                let room = Room::new(core, flow.call);
                let bytes = block.facts.bytes as usize;
                let (again, slab) = room.allocate(state, bytes, holds_some, None);
                state = again;
                match slab {
                    Ok(slab) => {
                        flow.held_bytes += bytes;
                        let number = reads.next_number;
                        reads.next_number += 1;
                        reads.fetches.insert(number, Fetching { pending, found, mark });
                        let load = Load { key: pending.key, address: block.address, slab };
                        let task = FetchTask { number, load, checksum: block.checksum };
                        at_source(&mut reads.tasks, source).push_back(task);
                    }
                    Err(failure) => {
                        state.fetching.end(&pending.key, mark);
                        // The slabs of this call may be the reason: look again after its reads.
                        if holds_some && failure != AllocationFailure::TooLarge {
                            flow.is_blocked = true;
                            reads.found.push_front((pending, found));
                        } else if failure == AllocationFailure::Erasing {
                            flow.settle(&pending, ViewOutcome::Miss);
                        } else {
                            let error = room.error(&state, failure, bytes);
                            flow.settle(&pending, ViewOutcome::Failed(error));
                        }
                    }
                }
            }
            core.unlock(state);
        }
    }

    /// Passes planned blocks to the calls of their sources, and starts calls where none runs.
    fn start_fetches(&mut self) {
        let core = self.core;
        for source in 0..core.sources.list.len() {
            let mut tasks = std::mem::take(at_source(&mut self.reads.tasks, source));
            let running = at_source(&mut self.reads.calls, source).take();
            if let Some((call, queue)) = running {
                tasks = queue.add(tasks);
                match queue.take_rest() {
                    None => self.reads.calls[source] = Some((call, queue)),
                    Some((rest, true)) => tasks.extend(rest),
                    // It would take nothing of the next call, either.
                    Some((rest, false)) if !rest.is_empty() => {
                        drop((rest, tasks));
                        self.fail_fetches(source, &TierError::NoResult);
                        continue;
                    }
                    Some(_) => {}
                }
            }
            if tasks.is_empty() {
                continue;
            }
            let queue = Arc::new(FetchQueue::new(tasks));
            let side = FetchSide::new(&queue, &self.reads.arrivals);
            let (of_call, arrivals) = (Arc::clone(&queue), Arc::clone(&self.reads.arrivals));
            let end = move || end_call(&of_call, &arrivals);
            let started =
                core.sources.list[source].start_fetching(side, self.flow.call.deadline, end);
            match started {
                Ok(call) => self.reads.calls[source] = Some((call, queue)),
                Err(error) => {
                    drop(queue.end());
                    self.fail_fetches(source, &error);
                }
            }
        }
    }

    /// Applies fetches that ended.
    fn settle_fetched(&mut self, ended: Vec<(usize, LoadOutcome)>) {
        let core = self.core;
        if ended.is_empty() {
            return;
        }
        let mut signals = vec![HealthSignal::None; core.sources.list.len()];
        let now_unix_ms = core.clock.unix_ms();
        let mut state = core.lock_for(ended.len());
        state.history.set_time(now_unix_ms);
        let mut unhinted = Vec::new();
        for (number, outcome) in ended {
            // None for a result after the circuit of the source has opened.
            let Some(fetching) = self.reads.fetches.remove(&number) else { continue };
            state = core.end_full_hold(state);
            state.charge(BLOCK_COST);
            state.memory.slabs_in_flight -= 1;
            self.flow.held_bytes -= fetching.found.block.facts.bytes as usize;
            let signal =
                HealthSignal::of_load(std::iter::once(&outcome), self.reads.is_long_enough);
            signals[fetching.found.source].add(signal);
            unhinted.push(fetching.pending.key);
            self.settle_one(&mut state, fetching, outcome);
        }
        self.flow.is_blocked = false;
        core.unlock(state);
        // Others wait for these blocks, and for the slabs that were not kept.
        core.notify_changed();
        core.sources.with_hints(|hints| unhinted.iter().for_each(|key| hints.remove(key)));
        for (source, signal) in signals.into_iter().enumerate() {
            note_source(core, source, signal);
        }
    }

    fn settle_one(&mut self, state: &mut StoreState, fetching: Fetching, outcome: LoadOutcome) {
        let (core, flow) = (self.core, &mut *self.flow);
        let Fetching { mut pending, found, mark } = fetching;
        let may_keep = state.fetching.end(&pending.key, mark);
        let source = &core.sources.list[found.source];
        pending.asked |= 1 << found.source;
        match outcome {
            LoadOutcome::Hit(slab) => {
                source.count(|counts| {
                    counts.fetched += 1;
                    counts.fetched_bytes += slab.len() as u64;
                });
                // Another caller has put it meanwhile: the bytes of the own catalog count.
                if state.catalog.find(&pending.key).is_some() {
                    return flow.queued.push_back(pending);
                }
                let slab = slab.seal();
                slab.verify_checksum(found.block.checksum);
                if may_keep {
                    keep_fetched(core, state, &found, &slab, flow.purpose);
                }
                if !found.is_matched && !flow.is_load && flow.purpose == ReadPurpose::Use {
                    state.counters.direct_matched += 1;
                    *at(&mut state.source_matches, found.source) += 1;
                }
                return flow.settle_resident(&pending, slab, source_name(core, found.source));
            }
            LoadOutcome::Gone => source.count(|counts| counts.stale += 1),
            LoadOutcome::Damaged => {
                state.counters.damaged_blocks += 1;
                source.count(|counts| counts.damaged += 1);
            }
            LoadOutcome::Failed(error) => {
                source.count(|counts| counts.failed += 1);
                if matches!(error, TierError::CircuitOpen) {
                    pending.circuit_opened = true;
                } else if flow.call.has_timed_out(&*core.clock) {
                    let late = flow.call.timeout_error("read a block from a source");
                    return flow.settle(&pending, ViewOutcome::Failed(late));
                } else {
                    // The outcome only if no other source has the block.
                    let (tier, operation) = (source_name(core, found.source), "fetch a block");
                    let failure = StoreError::Tier { tier, operation, source: Arc::new(error) };
                    flow.settle(&pending, ViewOutcome::Failed(failure));
                }
            }
        }
        flow.queued.push_back(pending);
    }
}

fn source_name(core: &StoreCore, source: usize) -> TierName {
    core.tier_name(1 + core.stages.len() + source)
}

fn has_expired(facts: &BlockFacts, now_unix_ms: u64) -> bool {
    facts.expires_unix_ms.is_some_and(|expires| expires <= now_unix_ms)
}

fn at_source<T: Default>(list: &mut Vec<T>, source: usize) -> &mut T {
    if source >= list.len() {
        list.resize_with(source + 1, T::default);
    }
    &mut list[source]
}
