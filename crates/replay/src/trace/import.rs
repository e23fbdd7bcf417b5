//! How a trace was read: formats, rows, skipped rows and times.

use std::collections::BTreeMap;

use super::{TimeUnit, Times, TraceFormat};

/// How to read a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ReadOptions {
    /// Its format. `None`: the content decides, file by file.
    pub format: Option<TraceFormat>,
    /// The unit of its times. `None`: that of the format.
    pub time_unit: Option<TimeUnit>,
    /// Read at most this number of rows of each file, skipped ones included.
    pub rows_max: Option<u64>,
    /// Keep requests of BurstGPT that failed: those without response tokens.
    pub keeps_failed: bool,
}

/// How the files of a trace were read. A row is a line, a row of CSV, an element of a JSON array, a
/// session or a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Import {
    /// The formats, by their first file.
    pub formats: Vec<TraceFormat>,
    /// Rows that became requests.
    pub rows_read: u64,
    /// Rows that did not, by reason.
    pub rows_skipped: BTreeMap<SkipReason, u64>,
    /// Rows with an earlier time than the row before them. Requests are sorted by time.
    pub rows_out_of_order: u64,
    /// What the times of the first file are.
    pub times: Option<Times>,
}

/// Why a row became no request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum SkipReason {
    /// The file ends within it.
    CutOff,
    /// The request failed: nothing was generated.
    NoResponse,
    /// It is no conversation.
    NoConversations,
    /// The conversation has no question with an answer.
    NoTurns,
}

impl SkipReason {
    /// In words.
    pub fn text(self) -> &'static str {
        match self {
            Self::CutOff => "cut off at the end of the file",
            Self::NoResponse => "zero response tokens (a failed request)",
            Self::NoConversations => "without `conversations`",
            Self::NoTurns => "without a question and its answer",
        }
    }
}

impl Import {
    /// The names of the formats.
    pub fn format_names(&self) -> String {
        self.formats.iter().map(|format| format.name()).collect::<Vec<_>>().join(", ")
    }

    /// Which requests share blocks, in a sentence for each format.
    pub fn sharing(&self) -> String {
        self.formats.iter().map(|format| format.sharing()).collect::<Vec<_>>().join("; ")
    }

    /// Skipped rows with their reasons; empty if there are none.
    pub fn skipped(&self) -> String {
        let one = |(reason, count): (&SkipReason, &u64)| format!("{count} {}", reason.text());
        let all: Vec<_> = self.rows_skipped.iter().map(one).collect();
        if all.is_empty() { String::new() } else { format!("skipped rows: {}", all.join(", ")) }
    }

    pub(super) fn skip(&mut self, reason: SkipReason) {
        *self.rows_skipped.entry(reason).or_default() += 1;
    }
}
