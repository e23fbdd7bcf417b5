//! Collects the requests of all sources: recognises formats, numbers blocks, counts rows.

use std::collections::HashMap;
use std::io::Read;
use std::ops::Range;
use std::time::Duration;

use serde_json::Value;

use super::field::TraceObject;
use super::format::expected_fields;
use super::input::{Lines, Record};
use super::times::Times;
use super::{
    ABSOLUTE_TIMES_FROM, Import, MADE_BLOCKS_MAX, ReadOptions, SkipReason, Trace, TraceError,
    TraceFormat, TraceRequest, agents, csv, lengths, limit, mooncake, sharegpt,
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

/// Reads a row of one format.
pub(super) type RowReader =
    fn(&mut Parser, TraceFormat, TraceObject<'_>) -> Result<RowOutcome, TraceError>;

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

    pub(super) fn source<'a>(
        &mut self,
        name: &'a str,
        bytes: Box<dyn Read + 'a>,
    ) -> Result<(), TraceError> {
        let before = self.requests.len();
        self.scopes += 1;
        self.named_sessions.clear();
        (self.times, self.last_at, self.source_rows) = (None, None, 0);
        let mut lines = Lines::new(name, bytes)?;
        if let Some(first) = lines.next_record()? {
            self.records_of(&mut lines, first)?;
        }
        if self.requests.len() == before {
            let reason = self.import.skipped();
            return Err(TraceError::Empty { file: name.to_owned(), reason });
        }
        Ok(())
    }

    /// Reads a record and all after it in the format of the record.
    fn records_of(&mut self, lines: &mut Lines<'_>, first: Record) -> Result<(), TraceError> {
        if !lines.is_array() && csv::is_header(&first.text) {
            return csv::parse(self, lines, first.text);
        }
        let mut next = Some(lines.whole_object(first)?);
        let mut format = None;
        while let Some(record) = next {
            let value = match record.parse(lines.file) {
                Err(_) if record.is_incomplete() && self.has_rows() => {
                    self.skip(SkipReason::CutOff);
                    return Ok(());
                }
                other => other?,
            };
            let format = match format {
                Some(format) => format,
                None => *format.insert(self.begin_format(lines.file, &value)?),
            };
            let object =
                TraceObject { file: lines.file, line: record.line, prefix: "", value: &value };
            if !value.is_object() {
                return Err(object.error("", "a JSON object", super::field::shown(&value)));
            }
            let outcome = reader_of(format)(self, format, object)?;
            self.count(outcome);
            next = if self.is_enough() { None } else { lines.next_record()? };
        }
        Ok(())
    }

    fn begin_format(&mut self, file: &str, first: &Value) -> Result<TraceFormat, TraceError> {
        let format = self.options.format.or_else(|| TraceFormat::of_record(first));
        let format = format.ok_or_else(|| {
            let names = first.as_object().into_iter().flat_map(serde_json::Map::keys);
            TraceError::Unsupported {
                file: file.to_owned(),
                found: format!("JSON with {}", named_fields(names.map(String::as_str))),
                advice: expected_fields(),
            }
        })?;
        self.begin(format);
        Ok(format)
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

/// What reads a row of a format.
pub(super) fn reader_of(format: TraceFormat) -> RowReader {
    match format {
        TraceFormat::Mooncake | TraceFormat::QwenBailian => mooncake::row,
        TraceFormat::Azure | TraceFormat::BurstGpt => lengths::row,
        TraceFormat::Agents => agents::row,
        TraceFormat::ShareGpt => sharegpt::row,
    }
}

/// The first names of fields or columns, for an error.
pub(super) fn named_fields<'a>(names: impl Iterator<Item = &'a str>) -> String {
    const SHOWN_MAX: usize = 300;
    let names = names.collect::<Vec<_>>().join(", ");
    if names.is_empty() {
        return "no fields".to_owned();
    }
    format!("the fields {}", names.chars().take(SHOWN_MAX).collect::<String>())
}
