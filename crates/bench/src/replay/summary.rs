//! The summary of a replay in the terminal, and the formats of numbers that other output shares.

use std::fmt::Write as _;

use cascade_block::ByteSize;

use crate::cli::{Failure, Screen};
use crate::latency::LatencySummary;
use crate::replay::result::{ReplayResult, ratio};

const BAR_WIDTH: f64 = 32.0;

/// Prints the summary.
pub fn show(result: &ReplayResult, screen: &mut Screen) -> Result<(), Failure> {
    let headline = screen.bold(&headline(result));
    screen.line(headline)?;
    let payload = screen.dim(&payload_line(result));
    screen.line(payload)?;
    screen.line("")?;
    show_hits(result, screen)?;
    show_ceilings(result, screen)?;
    show_latencies(result, screen)?;
    show_bytes(result, screen)?;
    show_verdict(result, screen)
}

/// The main result in one sentence.
pub fn headline(result: &ReplayResult) -> String {
    let mut text = if result.run.was_stopped {
        format!("PARTIAL, interrupted after {} requests: ", grouped(result.requests))
    } else {
        String::new()
    };
    let reached = ratio(result.hit_rate, result.ceilings.unbounded);
    let saved = result.blocks_hit * u64::from(result.trace.block_tokens);
    write!(
        text,
        "The hit rate is {}, which is {} of that of an unbounded cache. It saves the computation \
         of {} prompt tokens.",
        percent(result.hit_rate),
        percent(reached.min(1.0)),
        short_count(saved),
    )
    .expect("writing to a String does not fail");
    text
}

/// The block size of this replay, compared with that of the model.
pub fn payload_line(result: &ReplayResult) -> String {
    let payload = &result.payload;
    if result.run.metadata_only {
        return "keys only: no payload was moved, and no times were measured".to_owned();
    }
    let size = ByteSize(payload.block_bytes);
    let tokens = result.trace.block_tokens;
    if (payload.scale - 1.0).abs() < 1e-9 {
        return format!("payload at true size: {tokens} tokens of {} take {size}", payload.model);
    }
    format!(
        "payload scaled 1:{}: a block has {size} here; a block of this trace ({tokens} tokens) has \
         {} with {}",
        scale_text(payload.scale),
        ByteSize(payload.model_block_bytes),
        payload.model,
    )
}

fn scale_text(scale: f64) -> String {
    if scale >= 10.0 { format!("{scale:.0}") } else { format!("{scale:.2}") }
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
        ("bytes read".to_owned(), result.bytes_read),
        ("bytes put".to_owned(), result.bytes_written),
    ];
    let written = result.bytes_written_down.iter();
    let written = written.map(|(tier, bytes)| (format!("bytes written to {tier}"), *bytes));
    for (name, bytes) in rows.into_iter().chain(written) {
        screen.line(format!("  {name:<30}{:>12}", ByteSize(bytes).rounded()))?;
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

/// A share as `35.1 %`.
pub fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

/// A count with groups of three digits: `12,031`.
pub fn grouped(count: u64) -> String {
    let digits = count.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A large count in words: `53.8 million`.
pub fn short_count(count: u64) -> String {
    match count {
        0..10_000 => grouped(count),
        10_000..1_000_000 => format!("{} thousand", grouped((count + 500) / 1000)),
        1_000_000..1_000_000_000 => format!("{:.1} million", count as f64 / 1e6),
        _ => format!("{:.1} billion", count as f64 / 1e9),
    }
}

/// A count in a few characters: `16k`, `1.2M`.
pub fn compact_count(count: u64) -> String {
    match count {
        0..10_000 => grouped(count),
        10_000..1_000_000 => format!("{}k", (count + 500) / 1000),
        1_000_000..1_000_000_000 => format!("{:.1}M", count as f64 / 1e6),
        _ => format!("{:.1}G", count as f64 / 1e9),
    }
}

/// A duration in microseconds, in the unit that fits: `3.2 ms`.
pub fn duration(us: f64) -> String {
    match us {
        us if us < 1.0 => format!("{:.0} ns", us * 1e3),
        us if us < 10.0 => format!("{us:.1} us"),
        us if us < 1e3 => format!("{us:.0} us"),
        us if us < 1e4 => format!("{:.1} ms", us / 1e3),
        us if us < 1e6 => format!("{:.0} ms", us / 1e3),
        us => format!("{:.1} s", us / 1e6),
    }
}

/// A duration in seconds, in the unit that fits: `59 minutes`.
pub fn span(seconds: f64) -> String {
    match seconds {
        seconds if seconds < 120.0 => format!("{seconds:.0} seconds"),
        seconds if seconds < 7200.0 => format!("{:.0} minutes", seconds / 60.0),
        seconds => format!("{:.1} hours", seconds / 3600.0),
    }
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
    fn numbers_are_grouped_and_get_the_unit_that_fits() {
        assert_eq!(grouped(0), "0");
        assert_eq!(grouped(999), "999");
        assert_eq!(grouped(1_234_567), "1,234,567");
        assert_eq!(short_count(53_812_224), "53.8 million");
        assert_eq!(duration(0.25), "250 ns");
        assert_eq!(duration(3_250.0), "3.2 ms");
        assert_eq!(bar(0.5).chars().count(), 16);
        assert_eq!(bar(-1.0), "");
    }
}
