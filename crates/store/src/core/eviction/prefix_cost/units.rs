//! Units: blocks last used by the same request, which are counted and evicted as one.

use std::collections::BTreeSet;

use super::age::{BINS, EDGES};
use super::cells::{Cells, NONE};
use crate::core::eviction::BlockList;
use crate::core::eviction::chunks::Chunks;

/// Most units: a [`super::mark::Mark`] has 25 bits for the number.
pub(super) const UNITS_MAX: usize = 1 << 25;

/// Most units that one call moves to older bins, without holds of the store's lock.
const MOVES_PER_CALL: usize = 256;
/// Most units that all calls in one hold of the store's lock move. Each costs as much as a few
/// lookups, because its neighbours in two lists change, too.
const MOVES_PER_HOLD: usize = 64;

/// Links of one of the two lists that a unit is in.
#[derive(Debug, Clone, Copy)]
struct Links {
    older: u32,
    newer: u32,
}

const UNLINKED: Links = Links { older: NONE, newer: NONE };

/// Blocks last used by the same request.
#[derive(Debug, Clone)]
#[expect(clippy::struct_excessive_bools, reason = "facts that do not exclude each other")]
pub(super) struct Unit {
    /// The time of that request, in seconds.
    pub(super) at: f64,
    /// A queued request uses it by then; zero without such a hint.
    pub(super) expected_until: f64,
    /// Its resident blocks that may be evicted, deepest first.
    pub(super) blocks: BlockList,
    /// Blocks that are remembered, resident or not.
    pub(super) live: u32,
    /// Blocks when it was made.
    pub(super) initial: u32,
    /// Full blocks of the whole request.
    pub(super) request_blocks: u32,
    pub(super) cell: u16,
    pub(super) bin: u8,
    /// Turns of the conversation before that request.
    pub(super) turn: u8,
    /// Whether it is in its cell's list of units with an eviction candidate.
    pub(super) is_listed: bool,
    /// Whether it counts in its cell and its bin. False while its request is not finished.
    pub(super) is_counted: bool,
    /// Whether a request that is not finished adds blocks to it.
    is_held: bool,
    /// Whether it waits for the request that is expected to use it, and is in no cell's list.
    is_waiting: bool,
    in_bin: Links,
    in_cell: Links,
}

impl Unit {
    pub(super) fn weight(&self) -> f64 {
        f64::from(self.live) / f64::from(self.initial)
    }
}

/// All units, linked by age over all cells, and by age within their cells.
#[derive(Debug)]
pub(super) struct Units {
    table: Chunks<Unit>,
    free: Chunks<u32>,
    /// Units of each bin, oldest and newest.
    bins: [(u32, u32); BINS],
    /// No unit moves to the next bin before this time. A lower bound, so that almost no call looks
    /// at the bins.
    next_move: f64,
    /// How many units may still move in this hold. `None` without holds.
    moves_left: Option<usize>,
    /// Waiting units by the time until which they wait, in bits: times are not negative, so that
    /// their bits are in the order of the times.
    waiting: BTreeSet<(u64, u32)>,
}

impl Default for Units {
    fn default() -> Self {
        let bins = [(NONE, NONE); BINS];
        let (table, free) = (Chunks::default(), Chunks::default());
        let (next_move, moves_left) = (f64::INFINITY, None);
        Self { table, free, bins, next_move, moves_left, waiting: BTreeSet::new() }
    }
}

impl std::ops::Index<u32> for Units {
    type Output = Unit;

    fn index(&self, unit: u32) -> &Unit {
        &self.table[unit as usize]
    }
}

impl std::ops::IndexMut<u32> for Units {
    fn index_mut(&mut self, unit: u32) -> &mut Unit {
        &mut self.table[unit as usize]
    }
}

impl Units {
    /// Adds a unit used at `at`, the latest time so far, with no resident block yet.
    pub(super) fn add(
        &mut self,
        cells: &mut Cells,
        at: f64,
        cell: u16,
        blocks: u32,
        (turn, request_blocks): (u8, u32),
    ) -> u32 {
        let index = self.hold_new(at, (turn, request_blocks));
        let unit = &mut self[index];
        unit.is_held = false;
        (unit.live, unit.initial) = (blocks, blocks);
        self.count(cells, index, cell, at);
        index
    }

    /// Adds an empty unit to which a request adds blocks. It is in no cell before [`Self::count`],
    /// and stays until [`Self::end_hold`].
    pub(super) fn hold_new(&mut self, at: f64, (turn, request_blocks): (u8, u32)) -> u32 {
        let unit = Unit {
            at,
            expected_until: 0.0,
            blocks: BlockList::default(),
            live: 0,
            initial: 0,
            request_blocks,
            cell: 0,
            bin: 0,
            turn,
            is_listed: false,
            is_counted: false,
            is_held: true,
            is_waiting: false,
            in_bin: UNLINKED,
            in_cell: UNLINKED,
        };
        let index = self.free.pop().unwrap_or_else(|| {
            assert!(self.table.len() < UNITS_MAX, "more than {UNITS_MAX} units");
            self.table.push(unit.clone());
            u32::try_from(self.table.len() - 1).expect("UNITS_MAX is below u32::MAX")
        });
        self[index] = unit;
        index
    }

    /// Counts a unit in a cell from `at` on, the latest time so far.
    pub(super) fn count(&mut self, cells: &mut Cells, index: u32, cell: u16, at: f64) {
        let unit = &mut self[index];
        unit.is_counted = true;
        unit.at = at;
        unit.cell = cell;
        // The weight of a unit is one; each of its blocks has an equal share of it.
        let weight = unit.weight();
        self.push_bin(index);
        cells.cells[usize::from(cell)].weigh(0, weight, at, at);
    }

    /// A request adds no more blocks to a unit. Returns whether the unit stays: its blocks may all
    /// have been removed since.
    pub(super) fn end_hold(&mut self, cells: &mut Cells, index: u32) -> bool {
        self[index].is_held = false;
        let stays = self[index].live > 0;
        if !stays {
            self.free(cells, index);
        }
        stays
    }

    /// Frees a unit that no mark names any more, because `live` counts the blocks that do.
    fn free(&mut self, cells: &mut Cells, index: u32) {
        self.unlist(cells, index);
        if self[index].is_counted {
            self.remove_bin(index);
        }
        self.free.push(index);
    }

    /// Number of units.
    pub(super) fn len(&self) -> usize {
        self.table.len() - self.free.len()
    }

    /// A hold of the store's lock begins.
    pub(super) fn begin_hold(&mut self) {
        self.moves_left = Some(MOVES_PER_HOLD);
    }

    /// Moves units to the bins of their ages; each bin's list is in order of age. Moves a limited
    /// number of them: after a pause, all units may have to move. The others move in later calls.
    pub(super) fn age(&mut self, cells: &mut Cells, now: f64) {
        if now < self.next_move || self.moves_left == Some(0) {
            return;
        }
        let mut left = self.moves_left.unwrap_or(MOVES_PER_CALL);
        self.next_move = f64::INFINITY;
        self.next_move = self.move_units(cells, now, &mut left);
        self.moves_left = self.moves_left.map(|_| left);
    }

    /// Moves at most `left` units. Returns the time of the next move.
    fn move_units(&mut self, cells: &mut Cells, now: f64, left: &mut usize) -> f64 {
        let mut next_move = f64::INFINITY;
        // From the oldest bin on, so that each list stays in order although units pass several bins
        // at once.
        for bin in (0..BINS - 1).rev() {
            loop {
                let index = self.bins[bin].0;
                if index == NONE {
                    break;
                }
                let due = self[index].at + EDGES[bin + 1];
                if due > now {
                    next_move = next_move.min(due);
                    break;
                }
                if *left == 0 {
                    return now;
                }
                *left -= 1;
                self.cross(cells, index, now);
            }
        }
        // A move to a bin that was empty may have made it earlier.
        next_move.min(self.next_move)
    }

    fn cross(&mut self, cells: &mut Cells, index: u32, now: f64) {
        let unit = &self[index];
        let (mut bin, weight, was_listed) = (usize::from(unit.bin), unit.weight(), unit.is_listed);
        let (at, cell) = (unit.at, usize::from(unit.cell));
        self.remove_from_cell(cells, index);
        self.remove_bin(index);
        while bin + 1 < BINS && at + EDGES[bin + 1] <= now {
            // The change is effective from when the unit reached the edge, not from now, so that
            // exposure does not depend on how often units are aged.
            let crossed_at = at + EDGES[bin + 1];
            let cell = &mut cells.cells[cell];
            cell.weigh(bin, -weight, crossed_at, now);
            cell.weigh(bin + 1, weight, crossed_at, now);
            bin += 1;
        }
        self[index].bin = u8::try_from(bin).expect("bins are few");
        self.push_bin(index);
        if was_listed {
            self.list(cells, index);
        }
    }

    /// Removes blocks from a unit: reused or forgotten. Frees the unit when none is left.
    pub(super) fn remove_blocks(&mut self, cells: &mut Cells, index: u32, blocks: u32, now: f64) {
        let unit = &mut self[index];
        // A share of the first number of blocks: so the shares of all blocks add up to one.
        let share = f64::from(blocks) / f64::from(unit.initial);
        unit.live -= blocks;
        let (cell, bin) = (unit.cell, unit.bin);
        let is_unused = unit.live == 0 && !unit.is_held;
        if unit.is_counted {
            cells.cells[usize::from(cell)].weigh(usize::from(bin), -share, now, now);
        }
        if is_unused {
            self.free(cells, index);
        }
    }

    /// Moves a unit to another cell.
    pub(super) fn change_cell(&mut self, cells: &mut Cells, index: u32, cell: u16, now: f64) {
        let unit = &self[index];
        if unit.cell == cell {
            return;
        }
        let (bin, weight, was_listed) = (usize::from(unit.bin), unit.weight(), unit.is_listed);
        // From now on only: exposure up to now stays with the former cell.
        cells.cells[usize::from(unit.cell)].weigh(bin, -weight, now, now);
        cells.cells[usize::from(cell)].weigh(bin, weight, now, now);
        self.remove_from_cell(cells, index);
        self[index].cell = cell;
        if was_listed {
            self.list(cells, index);
        }
    }

    /// Notes that a queued request uses a unit by then.
    pub(super) fn expect(&mut self, cells: &mut Cells, index: u32, until: f64) {
        if until > self[index].expected_until {
            let was_waiting = self[index].is_waiting;
            self.unlist_waiting(index);
            self[index].expected_until = until;
            if was_waiting {
                self.wait(cells, index);
            }
        }
    }

    /// Takes a unit out of its cell's list until the time by which a queued request uses it.
    pub(super) fn wait(&mut self, cells: &mut Cells, index: u32) {
        self.unlist(cells, index);
        let unit = &mut self[index];
        unit.is_waiting = true;
        let until = unit.expected_until.to_bits();
        self.waiting.insert((until, index));
    }

    /// Lists a waiting unit again whose time has passed, if there is one.
    pub(super) fn end_wait(&mut self, cells: &mut Cells, now: f64) -> bool {
        let Some((until, index)) = self.waiting.first().copied() else { return false };
        let is_over = f64::from_bits(until) <= now;
        if is_over {
            self.unlist_waiting(index);
            self.list(cells, index);
        }
        is_over
    }

    /// The waiting unit that is expected last, before `before` in that order.
    pub(super) fn last_waiting(&self, before: Option<u32>) -> Option<u32> {
        let of = |index: u32| (self[index].expected_until.to_bits(), index);
        let mut waiting = self.waiting.range(..before.map_or((u64::MAX, NONE), of));
        waiting.next_back().map(|(_, index)| *index)
    }

    fn unlist_waiting(&mut self, index: u32) {
        if std::mem::take(&mut self[index].is_waiting) {
            let until = self[index].expected_until.to_bits();
            self.waiting.remove(&(until, index));
        }
    }

    /// Adds a unit to its cell's list as the newest.
    pub(super) fn list(&mut self, cells: &mut Cells, index: u32) {
        let unit = &self[index];
        if unit.is_listed || unit.is_waiting || !unit.is_counted {
            return;
        }
        let bin = usize::from(unit.bin);
        let cell = &mut cells.cells[usize::from(unit.cell)];
        let ends = &mut cell.lists[bin];
        let older = ends.1;
        ends.1 = index;
        if older == NONE {
            ends.0 = index;
            cell.occupied |= 1 << bin;
        } else {
            self[older].in_cell.newer = index;
        }
        let unit = &mut self[index];
        unit.in_cell = Links { older, newer: NONE };
        unit.is_listed = true;
    }

    /// Makes a unit no candidate: removes it from its cell's list, if it is there, and ends its
    /// wait.
    pub(super) fn unlist(&mut self, cells: &mut Cells, index: u32) {
        self.unlist_waiting(index);
        self.remove_from_cell(cells, index);
    }

    fn remove_from_cell(&mut self, cells: &mut Cells, index: u32) {
        let unit = &mut self[index];
        if !unit.is_listed {
            return;
        }
        unit.is_listed = false;
        let (bin, Links { older, newer }) = (usize::from(unit.bin), unit.in_cell);
        let cell = &mut cells.cells[usize::from(unit.cell)];
        let ends = &mut cell.lists[bin];
        match older {
            NONE => ends.0 = newer,
            older => self.table[older as usize].in_cell.newer = newer,
        }
        match newer {
            NONE => ends.1 = older,
            newer => self.table[newer as usize].in_cell.older = older,
        }
        // The search for the lowest worth skips bins without this bit.
        if ends.0 == NONE {
            cell.occupied &= !(1 << bin);
        }
    }

    /// Remembered blocks of all units.
    #[cfg(test)]
    pub(super) fn live(&self) -> usize {
        self.table.iter().map(|unit| unit.live as usize).sum()
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.table.memory_bytes() + self.free.memory_bytes()
    }

    fn push_bin(&mut self, index: u32) {
        let bin = usize::from(self[index].bin);
        let older = self.bins[bin].1;
        self.bins[bin].1 = index;
        match older {
            NONE => {
                self.bins[bin].0 = index;
                if bin + 1 < BINS {
                    self.next_move = self.next_move.min(self[index].at + EDGES[bin + 1]);
                }
            }
            older => self[older].in_bin.newer = index,
        }
        self[index].in_bin = Links { older, newer: NONE };
    }

    fn remove_bin(&mut self, index: u32) {
        let Links { older, newer } = self[index].in_bin;
        let bin = usize::from(self[index].bin);
        match older {
            NONE => self.bins[bin].0 = newer,
            older => self[older].in_bin.newer = newer,
        }
        match newer {
            NONE => self.bins[bin].1 = older,
            newer => self[newer].in_bin.older = older,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::features::{Features, UnitKind};
    use super::*;
    use crate::core::eviction::Priority;

    const UNITS: usize = 1000;

    /// Units of two ages in one cell.
    fn units() -> (Units, Cells, u16) {
        let (mut units, mut cells) = (Units::default(), Cells::at_most(4));
        let features = Features {
            kind: UnitKind::Superseded,
            workload: None,
            stop: None,
            priority: Priority::Normal,
        };
        let cell = cells.add(features, 0, 0.0);
        for number in 0..UNITS {
            let at = if number < UNITS / 2 { 0.0 } else { 1.0 };
            let index = units.add(&mut cells, at, cell, 1, (0, 1));
            units.list(&mut cells, index);
        }
        (units, cells, cell)
    }

    fn in_bin(units: &Units, bin: usize) -> usize {
        units.table.iter().filter(|unit| usize::from(unit.bin) == bin).count()
    }

    /// Each of the 256 touches of a hold moved 256 units: 65,536 in all, for 20 ms.
    #[test]
    fn all_calls_of_one_hold_move_a_limited_number_of_units() {
        let (mut units, mut cells, _) = units();
        let now = EDGES[10] + 1.5;
        for hold in 1..=UNITS.div_ceil(MOVES_PER_HOLD) {
            units.begin_hold();
            for _ in 0..256 {
                units.age(&mut cells, now);
            }
            assert_eq!(in_bin(&units, 10), UNITS.min(hold * MOVES_PER_HOLD));
        }
        assert!(units.next_move > now, "none is left");
    }

    /// After a pause, the next call moved every unit, under the store's lock.
    #[test]
    fn after_a_pause_units_move_to_their_bins_in_several_calls() {
        const WEIGHT: f64 = 1000.0;
        let (mut units, mut cells, cell) = units();
        let now = EDGES[10] + 1.5;
        for moved in [MOVES_PER_CALL, 2 * MOVES_PER_CALL, 3 * MOVES_PER_CALL, UNITS, UNITS] {
            units.age(&mut cells, now);
            assert_eq!((in_bin(&units, 10), in_bin(&units, 0)), (moved, UNITS - moved));
        }
        // Each bin that a unit has passed was exposed to it for the whole of its width.
        let cell = &mut cells.cells[usize::from(cell)];
        for bin in 0..10 {
            let exposure = cell.exposure(bin, now);
            assert!((exposure - WEIGHT).abs() < 1e-6, "bin {bin}: {exposure}");
        }
        let mut order = std::iter::successors(Some(units.bins[10].0), |index| {
            Some(units[*index].in_bin.newer).filter(|newer| *newer != NONE)
        });
        assert!(order.by_ref().map(|index| units[index].at).is_sorted(), "in order of age");
    }
}
