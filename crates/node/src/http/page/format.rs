//! Formats figures for display.

use cascade_block::ByteSize;

use crate::samples::{Flow, Series};

/// The current rate is the mean over so many sampled time slices.
const CURRENT_SLICES: usize = 3;

/// `12,345`.
pub(super) fn count(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::with_capacity(digits.len() * 2);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// `1.5 GiB`.
pub(super) fn bytes(value: u64) -> String {
    ByteSize(value).rounded()
}

/// `87.5 %`, from a share between 0 and 1.
pub(super) fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

/// `12 µs`, `3.4 ms`, `7 s`, `2 h 5 min`.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a time for display")]
pub(super) fn time(seconds: f64) -> String {
    match seconds {
        // A quantile above the last bound of the histogram of durations, which is 2^24 us.
        s if s.is_infinite() => "over 17 s".to_owned(),
        s if s < 1e-3 => format!("{:.0} µs", s * 1e6),
        s if s < 1.0 => format!("{:.1} ms", s * 1e3),
        s if s < 120.0 => format!("{s:.0} s"),
        s if s < 7200.0 => format!("{:.0} min", s / 60.0),
        s if s < 172_800.0 => {
            let minutes = (s / 60.0) as u64;
            format!("{} h {} min", minutes / 60, minutes % 60)
        }
        s => format!("{:.0} days", s / 86_400.0),
    }
}

/// `1.5 GiB/s`.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bytes for display")]
pub(super) fn per_second(bytes_per_second: f64) -> String {
    format!("{}/s", bytes(bytes_per_second.round() as u64))
}

/// The current rate of a flow: `1.5 GiB/s`, or a dash without samples.
pub(super) fn rate(series: &Series, flow: Flow) -> String {
    current_rate(series, flow).map_or_else(|| "–".to_owned(), per_second)
}

/// The current rate of a flow in bytes per second: the mean over the last sampled time slices.
pub(super) fn current_rate(series: &Series, flow: Flow) -> Option<f64> {
    let sampled =
        series.slices.iter().rev().filter(|slice| slice.sampled_s > 0.0).take(CURRENT_SLICES);
    let (bytes, seconds) = sampled.fold((0.0, 0.0), |(bytes, seconds), slice| {
        (bytes + slice.flow_bytes[flow as usize], seconds + slice.sampled_s)
    });
    (seconds > 0.0).then(|| bytes / seconds)
}

/// The CSS class with the colour of a tier.
pub(in crate::http) fn tier_class(tier: &str) -> &'static str {
    match tier {
        "dram" | "hbm" => "c-dram",
        "files" => "c-files",
        _ => "c-other",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_formatted_with_units() {
        assert_eq!(count(1_234_567), "1,234,567");
        assert_eq!(count(12), "12");
        assert_eq!(percent(0.875), "87.5 %");
        let times = [(2e-6, "2 µs"), (0.0345, "34.5 ms"), (61.0, "61 s"), (600.0, "10 min")];
        for (seconds, text) in times {
            assert_eq!(time(seconds), text);
        }
        assert_eq!(time(7500.0), "2 h 5 min");
        assert_eq!(per_second(1.5 * 1024.0), "1.5 KiB/s");
    }
}
