//! The formats of traces: how they are recognised, and what a format fixes.

use std::fmt;

use serde_json::Value;

use super::times::{TimeUnit, Times};

/// A published format of traces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TraceFormat {
    /// Mooncake's: times, lengths and ids of blocks. Connectors record it, too.
    Mooncake,
    /// Qwen's of Alibaba Cloud Bailian: as Mooncake's, with chats.
    QwenBailian,
    /// Azure's: dates and lengths.
    Azure,
    /// BurstGPT: times and lengths.
    BurstGpt,
    /// Sessions of coding agents with ids of blocks, such as cc-traces.
    Agents,
    /// Conversations as text.
    ShareGpt,
}

/// Tokens of a block that is made for a trace that names none.
pub const MADE_BLOCK_TOKENS: u32 = 64;

impl TraceFormat {
    /// All formats.
    pub const ALL: [Self; 6] = [
        Self::Mooncake,
        Self::QwenBailian,
        Self::Azure,
        Self::BurstGpt,
        Self::Agents,
        Self::ShareGpt,
    ];

    /// The name on the command line and in results.
    pub fn name(self) -> &'static str {
        match self {
            Self::Mooncake => "mooncake",
            Self::QwenBailian => "qwen-bailian",
            Self::Azure => "azure",
            Self::BurstGpt => "burstgpt",
            Self::Agents => "agents",
            Self::ShareGpt => "sharegpt",
        }
    }

    /// Which requests share blocks, in a sentence.
    pub fn sharing(self) -> &'static str {
        match self {
            Self::Mooncake | Self::QwenBailian => "the trace names the blocks",
            Self::Agents => "the trace names the blocks; local ids count within their session",
            Self::Azure | Self::BurstGpt => {
                "the trace names no blocks: no request shares any, so no block can be a hit"
            }
            Self::ShareGpt => {
                "the trace names no blocks: the turns of a conversation share their prefix, \
                 conversations share nothing; four characters count as one token"
            }
        }
    }

    /// Tokens of a block, unless the trace states them.
    pub(super) fn block_tokens(self) -> u32 {
        match self {
            Self::Mooncake => 512,
            Self::QwenBailian => 16,
            Self::Azure | Self::BurstGpt | Self::Agents | Self::ShareGpt => MADE_BLOCK_TOKENS,
        }
    }

    /// What its times are. `--time-unit` counts for times that are plain numbers of a row.
    pub(super) fn times(self, given: Option<TimeUnit>) -> Times {
        let unit =
            |of_format| Times::In { unit: given.unwrap_or(of_format), is_given: given.is_some() };
        match self {
            Self::Mooncake => unit(TimeUnit::Milliseconds),
            Self::QwenBailian | Self::BurstGpt => unit(TimeUnit::Seconds),
            Self::Agents => Times::In { unit: TimeUnit::Seconds, is_given: false },
            Self::Azure => Times::Dates,
            Self::ShareGpt => Times::None,
        }
    }

    /// Whether its times count from the first request, whatever that one has.
    pub(super) fn starts_at_first_request(self) -> bool {
        matches!(self, Self::Azure | Self::BurstGpt)
    }

    /// The fields that a row must have, then those that it may have.
    pub(super) fn fields(self) -> (&'static [&'static str], &'static [&'static str]) {
        const HASHES: &[&str] = &["timestamp", "input_length", "output_length", "hash_ids"];
        match self {
            Self::Mooncake => (HASHES, &["block_tokens"]),
            Self::QwenBailian => (HASHES, &["chat_id", "parent_chat_id"]),
            Self::Azure => (&["TIMESTAMP", "ContextTokens", "GeneratedTokens"], &[]),
            Self::BurstGpt => {
                (&["Timestamp", "Request tokens", "Response tokens"], &["Session ID"])
            }
            Self::Agents => (&["requests", "block_size"], &[]),
            Self::ShareGpt => (&["conversations"], &[]),
        }
    }

    /// Whether a row of CSV can have its fields.
    pub(super) fn has_csv(self) -> bool {
        !matches!(self, Self::Agents | Self::ShareGpt)
    }

    /// The format of a record with these fields. `None` if it has fields of no format.
    pub(super) fn of_record(record: &Value) -> Option<Self> {
        let has = |name: &str| record.get(name).is_some();
        Self::of_fields(&has).or((!record.is_object()).then_some(Self::Mooncake))
    }

    /// The format of a table with these columns.
    pub(super) fn of_columns(columns: &[String]) -> Option<Self> {
        let has = |name: &str| columns.iter().any(|column| is_column(column, name));
        Self::of_fields(&has).filter(|format| format.has_csv())
    }

    fn of_fields(has: &dyn Fn(&str) -> bool) -> Option<Self> {
        let rules: [(Self, &[&str]); 8] = [
            (Self::Agents, &["requests"]),
            (Self::ShareGpt, &["conversations"]),
            (Self::QwenBailian, &["parent_chat_id"]),
            (Self::Azure, &["ContextTokens", "GeneratedTokens"]),
            (Self::BurstGpt, &["Request tokens", "Response tokens"]),
            (Self::Mooncake, &["input_length", "output_length"]),
            (Self::Mooncake, &["hash_ids"]),
            (Self::Mooncake, &["timestamp"]),
        ];
        let rule = rules.into_iter().find(|(_, names)| names.iter().any(|name| has(name)));
        rule.map(|(format, _)| format)
    }
}

impl fmt::Display for TraceFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Whether a column of a table is this field: case does not count, and `_` is a space.
pub(super) fn is_column(column: &str, field: &str) -> bool {
    let folded = |name: &str| name.trim().to_ascii_lowercase().replace('_', " ");
    folded(column) == folded(field)
}

/// The fields of all formats that can be recognised, for an error.
pub(super) fn expected_fields() -> String {
    let one = |format: &TraceFormat| format!("{} ({})", format.fields().0.join(", "), format);
    let all = TraceFormat::ALL.iter().map(one).collect::<Vec<_>>();
    format!("expected the fields of a format: {}", all.join("; "))
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
