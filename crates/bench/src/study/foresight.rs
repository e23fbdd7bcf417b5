//! Hints as an engine might give them, made with hindsight from the trace itself.

use std::time::Duration;

use cascade_store::eviction::Hints;

use crate::trace::Trace;

/// Which hints a replay gives.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct HintSet {
    /// The end of a session, that late: after the last request whose chain is ever used again.
    pub session_end_after: Option<Duration>,
    /// Waiting requests, that long before they come.
    pub look_ahead: Option<Duration>,
    /// How requests ended, where the trace says so.
    pub stop: bool,
}

/// Something that happens in a replay.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Event {
    /// A request of the trace, by its number.
    Request {
        /// Its number.
        request: usize,
        /// What comes with it.
        hints: Hints,
    },
    /// A hint about the chain of a request.
    Hint {
        /// When it comes.
        at: Duration,
        /// Whose chain it is about.
        request: usize,
        /// What it says.
        hints: Hints,
    },
}

/// All events of a replay, by time.
#[derive(Debug, Clone, Default)]
pub struct Foresight {
    events: Vec<(Duration, Event)>,
}

impl Foresight {
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
            if let Some(ahead) = set.look_ahead.filter(|ahead| !ahead.is_zero()) {
                let at = traced.at.saturating_sub(ahead);
                let expected = Hints { expected_within: Some(ahead), ..Hints::default() };
                events.push((at, Event::Hint { at, request, hints: expected }));
            }
            events.push((traced.at, Event::Request { request, hints }));
            if let Some(delay) = delay.filter(|delay| !delay.is_zero()) {
                let at = traced.at + delay;
                let over = Hints { ends_session: true, ..Hints::default() };
                events.push((at, Event::Hint { at, request, hints: over }));
            }
        }
        events.sort_by_key(|(at, _)| *at);
        Self { events }
    }

    /// The events by time.
    pub fn events(self) -> impl Iterator<Item = Event> {
        self.events.into_iter().map(|(_, event)| event)
    }
}

/// For each request, whether its last full block is never asked for again.
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
