//! The streams of a connection: those that live, and lost ones, which are opened again. Not what
//! moves over them.
//!
//! A stream is lost alone if only reads were under way on it: other streams read their bytes again.
//! If the end of a write or a notice is unknown, the whole connection is lost, because bytes of the
//! write may arrive until a new connection has ended this one at the peer.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use cascade_runtime::thread::Builder;
use cascade_runtime::{Deadline, LeafMutex, SystemClock, now};

use super::lane::{Lane, Part, Shared};
use crate::TransportError;
use crate::connection::Connection as _;
use crate::peer::Peer;
use crate::stream::{Open, Standing, StreamConnection};

/// Time to open a stream.
const OPEN_TIMEOUT: Duration = Duration::from_secs(5);

/// The streams of a connection.
pub(super) struct Streams {
    peer: Peer,
    open: Arc<Open>,
    /// Time until a lost stream is opened again.
    pause: Duration,
    state: LeafMutex<State>,
    /// Number of the next batch that is not divided.
    next: AtomicUsize,
}

#[derive(Default)]
struct State {
    lanes: Vec<Lane>,
    /// For each lost stream, from when on it is opened again.
    absent: Vec<Duration>,
    is_opening: bool,
    /// Why the connection has ended.
    lost: Option<TransportError>,
}

impl Streams {
    /// Takes connections to one peer, at least one.
    pub(super) fn start(
        streams: Vec<StreamConnection>,
        (open, pause): (Arc<Open>, Duration),
    ) -> Result<Arc<Self>, TransportError> {
        let peer = streams.first().expect("at least one").peer().clone();
        let (state, next) = (LeafMutex::default(), AtomicUsize::new(0));
        let all = Arc::new(Self { peer, open, pause, state, next });
        for stream in streams {
            let lane = all.lane(stream)?;
            all.lock().lanes.push(lane);
        }
        Ok(all)
    }

    fn lane(self: &Arc<Self>, stream: StreamConnection) -> Result<Lane, TransportError> {
        let of_thread = Arc::downgrade(self);
        let again = move |part: Part, from: &Arc<Shared>, error| match of_thread.upgrade() {
            Some(streams) => streams.again(part, from, error),
            None => part.fail(error),
        };
        Lane::start(stream, Box::new(again))
    }

    pub(super) fn peer(&self) -> &Peer {
        &self.peer
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn error(&self, reason: &str) -> TransportError {
        TransportError::lost(&self.peer.address, reason)
    }

    /// All streams that were not found to be lost.
    pub(super) fn all(&self) -> Result<Vec<Arc<Shared>>, TransportError> {
        let state = self.lock();
        match &state.lost {
            Some(error) => Err(error.clone()),
            None => Ok(state.lanes.iter().map(|lane| Arc::clone(lane.shared())).collect()),
        }
    }

    /// The streams that are not known to be lost.
    pub(super) fn living(&self) -> Result<Vec<Arc<Shared>>, TransportError> {
        for lane in self.all()? {
            if lane.stream().is_lost() {
                self.can_take(&lane)?;
            }
        }
        self.all()
    }

    /// The streams that can take a batch: at least one.
    pub(super) fn usable(&self) -> Result<Vec<Arc<Shared>>, TransportError> {
        let mut usable = vec![];
        for lane in self.all()? {
            if self.can_take(&lane)? {
                usable.push(lane);
            }
        }
        if usable.is_empty() { Err(self.all_have_ended()) } else { Ok(usable) }
    }

    /// A stream that can take a batch: each in turn, so that the batches of several threads run
    /// beside each other.
    pub(super) fn next(&self) -> Result<Arc<Shared>, TransportError> {
        let mut lanes = self.all()?;
        let first = self.next.fetch_add(1, Ordering::Relaxed) % lanes.len().max(1);
        lanes.rotate_left(first);
        for lane in lanes {
            if self.can_take(&lane)? {
                return Ok(lane);
            }
        }
        Err(self.all_have_ended())
    }

    fn all_have_ended(&self) -> TransportError {
        self.error("the peer has closed all of its streams")
    }

    /// Whether a stream can take a batch.
    fn can_take(&self, lane: &Arc<Shared>) -> Result<bool, TransportError> {
        match lane.stream().standing() {
            Standing::Open => Ok(true),
            Standing::Ending { .. } => Ok(false),
            Standing::Lost { error, .. } => self.lost(lane, error).map(|()| false),
        }
    }

    /// Whether a batch can be posted.
    pub(super) fn is_open(&self) -> bool {
        let Ok(lanes) = self.all() else { return false };
        let standings = lanes.iter().map(|lane| lane.stream().standing());
        let mut has_open = false;
        for standing in standings {
            match standing {
                Standing::Open => has_open = true,
                Standing::Ending { leaves_unknown } | Standing::Lost { leaves_unknown, .. } => {
                    if leaves_unknown {
                        return false;
                    }
                }
            }
        }
        has_open
    }

    /// A batch failed because its stream was lost. Another stream may take the batch.
    ///
    /// # Errors
    /// If the stream was not lost, or the whole connection is lost with it.
    pub(super) fn lost(
        &self,
        lane: &Arc<Shared>,
        error: TransportError,
    ) -> Result<(), TransportError> {
        let Standing::Lost { error: reason, leaves_unknown } = lane.stream().standing() else {
            return Err(error);
        };
        if leaves_unknown {
            self.lose(&reason);
            return Err(error);
        }
        let again = now() + self.pause;
        let mut state = self.lock();
        if let Some(error) = &state.lost {
            return Err(error.clone());
        }
        let at = state.lanes.iter().position(|it| Arc::ptr_eq(it.shared(), lane));
        let removed = at.map(|at| state.lanes.remove(at));
        if removed.is_some() {
            state.absent.push(again);
        }
        let is_last = state.lanes.is_empty();
        drop(state);
        // Without the lock: this ends a thread.
        drop(removed);
        if is_last {
            self.lose(&reason);
            return Err(error);
        }
        Ok(())
    }

    /// Ends the connection.
    pub(super) fn lose(&self, error: &TransportError) {
        let lanes = {
            let mut state = self.lock();
            state.lost.get_or_insert_with(|| error.clone());
            std::mem::take(&mut state.lanes)
        };
        // Without the lock: this ends threads.
        drop(lanes);
    }

    pub(super) fn close(&self) {
        self.lose(&self.error("it was closed here"));
    }

    /// Has another stream move a part whose stream was lost.
    fn again(&self, mut part: Part, from: &Arc<Shared>, error: TransportError) {
        let mut lane = self.lost(from, error).and_then(|()| self.next());
        loop {
            match lane {
                Err(error) => return part.fail(error),
                Ok(next) => {
                    let group = Arc::clone(&part.group);
                    let Err((back, _)) = next.push_again(part) else {
                        // Its cancel may have looked before the part was there.
                        if group.is_cancelled() {
                            next.withdraw(&group);
                        }
                        return;
                    };
                    // That one was lost meanwhile.
                    part = back;
                    lane = self.next();
                }
            }
        }
    }

    /// Opens a lost stream again, in the background, if it is time.
    pub(super) fn open_again(self: &Arc<Self>) {
        let now = now();
        {
            let mut state = self.lock();
            let due = state.absent.iter().position(|since| *since <= now);
            let Some(due) = due.filter(|_| !state.is_opening && state.lost.is_none()) else {
                return;
            };
            state.absent.swap_remove(due);
            state.is_opening = true;
        }
        let of_thread = Arc::clone(self);
        let builder = Builder::new().name("transport-open".to_owned());
        let started = builder.spawn(move || {
            let opened = (of_thread.open)(Deadline::after(&SystemClock, OPEN_TIMEOUT));
            // Through a load balancer, another endpoint may answer.
            let ours = opened.ok().filter(|stream| stream.peer().id == of_thread.peer.id);
            of_thread.opened(ours.and_then(|stream| of_thread.lane(stream).ok()));
        });
        if started.is_err() {
            self.opened(None);
        }
    }

    fn opened(&self, lane: Option<Lane>) {
        let again = now() + self.pause;
        let mut state = self.lock();
        state.is_opening = false;
        let refused = match lane {
            Some(lane) if state.lost.is_none() => {
                state.lanes.push(lane);
                None
            }
            other => {
                state.absent.push(again);
                other
            }
        };
        drop(state);
        // Without the lock: this ends a thread.
        drop(refused);
    }
}

impl fmt::Debug for Streams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Streams").field("peer", &self.peer.id).finish_non_exhaustive()
    }
}
