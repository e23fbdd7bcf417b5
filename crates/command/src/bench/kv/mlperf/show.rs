//! The summary of a submission in the terminal.

use cascade_kv_bench::submission::OPTIONS;
use cascade_kv_bench::submission::figures::OptionRun;
use cascade_kv_bench::submission::files::SubmissionRun;

use crate::{Failure, Screen};

/// Prints the figures of each option, and whether the run is a valid closed submission.
pub(super) fn show(run: &SubmissionRun, screen: &mut Screen) -> Result<(), Failure> {
    if run.is_interrupted {
        screen.line("PARTIAL: interrupted; the figures are those until then")?;
    }
    for option in &run.options {
        show_option(run, option, screen)?;
    }
    let reasons = run.reasons();
    screen.line("")?;
    if reasons.is_empty() {
        screen.line("The sequence and the workload are those of a closed submission.")?;
    } else {
        let line = screen.verdict(false, "NOT A VALID CLOSED SUBMISSION:");
        screen.line(line)?;
    }
    for reason in reasons {
        screen.line(format!("  {reason}"))?;
    }
    screen.line(
        "The rules name kv-cache.py as the program that is run; ask MLCommons before you submit \
         results of another one.",
    )
}

fn show_option(
    run: &SubmissionRun,
    option: &OptionRun,
    screen: &mut Screen,
) -> Result<(), Failure> {
    let figures = option.figures();
    let facts = OPTIONS.iter().find(|it| it.number == option.option);
    let headline = format!(
        "\nMLPerf {}, option {}: {}, {} ranks, {} trials of {} s",
        run.division.name(),
        option.option,
        facts.map_or("", |it| it.name),
        run.ranks,
        option.trials.len(),
        run.duration_seconds,
    );
    let headline = screen.bold(&headline);
    screen.line(headline)?;
    screen.line(format!("  {:34}{:>14}{:>16}", "", "as original", "within window"))?;
    for (name, original, window) in [
        (
            "Read from storage, GiB/s",
            figures.read_gib_per_second,
            figures.window_read_gib_per_second,
        ),
        (
            "Written to storage, GiB/s",
            figures.written_gib_per_second,
            figures.window_written_gib_per_second,
        ),
    ] {
        screen.line(format!("  {name:34}{original:>14.2}{window:>16.2}"))?;
    }
    let ms = |value: Option<f64>| value.map_or("no samples".to_owned(), |ms| format!("{ms:.1}"));
    for (name, value) in [
        ("Storage throughput, tokens/s", format!("{:.1}", figures.storage_tokens_per_second)),
        ("Tokens/s", format!("{:.1}", figures.tokens_per_second)),
        ("Device read P95, ms", ms(figures.device_read_ms_p95)),
        ("Device write P95, ms", ms(figures.device_write_ms_p95)),
        ("Storage I/O of a request P95, ms", ms(figures.storage_io_ms_p95)),
        ("Tail after the window, s", format!("{:.1}", figures.tail_seconds_max)),
    ] {
        screen.line(format!("  {name:34}{value:>14}"))?;
    }
    screen.line(
        "  Rates are sums of the ranks, means of the trials; the rest is the slowest rank.",
    )?;
    for failure in option.failures() {
        let line = screen.verdict(false, &format!("  FAILED: {failure}"));
        screen.line(line)?;
    }
    Ok(())
}
