//! The events of a replay: requests, and hints that an engine would give, computed from the trace.

use std::time::Duration;

use cascade_store::eviction::Hints;

use crate::trace::Trace;

/// The hints of a replay.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct HintSet {
    /// Give the end of a session this long after the last request that uses its chain.
    pub session_end_after: Option<Duration>,
    /// Announce each request this long before it arrives.
    pub lookahead: Option<Duration>,
    /// Give the stop reason of requests, if the trace has it.
    pub stop: bool,
}

/// One event of a replay.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ReplayEvent {
    /// A request of the trace.
    Request {
        /// Its index.
        request: usize,
        /// The hints with the request.
        hints: Hints,
    },
    /// A hint about the chain of a request.
    Hint {
        /// Time of the hint.
        at: Duration,
        /// Index of the request.
        request: usize,
        /// The hints.
        hints: Hints,
    },
}

/// All events of a replay, by time.
#[derive(Debug, Clone, Default)]
pub struct ReplayEvents {
    events: Vec<(Duration, ReplayEvent)>,
}

impl ReplayEvents {
    /// The requests of a trace, and the hints about them.
    pub fn of(trace: &Trace, set: &HintSet) -> Self {
        let is_last = last_uses(trace);
        let mut events = Vec::with_capacity(trace.requests.len());
        for (request, traced) in trace.requests.iter().enumerate() {
            let mut hints = Hints::default();
            if set.stop {
                hints.stop = traced.stop;
            }
            let delay = set.session_end_after.filter(|_| is_last[request]);
            hints.ends_session = delay.is_some_and(|delay| delay.is_zero());
            if let Some(ahead) = set.lookahead.filter(|ahead| !ahead.is_zero()) {
                let at = traced.at.saturating_sub(ahead);
                let expected = Hints { expected_within: Some(ahead), ..Hints::default() };
                events.push((at, ReplayEvent::Hint { at, request, hints: expected }));
            }
            events.push((traced.at, ReplayEvent::Request { request, hints }));
            if let Some(delay) = delay.filter(|delay| !delay.is_zero()) {
                let at = traced.at + delay;
                let ended = Hints { ends_session: true, ..Hints::default() };
                events.push((at, ReplayEvent::Hint { at, request, hints: ended }));
            }
        }
        events.sort_by_key(|(at, _)| *at);
        Self { events }
    }

    /// The events by time.
    pub fn events(self) -> impl Iterator<Item = ReplayEvent> {
        self.events.into_iter().map(|(_, event)| event)
    }
}

/// For each request, whether no later request uses its last full block.
fn last_uses(trace: &Trace) -> Vec<bool> {
    let blocks = usize::try_from(trace.unique_blocks).expect("a trace that fits in memory");
    let mut is_used_later = vec![false; blocks];
    let mut is_last = vec![false; trace.requests.len()];
    for (request, traced) in trace.requests.iter().enumerate().rev() {
        let full = traced.blocks.len() - usize::from(traced.partial_tail);
        let index = |block: &u64| usize::try_from(*block).expect("block numbers are dense");
        let deepest = traced.blocks[..full].last().map(index);
        is_last[request] = deepest.is_some_and(|block| !is_used_later[block]);
        traced.blocks.iter().for_each(|block| is_used_later[index(block)] = true);
    }
    is_last
}
