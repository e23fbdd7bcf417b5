//! Request traces: what was asked when, in blocks, read from the formats that are published.
//!
//! Two formats are recognised by their content. **Mooncake JSONL** has one request a line
//! (`timestamp` in milliseconds, `input_length`, `output_length`, `hash_ids`); what connectors
//! record is the same with keys in hex, milliseconds since 1970 and `block_tokens`.
//! **Agent sessions** have one JSON object a file, with sub-agents nested inside
//! (`trace/agents.rs`). Anything damaged is an error that names file, line and field; nothing is
//! skipped.

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

/// Most bytes that one trace file may have.
pub const FILE_BYTES_MAX: u64 = 1 << 30;
/// Most files that one trace may have.
pub const FILES_MAX: usize = 4096;
/// Most blocks of one request.
pub const REQUEST_BLOCKS_MAX: usize = 1 << 20;
/// Most tokens of one block.
pub const BLOCK_TOKENS_MAX: u32 = 1 << 20;
/// Sessions that bring only their own clock start within this time of each other.
pub const SESSION_STARTS_WITHIN: Duration = Duration::from_secs(3600);
/// Times from here on (2001) are dates, as recorders write them, and count from the first one.
const DATES_BEGIN: Duration = Duration::from_secs(1_000_000_000);

/// A recorded run of requests, by time.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Trace {
    /// Its file's or directory's name.
    pub name: String,
    /// Tokens of a whole block.
    pub block_tokens: u32,
    /// Requests by time; those at the same time in the order of the input.
    pub requests: Vec<TraceRequest>,
    /// How many different blocks there are: their numbers are below it.
    pub unique_blocks: u64,
}

/// One request of a trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceRequest {
    /// When it came, since the trace began.
    pub at: Duration,
    /// Its blocks from the root, numbered densely in the order in which the input names them.
    /// Equal numbers mean equal chains up to and with this block.
    pub blocks: Vec<u64>,
    /// Tokens of the prompt.
    pub input_tokens: u32,
    /// Tokens of the answer.
    pub output_tokens: u32,
    /// Whether the last block is not full.
    pub partial_tail: bool,
    /// The session it belongs to, where the format says so; a sub-agent is one of its own.
    pub session: Option<u32>,
    /// How it ended, where the format says so.
    pub stop: Option<StopReason>,
}

/// One input of [`parse`].
#[derive(Debug, Clone, Copy)]
pub struct Source<'a> {
    /// How errors call it.
    pub name: &'a str,
    /// Its bytes.
    pub bytes: &'a [u8],
}

/// Why a trace could not be read.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TraceError {
    /// The system refused.
    #[error("cannot read the trace {path}: {source}")]
    Read {
        /// What was to be read.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// No request, or no file that could hold one.
    #[error("{file} holds no request; expected Mooncake JSONL or agent sessions (.json, .jsonl)")]
    Empty {
        /// The file or directory.
        file: String,
    },
    /// A limit that keeps memory bounded was passed.
    #[error("{file}: {what} is {found}; the limit is {limit}")]
    TooLarge {
        /// The file or directory.
        file: String,
        /// What is too large.
        what: &'static str,
        /// How large it is.
        found: u64,
        /// How large it may be.
        limit: u64,
    },
    /// Not JSON.
    #[error("{file}:{line}: not JSON ({reason}); expected one JSON object")]
    Syntax {
        /// The file.
        file: String,
        /// Line, from 1.
        line: usize,
        /// What the parser says.
        reason: String,
    },
    /// JSON, but not what a request looks like.
    #[error("{file}:{line}: field `{field}`: expected {expected}, found {found}")]
    Field {
        /// The file.
        file: String,
        /// Line, from 1.
        line: usize,
        /// Where in the object, such as `requests[3].in`.
        field: String,
        /// What should stand there.
        expected: String,
        /// What stands there.
        found: String,
    },
    /// Files that cannot be one trace.
    #[error(
        "{file} has blocks of {found} tokens, the files before it {expected}; replay them apart"
    )]
    MixedBlocks {
        /// The file that differs.
        file: String,
        /// Its block size in tokens.
        found: u32,
        /// The others'.
        expected: u32,
    },
}

impl Trace {
    /// Reads a file, or every `.json` and `.jsonl` file right inside a directory, by name.
    ///
    /// # Errors
    /// Unreadable, too large, damaged, or without a request.
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
            parser.source(Source { name: &path.display().to_string(), bytes: &bytes })?;
        }
        parser.finish(name)
    }

    /// The same requests, but only those before a time.
    pub fn until(&self, end: Duration) -> Self {
        let requests = self.requests.iter().take_while(|request| request.at < end);
        Self { requests: requests.cloned().collect(), ..self.clone() }
    }

    /// Block references of all requests.
    pub fn block_count(&self) -> u64 {
        self.requests.iter().map(|request| request.blocks.len() as u64).sum()
    }
}

/// Parses sources into one trace; a pure function of its bytes.
///
/// Integer ids mean something only within their source; ids in hex are the same everywhere.
/// A session that has only its own clock starts at zero when it is alone; beside others it starts
/// at a moment of the first hour that depends on its name alone, so that adding a session moves no
/// other.
///
/// # Errors
/// Too large, damaged, or without a request.
pub fn parse(name: &str, sources: &[Source<'_>]) -> Result<Trace, TraceError> {
    limit(name, "the number of files", sources.len(), FILES_MAX)?;
    let mut parser = Parser::default();
    for source in sources {
        parser.source(*source)?;
    }
    parser.finish(name)
}

/// How a block is called in a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum BlockName {
    /// A number, which holds within one source.
    Local { source: u32, id: u64 },
    /// A key of 32 bytes or fewer, right-aligned, which holds everywhere.
    Global([u8; 32]),
}

/// What has been read so far.
#[derive(Debug, Default)]
struct Parser {
    block_tokens: Option<u32>,
    numbers: HashMap<BlockName, u64>,
    requests: Vec<TraceRequest>,
    sources: u32,
    sessions: u32,
    /// Ranges of `requests` that have a clock of their own, with the delay to give them.
    own_clocks: Vec<(std::ops::Range<usize>, Duration)>,
}

impl Parser {
    fn source(&mut self, source: Source<'_>) -> Result<(), TraceError> {
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

    /// All sources of a trace have one block size.
    fn agree_on_block(&mut self, file: &str, tokens: u32) -> Result<(), TraceError> {
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
        if self.own_clocks.len() > 1 {
            for (range, delay) in self.own_clocks {
                self.requests[range].iter_mut().for_each(|request| request.at += delay);
            }
        }
        self.requests.sort_by_key(|request| request.at);
        let first = self.requests[0].at;
        if first >= DATES_BEGIN {
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

/// Reads a file; one that grows while it is read is refused, not followed.
fn read_bounded(path: &Path) -> Result<Vec<u8>, TraceError> {
    let read = |source| TraceError::Read { path: path.to_owned(), source };
    let file = File::open(path).map_err(read)?;
    let mut bytes = Vec::new();
    file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(read)?;
    limit(&path.display().to_string(), "its size in bytes", bytes.len(), FILE_BYTES_MAX)?;
    Ok(bytes)
}
