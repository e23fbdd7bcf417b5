//! Work for a client's background thread.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Work for the background thread. Sessions and the client add it from any thread.
#[derive(Debug, Default)]
pub(crate) struct BackgroundTasks {
    pending: Mutex<PendingTasks>,
    pub(crate) changed: Condvar,
}

/// What the client knows about the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum NodeStatus {
    /// It answers.
    #[default]
    Reachable,
    /// A call with a short timeout was not answered: a probe decides.
    Suspect,
    /// The client has to reconnect.
    Unavailable,
}

#[derive(Debug, Default)]
pub(crate) struct PendingTasks {
    pub(crate) has_releases: bool,
    pub(crate) node: NodeStatus,
    pub(crate) is_stopped: bool,
    /// Runs of the node with which a session has ended.
    pub(crate) past_epochs: Vec<u64>,
}

impl PendingTasks {
    pub(crate) fn has_work(&self) -> bool {
        let has_messages = self.has_releases || !self.past_epochs.is_empty();
        has_messages || self.node != NodeStatus::Reachable || self.is_stopped
    }
}

impl BackgroundTasks {
    pub(crate) fn lock(&self) -> MutexGuard<'_, PendingTasks> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn update(&self, change: impl FnOnce(&mut PendingTasks)) {
        change(&mut self.lock());
        self.changed.notify_one();
    }

    /// Holds wait to be released.
    pub(crate) fn schedule_release(&self) {
        let mut pending = self.lock();
        // Set under the lock, so the thread sees it before it waits: the wake-up cannot get lost.
        let was_scheduled = std::mem::replace(&mut pending.has_releases, true);
        drop(pending);
        // Waking the thread for every call would cost as much as the call itself.
        if !was_scheduled {
            self.changed.notify_one();
        }
    }

    /// A session with this run of the node has released everything and ended.
    pub(crate) fn session_ended(&self, epoch: u64) {
        self.update(|pending| pending.past_epochs.push(epoch));
    }

    /// The client has to reconnect.
    pub(crate) fn mark_node_unavailable(&self) {
        self.update(|pending| pending.node = NodeStatus::Unavailable);
    }

    /// A call with a short timeout was not answered.
    pub(crate) fn mark_node_suspect(&self) {
        self.update(|pending| {
            // `Unavailable` is certain; a suspicion must not replace it by a probe.
            if pending.node == NodeStatus::Reachable {
                pending.node = NodeStatus::Suspect;
            }
        });
    }

    /// The client is closed.
    pub(crate) fn stop(&self) {
        self.update(|pending| pending.is_stopped = true);
    }
}
