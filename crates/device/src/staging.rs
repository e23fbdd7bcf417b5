//! Copies through small buffers that devices copy from and to at full speed, whatever the memory of
//! the caller is. The caller's memory is never the device's to use.

use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, PoisonError};

use cascade_runtime::{Condvar, Deadline, Mutex, MutexGuard};

use crate::abandoned;
use crate::context::Context;
use crate::error::CudaError;
use crate::event::Event;
use crate::functions::Address;
use crate::pinned::PinnedBuffer;
use crate::stream::Stream;

/// The buffers that one copy has in flight: one is filled or emptied while the other is copied.
const IN_FLIGHT_MAX: usize = 2;

/// A set of equal buffers for the copies of a context.
pub(crate) struct Staging {
    context: Arc<Context>,
    buffer_bytes: usize,
    free: Mutex<Vec<Slot>>,
    returned: Condvar,
}

/// A buffer, and the event after its last copy.
#[derive(Debug)]
struct Slot {
    buffer: PinnedBuffer,
    event: Event,
}

/// A slot that a device uses: nobody else touches its buffer.
struct Flight {
    slot: Slot,
    /// The part of the caller's bytes that it carries.
    part: Range<usize>,
    /// Whether the event follows the copy. If not, the whole stream has to be over.
    has_event: bool,
}

/// A copy of any length.
struct Job<'a> {
    stream: &'a Stream,
    bytes: usize,
    deadline: Deadline,
    /// Prepares a buffer for its part.
    fill: &'a dyn Fn(&mut PinnedBuffer, &Range<usize>),
    /// Starts the copy of a buffer.
    start: &'a Start<'a>,
}

type Start<'a> = dyn Fn(&PinnedBuffer, &Range<usize>) -> Result<(), CudaError> + 'a;

/// Handles a buffer whose copy is over.
type End<'a> = &'a mut dyn FnMut(&mut PinnedBuffer, Range<usize>);

impl Staging {
    /// Buffers for at least one copy.
    pub(crate) fn new(
        context: &Arc<Context>,
        buffer_bytes: usize,
        count: usize,
    ) -> Result<Self, CudaError> {
        let slot = |_| {
            let buffer = PinnedBuffer::new(context, buffer_bytes)?;
            Ok(Slot { buffer, event: Event::new(context)? })
        };
        let free = (0..count.max(1)).map(slot).collect::<Result<Vec<Slot>, CudaError>>()?;
        let (free, returned) = (Mutex::new(free), Condvar::new());
        Ok(Self { context: Arc::clone(context), buffer_bytes, free, returned })
    }

    /// Copies to the device. The bytes are there when it returns.
    #[expect(unsafe_code, reason = "starts a copy of a buffer that it owns")]
    pub(crate) fn copy_in(
        &self,
        stream: &Stream,
        target: Address,
        source: &[u8],
        deadline: Deadline,
    ) -> Result<(), CudaError> {
        let fill = |buffer: &mut PinnedBuffer, part: &Range<usize>| {
            buffer.bytes()[..part.len()].copy_from_slice(&source[part.clone()]);
        };
        let start = |buffer: &PinnedBuffer, part: &Range<usize>| {
            let target = target + part.start as Address;
            // SAFETY: the slot owns its buffer until the copy is over. The target lies in memory
            // of the device, which the callers of `copy_in` checked and hold.
            unsafe { stream.copy_to_device(target, buffer.start(), part.len()) }
        };
        let job = Job { stream, bytes: source.len(), deadline, fill: &fill, start: &start };
        self.copy(&job, &mut |_, _| ())
    }

    /// Copies to the host.
    #[expect(unsafe_code, reason = "starts a copy to a buffer that it owns")]
    pub(crate) fn copy_out(
        &self,
        stream: &Stream,
        source: Address,
        target: &mut [u8],
        deadline: Deadline,
    ) -> Result<(), CudaError> {
        let start = |buffer: &PinnedBuffer, part: &Range<usize>| {
            let source = source + part.start as Address;
            // SAFETY: as in `copy_in`.
            unsafe { stream.copy_to_host(buffer.start(), source, part.len()) }
        };
        let bytes = target.len();
        let mut empty = |buffer: &mut PinnedBuffer, part: Range<usize>| {
            let length = part.len();
            target[part].copy_from_slice(&buffer.bytes()[..length]);
        };
        let job = Job { stream, bytes, deadline, fill: &|_, _| (), start: &start };
        self.copy(&job, &mut empty)
    }

    fn copy(&self, job: &Job<'_>, end: End<'_>) -> Result<(), CudaError> {
        let mut flights = VecDeque::new();
        let mut result = self.context.check();
        for first in (0..job.bytes).step_by(self.buffer_bytes) {
            let part = first..job.bytes.min(first + self.buffer_bytes);
            let sent = result.and_then(|()| {
                let mut slot = self.slot(&mut flights, job, end)?;
                (job.fill)(&mut slot.buffer, &part);
                self.send(slot, part, job, &mut flights)
            });
            result = sent;
        }
        for flight in flights {
            let ended = self.finish(flight, job, end);
            result = result.and(ended);
        }
        result
    }

    /// A free slot. A copy that has slots in flight never waits for those of other copies.
    fn slot(
        &self,
        flights: &mut VecDeque<Flight>,
        job: &Job<'_>,
        end: End<'_>,
    ) -> Result<Slot, CudaError> {
        if flights.len() < IN_FLIGHT_MAX
            && let Some(slot) = self.lock().pop()
        {
            return Ok(slot);
        }
        if let Some(oldest) = flights.pop_front() {
            self.finish(oldest, job, end)?;
        }
        let started = self.context.clock().monotonic();
        let mut free = self.lock();
        loop {
            if let Some(slot) = free.pop() {
                return Ok(slot);
            }
            self.context.check()?;
            let left = job.deadline.remaining(self.context.clock());
            if left.is_zero() {
                let waited = self.context.clock().monotonic().saturating_sub(started);
                return Err(CudaError::TimedOut { work: "other copies", waited });
            }
            let time = self.context.clock().wait_at_most(left);
            let waited = self.returned.wait_timeout(free, time);
            free = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn send(
        &self,
        slot: Slot,
        part: Range<usize>,
        job: &Job<'_>,
        flights: &mut VecDeque<Flight>,
    ) -> Result<(), CudaError> {
        let mut has_started = false;
        let sent = self.context.with(|| {
            (job.start)(&slot.buffer, &part)?;
            has_started = true;
            job.stream.record_again(&slot.event)
        });
        if has_started {
            let has_event = sent.is_ok();
            flights.push_back(Flight { slot, part, has_event });
        } else {
            self.give_back(slot);
        }
        sent
    }

    /// Waits for the copy of a slot. A slot whose copy may never be over is not used again, and
    /// its context is lost.
    fn finish(&self, flight: Flight, job: &Job<'_>, end: End<'_>) -> Result<(), CudaError> {
        let Flight { mut slot, part, has_event } = flight;
        let is_over = || if has_event { slot.event.is_over() } else { job.stream.is_idle() };
        match self.context.wait("a copy", job.deadline, is_over) {
            Ok(()) => {
                end(&mut slot.buffer, part);
                self.give_back(slot);
                Ok(())
            }
            Err(error) => {
                self.context.lose(error.clone());
                abandoned::keep(slot);
                self.returned.notify_all();
                Err(error)
            }
        }
    }

    fn give_back(&self, slot: Slot) {
        self.lock().push(slot);
        self.returned.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Slot>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Staging {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Staging({} free buffers of {})", self.lock().len(), self.buffer_bytes)
    }
}
