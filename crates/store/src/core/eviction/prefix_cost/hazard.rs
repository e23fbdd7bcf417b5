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
use super::features::{Features, UnitKind};

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

/// All classes and factors.
#[derive(Debug)]
pub(super) struct Hazard {
    classes: Vec<Class>,
    factors: [[f64; OCTAVES]; FACTORS],
    kernel: [f64; SMOOTH_BINS + 1],
}

impl Default for Hazard {
    fn default() -> Self {
        let mut kernel = [0.0; SMOOTH_BINS + 1];
        for (distance, weight) in (0_u32..).zip(&mut kernel) {
            // A Gaussian with a standard deviation of the root of 8, about 2.8 bins.
            *weight = (-f64::from(distance * distance) / 16.0).exp();
        }
        let mut hazard = Self { classes: Vec::new(), factors: [[1.0; OCTAVES]; FACTORS], kernel };
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

    /// Re-estimates all rates and factors from the counts until now.
    pub(super) fn refresh(&mut self, cells: &mut Cells, now: f64) {
        for class in &mut self.classes {
            class.reused = [0.0; BINS];
            class.exposure = [0.0; BINS];
        }
        // Counts are summed again from the cells, because a cell's exposure grows with time alone.
        for cell in &mut cells.cells {
            let factor = self.factor(&cell.features);
            self.collect(cell, factor, now);
        }
        // A parent has a lower index than its children, so its rate is current when they use it.
        for index in 0..self.classes.len() {
            self.estimate(index);
        }
        self.refresh_factors(cells, now);
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

    fn collect(&mut self, cell: &mut Cell, factor: f64, now: f64) {
        // Each count goes to the class and to all its ancestors. Exposure is scaled by the cell's
        // factor, so that the class's rate is the one at a factor of one.
        let mut next = Some(cell.class);
        let mut exposure = [0.0; BINS];
        for (bin, exposure) in exposure.iter_mut().enumerate() {
            *exposure = cell.exposure(bin, now) * factor;
        }
        while let Some(index) = next {
            let class = &mut self.classes[usize::from(index)];
            for (bin, exposure) in exposure.iter().enumerate() {
                class.reused[bin] += cell.reused[bin];
                class.exposure[bin] += exposure;
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

    fn refresh_factors(&mut self, cells: &mut Cells, now: f64) {
        // Expected reuse per octave leaves out this factor itself, so the quotient is its new
        // value.
        let mut observed = [[FACTOR_WEIGHT; OCTAVES]; FACTORS];
        let mut expected = observed;
        for cell in &mut cells.cells {
            let Some(octaves) = octaves(&cell.features) else { continue };
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
