//! The processes of a world of the transport.

use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use cascade_runtime::{LeafMutex, now, sleep};
use cascade_transport::EndpointId;

use super::process::Process;
use super::shared::{PHASE_WAIT, Shared};

/// All processes that ever were. The last one of each number is the one that lives.
#[derive(Debug)]
pub(super) struct Living {
    pub(super) shared: Arc<Shared>,
    processes: LeafMutex<Vec<Arc<Process>>>,
}

impl Living {
    pub(super) fn new(shared: &Arc<Shared>) -> Arc<Self> {
        let processes = LeafMutex::new(vec![]);
        Arc::new(Self { shared: Arc::clone(shared), processes })
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Arc<Process>>> {
        self.processes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn add(&self, process: &Arc<Process>) {
        self.lock().push(Arc::clone(process));
    }

    /// The process with this endpoint, also one that was killed.
    pub(super) fn of_endpoint(&self, id: EndpointId) -> Option<Arc<Process>> {
        self.lock().iter().find(|process| process.endpoint.id() == id).cloned()
    }

    /// The last process of each number.
    pub(super) fn all(&self) -> Vec<Arc<Process>> {
        let processes = self.lock();
        let last = |number| processes.iter().rfind(|process| process.number == number);
        (0..self.shared.profile.processes).filter_map(|number| last(number).cloned()).collect()
    }

    /// Waits until each process has listened once. Before, a connect to it may be refused.
    pub(super) fn wait_for_start(&self) {
        while self.all().len() < self.shared.profile.processes {
            sleep(PHASE_WAIT);
        }
    }

    /// Waits until a condition holds for all of them. False if it does not in time.
    pub(super) fn wait_for_all(&self, time: Duration, is_so: impl Fn(&Process) -> bool) -> bool {
        let until = now() + time;
        while !self.all().iter().all(|process| is_so(process)) {
            if now() > until {
                return false;
            }
            sleep(PHASE_WAIT);
        }
        true
    }
}
