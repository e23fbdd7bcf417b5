//! Request traces: the requested blocks with their times, parsed from published formats.
//!
//! Formats are recognised by their content. **Mooncake JSONL** has one request per line
//! (`timestamp` in milliseconds, `input_length`, `output_length`, `hash_ids`). Connectors record
//! the same with keys in hexadecimal, milliseconds since 1970 and `block_tokens`. **CSV** has the
//! same fields as columns. **Agent sessions** have one JSON object per file, with nested sub-agents
//! (`trace/agents.rs`). A file may be compressed with gzip or zstd. Damage is an error that names
//! file, line and field; no request is skipped.

mod agents;
mod compression;
mod content;
mod csv;
mod field;
mod input;
mod mooncake;
mod times;

use std::collections::HashMap;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

use cascade_store::eviction::StopReason;
use serde_json::Value;
use thiserror::Error;

use input::Lines;
pub use times::TimeUnit;

/// Limit of the size of one trace file, decompressed.
pub const FILE_BYTES_MAX: u64 = 1 << 30;
/// Limit of what is held of a file at a time: a line, or a session.
pub const HELD_BYTES_MAX: u64 = 256 << 20;
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
    /// Reads a file, or all `.json` and `.jsonl` files directly in a directory, by name, also those
    /// with `.gz` or `.zst` behind it.
    ///
    /// # Errors
    /// A file is unreadable, too large, damaged, or without a request.
    pub fn read(path: &Path) -> Result<Self, TraceError> {
        Self::read_files(&file_name(path), &[path.to_path_buf()], TimeUnit::default())
    }

    /// Reads several files or directories as one trace, with timestamps in a unit.
    ///
    /// # Errors
    /// As [`Trace::read`].
    pub fn read_files(name: &str, paths: &[PathBuf], unit: TimeUnit) -> Result<Self, TraceError> {
        let mut files = Vec::new();
        for path in paths {
            if path.is_dir() {
                files.extend(trace_files(path)?);
            } else {
                files.push(path.clone());
            }
        }
        limit(name, "the number of files", files.len(), FILES_MAX)?;
        let mut parser = Parser { time_unit: unit, ..Parser::default() };
        for path in &files {
            parser.source(&path.display().to_string(), input::open(path)?)?;
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
        parser.source(source.name, Box::new(source.bytes))?;
    }
    parser.finish(name)
}

/// The name of a block in a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum BlockName {
    /// A number that is unique within one source.
    Local { source: u32, id: u64 },
    /// A key in hexadecimal, right-aligned, with one meaning in all sources. `0a` is another key
    /// than `00a`.
    Global { digits: u8, key: [u8; 32] },
}

/// The requests parsed so far.
#[derive(Debug, Default)]
struct Parser {
    time_unit: TimeUnit,
    block_tokens: Option<u32>,
    numbers: HashMap<BlockName, u64>,
    requests: Vec<TraceRequest>,
    sources: u32,
    sessions: u32,
    /// Ranges of `requests` with times relative to their session, and the session's start.
    relative_times: Vec<(std::ops::Range<usize>, Duration)>,
}

impl Parser {
    fn source<'a>(&mut self, name: &'a str, bytes: Box<dyn Read + 'a>) -> Result<(), TraceError> {
        let before = self.requests.len();
        let mut lines = Lines::new(name, bytes)?;
        if let Some(first) = lines.next_line()? {
            self.requests_of(&mut lines, first)?;
        }
        if self.requests.len() == before {
            return Err(TraceError::Empty { file: name.to_owned() });
        }
        self.sources += 1;
        Ok(())
    }

    /// Parses a line and all after it in the format of the line.
    fn requests_of(&mut self, lines: &mut Lines<'_>, first: Vec<u8>) -> Result<(), TraceError> {
        if let Some(columns) = csv::header(&first) {
            return csv::parse(self, lines, &columns);
        }
        match first_value(&first) {
            Some(Ok(session)) if session.get("requests").is_some() => {}
            // An object that goes on in the next line.
            Some(Err(error)) if error.is_eof() => {}
            _ => return mooncake::parse(self, lines, Some(first)),
        }
        // Errors state lines of the file.
        let mut text = vec![b'\n'; lines.line - 1];
        text.extend_from_slice(&first);
        lines.read_rest(&mut text)?;
        match first_value(&text) {
            Some(Ok(session)) if session.get("requests").is_some() => {
                agents::parse(self, TraceSource { name: lines.file, bytes: &text }, &session)
            }
            _ => {
                let mut lines = Lines::of_text(lines.file, &text);
                let first = lines.next_line()?;
                mooncake::parse(self, &mut lines, first)
            }
        }
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

fn first_value(bytes: &[u8]) -> Option<serde_json::Result<Value>> {
    serde_json::Deserializer::from_slice(bytes).into_iter::<Value>().next()
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

fn is_trace_name(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let name = name.strip_suffix(".gz").or(name.strip_suffix(".zst")).unwrap_or(&name);
    let end = Path::new(name).extension();
    end.is_some_and(|end| end == "json" || end == "jsonl")
}

fn trace_files(directory: &Path) -> Result<Vec<PathBuf>, TraceError> {
    let read = |source| TraceError::Read { path: directory.to_owned(), source };
    let mut files = Vec::new();
    for entry in std::fs::read_dir(directory).map_err(read)? {
        let path = entry.map_err(read)?.path();
        if is_trace_name(&path) && path.is_file() {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}
