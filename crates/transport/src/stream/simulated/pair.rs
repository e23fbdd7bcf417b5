//! A simulated connection: two pipes, and the two streams that use them.
//!
//! A killed thread keeps its locks for ever. So nothing of `cascade_runtime` is called while a lock
//! of this file is held: no thread can be killed there.

use std::fmt;
use std::io;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use cascade_runtime::simulated::{Random, World};
use cascade_runtime::{Condvar, Mutex, MutexGuard, now};

use super::conditions::{Conditions, Fate};
use super::host::Host;
use super::pipe::{Pipe, Put};
use crate::region::Span;
use crate::stream::byte_stream::{ByteStream, TICK};

/// The end that connected, and the one that listened.
pub(super) const CLIENT: usize = 0;
pub(super) const SERVER: usize = 1;

/// A connection. Its pipes are numbered by their senders.
pub(super) struct Pair {
    pub(super) number: u64,
    pub(super) hosts: [Arc<Host>; 2],
    pub(super) names: [String; 2],
    state: Mutex<PairState>,
    changed: Condvar,
}

struct PairState {
    pipes: [Pipe; 2],
    conditions: Conditions,
    random: Random,
    /// When the connection is reset.
    reset: Option<Duration>,
    /// Until when nothing arrives, because the hosts are apart.
    open: Duration,
}

/// One end of a simulated connection.
pub(super) struct SimulatedStream {
    pair: Arc<Pair>,
    end: usize,
}

impl fmt::Debug for SimulatedStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SimulatedStream({}, {})", self.pair.number, self.pair.names[self.end])
    }
}

/// Makes a part of an event hash of what a network does.
pub(super) fn note(what: u64, number: u64) {
    if let Some(world) = World::current() {
        world.note(what.rotate_left(48) ^ number);
    }
}

impl Pair {
    pub(super) fn new(
        number: u64,
        hosts: [Arc<Host>; 2],
        names: [String; 2],
        (conditions, mut random, open): (Conditions, Random, Duration),
    ) -> Arc<Self> {
        let pipes = [(); 2].map(|()| Pipe::new(Fate::draw(&conditions, &mut random)));
        let state = PairState { pipes, conditions, random, reset: None, open };
        Arc::new(Self { number, hosts, names, state: Mutex::new(state), changed: Condvar::new() })
    }

    pub(super) fn stream(self: &Arc<Self>, end: usize) -> SimulatedStream {
        SimulatedStream { pair: Arc::clone(self), end }
    }

    fn lock(&self) -> MutexGuard<'_, PairState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Resets the connection: both ends fail.
    pub(super) fn reset(&self) {
        let at = now();
        self.lock().reset_at(at);
        note(1, self.number);
        self.changed.notify_all();
    }

    /// Nothing arrives before this time.
    pub(super) fn close_until(&self, open: Duration) {
        let mut state = self.lock();
        state.open = state.open.max(open);
    }

    /// What is sent from now on arrives.
    pub(super) fn open(&self) {
        self.lock().open = Duration::ZERO;
    }

    /// Whether this end receives no more.
    pub(super) fn has_ended(&self, end: usize) -> bool {
        self.lock().pipes[1 - end].is_deaf
    }

    /// Ends both directions of one end. If it has lost bytes that were not received and its process
    /// is gone, the peer's connection is reset.
    pub(super) fn end(&self, end: usize, is_gone: bool) {
        let at = now();
        let mut state = self.lock();
        let has_lost = state.pipes[1 - end].end_receiving();
        if has_lost && is_gone {
            state.reset_at(at);
        }
        state.end_sending(end, at);
        drop(state);
        self.changed.notify_all();
    }
}

impl PairState {
    fn reset_at(&mut self, at: Duration) {
        self.reset = Some(self.reset.map_or(at, |reset| reset.min(at)));
        if self.random.one_in(2) {
            // Else what has arrived can still be received.
            self.pipes.iter_mut().for_each(Pipe::lose);
        }
    }

    fn is_reset(&self, now: Duration) -> bool {
        self.reset.is_some_and(|at| at <= now)
    }

    fn end_sending(&mut self, end: usize, now: Duration) {
        let Self { pipes, conditions, random, .. } = self;
        pipes[end].end_sending(now, conditions, random);
    }

    fn send(&mut self, end: usize, spans: &[Span], now: Duration) -> Option<io::Result<usize>> {
        if self.is_reset(now) {
            return Some(Err(io::ErrorKind::ConnectionReset.into()));
        }
        // This end has ended, or has heard that the other one takes no more.
        let has_heard =
            self.pipes[end].is_deaf && self.pipes[1 - end].end.is_some_and(|at| at <= now);
        if self.pipes[end].end.is_some() || has_heard {
            if has_heard {
                self.reset_at(now);
            }
            return Some(Err(io::ErrorKind::BrokenPipe.into()));
        }
        let Self { pipes, conditions, random, open, .. } = self;
        match pipes[end].put(spans, conditions, random, (now, *open)) {
            Put::Sent(count) => Some(Ok(count)),
            Put::Full => None,
            Put::Reset => {
                self.reset_at(now);
                Some(Err(io::ErrorKind::ConnectionReset.into()))
            }
        }
    }

    fn receive(&mut self, end: usize, spans: &[Span], now: Duration) -> Option<io::Result<usize>> {
        let most = self.conditions.call(&mut self.random);
        let is_reset = self.is_reset(now);
        let pipe = &mut self.pipes[1 - end];
        if pipe.is_deaf {
            return Some(Ok(0));
        }
        match pipe.take(spans, most, now) {
            0 if is_reset => Some(Err(io::ErrorKind::ConnectionReset.into())),
            0 if pipe.has_ended(now) => Some(Ok(0)),
            0 => None,
            count => Some(Ok(count)),
        }
    }

    /// Whether a call that receives would return at once.
    fn is_readable(&self, end: usize, now: Duration) -> bool {
        let pipe = &self.pipes[1 - end];
        pipe.is_deaf || self.is_reset(now) || pipe.next_arrival().is_some_and(|at| at <= now)
    }

    /// The next time at which anything can change by itself.
    fn next_change(&self, end: usize, now: Duration) -> Option<Duration> {
        let arrival = self.pipes[1 - end].next_arrival();
        [arrival, self.reset].into_iter().flatten().filter(|at| *at > now).min()
    }
}

impl SimulatedStream {
    /// The address of the other end.
    pub(super) fn peer(&self) -> String {
        format!("{}#{}", self.pair.names[1 - self.end], self.pair.number)
    }

    /// Tries until `attempt` has a result, for at most `time`.
    fn wait<T>(
        &self,
        time: Duration,
        mut attempt: impl FnMut(&mut PairState, Duration) -> Option<T>,
    ) -> Option<T> {
        let pair = &*self.pair;
        pair.hosts[self.end].wait();
        let until = now().saturating_add(time);
        let mut state = pair.lock();
        loop {
            let at = now();
            if let Some(result) = attempt(&mut state, at) {
                return Some(result);
            }
            let next = state.next_change(self.end, at).unwrap_or(until).min(until);
            if at >= until {
                return None;
            }
            let waited = pair.changed.wait_timeout(state, next.saturating_sub(at));
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn moved(&self, what: u64, result: Option<io::Result<usize>>) -> io::Result<usize> {
        let result = result.unwrap_or_else(|| Err(io::ErrorKind::WouldBlock.into()));
        let count = result.as_ref().map_or(u64::MAX, |count| *count as u64);
        note(what, count ^ self.pair.number << 32);
        self.pair.changed.notify_all();
        result
    }
}

impl ByteStream for SimulatedStream {
    fn send_some(&self, spans: &[Span]) -> io::Result<usize> {
        let sent = self.wait(TICK, |state, now| state.send(self.end, spans, now));
        self.moved(2, sent)
    }

    fn receive_some(&self, spans: &[Span], _more: usize, time: Duration) -> io::Result<usize> {
        let received = self.wait(time, |state, now| state.receive(self.end, spans, now));
        self.moved(3, received)
    }

    fn wait_readable(&self, left: Duration) -> io::Result<bool> {
        let is_readable =
            self.wait(left, |state, now| state.is_readable(self.end, now).then_some(()));
        Ok(is_readable.is_some())
    }

    fn is_closed(&self) -> bool {
        let at = now();
        let state = self.pair.lock();
        let pipe = &state.pipes[1 - self.end];
        pipe.is_deaf || state.is_reset(at) || pipe.end.is_some_and(|end| end <= at)
    }

    fn shutdown(&self) {
        self.pair.end(self.end, false);
    }
}

impl Drop for SimulatedStream {
    fn drop(&mut self) {
        self.pair.end(self.end, true);
    }
}
