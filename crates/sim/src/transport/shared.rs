//! What all threads of a world of the transport share: its network, its notices, what was found.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use cascade_runtime::{Deadline, LeafMutex, now, sleep};
use cascade_transport::EndpointId;
use cascade_transport::simulated::Network;

use crate::finding::Findings;

use super::profile::Profile;

/// How often a thread looks whether the others are so far.
pub(super) const PHASE_WAIT: Duration = Duration::from_millis(50);

/// How far a world is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Phase {
    /// Clients make their operations, and are disturbed.
    Operations,
    /// Nothing disturbs any more: each client reaches each process.
    Calm,
    /// Connections are closed.
    Closing,
    /// The last checks were made.
    Over,
}

/// What the threads of a world share. It survives kills of processes.
pub(super) struct Shared {
    pub(super) profile: Profile,
    pub(super) network: Network,
    pub(super) seed: u64,
    pub(super) operations_max: u64,
    operations: AtomicU64,
    batches: AtomicU64,
    state: LeafMutex<State>,
}

/// Never held over a scheduling point, so that no kill leaves it locked.
pub(super) struct State {
    pub(super) findings: Findings,
    pub(super) counts: BTreeMap<String, u64>,
    pub(super) notices: BTreeMap<u64, PostedNotice>,
    pub(super) phase: Phase,
    /// The streams of each connection.
    streams: BTreeMap<u64, StreamNumbers>,
}

/// The numbers in the network of a connection's streams, the first one first.
pub(super) type StreamNumbers = Arc<LeafMutex<Vec<u64>>>;

/// A notice as its sender knows it.
#[derive(Debug, Clone)]
pub(super) struct PostedNotice {
    pub(super) from: EndpointId,
    pub(super) to: EndpointId,
    pub(super) bytes: Vec<u8>,
    /// The slot at the target that its batch writes.
    pub(super) slot: Option<usize>,
    pub(super) is_confirmed: bool,
    pub(super) is_refused: bool,
    pub(super) is_seen: bool,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("profile", &self.profile).finish_non_exhaustive()
    }
}

impl Shared {
    pub(super) fn new(profile: Profile, network: Network, seed: u64, operations_max: u64) -> Self {
        let state = State {
            findings: Findings::default(),
            counts: BTreeMap::new(),
            notices: BTreeMap::new(),
            phase: Phase::Operations,
            streams: BTreeMap::new(),
        };
        Self {
            profile,
            network,
            seed,
            operations_max,
            operations: AtomicU64::new(0),
            batches: AtomicU64::new(0),
            state: LeafMutex::new(state),
        }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn add(&self, what: impl fmt::Display) {
        self.state().findings.add(what);
    }

    pub(super) fn count(&self, what: &str) {
        *self.state().counts.entry(what.to_owned()).or_default() += 1;
    }

    pub(super) fn operations(&self) -> u64 {
        self.operations.load(Ordering::Relaxed)
    }

    /// Whether another operation is to be made.
    pub(super) fn next_operation(&self) -> bool {
        let is_over = self.operations() >= self.operations_max || self.state().findings.is_enough();
        if !is_over {
            self.operations.fetch_add(1, Ordering::Relaxed);
        }
        !is_over
    }

    pub(super) fn next_batch(&self) -> u64 {
        self.batches.fetch_add(1, Ordering::Relaxed)
    }

    /// Notes the streams of a connection. More are opened later.
    pub(super) fn add_streams(&self, connection: u64, numbers: StreamNumbers) {
        self.state().streams.insert(connection, numbers);
    }

    /// Whether a connection moves no more bytes: all of its streams have ended at the side that
    /// listened.
    pub(super) fn has_ended(&self, connection: u64) -> bool {
        let numbers = self.state().streams.get(&connection).map(Arc::clone);
        let numbers = numbers.map(|it| it.lock().unwrap_or_else(PoisonError::into_inner).clone());
        numbers.unwrap_or_default().into_iter().all(|number| self.network.has_ended(number))
    }

    pub(super) fn phase(&self) -> Phase {
        self.state().phase
    }

    pub(super) fn wait_for(&self, phase: Phase) {
        while self.phase() < phase {
            sleep(PHASE_WAIT);
        }
    }
}

/// The name of the host of a process.
pub(super) fn host(number: usize) -> String {
    format!("host {number}")
}

/// A deadline that is not meant to be reached.
pub(super) fn soon() -> Deadline {
    Deadline::at(now() + Duration::from_secs(3600))
}
