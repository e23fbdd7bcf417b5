//! Why a configuration is refused: which key, where it was given, and what would be right.

use std::io;
use std::path::PathBuf;

use cascade_store::SecretError;
use thiserror::Error;

use super::settings::Source;

/// A configuration that a node will not start with.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration file {}", path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The file is no TOML.
    #[error("{}:{line}: {reason}", path.display())]
    Syntax {
        /// Which.
        path: PathBuf,
        /// Where, from 1.
        line: usize,
        /// What is wrong.
        reason: String,
    },
    /// A key or section that does not exist.
    #[error("{place}: there is no {what} {name:?}{}", hint(nearest.as_deref()))]
    Unknown {
        /// `key` or `section`.
        what: &'static str,
        /// What was given.
        name: String,
        /// What was probably meant.
        nearest: Option<String>,
        /// Where.
        place: Source,
    },
    /// A name that a key had before.
    #[error("{place}: {old} is now called {new}{advice}")]
    Renamed {
        /// The name that was given.
        old: String,
        /// The name of the key.
        new: String,
        /// Where it belongs, if that changed too.
        advice: &'static str,
        /// Where.
        place: Source,
    },
    /// A value that its key does not take.
    #[error("{place}: {key}: {reason}")]
    Value {
        /// The key.
        key: String,
        /// What is wrong, and what would be right.
        reason: String,
        /// Where it was given.
        place: Source,
    },
    /// Keys that contradict each other, or a key without the one that it needs.
    #[error("{keys}: {reason}; {advice}")]
    Contradiction {
        /// The keys, separated by commas.
        keys: String,
        /// Why they do not go together.
        reason: String,
        /// What to do.
        advice: String,
    },
    /// A file with a secret that cannot be read, or that others can.
    #[error("{key}: {source}")]
    Secret {
        /// The key that names it.
        key: String,
        /// What is wrong, and what would be right.
        source: SecretError,
    },
}

fn hint(nearest: Option<&str>) -> String {
    nearest.map_or_else(
        || "; `cascade serve --print-config` shows all that there are".to_owned(),
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
