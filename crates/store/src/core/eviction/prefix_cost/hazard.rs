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
}

/// One number for each octave of each factor.
type PerOctave = [[f64; OCTAVES]; FACTORS];

/// A refresh that is under way. It visits the cells three times, in parts.
#[derive(Debug)]
struct Refresh {
    pass: Pass,
    /// Cells that the pass has visited.
    visited: usize,
}

#[derive(Debug)]
enum Pass {
    /// Sums up reuse and exposure of each class, for its rates.
    Count(Vec<(PerBin, PerBin)>),
    /// Sums up observed and expected reuse, for the factors.
    Explain { observed: Box<PerOctave>, expected: Box<PerOctave> },
    /// Gives each cell the table for its factor.
    Assign,
}

/// All classes and factors.
#[derive(Debug)]
pub(super) struct Hazard {
    classes: Vec<Class>,
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
        let factors = [[1.0; OCTAVES]; FACTORS];
        let mut hazard = Self { classes: Vec::new(), factors, kernel, refresh: None };
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
        // Counts are summed again from the cells, because a cell's exposure grows with time alone.
        let counts = vec![([0.0; BINS], [0.0; BINS]); self.classes.len()];
        self.refresh = Some(Refresh { pass: Pass::Count(counts), visited: 0 });
    }

    pub(super) fn is_refreshing(&self) -> bool {
        self.refresh.is_some()
    }

    /// Continues a refresh with at most `most` cells. Returns whether it has ended.
    pub(super) fn refresh(&mut self, cells: &mut Cells, now: f64, most: usize) -> bool {
        let Some(Refresh { mut pass, visited }) = self.refresh.take() else { return true };
        let end = visited.saturating_add(most).min(cells.cells.len());
        for cell in &mut cells.cells[visited..end] {
            match &mut pass {
                Pass::Count(counts) => self.count(cell, now, counts),
                Pass::Explain { observed, expected } => {
                    self.explain(cell, now, observed, expected);
                }
                Pass::Assign => {
                    let factor = self.factor(&cell.features) * boost(cell.features.priority);
                    cell.table = WorthTables::table(cell.class, factor);
                }
            }
        }
        let mut visited = end;
        if end == cells.cells.len() {
            visited = 0;
            pass = match pass {
                Pass::Count(counts) => {
                    self.set_counts(counts);
                    let prior = Box::new([[FACTOR_WEIGHT; OCTAVES]; FACTORS]);
                    Pass::Explain { observed: prior.clone(), expected: prior }
                }
                Pass::Explain { observed, expected } => {
                    self.move_factors(&observed, &expected);
                    Pass::Assign
                }
                Pass::Assign => return true,
            };
        }
        self.refresh = Some(Refresh { pass, visited });
        false
    }

    /// Estimates the rates from new counts.
    fn set_counts(&mut self, counts: Vec<(PerBin, PerBin)>) {
        for (class, (reused, exposure)) in self.classes.iter_mut().zip(counts) {
            (class.reused, class.exposure) = (reused, exposure);
        }
        // A parent has a lower index than its children, so its rate is current when they use it.
        for index in 0..self.classes.len() {
            self.estimate(index);
        }
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.classes.capacity() * size_of::<Class>()
    }

    fn class(&mut self, name: ClassName) -> u16 {
        if let Some(index) = self.classes.iter().position(|class| class.name == name) {
            return u16::try_from(index).expect("classes are few");
        }
        // The parent is added first, so its index is the lower one.
        let parent = name.parent().map(|parent| self.class(parent));
        let (reused, exposure) = ([0.0; BINS], [0.0; BINS]);
        self.classes.push(Class { name, parent, reused, exposure, rate: [0.0; BINS] });
        self.estimate(self.classes.len() - 1);
        u16::try_from(self.classes.len() - 1).expect("classes are few")
    }

    fn count(&self, cell: &mut Cell, now: f64, counts: &mut [(PerBin, PerBin)]) {
        let factor = self.factor(&cell.features);
        // Each count goes to the class and to all its ancestors. Exposure is scaled by the cell's
        // factor, so that the class's rate is the one at a factor of one.
        let mut next = Some(cell.class);
        let mut exposure = [0.0; BINS];
        for (bin, exposure) in exposure.iter_mut().enumerate() {
            *exposure = cell.exposure(bin, now) * factor;
        }
        while let Some(index) = next {
            // Classes that were added since the refresh began get their counts from the next one.
            if let Some((all_reused, all_exposure)) = counts.get_mut(usize::from(index)) {
                for (bin, exposure) in exposure.iter().enumerate() {
                    all_reused[bin] += cell.reused[bin];
                    all_exposure[bin] += exposure;
                }
            }
            next = self.classes[usize::from(index)].parent;
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

    /// Cells of many classes, each with some reuse and some exposure.
    fn many(hazard: &mut Hazard) -> Cells {
        let mut cells = Cells::default();
        for (number, seconds) in (0..2000_u16).zip(0_u32..) {
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

    /// A refresh visited all cells, up to 4,096, in one request.
    #[test]
    fn a_refresh_in_parts_has_the_result_of_one_at_once() {
        let (mut at_once, mut in_parts) = (Hazard::default(), Hazard::default());
        let (mut cells, mut others) = (many(&mut at_once), many(&mut in_parts));
        for _ in 0..3 {
            at_once.begin_refresh();
            while !at_once.refresh(&mut cells, 5000.0, usize::MAX) {}
            in_parts.begin_refresh();
            let (mut parts, mut visited) = (0, 0);
            while !in_parts.refresh(&mut others, 5000.0, 256) {
                let refresh = in_parts.refresh.as_ref().expect("it has not ended");
                assert!(refresh.visited.saturating_sub(visited) <= 256);
                (parts, visited) = (parts + 1, refresh.visited);
            }
            assert_eq!(parts + 1, 3 * 2000_usize.div_ceil(256));
        }
        assert!(!in_parts.is_refreshing());
        assert_ne!(at_once.factors, [[1.0; OCTAVES]; FACTORS]);
        assert_eq!(at_once.factors, in_parts.factors);
        for (one, other) in at_once.classes.iter().zip(&in_parts.classes) {
            assert_eq!((one.name, one.rate), (other.name, other.rate));
        }
        let tables = |cells: &Cells| cells.cells.iter().map(|it| it.table).collect::<Vec<_>>();
        assert_eq!(tables(&cells), tables(&others));
    }
}
