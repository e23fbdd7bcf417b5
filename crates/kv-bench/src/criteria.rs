//! The assessment: four criteria with fixed limits. One without samples is not judged.

use serde::Serialize;

use crate::backend::KvTier;
use crate::measurements::Measurements;
use crate::window::Window;

/// Which criteria are judged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PerformanceProfile {
    /// Latencies and hit rate.
    Latency,
    /// Only that bytes were moved: the rate itself is the result.
    Throughput,
}

/// A figure and its limit.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Criterion {
    /// What is judged.
    pub name: &'static str,
    /// The limit.
    pub target: f64,
    /// The figure. None without samples.
    pub actual: Option<f64>,
    /// Unit of both.
    pub unit: &'static str,
    /// Whether the limit is kept. None without samples.
    pub passed: Option<bool>,
}

/// All criteria and what follows from them.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Assessment {
    /// `PASS` if all judged criteria pass, `FAIL` if one fails, `NOT JUDGED` without any.
    pub overall_status: &'static str,
    /// The criteria.
    pub criteria: Vec<Criterion>,
    /// How many pass.
    pub passed_count: usize,
    /// How many there are.
    pub total_count: usize,
    /// How many have no samples.
    pub not_judged_count: usize,
}

impl Criterion {
    pub(crate) fn below(name: &'static str, target: f64, actual: Option<f64>) -> Self {
        let passed = actual.map(|actual| actual < target);
        Self { name, target, actual, unit: "ms", passed }
    }

    /// That bytes were read from files, and written to them.
    pub(crate) fn rates(read_bytes: u64, written_bytes: u64, window: Window) -> Vec<Self> {
        let rate = |bytes: u64| {
            (bytes > 0).then(|| bytes as f64 / crate::GIB / window.seconds().max(1e-9))
        };
        vec![
            Self::above("Storage KV Read Bandwidth", 0.0, "GiB/s", rate(read_bytes)),
            Self::above("Storage KV Write Bandwidth", 0.0, "GiB/s", rate(written_bytes)),
        ]
    }

    pub(crate) fn above(
        name: &'static str,
        target: f64,
        unit: &'static str,
        actual: Option<f64>,
    ) -> Self {
        Self { name, target, actual, unit, passed: actual.map(|actual| actual > target) }
    }
}

impl Assessment {
    /// Judges a run.
    pub fn of(figures: &Measurements, window: Window, profile: PerformanceProfile) -> Self {
        let p95 = |tier: KvTier| figures.read_by_tier[tier.index()].ms_at(0.95);
        let storage = KvTier::Storage.index();
        Self::from(match profile {
            PerformanceProfile::Latency => vec![
                Criterion::below("Storage Write P95 < 500ms", 500.0, figures.write.ms_at(0.95)),
                Criterion::below("Storage Read P95 < 200ms", 200.0, p95(KvTier::Storage)),
                Criterion::below("CPU RAM P95 < 150ms", 150.0, p95(KvTier::Cpu)),
                Criterion::above("Cache Hit Rate > 30%", 0.3, "ratio", figures.hit_rate()),
            ],
            PerformanceProfile::Throughput => Criterion::rates(
                figures.read[storage].window_bytes,
                figures.written.window_bytes,
                window,
            ),
        })
    }

    pub(crate) fn from(criteria: Vec<Criterion>) -> Self {
        let count = |passed| criteria.iter().filter(|it| it.passed == passed).count();
        let (passed_count, not_judged_count) = (count(Some(true)), count(None));
        let overall_status = match (count(Some(false)), passed_count) {
            (0, 0) => "NOT JUDGED",
            (0, _) => "PASS",
            _ => "FAIL",
        };
        let total_count = criteria.len();
        Self { overall_status, criteria, passed_count, total_count, not_judged_count }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::measurements::ReadPurpose;

    const WINDOW: Window = Window { start: Duration::ZERO, end: Duration::from_secs(1) };

    fn judged(figures: &Measurements) -> Assessment {
        Assessment::of(figures, WINDOW, PerformanceProfile::Latency)
    }

    /// The original leaves out a criterion without samples, and the rest passes.
    #[test]
    fn a_criterion_without_samples_is_not_judged() {
        let mut figures = Measurements::default();
        let nothing = judged(&figures);
        assert_eq!((nothing.overall_status, nothing.not_judged_count), ("NOT JUDGED", 4));
        figures.prefilled(Duration::from_millis(20));
        let one = judged(&figures);
        assert_eq!((one.overall_status, one.passed_count, one.total_count), ("PASS", 1, 4));
        assert_eq!(one.not_judged_count, 3);
        let throughput = Assessment::of(&figures, WINDOW, PerformanceProfile::Throughput);
        assert_eq!(throughput.overall_status, "NOT JUDGED");
    }

    #[test]
    fn each_criterion_has_its_limit() {
        let with = |write: u64, storage: u64, cpu: u64, hits: u64| {
            let mut figures = Measurements { hits, misses: 100 - hits, ..Measurements::default() };
            figures.prefilled(Duration::from_millis(write));
            for (tier, ms) in [(KvTier::Storage, storage), (KvTier::Cpu, cpu)] {
                let took = Duration::from_millis(ms);
                figures.read_context(ReadPurpose::Decode, Some(tier), took);
            }
            judged(&figures)
        };
        assert_eq!(with(490, 195, 145, 31).overall_status, "PASS");
        for (at, failing) in
            [(510, 195, 145, 31), (490, 205, 145, 31), (490, 195, 155, 31), (490, 195, 145, 30)]
                .into_iter()
                .enumerate()
        {
            let (write, storage, cpu, hits) = failing;
            let assessment = with(write, storage, cpu, hits);
            assert_eq!((assessment.overall_status, assessment.passed_count), ("FAIL", 3));
            assert_eq!(assessment.criteria[at].passed, Some(false));
        }
    }
}
