//! The second half of a lookup: what the own catalog does not have, outside of the lock.

use std::sync::Arc;

use cascade_block::BlockKey;
use cascade_runtime::Deadline;
use cascade_tier::source::LocatedBlock;
use cascade_tier::tier::TierError;

use crate::calls::arrivals::{Arrivals, LocateAnswer};
use crate::core::health_signal::HealthSignal;
use crate::core::located::FoundBlock;
use crate::shared::StoreCore;
use crate::shared::call::CallContext;
use crate::shared::call_counts::CallCounts;
use crate::shared::hold::KEYS_PER_HOLD;
use crate::stages::source_guard::{GuardedSource, SourceCall};

/// What the own catalog knows of a block of a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum KnownBlock {
    /// Nothing.
    Absent,
    /// Its fastest tier.
    In(usize),
    /// It cannot be read now.
    Unreadable,
}

/// A question to all sources which of some blocks they have.
#[derive(Debug)]
pub(super) struct LocateRound {
    /// Distinguishes its answers from those of earlier rounds of the same call.
    number: u64,
    /// The calls that have no answer yet, by source, with the places of their keys.
    calls: Vec<Option<(SourceCall, Vec<usize>)>>,
    pub(super) until: Deadline,
    /// Whether no answer is a failure of the source.
    is_long_enough: bool,
}

impl LocateRound {
    /// Whether all sources have answered, or will not.
    pub(super) fn is_over(&self) -> bool {
        self.calls.iter().all(Option::is_none)
    }

    /// Applies answers. Returns the blocks that were found, with their places, and ends the calls
    /// that will not answer.
    pub(super) fn apply(
        &mut self,
        core: &StoreCore,
        answers: Vec<((u64, usize), LocateAnswer)>,
    ) -> Vec<(usize, FoundBlock)> {
        let mut found = Vec::new();
        for ((round, at), answer) in answers {
            // The answer of an earlier round was too late.
            if round != self.number {
                continue;
            }
            let Some((_, places)) = self.calls[at].take() else { continue };
            let source = &core.sources.list[at];
            let error = answer.as_ref().err();
            note_source(core, at, HealthSignal::of([error].into_iter(), self.is_long_enough));
            let blocks = answer.into_iter().flatten().zip(places);
            let located = |(block, place): (Option<LocatedBlock>, usize)| {
                Some((place, FoundBlock { source: at, block: block?, is_matched: false }))
            };
            let before = found.len();
            found.extend(blocks.filter_map(located));
            source.count(|counts| counts.located += (found.len() - before) as u64);
        }
        let is_late = self.until.has_passed(&*core.clock);
        for (at, asked) in self.calls.iter_mut().enumerate() {
            let Some((call, _)) = asked else { continue };
            if is_late {
                let timeout = Some(&TierError::Timeout);
                note_source(core, at, HealthSignal::of([timeout].into_iter(), self.is_long_enough));
            }
            if is_late || call.is_refused() || core.sources.list[at].is_unusable() {
                *asked = None;
            }
        }
        found
    }
}

/// Asks the sources for a call.
#[derive(Debug, Clone, Copy)]
pub(super) struct Locate<'a> {
    pub(super) core: &'a StoreCore,
    pub(super) call: CallContext,
}

impl Locate<'_> {
    /// Asks all sources which of these blocks they have, but not those whose bits are set beside
    /// the key.
    pub(super) fn start(
        self,
        wanted: &[(BlockKey, u8)],
        (number, arrivals): (u64, &Arc<Arrivals>),
    ) -> LocateRound {
        let Self { core, call } = self;
        let most = Deadline::after(&*core.clock, core.config.locate_timeout);
        let until = Deadline::at(call.deadline.time().min(most.time()));
        let probe_timeout = core.config.health.probe_timeout;
        let is_long_enough = until.remaining(&*core.clock) >= probe_timeout;
        let ask = |(at, source): (usize, &GuardedSource)| {
            let is_wanted = |place: &usize| wanted[*place].1 & (1 << at) == 0;
            let places: Vec<usize> = (0..wanted.len()).filter(is_wanted).collect();
            if places.is_empty() {
                return None;
            }
            let keys = places.iter().map(|place| wanted[*place].0).collect();
            let arrivals = Arc::clone(arrivals);
            let answer = move |located| arrivals.add_answer((number, at), located);
            // None while its circuit is open: the source counts as empty.
            Some((source.start_locating(keys, until, answer).ok()?, places))
        };
        let calls = core.sources.list.iter().enumerate().map(ask).collect();
        LocateRound { number, calls, until, is_long_enough }
    }

    /// What the own catalog knows of blocks. Notes those that can be read as matched.
    fn known_blocks(self, keys: &[BlockKey]) -> Vec<KnownBlock> {
        let now_unix_ms = self.core.clock.unix_ms();
        let mut known = Vec::with_capacity(keys.len());
        self.core.in_holds(Some(self.call), keys, |state, key| {
            let found = state.catalog.find(key).filter(|_| !state.is_closed);
            let live = found.filter(|key| !state.catalog.entry(*key).has_expired(now_unix_ms));
            let Some(key) = live else { return known.push(KnownBlock::Absent) };
            let content = state.catalog.content(state.catalog.entry(key).content);
            let lower = content.fastest_stage_except(state.open_read_circuits);
            let lower = lower.map(|stage| 1 + stage);
            let tier = if content.slab.is_some() { Some(0) } else { lower };
            known.push(tier.map_or(KnownBlock::Unreadable, KnownBlock::In));
            if tier.is_some() {
                state.catalog.entry_mut(key).note_matched();
            }
        });
        // Beyond the deadline nothing is known, and nothing is asked.
        known.resize(keys.len(), KnownBlock::Unreadable);
        known
    }

    /// Asks the sources, and waits until each block is found or each source has answered.
    fn wait_for(self, wanted: &[(BlockKey, u8)]) -> Vec<Option<FoundBlock>> {
        let mut found = vec![None; wanted.len()];
        let arrivals = Arc::default();
        let mut round = self.start(wanted, (0, &arrivals));
        loop {
            for (at, block) in round.apply(self.core, arrivals.take().answers) {
                found[at].get_or_insert(block);
            }
            if round.is_over() || found.iter().all(Option::is_some) {
                return found;
            }
            arrivals.wait(round.until, &*self.core.clock);
        }
    }
}

/// Records what a call says about the health of a source.
pub(super) fn note_source(core: &StoreCore, at: usize, signal: HealthSignal) {
    if core.sources.list[at].note(signal) {
        core.wake_probers();
    }
}

/// Matches the blocks of a chain behind the first `matched` ones, which the own catalog has: as
/// long as a tier or a source has the next one. Returns their tiers.
pub(super) fn match_in_sources(
    core: &StoreCore,
    keys: &[BlockKey],
    matched: usize,
    call: CallContext,
) -> Vec<usize> {
    let rest = &keys[matched..];
    if core.sources.is_empty() || rest.is_empty() {
        return Vec::new();
    }
    let locate = Locate { core, call };
    // After a gap, blocks may be in the own catalog again.
    let known = locate.known_blocks(rest);
    let is_absent = |at: &usize| known[*at] == KnownBlock::Absent;
    let absent: Vec<usize> = (0..rest.len()).filter(is_absent).collect();
    let wanted: Vec<_> = absent.iter().map(|at| (rest[*at], 0)).collect();
    let mut found: Vec<Option<FoundBlock>> = vec![None; rest.len()];
    for (at, block) in absent.iter().zip(locate.wait_for(&wanted)) {
        found[*at] = block;
    }
    let tier = |(known, found): (&KnownBlock, &Option<FoundBlock>)| match known {
        KnownBlock::In(tier) => Some(*tier),
        KnownBlock::Absent => found.map(|found| 1 + core.stages.len() + found.source),
        KnownBlock::Unreadable => None,
    };
    let tiers: Vec<usize> = known.iter().zip(&found).map_while(tier).collect();
    found.truncate(tiers.len());
    let now = core.clock.monotonic();
    for part in found.chunks(KEYS_PER_HOLD) {
        core.sources.with_hints(|hints| {
            for block in part.iter().flatten() {
                hints.add(FoundBlock { is_matched: true, ..*block }, now);
            }
        });
    }
    count_later_matches(core, &tiers);
    tiers
}

fn count_later_matches(core: &StoreCore, tiers: &[usize]) {
    let mut counts = CallCounts::default();
    counts.counters.blocks_matched = tiers.len() as u64;
    for tier in tiers {
        counts.count_match(*tier, core.stages.len());
    }
    core.count_call(&counts);
}
