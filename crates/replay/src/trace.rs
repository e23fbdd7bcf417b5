//! Request traces: the requested blocks with their times, parsed from published formats.
//!
//! The formats are Mooncake's, Qwen's, Azure's, BurstGPT's, sessions of agents and ShareGPT
//! (`trace/format.rs`). They are recognised by their content: JSON, one object a line or an array
//! of them, or CSV. A file may be compressed with gzip or zstd. Damage is an error that names file,
//! line and field. What is skipped is counted in [`Import`].

mod agents;
mod array;
mod compression;
mod content;
mod csv;
mod date;
mod error;
mod field;
mod format;
mod import;
mod input;
mod lengths;
mod mooncake;
mod parser;
mod record;
mod row;
mod sharegpt;
mod source;
mod times;

use std::path::{Path, PathBuf};
use std::time::Duration;

use cascade_store::eviction::StopReason;

pub use error::TraceError;
use error::limit;
pub use format::{MADE_BLOCK_TOKENS, TraceFormat};
pub use import::{Import, ReadOptions, SkipReason};
use parser::Parser;
pub use times::{TimeUnit, Times};

/// Limit of the size of one trace file, decompressed.
pub const FILE_BYTES_MAX: u64 = 1 << 30;
/// Limit of what is held of a file at a time: a line, or a session.
pub const HELD_BYTES_MAX: u64 = 256 << 20;
/// Limit of the number of files of one trace.
pub const FILES_MAX: usize = 4096;
/// Limit of the number of blocks of one request.
pub const REQUEST_BLOCKS_MAX: usize = 1 << 20;
/// Limit of the number of blocks that are made for a trace that names none.
pub const MADE_BLOCKS_MAX: u64 = 1 << 26;
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
    /// How it was read.
    pub import: Import,
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

impl Trace {
    /// Reads a file, or all `.json`, `.jsonl` and `.csv` files directly in a directory, by name,
    /// also those with `.gz` or `.zst` behind it.
    ///
    /// # Errors
    /// A file is unreadable, too large, damaged, or without a request.
    pub fn read(path: &Path) -> Result<Self, TraceError> {
        Self::read_files(&file_name(path), &[path.to_path_buf()], ReadOptions::default())
    }

    /// Reads several files or directories as one trace.
    ///
    /// # Errors
    /// As [`Trace::read`].
    pub fn read_files(
        name: &str,
        paths: &[PathBuf],
        options: ReadOptions,
    ) -> Result<Self, TraceError> {
        let mut files = Vec::new();
        for path in paths {
            if path.is_dir() {
                files.extend(trace_files(path)?);
            } else {
                files.push(path.clone());
            }
        }
        limit(name, "the number of files", files.len(), FILES_MAX)?;
        let mut parser = Parser::new(options);
        for path in &files {
            source::read(&mut parser, &path.display().to_string(), input::open(path)?)?;
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
/// An integer id is local to its source; a hexadecimal id is global. In agent sessions, all ids are
/// local to their session unless `hash_id_scope` says otherwise. A session with relative times
/// starts at zero if it is the only one. Of several sessions, each starts within the first hour, at
/// a time that depends only on its name, so that adding a session does not move the others.
///
/// # Errors
/// A source is too large, damaged, or without a request.
pub fn parse(
    name: &str,
    sources: &[TraceSource<'_>],
    options: ReadOptions,
) -> Result<Trace, TraceError> {
    limit(name, "the number of files", sources.len(), FILES_MAX)?;
    let mut parser = Parser::new(options);
    for source in sources {
        source::read(&mut parser, source.name, Box::new(source.bytes))?;
    }
    parser.finish(name)
}

fn file_name(path: &Path) -> String {
    let stem = path.file_stem().unwrap_or(path.as_os_str());
    stem.to_string_lossy().into_owned()
}

fn is_trace_name(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let name = name.strip_suffix(".gz").or(name.strip_suffix(".zst")).unwrap_or(&name);
    let end = Path::new(name).extension();
    end.is_some_and(|end| end == "json" || end == "jsonl" || end == "csv")
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
