//! The worth of a unit at an age: its expected hits per second of holding one block.
//!
//! Holding a unit until it is `tau` older gives `P(reuse)` hits for `E[time held]`; the worth is
//! the maximum of that ratio over all `tau` (Gittins' index for a learnt hazard,
//! `docs/eviction.md`). One table serves all cells of a class whose factors are within a quarter of
//! an octave.

use super::age::{BINS, PerBin, fraction, width};
use crate::core::eviction::chunks::Chunks;

/// Quarter octaves on each side of one: factors reach 16, priorities four times more.
const STEPS: i32 = 24;
const LEVELS: usize = 2 * STEPS as usize + 1;
/// A chunk of 256 tables has 28 KiB.
const TABLE_BITS: usize = 8;

#[derive(Debug, Clone)]
struct WorthTable {
    /// The refresh that it was computed for.
    refresh: u32,
    /// Worth at the beginning of each bin, and at the end of the last.
    worth: [f32; BINS + 1],
}

/// The tables; each is computed at its first use after a refresh.
#[derive(Debug, Default)]
pub(super) struct WorthTables {
    tables: Chunks<WorthTable, TABLE_BITS>,
    refresh: u32,
}

impl WorthTables {
    /// The number of the table of a class at a factor.
    pub(super) fn table(class: u16, factor: f64) -> u32 {
        #[expect(clippy::cast_possible_truncation, reason = "clamped to the levels before")]
        let step = (factor.log2() * 4.0).round().clamp(f64::from(-STEPS), f64::from(STEPS)) as i32;
        let level = u32::try_from(step + STEPS).expect("the step is at least -STEPS");
        u32::from(class) * u32::try_from(LEVELS).expect("a small constant") + level
    }

    /// Marks all tables as outdated.
    pub(super) fn outdate(&mut self) {
        self.refresh = self.refresh.wrapping_add(1);
    }

    /// Adds tables for up to `classes` classes.
    pub(super) fn grow(&mut self, classes: usize) {
        // One refresh behind, so that each new table is computed at its first use.
        let table = WorthTable { refresh: self.refresh.wrapping_sub(1), worth: [0.0; BINS + 1] };
        while self.tables.len() < classes * LEVELS {
            self.tables.push(table.clone());
        }
    }

    /// Whether a table was computed before the last refresh.
    pub(super) fn is_outdated(&self, table: u32) -> bool {
        self.tables[table as usize].refresh != self.refresh
    }

    /// Computes a table from the rates of its class, if it is outdated.
    pub(super) fn update(&mut self, table: u32, rates: &PerBin) {
        let level = i32::try_from(table as usize % LEVELS).expect("a small constant");
        let table = &mut self.tables[table as usize];
        if table.refresh != self.refresh {
            table.refresh = self.refresh;
            table.worth = worth(rates, (f64::from(level - STEPS) / 4.0).exp2());
        }
    }

    /// The worth at an age in `bin`, interpolated; the table is up to date.
    pub(super) fn worth(&self, table: u32, bin: usize, age: f64) -> f32 {
        let worth = &self.tables[table as usize].worth;
        #[expect(clippy::cast_possible_truncation, reason = "from 0 to 1")]
        let share = fraction(bin, age) as f32;
        worth[bin] + share * (worth[bin + 1] - worth[bin])
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.tables.memory_bytes()
    }
}

fn worth(rates: &PerBin, factor: f64) -> [f32; BINS + 1] {
    // Within a bin the hazard is constant at `rate` per bin, so survival decays exponentially and
    // the expected time held is the integral of survival: width * (1 - exp(-rate)) / rate.
    let mut survival = [0.0; BINS];
    let mut held = [0.0; BINS];
    for bin in 0..BINS {
        let rate = (rates[bin] * factor).max(1e-12);
        survival[bin] = (-rate).exp();
        held[bin] = width(bin) * -(-rate).exp_m1() / rate;
    }
    let mut worth = [0.0; BINS + 1];
    // For each starting bin, the best stopping bin: O(BINS^2), 26 bins, once per table and refresh.
    for (from, worth) in worth[..BINS].iter_mut().enumerate() {
        let (mut alive, mut time, mut best) = (1.0, 0.0, 0.0_f64);
        for bin in from..BINS {
            time += alive * held[bin];
            alive *= survival[bin];
            // `1 - alive` is the probability of reuse by then, and `time` the expected time held.
            best = best.max((1.0 - alive) / time);
        }
        *worth = best;
    }
    // The last bin is unbounded, with a constant hazard: the ratio is the rate itself.
    worth[BINS] = rates[BINS - 1] * factor / width(BINS - 1);
    #[expect(clippy::cast_possible_truncation, reason = "tables are compared, not summed")]
    worth.map(|worth| worth as f32)
}
