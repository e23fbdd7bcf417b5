//! A small buffer in host memory that devices copy from and to.
#![expect(unsafe_code, reason = "calls the driver, and hands out the buffer's bytes")]

use std::ffi::c_void;
use std::ptr::{NonNull, null_mut};
use std::slice;
use std::sync::Arc;

use crate::context::Context;
use crate::error::CudaError;
use crate::functions::Status;

/// Memory of the driver's own, which works where memory cannot be registered.
#[derive(Debug)]
pub(crate) struct PinnedBuffer {
    context: Arc<Context>,
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: plain memory without thread affinity, freed once.
unsafe impl Send for PinnedBuffer {}

impl PinnedBuffer {
    pub(crate) fn new(context: &Arc<Context>, bytes: usize) -> Result<Self, CudaError> {
        context.driver().need(&["cuMemFreeHost"])?;
        context.with(|| {
            let mut start = null_mut();
            let allocate = |allocate: unsafe extern "C" fn(*mut *mut c_void, usize) -> Status| {
                // SAFETY: writes to a local variable.
                unsafe { allocate(&raw mut start, bytes) }
            };
            context.call(|functions| &functions.mem_alloc_host, allocate)?;
            let call = || context.driver().call_error("cuMemAllocHost_v2", 2);
            let start = NonNull::new(start.cast::<u8>()).ok_or_else(call)?;
            // SAFETY: new memory of this length, which nothing else has the address of.
            unsafe { start.write_bytes(0, bytes) };
            Ok(Self { context: Arc::clone(context), start, bytes })
        })
    }

    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Its bytes. Call it only while no copy is in flight: whoever starts one owns the buffer until
    /// it is over.
    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: memory of this length, initialised by `new`, with one owner. No device accesses
        // it meanwhile: `Staging` has a buffer either here or in flight.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        let free = |free: unsafe extern "C" fn(*mut c_void) -> Status| {
            // SAFETY: allocated by `new` and freed once; a buffer in flight is never dropped.
            unsafe { free(self.start.as_ptr().cast()) }
        };
        self.context.release(|functions| &functions.mem_free_host, free);
    }
}
