//! Cells: units with equal features, and their counts.
//!
//! A cell counts, per age bin, how much of its units was reused (`reused`) and how long they could
//! have been (`exposure`, in units times bins). Exposure is an exact integral over time: a unit
//! counts for as long as it survives, not from the end of its bin.

use std::collections::HashMap;

use foldhash::fast::RandomState;

use super::age::{BINS, PerBin, width};
use super::features::Features;
use crate::core::eviction::chunks::Chunks;

/// No unit: the end of a list.
pub(super) const NONE: u32 = u32::MAX;

/// Default number of cells beyond which new ones use coarser features.
const CELLS_MAX: usize = 4096;

/// A chunk of 32 cells has 36 KiB.
const CELL_BITS: usize = 5;

/// Units with equal features, and their counts.
#[derive(Debug)]
pub(super) struct Cell {
    pub(super) features: Features,
    /// Its class in [`super::hazard::Hazard`].
    pub(super) class: u16,
    /// Its table in [`super::index::WorthTables`].
    pub(super) table: u32,
    pub(super) reused: PerBin,
    exposure: PerBin,
    /// Weight of the units that are in each bin now.
    at_risk: PerBin,
    /// The time up to which `exposure` is integrated.
    counted_until: PerBin,
    /// Ends of the lists of units with an eviction candidate: oldest, newest.
    pub(super) lists: [(u32, u32); BINS],
    /// Bit per bin: its list is not empty.
    pub(super) occupied: u32,
}

impl Cell {
    fn new(features: Features, class: u16, now: f64) -> Self {
        Self {
            features,
            class,
            table: 0,
            reused: [0.0; BINS],
            exposure: [0.0; BINS],
            at_risk: [0.0; BINS],
            counted_until: [now; BINS],
            lists: [(NONE, NONE); BINS],
            occupied: 0,
        }
    }

    fn count_until(&mut self, bin: usize, now: f64) {
        let elapsed = now - self.counted_until[bin];
        self.exposure[bin] += self.at_risk[bin] * elapsed / width(bin);
        self.counted_until[bin] = now;
    }

    /// Changes the weight in a bin, effective from `since`, which is not after `now`.
    pub(super) fn weigh(&mut self, bin: usize, change: f64, since: f64, now: f64) {
        // First the old weight until now, then the change for the time since `since`.
        self.count_until(bin, now);
        self.at_risk[bin] += change;
        self.exposure[bin] += change * (now - since) / width(bin);
    }

    /// Exposure until now.
    pub(super) fn exposure(&mut self, bin: usize, now: f64) -> f64 {
        self.count_until(bin, now);
        // Weights are added and removed as floating-point numbers, which can end below zero.
        self.exposure[bin].max(0.0)
    }
}

/// All cells, by their features.
#[derive(Debug)]
#[expect(clippy::struct_field_names, reason = "they are the cells")]
pub(super) struct Cells {
    pub(super) cells: Chunks<Cell, CELL_BITS>,
    /// Looked up for every block that is put, so with a cheap hash.
    by_features: HashMap<Features, u16, RandomState>,
    /// The last one that was found: blocks that are put together mostly have one cell.
    last: Option<(Features, u16)>,
    /// Number of cells beyond which new ones use coarser features.
    most: usize,
}

impl Default for Cells {
    fn default() -> Self {
        Self::at_most(CELLS_MAX)
    }
}

impl Cells {
    pub(super) fn at_most(most: usize) -> Self {
        Self {
            cells: Chunks::default(),
            by_features: HashMap::default(),
            last: None,
            most: most.min(CELLS_MAX),
        }
    }

    pub(super) fn find(&mut self, features: Features) -> Option<u16> {
        if let Some((_, cell)) = self.last.filter(|(last, _)| *last == features) {
            return Some(cell);
        }
        let found = self.by_features.get(&features).copied();
        self.last = found.map(|cell| (features, cell));
        found
    }

    /// The features of a new cell for `features`: coarser ones once there are `most` cells.
    pub(super) fn affordable(&self, features: Features) -> Features {
        if self.cells.len() < self.most { features } else { features.coarse() }
    }

    pub(super) fn add(&mut self, features: Features, class: u16, now: f64) -> u16 {
        // Coarse cells are added beyond `most`, too: their number is bounded by the features left.
        let index = u16::try_from(self.cells.len()).expect("features are few: classes times 3");
        self.cells.push(Cell::new(features, class, now));
        self.by_features.insert(features, index);
        index
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.cells.memory_bytes() + self.by_features.capacity() * size_of::<(Features, u16)>()
    }
}
