//! Copies between slabs in host memory and pieces of device memory, in the order of a stream.
//!
//! A copy in flight owns its slabs: they come back from [`Pending::wait`] and nowhere else, so no
//! other code reads or reuses them before the device is done, also if the caller gives up.
#![expect(unsafe_code, reason = "starts copies of memory that they own until they are over")]

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};

use cascade_memory::{HostSlab, HostSlabMut};
use cascade_runtime::{Deadline, LeafMutex};

use crate::abandoned;
use crate::allocation::DevicePiece;
use crate::batch::{Batch, BatchForm};
use crate::context::Context;
use crate::error::{CudaError, NOT_SUPPORTED};
use crate::event::Event;
use crate::functions::Address;
use crate::registered::RegisteredPool;
use crate::staging::Staging;
use crate::stream::Stream;
use crate::transfer::Transfer;

/// The buffers for slabs that are not registered: copies of these wait for each other.
const STAGING_BYTES: usize = 256 << 10;
const STAGING_COUNT: usize = 2;

/// One copy, with what it reads and writes. Both sides have one length.
#[derive(Debug)]
pub enum Copy {
    /// From a slab to the device.
    ToDevice {
        /// The slab.
        source: HostSlab,
        /// Where its bytes go.
        target: DevicePiece,
    },
    /// From the device to a slab.
    ToHost {
        /// The bytes.
        source: DevicePiece,
        /// The slab.
        target: HostSlabMut,
    },
    /// Within the memory of the device.
    Within {
        /// The bytes.
        source: DevicePiece,
        /// Where they go.
        target: DevicePiece,
    },
}

/// Copies by one stream of its own.
#[derive(Debug)]
pub struct Copier(Arc<Inner>);

struct Inner {
    stream: Stream,
    pool: Arc<RegisteredPool>,
    staging: Staging,
    batch: Option<BatchForm>,
    /// Whether the driver has a batched copy and refused it.
    batch_is_refused: AtomicBool,
    /// Copies that their callers no longer wait for.
    parked: LeafMutex<Vec<Flight<Box<dyn Any + Send>>>>,
}

/// Copies that the device may still make, with what they use.
#[derive(Debug)]
struct Flight<T> {
    used: T,
    /// None if it could not be recorded: then the whole stream has to be over.
    event: Option<Event>,
}

/// Copies that were submitted, with what they use. If it is dropped, that is freed once the copies
/// are over.
#[derive(Debug)]
pub struct Pending<T: Send + 'static = Vec<Copy>> {
    inner: Arc<Inner>,
    flight: Option<Flight<T>>,
}

impl Copier {
    /// A copier for slabs of a registered pool.
    ///
    /// # Errors
    /// If the driver refuses the stream or the small buffers.
    pub fn new(context: &Arc<Context>, pool: Arc<RegisteredPool>) -> Result<Self, CudaError> {
        let stream = Stream::new(context)?;
        let staging = Staging::new(context, STAGING_BYTES, STAGING_COUNT)?;
        let batch = BatchForm::of(context.driver());
        let batch_is_refused = AtomicBool::new(false);
        let parked = LeafMutex::default();
        Ok(Self(Arc::new(Inner { stream, pool, staging, batch, batch_is_refused, parked })))
    }

    /// The form of the batched copy in use; none if each copy is one call.
    pub fn batch_form(&self) -> Option<BatchForm> {
        // Relaxed: a thread that reads the old value is refused again.
        self.0.batch.filter(|_| !self.0.batch_is_refused.load(Ordering::Relaxed))
    }

    /// Its stream, for work that has to wait for its copies.
    pub fn stream(&self) -> &Stream {
        &self.0.stream
    }

    /// Starts copies once the work before `after` is over. Without it they run beside all work of
    /// other streams, also beside what writes their sources.
    ///
    /// Copies of a part of the pool that is not registered are made before it returns.
    ///
    /// # Errors
    /// If a length or a slab is wrong, or the driver refuses. Copies that had started go on, and
    /// their slabs are freed once they are over.
    pub fn submit(
        &self,
        mut copies: Vec<Copy>,
        after: Option<&Event>,
    ) -> Result<Pending, CudaError> {
        let plan = self.0.plan(&mut copies)?;
        self.submit_plan(plan, copies, after)
    }

    /// Starts the copies of a transfer, as [`Copier::submit`] does.
    ///
    /// # Errors
    /// If a fragment does not lie in its slab or in the device's memory, or the driver refuses.
    pub fn submit_transfer(
        &self,
        mut transfer: Transfer,
        after: Option<&Event>,
    ) -> Result<Pending<Transfer>, CudaError> {
        let mut plan = Plan::default();
        transfer.plan(&self.0.pool, &mut plan)?;
        self.submit_plan(plan, transfer, after)
    }

    /// Starts copies that use nothing but `used`.
    fn submit_plan<T: Send + 'static>(
        &self,
        plan: Plan,
        used: T,
        after: Option<&Event>,
    ) -> Result<Pending<T>, CudaError> {
        self.0.sweep();
        let flight = Some(Flight { used, event: None });
        // Before the first copy starts: from then on, its drop keeps what they use.
        let mut pending = Pending { inner: Arc::clone(&self.0), flight };
        let stream = &self.0.stream;
        let event = stream.context().with(|| {
            after.map_or(Ok(()), |event| stream.wait_for(event))?;
            self.start(plan)?;
            stream.record()
        })?;
        if let Some(flight) = &mut pending.flight {
            flight.event = Some(event);
        }
        Ok(pending)
    }

    /// Waits until all copies that were ever submitted are over, also those of failed submissions.
    /// If they are not in time, the context is lost: then nobody uses what they write.
    pub fn drain(&self) {
        let stream = &self.0.stream;
        let context = stream.context();
        let drained = context.wait("copies", context.deadline(), || stream.is_idle());
        if let Err(error) = drained {
            context.lose(error);
        }
    }

    fn start(&self, mut plan: Plan) -> Result<(), CudaError> {
        let inner = &*self.0;
        let context = inner.stream.context();
        let mut first = 0;
        while let Some(form) = self.batch_form().filter(|_| first + 1 < plan.batch.lengths.len()) {
            // SAFETY: the flight holds both sides of each copy until it is over.
            match unsafe { plan.batch.start(form, &inner.stream, first) } {
                Ok(count) => first += count,
                Err(CudaError::Call(error)) if error.code == NOT_SUPPORTED => {
                    inner.batch_is_refused.store(true, Ordering::Relaxed);
                }
                Err(error) => return Err(error),
            }
        }
        for (at, direction) in plan.directions.iter().enumerate().skip(first) {
            let (target, source) = (plan.batch.targets[at], plan.batch.sources[at]);
            inner.start_one(*direction, target, source, plan.batch.lengths[at])?;
        }
        for staged in plan.staged {
            let deadline = context.deadline();
            match staged {
                Staged::ToDevice { target, source, bytes } => {
                    // SAFETY: the flight holds the slab, which nothing writes.
                    let source = unsafe { std::slice::from_raw_parts(source.as_ptr(), bytes) };
                    inner.staging.copy_in(&inner.stream, target, source, deadline)?;
                }
                Staged::ToHost { target, source, bytes } => {
                    // SAFETY: the flight holds the slab, which nothing else accesses.
                    let target = unsafe { std::slice::from_raw_parts_mut(target.as_ptr(), bytes) };
                    inner.staging.copy_out(&inner.stream, source, target, deadline)?;
                }
            }
        }
        Ok(())
    }
}

/// What the copies of a submission become.
#[derive(Default)]
pub(crate) struct Plan {
    batch: Batch,
    /// The direction of each copy of the batch.
    directions: Vec<Direction>,
    staged: Vec<Staged>,
}

#[derive(Debug, Clone, Copy)]
enum Direction {
    ToDevice,
    ToHost,
    Within,
}

/// A part of a slab that is not registered.
enum Staged {
    ToDevice { target: Address, source: NonNull<u8>, bytes: usize },
    ToHost { source: Address, target: NonNull<u8>, bytes: usize },
}

impl Inner {
    fn plan(&self, copies: &mut [Copy]) -> Result<Plan, CudaError> {
        let mut plan = Plan::default();
        for copy in copies {
            match copy {
                Copy::ToDevice { source, target } => {
                    check_lengths(source.len(), target.bytes())?;
                    let parts = self.pool.parts(source)?;
                    let start = NonNull::from(&**source).cast::<u8>();
                    for (part, is_registered) in parts {
                        plan.add_to_device(target.address(), start, part, is_registered);
                    }
                }
                Copy::ToHost { source, target } => {
                    check_lengths(source.bytes(), target.len())?;
                    let parts = self.pool.parts(target)?;
                    let start = NonNull::from(&mut **target).cast::<u8>();
                    for (part, is_registered) in parts {
                        plan.add_to_host(source.address(), start, part, is_registered);
                    }
                }
                Copy::Within { source, target } => {
                    check_lengths(source.bytes(), target.bytes())?;
                    plan.directions.push(Direction::Within);
                    plan.batch.push(target.address(), source.address(), source.bytes());
                }
            }
        }
        Ok(plan)
    }

    fn start_one(
        &self,
        direction: Direction,
        target: Address,
        source: Address,
        bytes: usize,
    ) -> Result<(), CudaError> {
        let stream = &self.stream;
        match direction {
            Direction::ToDevice => {
                // SAFETY: the flight holds the slab and the device's memory until it is over.
                unsafe { stream.copy_to_device(target, host_pointer(source)?, bytes) }
            }
            Direction::ToHost => {
                // SAFETY: as above; nothing else accesses the slab.
                unsafe { stream.copy_to_host(host_pointer(target)?, source, bytes) }
            }
            // SAFETY: the flight holds both pieces until it is over.
            Direction::Within => unsafe { stream.copy_within(target, source, bytes) },
        }
    }

    fn is_over<T>(&self, flight: &Flight<T>) -> Result<bool, CudaError> {
        flight.event.as_ref().map_or_else(|| self.stream.is_idle(), Event::is_over)
    }

    /// Frees the slabs of parked copies that are over.
    fn sweep(&self) {
        let mut parked = self.parked.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = std::mem::take(&mut *parked);
        let (over, kept) = kept.into_iter().partition(|it| self.is_over(it).unwrap_or(false));
        *parked = kept;
        drop(parked);
        let over: Vec<_> = over;
        drop(over);
    }

    fn park(&self, flight: Flight<Box<dyn Any + Send>>) {
        self.parked.lock().unwrap_or_else(PoisonError::into_inner).push(flight);
    }
}

impl Plan {
    pub(crate) fn add_to_device(
        &mut self,
        to: Address,
        from: NonNull<u8>,
        part: Range<usize>,
        direct: bool,
    ) {
        let (target, bytes) = (to + part.start as Address, part.len());
        let source = offset(from, part.start);
        if direct {
            self.directions.push(Direction::ToDevice);
            self.batch.push(target, source.as_ptr().expose_provenance() as Address, bytes);
        } else {
            self.staged.push(Staged::ToDevice { target, source, bytes });
        }
    }

    pub(crate) fn add_to_host(
        &mut self,
        from: Address,
        to: NonNull<u8>,
        part: Range<usize>,
        direct: bool,
    ) {
        let (source, bytes) = (from + part.start as Address, part.len());
        let target = offset(to, part.start);
        if direct {
            self.directions.push(Direction::ToHost);
            self.batch.push(target.as_ptr().expose_provenance() as Address, source, bytes);
        } else {
            self.staged.push(Staged::ToHost { source, target, bytes });
        }
    }
}

/// A place in a slab.
fn offset(start: NonNull<u8>, offset: usize) -> NonNull<u8> {
    // SAFETY: parts of a slab lie in it.
    unsafe { start.add(offset) }
}

/// The pointer of a host address that a plan exposed.
fn host_pointer(address: Address) -> Result<NonNull<u8>, CudaError> {
    let address = usize::try_from(address).unwrap_or_default();
    let pointer = std::ptr::with_exposed_provenance_mut::<u8>(address);
    NonNull::new(pointer).ok_or(CudaError::OtherPool)
}

fn check_lengths(source_bytes: usize, target_bytes: usize) -> Result<(), CudaError> {
    if source_bytes == target_bytes {
        Ok(())
    } else {
        Err(CudaError::Lengths { source_bytes, target_bytes })
    }
}

impl<T: Send + 'static> Pending<T> {
    /// Makes all later work of a stream wait for these copies.
    ///
    /// # Errors
    /// If the driver refuses: then the stream does not wait.
    pub fn hold_back(&self, stream: &Stream) -> Result<(), CudaError> {
        let event = self.flight.as_ref().and_then(|flight| flight.event.as_ref());
        event.map_or(Ok(()), |event| stream.wait_for(event))
    }

    /// Whether all copies are over.
    ///
    /// # Errors
    /// If the device failed.
    pub fn is_over(&self) -> Result<bool, CudaError> {
        self.flight.as_ref().map_or(Ok(true), |flight| self.inner.is_over(flight))
    }

    /// Waits until all copies are over and gives back what they used; none if that was given back
    /// before.
    ///
    /// # Errors
    /// If the device failed, or they are not over at the deadline. They may be waited for again.
    pub fn wait(&mut self, deadline: Deadline) -> Result<Option<T>, CudaError> {
        let context = self.inner.stream.context();
        context.wait("copies", deadline, || self.is_over())?;
        Ok(self.flight.take().map(|flight| flight.used))
    }
}

impl<T: Send + 'static> Drop for Pending<T> {
    fn drop(&mut self) {
        if let Some(Flight { used, event }) = self.flight.take() {
            self.inner.park(Flight { used: Box::new(used), event });
            self.inner.sweep();
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let parked = self.parked.get_mut().unwrap_or_else(PoisonError::into_inner);
        let parked = std::mem::take(parked);
        let context = Arc::clone(self.stream.context());
        for flight in parked {
            let over = context.wait("copies", context.deadline(), || self.is_over(&flight));
            if let Err(error) = over {
                context.lose(error);
                abandoned::keep((flight, Arc::clone(&self.pool)));
            }
        }
    }
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Copier").field("batch", &self.batch).finish_non_exhaustive()
    }
}
