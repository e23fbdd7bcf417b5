//! Heartbeats of a connection: a peer that answers nothing for a time is disconnected, also while
//! no batch waits for it.

use std::sync::{Arc, PoisonError, Weak};
use std::time::Duration;

use cascade_runtime::thread::Builder;
use cascade_runtime::{Condvar, Deadline, Mutex, SystemClock};

use super::{Expected, Link, Progress, Until};
use crate::TransportError;
use crate::limits::Heartbeat;
use crate::wire::{Header, Kind};

/// The pause between two questions, which ends with the connection.
#[derive(Debug, Default)]
pub(super) struct Pause {
    has_ended: Mutex<bool>,
    ended: Condvar,
}

impl Pause {
    pub(super) fn end(&self) {
        *self.has_ended.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.ended.notify_all();
    }

    /// Waits for this time. Returns whether the connection has ended.
    fn wait(&self, time: Duration) -> bool {
        let has_ended = self.has_ended.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.ended.wait_timeout_while(has_ended, time, |has_ended| !*has_ended);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

/// Starts the thread that asks the peer of a connection. It ends with the connection.
pub(super) fn start(link: &Arc<Link>, heartbeat: Heartbeat) -> Result<(), TransportError> {
    let (of_thread, pause) = (Arc::downgrade(link), Arc::clone(&link.pause));
    let builder = Builder::new().name("transport-beat".to_owned());
    let started = builder.spawn(move || beat(&of_thread, &pause, heartbeat));
    let failed = |error| TransportError::Unavailable(format!("no thread for heartbeats: {error}"));
    started.map(drop).map_err(failed)
}

fn beat(link: &Weak<Link>, pause: &Pause, heartbeat: Heartbeat) {
    while !pause.wait(heartbeat.interval) {
        let Some(link) = link.upgrade() else {
            return;
        };
        if !link.is_answered(heartbeat) {
            return;
        }
    }
}

impl Link {
    /// Asks the peer for an answer. Ends the connection if nothing is answered within the limit.
    fn is_answered(self: &Arc<Self>, heartbeat: Heartbeat) -> bool {
        let (received, sent) = (self.socket.received(), self.socket.sent());
        let mut has_asked = false;
        let deadline = Deadline::after(&SystemClock, heartbeat.limit);
        let asked = self.ask(&mut has_asked, deadline);
        // A long frame or many batches may be before the question, or in the way of it.
        let is_moving =
            self.socket.received() > received || (!has_asked && self.socket.sent() > sent);
        let is_busy = self.lock_state().broken.is_none() && is_moving;
        match asked {
            Ok(()) => true,
            Err(TransportError::Deadline { .. }) if is_busy => true,
            Err(TransportError::Deadline { .. }) => {
                let seconds = heartbeat.limit.as_secs_f32();
                let reason = format!("it answered nothing for {seconds} s");
                self.end(&TransportError::lost(&self.peer.address, reason));
                false
            }
            Err(error) => {
                self.end(&error);
                false
            }
        }
    }

    /// Reads nothing from the peer, which answers in the order of the frames. `has_asked` is set
    /// before anything is sent.
    fn ask(
        self: &Arc<Self>,
        has_asked: &mut bool,
        deadline: Deadline,
    ) -> Result<(), TransportError> {
        let progress = Arc::new(Progress::default());
        {
            // Another thread may be sending, by a deadline of its own.
            let until = Until::deadline(deadline);
            let mut sender = self.lock_sender(until)?;
            self.wait_for_room(until)?;
            *has_asked = true;
            let header = Header::new(Kind::Read, 0);
            let expects = Expected::of_kind(Kind::Data);
            self.send_frame(&mut sender, header, (&[], &[]), Some(expects), (&progress, until))?;
        }
        self.drive(deadline, |_| progress.has_ended())?;
        progress.result()
    }
}
