//! Host memory that is registered with the driver, so that devices copy from and to it directly.
#![expect(unsafe_code, reason = "calls the driver")]

use std::ffi::c_void;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use cascade_memory::Pool;

use crate::context::Context;
use crate::error::CudaError;
use crate::functions::Status;

/// `CU_MEMHOSTREGISTER_PORTABLE`: registered for all contexts of the process.
const PORTABLE: u32 = 1;

/// What registering a pool did.
#[derive(Debug, Clone)]
pub struct RegistrationReport {
    /// Registrations that were made.
    pub pieces: usize,
    /// Bytes of the pool that are registered, from its start.
    pub registered_bytes: usize,
    /// Bytes of the pool that are not: copies of these go through a small buffer, and wait.
    pub staged_bytes: usize,
    /// Why the driver refused the first piece that is not registered.
    pub refusal: Option<CudaError>,
    /// The time that the driver took.
    pub took: Duration,
}

/// A pool in host memory, registered in pieces of one length. No copy crosses a border between two
/// registrations: drivers refuse such a copy.
#[derive(Debug)]
pub struct RegisteredPool {
    context: Arc<Context>,
    start: NonNull<u8>,
    bytes: usize,
    piece_bytes: usize,
    report: RegistrationReport,
    /// Keeps the memory mapped until it is unregistered.
    _memory: Arc<dyn HostMemory>,
}

/// Memory of this host with a fixed address, such as a pool.
pub trait HostMemory: Send + Sync + std::fmt::Debug {
    /// The first byte and the length; none if it is not in host memory.
    fn span(&self) -> Option<(NonNull<u8>, usize)>;
}

impl HostMemory for Pool {
    fn span(&self) -> Option<(NonNull<u8>, usize)> {
        self.region().host().map(|host| (host.base(), host.bytes()))
    }
}

// SAFETY: the address is only compared and passed to the driver.
unsafe impl Send for RegisteredPool {}
// SAFETY: as above; a shared value changes nothing.
unsafe impl Sync for RegisteredPool {}

impl RegisteredPool {
    /// Registers a pool in pieces of `piece_bytes`, rounded up to pages. The first piece that the
    /// driver refuses is the last that is tried: see [`RegisteredPool::report`].
    ///
    /// # Errors
    /// If the pool is not in host memory, or the context is lost.
    pub fn new(
        context: &Arc<Context>,
        memory: Arc<dyn HostMemory>,
        piece_bytes: usize,
    ) -> Result<Arc<Self>, CudaError> {
        context.check()?;
        let (start, bytes) = memory.span().ok_or(CudaError::OtherPool)?;
        let piece_bytes = piece_bytes.clamp(1, usize::MAX / 2).next_multiple_of(4096);
        let began = context.clock().monotonic();
        let mut report = RegistrationReport {
            pieces: 0,
            registered_bytes: 0,
            staged_bytes: bytes,
            refusal: context.driver().need(&["cuMemHostUnregister"]).err(),
            took: Duration::ZERO,
        };
        while report.refusal.is_none() && report.staged_bytes > 0 {
            let length = piece_bytes.min(report.staged_bytes);
            match register(context, address(start, report.registered_bytes), length) {
                Ok(()) => {
                    report.pieces += 1;
                    report.registered_bytes += length;
                    report.staged_bytes -= length;
                }
                Err(error) => report.refusal = Some(error),
            }
        }
        report.took = context.clock().monotonic().saturating_sub(began);
        let context = Arc::clone(context);
        let pool = Self { context, start, bytes, piece_bytes, report, _memory: memory };
        Ok(Arc::new(pool))
    }

    /// What was registered, and what not and why.
    pub fn report(&self) -> &RegistrationReport {
        &self.report
    }

    /// The parts of a slab's bytes between borders of registrations; whether each is registered.
    pub(crate) fn parts(&self, slab: &[u8]) -> Result<Vec<(Range<usize>, bool)>, CudaError> {
        let first = slab.as_ptr().addr().checked_sub(self.start.as_ptr().addr());
        let first = first.filter(|first| first.saturating_add(slab.len()) <= self.bytes);
        Ok(self.parts_at(first.ok_or(CudaError::OtherPool)?, slab.len()))
    }

    fn parts_at(&self, first: usize, bytes: usize) -> Vec<(Range<usize>, bool)> {
        let mut parts = Vec::new();
        let (mut at, end) = (first, first + bytes);
        while at < end {
            let is_registered = at < self.report.registered_bytes;
            let border =
                if is_registered { (at / self.piece_bytes + 1) * self.piece_bytes } else { end };
            let border = border.min(end);
            parts.push((at - first..border - first, is_registered));
            at = border;
        }
        parts
    }
}

impl Drop for RegisteredPool {
    fn drop(&mut self) {
        for piece in 0..self.report.pieces {
            let start = address(self.start, piece * self.piece_bytes);
            unregister(&self.context, start);
        }
    }
}

/// An address in memory that starts at `start`, for the driver.
fn address(start: NonNull<u8>, offset: usize) -> *mut c_void {
    start.as_ptr().wrapping_add(offset).cast()
}

fn register(context: &Context, start: *mut c_void, bytes: usize) -> Result<(), CudaError> {
    type Call = unsafe extern "C" fn(*mut c_void, usize, u32) -> Status;
    let register = |register: Call| {
        // SAFETY: the driver pins the pages and checks that they are mapped.
        unsafe { register(start, bytes, PORTABLE) }
    };
    let mut is_registered = false;
    let registered = context.with(|| {
        context.call(|functions| &functions.mem_host_register, register)?;
        is_registered = true;
        Ok(())
    });
    if registered.is_err() && is_registered {
        unregister(context, start);
    }
    registered
}

fn unregister(context: &Context, start: *mut c_void) {
    let unregister = |unregister: unsafe extern "C" fn(*mut c_void) -> Status| {
        // SAFETY: registered by `register` and unregistered once; copies hold the `RegisteredPool`
        // until they are over.
        unsafe { unregister(start) }
    };
    context.release(|functions| &functions.mem_host_unregister, unregister);
}
