//! A region of a process that comes and goes: peers read it while it is unregistered.

use std::sync::{MutexGuard, PoisonError};

use cascade_runtime::LeafMutex;
use cascade_runtime::simulated::Random;
use cascade_transport::{Access, Endpoint, Region, RegionId};

/// Bytes of such a region.
const PASSING_BYTES: usize = 32 << 10;
/// The stream of its bytes, the same in all worlds.
const PASSING_STREAM: u64 = 93;

/// The regions of one process that came so far. The last one may be registered.
#[derive(Debug, Default)]
pub(super) struct Passing(LeafMutex<Vec<State>>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct State {
    pub(super) id: RegionId,
    /// The call that unregisters it has begun.
    pub(super) is_going: bool,
    /// The call has returned.
    pub(super) is_gone: bool,
}

impl Passing {
    fn all(&self) -> MutexGuard<'_, Vec<State>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers another one.
    pub(super) fn register(&self, endpoint: &Endpoint) {
        let region = Region::private(PASSING_BYTES, Access::READ);
        let number = self.all().len();
        region.fill(0, &bytes_of(number)).expect("it is as long");
        let id = endpoint.register(region).expect("there is room for regions");
        self.all().push(State { id, is_going: false, is_gone: false });
    }

    /// The last one, and its bytes.
    pub(super) fn last(&self) -> Option<(State, Vec<u8>)> {
        let all = self.all();
        let last = all.last()?;
        Some((*last, bytes_of(all.len() - 1)))
    }

    /// Takes the last one to unregister it, unless another thread does.
    pub(super) fn begin_to_go(&self) -> Option<RegionId> {
        let mut all = self.all();
        let last = all.last_mut().filter(|state| !state.is_going)?;
        last.is_going = true;
        Some(last.id)
    }

    /// It was unregistered.
    pub(super) fn gone(&self, id: RegionId) {
        let mut all = self.all();
        all.iter_mut().filter(|state| state.id == id).for_each(|state| state.is_gone = true);
    }

    pub(super) fn state(&self, id: RegionId) -> Option<State> {
        self.all().iter().find(|state| state.id == id).copied()
    }
}

/// What the region with this number holds.
fn bytes_of(number: usize) -> Vec<u8> {
    let mut bytes = vec![0; PASSING_BYTES];
    Random::new(number as u64, PASSING_STREAM).fill(&mut bytes);
    bytes
}
