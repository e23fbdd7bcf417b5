//! Figures as people read them.

use cascade_block::ByteSize;

use crate::samples::{Flow, Series};

/// Pieces of time that a rate "now" is a mean of.
const NOW_PIECES: usize = 3;

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

/// `87.5 %`, of a share between 0 and 1.
pub(super) fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

/// `12 µs`, `3.4 ms`, `7 s`, `2 h 5 min`.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a time for people")]
pub(super) fn time(seconds: f64) -> String {
    match seconds {
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
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bytes for people")]
pub(super) fn per_second(bytes_per_second: f64) -> String {
    format!("{}/s", bytes(bytes_per_second.round() as u64))
}

/// How much flows now: the mean of the last few seconds that were watched.
pub(super) fn rate(series: &Series, flow: Flow) -> String {
    rate_now(series, flow).map_or_else(|| "–".to_owned(), per_second)
}

/// The same as a number.
pub(super) fn rate_now(series: &Series, flow: Flow) -> Option<f64> {
    let known = series.pieces.iter().rev().filter(|piece| piece.known_s > 0.0).take(NOW_PIECES);
    let (moved, seconds) = known.fold((0.0, 0.0), |(moved, seconds), piece| {
        (moved + piece.moved[flow as usize], seconds + piece.known_s)
    });
    (seconds > 0.0).then(|| moved / seconds)
}

/// The class that gives a tier its colour.
pub(in crate::http) fn tier_hue(tier: &str) -> &'static str {
    match tier {
        "dram" => "c-dram",
        "files" => "c-files",
        _ => "c-other",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_read_well() {
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
