//! One question to several nodes at once: their answers, as they come.

use std::sync::PoisonError;
use std::time::Duration;

use cascade_block::BlockKey;
use cascade_runtime::{Cancel, Condvar, Deadline, Mutex, SystemClock};

use crate::message::Stated;

/// How often a waiting caller looks whether it was cancelled.
const LOOK: Duration = Duration::from_millis(5);

/// The blocks that one node has, of those that were asked for.
pub(crate) type Located = Vec<Option<Stated>>;

/// A question which blocks there are, and the answers.
#[derive(Debug)]
pub(crate) struct Round {
    pub(crate) keys: Vec<BlockKey>,
    pub(crate) deadline: Deadline,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Nodes that were asked.
    asked: usize,
    /// Those of them that may still answer.
    waiting: usize,
    /// Number of the node, and what it has.
    answers: Vec<(usize, Located)>,
}

impl Round {
    pub(crate) fn new(keys: &[BlockKey], deadline: Deadline) -> Self {
        let (state, changed) = (Mutex::default(), Condvar::new());
        Self { keys: keys.to_vec(), deadline, state, changed }
    }

    /// One more node is asked.
    pub(crate) fn ask(&self) {
        let mut state = self.lock();
        state.asked += 1;
        state.waiting += 1;
    }

    /// A node has answered; `None`: it has not, and will not in time.
    pub(crate) fn answer(&self, node: usize, located: Option<Located>) {
        let mut state = self.lock();
        state.waiting = state.waiting.saturating_sub(1);
        state.answers.extend(located.map(|located| (node, located)));
        drop(state);
        self.changed.notify_all();
    }

    /// Waits until all nodes have answered, one of them has all blocks, the deadline passes, or the
    /// call is cancelled. Returns the answers so far; `None` if nodes were asked and none of them
    /// has answered.
    pub(crate) fn wait(&self, cancel: &Cancel) -> Option<Vec<(usize, Located)>> {
        let mut state = self.lock();
        loop {
            let has_all = |(_, located): &(usize, Located)| located.iter().all(Option::is_some);
            let left = self.deadline.remaining(&SystemClock);
            let is_over = state.waiting == 0 || left.is_zero() || cancel.is_set();
            if is_over || state.answers.iter().any(has_all) {
                let answers = std::mem::take(&mut state.answers);
                return (state.asked == 0 || !answers.is_empty()).then_some(answers);
            }
            let waited = self.changed.wait_timeout(state, left.min(LOOK));
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn lock(&self) -> cascade_runtime::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
