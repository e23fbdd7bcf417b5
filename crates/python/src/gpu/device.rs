//! A GPU that this process uses: its context, and the copiers of each pool.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use cascade_device::{
    Context, Copier, Costs, CudaError, CudaImporter, CudaMemory, DeviceFacts, DeviceUuid, Driver,
    DriverReport, RegisteredPool, RegistrationReport, Slabs, Way,
};
use cascade_memory::{
    BackingMemory, DeviceError, DeviceId, DeviceImporter, DeviceMemory, HostSlab, HostSlabMut,
    Slab, SlabMut,
};
use cascade_runtime::SystemClock;
use pyo3::PyResult;
use pyo3::exceptions::PyValueError;

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
    /// Of the last pool in host memory that was used, by ways.
    copies: Mutex<Vec<PoolCopies>>,
    /// The pools on GPUs that are mapped for this one.
    pools_on_gpus: Mutex<Vec<DevicePool>>,
    /// What copies cost, once it was measured; none on a stand-in for tests.
    costs: OnceLock<Option<Costs>>,
}

/// Which ways copies take between a GPU and a pool in host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ways {
    /// The fastest ones by a table that is measured with the first copy.
    Measured,
    /// One way, where it is possible.
    Only(Way),
}

impl Ways {
    const NAMES: [(&'static str, Self); 4] = [
        ("direct", Self::Only(Way::Direct)),
        ("measured", Self::Measured),
        ("staged", Self::Only(Way::Staged)),
        ("mapped", Self::Only(Way::Mapped)),
    ];

    pub(super) fn of(name: &str) -> PyResult<Self> {
        let known = Self::NAMES.into_iter().find(|(known, _)| *known == name);
        known.map(|(_, ways)| ways).ok_or_else(|| {
            let names = Self::NAMES.map(|(name, _)| name).join(", ");
            PyValueError::new_err(format!("ways must be one of {names}, not {name:?}"))
        })
    }
}

/// The copiers of a pool in host memory.
#[derive(Debug)]
struct PoolCopies {
    backing: BackingMemory,
    ways: Ways,
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
            self.0.lock_pools_on_gpus().push(pool);
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
        let (copies, pools_on_gpus) = (Mutex::default(), Mutex::default());
        let costs = OnceLock::new();
        let device = Arc::new(Self { context, facts, copies, pools_on_gpus, costs });
        in_use.insert(index, Arc::downgrade(&device));
        Ok(device)
    }

    /// The copiers of a pool in host memory. Those of another pool end with their last copy.
    fn copiers(&self, backing: &BackingMemory, ways: Ways) -> Result<Arc<Copiers>, CudaError> {
        let mut current = self.lock();
        let is_same = |copies: &&PoolCopies| copies.backing.is_same(backing);
        let of_pool = current.iter().find(is_same);
        if let Some(copies) = current.iter().filter(is_same).find(|copies| copies.ways == ways) {
            return Ok(Arc::clone(&copies.copiers));
        }
        let registered = if let Some(copies) = of_pool {
            Arc::clone(&copies.registered)
        } else {
            let memory = Arc::new(backing.clone());
            RegisteredPool::begin(&self.context, memory, PIECE_BYTES)?
        };
        let (loads, saves) = (self.copier(&registered, ways)?, self.copier(&registered, ways)?);
        let copiers = Arc::new(Copiers { loads, saves });
        current.retain(|copies| copies.backing.is_same(backing));
        let backing = backing.clone();
        current.push(PoolCopies { backing, ways, registered, copiers: Arc::clone(&copiers) });
        Ok(copiers)
    }

    fn copier(&self, pool: &Arc<RegisteredPool>, ways: Ways) -> Result<Copier, CudaError> {
        let pool = Arc::clone(pool);
        let measured = match ways {
            Ways::Only(way) => return Copier::with_way(&self.context, pool, way, None),
            Ways::Measured => self.costs.get(),
        };
        let costs = if let Some(costs) = measured {
            costs
        } else {
            let costs = Costs::measure(&self.context)?;
            self.costs.get_or_init(|| costs)
        };
        match costs {
            Some(costs) => Copier::with_costs(&self.context, pool, costs.clone()),
            None => Copier::new(&self.context, pool),
        }
    }

    /// The copiers of the pool on a GPU that has a slab at this address. The slab keeps the pool.
    fn device_copiers(&self, address: u64) -> Result<Arc<Copiers>, CudaError> {
        let mut pools = self.lock_pools_on_gpus();
        pools.retain(|pool| pool.memory.strong_count() > 0);
        let has_it = |pool: &&DevicePool| {
            let memory = pool.memory.upgrade();
            memory.is_some_and(|it| address.wrapping_sub(it.base()) < it.bytes() as u64)
        };
        let found = pools.iter().find(has_it).map(|pool| Arc::clone(&pool.copiers));
        found.ok_or(CudaError::OtherPool)
    }

    fn lock_pools_on_gpus(&self) -> MutexGuard<'_, Vec<DevicePool>> {
        self.pools_on_gpus.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<PoolCopies>> {
        self.copies.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn registration(&self) -> Option<RegistrationReport> {
        self.lock().first().map(|copies| copies.registered.report())
    }
}

impl Device {
    /// The copiers for slabs of one pool, and the slabs by where it is.
    pub(super) fn slabs_to_load(
        &self,
        slabs: Vec<Slab>,
        ways: Ways,
    ) -> Result<(Arc<Copiers>, Slabs), CudaError> {
        if let Some(address) = slabs.first().and_then(Slab::device_address) {
            return Ok((self.device_copiers(address)?, Slabs::FromDevicePool(slabs)));
        }
        let slabs =
            slabs.into_iter().map(|slab| slab.into_host().map_err(|_| CudaError::OtherPool));
        let slabs: Vec<HostSlab> = slabs.collect::<Result<_, _>>()?;
        let first = slabs.first().ok_or(CudaError::OtherPool)?;
        Ok((self.copiers(&first.backing(), ways)?, Slabs::ToDevice(slabs)))
    }

    /// The same for slabs that are written.
    pub(super) fn slabs_to_save(
        &self,
        slabs: Vec<SlabMut>,
        ways: Ways,
    ) -> Result<(Arc<Copiers>, Slabs), CudaError> {
        if let Some(address) = slabs.first().and_then(SlabMut::device_address) {
            return Ok((self.device_copiers(address)?, Slabs::ToDevicePool(slabs)));
        }
        let slabs =
            slabs.into_iter().map(|slab| slab.into_host().map_err(|_| CudaError::OtherPool));
        let slabs: Vec<HostSlabMut> = slabs.collect::<Result<_, _>>()?;
        let first = slabs.first().ok_or(CudaError::OtherPool)?;
        Ok((self.copiers(&first.backing(), ways)?, Slabs::ToHost(slabs)))
    }
}
