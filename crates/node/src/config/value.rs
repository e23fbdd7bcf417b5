//! Values of keys: parsed from text with a unit, and formatted so that they parse back the same.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cascade_block::{ByteSize, TimeSpan};

/// The kind of value that a key accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ValueKind {
    /// Any text.
    Text,
    /// An absolute path.
    Path,
    /// Bytes.
    Size,
    /// Bytes per second.
    Rate,
    /// A duration.
    Duration,
    /// A share in percent.
    Percent,
    /// A whole number.
    Count,
    /// Permissions of a file.
    Mode,
    /// `true` or `false`.
    Switch,
    /// An IP address and a TCP port.
    Address,
    /// The URL of an HTTP service.
    Url,
    /// One of these words.
    Choice(&'static [&'static str]),
    /// Several texts.
    List,
}

/// A parsed value.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd)]
pub enum SettingValue {
    /// Of [`ValueKind::Text`] and [`ValueKind::Url`].
    Text(String),
    /// Of [`ValueKind::Path`].
    Path(PathBuf),
    /// Of [`ValueKind::Size`], in bytes.
    Size(u64),
    /// Of [`ValueKind::Rate`], in bytes per second.
    Rate(u64),
    /// Of [`ValueKind::Duration`].
    Duration(Duration),
    /// Of [`ValueKind::Percent`], 0 to 255.
    Percent(u8),
    /// Of [`ValueKind::Count`].
    Count(usize),
    /// Of [`ValueKind::Mode`].
    Mode(u32),
    /// Of [`ValueKind::Switch`].
    Switch(bool),
    /// Of [`ValueKind::Address`].
    Address(SocketAddr),
    /// Of [`ValueKind::Choice`].
    Choice(&'static str),
    /// Of [`ValueKind::List`].
    List(Vec<String>),
}

impl ValueKind {
    /// Parses a value.
    ///
    /// # Errors
    /// What is wrong, and the expected form.
    pub fn parse(self, text: &str) -> Result<SettingValue, String> {
        let trimmed = text.trim();
        let wrong = || format!("{trimmed:?} is not {}", self.description());
        let size = |text: &str| text.parse::<ByteSize>().map(|size| size.0);
        match self {
            Self::Text if trimmed.is_empty() => Err(wrong()),
            Self::Text => Ok(SettingValue::Text(trimmed.to_owned())),
            Self::Url => {
                let is_url = ["http://", "https://"].iter().any(|scheme| {
                    trimmed.strip_prefix(scheme).is_some_and(|rest| !rest.is_empty())
                });
                is_url.then(|| SettingValue::Text(trimmed.to_owned())).ok_or_else(wrong)
            }
            Self::Path => {
                let path = Path::new(text);
                path.is_absolute().then(|| SettingValue::Path(path.to_owned())).ok_or_else(wrong)
            }
            Self::Size => size(trimmed).map(SettingValue::Size).map_err(|error| error.to_string()),
            Self::Rate => {
                let bytes = trimmed.strip_suffix("/s").unwrap_or(trimmed);
                size(bytes).map(SettingValue::Rate).map_err(|_| wrong())
            }
            Self::Duration => {
                let span = trimmed.parse().map(|TimeSpan(time)| SettingValue::Duration(time));
                span.map_err(|error| error.to_string())
            }
            Self::Percent => {
                let number = trimmed.strip_suffix('%').unwrap_or(trimmed).trim_end();
                number.parse().map(SettingValue::Percent).map_err(|_| wrong())
            }
            Self::Count => trimmed.parse().map(SettingValue::Count).map_err(|_| wrong()),
            Self::Mode => {
                let digits = trimmed.strip_prefix("0o").unwrap_or(trimmed);
                let mode = u32::from_str_radix(digits, 8).ok().filter(|mode| *mode <= 0o777);
                mode.filter(|_| digits.len() >= 3).map(SettingValue::Mode).ok_or_else(wrong)
            }
            Self::Switch => trimmed.parse().map(SettingValue::Switch).map_err(|_| wrong()),
            Self::Address => trimmed.parse().map(SettingValue::Address).map_err(|_| wrong()),
            Self::Choice(words) => {
                let word = words.iter().find(|word| word.eq_ignore_ascii_case(trimmed));
                word.map(|word| SettingValue::Choice(word)).ok_or_else(wrong)
            }
            Self::List => {
                let parts = trimmed.split(',').map(str::trim).filter(|part| !part.is_empty());
                Ok(SettingValue::List(parts.map(str::to_owned).collect()))
            }
        }
    }

    /// Description of a value of this kind, with an example.
    pub fn description(self) -> String {
        match self {
            Self::Text => "text".to_owned(),
            Self::Path => "an absolute path, such as /var/lib/cascade".to_owned(),
            Self::Size => "a size, such as 512MiB".to_owned(),
            Self::Rate => "a rate, such as 500MiB/s".to_owned(),
            Self::Duration => "a duration, such as 500ms, 30s, 5min or 1h".to_owned(),
            Self::Percent => "a share, such as 25%".to_owned(),
            Self::Count => "a whole number".to_owned(),
            Self::Mode => "permissions in octal digits, such as 0600".to_owned(),
            Self::Switch => "true or false".to_owned(),
            Self::Address => "an IP address and a port, such as 127.0.0.1:9000".to_owned(),
            Self::Url => "a URL, such as http://localhost:4318".to_owned(),
            Self::Choice(words) => format!("one of {}", words.join(", ")),
            Self::List => "a list of texts".to_owned(),
        }
    }

    /// Placeholder for a value in command-line help.
    pub fn placeholder(self) -> &'static str {
        match self {
            Self::Text => "TEXT",
            Self::Path => "PATH",
            Self::Size => "SIZE",
            Self::Rate => "RATE",
            Self::Duration => "TIME",
            Self::Percent => "PERCENT",
            Self::Count => "N",
            Self::Mode => "MODE",
            Self::Switch => "true|false",
            Self::Address => "ADDRESS:PORT",
            Self::Url => "URL",
            Self::Choice(_) => "NAME",
            Self::List => "LIST",
        }
    }

    /// Whether the value must be a TOML string, so that `socket = true` is an error.
    pub(super) fn is_quoted(self) -> bool {
        matches!(self, Self::Text | Self::Path | Self::Address | Self::Url | Self::Choice(_))
    }
}

impl SettingValue {
    /// The value in TOML. Parsing it gives the same value.
    pub fn toml(&self) -> String {
        match self {
            Self::Count(count) => count.to_string(),
            Self::Switch(is_on) => is_on.to_string(),
            Self::List(parts) => {
                let parts: Vec<String> = parts.iter().map(|part| quoted(part)).collect();
                format!("[{}]", parts.join(", "))
            }
            _ => quoted(&self.text()),
        }
    }

    /// The value as text, for a variable or a flag.
    pub fn text(&self) -> String {
        match self {
            Self::Text(text) => text.clone(),
            Self::Path(path) => path.display().to_string(),
            Self::Size(bytes) => ByteSize(*bytes).to_string(),
            Self::Rate(bytes) => format!("{}/s", ByteSize(*bytes)),
            Self::Duration(time) => TimeSpan(*time).to_string(),
            Self::Percent(percent) => format!("{percent}%"),
            Self::Count(count) => count.to_string(),
            Self::Mode(mode) => format!("{mode:04o}"),
            Self::Switch(is_on) => is_on.to_string(),
            Self::Address(address) => address.to_string(),
            Self::Choice(word) => (*word).to_owned(),
            Self::List(parts) => parts.join(","),
        }
    }
}

/// A basic string in TOML.
pub(super) fn quoted(text: &str) -> String {
    let mut out = String::from("\"");
    for letter in text.chars() {
        match letter {
            '"' | '\\' => out.extend(['\\', letter]),
            control if control.is_control() => {
                write!(out, "\\u{:04X}", u32::from(control))
                    .expect("writing to a String cannot fail");
            }
            plain => out.push(plain),
        }
    }
    out.push('"');
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_parsed_and_formatted_back() {
        for (kind, text, value, back) in [
            (ValueKind::Size, "1GiB", SettingValue::Size(1 << 30), "\"1GiB\""),
            (ValueKind::Size, "4096", SettingValue::Size(4096), "\"4KiB\""),
            (ValueKind::Rate, "500MiB/s", SettingValue::Rate(500 << 20), "\"500MiB/s\""),
            (
                ValueKind::Duration,
                "90s",
                SettingValue::Duration(Duration::from_secs(90)),
                "\"90s\"",
            ),
            (
                ValueKind::Duration,
                "5 min",
                SettingValue::Duration(Duration::from_secs(300)),
                "\"5min\"",
            ),
            (ValueKind::Duration, "0ms", SettingValue::Duration(Duration::ZERO), "\"0ms\""),
            (ValueKind::Duration, "30", SettingValue::Duration(Duration::from_secs(30)), "\"30s\""),
            (
                ValueKind::Duration,
                "0.5",
                SettingValue::Duration(Duration::from_millis(500)),
                "\"500ms\"",
            ),
            (ValueKind::Rate, "1024", SettingValue::Rate(1024), "\"1KiB/s\""),
            (ValueKind::Percent, "25%", SettingValue::Percent(25), "\"25%\""),
            (ValueKind::Percent, "25", SettingValue::Percent(25), "\"25%\""),
            (ValueKind::Mode, "0660", SettingValue::Mode(0o660), "\"0660\""),
            (ValueKind::Mode, "0o600", SettingValue::Mode(0o600), "\"0600\""),
            (ValueKind::Switch, "false", SettingValue::Switch(false), "false"),
            (ValueKind::Count, "64", SettingValue::Count(64), "64"),
            (ValueKind::Text, "a \"b\"", SettingValue::Text("a \"b\"".to_owned()), r#""a \"b\"""#),
            (ValueKind::Choice(&["lru", "arc"]), "LRU", SettingValue::Choice("lru"), "\"lru\""),
        ] {
            let read = kind.parse(text).unwrap();
            assert_eq!((&read, read.toml().as_str()), (&value, back), "{text}");
            assert_eq!(kind.parse(&read.text()), Ok(value), "{text}");
        }
    }

    #[test]
    fn the_error_of_an_invalid_value_names_the_expected_form() {
        for (kind, text, hint) in [
            (ValueKind::Size, "lots", "512MiB"),
            (ValueKind::Rate, "fast", "500MiB/s"),
            (ValueKind::Duration, "s", "250ms"),
            (ValueKind::Duration, "-1", "250ms"),
            (ValueKind::Duration, "99999999999999999999s", "36525d"),
            (ValueKind::Percent, "300%", "25%"),
            (ValueKind::Mode, "rw", "0600"),
            (ValueKind::Mode, "7777", "0600"),
            (ValueKind::Mode, "6", "0600"),
            (ValueKind::Path, "cache", "/var/lib/cascade"),
            (ValueKind::Path, "~/cache", "/var/lib/cascade"),
            (ValueKind::Address, "localhost", "127.0.0.1:9000"),
            (ValueKind::Url, "localhost:4318", "http://"),
            (ValueKind::Switch, "yes", "true or false"),
            (ValueKind::Count, "-1", "whole number"),
            (ValueKind::Choice(&["lru", "arc"]), "clock", "lru, arc"),
        ] {
            let message = kind.parse(text).unwrap_err();
            assert!(message.contains(hint), "{text}: {message}");
        }
    }
}
