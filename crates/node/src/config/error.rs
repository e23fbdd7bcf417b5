//! Errors of loading a configuration: the key, its place, and the expected value.

use std::io;
use std::path::PathBuf;

use cascade_store::SecretError;
use thiserror::Error;

use super::settings::SettingSource;

/// Why a configuration was refused.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration file {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The file is not valid TOML.
    #[error("{}:{line}: {reason}", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// What is wrong.
        reason: String,
    },
    /// A key or section that does not exist.
    #[error("{place}: there is no {what} {name:?}{}", hint(nearest.as_deref()))]
    Unknown {
        /// `key` or `table`.
        what: &'static str,
        /// The unknown name.
        name: String,
        /// The nearest existing name, if one is close.
        nearest: Option<String>,
        /// Where the name is set.
        place: SettingSource,
    },
    /// A value that its key does not accept.
    #[error("{place}: {key}: {reason}")]
    Value {
        /// The key.
        key: String,
        /// What is wrong, and the expected value.
        reason: String,
        /// Where the key is set.
        place: SettingSource,
    },
    /// Keys that contradict each other, or a key without another that it needs.
    #[error("{keys}: {reason}; {advice}")]
    Contradiction {
        /// The keys, separated by commas.
        keys: String,
        /// The contradiction.
        reason: String,
        /// What to do.
        advice: String,
    },
    /// A file with a secret that cannot be read, or that others can read.
    #[error("{key}: {source}")]
    Secret {
        /// The key that names the file.
        key: String,
        /// What is wrong, and what to do.
        source: SecretError,
    },
}

fn hint(nearest: Option<&str>) -> String {
    nearest.map_or_else(
        || "; `cascade serve --print-config` lists all keys".to_owned(),
        |nearest| format!("; did you mean {nearest:?}?"),
    )
}

impl ConfigError {
    pub(super) fn contradiction(
        keys: impl Into<String>,
        reason: impl Into<String>,
        advice: impl Into<String>,
    ) -> Self {
        Self::Contradiction { keys: keys.into(), reason: reason.into(), advice: advice.into() }
    }
}
