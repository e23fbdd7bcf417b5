//! The summary of a replay in the terminal, and the formats of numbers that other output shares.

use cascade_block::ByteSize;
use cascade_replay::figures::{duration, grouped, headline, payload_line, percent, trace_lines};
use cascade_replay::latency::LatencySummary;
use cascade_replay::result::{ReplayResult, ratio};

use crate::{Failure, Screen};

const BAR_WIDTH: f64 = 32.0;

/// Prints the summary.
pub(super) fn show(result: &ReplayResult, screen: &mut Screen) -> Result<(), Failure> {
    let headline = screen.bold(&headline(result));
    screen.line(headline)?;
    let payload = screen.dim(&payload_line(result));
    screen.line(payload)?;
    for line in trace_lines(result) {
        let line = screen.dim(&line);
        screen.line(line)?;
    }
    screen.line("")?;
    show_hits(result, screen)?;
    show_ceilings(result, screen)?;
    show_latencies(result, screen)?;
    show_bytes(result, screen)?;
    show_verdict(result, screen)
}

fn show_hits(result: &ReplayResult, screen: &mut Screen) -> Result<(), Failure> {
    let rows = [
        ("requests", grouped(result.requests)),
        ("blocks requested", grouped(result.blocks_requested)),
        ("blocks hit", grouped(result.blocks_hit)),
    ];
    for (name, value) in rows {
        screen.line(format!("  {name:<30}{value:>12}"))?;
    }
    let rate = screen.bold(&format!("  {:<30}{:>12}", "hit rate", percent(result.hit_rate)));
    screen.line(rate)?;
    for tier in result.tiers() {
        let hits = result.hits_by_tier.get(&tier).copied().unwrap_or(0);
        show_share(result, &tier, hits, screen)?;
    }
    show_share(result, "missed", result.blocks_requested - result.blocks_hit, screen)
}

fn show_share(
    result: &ReplayResult,
    name: &str,
    blocks: u64,
    screen: &mut Screen,
) -> Result<(), Failure> {
    let share = ratio(blocks as f64, result.blocks_requested as f64);
    let bar = screen.dim(&bar(share));
    screen.line(format!("    {name:<28}{:>12}  {bar}", percent(share)))
}

fn show_ceilings(result: &ReplayResult, screen: &mut Screen) -> Result<(), Failure> {
    let ceilings = &result.ceilings;
    screen.line("")?;
    screen.line("  hit rates of other caches on the same requests")?;
    let blocks = grouped(result.run.dram_blocks);
    let rows = [
        (format!("this policy, DRAM alone ({blocks} blocks)"), ceilings.dram_alone),
        ("this policy, twice that DRAM".to_owned(), ceilings.dram_doubled),
        ("Belady's optimum, that DRAM".to_owned(), ceilings.optimum),
        ("unbounded cache".to_owned(), Some(ceilings.unbounded)),
    ];
    for (name, rate) in rows {
        if let Some(rate) = rate {
            screen.line(format!("    {name:<44}{:>8}", percent(rate)))?;
        }
    }
    Ok(())
}

fn show_latencies(result: &ReplayResult, screen: &mut Screen) -> Result<(), Failure> {
    let Some(latency) = &result.latency else { return Ok(()) };
    screen.line("")?;
    screen.line(format!(
        "  {:<30}{:>10}{:>10}{:>10}{:>10}{:>12}",
        "latency of a call", "calls", "p50", "p99", "max", "rate"
    ))?;
    let rate = |rate: f64| format!("{:.2} GiB/s", rate / 1_073_741_824.0);
    let mut rows = vec![("lookup of a request".to_owned(), &latency.lookup, String::new())];
    for tier in result.tiers() {
        let Some(summary) = latency.read.get(&tier) else { continue };
        // A view of DRAM copies nothing, so bytes per second would mean nothing.
        let copied = latency.read_bytes_per_second.get(&tier).filter(|_| tier != "dram");
        let copied = copied.map_or("no copy".to_owned(), |bytes| rate(*bytes));
        rows.push((format!("read of a batch, {tier}"), summary, copied));
    }
    rows.push(("put of a batch".to_owned(), &latency.put, rate(result.write_bytes_per_second())));
    for (name, summary, rate) in rows.into_iter().filter(|(_, summary, _)| summary.count > 0) {
        screen.line(format!("    {name:<28}{}{rate:>12}", latency_cells(summary)))?;
    }
    Ok(())
}

fn latency_cells(summary: &LatencySummary) -> String {
    let [p50, p99, max] = [summary.us_p50, summary.us_p99, summary.us_max].map(duration);
    format!("{:>10}{p50:>10}{p99:>10}{max:>10}", grouped(summary.count))
}

fn show_bytes(result: &ReplayResult, screen: &mut Screen) -> Result<(), Failure> {
    if result.run.metadata_only {
        return Ok(());
    }
    screen.line("")?;
    let rows = [
        ("payload read".to_owned(), result.bytes_read),
        ("payload put".to_owned(), result.bytes_written),
    ];
    let written = result.bytes_written_down.iter();
    let written = written.map(|(tier, bytes)| (format!("payload written to {tier}"), *bytes));
    let kernel = result.kernel_io.iter().flat_map(|kernel| {
        [
            ("read from disks, by the kernel".to_owned(), kernel.read_bytes),
            ("written to disks, by the kernel".to_owned(), kernel.written_bytes),
        ]
    });
    for (name, bytes) in rows.into_iter().chain(written).chain(kernel) {
        screen.line(format!("  {name:<31}{:>11}", ByteSize(bytes).rounded()))?;
    }
    let time = result.store_seconds;
    let inside = time.lookup + time.read + time.put + time.flush;
    screen.line(format!("  {:<30}{:>10.1} s", "wall time", result.seconds))?;
    let workers = match result.run.threads {
        1 => String::new(),
        threads => format!("  sum of {threads} workers"),
    };
    screen.line(format!("    {:<28}{inside:>10.1} s{workers}", "in the store"))?;
    screen.line(format!("    {:<28}{:>10.1} s", "making and checking payload", time.checking))
}

fn show_verdict(result: &ReplayResult, screen: &mut Screen) -> Result<(), Failure> {
    screen.line("")?;
    if result.run.started_with_blocks > 0 {
        screen.line(format!(
            "  The directory had {} blocks from earlier runs; --fresh removes them first.",
            grouped(result.run.started_with_blocks)
        ))?;
    }
    for (message, count) in &result.failures {
        let text = format!("  {} calls failed and counted as misses: {message}", grouped(*count));
        let text = screen.verdict(false, &text);
        screen.line(text)?;
    }
    for wrong in &result.wrong_examples {
        let text = screen.verdict(false, &format!("  {wrong}"));
        screen.line(text)?;
    }
    let verdict = match (result.run.metadata_only, result.wrong_blocks) {
        (true, _) => return Ok(()),
        (false, 0) => screen.verdict(
            true,
            &format!("  0 wrong blocks: all {} read were checked.", grouped(result.blocks_hit)),
        ),
        (false, wrong) => screen.verdict(
            false,
            &format!(
                "  {} WRONG BLOCKS of {} read. The cause is a bug in Cascade or faulty memory: \
                 please report it with the JSON.",
                grouped(wrong),
                grouped(result.blocks_hit)
            ),
        ),
    };
    screen.line(verdict)
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "between zero and the full width of the bar"
)]
fn bar(share: f64) -> String {
    const EIGHTHS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
    let eighths = (share.clamp(0.0, 1.0) * BAR_WIDTH * 8.0).round() as usize;
    format!("{}{}", "█".repeat(eighths / 8), EIGHTHS[eighths % 8])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_has_the_length_of_its_share() {
        assert_eq!(bar(0.5).chars().count(), 16);
        assert_eq!(bar(-1.0), "");
    }
}
