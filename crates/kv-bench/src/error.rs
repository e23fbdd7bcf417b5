//! Why a benchmark did not start or did not finish.

use std::io;
use std::path::PathBuf;

use cascade_block::UnknownModel;
use cascade_replay::trace::TraceError;
use cascade_store::StoreError;
use thiserror::Error;

/// What to do if the store fails.
const ADVICE: &str = "check that the disk of --cache-dir has free space, works and can be written, \
    or give another --cache-dir";

/// A benchmark that could not run.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum KvBenchError {
    /// The model is not in the table.
    #[error("--model: {0}")]
    Model(#[from] UnknownModel),
    /// Two options contradict each other, or the machine cannot do what they say.
    #[error("{what}\n  {advice}")]
    Usage {
        /// What is wrong.
        what: String,
        /// What to do.
        advice: String,
    },
    /// A trace or a data set cannot be used.
    #[error("{option} cannot be used\n  docs/traces.md describes the formats")]
    Trace {
        /// The option that names it.
        option: &'static str,
        /// The cause.
        #[source]
        source: Box<TraceError>,
    },
    /// A file of settings cannot be read.
    #[error(
        "{option} cannot be read: {}\n  give a file that you may read, in YAML or JSON",
        path.display()
    )]
    Settings {
        /// The option that names it.
        option: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The directory cannot be used.
    #[error("cannot {action} {}\n  {advice}", path.display())]
    Directory {
        /// What failed, after "cannot".
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// What to do.
        advice: &'static str,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// Another benchmark uses the directory.
    #[error(
        "another benchmark runs in {}\n  wait for its end, or give another --cache-dir",
        path.display()
    )]
    Busy {
        /// The directory.
        path: PathBuf,
    },
    /// The store could not be opened or closed.
    #[error("the store failed while {doing}\n  {ADVICE}")]
    Store {
        /// The call.
        doing: &'static str,
        /// The cause.
        #[source]
        source: StoreError,
    },
    /// The blocks that the run needs before its start could not be stored.
    #[error("cannot store the blocks that requests expect to be there: {0}\n  {ADVICE}")]
    Prepare(String),
    /// The directory of the blocks was removed while the run used it.
    #[error(
        "{} was removed during the run, so that its figures are not valid\n  leave the directory \
         alone until the end, and run again",
        path.display()
    )]
    Removed {
        /// The directory.
        path: PathBuf,
    },
}

impl KvBenchError {
    /// An option that cannot be used, and what to do.
    pub fn usage(what: impl Into<String>, advice: impl Into<String>) -> Self {
        Self::Usage { what: what.into(), advice: advice.into() }
    }
}
