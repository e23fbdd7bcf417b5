//! An endpoint's use of a device: its regions that are registered with it, and the queue pairs that
//! it makes for peers.

use std::sync::{Arc, PoisonError};

use cascade_runtime::{Deadline, Mutex, RwLock};

use super::address::LinkAddress;
use super::chain::Move;
use super::device::Device;
use super::error::VerbsError;
use super::link::{Link, OpenLink, Posted};
use super::memory::{RegisteredMemory, RemoteMemory, SCRATCH_BYTES};
use crate::Direction;
use crate::piece::RegionId;
use crate::region::{Access, Region};
use crate::regions::Snapshot;
use crate::wire::HANDSHAKE_BYTES_MAX;

/// Bytes of a region's ID before its description.
const ID_BYTES: usize = 4;
/// Bytes of the length before an address.
const LENGTH_BYTES: usize = 2;

/// Registered regions, by ID. A batch holds a table while it runs.
pub(super) type Table<T> = Arc<Vec<Option<T>>>;

/// An endpoint's use of a device.
#[derive(Debug)]
pub(crate) struct Rdma {
    pub(super) device: Arc<Device>,
    registered: RwLock<Table<Arc<RegisteredMemory>>>,
    /// Made when a batch first reads into memory of a GPU.
    loopback: Mutex<Option<Arc<Loopback>>>,
}

/// A queue pair that is connected to itself. A write from memory of a GPU makes the device read
/// that memory, which comes after all that the device wrote there before.
#[derive(Debug)]
pub(super) struct Loopback {
    pub(super) link: Link,
    scratch: RegisteredMemory,
}

impl Loopback {
    fn new(device: &Arc<Device>) -> Result<Self, VerbsError> {
        let scratch = RegisteredMemory::scratch(device, Access::WRITE)?;
        let open = OpenLink::with_lanes(device, 1)?;
        let own = open.address();
        Ok(Self { link: open.connect(&own)?, scratch })
    }

    /// Starts to read the memory of these GPUs, one place of each.
    pub(super) fn post(
        &self,
        places: &[LocalPlace],
        deadline: Deadline,
    ) -> Result<Posted, VerbsError> {
        let scratch = self.scratch.remote();
        let moves: Result<Vec<_>, _> = places
            .iter()
            .map(|(memory, at)| {
                let bytes = u32::try_from(memory.bytes().min(SCRATCH_BYTES)).unwrap_or(1);
                let at = (*at).min(memory.bytes() - u64::from(bytes));
                Move::new(Direction::Write, (memory, at), (&scratch, 0), bytes)
            })
            .collect();
        self.link.post(Direction::Write, moves?.into_iter(), &[], deadline)
    }
}

/// Memory of this process, and an offset in it.
pub(super) type LocalPlace = (Arc<RegisteredMemory>, u64);

impl Rdma {
    pub(crate) fn new(device: Arc<Device>) -> Self {
        Self { device, registered: RwLock::default(), loopback: Mutex::default() }
    }

    /// The queue pair that is connected to itself; a new one if that has failed.
    pub(super) fn loopback(&self) -> Result<Arc<Loopback>, VerbsError> {
        let mut current = self.loopback.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(loopback) = current.as_ref().filter(|it| it.link.is_open()) {
            return Ok(Arc::clone(loopback));
        }
        let loopback = Arc::new(Loopback::new(&self.device)?);
        *current = Some(Arc::clone(&loopback));
        Ok(loopback)
    }

    pub(super) fn table(&self) -> Table<Arc<RegisteredMemory>> {
        Arc::clone(&self.registered.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Registers a region with the device, unless it is.
    pub(crate) fn register(
        &self,
        id: RegionId,
        region: Arc<Region>,
    ) -> Result<Arc<RegisteredMemory>, VerbsError> {
        let mut current = self.registered.write().unwrap_or_else(PoisonError::into_inner);
        let index = id.0 as usize;
        if let Some(Some(memory)) = current.get(index) {
            return Ok(Arc::clone(memory));
        }
        let memory = Arc::new(RegisteredMemory::of_region_of_endpoint(&self.device, region)?);
        let mut all = (**current).clone();
        if all.len() <= index {
            all.resize(index + 1, None);
        }
        all[index] = Some(Arc::clone(&memory));
        *current = Arc::new(all);
        Ok(memory)
    }

    /// Registers all regions that are not registered yet.
    pub(super) fn register_all(&self, regions: &Snapshot) -> Result<(), VerbsError> {
        for (id, _) in regions.iter() {
            if let Ok(region) = regions.shared(id) {
                self.register(id, region)?;
            }
        }
        Ok(())
    }

    /// Ends the registration of a region. Peers that use it then lose their connections.
    pub(crate) fn forget(&self, id: RegionId) {
        let mut current = self.registered.write().unwrap_or_else(PoisonError::into_inner);
        let index = id.0 as usize;
        if current.get(index).is_some_and(Option::is_some) {
            let mut all = (**current).clone();
            all[index] = None;
            *current = Arc::new(all);
        }
    }

    /// Makes queue pairs that are connected to those of a peer. Returns them and the answer.
    pub(crate) fn serve(
        &self,
        peer: &[u8],
        regions: &Snapshot,
    ) -> Result<(Link, Vec<u8>), VerbsError> {
        let peer = LinkAddress::from_bytes(peer)?;
        let open = OpenLink::with_lanes(&self.device, peer.lanes.len())?;
        let address = open.address().to_bytes();
        let link = open.connect(&peer)?;
        let mut answer = Vec::new();
        // At most 8 queue pairs.
        answer.extend(u16::try_from(address.len()).unwrap_or(u16::MAX).to_le_bytes());
        answer.extend(address);
        for (id, region) in regions.iter() {
            let fits = answer.len() + ID_BYTES + RemoteMemory::BYTES <= HANDSHAKE_BYTES_MAX;
            if id.is_first() && fits && (region.access().read || region.access().write) {
                let Ok(region) = regions.shared(id) else { continue };
                let memory = self.register(id, region)?;
                answer.extend(id.0.to_le_bytes());
                answer.extend(memory.remote().to_bytes());
            }
        }
        Ok((link, answer))
    }
}

/// The address and the regions in the answer of [`Rdma::serve`].
pub(super) fn parse_answer(
    answer: &[u8],
) -> Result<(LinkAddress, Vec<Option<RemoteMemory>>), VerbsError> {
    let invalid = |reason| VerbsError::Invalid { what: "answer with queue pairs", reason };
    let short = || invalid("it is too short");
    let (length, rest) = answer.split_first_chunk::<LENGTH_BYTES>().ok_or_else(short)?;
    let length = usize::from(u16::from_le_bytes(*length));
    let (address, rest) = rest.split_at_checked(length).ok_or_else(short)?;
    let address = LinkAddress::from_bytes(address)?;
    let mut regions = Vec::new();
    for entry in rest.chunks(ID_BYTES + RemoteMemory::BYTES) {
        let (id, description) = entry.split_first_chunk::<ID_BYTES>().ok_or_else(short)?;
        let index = u32::from_le_bytes(*id) as usize;
        if index >= crate::limits::REGIONS_MAX {
            return Err(invalid("the ID of a region is beyond the limit"));
        }
        if regions.len() <= index {
            regions.resize(index + 1, None);
        }
        regions[index] = Some(RemoteMemory::from_bytes(description)?);
    }
    Ok((address, regions))
}

#[cfg(test)]
mod tests {
    use super::super::fake;
    use super::super::settings::VerbsSettings;
    use super::*;
    use crate::regions::Regions;

    #[test]
    fn the_answer_names_the_regions_that_peers_may_use() {
        let regions = Regions::default();
        let accesses = [Access::READ, Access::LOCAL, Access::BOTH];
        let ids =
            accesses.map(|access| regions.register(Region::shared(4096, access).unwrap()).unwrap());
        let rdma = Rdma::new(fake::device(&VerbsSettings::default()));
        let settings = VerbsSettings { queue_pairs: 2, ..VerbsSettings::default() };
        let client = OpenLink::open(&fake::device(&settings)).unwrap();
        let asked = client.address().to_bytes();
        let (_link, answer) = rdma.serve(&asked, &regions.snapshot()).unwrap();
        let (address, offered) = parse_answer(&answer).unwrap();
        assert_eq!(address.lanes.len(), 2, "as many queue pairs as the client has");
        let named: Vec<_> = offered.iter().map(|it| it.as_ref().map(RemoteMemory::bytes)).collect();
        assert_eq!(named, [Some(4096), None, Some(4096)]);
        for cut in 0..answer.len() {
            let whole = (answer.len() - cut) % (ID_BYTES + RemoteMemory::BYTES) == 0;
            assert_eq!(parse_answer(&answer[..cut]).is_ok(), whole && cut > 40, "{cut} bytes");
        }
        // A registration holds its region until it is forgotten.
        let weak = Arc::downgrade(&regions.snapshot().shared(ids[0]).unwrap());
        let soon = cascade_runtime::Deadline::at(cascade_runtime::now());
        assert!(regions.unregister(ids[0], soon, || {}).is_err(), "the device holds it");
        rdma.forget(ids[0]);
        assert_eq!(weak.strong_count(), 0);
    }
}
