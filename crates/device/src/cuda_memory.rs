//! Memory of a GPU as a pool divides it into slabs: `cascade_memory::DeviceMemory` over the driver.
#![expect(unsafe_code, reason = "zeroes a piece of its memory")]

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use cascade_memory::{
    DeviceError, DeviceId, DeviceImporter, DeviceMemory, DmaBuf, SharedDeviceMemory,
};
use cascade_runtime::Clock;

use crate::allocation::DeviceAllocation;
use crate::context::Context;
use crate::device_uuid::DeviceUuid;
use crate::dmabuf;
use crate::driver::Driver;
use crate::error::CudaError;
use crate::shareable::{ImportedMemory, ShareableMemory};
use crate::staging::Staging;
use crate::stream::Stream;

/// The device, and how much of its memory to take.
#[derive(Debug, Clone)]
pub struct CudaMemoryConfig {
    /// Index of the device, as the driver counts them.
    pub device: usize,
    /// Its length. Minimum: 1.
    pub bytes: usize,
    /// Length of a buffer that copies go through. Default: 1 MiB.
    pub buffer_bytes: usize,
    /// Number of these buffers. Default: 8, for four copies at once.
    pub buffers: usize,
    /// The longest that a copy may take before the device counts as lost. Default: 30 s.
    pub copy_timeout: Duration,
    /// Whether other processes of the host can map it. Its length is rounded up then, to 2 MiB on
    /// most devices. Default: false.
    pub shareable: bool,
}

impl CudaMemoryConfig {
    /// The first device, with defaults.
    pub fn new(bytes: usize) -> Self {
        let copy_timeout = Duration::from_secs(30);
        let (buffer_bytes, buffers) = (1 << 20, 8);
        Self { device: 0, bytes, buffer_bytes, buffers, copy_timeout, shareable: false }
    }
}

/// Buffers of memory that another process owns: only copies to and from the host need them.
const IMPORT_BUFFER_BYTES: usize = 256 << 10;
const IMPORT_BUFFERS: usize = 2;

/// Memory of a GPU for the pool of a store.
///
/// All copies go through small buffers that the driver allocated, because the device must never use
/// memory of a caller that has given up waiting.
#[derive(Debug)]
pub struct CudaMemory {
    context: Arc<Context>,
    memory: Arc<DeviceAllocation>,
    shareable: Option<ShareableMemory>,
    staging: Staging,
    /// One stream for each direction, since devices copy both ways at once.
    inward: Stream,
    outward: Stream,
}

impl CudaMemory {
    /// Takes the memory. Its bytes are arbitrary.
    ///
    /// # Errors
    /// If there is no GPU or not that much memory, or the driver lacks a function or cannot share
    /// memory.
    pub fn new(
        driver: &Arc<Driver>,
        config: &CudaMemoryConfig,
        clock: Arc<dyn Clock>,
    ) -> Result<Arc<Self>, CudaError> {
        driver.need(&["cuMemsetD8Async", "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2"])?;
        let context = Context::retain(driver, config.device, clock, config.copy_timeout)?;
        let (memory, shareable) = if config.shareable {
            let shareable = ShareableMemory::new(&context, config.bytes)?;
            (Arc::clone(shareable.memory()), Some(shareable))
        } else {
            (DeviceAllocation::new(&context, config.bytes)?, None)
        };
        let buffers = (config.buffer_bytes.max(4096), config.buffers);
        Self::over(context, (memory, shareable), buffers).map(Arc::new)
    }

    /// Memory of another process, for copies of this one.
    ///
    /// # Errors
    /// If the driver refuses streams or buffers.
    pub fn of_imported(
        context: &Arc<Context>,
        imported: &ImportedMemory,
    ) -> Result<Arc<Self>, CudaError> {
        let memory = Arc::clone(imported.memory());
        let buffers = (IMPORT_BUFFER_BYTES, IMPORT_BUFFERS);
        Self::over(Arc::clone(context), (memory, None), buffers).map(Arc::new)
    }

    fn over(
        context: Arc<Context>,
        (memory, shareable): (Arc<DeviceAllocation>, Option<ShareableMemory>),
        (buffer_bytes, buffers): (usize, usize),
    ) -> Result<Self, CudaError> {
        let staging = Staging::new(&context, buffer_bytes, buffers)?;
        let (inward, outward) = (Stream::new(&context)?, Stream::new(&context)?);
        Ok(Self { context, memory, shareable, staging, inward, outward })
    }

    /// The memory.
    pub(crate) fn memory(&self) -> &Arc<DeviceAllocation> {
        &self.memory
    }

    /// What other processes need to map it; none if it was not taken as shareable.
    pub fn shareable(&self) -> Option<&ShareableMemory> {
        self.shareable.as_ref()
    }

    /// The context of its device.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    fn write(&self, offset: usize, source: &[u8]) -> Result<(), CudaError> {
        let target = self.memory.check(offset, source.len())?;
        self.staging.copy_in(&self.inward, target, source, self.context.deadline())
    }

    fn read(&self, offset: usize, target: &mut [u8]) -> Result<(), CudaError> {
        let source = self.memory.check(offset, target.len())?;
        self.staging.copy_out(&self.outward, source, target, self.context.deadline())
    }

    fn write_zeroes(&self, offset: usize, bytes: usize) -> Result<(), CudaError> {
        let target = self.memory.check(offset, bytes)?;
        if bytes == 0 {
            return Ok(());
        }
        let started = self.context.with(|| {
            // SAFETY: the piece lies in memory that this value frees only after the work of its
            // streams, or never if the context is lost.
            unsafe { self.inward.zero(target, bytes) }
        });
        // Also after an error: the work may have started before it.
        let ended = self.inward.finish(self.context.deadline()).inspect_err(|error| {
            // It may still write: nobody may get that memory.
            self.context.lose(error.clone());
        });
        started.and(ended)
    }
}

impl DeviceMemory for CudaMemory {
    fn base(&self) -> u64 {
        self.memory.base()
    }

    fn bytes(&self) -> usize {
        self.memory.bytes()
    }

    fn copy_in(&self, offset: usize, source: &[u8]) -> Result<(), DeviceError> {
        let copied = self.write(offset, source);
        copied.map_err(|error| failed("write", offset, source.len(), error))
    }

    fn copy_out(&self, offset: usize, target: &mut [u8]) -> Result<(), DeviceError> {
        let copied = self.read(offset, target);
        copied.map_err(|error| failed("read", offset, target.len(), error))
    }

    fn zero(&self, offset: usize, bytes: usize) -> Result<(), DeviceError> {
        let zeroed = self.write_zeroes(offset, bytes);
        zeroed.map_err(|error| failed("zero", offset, bytes, error))
    }

    fn dmabuf(&self) -> Result<Option<DmaBuf>, DeviceError> {
        let described = dmabuf::describe(&self.context, self.memory.base(), self.memory.bytes());
        described.map(Some).map_err(|error| DeviceError::DmaBuf { source: Arc::new(error) })
    }

    fn shared(&self) -> Option<&dyn SharedDeviceMemory> {
        self.shareable.as_ref().map(|shareable| shareable as &dyn SharedDeviceMemory)
    }
}

impl SharedDeviceMemory for ShareableMemory {
    fn device(&self) -> DeviceId {
        ShareableMemory::device(self).bytes()
    }

    fn export(&self) -> Result<OwnedFd, DeviceError> {
        let exported = ShareableMemory::export(self);
        exported.map_err(|error| DeviceError::Export { source: Arc::new(error) })
    }
}

/// Maps pools of nodes, for copies of one GPU.
#[derive(Debug)]
pub struct CudaImporter {
    context: Arc<Context>,
}

impl CudaImporter {
    /// For the device of a context, which may be another one than that of the pools.
    pub fn new(context: &Arc<Context>) -> Self {
        Self { context: Arc::clone(context) }
    }

    /// Maps the memory of another process.
    ///
    /// # Errors
    /// As [`ImportedMemory::open`].
    pub fn open(
        &self,
        descriptor: OwnedFd,
        bytes: usize,
        device: DeviceUuid,
    ) -> Result<Arc<CudaMemory>, CudaError> {
        let imported = ImportedMemory::open(&self.context, descriptor, bytes, device)?;
        CudaMemory::of_imported(&self.context, &imported)
    }
}

impl DeviceImporter for CudaImporter {
    fn import(
        &self,
        descriptor: OwnedFd,
        bytes: usize,
        device: DeviceId,
    ) -> Result<Arc<dyn DeviceMemory>, DeviceError> {
        let opened = self.open(descriptor, bytes, DeviceUuid::from_bytes(device));
        let memory =
            opened.map_err(|error| DeviceError::Import { bytes, source: Arc::new(error) })?;
        Ok(memory)
    }
}

/// The first fatal error names its cause; all later ones say that the device is lost.
fn failed(operation: &'static str, offset: usize, bytes: usize, error: CudaError) -> DeviceError {
    match error {
        CudaError::Poisoned { .. } => DeviceError::Lost,
        error => DeviceError::Failed { operation, offset, bytes, source: Arc::new(error) },
    }
}
