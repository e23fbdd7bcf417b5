//! Copies between slabs in host memory and pieces of device memory, in the order of a stream.
//!
//! A copy in flight owns its slabs: they come back from [`Pending::wait`] and nowhere else, so no
//! other code reads or reuses them before the device is done, also if the caller gives up.
#![expect(unsafe_code, reason = "starts copies of memory that they own until they are over")]

use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use cascade_memory::{HostSlab, HostSlabMut};
use cascade_runtime::{Deadline, LeafMutex};

use crate::abandoned;
use crate::allocation::DevicePiece;
use crate::batch::{BatchForm, Batcher, Sides};
use crate::context::Context;
use crate::copy_plan::{Plan, Staged};
use crate::costs::Costs;
use crate::cuda_memory::CudaMemory;
use crate::error::CudaError;
use crate::event::Event;
use crate::functions::Address;
use crate::kernel::FRAGMENTS_MAX;
use crate::plan::{Borders, Call, CopyPlan, Direction, Limits, PlannedCopy, Way, plan_by};
use crate::pool_side::{PoolSide, plan_on_device};
use crate::registered::RegisteredPool;
use crate::staging::Staging;
use crate::stream::Stream;
use crate::transfer::Transfer;
use crate::ways::{Launch, Loan, Route, SLICE_BYTES, Ways, sides};

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
    pool: PoolSide,
    staging: Staging,
    batcher: Batcher,
    /// None if all copies are direct.
    ways: Option<Arc<Ways>>,
    /// Why there are no kernels, though there is a table of costs.
    kernel_refusal: Option<CudaError>,
    /// Copies that their callers no longer wait for.
    parked: LeafMutex<Vec<Flight<Box<dyn Any + Send>>>>,
}

/// Copies that the device may still make, with what they use.
#[derive(Debug)]
struct Flight<T> {
    used: T,
    /// Before the first copy; none if they are not timed.
    started: Option<Event>,
    /// None if it could not be recorded: then the whole stream has to be over.
    event: Option<Arc<Event>>,
    /// Lists that kernels read.
    loan: Loan,
    /// When they were started; none if that failed.
    started_at: Option<Duration>,
}

/// Copies that were submitted, with what they use. If it is dropped, that is freed once the copies
/// are over.
#[derive(Debug)]
pub struct Pending<T: Send + 'static = Vec<Copy>> {
    inner: Arc<Inner>,
    flight: Option<Flight<T>>,
    /// Once the flight is taken.
    copy_time: Option<Duration>,
}

impl Copier {
    /// A copier for slabs of a registered pool.
    ///
    /// # Errors
    /// If the driver refuses the stream or the small buffers.
    pub fn new(context: &Arc<Context>, pool: Arc<RegisteredPool>) -> Result<Self, CudaError> {
        Self::build(context, PoolSide::Host(pool), None, None)
    }

    /// A copier for slabs of a pool on a device, which is mapped for this context. The pool may be
    /// on another device. All copies are direct.
    ///
    /// # Errors
    /// If the pool is mapped for another context, or as [`Copier::new`].
    pub fn for_device_pool(
        context: &Arc<Context>,
        pool: &Arc<CudaMemory>,
    ) -> Result<Self, CudaError> {
        Self::build(context, PoolSide::of_device(context, pool)?, None, None)
    }

    /// As [`Copier::for_device_pool`], but our kernel makes all copies of transfers. It uses most
    /// of the device while it runs.
    ///
    /// # Errors
    /// As [`Copier::for_device_pool`], and if the driver lacks what kernels need.
    pub fn for_device_pool_by_kernel(
        context: &Arc<Context>,
        pool: &Arc<CudaMemory>,
    ) -> Result<Self, CudaError> {
        let ways = Arc::new(Ways::on_device(context)?);
        Self::build(context, PoolSide::of_device(context, pool)?, Some(ways), None)
    }

    /// A copier whose transfers take the fastest way by a table of costs. Where the driver refuses
    /// the kernel or the memory for it, all copies are direct, see [`Copier::kernel_refusal`].
    ///
    /// # Errors
    /// As [`Copier::new`].
    pub fn with_costs(
        context: &Arc<Context>,
        pool: Arc<RegisteredPool>,
        costs: Costs,
    ) -> Result<Self, CudaError> {
        match Ways::new(context, costs, None) {
            Ok(ways) => Self::build(context, PoolSide::Host(pool), Some(Arc::new(ways)), None),
            Err(error) => Self::build(context, PoolSide::Host(pool), None, Some(error)),
        }
    }

    /// A copier whose transfers take one way, also where another one is faster: for measurements
    /// and tests. What this way cannot copy is direct: fragments of more than 4 MiB are never
    /// staged. The table serves for the estimates of [`Copier::planned`].
    ///
    /// # Errors
    /// As [`Copier::new`], and if the driver lacks what this way needs.
    pub fn with_way(
        context: &Arc<Context>,
        pool: Arc<RegisteredPool>,
        way: Way,
        costs: Option<Costs>,
    ) -> Result<Self, CudaError> {
        if way == Way::Direct && costs.is_none() {
            return Self::new(context, pool);
        }
        let ways = match Ways::new(context, costs.unwrap_or_else(Costs::unknown), Some(way)) {
            Ok(ways) => ways,
            Err(error) if way == Way::Direct => {
                return Self::build(context, PoolSide::Host(pool), None, Some(error));
            }
            Err(error) => return Err(error),
        };
        if way == Way::Mapped && pool.device_addresses(&pool.borders()).is_none() {
            return Err(CudaError::NotMapped);
        }
        Self::build(context, PoolSide::Host(pool), Some(Arc::new(ways)), None)
    }

    fn build(
        context: &Arc<Context>,
        pool: PoolSide,
        ways: Option<Arc<Ways>>,
        kernel_refusal: Option<CudaError>,
    ) -> Result<Self, CudaError> {
        let stream = Stream::new(context)?;
        let staging = Staging::new(context, STAGING_BYTES, STAGING_COUNT)?;
        let batcher = Batcher::new(context.driver());
        let parked = LeafMutex::default();
        let inner = Inner { stream, pool, staging, batcher, ways, kernel_refusal, parked };
        Ok(Self(Arc::new(inner)))
    }

    /// Why it copies without kernels, though it was given a table of costs.
    pub fn kernel_refusal(&self) -> Option<&CudaError> {
        self.0.kernel_refusal.as_ref()
    }

    /// The form of the batched copy in use; none if each copy is one call.
    pub fn batch_form(&self) -> Option<BatchForm> {
        self.0.batcher.form()
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
        self.submit_plan(plan, copies, after, false)
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
        let plan = self.0.plan_transfer(&mut transfer)?;
        self.submit_plan(plan, transfer, after, false)
    }

    /// As [`Copier::submit_transfer`]; the device measures the copies, see
    /// [`Pending::copy_time`].
    ///
    /// # Errors
    /// As [`Copier::submit_transfer`].
    pub fn submit_timed(
        &self,
        mut transfer: Transfer,
        after: Option<&Event>,
    ) -> Result<Pending<Transfer>, CudaError> {
        let plan = self.0.plan_transfer(&mut transfer)?;
        self.submit_plan(plan, transfer, after, true)
    }

    /// What it would submit for a transfer now, and the time of that by its table.
    ///
    /// # Errors
    /// If a fragment does not lie in its slab or in the device's memory.
    pub fn planned(&self, transfer: &mut Transfer) -> Result<CopyPlan, CudaError> {
        let (direction, copies) = transfer.copies(&self.0.pool)?;
        let pool = self.0.pool.host()?;
        let borders = pool.borders();
        let addresses = self.0.device_addresses(pool, &borders);
        self.0.choose(direction, &copies, &borders, addresses.is_some())
    }

    /// Starts copies that use nothing but `used`.
    fn submit_plan<T: Send + 'static>(
        &self,
        plan: Plan,
        used: T,
        after: Option<&Event>,
        is_timed: bool,
    ) -> Result<Pending<T>, CudaError> {
        self.0.sweep();
        let loan = Loan::new(self.0.ways.as_ref());
        let flight = Flight { used, started: None, event: None, loan, started_at: None };
        // Before the first copy starts: from then on, its drop keeps what they use.
        let inner = Arc::clone(&self.0);
        let mut pending = Pending { inner, flight: Some(flight), copy_time: None };
        let stream = &self.0.stream;
        if let Some(flight) = &mut pending.flight {
            let (context, submission) = (stream.context(), plan.submission());
            let started = context.with(|| {
                after.map_or(Ok(()), |event| stream.wait_for(event))?;
                if is_timed {
                    flight.started = Some(stream.record_timed()?);
                }
                self.start(plan, &mut flight.loan)?;
                if is_timed { stream.record_timed() } else { stream.record() }.map(Arc::new)
            });
            flight.event = Some(started.inspect_err(|_| context.copy_counts().fail())?);
            flight.started_at = Some(context.clock().monotonic());
            context.copy_counts().begin(&submission);
        }
        Ok(pending)
    }

    /// Waits until all copies that were ever submitted are over, also those of failed submissions.
    /// If they are not over in time, the context counts as lost, and all later calls fail.
    pub fn drain(&self) {
        let context = self.0.stream.context();
        let drained = context.wait("copies", context.deadline(), || self.0.is_idle());
        if let Err(error) = drained {
            context.lose(error);
        }
    }

    /// Starts copies. They use `loan` until the flight is over.
    fn start(&self, mut plan: Plan, loan: &mut Loan) -> Result<(), CudaError> {
        let inner = &*self.0;
        let stream = &inner.stream;
        let ways = inner.ways.as_ref().filter(|_| !plan.kernels.is_empty());
        if let Some(ways) = ways {
            ways.begin(stream)?;
        }
        // SAFETY: the flight holds both sides of each copy until it is over.
        unsafe { inner.batcher.start(stream, &mut plan.batch) }?;
        if let Some(ways) = ways {
            let pool = inner.pool.host().ok().map(|pool| &**pool);
            let route = Route { pool, main: stream, batcher: &inner.batcher };
            // SAFETY: as above, and the flight holds the loan.
            unsafe { ways.start(&route, &plan.kernels, loan) }?;
        }
        for staged in plan.staged {
            let deadline = stream.context().deadline();
            match staged {
                Staged::ToDevice { target, source, bytes } => {
                    // SAFETY: the flight holds the slab, which nothing writes.
                    let source = unsafe { std::slice::from_raw_parts(source.as_ptr(), bytes) };
                    inner.staging.copy_in(stream, target, source, deadline)?;
                }
                Staged::ToHost { target, source, bytes } => {
                    // SAFETY: the flight holds the slab, which nothing else accesses.
                    let target = unsafe { std::slice::from_raw_parts_mut(target.as_ptr(), bytes) };
                    inner.staging.copy_out(stream, source, target, deadline)?;
                }
            }
        }
        Ok(())
    }
}

impl Inner {
    fn plan(&self, copies: &mut [Copy]) -> Result<Plan, CudaError> {
        let mut plan = Plan::default();
        for copy in copies {
            match copy {
                Copy::ToDevice { source, target } => {
                    check_lengths(source.len(), target.bytes())?;
                    let parts = self.pool.host()?.parts(source)?;
                    let start = NonNull::from(&**source).cast::<u8>();
                    for (part, is_registered) in parts {
                        plan.add_to_device(target.address(), start, part, is_registered);
                    }
                }
                Copy::ToHost { source, target } => {
                    check_lengths(source.bytes(), target.len())?;
                    let parts = self.pool.host()?.parts(target)?;
                    let start = NonNull::from(&mut **target).cast::<u8>();
                    for (part, is_registered) in parts {
                        plan.add_to_host(source.address(), start, part, is_registered);
                    }
                }
                Copy::Within { source, target } => {
                    check_lengths(source.bytes(), target.bytes())?;
                    let (target, source, bytes) =
                        (target.address(), source.address(), source.bytes());
                    plan.batch.push(Sides::Within, target, source, bytes);
                }
            }
        }
        Ok(plan)
    }

    /// Plans the copies of a transfer by the table of costs, if there is one.
    fn plan_transfer(&self, transfer: &mut Transfer) -> Result<Plan, CudaError> {
        let (direction, copies) = transfer.copies(&self.pool)?;
        let pool = match &self.pool {
            PoolSide::Host(pool) => pool,
            PoolSide::Device(pool) => {
                return plan_on_device(
                    pool,
                    direction,
                    &copies,
                    &self.limits(),
                    self.ways.is_some(),
                );
            }
        };
        let borders = pool.borders();
        let addresses = self.device_addresses(pool, &borders);
        let planned = self.choose(direction, &copies, &borders, addresses.is_some())?;
        let mut plan = Plan::default();
        for call in planned.calls {
            match call {
                Call::Direct(copies) => plan.add(pool, direction, &copies),
                Call::Unregistered(copies) => plan.add_staged(pool, direction, &copies)?,
                Call::Staged(slice) => plan.kernels.push(Launch::Staged(direction, slice)),
                Call::Mapped(copies) => {
                    let mapped = copies.iter().map(|copy| {
                        let piece = copy.offset / borders.piece_bytes;
                        let first = addresses.as_ref().and_then(|it| it.get(piece));
                        let first = first.ok_or(CudaError::OtherPool)?;
                        let host = first + (copy.offset % borders.piece_bytes) as Address;
                        Ok(sides(direction, host, copy))
                    });
                    plan.kernels
                        .push(Launch::Mapped(direction, mapped.collect::<Result<_, CudaError>>()?));
                }
            }
        }
        Ok(plan)
    }

    /// The addresses of the pool for kernels, if there are kernels.
    fn device_addresses(&self, pool: &RegisteredPool, borders: &Borders) -> Option<Vec<Address>> {
        self.ways.as_ref().and_then(|_| pool.device_addresses(borders))
    }

    fn limits(&self) -> Limits {
        Limits {
            copies_per_call: self.batcher.copies_per_call(),
            fragments_per_launch: FRAGMENTS_MAX,
            slice_bytes: SLICE_BYTES,
        }
    }

    fn choose(
        &self,
        direction: Direction,
        copies: &[PlannedCopy],
        borders: &Borders,
        is_mapped: bool,
    ) -> Result<CopyPlan, CudaError> {
        let costs = self.ways.as_ref().and_then(|ways| ways.costs(is_mapped));
        let only = self.ways.as_ref().and_then(|ways| ways.only);
        plan_by(direction, copies, borders, &self.limits(), costs, only)
    }

    fn is_over<T>(&self, flight: &Flight<T>) -> Result<bool, CudaError> {
        flight.event.as_ref().map_or_else(|| self.is_idle(), |event| event.is_over())
    }

    /// Whether nothing is left to do, also for kernels that no event of the copier covers.
    fn is_idle(&self) -> Result<bool, CudaError> {
        let kernels_are_over = self.ways.as_ref().map_or(Ok(true), |ways| ways.is_idle())?;
        Ok(kernels_are_over && self.stream.is_idle()?)
    }

    /// Frees the slabs of parked copies that are over.
    fn sweep(&self) {
        let mut parked = self.parked.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = std::mem::take(&mut *parked);
        let (over, kept) = kept.into_iter().partition(|it| self.is_over(it).unwrap_or(false));
        *parked = kept;
        drop(parked);
        let over: Vec<_> = over;
        for flight in &over {
            self.count_end(flight);
        }
        drop(over);
    }

    /// Counts the end of copies that are over.
    fn count_end<T>(&self, flight: &Flight<T>) {
        let context = self.stream.context();
        if let Some(started_at) = flight.started_at {
            context.copy_counts().end(context.clock().monotonic().saturating_sub(started_at));
        }
    }

    fn park(&self, flight: Flight<Box<dyn Any + Send>>) {
        self.parked.lock().unwrap_or_else(PoisonError::into_inner).push(flight);
    }
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

    /// Waits until all copies are over and gives back what they used. The second call gives back
    /// nothing.
    ///
    /// # Errors
    /// If the device failed, or they are not over at the deadline. They may be waited for again.
    pub fn wait(&mut self, deadline: Deadline) -> Result<Option<T>, CudaError> {
        let context = self.inner.stream.context();
        context.wait("copies", deadline, || self.is_over())?;
        // A time that the driver does not tell fails no copies that are over.
        self.copy_time = self.copy_time().ok().flatten();
        let flight = self.flight.take();
        Ok(flight.map(|flight| {
            self.inner.count_end(&flight);
            flight.used
        }))
    }

    /// The end of the copies, for threads that wait for it at the same time. None once
    /// [`Pending::wait`] has given back what they used.
    pub fn end(&self) -> Option<Arc<Event>> {
        self.flight.as_ref().and_then(|flight| flight.event.clone())
    }

    /// How long the device made these copies, once they are over: from the end of what they waited
    /// for, earlier copies of the copier included, to their own end. None if they are not timed, or
    /// the driver cannot tell.
    ///
    /// # Errors
    /// If they are not over, or the device failed.
    pub fn copy_time(&self) -> Result<Option<Duration>, CudaError> {
        let events = self.flight.as_ref().map(|flight| (&flight.started, &flight.event));
        match events {
            Some((Some(started), Some(ended))) => ended.time_since(started),
            Some(_) => Ok(None),
            None => Ok(self.copy_time),
        }
    }
}

impl<T: Send + 'static> Drop for Pending<T> {
    fn drop(&mut self) {
        if let Some(Flight { used, started, event, loan, started_at }) = self.flight.take() {
            let used = Box::new(used);
            self.inner.park(Flight { used, started, event, loan, started_at });
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
            match over {
                Ok(()) => self.count_end(&flight),
                Err(error) => {
                    context.lose(error);
                    abandoned::keep((flight, self.pool.clone()));
                }
            }
        }
    }
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Copier").field("batcher", &self.batcher).finish_non_exhaustive()
    }
}
