//! The ways of copying that need a kernel: through a buffer on the device, and on mapped memory.
//!
//! Kernels have a stream of their own, so that the driver's copies go on while a kernel waits for
//! room on the device. It begins after all earlier work of the main stream, and the main stream
//! waits for it in the end: an event there covers both.
#![expect(unsafe_code, reason = "starts copies and kernels for a caller that holds the memory")]

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};

use cascade_runtime::{LeafMutex, Mutex};

use crate::allocation::DeviceAllocation;
use crate::batch::{Batch, Batcher, Sides};
use crate::context::Context;
use crate::copy_counts::Submission;
use crate::costs::Costs;
use crate::error::CudaError;
use crate::event::Event;
use crate::functions::Address;
use crate::kernel::{BLOCKS, BLOCKS_ON_DEVICE, Kernel, List};
use crate::plan::{Direction, PlannedCopy, Slice, Way};
use crate::registered::RegisteredPool;
use crate::stream::Stream;

/// A buffer on the device, and how many there are: while one is filled, another is emptied.
pub(crate) const SLICE_BYTES: usize = 4 << 20;
const SLICE_COUNT: usize = 4;
/// Lists that are kept for later launches, of 96 KiB each.
const LISTS_KEPT: usize = 32;

/// Target, source and length of a copy.
pub(crate) type Addresses = (Address, Address, usize);

/// Something that needs a kernel.
#[derive(Debug)]
pub(crate) enum Launch {
    /// Copies of mapped memory.
    Mapped(Direction, Vec<Addresses>),
    /// Copies through a buffer.
    Staged(Direction, Slice),
    /// Copies within the memory of devices, divided into pieces. `copies` of them begin here.
    Within { pieces: Vec<Addresses>, copies: u64 },
}

impl Launch {
    /// Adds its copies to those of a submission; each once, though a staged copy is moved twice.
    pub(crate) fn count(&self, submission: &mut Submission) {
        match self {
            Self::Mapped(direction, copies) => {
                let count = submission.in_direction(*direction);
                for (.., bytes) in copies {
                    count.add(*bytes);
                }
            }
            Self::Staged(direction, slice) => {
                let count = submission.in_direction(*direction);
                for copy in &slice.fragments {
                    count.add(copy.bytes);
                }
            }
            Self::Within { pieces, copies } => {
                let count = &mut submission.within;
                count.copies += copies;
                count.bytes += pieces.iter().map(|(.., bytes)| *bytes as u64).sum::<u64>();
            }
        }
    }
}

/// Where the driver's own copies of a slice go.
#[derive(Debug)]
pub(crate) struct Route<'a> {
    /// None if the pool is on a device: then nothing is staged.
    pub(crate) pool: Option<&'a RegisteredPool>,
    pub(crate) main: &'a Stream,
    pub(crate) batcher: &'a Batcher,
}

/// The kernel, its stream and its buffers.
pub(crate) struct Ways {
    /// The way of all copies that can take it; none if the table decides.
    pub(crate) only: Option<Way>,
    costs: Costs,
    /// The same without mapped memory, for pools that the device cannot map.
    unmapped: Costs,
    kernel: Kernel,
    /// Blocks of a launch.
    blocks: u32,
    stream: Stream,
    /// Locked from the first call about a buffer to the last.
    ring: Mutex<Ring>,
    lists: LeafMutex<Vec<List>>,
    /// Whether the events of a buffer may be wrong, after an error: no buffer is used again.
    is_broken: AtomicBool,
}

/// The buffers, in turn. There are none for a pool on a device.
struct Ring {
    buffers: Vec<Buffer>,
    next: usize,
}

struct Buffer {
    memory: Arc<DeviceAllocation>,
    /// After the copies to it.
    filled: Event,
    /// After the copies from it.
    emptied: Event,
}

impl Ways {
    /// Loads the kernel and takes memory.
    ///
    /// # Errors
    /// If the driver lacks a function or refuses.
    pub(crate) fn new(
        context: &Arc<Context>,
        costs: Costs,
        only: Option<Way>,
    ) -> Result<Self, CudaError> {
        Self::build(context, costs, only, (SLICE_COUNT, BLOCKS))
    }

    /// Loads the kernel for copies within the memory of devices, which need no buffers.
    ///
    /// # Errors
    /// As [`Ways::new`].
    pub(crate) fn on_device(context: &Arc<Context>) -> Result<Self, CudaError> {
        Self::build(context, Costs::unknown(), Some(Way::Mapped), (0, BLOCKS_ON_DEVICE))
    }

    fn build(
        context: &Arc<Context>,
        costs: Costs,
        only: Option<Way>,
        (buffers, blocks): (usize, u32),
    ) -> Result<Self, CudaError> {
        let kernel = Kernel::load(context)?;
        let buffer = |_| {
            let memory = DeviceAllocation::new(context, SLICE_BYTES)?;
            Ok(Buffer { memory, filled: Event::new(context)?, emptied: Event::new(context)? })
        };
        let buffers = (0..buffers).map(buffer).collect::<Result<Vec<_>, CudaError>>()?;
        let mut unmapped = costs.clone();
        unmapped.to_device.mapped = None;
        unmapped.to_host.mapped = None;
        Ok(Self {
            only,
            costs,
            unmapped,
            kernel,
            blocks,
            stream: Stream::new(context)?,
            ring: Mutex::new(Ring { buffers, next: 0 }),
            lists: LeafMutex::new(vec![List::new(context)?]),
            is_broken: AtomicBool::new(false),
        })
    }

    /// The table to plan by; none if kernels are no longer used.
    pub(crate) fn costs(&self, is_mapped: bool) -> Option<&Costs> {
        // Relaxed: who reads the old value is refused by `staged`.
        let is_broken = self.is_broken.load(Ordering::Relaxed);
        (!is_broken).then_some(if is_mapped { &self.costs } else { &self.unmapped })
    }

    /// Whether all kernels are over.
    pub(crate) fn is_idle(&self) -> Result<bool, CudaError> {
        self.stream.is_idle()
    }

    /// Makes later kernels wait for all work of the main stream so far.
    pub(crate) fn begin(&self, main: &Stream) -> Result<(), CudaError> {
        self.stream.wait_for(&main.record()?)
    }

    /// Starts copies, and makes the main stream wait for them.
    ///
    /// # Safety
    /// As `Stream::copy_to_device` and `Stream::copy_to_host`, for each copy; the loan lives as
    /// long.
    pub(crate) unsafe fn start(
        &self,
        route: &Route<'_>,
        launches: &[Launch],
        loan: &mut Loan,
    ) -> Result<(), CudaError> {
        for launch in launches {
            match launch {
                // SAFETY: the caller's promise.
                Launch::Mapped(_, copies) => unsafe { self.launch(copies, loan) }?,
                // SAFETY: the caller's promise.
                Launch::Within { pieces, .. } => unsafe { self.launch(pieces, loan) }?,
                Launch::Staged(direction, slice) => {
                    // SAFETY: the caller's promise.
                    unsafe { self.stage(route, *direction, slice, loan) }?;
                }
            }
        }
        route.main.wait_for(&self.stream.record()?)
    }

    /// Starts a kernel.
    ///
    /// # Safety
    /// As `start`.
    unsafe fn launch(&self, copies: &[Addresses], loan: &mut Loan) -> Result<(), CudaError> {
        let kept = self.lists.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut list = match kept {
            Some(list) => list,
            None => List::new(self.stream.context())?,
        };
        list.fill(copies);
        // Also after an error the kernel may have started: the loan keeps the list.
        // SAFETY: the caller's promise for the copies; the list goes to the loan unchanged.
        let launched = unsafe { self.kernel.launch(&self.stream, &list, self.blocks) };
        loan.lists.push(list);
        launched
    }

    /// Starts the copies of a slice.
    ///
    /// # Safety
    /// As `start`.
    unsafe fn stage(
        &self,
        route: &Route<'_>,
        direction: Direction,
        slice: &Slice,
        loan: &mut Loan,
    ) -> Result<(), CudaError> {
        let mut ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        if self.is_broken.load(Ordering::Relaxed) {
            return Err(CudaError::Broken);
        }
        let at = ring.next;
        let Some(buffer) = ring.buffers.get(at) else { return Err(CudaError::Broken) };
        let next = (at + 1) % ring.buffers.len();
        // SAFETY: the caller's promise.
        let staged = unsafe { self.stage_by(buffer, route, direction, slice, loan) };
        ring.next = next;
        if staged.is_err() {
            self.is_broken.store(true, Ordering::Relaxed);
        }
        staged
    }

    /// Fills and empties a buffer. The caller holds the lock of the buffers.
    ///
    /// # Safety
    /// As `start`.
    unsafe fn stage_by(
        &self,
        buffer: &Buffer,
        route: &Route<'_>,
        direction: Direction,
        slice: &Slice,
        loan: &mut Loan,
    ) -> Result<(), CudaError> {
        let base = buffer.memory.base();
        let pool = route.pool.ok_or(CudaError::OtherPool)?;
        let mut batch = Batch::default();
        for run in &slice.runs {
            let end = run.address + run.bytes as Address;
            assert!(end <= SLICE_BYTES as Address, "a plan keeps to its limits");
            let (buffered, host) = (base + run.address, pool.host_address(run.offset));
            match direction {
                Direction::ToDevice => batch.push(Sides::ToDevice, buffered, host, run.bytes),
                Direction::ToHost => batch.push(Sides::ToHost, host, buffered, run.bytes),
            }
        }
        let pages: Vec<Addresses> = slice
            .fragments
            .iter()
            .map(|copy| sides(direction, base + copy.offset as Address, copy))
            .collect();
        let (first, second) = match direction {
            Direction::ToDevice => (route.main, &self.stream),
            Direction::ToHost => (&self.stream, route.main),
        };
        // The buffer's copies before these have read it.
        first.wait_for(&buffer.emptied)?;
        if direction == Direction::ToDevice {
            // SAFETY: the caller's promise; the buffer lives until both streams are idle.
            unsafe { route.batcher.start(first, &mut batch) }?;
        } else {
            // SAFETY: as above.
            unsafe { self.launch(&pages, loan) }?;
        }
        first.record_again(&buffer.filled)?;
        second.wait_for(&buffer.filled)?;
        if direction == Direction::ToDevice {
            // SAFETY: as above.
            unsafe { self.launch(&pages, loan) }?;
        } else {
            // SAFETY: as above.
            unsafe { route.batcher.start(second, &mut batch) }?;
        }
        second.record_again(&buffer.emptied)
    }
}

/// Target, source and length of a copy between an address on the near side (the pool, or a buffer)
/// and its pages.
pub(crate) fn sides(direction: Direction, near: Address, copy: &PlannedCopy) -> Addresses {
    match direction {
        Direction::ToDevice => (copy.address, near, copy.bytes),
        Direction::ToHost => (near, copy.address, copy.bytes),
    }
}

impl fmt::Debug for Ways {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ways").field("costs", &self.costs).finish_non_exhaustive()
    }
}

/// Lists that kernels in flight read. They go back when it is dropped.
#[derive(Debug)]
pub(crate) struct Loan {
    lists: Vec<List>,
    owner: Option<Arc<Ways>>,
}

impl Loan {
    pub(crate) fn new(owner: Option<&Arc<Ways>>) -> Self {
        Self { lists: Vec::new(), owner: owner.cloned() }
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        let Some(owner) = &self.owner else { return };
        let mut kept = owner.lists.lock().unwrap_or_else(PoisonError::into_inner);
        while kept.len() < LISTS_KEPT
            && let Some(list) = self.lists.pop()
        {
            kept.push(list);
        }
    }
}
