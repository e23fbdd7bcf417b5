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
mod request;
mod units;

use std::time::Duration;

use cascade_tier::Hints;

use super::{
    BlockTable, ChainPart, ChainProgress, Ghosts, Incoming, Policy, RemovalReason, Search, Slot,
    Visits,
};
use cells::Cells;
use features::{Features, RequestShape, UnitKind, boost, features};
use hazard::Hazard;
use index::WorthTables;
use mark::Mark;
pub(super) use request::{ChainReuse, HintProgress};
use units::Units;

/// Most requests between two refreshes of the rates.
const REFRESH_REQUESTS_MAX: u64 = 50;
/// Most cells that a request refreshes itself, in its own hold of the lock.
const REFRESHED_AT_ONCE: usize = 16;
/// Ghosts for each block that the tier can hold.
const GHOSTS_PER_BLOCK: usize = 8;
/// Cells that a search for the lowest worth looks at for one visit.
const CELLS_PER_VISIT: usize = 32;
/// What the computation of a table of worths costs, in visits of blocks.
const VISITS_PER_TABLE: usize = 8;
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
    /// The search for the lowest worth that is under way.
    look: Look,
    /// Empty between requests; kept to save allocations.
    spare: ChainReuse,
}

/// A search for the unit of the lowest worth.
#[derive(Debug)]
struct Look {
    /// The next cell.
    at: usize,
    /// The best unit so far, and its worth.
    best: Option<u32>,
    worth: f32,
}

impl Default for Look {
    fn default() -> Self {
        Self { at: 0, best: None, worth: f32::INFINITY }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum UnitSearch {
    Found(u32),
    /// The visits are used up; the next call goes on.
    Unfinished,
    /// No unit is listed.
    None,
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

    /// Refreshes the rates, if that is due at this request. Returns whether none is left to do.
    fn refresh(&mut self, request: u64, visits: &mut Visits) -> bool {
        if !self.hazard.is_refreshing() {
            if request < self.refresh_at {
                return true;
            }
            self.refresh_at = request + (request / 16).clamp(1, REFRESH_REQUESTS_MAX);
            self.hazard.begin_refresh();
        }
        let is_done = self.hazard.refresh(&mut self.cells, self.now, visits);
        if is_done {
            self.index.outdate();
        }
        is_done
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

    fn take_ghost(&mut self, fingerprint: u64) -> Option<u32> {
        self.pending.take(fingerprint).or_else(|| self.ghosts.take(fingerprint))
    }

    fn ghost(&self, fingerprint: u64) -> Option<Mark> {
        let raw = self.pending.get(fingerprint).or_else(|| self.ghosts.get(fingerprint));
        raw.map(Mark::from_raw)
    }

    /// Counts the reuse of some blocks of a unit, which have left it. The remaining blocks are
    /// superseded: the conversation took another path.
    fn leave_unit(&mut self, index: u32, count: u32) {
        let unit = &self.units[index];
        if unit.is_counted {
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
        } else {
            // Of a request that is not finished yet: made at most a few milliseconds ago.
            self.units.remove_blocks(&mut self.cells, index, count, self.now);
        }
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
        self.victim_unit = None;
        let unit = self.units.add(&mut self.cells, self.now, cell, 1, (shape.turn, 1));
        let has_child = Mark::from_raw(blocks.state(slot)).has_child();
        blocks.set_state(slot, Mark::new(unit, has_child, fan).raw());
        self.add_resident(blocks, slot);
        self.relist(unit);
    }

    /// The listed unit of the lowest worth now. Looks at every cell, over several holds of the lock
    /// if there are many cells or if many tables are outdated.
    fn lowest_worth(&mut self, visits: &mut Visits) -> UnitSearch {
        if let Some(unit) = self.victim_unit.filter(|unit| self.units[*unit].is_listed) {
            return if visits.take(1) { UnitSearch::Found(unit) } else { UnitSearch::Unfinished };
        }
        loop {
            while self.look.at < self.cells.cells.len() {
                if !self.look_at_cell(visits) {
                    return UnitSearch::Unfinished;
                }
                self.look.at += 1;
            }
            match std::mem::take(&mut self.look).best {
                None => return UnitSearch::None,
                // Other calls may have removed it since it was found.
                Some(best) if self.units[best].is_listed => return UnitSearch::Found(best),
                Some(_) => {}
            }
        }
    }

    /// Compares the units of the next cell with the best one so far. Returns false without visits
    /// left.
    fn look_at_cell(&mut self, visits: &mut Visits) -> bool {
        let look = &mut self.look;
        if look.at.is_multiple_of(CELLS_PER_VISIT) && !visits.take(1) {
            return false;
        }
        let cell = &self.cells.cells[look.at];
        if cell.occupied == 0 {
            return true;
        }
        if self.index.is_outdated(cell.table) {
            if !visits.take(VISITS_PER_TABLE) {
                return false;
            }
            self.index.update(cell.table, self.hazard.rate(cell.class));
        }
        let mut occupied = cell.occupied;
        while occupied != 0 {
            let bin = occupied.trailing_zeros() as usize;
            occupied &= occupied - 1;
            // Worth is linear in age within a bin, so the minimum is at the oldest or newest unit.
            let (oldest, newest) = cell.lists[bin];
            for unit in [oldest, newest] {
                let worth = self.index.worth(cell.table, bin, self.now - self.units[unit].at);
                if worth < look.worth {
                    (look.worth, look.best) = (worth, Some(unit));
                }
            }
        }
        true
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
        let mut unit_of_spared = None;
        let search = loop {
            let unit = match self.lowest_worth(visits) {
                UnitSearch::Found(unit) => unit,
                UnitSearch::Unfinished => break Search::Unfinished,
                UnitSearch::None => break Search::None,
            };
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

    fn begin_hold(&mut self) {
        self.units.begin_hold();
    }

    fn prepare(&mut self, now: Duration, visits: &mut Visits) -> bool {
        let is_due = self.requests + 1 >= self.refresh_at || self.hazard.is_refreshing();
        if !is_due || self.cells.cells.len() <= REFRESHED_AT_ONCE {
            return true;
        }
        self.advance(now);
        self.refresh(self.requests + 1, visits)
    }

    fn request(
        &mut self,
        blocks: &mut BlockTable,
        now: Duration,
        chain: &mut ChainPart<'_>,
        progress: &mut ChainProgress,
        visits: &mut Visits,
    ) -> bool {
        if progress.begin() {
            self.advance(now);
            self.begin_request(&mut progress.reuse);
        }
        if !self.continue_request(blocks, chain, &mut progress.reuse, visits) {
            return false;
        }
        if chain.hints.expected_within.is_none() {
            return true;
        }
        if progress.hint.begin() {
            self.advance(now);
        }
        let only = Hints { expected_within: chain.hints.expected_within, ..Hints::default() };
        let ChainPart { blocks: requested, leading, .. } = chain;
        let mut chain = ChainPart { blocks: requested, leading: *leading, hints: &only };
        self.continue_hint(blocks, &mut chain, &mut progress.hint, visits)
    }

    fn hint(
        &mut self,
        blocks: &mut BlockTable,
        now: Duration,
        chain: &mut ChainPart<'_>,
        progress: &mut ChainProgress,
        visits: &mut Visits,
    ) -> bool {
        if progress.hint.begin() {
            self.advance(now);
        }
        self.continue_hint(blocks, chain, &mut progress.hint, visits)
    }

    fn touch(&mut self, blocks: &mut BlockTable, now: Duration, slot: Slot) {
        self.advance(now);
        let mark = Mark::from_raw(blocks.state(slot));
        let (turn, gap) = {
            let unit = &self.units[mark.unit()];
            (unit.turn.saturating_add(1), self.now - unit.at)
        };
        if !blocks.is_protected(slot) {
            self.units[mark.unit()].blocks.remove(blocks, slot);
        }
        self.leave_unit(mark.unit(), 1);
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
            + self.spare.memory_bytes()
    }

    #[cfg(test)]
    fn check(&self, blocks: &BlockTable) {
        let marks = blocks.len() + self.pending.len() + self.ghosts.len();
        assert_eq!(self.units.live(), marks, "each mark counts in one unit");
    }
}
