//! A key of the configuration: one declaration from which reading, checks and documents come.

use super::keys::ADVANCED;
use super::value::{Kind, Value};

/// A key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Key {
    /// Its name, such as `files_capacity`; of a tenant's, `tenant.files_capacity`.
    pub path: &'static str,
    /// What it takes.
    pub kind: Kind,
    /// What it is, in a sentence.
    pub meaning: &'static str,
    /// The value where nobody gives one, as text.
    pub default: Option<&'static str>,
    /// In words, where the default depends on something.
    pub default_rule: Option<&'static str>,
    /// The least value, as text.
    pub minimum: Option<&'static str>,
    /// The largest value, as text.
    pub maximum: Option<&'static str>,
    /// The flag of `cascade serve`, without its dashes.
    pub flag: Option<&'static str>,
    /// Whether a running node takes a change of it on reload.
    pub is_live: bool,
    /// Whether it names a file that holds a secret.
    pub is_secret: bool,
    /// Why nobody has to know it; it stands below `[advanced]` then.
    pub reason: Option<&'static str>,
}

impl Key {
    pub(super) const fn new(path: &'static str, kind: Kind, meaning: &'static str) -> Self {
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

    /// Whether it stands below `[advanced]`.
    pub fn is_advanced(&self) -> bool {
        self.reason.is_some()
    }

    /// The header that it stands below in the file; empty for the top of the file.
    pub fn section(&self) -> &'static str {
        match self.path.split_once('.') {
            Some((section, _)) => section,
            None if self.is_advanced() => ADVANCED,
            None => "",
        }
    }

    /// Its name below the header.
    pub fn name(&self) -> &'static str {
        self.path.split_once('.').map_or(self.path, |(_, name)| name)
    }

    /// The environment variable that sets it.
    pub fn environment(&self) -> String {
        format!("CASCADE_{}", self.path.replace('.', "_").to_uppercase())
    }

    /// Reads a value and holds it against the bounds; else says what would be right.
    pub fn parse(&self, text: &str) -> Result<Value, String> {
        let value = self.kind.parse(text)?;
        // A test reads all bounds of the table.
        let bound = |text: &str| self.kind.parse(text).ok();
        if let Some(least) = self.minimum.filter(|least| bound(least) > Some(value.clone())) {
            return Err(format!("{} is too little; the least is {least}", text.trim()));
        }
        let is_over = |most: &&str| bound(most).is_some_and(|most| value > most);
        if let Some(most) = self.maximum.filter(is_over) {
            return Err(format!("{} is too much; the most is {most}", text.trim()));
        }
        Ok(value)
    }

    /// What it is where nobody says, in words.
    pub fn default_text(&self) -> &'static str {
        self.default_rule.or(self.default).unwrap_or("not set")
    }
}
