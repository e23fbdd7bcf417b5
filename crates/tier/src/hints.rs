//! Hints of a caller about the future use of its blocks. Every hint is optional.

use std::time::Duration;

/// Why the engine stopped generating.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StopReason {
    /// The model called a tool: the same chain is usually requested again within seconds.
    ToolUse,
    /// The model ended its turn: a person decides whether the chain is requested again.
    EndTurn,
    /// The output reached its limit.
    Length,
    /// The caller cancelled the request.
    Cancelled,
}

/// How valuable a chain is to the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Priority {
    /// Less valuable than the others.
    Low,
    /// The default.
    #[default]
    Normal,
    /// More valuable than the others.
    High,
}

/// The hints for one chain.
///
/// Hints come with a request, or later through `Eviction::hint` of the store: an engine learns only
/// after the request how it ended or that its session is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Hints {
    /// The session ends with this request: blocks that it alone used will not be requested again.
    pub ends_session: bool,
    /// How the request ended.
    pub stop: Option<StopReason>,
    /// How valuable the chain is.
    pub priority: Priority,
    /// A number for the kind of work, such as chat or batch; requests with equal numbers are
    /// expected to behave alike.
    pub workload: Option<u8>,
    /// A queued request will use this chain within that time (lookahead).
    pub expected_within: Option<Duration>,
}
