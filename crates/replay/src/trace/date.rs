//! Dates with a time of day, as Azure's traces have them.

use std::time::Duration;

/// The form of a date in errors.
pub(super) const EXPECTED: &str = "a date and time such as 2023-11-16 18:15:46.68";

const SECONDS_OF_A_DAY: i64 = 86_400;

/// The time since 1970 of a date such as `2023-11-16 18:15:46.6805900`. A zone (`Z`, `+01:00`) may
/// follow. `None` if it is none, or before 1970.
pub(super) fn since_1970(text: &str) -> Option<Duration> {
    let (date, time) = text.trim().split_once([' ', 'T'])?;
    let [year, month, day] = numbers(date, '-')?;
    let (time, offset_minutes) = without_zone(time)?;
    let (clock, fraction) = time.split_once('.').unwrap_or((time, "0"));
    let [hour, minute, second] = numbers(clock, ':')?;
    let is_date = (1..=12).contains(&month) && day >= 1 && day <= days_of_month(year, month);
    if !is_date || !(1970..=9999).contains(&year) || hour > 23 || minute > 59 || second > 60 {
        return None;
    }
    let day_seconds = (hour * 60 + minute - offset_minutes) * 60 + second;
    let seconds = days_since_1970(year, month, day) * SECONDS_OF_A_DAY + day_seconds;
    Some(Duration::new(u64::try_from(seconds).ok()?, nanoseconds(fraction)?))
}

/// Three numbers of digits only.
fn numbers(text: &str, separator: char) -> Option<[i64; 3]> {
    let mut parts = text.split(separator);
    let mut next = || {
        let part = parts.next()?;
        let is_number = (1..=4).contains(&part.len()) && part.bytes().all(|it| it.is_ascii_digit());
        if is_number { part.parse().ok() } else { None }
    };
    let found = [next()?, next()?, next()?];
    parts.next().is_none().then_some(found)
}

/// The time without its zone, and the zone's minutes ahead of UTC.
fn without_zone(time: &str) -> Option<(&str, i64)> {
    if let Some(time) = time.strip_suffix('Z') {
        return Some((time, 0));
    }
    let Some(at) = time.find(['+', '-']) else { return Some((time, 0)) };
    let (time, zone) = time.split_at(at);
    let [hours, minutes, _] = numbers(&format!("{}:0", zone.get(1..)?), ':')?;
    if hours > 23 || minutes > 59 {
        return None;
    }
    let ahead = hours * 60 + minutes;
    Some((time, if zone.starts_with('-') { -ahead } else { ahead }))
}

/// At most nine digits count.
fn nanoseconds(fraction: &str) -> Option<u32> {
    if fraction.is_empty() || !fraction.bytes().all(|it| it.is_ascii_digit()) {
        return None;
    }
    format!("{fraction:0<9}").get(..9)?.parse().ok()
}

fn is_leap(year: i64) -> bool {
    year % 4 == 0 && (year % 100 != 0 || year % 400 == 0)
}

fn days_of_month(year: i64, month: i64) -> i64 {
    match month {
        2 if is_leap(year) => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

fn days_since_1970(year: i64, month: i64, day: i64) -> i64 {
    let leap_days = |before: i64| before / 4 - before / 100 + before / 400;
    let of_years = (year - 1970) * 365 + leap_days(year - 1) - leap_days(1969);
    let of_months: i64 = (1..month).map(|month| days_of_month(year, month)).sum();
    of_years + of_months + day - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_times_since_1970() {
        let seconds = |text: &str| since_1970(text).map(|time| time.as_secs());
        assert_eq!(seconds("1970-01-01 00:00:00"), Some(0));
        assert_eq!(seconds("2000-03-01T00:00:00Z"), Some(951_868_800));
        assert_eq!(seconds("2024-02-29 12:00:00+01:00"), Some(1_709_204_400));
        assert_eq!(seconds("2024-02-29 10:00:00-01:00"), Some(1_709_204_400));
        let fine = since_1970("2023-11-16 18:15:46.6805900").expect("Azure's form");
        assert_eq!(fine, Duration::new(1_700_158_546, 680_590_000));
        for wrong in [
            "",
            "5",
            "2023-11-16",
            "2023-02-29 00:00:00",
            "2023-13-01 00:00:00",
            "2023-11-16 24:00:00",
            "2023-11-16 18:15",
            "2023-11-16 18:15:46.",
            "2023-11-16 18:15:46.6x",
            "2023-11-16 18:15:46+é",
            "1969-12-31 23:59:59",
            "1970-01-01 00:00:00+01:00",
        ] {
            assert_eq!(since_1970(wrong), None, "{wrong}");
        }
    }
}
