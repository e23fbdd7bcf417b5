//! Measures what copies cost on this machine, at its start.
//!
//! It copies between memory of its own: a buffer of the driver's in host memory, and memory of the
//! device. Pages of a pool may be smaller than those of such a buffer, other work of the machine
//! may run meanwhile, and the two directions are not measured at once: a table is a guess that is
//! good enough to choose by.
#![expect(unsafe_code, reason = "starts copies between memory of its own")]

use std::sync::Arc;
use std::time::Duration;

use cascade_runtime::yield_now;

use crate::abandoned;
use crate::allocation::DeviceAllocation;
use crate::batch::{Batch, Batcher, Sides};
use crate::context::Context;
use crate::costs::{Costs, Curve, Rate, WayCosts};
use crate::error::CudaError;
use crate::functions::Address;
use crate::kernel::{BLOCKS, Kernel, List, device_address};
use crate::pinned::PinnedBuffer;
use crate::report::is_fake;
use crate::stream::Stream;

/// Bytes of one measurement.
const BYTES: usize = 4 << 20;
/// Copies of one measurement.
const COPIES_MAX: usize = 256;
/// Lengths of copies whose rates are measured.
const LENGTHS: [usize; 5] = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 2 << 20];
/// The length of copies that show what each copy costs.
const SHORT: usize = 64;
/// How often each is measured. The median counts.
const REPEATS: usize = 3;
/// After this time each is measured once.
const TIME_MAX: Duration = Duration::from_millis(50);

/// A way, or a part of one.
#[derive(Debug, Clone, Copy)]
enum Method {
    Driver(Sides),
    Kernel(Sides),
}

/// What is copied, and by what.
struct Bench {
    context: Arc<Context>,
    stream: Stream,
    batcher: Batcher,
    kernel: Option<(Kernel, List)>,
    host: PinnedBuffer,
    /// The address of the host's buffer for kernels.
    mapped: Option<Address>,
    memory: Arc<DeviceAllocation>,
    began: Duration,
}

impl Costs {
    /// Measures them, which takes some tens of milliseconds. None on a device that is a stand-in
    /// for tests: it has no speed.
    ///
    /// # Errors
    /// If the driver refuses memory, a stream or a copy.
    pub fn measure(context: &Arc<Context>) -> Result<Option<Self>, CudaError> {
        if is_fake(context)? {
            return Ok(None);
        }
        Self::measure_any(context).map(Some)
    }

    /// As [`Costs::measure`], also on a stand-in: for tests of the measurement itself.
    ///
    /// # Errors
    /// As [`Costs::measure`].
    pub fn measure_any(context: &Arc<Context>) -> Result<Self, CudaError> {
        let mut bench = Bench::new(context)?;
        let measured = bench.costs();
        if bench.stream.finish(context.deadline()).is_err() {
            // The device may still use all of it.
            abandoned::keep(bench);
        }
        measured
    }
}

// SAFETY: all parts may be used by any thread, one at a time.
unsafe impl Send for Bench {}

impl Bench {
    fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        let kernel = Kernel::load(context).and_then(|it| Ok((it, List::new(context)?)));
        let host = PinnedBuffer::new(context, BYTES)?;
        let mapped = device_address(context, host.start());
        context.check()?;
        Ok(Self {
            context: Arc::clone(context),
            stream: Stream::new(context)?,
            batcher: Batcher::new(context.driver()),
            kernel: kernel.ok(),
            host,
            mapped: mapped.ok(),
            // Sources in the first part, and twice the room for targets with gaps.
            memory: DeviceAllocation::new(context, 3 * BYTES)?,
            began: context.clock().monotonic(),
        })
    }

    fn costs(&mut self) -> Result<Costs, CudaError> {
        let within = match self.kernel {
            Some(_) => Some(self.curve(Method::Kernel(Sides::Within))?),
            None => None,
        };
        let mut way_costs = |sides| {
            let direct = self.curve(Method::Driver(sides))?;
            let mapped = match self.kernel.as_ref().and(self.mapped) {
                Some(_) => Some(self.curve(Method::Kernel(sides))?),
                None => None,
            };
            Ok::<_, CudaError>(WayCosts { direct, mapped, within: within.clone() })
        };
        Ok(Costs { to_device: way_costs(Sides::ToDevice)?, to_host: way_costs(Sides::ToHost)? })
    }

    /// What is left of the time of longer copies, without that of calls and fragments, gives their
    /// rate: so a curve says the times that were measured.
    fn curve(&mut self, method: Method) -> Result<Curve, CudaError> {
        let one_ns = self.time_ns(method, SHORT, 1)?;
        let many_ns = self.time_ns(method, SHORT, COPIES_MAX)?;
        let fragment_ns = many_ns.saturating_sub(one_ns) / (COPIES_MAX as u64 - 1);
        let call_ns = one_ns.saturating_sub(fragment_ns);
        let mut rates = Vec::new();
        for fragment_bytes in LENGTHS {
            let count = (BYTES / fragment_bytes).min(COPIES_MAX);
            let all_ns = self.time_ns(method, fragment_bytes, count)?;
            let fixed_ns = call_ns + fragment_ns * count as u64;
            let bytes_ns = all_ns.saturating_sub(fixed_ns).max(1);
            // A machine that is too busy for a byte in a microsecond copies, all the same.
            let bytes_per_us = ((fragment_bytes * count) as u64 * 1000 / bytes_ns).max(1);
            rates.push(Rate { fragment_bytes, bytes_per_us });
        }
        Ok(Curve { call_ns, fragment_ns, rates })
    }

    /// The median time of `count` copies in one call, until the device is done.
    fn time_ns(&mut self, method: Method, bytes: usize, count: usize) -> Result<u64, CudaError> {
        let mut times = Vec::new();
        for repeat in 0..REPEATS {
            let spent = self.context.clock().monotonic().saturating_sub(self.began);
            if repeat > 0 && spent > TIME_MAX {
                break;
            }
            times.push(self.copy(method, bytes, count)?);
        }
        times.sort_unstable();
        let median = times.get(times.len() / 2).copied().unwrap_or_default();
        Ok(u64::try_from(median.as_nanos()).unwrap_or(u64::MAX))
    }

    fn copy(&mut self, method: Method, bytes: usize, count: usize) -> Result<Duration, CudaError> {
        let (Method::Driver(sides) | Method::Kernel(sides)) = method;
        let host = match method {
            Method::Driver(_) => self.host.start().as_ptr().expose_provenance() as Address,
            Method::Kernel(_) => self.mapped.unwrap_or_default(),
        };
        let device = self.memory.base();
        let copies = (0..count).map(|at| {
            // No gaps between the sources of loads, as in a slab, and gaps between pages.
            let (near, far) = ((at * bytes) as Address, (BYTES + 2 * at * bytes) as Address);
            match sides {
                Sides::ToDevice => (device + far, host + near, bytes),
                Sides::ToHost => (host + near, device + far, bytes),
                Sides::Within => (device + far, device + near, bytes),
            }
        });
        let mut batch = Batch::default();
        match (method, &mut self.kernel) {
            (Method::Kernel(_), Some((_, list))) => list.fill(&copies.collect::<Vec<_>>()),
            _ => copies.for_each(|(target, source, bytes)| {
                batch.push(sides, target, source, bytes);
            }),
        }
        let started = self.context.clock().monotonic();
        let event = self.context.with(|| {
            match (method, &self.kernel) {
                (Method::Kernel(_), Some((kernel, list))) => {
                    // SAFETY: both sides and the list are this bench's, which lives until its
                    // stream is over, or for ever.
                    unsafe { kernel.launch(&self.stream, list, BLOCKS) }?;
                }
                // SAFETY: as above.
                _ => unsafe { self.batcher.start(&self.stream, &mut batch) }?,
            }
            self.stream.record()
        })?;
        // Without the pauses of other waits, which would be measured, too.
        let deadline = self.context.deadline();
        while !event.is_over()? {
            if deadline.has_passed(self.context.clock()) {
                let waited = self.context.clock().monotonic().saturating_sub(started);
                return Err(CudaError::TimedOut { work: "a measured copy", waited });
            }
            yield_now();
        }
        Ok(self.context.clock().monotonic().saturating_sub(started))
    }
}
