//! A lane: one queue pair of a link, its credits and its count of completions.

use std::os::fd::OwnedFd;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use cascade_runtime::{Condvar, Deadline, Mutex, MutexGuard, SystemClock};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::abi::{SUCCESS, Work};
use super::chain::{Chain, Move};
use super::device::Device;
use super::error::{Status, VerbsError};
use super::flush::FLUSHES_MAX;
use super::queue_pair::{POLL_MAX, QueuePair};
use crate::Direction;

/// Looks at the completion queue before a thread waits for an event.
const LOOKS: usize = 64;
/// The longest wait for an event: another thread that closes the lane causes none.
const EVENT_WAIT: Duration = Duration::from_millis(10);

/// One queue pair of a link.
#[derive(Debug)]
pub(super) struct Lane {
    state: Mutex<LaneState>,
    /// Notified when requests complete, or the watching thread stops watching.
    changed: Condvar,
    /// Readable when a completion event waits.
    events: OwnedFd,
}

/// What a lane's lock protects.
#[derive(Debug)]
pub(super) struct LaneState {
    pub(super) queue: QueuePair,
    chain: Chain,
    /// Requests that were posted. The ID of a request is this count after it.
    posted: u64,
    /// Requests that have completed. They complete in order.
    completed: u64,
    /// Requests that were posted after the last one with a signal.
    unsignalled: usize,
    /// Requests that the queue holds.
    depth: usize,
    /// The first error. No request is posted after it.
    failure: Option<VerbsError>,
    /// A thread waits for an event.
    is_watched: bool,
}

impl Lane {
    pub(super) fn create(device: &Arc<Device>) -> Result<Self, VerbsError> {
        let settings = &device.settings;
        let least = (4 * settings.chain).max(settings.chain + FLUSHES_MAX);
        let depth = settings.depth.min(device.requests_max).max(least);
        let queue = QueuePair::create(device, depth)?;
        let events = queue.descriptor()?;
        let state = LaneState {
            queue,
            chain: Chain::new(settings.chain + FLUSHES_MAX),
            posted: 0,
            completed: 0,
            unsignalled: 0,
            depth,
            failure: None,
            is_watched: false,
        };
        Ok(Self { state: Mutex::new(state), changed: Condvar::new(), events })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, LaneState> {
        // Each change of the state is whole before anything can panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `is_reached`. Completions are taken by the waiting threads; one of them at a
    /// time waits for the device's event, the others for that one.
    pub(super) fn wait(
        &self,
        deadline: Deadline,
        is_reached: impl Fn(&LaneState) -> bool,
    ) -> Result<MutexGuard<'_, LaneState>, VerbsError> {
        let mut looks = 0;
        loop {
            let mut state = self.lock();
            self.collect(&mut state);
            // A batch that has completed has succeeded, whatever failed after it.
            if is_reached(&state) {
                return Ok(state);
            }
            if let Some(failure) = &state.failure {
                return Err(failure.clone());
            }
            let left = deadline.remaining(&SystemClock);
            if left.is_zero() {
                return Err(VerbsError::Deadline { what: "an RDMA batch" });
            }
            if looks < LOOKS {
                looks += 1;
                drop(state);
                std::hint::spin_loop();
            } else if state.is_watched {
                let waited = self.changed.wait_timeout(state, left);
                drop(waited.unwrap_or_else(PoisonError::into_inner));
            } else {
                self.watch(state, left.min(EVENT_WAIT));
            }
        }
    }

    /// Waits for an event of the completion queue, without the lock.
    fn watch(&self, mut state: MutexGuard<'_, LaneState>, at_most: Duration) {
        if let Err(error) = state.queue.arm() {
            state.fail(error);
        }
        // A completion before the queue was armed causes no event.
        let before = (state.completed, state.failure.is_some());
        self.collect(&mut state);
        if before != (state.completed, state.failure.is_some()) || before.1 {
            return;
        }
        state.is_watched = true;
        drop(state);
        let mut waiting = [PollFd::new(&self.events, PollFlags::IN)];
        let time = Timespec::try_from(at_most).unwrap_or_default();
        // An interrupted wait is begun again by the caller.
        let _is_readable = poll(&mut waiting, Some(&time)).is_ok();
        let mut state = self.lock();
        state.queue.take_events();
        state.is_watched = false;
        drop(state);
        self.changed.notify_all();
    }

    /// Counts what has completed.
    fn collect(&self, state: &mut LaneState) {
        if state.collect() {
            self.changed.notify_all();
        }
    }

    /// Ends all requests: when this returns, the device does not access their memory.
    pub(super) fn close(&self, reason: &VerbsError) {
        let mut state = self.lock();
        state.collect();
        state.fail(reason.clone());
        state.queue.destroy();
        drop(state);
        self.changed.notify_all();
    }
}

impl LaneState {
    /// Whether `count` more requests fit.
    pub(super) fn has_room(&self, count: usize) -> bool {
        self.failure.is_none() && (self.posted - self.completed) + count as u64 <= self.depth as u64
    }

    /// Whether the request with this ID has completed.
    pub(super) fn has_completed(&self, id: u64) -> bool {
        self.completed >= id
    }

    /// Posts a chain, which must fit, with these reads after it. Returns the ID of its last
    /// request. If `is_last`, it has a completion.
    pub(super) fn post(
        &mut self,
        direction: Direction,
        moves: impl Iterator<Item = Move>,
        flushes: impl Iterator<Item = Move>,
        is_last: bool,
    ) -> Result<u64, VerbsError> {
        self.chain.clear();
        for item in moves {
            self.chain.push(self.posted + self.chain.count() as u64 + 1, direction, &item);
        }
        for item in flushes {
            let id = self.posted + self.chain.count() as u64 + 1;
            self.chain.push(id, Direction::Read, &item);
        }
        let count = self.chain.count();
        // Half of the queue is always signalled, so that room comes back while another half is
        // posted.
        let is_signalled = is_last || self.unsignalled + count > self.depth / 2;
        self.posted += count as u64;
        self.unsignalled = if is_signalled { 0 } else { self.unsignalled + count };
        match self.queue.post(&mut self.chain, is_signalled) {
            Ok(()) => Ok(self.posted),
            // A part may have been posted, without a signal.
            Err(error) => {
                self.fail(error.clone());
                Err(error)
            }
        }
    }

    /// Takes completions and checks the status of each; returns whether anything changed.
    fn collect(&mut self) -> bool {
        let mut works = [Work::default(); POLL_MAX];
        let mut has_changed = false;
        loop {
            let count = match self.queue.poll(&mut works) {
                Ok(count) => count,
                Err(error) => {
                    self.fail(error);
                    return true;
                }
            };
            for work in &works[..count] {
                has_changed = true;
                if work.status == SUCCESS {
                    self.completed = self.completed.max(work.id);
                } else {
                    let (status, vendor) = (Status(work.status), work.vendor_error);
                    self.fail(VerbsError::Request { status, vendor });
                }
            }
            if count < POLL_MAX {
                return has_changed;
            }
        }
    }

    /// Keeps the first error.
    fn fail(&mut self, error: VerbsError) {
        self.failure.get_or_insert(error);
    }
}
