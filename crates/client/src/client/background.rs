//! A client's background thread. It sends releases that no call carried along and reconnects to an
//! unavailable node with back-off. It sleeps while there is no work.

use std::sync::{Arc, PoisonError, Weak};
use std::time::Duration;

use cascade_runtime::{Deadline, SystemClock};
use cascade_wire::Call;

use super::{ClientInner, PROBE_TIMEOUT};
use crate::live_sessions;
use crate::session::{CallError, Session};
use crate::tasks::{BackgroundTasks, NodeStatus};

/// How long releases wait for a call that carries them along.
const RELEASE_DELAY: Duration = Duration::from_millis(1);
/// Pause before the first attempt to reconnect; doubles with each attempt.
const BACK_OFF_MIN: Duration = Duration::from_millis(20);
/// The longest pause between two attempts.
const BACK_OFF_MAX: Duration = Duration::from_secs(2);
/// How often a client of a pool in device memory looks whether the node has closed its connections.
/// The memory is given back only when all processes have unmapped it.
const HANG_UP_INTERVAL: Duration = Duration::from_millis(100);
/// Timeout of one attempt.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(1);

/// Starts the background thread of a client. It ends with the client.
pub(crate) fn start(client: &Arc<ClientInner>) -> std::io::Result<()> {
    let (weak, tasks) = (Arc::downgrade(client), Arc::clone(client.tasks()));
    let is_watching = client.identity.devices.is_some();
    std::thread::Builder::new()
        .name("cascade-client".to_owned())
        .stack_size(128 << 10)
        .spawn(move || run(&weak, &tasks, is_watching))
        .map(drop)
}

fn run(client: &Weak<ClientInner>, tasks: &BackgroundTasks, is_watching: bool) {
    let mut back_off = BACK_OFF_MIN;
    loop {
        let mut pending = tasks.lock();
        while !pending.has_work() {
            if !is_watching {
                pending = tasks.changed.wait(pending).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let waited = tasks.changed.wait_timeout(pending, HANG_UP_INTERVAL);
            pending = waited.unwrap_or_else(PoisonError::into_inner).0;
            if !pending.has_work() {
                drop(pending);
                let Some(client) = client.upgrade() else { return };
                client.look_for_hang_up();
                drop(client);
                pending = tasks.lock();
            }
        }
        if pending.is_stopped {
            return;
        }
        // The back-off doubles with each failure and starts again after a success.
        let pause = if pending.node == NodeStatus::Unavailable { back_off } else { RELEASE_DELAY };
        // A call may carry the releases along meanwhile, and a node that just became unavailable
        // needs time to restart.
        let waited =
            tasks.changed.wait_timeout_while(pending, pause, |pending| !pending.is_stopped);
        let mut pending = waited.unwrap_or_else(PoisonError::into_inner).0;
        if pending.is_stopped {
            return;
        }
        // Reset before sending: a release that is queued from here on schedules another round.
        pending.has_releases = false;
        // Reset before the attempt: a failure that another thread reports during it is kept.
        let node = std::mem::take(&mut pending.node);
        drop(pending);
        // Upgraded only for the work: while the thread sleeps, it does not keep the client alive.
        let Some(client) = client.upgrade() else { return };
        if node == NodeStatus::Unavailable {
            if client.reconnect(Deadline::after(&SystemClock, ATTEMPT_TIMEOUT)) {
                // Releases that piled up meanwhile are sent without waiting for a call.
                tasks.schedule_release();
                back_off = BACK_OFF_MIN;
            } else {
                tasks.mark_node_unavailable();
                back_off = (back_off * 2).min(BACK_OFF_MAX);
            }
            continue;
        }
        if node == NodeStatus::Suspect {
            client.probe_node(Deadline::after(&SystemClock, PROBE_TIMEOUT));
        }
        send(&client, tasks);
    }
}

/// Sends the pending messages to the current run of the node.
fn send(client: &ClientInner, tasks: &BackgroundTasks) {
    let Some(link) = client.link() else { return };
    match send_messages(&link.session, &link.welcome.tenant, tasks) {
        Ok(()) => {}
        // The next call carries the releases along, or the next round of this thread sends them.
        Err(CallError::NoFreeConnection) => tasks.schedule_release(),
        Err(CallError::Timeout) => {
            client.mark_unavailable("the node does not read its connection", &link, false);
        }
        Err(CallError::TooLong(reason) | CallError::Broken(reason)) => {
            client.mark_unavailable(&reason, &link, true);
        }
    }
}

/// Sends pending releases, and lets the node release the holds of its earlier runs.
fn send_messages(
    session: &Session,
    tenant: &str,
    tasks: &BackgroundTasks,
) -> Result<(), CallError> {
    let deadline = Deadline::after(&SystemClock, ATTEMPT_TIMEOUT);
    session.send_releases(deadline)?;
    let mut past = std::mem::take(&mut tasks.lock().past_epochs);
    // The holds are released only if no session of this process uses an earlier run any more. The
    // last such session adds its epoch again when it ends.
    let is_only_run = live_sessions::is_only_run(tenant, session.epoch);
    past.retain(|epoch| is_only_run && *epoch != session.epoch);
    if past.is_empty() {
        return Ok(());
    }
    let forget = past.iter().map(|epoch| Call::Forget { epoch: *epoch }).collect();
    let sent = session.send(forget, deadline);
    if sent.is_err() {
        // Another round sends them. Without them, the node would keep the holds until this process
        // ends.
        tasks.lock().past_epochs.append(&mut past);
    }
    sent
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    /// A failed send dropped them, so the node kept the holds of its earlier run until this process
    /// ended.
    #[test]
    fn earlier_runs_of_the_node_stay_queued_after_a_failed_send() {
        let tasks = Arc::new(BackgroundTasks::default());
        let (here, there) = UnixStream::pair().expect("descriptors are left");
        let session = Session::over(here, 2, &tasks);
        tasks.session_ended(1);
        drop(there);
        let sent = send_messages(&session, "of-this-test", &tasks);
        assert!(matches!(sent, Err(CallError::Broken(_))), "{sent:?}");
        assert_eq!(tasks.lock().past_epochs, [1]);
        let (here, _there) = UnixStream::pair().expect("descriptors are left");
        let next = Session::over(here, 3, &tasks);
        send_messages(&next, "of-this-test", &tasks).expect("the socket has room");
        assert!(tasks.lock().past_epochs.is_empty());
    }
}
