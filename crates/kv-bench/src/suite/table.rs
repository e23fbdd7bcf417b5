//! The comparison as text: two tables, and below them what a reader has to know.

use cascade_replay::figures::{duration, grouped, percent};

use crate::suite::comparison::{Comparison, RunFigures, RunOutcome, RunState};

/// Titles of the columns of the first table.
pub const RATES: [&str; 9] = [
    "workload",
    "users",
    "GPU GiB",
    "DRAM GiB",
    "requests",
    "tokens/s",
    "read GiB/s",
    "write GiB/s",
    "read from GPU/DRAM/files",
];
/// Titles of the columns of the second table.
pub const LATENCIES: [&str; 10] = [
    "workload", "all P50", "all P95", "all P99", "I/O P50", "I/O P95", "I/O P99", "hit rate",
    "criteria", "state",
];
/// What the titles mean.
pub const LEGEND: &str = "all: from when a request was due to its answer. I/O: all storage calls \
    of a request. criteria: how many of those with samples keep their limits (docs/benchmark.md).";
/// What stands above the runs in compatible mode.
pub const COMPATIBLE: &str =
    "As the original stores and counts (--compatible); bytes after the window count:";

/// A row of both tables.
#[derive(Debug, Clone)]
pub struct Row {
    /// Whether it stores and counts as the original does.
    pub is_compatible: bool,
    /// The cells of the first table.
    pub rates: [String; 9],
    /// The cells of the second table.
    pub latencies: [String; 10],
}

impl Row {
    /// The row of a run.
    pub fn of(outcome: &RunOutcome) -> Self {
        let run = &outcome.run;
        let figures = outcome.figures.as_ref();
        let cell = |text: &dyn Fn(&RunFigures) -> Option<String>| {
            figures.and_then(text).unwrap_or_else(|| "-".to_owned())
        };
        let ms = |value: Option<f64>| value.map(|ms| duration(ms * 1e3));
        let gpu = match run.gpu_gib {
            gib if gib > 0.0 => format!("{gib} simulated"),
            _ => "-".to_owned(),
        };
        let shares = |it: &RunFigures| {
            let [gpu, cpu, files] = it.read_shares()?.map(|share| share * 100.0);
            Some(format!("{gpu:.0}/{cpu:.0}/{files:.0} %"))
        };
        let criteria = |it: &RunFigures| {
            let (status, passed, judged) = &it.assessment;
            Some(format!("{status} {passed}/{judged}"))
        };
        Self {
            is_compatible: run.is_compatible,
            rates: [
                run.name.clone(),
                run.users.to_string(),
                gpu,
                run.cpu_gib.to_string(),
                cell(&|it| Some(grouped(it.requests))),
                cell(&|it| Some(format!("{:.1}", it.tokens_per_second))),
                cell(&|it| Some(format!("{:.2}", it.read_gib_per_second))),
                cell(&|it| Some(format!("{:.2}", it.written_gib_per_second))),
                cell(&shares),
            ],
            latencies: [
                run.name.clone(),
                cell(&|it| ms(it.end_to_end.p50)),
                cell(&|it| ms(it.end_to_end.p95)),
                cell(&|it| ms(it.end_to_end.p99)),
                cell(&|it| ms(it.storage.p50)),
                cell(&|it| ms(it.storage.p95)),
                cell(&|it| ms(it.storage.p99)),
                cell(&|it| it.hit_rate.map(percent)),
                cell(&criteria),
                state(outcome),
            ],
        }
    }
}

/// The state in a word. What an unoptimised build has measured is invalid, too.
fn state(outcome: &RunOutcome) -> String {
    let is_invalid = outcome.figures.as_ref().is_some_and(|it| !it.invalid.is_empty());
    match outcome.state {
        RunState::Done if is_invalid => "INVALID".to_owned(),
        RunState::Invalid => "INVALID".to_owned(),
        RunState::Failed(_) => "FAILED".to_owned(),
        RunState::Interrupted => "PARTIAL".to_owned(),
        RunState::Done | RunState::NotRun => outcome.state.name().to_owned(),
    }
}

impl Comparison {
    /// The main result in one sentence.
    pub fn headline(&self) -> String {
        let count = |is_such: fn(&RunState) -> bool| {
            self.outcomes.iter().filter(|it| is_such(&it.state)).count()
        };
        let counts = [
            ("done", count(|it| *it == RunState::Done)),
            ("invalid", count(|it| *it == RunState::Invalid)),
            ("interrupted", count(|it| *it == RunState::Interrupted)),
            ("failed", count(|it| matches!(it, RunState::Failed(_)))),
            ("not run", count(|it| *it == RunState::NotRun)),
        ];
        let counts = counts.into_iter().filter(|(name, count)| *count > 0 || *name == "done");
        let counts: Vec<String> = counts.map(|(name, count)| format!("{count} {name}")).collect();
        let interrupted = if self.is_interrupted { "PARTIAL, interrupted: " } else { "" };
        format!("{interrupted}{} runs: {}.", self.outcomes.len(), counts.join(", "))
    }

    /// The whole comparison, in lines.
    pub fn lines(&self) -> Vec<String> {
        let rows: Vec<Row> = self.outcomes.iter().map(Row::of).collect();
        let mut lines = vec![self.headline()];
        let rates: Vec<_> = rows.iter().map(|row| (row.is_compatible, &row.rates[..])).collect();
        lines.extend(table("Rates", &RATES, &rates));
        let latencies: Vec<_> =
            rows.iter().map(|row| (row.is_compatible, &row.latencies[..])).collect();
        lines.extend(table("Latencies", &LATENCIES, &latencies));
        lines.push(format!("  {LEGEND}"));
        let remarks = self.remarks();
        if !remarks.is_empty() {
            lines.push("\n### REMARKS ###".to_owned());
            lines.extend(remarks.into_iter().map(|remark| format!("  {remark}")));
        }
        lines
    }

    /// What a reader has to know beside the tables. A remark on several runs names all of them.
    pub fn remarks(&self) -> Vec<String> {
        let mut remarks: Vec<(String, Vec<&str>)> = Vec::new();
        for outcome in &self.outcomes {
            for text in remarks_of(outcome) {
                let name = outcome.run.name.as_str();
                match remarks.iter_mut().find(|(known, _)| *known == text) {
                    Some((_, names)) => names.push(name),
                    None => remarks.push((text, vec![name])),
                }
            }
        }
        let started = self.outcomes.iter().filter(|it| it.state != RunState::NotRun).count();
        let text = |(text, names): (String, Vec<&str>)| match names.len() {
            count if count > 1 && count == started => format!("all: {text}"),
            _ => format!("{}: {text}", names.join(", ")),
        };
        remarks.into_iter().map(text).collect()
    }
}

fn remarks_of(outcome: &RunOutcome) -> Vec<String> {
    let mut remarks = Vec::new();
    if let RunState::Failed(why) = &outcome.state {
        remarks.push(format!("FAILED: {why}"));
    }
    let Some(figures) = &outcome.figures else { return remarks };
    remarks.extend(figures.invalid.iter().map(|why| format!("INVALID: {why}")));
    if figures.is_partial {
        remarks.push("PARTIAL: the run ended early; the figures are those until then".to_owned());
    }
    remarks.extend(figures.failed_criteria.iter().map(|it| format!("[FAIL] {it}")));
    if figures.is_queue_bound() {
        remarks.push(
            "requests wait for a thread during more than half of their time: fewer users would \
             be answered sooner"
                .to_owned(),
        );
    }
    remarks.extend(figures.scaling.iter().map(|it| format!("autoscaling: {it}")));
    remarks.extend(figures.simulated.iter().map(|it| format!("simulated: {it}")));
    remarks
}

/// A table with its title and columns that fit, names to the left and figures to the right.
fn table(title: &str, titles: &[&str], rows: &[(bool, &[String])]) -> Vec<String> {
    let width = |column: usize| {
        let cells = rows.iter().map(|(_, cells)| cells[column].chars().count());
        cells.chain([titles[column].chars().count()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..titles.len()).map(width).collect();
    let line = |cells: &mut dyn Iterator<Item = &str>| {
        let cells = cells.zip(&widths).enumerate().map(|(at, (cell, width))| match at {
            0 => format!("{cell:<width$}"),
            _ => format!("{cell:>width$}"),
        });
        format!("  {}", cells.collect::<Vec<_>>().join("  "))
    };
    let mut lines = vec![format!("\n### {} ###", title.to_uppercase())];
    lines.push(line(&mut titles.iter().copied()));
    let mut was_compatible = false;
    for (is_compatible, cells) in rows {
        if *is_compatible && !was_compatible {
            lines.push(format!("  {COMPATIBLE}"));
        }
        was_compatible = *is_compatible;
        lines.push(line(&mut cells.iter().map(String::as_str)));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::suite::comparison::tests::comparison;

    #[test]
    fn a_table_has_a_row_for_each_run_and_says_what_is_simulated() {
        let lines = comparison().lines();
        assert_eq!(lines[0], "4 runs: 1 done, 1 invalid, 1 failed, 1 not run.");
        let text = lines.join("\n");
        let row = |name: &str| {
            let found = lines.iter().filter(|line| line.trim_start().starts_with(name));
            found.cloned().collect::<Vec<_>>()
        };
        let gpu = row("gpu-only ");
        assert_eq!(gpu.len(), 2, "{text}");
        for part in ["2 simulated", "1,200", "321.5", "1.50", "0.25", "0/25/75 %"] {
            assert!(gpu[0].contains(part), "{part} is not in {}", gpu[0]);
        }
        for part in ["90 ms", "2.5 s", " - ", "90.0 %", "FAIL 2/3", "INVALID"] {
            assert!(gpu[1].contains(part), "{part} is not in {}", gpu[1]);
        }
        assert!(row("cpu-only ")[1].ends_with("FAILED"), "{text}");
        assert!(row("production ")[1].ends_with("not run"), "{text}");
        assert_eq!(lines.iter().filter(|line| line.contains(COMPATIBLE)).count(), 2, "{text}");
        for line in lines.iter().filter(|line| !line.contains(": ")) {
            assert!(line.chars().count() <= 125, "{line}");
        }
    }

    #[test]
    fn a_remark_on_several_runs_names_all_of_them() {
        let remarks = comparison().remarks();
        for remark in [
            "gpu-only, mlperf option 1: INVALID: a reason",
            "gpu-only, mlperf option 1: [FAIL] Read < 1ms: 2.5ms",
            "gpu-only, mlperf option 1: simulated: token generation: time passes, nothing is \
             computed",
            "cpu-only: FAILED: exit code 2",
        ] {
            assert!(remarks.iter().any(|found| found == remark), "{remark}: {remarks:#?}");
        }
        let mut two = comparison();
        two.outcomes.remove(1);
        let remarks = two.remarks();
        assert!(remarks.iter().any(|found| found == "all: INVALID: a reason"), "{remarks:#?}");
        let interrupted = Comparison { is_interrupted: true, ..comparison() };
        assert!(interrupted.headline().starts_with("PARTIAL, interrupted: 4 runs"));
    }
}
