//! Why a command failed: what went wrong, where, and what to do.

use std::error::Error;
use std::io;
use std::path::{Path, PathBuf};

use cascade_bench::MeasureError;
use cascade_kv_bench::KvBenchError;
use cascade_node::NodeError;
use cascade_node::config::ConfigError;
use cascade_replay::report::PlotError;
use cascade_store::StoreError;
use thiserror::Error;

use crate::{EXIT_FAILED, EXIT_USAGE};

/// The failure of a command. Most messages end with advice in a second line.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Failure {
    /// An option is not valid, or two options contradict each other.
    #[error("{what}\n  {advice}")]
    Usage {
        /// What is wrong.
        what: String,
        /// What to do.
        advice: String,
    },
    /// An output file could not be written.
    #[error(
        "cannot write {}\n  check that the directory exists, is writable and has free space",
        path.display()
    )]
    Write {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// An input could not be read.
    #[error("cannot read {}\n  {advice}", path.display())]
    Read {
        /// The file, directory or socket.
        path: PathBuf,
        /// What to do.
        advice: String,
        /// The cause.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// A call of the store failed.
    #[error("the store failed while {doing}")]
    Store {
        /// The call.
        doing: &'static str,
        /// The cause.
        #[source]
        source: StoreError,
    },
    /// The configuration of a node is not valid.
    #[error("the configuration is not valid")]
    Config(#[source] ConfigError),
    /// A node could not start or continue.
    #[error("the node stopped")]
    Node(#[source] NodeError),
    /// No node answers, or the node refuses this user.
    #[error("{what}\n  {advice}")]
    Unreachable {
        /// What failed.
        what: String,
        /// What to do.
        advice: String,
    },
    /// The node declined a request, for this reason.
    #[error("{0}")]
    Declined(String),
    /// Input, output or a request could not be handled.
    #[error("cannot {action}")]
    Other {
        /// What failed, after "cannot".
        action: &'static str,
        /// The cause.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// A benchmark failed.
    #[error(transparent)]
    Bench(#[from] MeasureError),
    /// The KV cache benchmark could not run.
    #[error(transparent)]
    KvBench(#[from] KvBenchError),
    /// A plot of the report could not be drawn.
    #[error(transparent)]
    Plot(#[from] PlotError),
}

impl Failure {
    /// An option that is not valid, and what to do.
    pub fn usage(what: impl Into<String>, advice: impl Into<String>) -> Self {
        Self::Usage { what: what.into(), advice: advice.into() }
    }

    /// An output file that could not be written; `-` is standard output.
    pub fn write(path: impl AsRef<Path>, source: io::Error) -> Self {
        Self::Write { path: path.as_ref().to_owned(), source }
    }

    /// Something else that failed: `cannot ACTION`.
    pub fn other(action: &'static str, source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::Other { action, source: source.into() }
    }

    /// A measurement that failed.
    pub fn measure(
        what: impl Into<String>,
        source: impl Into<Box<dyn Error + Send + Sync>>,
    ) -> Self {
        Self::Bench(MeasureError::measure(what, source))
    }

    /// The exit code of the process after this failure.
    pub fn exit_code(&self) -> i32 {
        match self {
            Self::Usage { .. }
            | Self::Read { .. }
            | Self::Config(_)
            | Self::Bench(MeasureError::Usage { .. })
            | Self::KvBench(
                KvBenchError::Model(_)
                | KvBenchError::Usage { .. }
                | KvBenchError::Trace { .. }
                | KvBenchError::Settings { .. }
                | KvBenchError::Directory { .. }
                | KvBenchError::Busy { .. },
            ) => EXIT_USAGE,
            Self::Store { source: StoreError::Config { .. } | StoreError::Pipeline(_), .. } => {
                EXIT_USAGE
            }
            _ => EXIT_FAILED,
        }
    }

    /// The message with its causes, one per line, each printed once.
    pub fn explain(&self) -> String {
        let mut text = format!("error: {self}");
        let mut cause = self.source();
        while let Some(error) = cause {
            let next = error.to_string();
            // A transparent error repeats its cause, and some messages include theirs.
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

    /// The cause of an exposed secret was printed twice, because its error's message includes it.
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
