//! The main figures of a replay as sentences, and the formats of numbers.

use std::fmt::Write as _;

use cascade_block::ByteSize;

use crate::result::{ReplayResult, ratio};

/// The main result in one sentence.
pub fn headline(result: &ReplayResult) -> String {
    let mut text = if result.run.was_stopped {
        format!("PARTIAL, interrupted after {} requests: ", grouped(result.requests))
    } else {
        String::new()
    };
    if result.ceilings.unbounded <= 0.0 && result.blocks_hit == 0 {
        text += "The hit rate is 0.0 %, which is ideal: no request shares a block with an earlier \
                 one.";
        return text;
    }
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

/// What the trace is and how it was read, in lines: the format with its rows, the skipped rows, and
/// which requests share blocks.
pub fn trace_lines(result: &ReplayResult) -> Vec<String> {
    let trace = &result.trace;
    let rows = grouped(trace.rows_read);
    let mut lines = vec![format!(
        "trace: {}, {rows} rows read, {} tokens of a prompt per block; {}",
        trace.format, trace.block_tokens, trace.times_text
    )];
    for (reason, count) in &trace.rows_skipped {
        lines.push(format!("skipped rows: {} {reason}", grouped(*count)));
    }
    if trace.rows_out_of_order > 0 {
        let count = grouped(trace.rows_out_of_order);
        lines.push(format!("{count} rows were earlier than the row before; sorted by time"));
    }
    lines.push(trace.sharing.clone());
    lines
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

pub(crate) fn scale_text(scale: f64) -> String {
    if scale >= 10.0 { format!("{scale:.0}") } else { format!("{scale:.2}") }
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
    }
}
