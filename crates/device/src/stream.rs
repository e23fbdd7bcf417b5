//! A stream: work of a device that runs in order.
#![expect(unsafe_code, reason = "calls the driver")]

use std::ffi::{c_int, c_void};
use std::fmt;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

use cascade_runtime::Deadline;

use crate::context::Context;
use crate::error::CudaError;
use crate::event::Event;
use crate::functions::{Address, Handle, Status};

/// `CU_STREAM_NON_BLOCKING`: it does not wait for the default stream of other libraries.
const NON_BLOCKING: u32 = 1;

/// A queue of work on a device. Streams run beside each other, unless one waits for an event of
/// another.
pub struct Stream {
    context: Arc<Context>,
    handle: Handle,
    /// Whether another library created it, which also destroys it.
    is_foreign: bool,
}

// SAFETY: the handle is an address that only the driver follows, from any thread.
unsafe impl Send for Stream {}
// SAFETY: the driver may be called about one stream by several threads at once.
unsafe impl Sync for Stream {}

impl Stream {
    /// A new stream of the lowest priority.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        context.with(|| {
            let mut handle = null_mut();
            let create = |create: unsafe extern "C" fn(*mut Handle, u32, c_int) -> Status| {
                // SAFETY: writes to a local variable.
                unsafe { create(&raw mut handle, NON_BLOCKING, 0) }
            };
            context.call(|functions| &functions.stream_create, create)?;
            Ok(Self { context: Arc::clone(context), handle, is_foreign: false })
        })
    }

    /// A stream of another library by its `CUstream`, such as `torch.cuda.Stream.cuda_stream`.
    /// Zero is the default stream.
    ///
    /// # Safety
    /// It is a stream of this context, and not destroyed before this value is dropped.
    pub unsafe fn foreign(context: &Arc<Context>, handle: usize) -> Self {
        let handle = std::ptr::with_exposed_provenance_mut(handle);
        Self { context: Arc::clone(context), handle, is_foreign: true }
    }

    /// Its `CUstream` as a number, for other libraries.
    pub fn number(&self) -> usize {
        self.handle.expose_provenance()
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(crate) fn handle(&self) -> Handle {
        self.handle
    }

    /// An event after all work so far.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn record(&self) -> Result<Event, CudaError> {
        let event = Event::new(&self.context)?;
        self.record_again(&event)?;
        Ok(event)
    }

    /// As [`Stream::record`], and the event knows when it was reached.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn record_timed(&self) -> Result<Event, CudaError> {
        let event = Event::timed(&self.context)?;
        self.record_again(&event)?;
        Ok(event)
    }

    /// Moves an event to the end of all work so far.
    pub(crate) fn record_again(&self, event: &Event) -> Result<(), CudaError> {
        let record = |record: unsafe extern "C" fn(Handle, Handle) -> Status| {
            // SAFETY: both exist until their values are dropped.
            unsafe { record(event.handle(), self.handle) }
        };
        self.context.with(|| self.context.call(|functions| &functions.event_record, record))
    }

    /// Makes all later work of this stream wait for an event.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn wait_for(&self, event: &Event) -> Result<(), CudaError> {
        let wait = |wait: unsafe extern "C" fn(Handle, Handle, u32) -> Status| {
            // SAFETY: both exist until their values are dropped; the driver keeps what is waited
            // for.
            unsafe { wait(self.handle, event.handle(), 0) }
        };
        self.context.with(|| self.context.call(|functions| &functions.stream_wait_event, wait))
    }

    /// Whether all its work is over.
    pub(crate) fn is_idle(&self) -> Result<bool, CudaError> {
        let query = |query: unsafe extern "C" fn(Handle) -> Status| {
            // SAFETY: the stream exists until this value is dropped.
            unsafe { query(self.handle) }
        };
        self.context.query(|functions| &functions.stream_query, query)
    }

    /// Waits until all its work so far is over.
    ///
    /// # Errors
    /// If the device failed, or not all was over at the deadline.
    pub fn finish(&self, deadline: Deadline) -> Result<(), CudaError> {
        match self.record() {
            Ok(event) => event.wait(deadline),
            // Without an event, also later work of other threads is waited for.
            Err(_) => self.context.wait("the work of a stream", deadline, || self.is_idle()),
        }
    }

    /// Starts a copy from the host.
    ///
    /// # Safety
    /// The source has this length and is not written, the target lies in memory of the device,
    /// and both stay so until the copy is over.
    pub(crate) unsafe fn copy_to_device(
        &self,
        target: Address,
        source: NonNull<u8>,
        bytes: usize,
    ) -> Result<(), CudaError> {
        type Call = unsafe extern "C" fn(Address, *const c_void, usize, Handle) -> Status;
        let copy = |copy: Call| {
            // SAFETY: the caller's promise; the stream exists until this value is dropped.
            unsafe { copy(target, source.as_ptr().cast(), bytes, self.handle) }
        };
        self.context.call(|functions| &functions.memcpy_to_device_async, copy)
    }

    /// Starts a copy to the host.
    ///
    /// # Safety
    /// The target has this length and nothing else accesses it, the source lies in memory of the
    /// device, and both stay so until the copy is over.
    pub(crate) unsafe fn copy_to_host(
        &self,
        target: NonNull<u8>,
        source: Address,
        bytes: usize,
    ) -> Result<(), CudaError> {
        type Call = unsafe extern "C" fn(*mut c_void, Address, usize, Handle) -> Status;
        let copy = |copy: Call| {
            // SAFETY: the caller's promise; the stream exists until this value is dropped.
            unsafe { copy(target.as_ptr().cast(), source, bytes, self.handle) }
        };
        self.context.call(|functions| &functions.memcpy_to_host_async, copy)
    }

    /// Starts a copy within the memory of the device.
    ///
    /// # Safety
    /// Both lie in memory of the device until the copy is over.
    pub(crate) unsafe fn copy_within(
        &self,
        target: Address,
        source: Address,
        bytes: usize,
    ) -> Result<(), CudaError> {
        let copy = |copy: unsafe extern "C" fn(Address, Address, usize, Handle) -> Status| {
            // SAFETY: the caller's promise; the stream exists until this value is dropped.
            unsafe { copy(target, source, bytes, self.handle) }
        };
        self.context.call(|functions| &functions.memcpy_within_async, copy)
    }

    /// Starts to write zeroes.
    ///
    /// # Safety
    /// The target lies in memory of the device until that is over.
    pub(crate) unsafe fn zero(&self, target: Address, bytes: usize) -> Result<(), CudaError> {
        let fill = |fill: unsafe extern "C" fn(Address, u8, usize, Handle) -> Status| {
            // SAFETY: the caller's promise; the stream exists until this value is dropped.
            unsafe { fill(target, 0, bytes, self.handle) }
        };
        self.context.call(|functions| &functions.memset_async, fill)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.is_foreign {
            return;
        }
        let destroy = |destroy: unsafe extern "C" fn(Handle) -> Status| {
            // SAFETY: created by `new` and destroyed once; the driver first ends its work.
            unsafe { destroy(self.handle) }
        };
        self.context.release(|functions| &functions.stream_destroy, destroy);
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream({:p})", self.handle)
    }
}
