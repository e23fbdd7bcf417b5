//! The original's criteria, as it judges them and as we do.
//!
//! The original leaves out a criterion without samples and calls the rest a pass, even if nothing
//! is left. Our judgement beside it says which criteria were not judged.

use crate::backend::KvTier;
use crate::compatible::figures::ObjectFigures;
use crate::criteria::{Assessment, Criterion, PerformanceProfile};
use crate::measurements::Measurements;
use crate::window::Window;

impl Assessment {
    /// Judges a run on whole entries.
    pub fn of_objects(
        figures: &Measurements,
        objects: &ObjectFigures,
        window: Window,
        profile: PerformanceProfile,
    ) -> Self {
        let storage = KvTier::Storage.index();
        Self::from(match profile {
            PerformanceProfile::Latency => vec![
                Criterion::below(
                    "Storage Tier Write Device P95 < 500ms",
                    500.0,
                    objects.write_device.ms_at(0.95),
                ),
                Criterion::below(
                    "Storage Tier Read Device P95 < 200ms",
                    200.0,
                    objects.read_device.ms_at(0.95),
                ),
                Criterion::below(
                    "CPU RAM P95 < 150ms",
                    150.0,
                    objects.cpu_ms_p95(&figures.read_by_tier[KvTier::Cpu.index()]),
                ),
                Criterion::above("Cache Hit Rate > 30%", 0.3, "ratio", figures.hit_rate()),
            ],
            PerformanceProfile::Throughput => Criterion::rates(
                figures.read[storage].bytes,
                objects.written[storage].bytes,
                window,
            ),
        })
    }

    /// The same as the original states it: without criteria that have no samples.
    pub fn as_in_the_original(&self) -> Self {
        let judged = self.criteria.iter().filter(|it| it.passed.is_some()).cloned();
        let mut stated = Self::from(judged.collect());
        if stated.criteria.is_empty() {
            stated.overall_status = "PASS";
        }
        stated
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const WINDOW: Window = Window { start: Duration::ZERO, end: Duration::from_secs(1) };

    #[test]
    fn the_original_passes_what_has_no_samples_and_we_do_not_judge_it() {
        let (mut figures, mut objects) = (Measurements::default(), ObjectFigures::default());
        let judge = |figures: &Measurements, objects: &ObjectFigures| {
            Assessment::of_objects(figures, objects, WINDOW, PerformanceProfile::Latency)
        };
        let nothing = judge(&figures, &objects);
        assert_eq!((nothing.overall_status, nothing.not_judged_count), ("NOT JUDGED", 4));
        let stated = nothing.as_in_the_original();
        assert_eq!((stated.overall_status, stated.total_count), ("PASS", 0));

        objects.read_file(Duration::from_millis(150), Duration::from_millis(900));
        let one = judge(&figures, &objects);
        assert_eq!((one.passed_count, one.total_count, one.not_judged_count), (1, 4, 3));
        let stated = one.as_in_the_original();
        assert_eq!((stated.overall_status, stated.total_count), ("PASS", 1));

        // Reads and writes of CPU memory are one criterion.
        objects.write_by_tier[KvTier::Cpu.index()].record(Duration::from_millis(160));
        figures.hits = 1;
        let failed = judge(&figures, &objects);
        assert_eq!((failed.overall_status, failed.passed_count), ("FAIL", 2));
        assert_eq!(failed.as_in_the_original().overall_status, "FAIL");
    }
}
