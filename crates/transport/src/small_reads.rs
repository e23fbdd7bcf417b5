//! Small reads beside large batches. Behind megabytes of other batches a small read waits for
//! milliseconds, so it takes a stream of its own, which is opened when it is first needed.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use cascade_runtime::thread::Builder;
use cascade_runtime::{Condvar, Deadline, LeafMutex, Mutex, SystemClock, now};

use crate::TransportError;
use crate::connection::{Batch, Completion, Connection, Ticket, TransportKind};
use crate::peer::Peer;
use crate::piece::{Direction, Piece};
use crate::question::{Answer, AskLimit};
use crate::stream::{Open, StreamConnection};

/// Which reads take the other stream, and when.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes {
    /// Bytes of the largest of them.
    pub(crate) small_max: u64,
    /// Bytes of other batches under way from which on they do.
    pub(crate) under_way_min: u64,
    /// Time without any of them after which the stream is closed.
    pub(crate) idle_max: Duration,
}

impl Default for Sizes {
    fn default() -> Self {
        let idle_max = Duration::from_secs(60);
        Self { small_max: 64 << 10, under_way_min: 1 << 20, idle_max }
    }
}

/// Time to open the stream.
const OPEN_TIMEOUT: Duration = Duration::from_secs(5);
/// Time until it is tried again, if it could not be opened or was lost.
const OPEN_PAUSE: Duration = Duration::from_secs(10);

/// A connection that moves small reads beside large batches.
#[derive(Debug)]
pub(crate) struct SmallReads {
    connection: Arc<dyn Connection>,
    stream: Arc<SmallStream>,
    sizes: Sizes,
}

struct SmallStream {
    open: Arc<Open>,
    idle_max: Duration,
    /// Bytes of batches that are not small, and have not ended.
    under_way: AtomicU64,
    state: LeafMutex<State>,
    /// When the stream was used last.
    last_used: LeafMutex<Duration>,
    /// The thread that closes the stream looks at the state while it has this.
    looking: Mutex<()>,
    /// The state was replaced.
    replaced: Condvar,
}

#[derive(Debug)]
enum State {
    /// It is opened when it is needed, from this time on.
    Absent(Duration),
    Opening,
    Open(Arc<StreamConnection>),
    /// The connection was closed.
    Closed,
}

/// A batch that is not small, until it has ended.
#[derive(Debug)]
struct UnderWay {
    stream: Arc<SmallStream>,
    bytes: u64,
}

/// The ticket of a batch that is not small.
#[derive(Debug)]
struct LargeTicket {
    ticket: Option<Ticket>,
    _under_way: UnderWay,
}

/// The ticket of a read that took the other stream.
#[derive(Debug)]
struct SmallTicket {
    ticket: Option<Ticket>,
    /// For another try, if the stream is lost.
    pieces: Vec<Piece>,
    connection: Arc<dyn Connection>,
    is_retried: bool,
}

impl SmallReads {
    /// Takes a connection, and what opens another stream to its peer.
    pub(crate) fn beside(connection: Arc<dyn Connection>, sizes: Sizes, open: Arc<Open>) -> Self {
        let state = LeafMutex::new(State::Absent(Duration::ZERO));
        let stream = Arc::new(SmallStream {
            open,
            idle_max: sizes.idle_max,
            under_way: AtomicU64::new(0),
            state,
            last_used: LeafMutex::default(),
            looking: Mutex::default(),
            replaced: Condvar::new(),
        });
        Self { connection, stream, sizes }
    }

    /// The stream of small reads, while much else is under way.
    fn small_stream(&self) -> Option<Arc<StreamConnection>> {
        let under_way = self.stream.under_way.load(Ordering::Relaxed);
        (under_way >= self.sizes.under_way_min).then(|| self.stream.get(self.peer())).flatten()
    }

    fn post_small(
        &self,
        small: &Arc<StreamConnection>,
        batch: &Batch<'_>,
        deadline: Deadline,
    ) -> Result<Ticket, TransportError> {
        match small.post(batch, deadline) {
            Ok(ticket) => Ok(Ticket::pending(SmallTicket {
                ticket: Some(ticket),
                pieces: batch.pieces.to_vec(),
                connection: Arc::clone(&self.connection),
                is_retried: false,
            })),
            Err(TransportError::Lost { .. }) => {
                self.stream.lost(small);
                self.connection.post(batch, deadline)
            }
            Err(error) => Err(error),
        }
    }
}

impl Connection for SmallReads {
    fn peer(&self) -> &Peer {
        self.connection.peer()
    }

    fn transport(&self) -> TransportKind {
        self.connection.transport()
    }

    fn post(&self, batch: &Batch<'_>, deadline: Deadline) -> Result<Ticket, TransportError> {
        let bytes = batch.pieces.iter().map(|piece| piece.bytes).fold(0, u64::saturating_add);
        if bytes > self.sizes.small_max {
            // While it is sent, small reads pass it, too.
            let under_way = UnderWay::new(&self.stream, bytes);
            let ticket = self.connection.post(batch, deadline)?;
            return Ok(Ticket::pending(LargeTicket {
                ticket: Some(ticket),
                _under_way: under_way,
            }));
        }
        let may_pass = batch.direction == Direction::Read && batch.notice.is_none();
        if may_pass
            && bytes > 0
            && let Some(small) = self.small_stream()
        {
            return self.post_small(&small, batch, deadline);
        }
        self.connection.post(batch, deadline)
    }

    fn ask(
        &self,
        question: &[u8],
        targets: &mut [&mut [u8]],
        limit: AskLimit<'_>,
    ) -> Result<Answer, TransportError> {
        let bytes = targets.iter().map(|target| target.len() as u64).sum();
        if bytes > self.sizes.small_max {
            let _under_way = UnderWay::new(&self.stream, bytes);
            return self.connection.ask(question, targets, limit);
        }
        if let Some(small) = self.small_stream() {
            match small.ask(question, targets, limit) {
                Err(TransportError::Lost { .. }) => self.stream.lost(&small),
                answered => return answered,
            }
        }
        self.connection.ask(question, targets, limit)
    }

    fn is_open(&self) -> bool {
        self.connection.is_open()
    }

    fn close(&self) {
        self.stream.close();
        self.connection.close();
    }
}

impl Drop for SmallReads {
    fn drop(&mut self) {
        // A thread may be opening it, and has a part of it.
        self.stream.close();
    }
}

impl SmallStream {
    /// The stream, if it is open. If there is none, a thread opens it.
    fn get(self: &Arc<Self>, peer: &Peer) -> Option<Arc<StreamConnection>> {
        {
            let mut state = self.lock();
            match &mut *state {
                State::Open(stream) => {
                    let stream = Arc::clone(stream);
                    drop(state);
                    if stream.is_open() {
                        self.note_use();
                        return Some(stream);
                    }
                    self.lost(&stream);
                    return None;
                }
                State::Absent(since) if *since <= now() => *state = State::Opening,
                _ => return None,
            }
        }
        let (of_thread, id) = (Arc::clone(self), peer.id);
        let builder = Builder::new().name("transport-small".to_owned());
        let started = builder.spawn(move || {
            let opened = (of_thread.open)(Deadline::after(&SystemClock, OPEN_TIMEOUT));
            // Through a load balancer, another endpoint may answer.
            let ours = opened.ok().filter(|stream| stream.peer().id == id).map(Arc::new);
            of_thread.note_use();
            of_thread.opened(ours.clone());
            if let Some(stream) = ours {
                of_thread.close_when_idle(&stream);
            }
        });
        if started.is_err() {
            self.opened(None);
        }
        None
    }

    fn note_use(&self) {
        let now = now();
        *self.last_used.lock().unwrap_or_else(PoisonError::into_inner) = now;
    }

    /// Waits until no small read has used the stream for a while, and closes it. A read that it
    /// still moves takes the other streams.
    fn close_when_idle(&self, stream: &Arc<StreamConnection>) {
        let is_it = |state: &State| matches!(state, State::Open(it) if Arc::ptr_eq(it, stream));
        let mut looking = self.looking.lock().unwrap_or_else(PoisonError::into_inner);
        while is_it(&self.lock()) {
            let used = *self.last_used.lock().unwrap_or_else(PoisonError::into_inner);
            let left = (used + self.idle_max).saturating_sub(now());
            if left.is_zero() {
                drop(looking);
                self.replace(State::Absent(Duration::ZERO), is_it);
                return;
            }
            let waited = self.replaced.wait_timeout(looking, left);
            looking = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn opened(&self, stream: Option<Arc<StreamConnection>>) {
        let next = match stream {
            Some(stream) => State::Open(stream),
            None => State::Absent(now() + OPEN_PAUSE),
        };
        self.replace(next, |state| matches!(state, State::Opening));
    }

    /// The stream is not used any more, and another one is opened later.
    fn lost(&self, stream: &Arc<StreamConnection>) {
        let is_it = |state: &State| matches!(state, State::Open(it) if Arc::ptr_eq(it, stream));
        self.replace(State::Absent(now() + OPEN_PAUSE), is_it);
    }

    fn close(&self) {
        self.replace(State::Closed, |_| true);
    }

    /// Replaces the state if it is one of these.
    fn replace(&self, next: State, is_due: impl Fn(&State) -> bool) {
        let left = {
            let mut state = self.lock();
            if is_due(&state) { std::mem::replace(&mut *state, next) } else { next }
        };
        // With the lock, so that a thread that has just seen the state is woken.
        drop(self.looking.lock().unwrap_or_else(PoisonError::into_inner));
        self.replaced.notify_all();
        // Without a lock: this may end a connection.
        if let State::Open(stream) = left {
            stream.close();
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for SmallStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SmallStream").field("under_way", &self.under_way).finish_non_exhaustive()
    }
}

impl UnderWay {
    fn new(stream: &Arc<SmallStream>, bytes: u64) -> Self {
        stream.under_way.fetch_add(bytes, Ordering::Relaxed);
        Self { stream: Arc::clone(stream), bytes }
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.stream.under_way.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl Completion for LargeTicket {
    fn wait(&mut self, deadline: Deadline) -> Result<(), TransportError> {
        self.ticket.as_mut().map_or(Ok(()), |ticket| ticket.wait(deadline))
    }

    fn cancel(&mut self, deadline: Deadline) {
        if let Some(ticket) = self.ticket.take() {
            ticket.cancel(deadline);
        }
    }
}

impl Completion for SmallTicket {
    fn wait(&mut self, deadline: Deadline) -> Result<(), TransportError> {
        let Some(ticket) = &mut self.ticket else { return Ok(()) };
        match ticket.wait(deadline) {
            Err(TransportError::Lost { .. }) if !self.is_retried => {
                let (direction, pieces) = (Direction::Read, &*self.pieces);
                let batch = Batch { direction, pieces, notice: None };
                // After a deadline the next wait posts it.
                let again = self.connection.post(&batch, deadline)?;
                self.is_retried = true;
                self.ticket.insert(again).wait(deadline)
            }
            ended => ended,
        }
    }

    fn cancel(&mut self, deadline: Deadline) {
        if let Some(ticket) = self.ticket.take() {
            ticket.cancel(deadline);
        }
    }
}
