//! Hazard rates: how likely units are reused, per class and age, estimated from the cells' counts
//! (`docs/eviction.md` has the model).
//!
//! A class with few observations is shrunk toward its parent: its rate is `(reused + K r parent) /
//! (exposure + K)`, where `r` is the class's smoothed ratio to the parent. Finer features of
//! private units (time since the previous turn, length, blocks added) are factors on their class's
//! rate.

use cascade_tier::StopReason;

use super::age::{BINS, EDGES, PerBin, width};
use super::cells::{Cell, Cells};
use super::features::{Features, UnitKind, boost};
use super::index::WorthTables;
use crate::core::eviction::Visits;
use crate::core::eviction::chunks::Chunks;

/// Weight of the parent's rate, as exposure: `K`.
const PARENT_WEIGHT: f64 = 50.0;
/// Weight of the prior ratio to the parent, as expected reuses.
const RATIO_WEIGHT: f64 = 2.5;
/// Bins on each side over which the ratio is smoothed.
const SMOOTH_BINS: usize = 6;
/// Weight of the prior factor of one, as expected reuses.
const FACTOR_WEIGHT: f64 = 10.0;
const FACTORS_MAX: f64 = 16.0;
/// Prior ratio of ended sessions to others, until reuse is observed.
const ENDED_RATIO: f64 = 0.01;

/// Step of a factor toward the observed one, as an exponent of their ratio.
const DAMP: f64 = 0.5;

/// What a refresh costs for each class or cell of a pass, in visits of blocks: it handles all bins.
const VISITS_PER_STEP: usize = 2;

/// A chunk of 64 classes has 40 KiB.
const CLASS_BITS: usize = 6;

const FACTORS: usize = 3;
const OCTAVES: usize = 24;

/// What identifies a class of units.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ClassName {
    Root,
    Work(Option<u8>),
    Stop(Option<u8>, Option<StopReason>),
    Turn(Option<u8>, Option<StopReason>, u8),
    Added(Option<u8>, Option<StopReason>, u8, u8),
    Shared(Option<u8>, u8),
    Superseded(Option<u8>),
    Ended(Option<u8>),
}

impl ClassName {
    fn of(features: &Features) -> Self {
        let work = features.workload;
        match features.kind {
            UnitKind::Private { turn, added, .. } => Self::Added(work, features.stop, turn, added),
            UnitKind::Shared { fan } => Self::Shared(work, fan),
            UnitKind::Superseded => Self::Superseded(work),
            UnitKind::Ended => Self::Ended(work),
        }
    }

    fn parent(self) -> Option<Self> {
        // A level is left out if the request does not have its hint.
        Some(match self {
            Self::Root => return None,
            Self::Added(work, stop, turn, _) => Self::Turn(work, stop, turn),
            Self::Turn(work, Some(stop), _) => Self::Stop(work, Some(stop)),
            Self::Stop(work @ Some(_), _)
            | Self::Turn(work @ Some(_), None, _)
            | Self::Shared(work @ Some(_), _)
            | Self::Superseded(work @ Some(_))
            | Self::Ended(work @ Some(_)) => Self::Work(work),
            _ => Self::Root,
        })
    }
}

#[derive(Debug)]
struct Class {
    name: ClassName,
    parent: Option<u16>,
    reused: PerBin,
    exposure: PerBin,
    /// Expected reuses per unit of exposure.
    rate: PerBin,
    /// Sums of the refresh under way: reuse and exposure.
    sums: Box<[PerBin; 2]>,
}

/// One number for each octave of each factor.
type PerOctave = [[f64; OCTAVES]; FACTORS];

/// A refresh that is under way.
#[derive(Debug)]
struct Refresh {
    pass: Pass,
    /// Classes or cells that the pass has visited.
    visited: usize,
    /// Classes when it began. Later ones get their counts from the next refresh.
    classes: usize,
    observed: Box<PerOctave>,
    expected: Box<PerOctave>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pass {
    /// Clears the sums of the classes.
    Clear,
    /// Adds reuse and exposure of each cell to the sums of its classes.
    Sum,
    /// Estimates the rates of the classes.
    Estimate,
    /// Adds observed and expected reuse of each cell, for the factors.
    Explain,
    /// Gives each cell the table for its factor.
    Assign,
}

/// All classes and factors.
#[derive(Debug)]
pub(super) struct Hazard {
    classes: Chunks<Class, CLASS_BITS>,
    factors: PerOctave,
    kernel: [f64; SMOOTH_BINS + 1],
    refresh: Option<Refresh>,
}

impl Default for Hazard {
    fn default() -> Self {
        let mut kernel = [0.0; SMOOTH_BINS + 1];
        for (distance, weight) in (0_u32..).zip(&mut kernel) {
            // A Gaussian with a standard deviation of the root of 8, about 2.8 bins.
            *weight = (-f64::from(distance * distance) / 16.0).exp();
        }
        let (classes, factors) = (Chunks::default(), [[1.0; OCTAVES]; FACTORS]);
        let mut hazard = Self { classes, factors, kernel, refresh: None };
        hazard.class(ClassName::Root);
        hazard
    }
}

impl Hazard {
    /// The class of units with these features.
    pub(super) fn class_of(&mut self, features: &Features) -> u16 {
        self.class(ClassName::of(features))
    }

    pub(super) fn classes(&self) -> usize {
        self.classes.len()
    }

    /// Expected reuses per unit of exposure, without factors.
    pub(super) fn rate(&self, class: u16) -> &PerBin {
        &self.classes[usize::from(class)].rate
    }

    /// The product of a cell's factors.
    pub(super) fn factor(&self, features: &Features) -> f64 {
        let Some(octaves) = octaves(features) else { return 1.0 };
        let product: f64 =
            octaves.iter().zip(&self.factors).map(|(octave, factor)| factor[*octave]).product();
        product.clamp(1.0 / FACTORS_MAX, FACTORS_MAX)
    }

    /// Begins to estimate all rates and factors again, from the counts until now.
    pub(super) fn begin_refresh(&mut self) {
        let prior = [[FACTOR_WEIGHT; OCTAVES]; FACTORS];
        self.refresh = Some(Refresh {
            pass: Pass::Clear,
            visited: 0,
            classes: self.classes.len(),
            observed: Box::new(prior),
            expected: Box::new(prior),
        });
    }

    pub(super) fn is_refreshing(&self) -> bool {
        self.refresh.is_some()
    }

    /// Goes on with a refresh, which visits each class and each cell several times. Returns whether
    /// it is done.
    pub(super) fn refresh(&mut self, cells: &mut Cells, now: f64, visits: &mut Visits) -> bool {
        let Some(mut refresh) = self.refresh.take() else { return true };
        loop {
            let all = match refresh.pass {
                Pass::Clear | Pass::Estimate => refresh.classes,
                Pass::Sum | Pass::Explain | Pass::Assign => cells.cells.len(),
            };
            while refresh.visited < all {
                if !visits.take(VISITS_PER_STEP) {
                    self.refresh = Some(refresh);
                    return false;
                }
                self.visit(&mut refresh, cells, now);
                refresh.visited += 1;
            }
            refresh.visited = 0;
            refresh.pass = match refresh.pass {
                Pass::Clear => Pass::Sum,
                Pass::Sum => Pass::Estimate,
                Pass::Estimate => Pass::Explain,
                Pass::Explain => {
                    self.move_factors(&refresh.observed, &refresh.expected);
                    Pass::Assign
                }
                Pass::Assign => return true,
            };
        }
    }

    /// Visits the next class or cell of a pass.
    fn visit(&mut self, refresh: &mut Refresh, cells: &mut Cells, now: f64) {
        let at = refresh.visited;
        match refresh.pass {
            Pass::Clear => *self.classes[at].sums = [[0.0; BINS]; 2],
            // Counts are summed again from the cells, because a cell's exposure grows with time.
            Pass::Sum => self.sum(&mut cells.cells[at], now, refresh.classes),
            Pass::Estimate => {
                let class = &mut self.classes[at];
                [class.reused, class.exposure] = *class.sums;
                // A parent has a lower index than its children, so its rate is current for them.
                self.estimate(at);
            }
            Pass::Explain => {
                let Refresh { observed, expected, .. } = refresh;
                self.explain(&mut cells.cells[at], now, observed, expected);
            }
            Pass::Assign => {
                let cell = &mut cells.cells[at];
                let factor = self.factor(&cell.features) * boost(cell.features.priority);
                cell.table = WorthTables::table(cell.class, factor);
            }
        }
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.classes.memory_bytes() + self.classes.len() * size_of::<[PerBin; 2]>()
    }

    fn class(&mut self, name: ClassName) -> u16 {
        if let Some(index) = self.classes.iter().position(|class| class.name == name) {
            return u16::try_from(index).expect("classes are few");
        }
        // The parent is added first, so its index is the lower one.
        let parent = name.parent().map(|parent| self.class(parent));
        let (reused, exposure) = ([0.0; BINS], [0.0; BINS]);
        let sums = Box::new([[0.0; BINS]; 2]);
        self.classes.push(Class { name, parent, reused, exposure, rate: [0.0; BINS], sums });
        self.estimate(self.classes.len() - 1);
        u16::try_from(self.classes.len() - 1).expect("classes are few")
    }

    fn sum(&mut self, cell: &mut Cell, now: f64, classes: usize) {
        // Each count goes to the class and to all its ancestors. Exposure is scaled by the cell's
        // factor, so that the class's rate is the one at a factor of one.
        let factor = self.factor(&cell.features);
        let mut next = Some(cell.class).filter(|class| usize::from(*class) < classes);
        let mut exposure = [0.0; BINS];
        for (bin, exposure) in exposure.iter_mut().enumerate() {
            *exposure = cell.exposure(bin, now) * factor;
        }
        while let Some(index) = next {
            let class = &mut self.classes[usize::from(index)];
            let [all_reused, all_exposure] = &mut *class.sums;
            for (bin, exposure) in exposure.iter().enumerate() {
                all_reused[bin] += cell.reused[bin];
                all_exposure[bin] += exposure;
            }
            next = class.parent;
        }
    }

    fn estimate(&mut self, index: usize) {
        let mut rate = [0.0; BINS];
        let class = &self.classes[index];
        let parent = class.parent.map(|parent| self.classes[usize::from(parent)].rate);
        let ratio_before =
            if matches!(class.name, ClassName::Ended(_)) { ENDED_RATIO } else { 1.0 };
        for bin in 0..BINS {
            let expected = match &parent {
                Some(parent) => self.ratio(class, parent, bin, ratio_before) * parent[bin],
                // The root's prior: a hazard that falls with age as 0.3 / (age + 60 s).
                None => 0.3 * width(bin) / (EDGES[bin] + 60.0),
            };
            // The expected rate counts as `PARENT_WEIGHT` units of exposure.
            rate[bin] = (class.reused[bin] + PARENT_WEIGHT * expected)
                / (class.exposure[bin] + PARENT_WEIGHT);
        }
        self.classes[index].rate = rate;
    }

    /// The class's ratio to its parent around a bin, smoothed with a Gaussian kernel over bins.
    fn ratio(&self, class: &Class, parent: &PerBin, bin: usize, before: f64) -> f64 {
        // The prior counts as `RATIO_WEIGHT` expected reuses at the ratio `before`.
        let (mut reused, mut expected) = (RATIO_WEIGHT * before, RATIO_WEIGHT);
        let last = (bin + SMOOTH_BINS).min(BINS - 1);
        let begin = bin.saturating_sub(SMOOTH_BINS);
        for (other, parent) in (begin..).zip(&parent[begin..=last]) {
            let weight = self.kernel[other.abs_diff(bin)];
            reused += weight * class.reused[other];
            expected += weight * class.exposure[other] * parent;
        }
        reused / expected
    }

    /// Adds the observed and the expected reuse of a cell. The latter leaves out the factor itself,
    /// so that their quotient is its new value.
    fn explain(
        &self,
        cell: &mut Cell,
        now: f64,
        observed: &mut PerOctave,
        expected: &mut PerOctave,
    ) {
        let Some(octaves) = octaves(&cell.features) else { return };
        let rate = &self.classes[usize::from(cell.class)].rate;
        let (mut cell_observed, mut cell_expected) = (0.0, 0.0);
        for (bin, rate) in rate.iter().enumerate() {
            cell_observed += cell.reused[bin];
            cell_expected += cell.exposure(bin, now) * rate;
        }
        cell_expected *= self.factor(&cell.features);
        for (factor, octave) in octaves.into_iter().enumerate() {
            observed[factor][octave] += cell_observed;
            expected[factor][octave] += cell_expected / self.factors[factor][octave];
        }
    }

    fn move_factors(&mut self, observed: &PerOctave, expected: &PerOctave) {
        // All factors move at once and explain the same reuse, so each moves only part of the way.
        for factor in 0..FACTORS {
            for octave in 0..OCTAVES {
                let target = observed[factor][octave] / expected[factor][octave];
                let factor = &mut self.factors[factor][octave];
                // With `DAMP` at one half, this is the geometric mean of the old value and the
                // target.
                *factor *= (target / *factor).powf(DAMP);
            }
        }
    }
}

fn octaves(features: &Features) -> Option<[usize; FACTORS]> {
    match features.kind {
        UnitKind::Private { gap_octave, length_octave, added_octave, .. } => Some(
            [gap_octave, length_octave, added_octave]
                .map(|octave| usize::from(octave).min(OCTAVES - 1)),
        ),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use cascade_tier::Priority;

    use super::*;

    const CELLS: u16 = 2000;

    /// Cells of many classes, each with some reuse and some exposure.
    fn many(hazard: &mut Hazard) -> Cells {
        let mut cells = Cells::default();
        for (number, seconds) in (0..CELLS).zip(0_u32..) {
            let [low, high] = number.to_le_bytes();
            let kind = UnitKind::Private {
                turn: low % 5,
                added: low % 3,
                gap_octave: low / 16,
                length_octave: low % 16,
                added_octave: high,
            };
            let features =
                Features { kind, stop: None, workload: Some(low % 7), priority: Priority::Normal };
            let class = hazard.class_of(&features);
            let cell = usize::from(cells.add(features, class, 0.0));
            cells.cells[cell].weigh(usize::from(low) % BINS, 1.0, 0.0, f64::from(seconds));
            cells.cells[cell].reused[usize::from(high) % BINS] += 0.25;
        }
        cells
    }

    /// A refresh visited all cells, up to 4,096, three times in one request.
    #[test]
    fn a_refresh_in_parts_has_the_result_of_one_at_once() {
        let (mut at_once, mut in_parts) = (Hazard::default(), Hazard::default());
        let (mut cells, mut others) = (many(&mut at_once), many(&mut in_parts));
        let steps = 2 * at_once.classes() + 3 * usize::from(CELLS);
        for _ in 0..3 {
            at_once.begin_refresh();
            assert!(at_once.refresh(&mut cells, 5000.0, &mut Visits::unlimited()));
            in_parts.begin_refresh();
            let mut parts = 1;
            while !in_parts.refresh(&mut others, 5000.0, &mut Visits::default()) {
                parts += 1;
            }
            assert_eq!(parts, steps.div_ceil(256 / VISITS_PER_STEP));
        }
        assert!(!in_parts.is_refreshing());
        assert_ne!(at_once.factors, [[1.0; OCTAVES]; FACTORS]);
        assert_eq!(at_once.factors, in_parts.factors);
        for (one, other) in at_once.classes.iter().zip(in_parts.classes.iter()) {
            assert_eq!((one.name, one.rate), (other.name, other.rate));
        }
        let tables = |cells: &Cells| cells.cells.iter().map(|it| it.table).collect::<Vec<_>>();
        assert_eq!(tables(&cells), tables(&others));
    }
}
