//! GPU memory that other processes of the host map: the owner's side and the other side.
//!
//! The owner passes three things on: a descriptor, the length and the device's UUID. Every process
//! uses addresses of its own. The memory lives until all of them have dropped it, so a process may
//! go on with it after its owner has died; what its bytes mean then is for the caller to know.
//! The driver does not order the work of several processes: that is the caller's, too.

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;

use crate::allocation::DeviceAllocation;
use crate::context::Context;
use crate::device_uuid::DeviceUuid;
use crate::error::{CudaError, INVALID_VALUE};
use crate::mapped::{Handle, MappedMemory, Reservation, granularity};
use crate::report::{attribute, can_access};

/// Attributes of a device that memory for several processes needs, and what they say.
/// `CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED` and
/// `CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED`.
const ATTRIBUTES: [(u32, &str); 2] =
    [(102, "virtual memory management"), (103, "file descriptors of memory")];

/// What both sides need. All of what releases is looked for before anything is taken.
const NEEDED: [&str; 8] = [
    "cuDeviceGetUuid_v2",
    "cuMemGetAllocationGranularity",
    "cuMemRelease",
    "cuMemAddressReserve",
    "cuMemAddressFree",
    "cuMemMap",
    "cuMemUnmap",
    "cuMemSetAccess",
];

/// Memory of a device that this process owns and others may map.
#[derive(Debug)]
pub struct ShareableMemory {
    mapped: Arc<MappedMemory>,
    memory: Arc<DeviceAllocation>,
    device: DeviceUuid,
}

impl ShareableMemory {
    /// Memory with arbitrary bytes. Its length is rounded up to what the device maps at once, such
    /// as 2 MiB.
    ///
    /// # Errors
    /// If the device has not that much, or cannot share memory between processes.
    pub fn new(context: &Arc<Context>, bytes: usize) -> Result<Self, CudaError> {
        check_support(context, &["cuMemCreate", "cuMemExportToShareableHandle"])?;
        let device = context.device_uuid()?;
        let granularity = granularity(context)?;
        // The driver refuses what does not fit.
        let bytes = bytes.max(1).checked_next_multiple_of(granularity).unwrap_or(usize::MAX);
        let reservation = Reservation::new(context, bytes, granularity)?;
        let handle = Handle::create(context, bytes)?;
        let mapped = Arc::new(MappedMemory::new(reservation, handle, bytes)?);
        let memory = DeviceAllocation::mapped(Arc::clone(&mapped));
        Ok(Self { mapped, memory, device })
    }

    /// The memory.
    pub fn memory(&self) -> &Arc<DeviceAllocation> {
        &self.memory
    }

    /// The device that it is on.
    pub fn device(&self) -> DeviceUuid {
        self.device
    }

    /// A descriptor for another process, which needs the length of the memory and its device, too.
    /// A process with the descriptor can read and write all of the memory. The memory is not freed
    /// while the descriptor is open.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn export(&self) -> Result<OwnedFd, CudaError> {
        self.mapped.handle().export()
    }
}

/// Memory of a device that another process owns.
#[derive(Debug)]
pub struct ImportedMemory {
    memory: Arc<DeviceAllocation>,
}

impl ImportedMemory {
    /// Maps the memory of a descriptor: all of it, on the device that its owner named.
    ///
    /// # Errors
    /// If the context's device cannot access that one, the descriptor is not one of exported
    /// memory, or the memory has another length.
    pub fn open(
        context: &Arc<Context>,
        descriptor: OwnedFd,
        bytes: usize,
        device: DeviceUuid,
    ) -> Result<Self, CudaError> {
        check_support(context, &["cuMemImportFromShareableHandle"])?;
        let own = context.device_uuid()?;
        if own != device {
            check_peer(context, own, device)?;
        }
        let granularity = granularity(context)?;
        let longer = bytes.checked_add(granularity);
        let longer = longer.filter(|_| bytes > 0 && bytes.is_multiple_of(granularity));
        let longer = longer.ok_or(CudaError::OtherLength { bytes })?;
        let handle = Handle::import(context, descriptor.as_fd()).map_err(not_exported)?;
        // The handle holds the memory from here on.
        drop(descriptor);
        let reservation = Reservation::new(context, longer, granularity)?;
        if MappedMemory::fits(&reservation, &handle, longer)? {
            return Err(CudaError::OtherLength { bytes });
        }
        let mapped = MappedMemory::new(reservation, handle, bytes);
        let mapped = Arc::new(mapped.map_err(|error| other_length(error, bytes))?);
        Ok(Self { memory: DeviceAllocation::mapped(mapped) })
    }

    /// The memory.
    pub fn memory(&self) -> &Arc<DeviceAllocation> {
        &self.memory
    }
}

fn check_support(context: &Context, functions: &[&'static str]) -> Result<(), CudaError> {
    context.check()?;
    let driver = context.driver();
    for (which, missing) in ATTRIBUTES {
        // A driver that does not tell refuses the calls.
        let has_none = attribute(driver, context.device(), which).is_ok_and(|value| value == 0);
        if has_none {
            return Err(CudaError::NotShareable { missing });
        }
    }
    driver.need(&NEEDED)?;
    driver.need(functions)
}

/// Refuses memory of a device that the context's own one cannot access. That of a device which this
/// process does not see is left for the driver to refuse.
fn check_peer(context: &Context, own: DeviceUuid, owner: DeviceUuid) -> Result<(), CudaError> {
    let other = CudaError::OtherDevice { owner, context: own };
    match can_access(context, owner)? {
        Some(false) => Err(other),
        Some(true) | None => Ok(()),
    }
}

/// The driver refuses a descriptor of anything else.
fn not_exported(error: CudaError) -> CudaError {
    let is_refusal = error.is_refusal();
    match error {
        CudaError::Call(source)
            if is_refusal && source.call == "cuMemImportFromShareableHandle" =>
        {
            CudaError::NotExported { source }
        }
        error => error,
    }
}

/// The driver refuses to map more than there is.
fn other_length(error: CudaError, bytes: usize) -> CudaError {
    match error {
        CudaError::Call(source) if source.call == "cuMemMap" && source.code == INVALID_VALUE => {
            CudaError::OtherLength { bytes }
        }
        error => error,
    }
}
