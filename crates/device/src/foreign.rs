//! Memory of a device that another library allocated, such as the KV cache of an engine.
#![expect(unsafe_code, reason = "its constructor takes an address")]

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use cascade_memory::DmaBuf;

use crate::allocation::DeviceAllocation;
use crate::context::Context;
use crate::dmabuf;
use crate::error::CudaError;
use crate::functions::Address;

/// Memory of a device whose owner is another library. It is never freed here.
pub struct ForeignMemory {
    context: Arc<Context>,
    start: Address,
    bytes: usize,
    /// Keeps the memory allocated. Dropped once no copy uses it.
    _owner: Box<dyn Any + Send + Sync>,
}

impl ForeignMemory {
    /// Takes `bytes` from the address `start` on. Dropping `owner` may free them.
    ///
    /// # Safety
    /// They are memory of this context's device, until `owner` is dropped. While a copy uses a
    /// part of them, other work of the device accesses that part only in the order of its events.
    pub unsafe fn new(
        context: &Arc<Context>,
        start: u64,
        bytes: usize,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Arc<Self> {
        Arc::new(Self { context: Arc::clone(context), start, bytes, _owner: owner })
    }

    /// All of an allocation of our own, to copy to and from by transfers. As with pieces of it, the
    /// order of copies is the caller's to set, by events.
    pub fn of_allocation(context: &Arc<Context>, memory: &Arc<DeviceAllocation>) -> Arc<Self> {
        let (start, bytes) = (memory.base(), memory.bytes());
        Arc::new(Self {
            context: Arc::clone(context),
            start,
            bytes,
            _owner: Box::new(Arc::clone(memory)),
        })
    }

    /// The context of its device.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Its length.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// What RDMA devices need to access it. This value must be kept while they do.
    ///
    /// # Errors
    /// If the driver or its kernel module cannot describe it.
    pub fn dmabuf(&self) -> Result<DmaBuf, CudaError> {
        dmabuf::describe(&self.context, self.start, self.bytes)
    }

    /// The address of a piece.
    pub(crate) fn address(&self, offset: usize, bytes: usize) -> Result<Address, CudaError> {
        if offset.checked_add(bytes).is_none_or(|end| end > self.bytes) {
            return Err(CudaError::Outside { offset, bytes, length: self.bytes });
        }
        Ok(self.start + offset as Address)
    }
}

impl fmt::Debug for ForeignMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ForeignMemory({} bytes at {:#x})", self.bytes, self.start)
    }
}
