//! A key of the configuration: one declaration, used for reading, checks and documentation.

use super::value::{SettingValue, ValueKind};

/// The table of keys that an operator rarely needs.
pub(super) const ADVANCED: &str = "advanced";

/// A key of the configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SettingKey {
    /// The name, such as `files_capacity`, or `tenant.files_capacity` for a key of a tenant.
    pub path: &'static str,
    /// The kind of its values.
    pub kind: ValueKind,
    /// Description, in sentences.
    pub meaning: &'static str,
    /// The default, as text.
    pub default: Option<&'static str>,
    /// Description of a default that depends on other settings or on the host.
    pub default_rule: Option<&'static str>,
    /// The smallest value, as text.
    pub minimum: Option<&'static str>,
    /// The largest value, as text.
    pub maximum: Option<&'static str>,
    /// The flag of `cascade serve`, without dashes.
    pub flag: Option<&'static str>,
    /// Whether a reload applies a change of it to a running node.
    pub is_live: bool,
    /// Whether it names a file with a secret.
    pub is_secret: bool,
    /// For an advanced key, why it rarely needs to change.
    pub reason: Option<&'static str>,
}

impl SettingKey {
    pub(super) const fn new(path: &'static str, kind: ValueKind, meaning: &'static str) -> Self {
        Self {
            path,
            kind,
            meaning,
            default: None,
            default_rule: None,
            minimum: None,
            maximum: None,
            flag: None,
            is_live: false,
            is_secret: false,
            reason: None,
        }
    }

    pub(super) const fn default(mut self, text: &'static str) -> Self {
        self.default = Some(text);
        self
    }

    pub(super) const fn default_rule(mut self, words: &'static str) -> Self {
        self.default_rule = Some(words);
        self
    }

    pub(super) const fn minimum(mut self, text: &'static str) -> Self {
        self.minimum = Some(text);
        self
    }

    pub(super) const fn maximum(mut self, text: &'static str) -> Self {
        self.maximum = Some(text);
        self
    }

    pub(super) const fn flag(mut self, name: &'static str) -> Self {
        self.flag = Some(name);
        self
    }

    pub(super) const fn live(mut self) -> Self {
        self.is_live = true;
        self
    }

    pub(super) const fn secret(mut self) -> Self {
        self.is_secret = true;
        self
    }

    pub(super) const fn advanced(mut self, reason: &'static str) -> Self {
        self.reason = Some(reason);
        self
    }

    /// Whether the key belongs below `[advanced]`.
    pub fn is_advanced(&self) -> bool {
        self.reason.is_some()
    }

    /// The table in the file that it belongs to. Empty for the top of the file.
    pub fn section(&self) -> &'static str {
        match self.path.split_once('.') {
            Some((section, _)) => section,
            None if self.is_advanced() => ADVANCED,
            None => "",
        }
    }

    /// The name within its table.
    pub fn name(&self) -> &'static str {
        self.path.split_once('.').map_or(self.path, |(_, name)| name)
    }

    /// The environment variable that sets it.
    pub fn environment(&self) -> String {
        format!("CASCADE_{}", self.path.replace('.', "_").to_uppercase())
    }

    /// Parses a value and checks its bounds.
    ///
    /// # Errors
    /// What is wrong, and the expected value.
    pub fn parse(&self, text: &str) -> Result<SettingValue, String> {
        let value = self.kind.parse(text)?;
        // A test parses all bounds of the table.
        let bound = |text: &str| self.kind.parse(text).ok();
        let is_too_small = |minimum: &&str| bound(minimum) > Some(value.clone());
        if let Some(minimum) = self.minimum.filter(is_too_small) {
            return Err(format!("{} is too small; the minimum is {minimum}", text.trim()));
        }
        let is_too_large = |maximum: &&str| bound(maximum).is_some_and(|maximum| value > maximum);
        if let Some(maximum) = self.maximum.filter(is_too_large) {
            return Err(format!("{} is too large; the maximum is {maximum}", text.trim()));
        }
        Ok(value)
    }

    /// Description of the default.
    pub fn default_text(&self) -> &'static str {
        self.default_rule.or(self.default).unwrap_or("not set")
    }
}
