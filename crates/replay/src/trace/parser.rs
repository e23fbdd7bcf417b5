//! Collects the requests of all sources: numbers blocks and sessions, counts rows.

use std::collections::HashMap;
use std::ops::Range;
use std::time::Duration;

use super::times::Times;
use super::{
    ABSOLUTE_TIMES_FROM, Import, MADE_BLOCKS_MAX, ReadOptions, SkipReason, Trace, TraceError,
    TraceFormat, TraceRequest, limit,
};

/// The name of a block in a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum BlockName {
    /// A number that is unique within one source, or one session.
    Local { scope: u32, id: u64 },
    /// A key in hexadecimal, right-aligned, with one meaning in all sources. `0a` is another key
    /// than `00a`.
    Global { digits: u8, key: [u8; 32] },
    /// A key in hexadecimal of one session.
    LocalKey { scope: u32, digits: u8, key: [u8; 32] },
}

/// What became of a row.
#[derive(Debug, Clone, Copy)]
pub(super) enum RowOutcome {
    /// It is in the requests.
    Read,
    /// It gives no request.
    Skipped(SkipReason),
}

/// The requests parsed so far.
#[derive(Debug, Default)]
pub(super) struct Parser {
    pub(super) options: ReadOptions,
    block_tokens: Option<u32>,
    names: HashMap<BlockName, u64>,
    next_block: u64,
    /// Blocks that were made because the trace names none.
    made_blocks: u64,
    pub(super) requests: Vec<TraceRequest>,
    import: Import,
    scopes: u32,
    sessions: u32,
    /// Sessions of this source by their names.
    named_sessions: HashMap<String, u32>,
    /// What the times of this source are.
    times: Option<Times>,
    /// Time of the row before in this source.
    last_at: Option<Duration>,
    /// Rows of this source, skipped ones included.
    source_rows: u64,
    /// Ranges of `requests` with times relative to their session, and the session's start.
    pub(super) relative_times: Vec<(Range<usize>, Duration)>,
}

impl Parser {
    pub(super) fn new(options: ReadOptions) -> Self {
        Self { options, ..Self::default() }
    }

    /// Begins a file or another source. Returns how many requests came before.
    pub(super) fn begin_source(&mut self) -> usize {
        self.scopes += 1;
        self.named_sessions.clear();
        (self.times, self.last_at, self.source_rows) = (None, None, 0);
        self.requests.len()
    }

    /// Refuses a source without requests.
    pub(super) fn end_source(&self, name: &str, before: usize) -> Result<(), TraceError> {
        if self.requests.len() > before {
            return Ok(());
        }
        let reason = self.import.skipped();
        Err(TraceError::Empty { file: name.to_owned(), reason })
    }

    /// Notes the format of this source.
    pub(super) fn begin(&mut self, format: TraceFormat) {
        let times = format.times(self.options.time_unit);
        self.times = Some(times);
        self.import.times.get_or_insert(times);
        if !self.import.formats.contains(&format) {
            self.import.formats.push(format);
        }
    }

    pub(super) fn skip(&mut self, reason: SkipReason) {
        self.import.skip(reason);
        self.source_rows += 1;
    }

    pub(super) fn count(&mut self, outcome: RowOutcome) {
        match outcome {
            RowOutcome::Skipped(reason) => self.skip(reason),
            RowOutcome::Read => {
                self.import.rows_read += 1;
                self.source_rows += 1;
            }
        }
    }

    /// Whether a row of this source came before.
    pub(super) fn has_rows(&self) -> bool {
        self.source_rows > 0
    }

    /// Whether no further row of this source is to be read.
    pub(super) fn is_enough(&self) -> bool {
        self.options.rows_max.is_some_and(|most| self.source_rows >= most)
    }

    /// Numbers of this source's time in one second.
    pub(super) fn per_second(&self) -> f64 {
        self.times.map_or(1.0, Times::per_second)
    }

    /// Adds the request of a row, and counts whether it is earlier than the one before it.
    pub(super) fn push(&mut self, request: TraceRequest) {
        let is_earlier = self.last_at.is_some_and(|last| request.at < last);
        self.import.rows_out_of_order += u64::from(is_earlier);
        self.last_at = Some(request.at);
        self.requests.push(request);
    }

    /// The scope of local ids: this source, or the session begun last.
    pub(super) fn scope(&self) -> u32 {
        self.scopes
    }

    /// Begins a session whose ids are its own.
    pub(super) fn begin_scope(&mut self) {
        self.scopes += 1;
    }

    /// A new session.
    pub(super) fn new_session(&mut self) -> u32 {
        self.sessions += 1;
        self.sessions - 1
    }

    /// The session of this name in this source; a new one if there is none.
    pub(super) fn named_session(&mut self, name: String) -> u32 {
        if let Some(session) = self.named_sessions.get(&name) {
            return *session;
        }
        let session = self.new_session();
        self.named_sessions.insert(name, session);
        session
    }

    /// Names a session of this source.
    pub(super) fn name_session(&mut self, name: String, session: u32) {
        self.named_sessions.insert(name, session);
    }

    /// The session of this name in this source.
    pub(super) fn known_session(&self, name: &str) -> Option<u32> {
        self.named_sessions.get(name).copied()
    }

    /// The number of a block with this name.
    pub(super) fn number(&mut self, name: BlockName) -> u64 {
        let next = self.next_block;
        let number = *self.names.entry(name).or_insert(next);
        self.next_block += u64::from(number == next);
        number
    }

    /// A block that no other request has.
    pub(super) fn new_block(&mut self) -> u64 {
        self.next_block += 1;
        self.next_block - 1
    }

    /// Counts blocks that are made for a trace that names none, and bounds their number.
    pub(super) fn count_made_blocks(&mut self, file: &str, count: u64) -> Result<(), TraceError> {
        self.made_blocks = self.made_blocks.saturating_add(count);
        let what = "the number of its blocks of 64 tokens";
        limit(file, what, self.made_blocks, MADE_BLOCKS_MAX)
    }

    /// Refuses a source whose block size differs from that of the sources before it.
    pub(super) fn check_block_tokens(&mut self, file: &str, tokens: u32) -> Result<(), TraceError> {
        let expected = *self.block_tokens.get_or_insert(tokens);
        if expected == tokens {
            return Ok(());
        }
        Err(TraceError::MixedBlocks { file: file.to_owned(), found: tokens, expected })
    }

    pub(super) fn finish(mut self, name: &str) -> Result<Trace, TraceError> {
        if self.requests.is_empty() {
            let reason = self.import.skipped();
            return Err(TraceError::Empty { file: name.to_owned(), reason });
        }
        if self.relative_times.len() > 1 {
            for (range, start) in self.relative_times {
                self.requests[range].iter_mut().for_each(|request| request.at += start);
            }
        }
        self.requests.sort_by_key(|request| request.at);
        let first = self.requests[0].at;
        let is_relative = self.import.formats.iter().all(|it| it.starts_at_first_request());
        if first >= ABSOLUTE_TIMES_FROM || is_relative {
            self.requests.iter_mut().for_each(|request| request.at -= first);
        }
        Ok(Trace {
            name: name.to_owned(),
            block_tokens: self.block_tokens.unwrap_or(TraceFormat::Mooncake.block_tokens()),
            unique_blocks: self.next_block,
            requests: self.requests,
            import: self.import,
        })
    }
}
