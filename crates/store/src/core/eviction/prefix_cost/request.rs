//! A request for a chain: its blocks leave their units and enter new ones.
//!
//! All blocks leave before the new units are counted, also if the request takes several holds of
//! the store's lock: the counts of the cells, and the order in which cells are made, are those of a
//! request in one hold. A block is always in one unit: it moves to the new one when it leaves the
//! former one, and the new one is *held* and not counted until all blocks have left.

use super::cells::NONE;
use super::features::{RequestShape, apply_hints, fan_bucket, features};
use super::mark::{FAN_MAX, Mark};
use super::{
    BlockTable, ChainPart, Hints, Look, PENDING_MAX, PENDING_MIN, PrefixCost, Slot, Visits,
};

/// How far a request is.
#[derive(Debug, Default)]
pub(in crate::core::eviction) struct ChainReuse {
    phase: Phase,
    /// The next block of the phase.
    at: usize,
    /// Marks of known blocks that are not resident, taken out of the ghosts: they are about to be
    /// inserted.
    taken: Vec<Mark>,
    /// Marks of the leading known blocks, before the request.
    known: Vec<Mark>,
    shape: Option<RequestShape>,
    /// Blocks that left a unit and are not counted yet: the unit and their number.
    left: Option<(u32, u32)>,
    runs: Vec<Run>,
    /// The next run to enter.
    entered: usize,
    is_run_counted: bool,
    /// The first block that joins a unit and is not resident.
    first_missing: Option<usize>,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Phase {
    #[default]
    Ghosts,
    Leave,
    Enter,
    Done,
}

/// Blocks of a chain with the same bucket of divergences: one unit.
#[derive(Debug, Clone, Copy)]
struct Run {
    begin: usize,
    end: usize,
    /// Divergences below its first block.
    fan: u8,
    /// `NONE` if no block joins it.
    unit: u32,
}

/// How far hints for a chain are.
#[derive(Debug, Default)]
pub(in crate::core::eviction) struct HintProgress {
    has_begun: bool,
    /// The next block.
    at: usize,
    /// Number of leading known blocks.
    known: usize,
    last: Option<Mark>,
    /// Time and blocks of the request that used the last known block.
    latest: Option<(f64, u32)>,
    /// The unit that was handled last.
    unit: Option<u32>,
}

impl ChainReuse {
    pub(super) fn memory_bytes(&self) -> usize {
        (self.taken.capacity() + self.known.capacity()) * size_of::<Mark>()
            + self.runs.capacity() * size_of::<Run>()
    }

    /// An empty one with the same memory.
    fn emptied(mut self) -> Self {
        self.taken.clear();
        self.known.clear();
        self.runs.clear();
        Self { taken: self.taken, known: self.known, runs: self.runs, ..Self::default() }
    }

    fn fan(&self, at: usize, shape: &RequestShape) -> u8 {
        let fan = self.known.get(at).map_or(0, |mark| mark.fan());
        if shape.diverges && at < shape.known { (fan + 1).min(FAN_MAX) } else { fan }
    }

    /// Extends the last run to the current block, or begins another one: for each run of blocks
    /// with the same bucket of divergences. Returns the run.
    fn extend_runs(&mut self, shape: &RequestShape) -> &mut Run {
        let fan = self.fan(self.at, shape);
        let end = self.at + 1;
        match self.runs.last_mut() {
            Some(run) if fan_bucket(run.fan) == fan_bucket(fan) => run.end = end,
            _ => self.runs.push(Run { begin: self.at, end, fan, unit: NONE }),
        }
        self.runs.last_mut().expect("there is at least the one that was pushed")
    }

    /// The mark of a block after the request.
    fn mark(&self, unit: u32, at: usize, shape: &RequestShape) -> Mark {
        let had_child = self.known.get(at).is_some_and(|mark| mark.has_child());
        Mark::new(unit, had_child || at + 1 < shape.blocks, self.fan(at, shape))
    }
}

impl HintProgress {
    /// Whether this is the first part.
    pub(super) fn begin(&mut self) -> bool {
        !std::mem::replace(&mut self.has_begun, true)
    }
}

impl PrefixCost {
    pub(super) fn begin_request(&mut self, reuse: &mut ChainReuse) {
        self.victim_unit = None;
        self.look = Look::default();
        self.requests += 1;
        // A refresh that is under way goes on with the next preparation.
        if !self.hazard.is_refreshing() {
            self.refresh(self.requests, &mut Visits::unlimited());
        }
        *reuse = std::mem::take(&mut self.spare);
    }

    /// A part of a request. Returns whether the request is done.
    pub(super) fn continue_request(
        &mut self,
        blocks: &mut BlockTable,
        chain: &mut ChainPart<'_>,
        reuse: &mut ChainReuse,
        visits: &mut Visits,
    ) -> bool {
        loop {
            let (is_done, next) = match reuse.phase {
                Phase::Ghosts => (self.take_known(blocks, chain, reuse, visits), Phase::Leave),
                Phase::Leave => (self.leave(blocks, chain, reuse, visits), Phase::Enter),
                Phase::Enter => (self.enter(chain, reuse, visits), Phase::Done),
                Phase::Done => return true,
            };
            if !is_done {
                return false;
            }
            reuse.phase = next;
            reuse.at = 0;
            if next == Phase::Done {
                self.spare = std::mem::take(reuse).emptied();
                reuse.phase = Phase::Done;
            }
        }
    }

    /// Finds the known blocks after the leading resident ones, and the shape of the request.
    /// Resident blocks after a gap are not reachable through their chain, so their units stay as
    /// they are.
    fn take_known(
        &mut self,
        blocks: &BlockTable,
        chain: &mut ChainPart<'_>,
        reuse: &mut ChainReuse,
        visits: &mut Visits,
    ) -> bool {
        while let Some(requested) = chain.blocks.get(chain.leading + reuse.taken.len()) {
            if !visits.take(1) {
                return false;
            }
            if requested.resident.is_some() {
                break;
            }
            let Some(raw) = self.take_ghost(requested.fingerprint) else { break };
            reuse.taken.push(Mark::from_raw(raw));
        }
        let last = reuse.taken.last().copied().or_else(|| {
            let last = chain.leading.checked_sub(1)?;
            chain.resident(blocks, last).map(|slot| Mark::from_raw(blocks.state(slot)))
        });
        let known = chain.leading + reuse.taken.len();
        reuse.shape = Some(self.shape(chain.blocks.len(), known, last, chain.hints));
        true
    }

    fn shape(
        &self,
        blocks: usize,
        known: usize,
        last: Option<Mark>,
        hints: &Hints,
    ) -> RequestShape {
        let mut shape = RequestShape {
            turn: 0,
            gap_seconds: None,
            diverges: false,
            blocks,
            known,
            hints: *hints,
        };
        let Some(last) = last else { return shape };
        let before = &self.units[last.unit()];
        shape.diverges = known < blocks && last.has_child();
        if before.request_blocks as usize == known {
            shape.turn = before.turn.saturating_add(1);
            shape.gap_seconds = Some(self.now - before.at);
        } else if shape.diverges && last.fan() == 0 {
            shape.gap_seconds = Some(self.now - before.at);
        }
        shape
    }

    /// Moves the known blocks from their units to new ones, and counts that as reuse.
    fn leave(
        &mut self,
        blocks: &mut BlockTable,
        chain: &mut ChainPart<'_>,
        reuse: &mut ChainReuse,
        visits: &mut Visits,
    ) -> bool {
        let shape = reuse.shape.expect("the shape is known before blocks leave");
        while reuse.at < chain.blocks.len() {
            if !visits.take(1) {
                return false;
            }
            let at = reuse.at;
            let slot = chain.resident(blocks, at);
            if at < shape.known {
                let mark = self.known_mark(blocks, chain, reuse, at);
                // Without a mark, the block was deleted since the request began.
                reuse.known.push(mark.unwrap_or(Mark::new(0, false, 0)));
                if let Some(mark) = mark {
                    if let Some(slot) = slot.filter(|slot| !blocks.is_protected(*slot)) {
                        self.units[mark.unit()].blocks.remove(blocks, slot);
                    }
                    self.count_left(reuse, mark.unit());
                }
            } else if at == shape.known {
                self.end_left(reuse);
            }
            if at < shape.known || slot.is_none() {
                self.join(blocks, slot, reuse, &shape);
            } else {
                reuse.extend_runs(&shape);
            }
            reuse.at += 1;
        }
        self.end_left(reuse);
        true
    }

    /// The mark of a known block before the request.
    fn known_mark(
        &mut self,
        blocks: &BlockTable,
        chain: &ChainPart<'_>,
        reuse: &ChainReuse,
        at: usize,
    ) -> Option<Mark> {
        let requested = chain.blocks[at];
        match (requested.resident, at.checked_sub(chain.leading)) {
            (Some(slot), _) => Some(Mark::from_raw(blocks.state(slot))),
            (None, Some(taken)) => Some(reuse.taken[taken]),
            // Evicted since the request began.
            (None, None) => self.take_ghost(requested.fingerprint).map(Mark::from_raw),
        }
    }

    /// Counts a block that left a unit, together with the blocks before it that left the same unit.
    fn count_left(&mut self, reuse: &mut ChainReuse, unit: u32) {
        match &mut reuse.left {
            Some((of, count)) if *of == unit => *count += 1,
            _ => {
                self.end_left(reuse);
                reuse.left = Some((unit, 1));
            }
        }
    }

    fn end_left(&mut self, reuse: &mut ChainReuse) {
        if let Some((unit, count)) = reuse.left.take() {
            self.leave_unit(unit, count);
        }
    }

    /// Adds the current block to the unit of its run.
    fn join(
        &mut self,
        blocks: &mut BlockTable,
        slot: Option<Slot>,
        reuse: &mut ChainReuse,
        shape: &RequestShape,
    ) {
        let run = reuse.extend_runs(shape);
        if run.unit == NONE {
            let request_blocks = u32::try_from(shape.blocks).expect("a request has fewer blocks");
            run.unit = self.units.hold_new(self.now, (shape.turn, request_blocks));
        }
        let index = run.unit;
        let unit = &mut self.units[index];
        unit.live += 1;
        unit.initial += 1;
        match slot {
            Some(slot) => {
                blocks.set_state(slot, reuse.mark(index, reuse.at, shape).raw());
                self.add_resident(blocks, slot);
            }
            None => reuse.first_missing = reuse.first_missing.or(Some(reuse.at)),
        }
    }

    /// Counts and lists the new units, and remembers their blocks that are not resident yet.
    fn enter(
        &mut self,
        chain: &ChainPart<'_>,
        reuse: &mut ChainReuse,
        visits: &mut Visits,
    ) -> bool {
        let shape = reuse.shape.expect("the shape is known before blocks leave");
        let first_missing = reuse.first_missing.unwrap_or(chain.blocks.len());
        while let Some(run) = reuse.runs.get(reuse.entered).copied() {
            if run.unit != NONE {
                if !reuse.is_run_counted {
                    if !visits.take(1) {
                        return false;
                    }
                    let cell = self.cell(features(&shape, run.fan));
                    self.victim_unit = None;
                    self.units.count(&mut self.cells, run.unit, cell, self.now);
                    reuse.at = run.begin.max(first_missing);
                    reuse.is_run_counted = true;
                }
                while reuse.at < run.end {
                    if !visits.take(1) {
                        return false;
                    }
                    let requested = chain.blocks[reuse.at];
                    if requested.resident.is_none() {
                        let mark = reuse.mark(run.unit, reuse.at, &shape);
                        self.expect_insert(requested.fingerprint, mark);
                    }
                    reuse.at += 1;
                }
                if self.units.end_hold(&mut self.cells, run.unit) {
                    self.relist(run.unit);
                }
            }
            reuse.entered += 1;
            reuse.is_run_counted = false;
        }
        true
    }

    /// Remembers a block that was requested and is not resident.
    fn expect_insert(&mut self, fingerprint: u64, mark: Mark) {
        if let Some(stale) = self.take_ghost(fingerprint) {
            self.forget(stale);
        }
        let slots = (self.capacity / 4).clamp(PENDING_MIN, PENDING_MAX);
        if let Some((fingerprint, raw)) = self.pending.push(fingerprint, mark.raw(), slots) {
            self.remember(fingerprint, raw);
        }
    }

    /// A part of the hints for a chain. Returns whether they are done.
    pub(super) fn continue_hint(
        &mut self,
        blocks: &BlockTable,
        chain: &mut ChainPart<'_>,
        hint: &mut HintProgress,
        visits: &mut Visits,
    ) -> bool {
        if hint.latest.is_none() {
            while hint.known < chain.blocks.len() {
                if !visits.take(1) {
                    return false;
                }
                let Some(mark) = self.current_mark(blocks, chain, hint.known) else { break };
                hint.last = Some(mark);
                hint.known += 1;
            }
            let Some(last) = hint.last else { return true };
            let unit = &self.units[last.unit()];
            hint.latest = Some((unit.at, unit.request_blocks));
        }
        while hint.at < hint.known {
            if !visits.take(1) {
                return false;
            }
            let Some(mark) = self.current_mark(blocks, chain, hint.at) else { break };
            if hint.unit != Some(mark.unit()) {
                hint.unit = Some(mark.unit());
                self.hint_unit(mark.unit(), hint, chain.hints);
            }
            hint.at += 1;
        }
        true
    }

    fn current_mark(
        &self,
        blocks: &BlockTable,
        chain: &mut ChainPart<'_>,
        at: usize,
    ) -> Option<Mark> {
        match chain.resident(blocks, at) {
            Some(slot) => Some(Mark::from_raw(blocks.state(slot))),
            None => self.ghost(chain.blocks[at].fingerprint),
        }
    }

    /// Applies hints to a unit. Only units of the latest request get other features.
    fn hint_unit(&mut self, index: u32, hint: &HintProgress, hints: &Hints) {
        if !self.units[index].is_counted {
            return;
        }
        if let Some(within) = hints.expected_within {
            let until = self.now + within.as_secs_f64();
            self.units.expect(&mut self.cells, index, until);
        }
        let unit = &self.units[index];
        let is_latest = hint.latest == Some((unit.at, unit.request_blocks));
        let before = self.cells.cells[usize::from(unit.cell)].features;
        if let Some(features) = apply_hints(before, hints).filter(|_| is_latest) {
            let cell = self.cell(features);
            self.units.change_cell(&mut self.cells, index, cell, self.now);
        }
    }
}
