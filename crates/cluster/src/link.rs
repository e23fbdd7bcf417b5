//! The way to one other node: a connection, a thread that keeps it and asks over it, and what is
//! known of the node.
//!
//! Whether a node can be used is learnt from calls to it. One that answers too late is *suspect*:
//! it is asked nothing but whether it is there, until it says so.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use cascade_block::with_causes;
use cascade_runtime::{Cancel, Condvar, Deadline, Mutex, MutexGuard, SystemClock, now, random_u64};
use cascade_transport::{Answer, AskLimit, Connection, Endpoint, TransportError};

use crate::hosts::Host;
use crate::message::{Contents, KEYS_MAX, Question, read_stated};
use crate::round::{Located, Round};

/// How often a node is asked what it keeps.
const PING_INTERVAL: Duration = Duration::from_secs(1);
/// Time for that answer.
const PING_TIMEOUT: Duration = Duration::from_secs(1);
/// Time to connect.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Pauses between tries to connect: the first one, and the longest.
const PAUSE: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(5));
/// How long a node has to be silent before it is suspect: when asked what it has, and when asked
/// for blocks. A caller with less time says nothing of the node.
const SILENCE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));
/// Questions that wait for a node. A caller that finds more does without it.
const QUEUE_MAX: usize = 64;

/// Whether another node can be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodeState {
    /// It answers.
    Up,
    /// It is connected, and answered too late.
    Suspect,
    /// There is no connection.
    Away,
}

impl NodeState {
    /// Its name in statistics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Up => "up",
            Self::Suspect => "suspect",
            Self::Away => "away",
        }
    }
}

/// What is known of another node.
#[derive(Debug, Clone)]
pub struct NodeStatus {
    /// Who it is.
    pub host: Host,
    /// Whether it can be used.
    pub state: NodeState,
    /// What it keeps, as it said last.
    pub contents: Option<Contents>,
    /// Blocks fetched from it.
    pub fetched_blocks: u64,
    /// Their bytes.
    pub fetched_bytes: u64,
    /// The last error, until it answers again.
    pub error: Option<String>,
}

/// The way to one other node.
pub(crate) struct Link {
    number: usize,
    endpoint: Endpoint,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    status: NodeStatus,
    connection: Option<Arc<dyn Connection>>,
    queue: VecDeque<Arc<Round>>,
    /// Tries to connect that failed in a row.
    failures: u32,
    /// When it is connected or asked next, unless there is a question.
    due: Duration,
    is_stopped: bool,
}

/// What the thread does next.
enum Next {
    Stop,
    Locate(Arc<Round>, Arc<dyn Connection>),
    Ping(Arc<dyn Connection>),
    Connect,
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Link({:?})", self.lock().status)
    }
}

impl Link {
    pub(crate) fn new(number: usize, host: Host, endpoint: Endpoint) -> Self {
        let status = NodeStatus {
            host,
            state: NodeState::Away,
            contents: None,
            fetched_blocks: 0,
            fetched_bytes: 0,
            error: None,
        };
        let state = State {
            status,
            connection: None,
            queue: VecDeque::new(),
            failures: 0,
            due: Duration::ZERO,
            is_stopped: false,
        };
        Self { number, endpoint, state: Mutex::new(state), changed: Condvar::new() }
    }

    pub(crate) fn status(&self) -> NodeStatus {
        self.lock().status.clone()
    }

    /// Asks the node which blocks it has, if it can be used. The answer goes to the round.
    pub(crate) fn locate(&self, round: &Arc<Round>) {
        let mut state = self.lock();
        if state.status.state == NodeState::Up && state.queue.len() < QUEUE_MAX {
            round.ask();
            state.queue.push_back(Arc::clone(round));
            self.changed.notify_all();
        }
    }

    /// Asks the node for blocks, on the calling thread.
    pub(crate) fn fetch(
        &self,
        question: &[u8],
        targets: &mut [&mut [u8]],
        limit: AskLimit<'_>,
    ) -> Result<Answer, TransportError> {
        let connection = self.lock().connection.clone();
        let Some(connection) = connection else {
            let address = self.lock().status.host.address.clone();
            let reason = "there is no connection".to_owned();
            return Err(TransportError::Lost { peer: address, reason });
        };
        let began = now();
        let answered = connection.ask(question, targets, limit);
        let bytes = |answer: &Answer| {
            answer.filled.iter().map(|at| targets[*at as usize].len() as u64).sum::<u64>()
        };
        match &answered {
            // The caller has gone, which says nothing of the node.
            Err(_) if limit.cancel.is_some_and(Cancel::is_set) => {}
            Err(error) if is_short(error, (began, limit.deadline), SILENCE.1) => {}
            Ok(answer) => {
                let mut state = self.lock();
                state.status.fetched_blocks += answer.filled.len() as u64;
                state.status.fetched_bytes += bytes(answer);
            }
            Err(error) => self.failed(Some(&connection), error),
        }
        answered
    }

    /// Ends the thread and the connection.
    pub(crate) fn stop(&self) {
        let mut state = self.lock();
        state.is_stopped = true;
        state.status.state = NodeState::Away;
        let left = (state.connection.take(), std::mem::take(&mut state.queue));
        drop(state);
        self.changed.notify_all();
        // Without the lock: closing waits for others.
        left.1.iter().for_each(|round| round.answer(self.number, None));
        drop(left);
    }

    /// Keeps the connection and asks over it, until it is stopped.
    pub(crate) fn run(&self) {
        loop {
            match self.next() {
                Next::Stop => return,
                Next::Locate(round, connection) => {
                    let located = self.ask_where(&round, &connection);
                    round.answer(self.number, located);
                }
                Next::Ping(connection) => self.ping(&connection),
                Next::Connect => self.connect(),
            }
        }
    }

    fn next(&self) -> Next {
        let mut state = self.lock();
        loop {
            if state.is_stopped {
                return Next::Stop;
            }
            let is_up = state.status.state == NodeState::Up;
            let Some(connection) = state.connection.clone() else {
                state = match self.wait_until_due(state) {
                    Ok(()) => return Next::Connect,
                    Err(state) => state,
                };
                continue;
            };
            if let Some(round) = state.queue.pop_front() {
                if is_up && !round.deadline.has_passed(&SystemClock) {
                    return Next::Locate(round, connection);
                }
                round.answer(self.number, None);
                continue;
            }
            state = match self.wait_until_due(state) {
                Ok(()) => return Next::Ping(connection),
                Err(state) => state,
            };
        }
    }

    /// `Ok` if it is time for the next call; otherwise waits for a change.
    fn wait_until_due<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
    ) -> Result<(), MutexGuard<'a, State>> {
        // Nobody answers these while there is no connection.
        if state.connection.is_none() {
            for round in std::mem::take(&mut state.queue) {
                round.answer(self.number, None);
            }
        }
        let left = state.due.saturating_sub(now());
        if left.is_zero() {
            return Ok(());
        }
        let waited = self.changed.wait_timeout(state, left);
        Err(waited.unwrap_or_else(PoisonError::into_inner).0)
    }

    fn connect(&self) {
        let address = self.lock().status.host.address.clone();
        let deadline = Deadline::after(&SystemClock, CONNECT_TIMEOUT);
        match self.endpoint.connect_tcp(&address, deadline) {
            Ok(connection) => {
                self.lock().connection = Some(Arc::clone(&connection));
                // Only an answer makes it usable.
                self.ping(&connection);
            }
            Err(error) => self.failed(None, &error),
        }
    }

    /// Asks what the node keeps.
    fn ping(&self, connection: &Arc<dyn Connection>) {
        let deadline = Deadline::after(&SystemClock, PING_TIMEOUT);
        let answered =
            connection.ask(&Question::Contents.to_bytes(), &mut [], AskLimit::until(deadline));
        let contents = match answered {
            Ok(answer) => Contents::parse(&answer.text),
            Err(error) => return self.failed(Some(connection), &error),
        };
        let mut state = self.lock();
        state.due = now() + PING_INTERVAL;
        state.failures = 0;
        if state.is_stopped {
            return;
        }
        if contents.is_some() {
            state.status.state = NodeState::Up;
            state.status.contents = contents;
            state.status.error = None;
        } else {
            // It may be about to open its stores.
            state.status.state = NodeState::Suspect;
            state.status.error = Some("it has no blocks yet, or speaks another version".to_owned());
        }
    }

    fn ask_where(&self, round: &Round, connection: &Arc<dyn Connection>) -> Option<Located> {
        let mut located = Vec::with_capacity(round.keys.len());
        for keys in round.keys.chunks(KEYS_MAX) {
            let within = round.deadline.remaining(&SystemClock);
            let question = Question::Locate { keys: keys.to_vec(), within };
            let limit = AskLimit::until(round.deadline);
            let began = now();
            let answered = connection.ask(&question.to_bytes(), &mut [], limit);
            match answered {
                Ok(answer) => located.extend(read_stated(&answer.text, keys.len())?),
                Err(error) => {
                    if !is_short(&error, (began, round.deadline), SILENCE.0) {
                        self.failed(Some(connection), &error);
                    }
                    break;
                }
            }
        }
        if located.is_empty() {
            return None;
        }
        located.resize(round.keys.len(), None);
        Some(located)
    }

    /// A call over a connection has failed, or there is none: after a deadline the node is
    /// suspect, after any other error away.
    fn failed(&self, connection: Option<&Arc<dyn Connection>>, error: &TransportError) {
        let mut state = self.lock();
        let is_it = |now: &Arc<dyn Connection>| connection.is_some_and(|it| Arc::ptr_eq(it, now));
        if state.connection.as_ref().is_some_and(|now| !is_it(now)) {
            // There is another one by now.
            return;
        }
        state.status.error = Some(with_causes(error));
        if matches!(error, TransportError::Deadline { .. }) && state.connection.is_some() {
            state.status.state = NodeState::Suspect;
            state.due = now() + PAUSE.0;
            return;
        }
        state.status.state = NodeState::Away;
        state.failures = state.failures.saturating_add(1);
        state.due = now() + pause(state.failures);
        let left = state.connection.take();
        drop(state);
        self.changed.notify_all();
        // Without the lock: closing waits for others.
        drop(left);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether a caller had too little time to say that a node is silent.
fn is_short(
    error: &TransportError,
    (began, deadline): (Duration, Deadline),
    silence: Duration,
) -> bool {
    let allowed = deadline.time().saturating_sub(began);
    matches!(error, TransportError::Deadline { .. }) && allowed < silence
}

/// The pause after some failures in a row: doubled each time, and shortened by a random part, so
/// that nodes that lost a peer at the same time do not come back at the same time.
fn pause(failures: u32) -> Duration {
    let (first, longest) = PAUSE;
    let doubled = first.saturating_mul(1 << failures.clamp(1, 16)) / 2;
    let most = doubled.min(longest);
    // Without random bytes the pause is whole.
    let random = random_u64().map_or(0, |random| u32::try_from(random % 500).unwrap_or(0));
    most.saturating_sub(most / 1000 * random)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_up_to_a_limit() {
        for (failures, most) in [(1, 250), (2, 500), (5, 4000), (6, 5000), (u32::MAX, 5000)] {
            for _ in 0..20 {
                let pause = pause(failures).as_millis();
                assert!((most / 2..=most).contains(&pause), "{failures}: {pause}");
            }
        }
    }
}
