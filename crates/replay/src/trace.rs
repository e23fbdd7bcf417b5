//! Request traces: the requested blocks with their times, parsed from published formats.
//!
//! Two formats are recognised by their content. **Mooncake JSONL** has one request per line
//! (`timestamp` in milliseconds, `input_length`, `output_length`, `hash_ids`). Connectors record
//! the same with keys in hexadecimal, milliseconds since 1970 and `block_tokens`. **Agent
//! sessions** have one JSON object per file, with nested sub-agents (`trace/agents.rs`). Damage is
//! an error that names file, line and field; no request is skipped.

mod agents;
mod field;
mod mooncake;

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use cascade_store::eviction::StopReason;
use serde_json::Value;
use thiserror::Error;

/// Limit of the size of one trace file.
pub const FILE_BYTES_MAX: u64 = 1 << 30;
/// Limit of the number of files of one trace.
pub const FILES_MAX: usize = 4096;
/// Limit of the number of blocks of one request.
pub const REQUEST_BLOCKS_MAX: usize = 1 << 20;
/// Limit of the number of tokens of one block.
pub const BLOCK_TOKENS_MAX: u32 = 1 << 20;
/// Sessions with relative times start within this time of each other.
pub const SESSION_STARTS_WITHIN: Duration = Duration::from_secs(3600);
/// A first request at this time (in 2001) or later has absolute times, as recorders write them.
/// They are made relative to it.
const ABSOLUTE_TIMES_FROM: Duration = Duration::from_secs(1_000_000_000);

/// A recorded sequence of requests, by time.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Trace {
    /// Name of its file or directory.
    pub name: String,
    /// Tokens of a full block.
    pub block_tokens: u32,
    /// Requests by time; those at the same time in the order of the input.
    pub requests: Vec<TraceRequest>,
    /// Number of unique blocks. Block numbers are below it.
    pub unique_blocks: u64,
}

/// One request of a trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceRequest {
    /// Arrival time since the start of the trace.
    pub at: Duration,
    /// Its blocks from the root, numbered densely in the order of the input. Equal numbers mean
    /// equal chains up to and including this block.
    pub blocks: Vec<u64>,
    /// Tokens of the prompt.
    pub input_tokens: u32,
    /// Tokens of the answer.
    pub output_tokens: u32,
    /// Whether the last block is not full.
    pub partial_tail: bool,
    /// Its session, if the format has sessions. Each sub-agent is a session.
    pub session: Option<u32>,
    /// Why it stopped, if the format has stop reasons.
    pub stop: Option<StopReason>,
}

/// One input of [`parse`].
#[derive(Debug, Clone, Copy)]
pub struct TraceSource<'a> {
    /// Its name in errors.
    pub name: &'a str,
    /// Its bytes.
    pub bytes: &'a [u8],
}

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
    #[error("{file} has no request; expected Mooncake JSONL or agent sessions (.json, .jsonl)")]
    Empty {
        /// The file or directory.
        file: String,
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
    /// A line is not JSON.
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

impl Trace {
    /// Reads a file, or all `.json` and `.jsonl` files directly in a directory, by name.
    ///
    /// # Errors
    /// A file is unreadable, too large, damaged, or without a request.
    pub fn read(path: &Path) -> Result<Self, TraceError> {
        let mut files = vec![path.to_path_buf()];
        if path.is_dir() {
            files = trace_files(path)?;
        }
        Self::read_files(&file_name(path), &files)
    }

    /// Reads several files as one trace.
    ///
    /// # Errors
    /// As [`Trace::read`].
    pub fn read_files(name: &str, files: &[PathBuf]) -> Result<Self, TraceError> {
        limit(name, "the number of files", files.len(), FILES_MAX)?;
        let mut parser = Parser::default();
        for path in files {
            let bytes = read_bounded(path)?;
            parser.source(TraceSource { name: &path.display().to_string(), bytes: &bytes })?;
        }
        parser.finish(name)
    }

    /// A copy with only the requests before a time.
    pub fn until(&self, end: Duration) -> Self {
        let requests = self.requests.iter().take_while(|request| request.at < end);
        Self { requests: requests.cloned().collect(), ..self.clone() }
    }

    /// Number of requested blocks, summed over all requests.
    pub fn block_count(&self) -> u64 {
        self.requests.iter().map(|request| request.blocks.len() as u64).sum()
    }
}

/// Parses sources into one trace. A pure function of the names and bytes of the sources.
///
/// An integer id is local to its source; a hexadecimal id is global. A session with relative times
/// starts at zero if it is the only one. Of several sessions, each starts within the first hour, at
/// a time that depends only on its name, so that adding a session does not move the others.
///
/// # Errors
/// A source is too large, damaged, or without a request.
pub fn parse(name: &str, sources: &[TraceSource<'_>]) -> Result<Trace, TraceError> {
    limit(name, "the number of files", sources.len(), FILES_MAX)?;
    let mut parser = Parser::default();
    for source in sources {
        parser.source(*source)?;
    }
    parser.finish(name)
}

/// The name of a block in a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum BlockName {
    /// A number that is unique within one source.
    Local { source: u32, id: u64 },
    /// A key of at most 32 bytes, right-aligned, with one meaning in all sources.
    Global([u8; 32]),
}

/// The requests parsed so far.
#[derive(Debug, Default)]
struct Parser {
    block_tokens: Option<u32>,
    numbers: HashMap<BlockName, u64>,
    requests: Vec<TraceRequest>,
    sources: u32,
    sessions: u32,
    /// Ranges of `requests` with times relative to their session, and the session's start.
    relative_times: Vec<(std::ops::Range<usize>, Duration)>,
}

impl Parser {
    fn source(&mut self, source: TraceSource<'_>) -> Result<(), TraceError> {
        limit(source.name, "its size in bytes", source.bytes.len(), FILE_BYTES_MAX)?;
        match first_object(source.bytes) {
            Some(session) if session.get("requests").is_some() => {
                agents::parse(self, source, &session)?;
            }
            _ => mooncake::parse(self, source)?,
        }
        self.sources += 1;
        Ok(())
    }

    fn number(&mut self, name: BlockName) -> u64 {
        let next = self.numbers.len() as u64;
        *self.numbers.entry(name).or_insert(next)
    }

    /// Refuses a source whose block size differs from that of the sources before it.
    fn check_block_tokens(&mut self, file: &str, tokens: u32) -> Result<(), TraceError> {
        let expected = *self.block_tokens.get_or_insert(tokens);
        if expected == tokens {
            return Ok(());
        }
        Err(TraceError::MixedBlocks { file: file.to_owned(), found: tokens, expected })
    }

    fn finish(mut self, name: &str) -> Result<Trace, TraceError> {
        if self.requests.is_empty() {
            return Err(TraceError::Empty { file: name.to_owned() });
        }
        if self.relative_times.len() > 1 {
            for (range, start) in self.relative_times {
                self.requests[range].iter_mut().for_each(|request| request.at += start);
            }
        }
        self.requests.sort_by_key(|request| request.at);
        let first = self.requests[0].at;
        if first >= ABSOLUTE_TIMES_FROM {
            self.requests.iter_mut().for_each(|request| request.at -= first);
        }
        Ok(Trace {
            name: name.to_owned(),
            block_tokens: self.block_tokens.unwrap_or(mooncake::BLOCK_TOKENS),
            unique_blocks: self.numbers.len() as u64,
            requests: self.requests,
        })
    }
}

fn first_object(bytes: &[u8]) -> Option<Value> {
    serde_json::Deserializer::from_slice(bytes).into_iter::<Value>().next()?.ok()
}

fn limit<F, L>(file: &str, what: &'static str, found: F, limit: L) -> Result<(), TraceError>
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

fn file_name(path: &Path) -> String {
    let stem = path.file_stem().unwrap_or(path.as_os_str());
    stem.to_string_lossy().into_owned()
}

fn trace_files(directory: &Path) -> Result<Vec<PathBuf>, TraceError> {
    let read = |source| TraceError::Read { path: directory.to_owned(), source };
    let mut files = Vec::new();
    for entry in std::fs::read_dir(directory).map_err(read)? {
        let path = entry.map_err(read)?.path();
        let is_trace = path.extension().is_some_and(|end| end == "json" || end == "jsonl");
        if is_trace && path.is_file() {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// Reads a file up to the size limit. The limit also holds for a file that grows meanwhile.
fn read_bounded(path: &Path) -> Result<Vec<u8>, TraceError> {
    let read = |source| TraceError::Read { path: path.to_owned(), source };
    let file = File::open(path).map_err(read)?;
    let mut bytes = Vec::new();
    file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(read)?;
    limit(&path.display().to_string(), "its size in bytes", bytes.len(), FILE_BYTES_MAX)?;
    Ok(bytes)
}
