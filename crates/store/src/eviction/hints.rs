//! What a caller may know about the future of its blocks. Every hint is optional.

use std::time::Duration;

/// Why the engine stopped generating.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StopReason {
    /// The model called a tool: the same chain usually comes back within seconds.
    ToolUse,
    /// The model ended its turn: whether the chain comes back is up to a person.
    EndTurn,
    /// The output reached its limit.
    Length,
    /// The caller went away before the end.
    Cancelled,
}

/// How much the caller cares about a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Priority {
    /// Worth less than the others.
    Low,
    /// The default.
    #[default]
    Normal,
    /// Worth more than the others.
    High,
}

/// What a caller knows about one chain beyond its blocks.
///
/// Hints come with a request, or later through [`super::Eviction::hint`]: an engine learns how a
/// request ended, or that its session is over, only after it asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Hints {
    /// The session ends with this request: what it alone used will not be asked for again.
    pub ends_session: bool,
    /// How the request ended.
    pub stop: Option<StopReason>,
    /// How much the caller cares.
    pub priority: Priority,
    /// A number for the kind of work, such as chat or batch; requests with equal numbers are
    /// expected to behave alike.
    pub workload: Option<u8>,
    /// A waiting request will ask for this chain within that time (look-ahead).
    pub expected_within: Option<Duration>,
}
