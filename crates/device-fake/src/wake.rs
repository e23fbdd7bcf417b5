//! Wakes the streams and callers that can go on after a change.

use cascade_runtime::Condvar;

use crate::state::{Item, State, Stream, Work};

/// Wakes those who can go on after a change of the state: idle streams with work that is due, and
/// callers that wait. Not all streams, because an engine asks for events thousands of times.
pub(crate) fn announce(state: &State, changed: &Condvar) {
    let is_ready = |stream: &&Stream| {
        !stream.is_running
            && (has_due_work(state, stream) || (stream.is_destroyed && stream.queue.is_empty()))
    };
    state.streams.values().filter(is_ready).for_each(|stream| stream.wake.notify_one());
    changed.notify_all();
}

/// Whether a stream has work that can be done now.
pub(crate) fn has_due_work(state: &State, stream: &Stream) -> bool {
    state.death.is_none() && stream.queue.front().is_some_and(|item| is_due(state, item))
}

/// Whether work can be done now.
fn is_due(state: &State, item: &Item) -> bool {
    let has_passed = match &item.work {
        Work::Wait { event, count } => {
            state.events.get(event).is_none_or(|event| event.reached >= *count)
        }
        _ => true,
    };
    has_passed && !state.held.contains(item.name) && !state.held.contains("*")
}
