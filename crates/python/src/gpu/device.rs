//! A GPU that this process uses: its context, and the copiers of each pool.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use cascade_device::{
    Context, Copier, CudaError, CudaImporter, CudaMemory, DeviceFacts, DeviceUuid, Driver,
    DriverReport, RegisteredPool, RegistrationReport, Slabs,
};
use cascade_memory::{
    BackingMemory, DeviceError, DeviceId, DeviceImporter, DeviceMemory, HostSlab, HostSlabMut,
    Slab, SlabMut,
};
use cascade_runtime::SystemClock;

/// The longest that work of ours on a GPU may take before the GPU counts as lost.
pub(super) const WAIT_MAX: Duration = Duration::from_secs(30);
/// Pools are registered in pieces of this length: a tenth of a second each, by others' figures.
const PIECE_BYTES: usize = 1 << 30;

/// The GPUs in use, by index. A pool can be registered once in a process, so all users of a GPU
/// share its copiers.
static IN_USE: Mutex<BTreeMap<usize, Weak<Device>>> = Mutex::new(BTreeMap::new());

/// A GPU that this process uses.
#[derive(Debug)]
pub(super) struct Device {
    pub(super) context: Arc<Context>,
    pub(super) facts: Option<DeviceFacts>,
    /// Of the last pool in host memory that was used.
    copies: Mutex<Option<PoolCopies>>,
    /// The pools on GPUs that are mapped for this one.
    device_pools: Mutex<Vec<DevicePool>>,
}

/// The copiers of a pool in host memory.
#[derive(Debug)]
struct PoolCopies {
    backing: BackingMemory,
    registered: Arc<RegisteredPool>,
    copiers: Arc<Copiers>,
}

/// The copiers of a pool that a node has in the memory of a GPU.
#[derive(Debug)]
struct DevicePool {
    memory: Weak<CudaMemory>,
    copiers: Arc<Copiers>,
}

/// The copiers of a pool: one for each direction, since GPUs copy both ways at once.
#[derive(Debug)]
pub(super) struct Copiers {
    pub(super) loads: Copier,
    pub(super) saves: Copier,
}

/// Maps pools of nodes for a GPU.
#[derive(Debug)]
pub(super) struct PoolImporter(pub(super) Arc<Device>);

impl DeviceImporter for PoolImporter {
    fn import(
        &self,
        descriptor: OwnedFd,
        bytes: usize,
        device: DeviceId,
    ) -> Result<Arc<dyn DeviceMemory>, DeviceError> {
        let context = &self.0.context;
        let opened = || {
            let uuid = DeviceUuid::from_bytes(device);
            let memory = CudaImporter::new(context).open(descriptor, bytes, uuid)?;
            let copier = || Copier::for_device_pool(context, &memory);
            let copiers = Arc::new(Copiers { loads: copier()?, saves: copier()? });
            let pool = DevicePool { memory: Arc::downgrade(&memory), copiers };
            self.0.lock_device_pools().push(pool);
            Ok(memory)
        };
        opened()
            .map(|memory| memory as Arc<dyn DeviceMemory>)
            .map_err(|error: CudaError| DeviceError::Import { bytes, source: Arc::new(error) })
    }
}

impl Device {
    pub(super) fn open(index: usize) -> Result<Arc<Self>, CudaError> {
        let mut in_use = IN_USE.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(device) = in_use.get(&index).and_then(Weak::upgrade) {
            return Ok(device);
        }
        let driver = Driver::load()?;
        let context = Context::retain(&driver, index, Arc::new(SystemClock), WAIT_MAX)?;
        let facts = DriverReport::of(&driver)?.devices.into_iter().nth(index);
        let (copies, device_pools) = (Mutex::default(), Mutex::default());
        let device = Arc::new(Self { context, facts, copies, device_pools });
        in_use.insert(index, Arc::downgrade(&device));
        Ok(device)
    }

    /// The copiers of a pool in host memory. Those of another pool end with their last copy.
    fn copiers(&self, backing: &BackingMemory) -> Result<Arc<Copiers>, CudaError> {
        let mut current = self.lock();
        if let Some(copies) = current.as_ref().filter(|copies| copies.backing.is_same(backing)) {
            return Ok(Arc::clone(&copies.copiers));
        }
        let memory = Arc::new(backing.clone());
        let registered = RegisteredPool::begin(&self.context, memory, PIECE_BYTES)?;
        let copier = || Copier::new(&self.context, Arc::clone(&registered));
        let copiers = Arc::new(Copiers { loads: copier()?, saves: copier()? });
        let backing = backing.clone();
        *current = Some(PoolCopies { backing, registered, copiers: Arc::clone(&copiers) });
        Ok(copiers)
    }

    /// The copiers of the pool on a GPU that has a slab at this address. The slab keeps the pool.
    fn device_copiers(&self, address: u64) -> Result<Arc<Copiers>, CudaError> {
        let mut pools = self.lock_device_pools();
        pools.retain(|pool| pool.memory.strong_count() > 0);
        let has_it = |pool: &&DevicePool| {
            let memory = pool.memory.upgrade();
            memory.is_some_and(|it| address.wrapping_sub(it.base()) < it.bytes() as u64)
        };
        let found = pools.iter().find(has_it).map(|pool| Arc::clone(&pool.copiers));
        found.ok_or(CudaError::OtherPool)
    }

    fn lock_device_pools(&self) -> MutexGuard<'_, Vec<DevicePool>> {
        self.device_pools.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, Option<PoolCopies>> {
        self.copies.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn registration(&self) -> Option<RegistrationReport> {
        self.lock().as_ref().map(|copies| copies.registered.report())
    }
}

impl Device {
    /// The copiers for slabs of one pool, and the slabs by where it is.
    pub(super) fn slabs_to_load(
        &self,
        slabs: Vec<Slab>,
    ) -> Result<(Arc<Copiers>, Slabs), CudaError> {
        if let Some(address) = slabs.first().and_then(Slab::device_address) {
            return Ok((self.device_copiers(address)?, Slabs::FromDevicePool(slabs)));
        }
        let slabs =
            slabs.into_iter().map(|slab| slab.into_host().map_err(|_| CudaError::OtherPool));
        let slabs: Vec<HostSlab> = slabs.collect::<Result<_, _>>()?;
        let first = slabs.first().ok_or(CudaError::OtherPool)?;
        Ok((self.copiers(&first.backing())?, Slabs::ToDevice(slabs)))
    }

    /// The same for slabs that are written.
    pub(super) fn slabs_to_save(
        &self,
        slabs: Vec<SlabMut>,
    ) -> Result<(Arc<Copiers>, Slabs), CudaError> {
        if let Some(address) = slabs.first().and_then(SlabMut::device_address) {
            return Ok((self.device_copiers(address)?, Slabs::ToDevicePool(slabs)));
        }
        let slabs =
            slabs.into_iter().map(|slab| slab.into_host().map_err(|_| CudaError::OtherPool));
        let slabs: Vec<HostSlabMut> = slabs.collect::<Result<_, _>>()?;
        let first = slabs.first().ok_or(CudaError::OtherPool)?;
        Ok((self.copiers(&first.backing())?, Slabs::ToHost(slabs)))
    }
}
