//! Why a trace cannot be read.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// An error while reading or parsing a trace.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TraceError {
    /// A file or directory cannot be read.
    #[error("cannot read the trace {path}: {source}")]
    Read {
        /// The file or directory.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// There is no request, or no trace file in the directory.
    #[error("{file} has no requests{}", because(reason))]
    Empty {
        /// The file or directory.
        file: String,
        /// Why, such as that all rows were skipped. May be empty.
        reason: String,
    },
    /// The trace exceeds a limit that bounds memory.
    #[error("{file}: {what} is {found}; the limit is {limit}")]
    TooLarge {
        /// The file or directory.
        file: String,
        /// What is too large.
        what: &'static str,
        /// Its size.
        found: u64,
        /// The limit.
        limit: u64,
    },
    /// A file of another kind or format.
    #[error("{file} is {found}; {advice}")]
    Unsupported {
        /// The file.
        file: String,
        /// What it is.
        found: String,
        /// What to do.
        advice: String,
    },
    /// A row of a CSV file is damaged.
    #[error("{file}:{line}: not a row of CSV ({reason})")]
    Row {
        /// The file.
        file: String,
        /// The line, from 1.
        line: usize,
        /// The damage.
        reason: String,
    },
    /// A line, or an element of an array, is not JSON.
    #[error("{file}:{line}: not JSON ({reason}); expected one JSON object")]
    Syntax {
        /// The file.
        file: String,
        /// The line, from 1.
        line: usize,
        /// The error of the JSON parser.
        reason: String,
    },
    /// A field is missing or has a wrong value.
    #[error("{file}:{line}: field `{field}`: expected {expected}, found {found}")]
    Field {
        /// The file.
        file: String,
        /// The line, from 1.
        line: usize,
        /// Path of the field, such as `requests[3].in`.
        field: String,
        /// The expected value.
        expected: String,
        /// The actual value.
        found: String,
    },
    /// Files with different block sizes cannot form one trace.
    #[error(
        "{file} has blocks of {found} tokens, the files before it {expected}; replay them \
         separately"
    )]
    MixedBlocks {
        /// The file that differs.
        file: String,
        /// Its block size in tokens.
        found: u32,
        /// The block size of the files before it.
        expected: u32,
    },
}

fn because(reason: &str) -> String {
    if reason.is_empty() { String::new() } else { format!(": {reason}") }
}

/// Refuses a size above its limit.
pub(super) fn limit<F, L>(
    file: &str,
    what: &'static str,
    found: F,
    limit: L,
) -> Result<(), TraceError>
where
    F: TryInto<u64>,
    L: TryInto<u64>,
{
    let found = found.try_into().unwrap_or(u64::MAX);
    let limit = limit.try_into().unwrap_or(u64::MAX);
    if found <= limit {
        return Ok(());
    }
    Err(TraceError::TooLarge { file: file.to_owned(), what, found, limit })
}
