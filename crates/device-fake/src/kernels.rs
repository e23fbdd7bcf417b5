//! The kernels that this fake knows, in Rust.

use crate::device_memory::read_numbers;
use crate::state::{INVALID_VALUE, Launch, Place, Side, State, Transfer};

/// The kernel that copies a list of fragments: addresses of targets, addresses of sources, lengths.
pub(crate) const COPY: &str = "cascade_copy";

/// The difference between the address of host memory for kernels and that for the processor. On a
/// GPU both may be equal; here they differ, so that a test fails if one is used for the other.
const ALIAS: u64 = 1 << 56;

/// The address by which kernels access host memory.
pub(crate) fn device_address(host: usize) -> u64 {
    host as u64 | ALIAS
}

impl Launch {
    pub(crate) fn new(state: &State, lists: [u64; 3], count: u64) -> Result<Self, i32> {
        let count = usize::try_from(count).map_err(|_| INVALID_VALUE)?;
        let bytes = count.checked_mul(8).ok_or(INVALID_VALUE)?;
        let mut places = [Place { side: Side::Device, key: 0, start: 0 }; 3];
        for (place, address) in places.iter_mut().zip(lists) {
            *place = find(state, address, bytes)?;
        }
        Ok(Self { lists: places, count })
    }

    /// The memory of its arrays, as something that is used.
    pub(crate) fn uses(&self) -> Vec<Transfer> {
        let used = |place| Transfer { target: place, source: Err(0), bytes: self.count * 8 };
        self.lists.map(used).to_vec()
    }

    /// What it copies, by its arrays as they are now. Memory that is not there is an error.
    pub(crate) fn transfers(&self, state: &State) -> Result<Vec<Transfer>, i32> {
        let [targets, sources, lengths] = self.lists.map(|it| read_numbers(it.start, self.count));
        let mut transfers = Vec::with_capacity(self.count);
        for ((target, source), length) in targets.into_iter().zip(sources).zip(lengths) {
            let bytes = usize::try_from(length).map_err(|_| INVALID_VALUE)?;
            let target = find(state, target, bytes)?;
            let source = Ok(find(state, source, bytes)?);
            transfers.push(Transfer { target, source, bytes });
        }
        Ok(transfers)
    }
}

/// The memory at an address that a kernel uses.
fn find(state: &State, address: u64, bytes: usize) -> Result<Place, i32> {
    let is_host = address & ALIAS != 0;
    let expected = if is_host { Side::Host } else { Side::Device };
    let address = usize::try_from(address & !ALIAS).map_err(|_| INVALID_VALUE)?;
    let place = state.find(address, bytes)?;
    if place.side == expected { Ok(place) } else { Err(INVALID_VALUE) }
}
