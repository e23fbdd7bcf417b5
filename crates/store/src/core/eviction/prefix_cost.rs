//! Prefix-cost: keeps the blocks with the most expected hits per second of holding them, and learns
//! from the requests how many to expect. `docs/eviction.md` has the idea and the results.
//!
//! Blocks last used by one request form a unit (`units.rs`). Units with equal features
//! (`features.rs`) form a cell (`cells.rs`), which counts reuse and exposure by age. The counts
//! give hazard rates per class (`hazard.rs`), and these give a worth per age (`index.rs`). The
//! deepest block of the unit with the lowest worth is evicted first; an incoming block of lower
//! worth than all others is declined.

mod age;
mod cells;
mod features;
mod hazard;
mod index;
mod mark;
mod units;

use std::time::Duration;

use cascade_tier::Hints;

use super::{
    BlockTable, Ghosts, Incoming, Policy, RemovalReason, RequestedBlock, Search, Slot, Visits,
};
use cells::Cells;
use features::{Features, RequestShape, UnitKind, apply_hints, boost, fan_bucket, features};
use hazard::Hazard;
use index::WorthTables;
use mark::{FAN_MAX, Mark};
use units::Units;

/// Most requests between two refreshes of the rates.
const REFRESH_REQUESTS_MAX: u64 = 50;
/// Ghosts for each block that the tier can hold.
const GHOSTS_PER_BLOCK: usize = 8;
/// Cells that a search for the lowest worth looks at for one visit.
const CELLS_PER_VISIT: usize = 64;
/// Bounds of the number of blocks that were requested and not yet inserted.
const PENDING_MIN: usize = 1024;
const PENDING_MAX: usize = 1 << 16;

/// The policy. A block's state is its `Mark`.
#[derive(Debug, Default)]
pub struct PrefixCost {
    units: Units,
    cells: Cells,
    hazard: Hazard,
    index: WorthTables,
    /// Requested, not resident yet.
    pending: Ghosts,
    /// Evicted or never inserted.
    ghosts: Ghosts,
    /// The largest number of resident blocks so far: the capacity of the tier once it is full.
    capacity: usize,
    requests: u64,
    /// The request at which the rates are refreshed: often at first, when each request adds much.
    refresh_at: u64,
    now: f64,
    /// The unit of the last victim since the latest request. Its blocks are evicted together.
    victim_unit: Option<u32>,
    /// Marks of the leading known blocks of a chain; kept to save allocations.
    known: Vec<Mark>,
}

impl PrefixCost {
    /// A policy with at most `most` cells (about a kilobyte each) instead of the default 4096. New
    /// cells beyond that use coarser features.
    pub fn with_counts(most: usize) -> Self {
        Self { cells: Cells::at_most(most), ..Self::default() }
    }

    /// Number of units.
    pub fn units(&self) -> usize {
        self.units.len()
    }

    fn advance(&mut self, now: Duration) {
        self.now = self.now.max(now.as_secs_f64());
        self.units.age(&mut self.cells, self.now);
    }

    fn refresh(&mut self) {
        self.hazard.refresh(&mut self.cells, self.now);
        self.index.outdate();
        for cell in &mut self.cells.cells {
            let factor = self.hazard.factor(&cell.features) * boost(cell.features.priority);
            cell.table = WorthTables::table(cell.class, factor);
        }
    }

    fn cell(&mut self, features: Features) -> u16 {
        let wanted = features.normal();
        if let Some(cell) = self.cells.find(wanted) {
            return cell;
        }
        let features = self.cells.affordable(wanted);
        if let Some(cell) = self.cells.find(features) {
            return cell;
        }
        let class = self.hazard.class_of(&features);
        self.index.grow(self.hazard.classes());
        let cell = self.cells.add(features, class, self.now);
        let factor = self.hazard.factor(&features) * boost(features.priority);
        self.cells.cells[usize::from(cell)].table = WorthTables::table(class, factor);
        cell
    }

    /// Collects the marks of the leading known blocks. Takes those that are not resident out of the
    /// ghosts, because they are about to be inserted.
    fn collect_known(&mut self, blocks: &BlockTable, chain: &[RequestedBlock], leading: usize) {
        self.known.clear();
        for (at, requested) in chain.iter().enumerate() {
            let mark = match requested.resident {
                Some(slot) if at < leading => Some(blocks.state(slot)),
                // Resident after a gap: not reachable through its chain, so its unit stays as it
                // is.
                Some(_) => None,
                None => self.take_ghost(requested.fingerprint),
            };
            let Some(mark) = mark else { break };
            self.known.push(Mark::from_raw(mark));
        }
    }

    fn take_ghost(&mut self, fingerprint: u64) -> Option<u32> {
        self.pending.take(fingerprint).or_else(|| self.ghosts.take(fingerprint))
    }

    fn ghost(&self, fingerprint: u64) -> Option<Mark> {
        let raw = self.pending.get(fingerprint).or_else(|| self.ghosts.get(fingerprint));
        raw.map(Mark::from_raw)
    }

    fn shape(&self, blocks: usize, hints: &Hints) -> RequestShape {
        let known = self.known.len();
        let mut shape = RequestShape {
            turn: 0,
            gap_seconds: None,
            diverges: false,
            blocks,
            known,
            hints: *hints,
        };
        let Some(last) = self.known.last() else { return shape };
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

    /// Removes the known blocks from their units and counts that as reuse. The remaining blocks of
    /// such a unit are superseded: the conversation took another path.
    fn leave_units(&mut self, blocks: &mut BlockTable, chain: &[RequestedBlock]) {
        let known = std::mem::take(&mut self.known);
        for (requested, mark) in chain.iter().zip(&known) {
            let unit = mark.unit();
            if let Some(slot) = requested.resident.filter(|slot| !blocks.is_protected(*slot)) {
                self.units[unit].blocks.remove(blocks, slot);
            }
        }
        for run in known.chunk_by(|one, other| one.unit() == other.unit()) {
            let index = run[0].unit();
            let unit = &self.units[index];
            let count = u32::try_from(run.len()).expect("a request has fewer blocks");
            let share = f64::from(count) / f64::from(unit.initial);
            let features = self.cells.cells[usize::from(unit.cell)].features;
            self.cells.cells[usize::from(unit.cell)].reused[usize::from(unit.bin)] += share;
            let is_used_up = unit.live == count;
            self.units.remove_blocks(&mut self.cells, index, count, self.now);
            if !is_used_up {
                let superseded = self.cell(Features { kind: UnitKind::Superseded, ..features });
                self.units.change_cell(&mut self.cells, index, superseded, self.now);
                self.relist(index);
            }
        }
        self.known = known;
    }

    /// Makes the units of a request: one for each run of blocks with the same bucket of
    /// divergences.
    fn enter_units(
        &mut self,
        blocks: &mut BlockTable,
        chain: &[RequestedBlock],
        shape: &RequestShape,
    ) {
        let mut begin = 0;
        while begin < chain.len() {
            let fan = self.fan(begin, shape);
            let alike = |at: &usize| fan_bucket(self.fan(*at, shape)) == fan_bucket(fan);
            let end = (begin..chain.len()).take_while(alike).last().map_or(begin, |at| at) + 1;
            let members = (begin..end).filter(|at| joins_unit(chain, *at, shape.known)).count();
            if members > 0 {
                let cell = self.cell(features(shape, fan));
                let unit = self.add_unit(cell, members, shape);
                for at in begin..end {
                    self.join(blocks, chain, at, unit, shape);
                }
                self.relist(unit);
            }
            begin = end;
        }
    }

    fn add_unit(&mut self, cell: u16, members: usize, shape: &RequestShape) -> u32 {
        let members = u32::try_from(members).expect("a request has fewer blocks");
        let blocks = u32::try_from(shape.blocks).expect("a request has fewer blocks");
        self.victim_unit = None;
        self.units.add(&mut self.cells, self.now, cell, members, (shape.turn, blocks))
    }

    fn join(
        &mut self,
        blocks: &mut BlockTable,
        chain: &[RequestedBlock],
        at: usize,
        unit: u32,
        shape: &RequestShape,
    ) {
        if !joins_unit(chain, at, shape.known) {
            return;
        }
        let had_child = self.known.get(at).is_some_and(|mark| mark.has_child());
        let mark = Mark::new(unit, had_child || at + 1 < chain.len(), self.fan(at, shape));
        let RequestedBlock { fingerprint, resident } = chain[at];
        if let Some(slot) = resident {
            blocks.set_state(slot, mark.raw());
            self.add_resident(blocks, slot);
            return;
        }
        if let Some(stale) = self.take_ghost(fingerprint) {
            self.forget(stale);
        }
        let slots = (self.capacity / 4).clamp(PENDING_MIN, PENDING_MAX);
        if let Some((fingerprint, raw)) = self.pending.push(fingerprint, mark.raw(), slots) {
            self.remember(fingerprint, raw);
        }
    }

    fn fan(&self, at: usize, shape: &RequestShape) -> u8 {
        let fan = self.known.get(at).map_or(0, |mark| mark.fan());
        if shape.diverges && at < shape.known { (fan + 1).min(FAN_MAX) } else { fan }
    }

    /// Adds a resident block to the unit in its mark, as the deepest.
    fn add_resident(&mut self, blocks: &mut BlockTable, slot: Slot) {
        if !blocks.is_protected(slot) {
            let unit = Mark::from_raw(blocks.state(slot)).unit();
            self.units[unit].blocks.push_oldest(blocks, slot);
        }
    }

    fn relist(&mut self, unit: u32) {
        if self.units[unit].blocks.is_empty() {
            self.units.unlist(&mut self.cells, unit);
        } else {
            self.units.list(&mut self.cells, unit);
        }
    }

    fn remember(&mut self, fingerprint: u64, raw: u32) {
        let slots = self.capacity.max(1) * GHOSTS_PER_BLOCK;
        if let Some((_, raw)) = self.ghosts.push(fingerprint, raw, slots) {
            self.forget(raw);
        }
    }

    fn forget(&mut self, raw: u32) {
        self.units.remove_blocks(&mut self.cells, Mark::from_raw(raw).unit(), 1, self.now);
    }

    /// Makes a unit for a single block that is used or inserted outside a chain request.
    fn enter_single(&mut self, blocks: &mut BlockTable, slot: Slot, turn: u8, gap: Option<f64>) {
        let fan = Mark::from_raw(blocks.state(slot)).fan();
        let known = usize::from(gap.is_some());
        let hints = Hints::default();
        let shape =
            RequestShape { turn, gap_seconds: gap, diverges: false, blocks: 1, known, hints };
        let cell = self.cell(features(&shape, fan));
        let unit = self.add_unit(cell, 1, &shape);
        let has_child = Mark::from_raw(blocks.state(slot)).has_child();
        blocks.set_state(slot, Mark::new(unit, has_child, fan).raw());
        self.add_resident(blocks, slot);
        self.relist(unit);
    }

    /// The listed unit of the lowest worth now.
    fn lowest_worth(&mut self) -> Option<u32> {
        if let Some(unit) = self.victim_unit.filter(|unit| self.units[*unit].is_listed) {
            return Some(unit);
        }
        let mut best = (f32::INFINITY, None);
        for cell in self.cells.cells.iter().filter(|cell| cell.occupied != 0) {
            self.index.update(cell.table, self.hazard.rate(cell.class));
            let mut occupied = cell.occupied;
            while occupied != 0 {
                let bin = occupied.trailing_zeros() as usize;
                occupied &= occupied - 1;
                // Worth is linear in age within a bin, so the minimum is at the oldest or newest
                // unit.
                let (oldest, newest) = cell.lists[bin];
                for unit in [oldest, newest] {
                    let worth = self.index.worth(cell.table, bin, self.now - self.units[unit].at);
                    if worth < best.0 {
                        best = (worth, Some(unit));
                    }
                }
            }
        }
        best.1
    }

    fn worth(&mut self, unit: u32) -> f32 {
        let unit = &self.units[unit];
        let cell = &self.cells.cells[usize::from(unit.cell)];
        self.index.update(cell.table, self.hazard.rate(cell.class));
        self.index.worth(cell.table, usize::from(unit.bin), self.now - unit.at)
    }

    fn is_expected(&self, unit: u32) -> bool {
        self.units[unit].expected_until > self.now
    }

    /// The deepest resident block of a unit, if it is a candidate for eviction.
    fn candidate(&self, blocks: &BlockTable, unit: u32) -> Option<Slot> {
        self.units[unit].blocks.oldest().filter(|slot| blocks.is_candidate(*slot))
    }

    /// The candidate of the listed unit of the lowest worth that no queued request expects. Units
    /// that have no candidate leave the lists until they have one.
    fn least_worthy(
        &mut self,
        blocks: &BlockTable,
        spared: Option<Slot>,
        visits: &mut Visits,
    ) -> Search {
        // The search for the lowest worth looks at every cell.
        let visits_each = 1 + self.cells.cells.len() / CELLS_PER_VISIT;
        let mut unit_of_spared = None;
        let search = loop {
            if !visits.take(visits_each) {
                break Search::Unfinished;
            }
            let Some(unit) = self.lowest_worth() else { break Search::None };
            let candidate = self.candidate(blocks, unit);
            if candidate.is_some() && self.is_expected(unit) {
                self.units.wait(&mut self.cells, unit);
                continue;
            }
            if let Some(slot) = candidate.filter(|_| candidate != spared) {
                self.victim_unit = Some(unit);
                break Search::Found(slot);
            }
            // It is listed again once its deepest block is a leaf and not parked.
            self.units.unlist(&mut self.cells, unit);
            unit_of_spared = candidate.map_or(unit_of_spared, |_| Some(unit));
        };
        if let Some(unit) = unit_of_spared {
            self.units.list(&mut self.cells, unit);
        }
        search
    }

    /// Of the candidates that queued requests expect, the one that is expected last.
    fn least_urgent(
        &mut self,
        blocks: &BlockTable,
        spared: Option<Slot>,
        visits: &mut Visits,
    ) -> Search {
        let mut unit_of_spared = None;
        while let Some(unit) = self.units.last_waiting(unit_of_spared) {
            if !visits.take(1) {
                return Search::Unfinished;
            }
            match self.candidate(blocks, unit) {
                None => self.units.unlist(&mut self.cells, unit),
                Some(slot) if Some(slot) == spared => unit_of_spared = Some(unit),
                Some(slot) => return Search::Found(slot),
            }
        }
        Search::None
    }
}

impl Policy for PrefixCost {
    fn name(&self) -> &'static str {
        "prefix-cost"
    }

    fn request(
        &mut self,
        blocks: &mut BlockTable,
        now: Duration,
        chain: &[RequestedBlock],
        leading: usize,
        hints: &Hints,
    ) {
        self.advance(now);
        self.victim_unit = None;
        self.requests += 1;
        if self.requests >= self.refresh_at {
            self.refresh_at = self.requests + (self.requests / 16).clamp(1, REFRESH_REQUESTS_MAX);
            self.refresh();
        }
        self.collect_known(blocks, chain, leading);
        let shape = self.shape(chain.len(), hints);
        self.leave_units(blocks, chain);
        self.enter_units(blocks, chain, &shape);
        if let Some(within) = hints.expected_within {
            self.hint(
                blocks,
                now,
                chain,
                &Hints { expected_within: Some(within), ..Hints::default() },
            );
        }
    }

    fn hint(
        &mut self,
        blocks: &mut BlockTable,
        now: Duration,
        chain: &[RequestedBlock],
        hints: &Hints,
    ) {
        self.advance(now);
        self.known.clear();
        for requested in chain {
            let mark = match requested.resident {
                Some(slot) => Some(Mark::from_raw(blocks.state(slot))),
                None => self.ghost(requested.fingerprint),
            };
            let Some(mark) = mark else { break };
            self.known.push(mark);
        }
        let Some(last) = self.known.last() else { return };
        let (at, request_blocks) =
            (self.units[last.unit()].at, self.units[last.unit()].request_blocks);
        let known = std::mem::take(&mut self.known);
        for run in known.chunk_by(|one, other| one.unit() == other.unit()) {
            let index = run[0].unit();
            if let Some(within) = hints.expected_within {
                let until = self.now + within.as_secs_f64();
                self.units.expect(&mut self.cells, index, until);
            }
            let unit = &self.units[index];
            #[expect(clippy::float_cmp, reason = "units of one request hold the same number")]
            let is_latest = unit.at == at && unit.request_blocks == request_blocks;
            let before = self.cells.cells[usize::from(unit.cell)].features;
            if let Some(features) = apply_hints(before, hints).filter(|_| is_latest) {
                let cell = self.cell(features);
                self.units.change_cell(&mut self.cells, index, cell, self.now);
            }
        }
        self.known = known;
    }

    fn touch(&mut self, blocks: &mut BlockTable, now: Duration, slot: Slot) {
        self.advance(now);
        let mark = Mark::from_raw(blocks.state(slot));
        let (turn, gap) = {
            let unit = &self.units[mark.unit()];
            (unit.turn.saturating_add(1), self.now - unit.at)
        };
        self.known.clear();
        self.known.push(mark);
        let fingerprint = blocks.fingerprint(slot);
        self.leave_units(blocks, &[RequestedBlock { fingerprint, resident: Some(slot) }]);
        self.enter_single(blocks, slot, turn, Some(gap));
    }

    fn insert(&mut self, blocks: &mut BlockTable, now: Duration, slot: Slot) {
        self.advance(now);
        self.capacity = self.capacity.max(blocks.len());
        if let Some(parent) = blocks.parent(slot) {
            blocks.set_state(parent, Mark::from_raw(blocks.state(parent)).with_child().raw());
        }
        match self.take_ghost(blocks.fingerprint(slot)) {
            Some(raw) => {
                blocks.set_state(slot, raw);
                self.add_resident(blocks, slot);
                self.relist(Mark::from_raw(raw).unit());
            }
            None => self.enter_single(blocks, slot, 0, None),
        }
    }

    fn remove(&mut self, blocks: &mut BlockTable, slot: Slot, why: RemovalReason) {
        let raw = blocks.state(slot);
        let unit = Mark::from_raw(raw).unit();
        if !blocks.is_protected(slot) {
            self.units[unit].blocks.remove(blocks, slot);
            if self.units[unit].blocks.is_empty() {
                self.units.unlist(&mut self.cells, unit);
            }
        }
        match why {
            RemovalReason::Evicted => self.remember(blocks.fingerprint(slot), raw),
            RemovalReason::Deleted => self.forget(raw),
        }
    }

    fn became_leaf(&mut self, blocks: &mut BlockTable, slot: Slot) {
        self.relist(Mark::from_raw(blocks.state(slot)).unit());
    }

    fn park(&mut self, blocks: &mut BlockTable, slot: Slot) {
        // The block keeps its place in its unit, and with it the order of the unit's blocks.
        self.units.unlist(&mut self.cells, Mark::from_raw(blocks.state(slot)).unit());
    }

    fn unpark(&mut self, blocks: &mut BlockTable, slot: Slot) {
        self.relist(Mark::from_raw(blocks.state(slot)).unit());
    }

    fn victim(
        &mut self,
        blocks: &mut BlockTable,
        now: Duration,
        spared: Option<Slot>,
        visits: &mut Visits,
    ) -> Search {
        self.advance(now);
        while self.units.end_wait(&mut self.cells, self.now) {
            if !visits.take(1) {
                return Search::Unfinished;
            }
        }
        let search = self.least_worthy(blocks, spared, visits);
        if search != Search::None {
            return search;
        }
        self.victim_unit = None;
        self.least_urgent(blocks, spared, visits)
    }

    fn should_evict_for(
        &mut self,
        blocks: &BlockTable,
        _: Duration,
        victim: Slot,
        incoming: &Incoming,
    ) -> bool {
        let Some(unit) = self.ghost(incoming.fingerprint).map(Mark::unit) else { return true };
        let victim = Mark::from_raw(blocks.state(victim)).unit();
        if self.is_expected(victim) || self.is_expected(unit) {
            return self.is_expected(unit);
        }
        victim != unit && self.worth(victim) <= self.worth(unit)
    }

    fn memory_bytes(&self) -> usize {
        size_of::<Self>()
            + self.units.memory_bytes()
            + self.cells.memory_bytes()
            + self.hazard.memory_bytes()
            + self.index.memory_bytes()
            + self.pending.memory_bytes()
            + self.ghosts.memory_bytes()
            + self.known.capacity() * size_of::<Mark>()
    }
}

/// Whether a block joins a unit of the request. Resident blocks after a gap in the chain do not.
fn joins_unit(chain: &[RequestedBlock], at: usize, known: usize) -> bool {
    at < known || chain[at].resident.is_none()
}
