//! The summary of `cascade bench kv` in the terminal.

use cascade_kv_bench::GIB;
use cascade_kv_bench::backend::KvTier;
use cascade_kv_bench::compatible::figures::{LogFacts, ObjectFigures};
use cascade_kv_bench::histogram::LatencyHistogram;
use cascade_kv_bench::report::{actual_text, headline};
use cascade_kv_bench::result::KvResult;
use cascade_replay::figures::{grouped, percent};

use crate::{Failure, Screen};

/// Prints the summary.
pub(super) fn show(result: &KvResult, screen: &mut Screen) -> Result<(), Failure> {
    let environment = screen.dim(&result.environment.headline());
    screen.line(environment)?;
    if let Some(log) = result.log() {
        return show_log(result, log, screen);
    }
    let headline = screen.bold(&headline(result));
    screen.line(headline)?;
    show_validity(result, screen)?;
    show_assessment(result, screen)?;
    show_overall(result, screen)?;
    show_scaling(result, screen)?;
    show_latencies(result, screen)?;
    show_tiers(result, screen)?;
    show_honesty(result, screen)
}

/// The summary of a run that only logged its operations.
fn show_log(result: &KvResult, log: &LogFacts, screen: &mut Screen) -> Result<(), Failure> {
    let figures = result.figures();
    let (rows, path) = (grouped(log.rows.count()), log.path.display());
    let headline = screen.bold(&format!("{rows} operations in {path}"));
    screen.line(headline)?;
    if result.outcome.was_stopped {
        screen.line("PARTIAL: interrupted; the log has the operations until then")?;
    }
    for note in result.mode_notes() {
        screen.line(note)?;
    }
    screen.line("\n### LOGGED WORKLOAD ###")?;
    screen.line(format!("  Simulated Time: {:.1} s", result.seconds()))?;
    screen.line(format!("  Total Requests: {}", grouped(figures.requests)))?;
    screen.line(format!("  Total Tokens Generated: {}", grouped(figures.tokens)))?;
    let rate = figures.hit_rate().map_or("unknown".to_owned(), percent);
    screen.line(format!("  Hit Rate: {rate}"))?;
    screen.line("\n### OPERATIONS BY TIER ###")?;
    let names = ["Tier-0 (GPU)", "Tier-1 (CPU)", "Tier-2 (files)"];
    for (name, tier) in names.into_iter().zip(log.rows.tiers) {
        screen.line(format!(
            "  {name}: {} writes ({:.2} GiB), {} reads ({:.2} GiB)",
            grouped(tier.writes),
            tier.written_bytes as f64 / GIB,
            grouped(tier.reads),
            tier.read_bytes as f64 / GIB,
        ))?;
    }
    show_tiers(result, screen)
}

fn show_validity(result: &KvResult, screen: &mut Screen) -> Result<(), Failure> {
    for reason in &result.validity.reasons {
        let line = screen.verdict(false, &format!("INVALID: {}", reason.text));
        screen.line(line)?;
    }
    if result.outcome.was_stopped {
        screen.line("PARTIAL: interrupted; the figures are those until then")?;
    }
    for note in result.mode_notes() {
        screen.line(note)?;
    }
    for part in result.simulated() {
        screen.line(format!("simulated: {part}"))?;
    }
    for note in result.notes() {
        screen.line(format!("note: {note}"))?;
    }
    Ok(())
}

fn show_assessment(result: &KvResult, screen: &mut Screen) -> Result<(), Failure> {
    let assessment = &result.assessment;
    let status = assessment.overall_status;
    screen.line(format!("\n### STORAGE PERFORMANCE ASSESSMENT: {status} ###"))?;
    let not_judged = match assessment.not_judged_count {
        0 => String::new(),
        count => format!(", {count} not judged"),
    };
    let (passed, total) = (assessment.passed_count, assessment.total_count);
    screen.line(format!("  Criteria Passed: {passed}/{total}{not_judged}"))?;
    if result.objects().is_some() {
        let stated = result.stated_assessment();
        let (passed, total) = (stated.passed_count, stated.total_count);
        screen.line(format!(
            "  As in the original: {}, {passed}/{total}. It leaves out criteria without samples",
            stated.overall_status
        ))?;
    }
    for criterion in &assessment.criteria {
        let text = format!("{}: {}", criterion.name, actual_text(criterion));
        let line = match criterion.passed {
            Some(true) => screen.verdict(true, &format!("  [PASS] {text}")),
            Some(false) => screen.verdict(false, &format!("  [FAIL] {text}")),
            None => format!("  [----] {text}"),
        };
        screen.line(line)?;
    }
    Ok(())
}

fn show_overall(result: &KvResult, screen: &mut Screen) -> Result<(), Failure> {
    let figures = result.figures();
    let seconds = result.seconds().max(1e-9);
    let rate = |moved| result.gib_per_second(result.counted(moved));
    let [gpu, cpu, storage] = figures.read.map(rate);
    let gpu = if result.sizes.gpu_bytes > 0 {
        format!(", simulated GPU {gpu:.2}")
    } else {
        String::new()
    };
    screen.line("\n### OVERALL PERFORMANCE ###")?;
    screen.line(format!("  Total Requests: {}", grouped(figures.requests)))?;
    screen.line(format!("  Total Tokens Generated: {}", grouped(figures.tokens)))?;
    screen.line(format!("  Throughput: {:.2} tok/s", figures.tokens as f64 / seconds))?;
    screen.line(format!(
        "  Read: {:.2} GiB/s (files {storage:.2}, DRAM {cpu:.2}{gpu})",
        rate(figures.read_total())
    ))?;
    show_written(result, screen)?;
    screen.line(format!(
        "  Window: {seconds:.1} s; operations in flight at its end took {:.3} s more, cut \
         requests: {}",
        result.outcome.tail.as_secs_f64(),
        grouped(figures.cut_requests),
    ))
}

fn show_written(result: &KvResult, screen: &mut Screen) -> Result<(), Failure> {
    let rate = |moved| result.gib_per_second(result.counted(moved));
    let written = rate(result.figures().written);
    if result.objects().is_none() {
        return screen.line(format!("  Written through to files: {written:.2} GiB/s"));
    }
    let [gpu, cpu, storage] = result.written_by_tier().map(rate);
    let gpu = if result.sizes.gpu_bytes > 0 {
        format!(", simulated GPU {gpu:.2}")
    } else {
        String::new()
    };
    screen.line(format!("  Written: {written:.2} GiB/s (files {storage:.2}, DRAM {cpu:.2}{gpu})"))
}

fn show_scaling(result: &KvResult, screen: &mut Screen) -> Result<(), Failure> {
    let Some(scaling) = &result.outcome.scaling else { return Ok(()) };
    screen.line("\n### AUTOSCALING ###")?;
    for event in &scaling.events {
        let saturation =
            event.saturation_level.map_or("unknown".to_owned(), |level| format!("{level:.2}"));
        screen.line(format!(
            "  {:.0} s: {} to {} users (saturation {saturation}, {:.2} GiB/s)",
            event.timestamp, event.action, event.users, event.gib_per_second
        ))?;
    }
    screen
        .line(format!("  Users: {} at first, {} at last", scaling.initial_users, scaling.users))?;
    if let Some((gib, tokens, users)) = scaling.peak {
        screen.line(format!("  Peak: {gib:.2} GiB/s, {tokens:.0} tok/s with {users} users"))?;
    }
    Ok(())
}

fn show_latencies(result: &KvResult, screen: &mut Screen) -> Result<(), Failure> {
    let figures = result.figures();
    screen.line("\n### LATENCY BREAKDOWN ###")?;
    let rows: [(&str, &LatencyHistogram); 6] = [
        ("End-to-End", &figures.end_to_end),
        ("Queue Wait", &figures.queue),
        ("Storage I/O", &figures.storage),
        ("Prefill (write)", &figures.write),
        ("Decode (read of a context)", &figures.decode),
        ("Generation (simulated)", &figures.generation),
    ];
    for (name, histogram) in rows {
        let it = histogram.percentiles();
        if it.count == 0 {
            screen.line(format!("  {name}: no samples"))?;
            continue;
        }
        screen.line(format!(
            "  {name}: mean {:.1}ms, P50 {:.1}ms, P95 {:.1}ms, P99 {:.1}ms, P99.9 {:.1}ms",
            it.mean, it.p50, it.p95, it.p99, it.p999
        ))?;
    }
    for class in figures.starved_classes() {
        screen.line(format!("  No request of class {} was answered", class.name()))?;
    }
    Ok(())
}

fn show_tiers(result: &KvResult, screen: &mut Screen) -> Result<(), Failure> {
    let gib = |bytes: u64| bytes as f64 / GIB;
    let [gpu, cpu, files] = result.tier_contents();
    let label = if result.sizes.gpu_bytes > 0 { " (simulated)" } else { "" };
    screen.line("\n### CACHE TIER DISTRIBUTION ###")?;
    for (name, it) in [
        (format!("GPU Entries{label}"), gpu),
        ("CPU Entries".to_owned(), cpu),
        ("File Entries".to_owned(), files),
    ] {
        screen.line(format!("  {name}: {} ({:.2} GiB)", grouped(it.entries), gib(it.bytes)))?;
    }
    if let Some(objects) = result.objects() {
        let moved = &objects.moved;
        screen.line(format!(
            "  Went to CPU: {}, to files: {}; dropped from files: {}",
            grouped(moved.to_cpu),
            grouped(moved.to_files),
            grouped(moved.dropped),
        ))?;
    }
    Ok(())
}

/// What stands behind the figures: checks, hit rate, processor time, what the kernel counted.
fn show_honesty(result: &KvResult, screen: &mut Screen) -> Result<(), Failure> {
    let figures = result.figures();
    let (all, store) = result.cpu_seconds_per_gib();
    screen.line("\n### BEHIND THE FIGURES ###")?;
    let verified = grouped(figures.verified_blocks);
    let wrong = figures.wrong_blocks;
    let what = if result.objects().is_some() { "Entries" } else { "Blocks" };
    let line = format!("  {what} compared: {verified}, with wrong bytes: {wrong}");
    let line = if wrong > 0 { screen.verdict(false, &line) } else { line };
    screen.line(line)?;
    for example in &figures.wrong_examples {
        screen.line(format!("    {example}"))?;
    }
    for (message, count) in &figures.failures {
        screen.line(format!("  Failed {} times: {message}", grouped(*count)))?;
    }
    let rate = figures.hit_rate().map_or("unknown".to_owned(), percent);
    let again = figures.recomputed.bytes as f64 / GIB;
    screen.line(format!("  Hit rate: {rate}; computed again after misses: {again:.2} GiB"))?;
    screen.line(format!(
        "  Processor time: {all:.3} s a GiB, {store:.3} s without making and comparing bytes"
    ))?;
    let storage = figures.read[KvTier::Storage.index()].bytes as f64 / GIB;
    let written = result.objects().map_or(figures.written.bytes, ObjectFigures::written_to_files);
    let written = written as f64 / GIB;
    screen.line(format!("  Program: {storage:.2} GiB from files, {written:.2} GiB to files"))?;
    if let Some(io) = &result.outcome.kernel.process {
        let (read, written) = (io.read_bytes as f64 / GIB, io.written_bytes as f64 / GIB);
        screen.line(format!("  Kernel, this process: {read:.2} GiB read, {written:.2} written"))?;
    }
    if let Some(device) = &result.outcome.kernel.device {
        let (read, written) = (device.read_bytes as f64 / GIB, device.written_bytes as f64 / GIB);
        let name = &device.name;
        let moved = format!("{read:.2} GiB read, {written:.2} written");
        screen.line(format!("  Device {name}, all processes: {moved}"))?;
    }
    let operations = &figures.operations;
    let (digest, count) = (operations.text(), grouped(operations.count));
    screen.line(format!("  Digest of {count} operations: {digest}, seed {}", result.workload.seed))
}
