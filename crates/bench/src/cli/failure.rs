//! Why a command could not do its work: what, where, and what to do about it.

use std::error::Error;
use std::io;
use std::path::{Path, PathBuf};

use cascade_node::NodeError;
use cascade_node::config::ConfigError;
use cascade_store::StoreError;
use thiserror::Error;

use crate::cli::{EXIT_FAILED, EXIT_USAGE};

/// A command's failure. Each says what to do next.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Failure {
    /// Options that contradict each other or that the store refuses.
    #[error("{what}\n  {advice}")]
    Usage {
        /// What makes no sense.
        what: String,
        /// What would.
        advice: String,
    },
    /// A file that was asked for could not be written.
    #[error(
        "cannot write {}\n  check that the directory exists, is writable and has space",
        path.display()
    )]
    Write {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Something that has to be read cannot be.
    #[error("cannot read {}\n  {advice}", path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// What to do.
        advice: String,
        /// Why.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// The store did not open or refused to go on.
    #[error("the store failed while {doing}")]
    Store {
        /// What was under way.
        doing: &'static str,
        /// Why.
        #[source]
        source: StoreError,
    },
    /// A node's configuration makes no sense.
    #[error("the configuration is refused")]
    Config(#[source] ConfigError),
    /// A node could not start or go on.
    #[error("the node ended")]
    Node(#[source] NodeError),
    /// No node answers, or it does not take this user.
    #[error("{what}\n  {advice}")]
    Unreachable {
        /// What was seen.
        what: String,
        /// What to do.
        advice: String,
    },
    /// The node understood an order and does not follow it, in its words.
    #[error("{0}")]
    Declined(String),
    /// A measurement could not be made.
    #[error("cannot measure {what}")]
    Measure {
        /// Which.
        what: String,
        /// Why.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// A drawing of the report failed.
    #[error("cannot draw the plot {plot:?}: {reason}")]
    Plot {
        /// Which.
        plot: &'static str,
        /// Why.
        reason: String,
    },
}

impl Failure {
    /// Options that make no sense, and what would.
    pub fn usage(what: impl Into<String>, advice: impl Into<String>) -> Self {
        Self::Usage { what: what.into(), advice: advice.into() }
    }

    /// A file that could not be written; `-` is the terminal.
    pub fn write(path: impl AsRef<Path>, source: io::Error) -> Self {
        Self::Write { path: path.as_ref().to_owned(), source }
    }

    /// A measurement that could not be made.
    pub fn measure(
        what: impl Into<String>,
        source: impl Into<Box<dyn Error + Send + Sync>>,
    ) -> Self {
        Self::Measure { what: what.into(), source: source.into() }
    }

    /// The process's exit code for it.
    pub fn exit_code(&self) -> i32 {
        match self {
            Self::Usage { .. } | Self::Read { .. } | Self::Config(_) => EXIT_USAGE,
            Self::Store { source: StoreError::Config { .. } | StoreError::Pipeline(_), .. } => {
                EXIT_USAGE
            }
            _ => EXIT_FAILED,
        }
    }

    /// The message with all its causes, one a line, each once.
    pub fn explain(&self) -> String {
        let mut text = format!("error: {self}");
        let mut cause = self.source();
        while let Some(error) = cause {
            let next = error.to_string();
            // A transparent error, or one whose message has its cause's, would repeat it.
            if !text.contains(&next) {
                text.push_str("\n  because: ");
                text.push_str(&next);
            }
            cause = error.source();
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A secret that others can read was reported twice: its error has its cause in the message.
    #[test]
    fn every_cause_is_printed_once() {
        #[derive(Debug, Error)]
        #[error("key.pem can be read by everybody")]
        struct Exposed;
        #[derive(Debug, Error)]
        #[error("tls_private_key: {source}")]
        struct Secret {
            source: Exposed,
        }
        #[derive(Debug, Error)]
        #[error(transparent)]
        struct Refused(Secret);
        let failure = Failure::measure("anything", Refused(Secret { source: Exposed }));
        assert_eq!(
            failure.explain(),
            "error: cannot measure anything\n  because: tls_private_key: key.pem can be read \
             by everybody"
        );
    }
}
