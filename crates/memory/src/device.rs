//! Memory of a device: what a region of it needs, and how its copies fail.

mod fake;

use std::error::Error;
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use thiserror::Error;

pub use fake::FakeDevice;

/// Memory of a device, such as a GPU, that a pool divides into slabs: see `Pool::of_device`.
///
/// An implementation fails copies that do not lie in the memory. The pool gives each piece of the
/// memory to one writer, or to readers only, so copies that overlap are not concurrent.
pub trait DeviceMemory: fmt::Debug + Send + Sync {
    /// Address of the first byte, for copies that the device does itself: a multiple of 4096. No
    /// instruction of a processor may access it.
    fn base(&self) -> u64;

    /// Its length. It never changes.
    fn bytes(&self) -> usize;

    /// Copies from the host. When it returns, the bytes are in the device's memory, for copies of
    /// any thread.
    ///
    /// # Errors
    /// If the device fails, or the copy does not lie in the memory. The bytes of the target are
    /// arbitrary then.
    fn copy_in(&self, offset: usize, source: &[u8]) -> Result<(), DeviceError>;

    /// Copies to the host.
    ///
    /// # Errors
    /// If the device fails, or the copy does not lie in the memory. The bytes of the target are
    /// arbitrary then.
    fn copy_out(&self, offset: usize, target: &mut [u8]) -> Result<(), DeviceError>;

    /// Overwrites a piece with zeroes.
    ///
    /// # Errors
    /// If the device fails, or the piece does not lie in the memory. It counts as not overwritten
    /// then.
    fn zero(&self, offset: usize, bytes: usize) -> Result<(), DeviceError>;

    /// What RDMA devices need to access the memory; none if it is of no kind that they access.
    ///
    /// # Errors
    /// If the device's driver, or its kernel module, cannot describe it.
    fn dmabuf(&self) -> Result<Option<DmaBuf>, DeviceError> {
        Ok(None)
    }

    /// What other processes need to map the memory; none if they cannot.
    fn shared(&self) -> Option<&dyn SharedDeviceMemory> {
        None
    }
}

/// Memory of a device, as its driver describes it to RDMA devices. It does not keep the memory.
#[derive(Debug)]
pub struct DmaBuf {
    /// A DMA-BUF descriptor that the driver gave.
    pub descriptor: OwnedFd,
    /// Where the memory begins in the descriptor's.
    pub offset: u64,
    /// Its length.
    pub bytes: usize,
    /// Its address on the device.
    pub address: u64,
}

/// Memory of a device that other processes of the host can map.
pub trait SharedDeviceMemory: fmt::Debug + Send + Sync {
    /// The device that it is on.
    fn device(&self) -> DeviceId;

    /// A descriptor of all of the memory. Its holder can read and write the memory, which is not
    /// freed while a descriptor is open.
    ///
    /// # Errors
    /// If the device refuses.
    fn export(&self) -> Result<OwnedFd, DeviceError>;
}

/// Identifies a device on its host, for all processes: the UUID of a GPU.
pub type DeviceId = [u8; 16];

/// Maps the device memory of another process.
pub trait DeviceImporter: fmt::Debug + Send + Sync {
    /// Maps all of `bytes` bytes of `device` that a descriptor stands for.
    ///
    /// # Errors
    /// If this process cannot reach that device, or the descriptor is of something else.
    fn import(
        &self,
        descriptor: OwnedFd,
        bytes: usize,
        device: DeviceId,
    ) -> Result<Arc<dyn DeviceMemory>, DeviceError>;
}

/// Why the bytes of a slab in device memory could not be read or written. A slab in host memory
/// never fails.
#[derive(Debug, Clone, Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// One operation failed; others may succeed. Retry, or compute the block.
    #[error("cannot {operation} {bytes} bytes of device memory at {offset}")]
    Failed {
        /// The operation.
        operation: &'static str,
        /// Where it starts in the memory.
        offset: usize,
        /// Its length.
        bytes: usize,
        /// The cause.
        #[source]
        source: Arc<dyn Error + Send + Sync>,
    },
    /// The memory of another process cannot be mapped.
    #[error("cannot map {bytes} bytes of another process's device memory")]
    Import {
        /// Their number.
        bytes: usize,
        /// The cause.
        #[source]
        source: Arc<dyn Error + Send + Sync>,
    },
    /// The memory cannot be described to RDMA devices.
    #[error("cannot describe device memory to RDMA devices")]
    DmaBuf {
        /// The cause.
        #[source]
        source: Arc<dyn Error + Send + Sync>,
    },
    /// The memory cannot be shared with another process.
    #[error("cannot share device memory with another process")]
    Export {
        /// The cause.
        #[source]
        source: Arc<dyn Error + Send + Sync>,
    },
    /// The device is lost, with all that its memory held: no operation succeeds any more.
    #[error("the device is lost, with all blocks in its memory; restart to use it again")]
    Lost,
}
