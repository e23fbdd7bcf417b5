//! Host memory that is registered with the driver, so that devices copy from and to it directly.
#![expect(unsafe_code, reason = "calls the driver")]

use std::ffi::c_void;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use cascade_memory::{BackingMemory, Pool};
use cascade_runtime::{LeafMutex, thread};

use crate::context::Context;
use crate::error::CudaError;
use crate::functions::{Address, Status};
use crate::kernel::device_address;
use crate::plan::Borders;

/// `CU_MEMHOSTREGISTER_PORTABLE`: registered for all contexts of the process.
const PORTABLE: u32 = 1;
/// `CU_MEMHOSTREGISTER_DEVICEMAP`: kernels can access the memory, too. On a device where they
/// cannot, `cuMemHostGetDevicePointer` fails.
const MAPPED: u32 = 2;

/// How far the registration of a pool is.
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
    /// Whether all pieces were registered, or one was refused.
    pub is_complete: bool,
}

/// A pool in host memory, registered in pieces of one length. No copy crosses a border between two
/// registrations: drivers refuse such a copy.
#[derive(Debug)]
pub struct RegisteredPool {
    context: Arc<Context>,
    start: NonNull<u8>,
    bytes: usize,
    piece_bytes: usize,
    /// As in the report, for copies. It only grows.
    registered_bytes: AtomicUsize,
    report: LeafMutex<RegistrationReport>,
    /// Addresses of the first pieces for kernels; fewer than are registered if the driver has none.
    device_addresses: LeafMutex<Vec<Address>>,
    /// Keeps the memory mapped until it is unregistered: another mapping at the same address would
    /// not be what the device reads.
    _memory: Arc<dyn HostMemory>,
}

/// Memory of this host with a fixed address, such as a pool.
pub trait HostMemory: Send + Sync + std::fmt::Debug {
    /// The first byte and the length, for a registration; none if it is not in host memory.
    fn span(&self) -> Option<(NonNull<u8>, usize)>;
}

impl HostMemory for BackingMemory {
    fn span(&self) -> Option<(NonNull<u8>, usize)> {
        BackingMemory::span(self)
    }
}

impl HostMemory for Pool {
    fn span(&self) -> Option<(NonNull<u8>, usize)> {
        // The device uses its pages from now on.
        self.pin();
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
        let pool = Self::unregistered(context, memory, piece_bytes)?;
        while pool.register_next() {}
        Ok(Arc::new(pool))
    }

    /// As [`RegisteredPool::new`], in a thread of its own: it may take minutes. Until a piece is
    /// registered its copies go through a small buffer. The thread ends with the last other
    /// reference to the pool, after the piece that it registers then.
    ///
    /// # Errors
    /// As [`RegisteredPool::new`]. If the system refuses the thread, nothing is registered, and the
    /// report says so.
    pub fn begin(
        context: &Arc<Context>,
        memory: Arc<dyn HostMemory>,
        piece_bytes: usize,
    ) -> Result<Arc<Self>, CudaError> {
        let pool = Arc::new(Self::unregistered(context, memory, piece_bytes)?);
        let weak = Arc::downgrade(&pool);
        let register = move || while weak.upgrade().is_some_and(|pool| pool.register_next()) {};
        let started = thread::Builder::new().name("cascade-register".to_owned()).spawn(register);
        if let Err(error) = started {
            let mut report = pool.lock();
            report.refusal = Some(CudaError::Thread { source: Arc::new(error) });
            report.is_complete = true;
        }
        Ok(pool)
    }

    fn unregistered(
        context: &Arc<Context>,
        memory: Arc<dyn HostMemory>,
        piece_bytes: usize,
    ) -> Result<Self, CudaError> {
        context.check()?;
        let (start, bytes) = memory.span().ok_or(CudaError::OtherPool)?;
        let piece_bytes = piece_bytes.clamp(1, usize::MAX / 2).next_multiple_of(4096);
        let refusal = context.driver().need(&["cuMemHostUnregister"]).err();
        let report = LeafMutex::new(RegistrationReport {
            pieces: 0,
            registered_bytes: 0,
            staged_bytes: bytes,
            is_complete: refusal.is_some(),
            refusal,
            took: Duration::ZERO,
        });
        let (context, registered_bytes) = (Arc::clone(context), AtomicUsize::new(0));
        Ok(Self {
            context,
            start,
            bytes,
            piece_bytes,
            registered_bytes,
            report,
            device_addresses: LeafMutex::default(),
            _memory: memory,
        })
    }

    /// Registers one more piece; false if there is nothing more to register. One thread calls it.
    fn register_next(&self) -> bool {
        if self.lock().is_complete {
            return false;
        }
        let first = self.registered_bytes.load(Ordering::Relaxed);
        let length = self.piece_bytes.min(self.bytes - first);
        let began = self.context.clock().monotonic();
        // Without the lock: the driver takes a tenth of a second per GiB.
        let registered = register(&self.context, address(self.start, first), length);
        let took = self.context.clock().monotonic().saturating_sub(began);
        if registered.is_ok() {
            self.add_device_address(first);
        }
        let counts = self.context.copy_counts();
        let mut report = self.lock();
        report.took += took;
        match registered {
            Ok(()) => {
                counts.register(length, took);
                report.pieces += 1;
                report.registered_bytes += length;
                report.staged_bytes -= length;
                report.is_complete = report.staged_bytes == 0;
                // Release: a copy that reads the new value finds the piece registered.
                self.registered_bytes.store(report.registered_bytes, Ordering::Release);
            }
            Err(error) => {
                counts.refuse(report.staged_bytes, took);
                report.refusal = Some(error);
                report.is_complete = true;
            }
        }
        !report.is_complete
    }

    /// Asks for the address of a piece for kernels. Without it, kernels do not access the pool.
    fn add_device_address(&self, first: usize) {
        let start = NonNull::new(address(self.start, first).cast::<u8>());
        let found = start.map(|start| device_address(&self.context, start));
        let mut known = self.device_addresses.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(Ok(address)) = found
            && known.len() * self.piece_bytes == first
        {
            known.push(address);
        }
    }

    /// What of it is registered now.
    pub(crate) fn borders(&self) -> Borders {
        let registered_bytes = self.registered_bytes.load(Ordering::Acquire);
        Borders { piece_bytes: self.piece_bytes, registered_bytes }
    }

    /// The addresses of its pieces for kernels; none if not all that is in `borders` has one.
    pub(crate) fn device_addresses(&self, borders: &Borders) -> Option<Vec<Address>> {
        let known = self.device_addresses.lock().unwrap_or_else(PoisonError::into_inner);
        let are_all = known.len() >= borders.registered_bytes.div_ceil(borders.piece_bytes);
        are_all.then(|| known.clone())
    }

    /// Where a slab starts in it. Exposes the address of the slab, for copies.
    pub(crate) fn expose(&self, slab: NonNull<[u8]>) -> Result<usize, CudaError> {
        let first = slab.cast::<u8>().as_ptr().expose_provenance();
        let offset = first.checked_sub(self.start.as_ptr().addr());
        let offset = offset.filter(|offset| offset.saturating_add(slab.len()) <= self.bytes);
        offset.ok_or(CudaError::OtherPool)
    }

    /// The host address of a place in it.
    pub(crate) fn host_address(&self, offset: usize) -> Address {
        (self.start.as_ptr().addr() + offset) as Address
    }

    /// What was registered so far, and what not and why.
    pub fn report(&self) -> RegistrationReport {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, RegistrationReport> {
        self.report.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The parts of a slab's bytes between borders of registrations; whether each is registered.
    pub(crate) fn parts(&self, slab: &[u8]) -> Result<Parts, CudaError> {
        let first = slab.as_ptr().addr().checked_sub(self.start.as_ptr().addr());
        let first = first.filter(|first| first.saturating_add(slab.len()) <= self.bytes);
        let first = first.ok_or(CudaError::OtherPool)?;
        let registered_bytes = self.registered_bytes.load(Ordering::Acquire);
        let piece_bytes = self.piece_bytes;
        Ok(Parts { first, at: first, end: first + slab.len(), registered_bytes, piece_bytes })
    }
}

/// The parts of a piece of the pool, each in one registration or in none.
pub(crate) struct Parts {
    first: usize,
    at: usize,
    end: usize,
    registered_bytes: usize,
    piece_bytes: usize,
}

impl Iterator for Parts {
    type Item = (Range<usize>, bool);

    fn next(&mut self) -> Option<Self::Item> {
        if self.at == self.end {
            return None;
        }
        let is_registered = self.at < self.registered_bytes;
        let border = if is_registered {
            (self.at / self.piece_bytes + 1) * self.piece_bytes
        } else {
            self.end
        };
        let border = border.min(self.end);
        let part = self.at - self.first..border - self.first;
        self.at = border;
        Some((part, is_registered))
    }
}

impl Drop for RegisteredPool {
    fn drop(&mut self) {
        for piece in 0..self.lock().pieces {
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
        unsafe { register(start, bytes, PORTABLE | MAPPED) }
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
