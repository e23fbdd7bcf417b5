//! Memory of a device, and pieces of it.
#![expect(unsafe_code, reason = "calls the driver")]

use std::sync::Arc;

use crate::context::Context;
use crate::error::CudaError;
use crate::functions::{Address, Status};
use crate::mapped::MappedMemory;

/// Alignment of what this crate allocates, as pools need it.
const ALIGNMENT: usize = 4096;

/// Memory of a device, freed when it is dropped. No instruction of a processor may follow its
/// addresses.
#[derive(Debug)]
pub struct DeviceAllocation {
    /// Releases the memory.
    _owner: Owner,
    base: Address,
    bytes: usize,
}

/// Whose memory it is.
#[derive(Debug)]
enum Owner {
    /// Only this process can use it.
    Private { _memory: PrivateMemory },
    /// Other processes can map it.
    Mapped { _memory: Arc<MappedMemory> },
}

/// Memory of `cuMemAlloc`, freed when it is dropped.
#[derive(Debug)]
struct PrivateMemory {
    context: Arc<Context>,
    /// What the driver gave, and what it takes back.
    start: Address,
}

impl DeviceAllocation {
    /// Memory with arbitrary bytes.
    ///
    /// # Errors
    /// If the device has not that much, or the driver refuses.
    pub fn new(context: &Arc<Context>, bytes: usize) -> Result<Arc<Self>, CudaError> {
        context.driver().need(&["cuMemFree_v2"])?;
        let length = bytes.saturating_add(ALIGNMENT);
        context.with(|| {
            let mut start = 0;
            let allocate = |allocate: unsafe extern "C" fn(*mut Address, usize) -> Status| {
                // SAFETY: writes to a local variable.
                unsafe { allocate(&raw mut start, length) }
            };
            context.call(|functions| &functions.mem_alloc, allocate)?;
            let base = start.next_multiple_of(ALIGNMENT as Address);
            let memory = PrivateMemory { context: Arc::clone(context), start };
            Ok(Arc::new(Self { _owner: Owner::Private { _memory: memory }, base, bytes }))
        })
    }

    /// All of some mapped memory.
    pub(crate) fn mapped(memory: Arc<MappedMemory>) -> Arc<Self> {
        let (base, bytes) = (memory.start(), memory.bytes());
        Arc::new(Self { _owner: Owner::Mapped { _memory: memory }, base, bytes })
    }

    /// Address of the first byte, for the device.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// Its length.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// A piece of it.
    ///
    /// # Errors
    /// If it does not lie in the memory.
    pub fn piece(self: &Arc<Self>, offset: usize, bytes: usize) -> Result<DevicePiece, CudaError> {
        self.check(offset, bytes)?;
        Ok(DevicePiece { memory: Arc::clone(self), offset, bytes })
    }

    /// The address of a piece.
    pub(crate) fn check(&self, offset: usize, bytes: usize) -> Result<Address, CudaError> {
        if offset.checked_add(bytes).is_none_or(|end| end > self.bytes) {
            return Err(CudaError::Outside { offset, bytes, length: self.bytes });
        }
        Ok(self.base + offset as Address)
    }
}

impl Drop for PrivateMemory {
    fn drop(&mut self) {
        let free = |free: unsafe extern "C" fn(Address) -> Status| {
            // SAFETY: allocated once, and freed once: copies hold the allocation until they are
            // over.
            unsafe { free(self.start) }
        };
        self.context.release(|functions| &functions.mem_free, free);
    }
}

/// A piece of memory of a device, which lives as long as the piece. Copies of several streams may
/// use it at once: their order is the caller's to set, by events.
#[derive(Debug, Clone)]
pub struct DevicePiece {
    memory: Arc<DeviceAllocation>,
    offset: usize,
    bytes: usize,
}

impl DevicePiece {
    /// Its length.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn address(&self) -> Address {
        self.memory.base + self.offset as Address
    }
}
