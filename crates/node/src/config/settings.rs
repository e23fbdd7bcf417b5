//! The value and the source of each key, from which the [`NodeConfig`] is built.
//!
//! [`NodeConfig`]: super::NodeConfig

use std::collections::BTreeMap;
use std::fmt;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::key::SettingKey;
use super::keys::{KEYS, SECTIONS, TENANT_KEYS, key};
use super::value::SettingValue;

/// Where the value of a key comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SettingSource {
    /// The built-in default.
    Default,
    /// A default that was computed from the host, with an explanation.
    Derived(String),
    /// A line of the configuration file, from 1.
    File {
        /// The file.
        path: PathBuf,
        /// The line.
        line: usize,
    },
    /// An environment variable.
    Environment(String),
    /// A command-line flag.
    Flag(&'static str),
    /// `cascade config set` on the running node.
    Administrator,
}

impl fmt::Display for SettingSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::Derived(reason) => write!(f, "default: {reason}"),
            Self::File { path, line } => write!(f, "{}:{line}", path.display()),
            Self::Environment(name) => f.write_str(name),
            Self::Flag(name) => write!(f, "--{name}"),
            Self::Administrator => f.write_str("cascade config set"),
        }
    }
}

/// A value and its source.
#[derive(Debug, Clone)]
pub struct Setting {
    /// The value.
    pub value: SettingValue,
    /// Where it comes from.
    pub source: SettingSource,
}

/// Only values are compared, because the source does not change behaviour.
impl PartialEq for Setting {
    fn eq(&self, other: &Self) -> bool {
        self.value == other.value
    }
}

impl Eq for Setting {}

/// Values by the path of their key.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Values(BTreeMap<&'static str, Setting>);

/// The settings of a node and its tenants.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Settings {
    pub(super) node: Values,
    pub(super) tenants: Vec<Values>,
}

impl Settings {
    /// The built-in defaults of all keys that have one.
    pub(super) fn built_in() -> Self {
        let mut node = Values::default();
        for key in KEYS {
            if let Some(text) = key.default {
                let value = key.parse(text).expect("a test parses all defaults");
                node.set(key, value, SettingSource::Default);
            }
        }
        Self { node, tenants: Vec::new() }
    }

    /// The computed size of the file tier and its explanation, if `files_capacity` is not set.
    pub fn derived_files_capacity(&self) -> Option<(u64, &str)> {
        let setting = self.node.get("files_capacity")?;
        let (SettingValue::Size(bytes), SettingSource::Derived(reason)) =
            (&setting.value, &setting.source)
        else {
            return None;
        };
        Some((*bytes, reason))
    }

    /// A TOML file with the current value of every key, and its source as a comment.
    pub fn print(&self) -> String {
        let mut out = String::new();
        for (section, _) in SECTIONS.iter().filter(|(section, _)| *section != "tenant") {
            if !section.is_empty() {
                writeln!(out, "[{section}]").expect("writing to a String cannot fail");
            }
            self.node.print(KEYS.iter().filter(|key| key.section() == *section), &mut out);
            out.push('\n');
        }
        for tenant in &self.tenants {
            out.push_str("[[tenant]]\n");
            tenant.print(TENANT_KEYS.iter(), &mut out);
            out.push('\n');
        }
        out.truncate(out.trim_end().len());
        out
    }
}

impl Values {
    pub(super) fn set(&mut self, key: &SettingKey, value: SettingValue, source: SettingSource) {
        self.0.insert(key.path, Setting { value, source });
    }

    /// Sets the value of a key that is not set.
    pub(super) fn set_default(&mut self, path: &str, value: SettingValue) {
        self.set_default_from(path, value, SettingSource::Default);
    }

    pub(super) fn set_default_from(
        &mut self,
        path: &str,
        value: SettingValue,
        source: SettingSource,
    ) {
        let path = key(path).path;
        self.0.entry(path).or_insert(Setting { value, source });
    }

    pub(super) fn get(&self, path: &str) -> Option<&Setting> {
        assert_eq!(key(path).path, path, "the path of a key");
        self.0.get(path)
    }

    fn value(&self, path: &str) -> Option<&SettingValue> {
        self.get(path).map(|setting| &setting.value)
    }

    pub(super) fn source(&self, path: &str) -> SettingSource {
        self.get(path).map_or(SettingSource::Default, |setting| setting.source.clone())
    }

    /// Whether a file, a variable, a flag or a command set the key.
    pub(super) fn is_given(&self, path: &str) -> bool {
        !matches!(self.source(path), SettingSource::Default | SettingSource::Derived(_))
    }

    pub(super) fn text(&self, path: &str) -> Option<String> {
        self.value(path).map(SettingValue::text)
    }

    pub(super) fn path(&self, path: &str) -> Option<PathBuf> {
        let Some(SettingValue::Path(path)) = self.value(path) else { return None };
        Some(Path::to_owned(path))
    }

    pub(super) fn bytes(&self, path: &str) -> Option<u64> {
        let Some(SettingValue::Size(bytes) | SettingValue::Rate(bytes)) = self.value(path) else {
            return None;
        };
        Some(*bytes)
    }

    pub(super) fn duration(&self, path: &str) -> Option<Duration> {
        let Some(SettingValue::Duration(time)) = self.value(path) else { return None };
        Some(*time)
    }

    pub(super) fn percent(&self, path: &str) -> Option<u8> {
        let Some(SettingValue::Percent(percent)) = self.value(path) else { return None };
        Some(*percent)
    }

    pub(super) fn count(&self, path: &str) -> Option<usize> {
        let Some(SettingValue::Count(count)) = self.value(path) else { return None };
        Some(*count)
    }

    pub(super) fn mode(&self, path: &str) -> Option<u32> {
        let Some(SettingValue::Mode(mode)) = self.value(path) else { return None };
        Some(*mode)
    }

    pub(super) fn is_on(&self, path: &str) -> bool {
        matches!(self.value(path), Some(SettingValue::Switch(true)))
    }

    pub(super) fn address(&self, path: &str) -> Option<SocketAddr> {
        let Some(SettingValue::Address(address)) = self.value(path) else { return None };
        Some(*address)
    }

    pub(super) fn choice(&self, path: &str) -> &'static str {
        let Some(SettingValue::Choice(word)) = self.value(path) else { return "" };
        word
    }

    pub(super) fn list(&self, path: &str) -> &[String] {
        let Some(SettingValue::List(parts)) = self.value(path) else { return &[] };
        parts
    }

    fn print<'a>(&self, keys: impl Iterator<Item = &'a SettingKey>, out: &mut String) {
        for key in keys {
            let line = match self.get(key.path) {
                Some(Setting { value, source }) => {
                    let setting = format!("{} = {}", key.name(), value.toml());
                    format!("{setting:<48} # {source}")
                }
                None => format!("{:<48} # {}", format!("# {} =", key.name()), key.default_text()),
            };
            writeln!(out, "{line}").expect("writing to a String cannot fail");
        }
    }
}
