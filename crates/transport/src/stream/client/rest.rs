//! The rest of a batch whose caller has gone: its deadline passed while a frame was being sent. The
//! peer has a part of the frame, so the rest of it has to follow before anything else can.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use cascade_runtime::thread::Builder;

use super::{Expected, LEAVE_WAIT, Link, Progress, Sender, WaitingFrame};
use crate::TransportError;
use crate::stream::socket::Patience;
use crate::wire::{Header, Kind};

impl Link {
    /// Ends a batch without its last pieces and its notice.
    pub(super) fn end_batch(
        self: &Arc<Self>,
        sender: &mut Sender,
        kind: Kind,
        progress: &Arc<Progress>,
    ) {
        sender.frames += 1;
        sender.is_in_write = false;
        let number = sender.frames;
        let answer = if kind == Kind::Write { Kind::Done } else { Kind::Data };
        {
            let mut state = self.lock_state();
            if state.broken.is_some() {
                return;
            }
            progress.frames_left.fetch_add(1, Ordering::AcqRel);
            let (progress, expected) = (Arc::clone(progress), Expected::of_kind(answer));
            state.waiting.push_back(WaitingFrame { number, progress, expected });
        }
        sender.outgoing.add_to_rest(&Header { frame: number, ..Header::new(kind, 0) });
        self.leave(progress);
        self.send_rest_later(sender);
    }

    /// Uses the memory of a batch no more: what the peer has not sent yet is thrown away when it
    /// comes.
    pub(super) fn leave(&self, progress: &Arc<Progress>) {
        let is_ours = |it: &Arc<Progress>| Arc::ptr_eq(it, progress);
        // Under the lock, so that the thread that receives either sees it or is seen here.
        let mut state = self.lock_state();
        progress.is_cancelled.store(true, Ordering::Release);
        let mut left = state.leave_memory(progress);
        // A thread that receives into this memory looks at least each `TICK`, and stops or leaves
        // the rest of the answer to this one.
        while state.receiving.as_ref().is_some_and(is_ours) {
            let waited = self.changed.wait_timeout(state, LEAVE_WAIT);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            left.append(&mut state.leave_memory(progress));
        }
        drop(state);
        // Without the lock: the owner of a region may be dropped here, whose code is not ours.
        drop(left);
    }

    /// Sends what is left of earlier frames.
    pub(super) fn send_rest(
        &self,
        sender: &mut Sender,
        mut patience: Patience<'_>,
    ) -> Result<(), TransportError> {
        if sender.outgoing.rest_bytes() == 0 {
            return Ok(());
        }
        let deadline = patience.deadline();
        let mut receive = || self.receive_what_came(deadline);
        let sending: (_, &mut dyn FnMut() -> bool) = (&mut patience, &mut receive);
        match sender.outgoing.send_rest(&self.socket, sending) {
            Err(error @ TransportError::Deadline { .. }) => Err(error),
            sent => sent.map_err(|error| self.end(&error)),
        }
    }

    /// Has a thread send the rest, if no batch comes that does so: the peer waits for it, and the
    /// batches of other callers wait for the peer.
    pub(super) fn send_rest_later(self: &Arc<Self>, sender: &mut Sender) {
        if sender.has_rest_thread {
            return;
        }
        let link = Arc::clone(self);
        let builder = Builder::new().name("transport-rest".to_owned());
        match builder.spawn(move || link.finish_rest()) {
            Ok(_) => sender.has_rest_thread = true,
            Err(error) => {
                let reason = format!("a frame was cut, and no thread for its rest: {error}");
                self.end(&TransportError::lost(&self.peer.address, reason));
            }
        }
    }

    fn finish_rest(&self) {
        let mut sender = self.sender.lock().unwrap_or_else(PoisonError::into_inner);
        sender.has_rest_thread = false;
        let bytes = sender.outgoing.rest_bytes() as u64;
        let patience = Patience::of_frame(self.stall, bytes);
        let sent = self.send_rest(&mut sender, patience);
        if let Err(error @ TransportError::Deadline { .. }) = sent {
            let reason = format!("the rest of a frame was sent too slowly: {error}");
            self.end(&TransportError::lost(&self.peer.address, reason));
        }
    }
}
