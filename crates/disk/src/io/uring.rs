//! The fast I/O engine: `io_uring`, driven by the calling thread without a hand-off.
//!
//! A call takes an idle ring, submits, waits with a time-out and returns the ring. A ring with
//! transfers in flight after the deadline is passed to a thread that waits for the kernel.
#![expect(unsafe_code, reason = "hands buffers to the kernel by address")]

use std::collections::VecDeque;
use std::mem::{self, ManuallyDrop};
use std::os::fd::AsRawFd as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;
use std::{fmt, io};

use cascade_memory::Pool;
use cascade_runtime::{Clock, Deadline, Mutex, RwLock, thread};
use io_uring::types::{Fd, FsyncFlags, SubmitArgs, Timespec};
use io_uring::{IoUring, opcode, squeue};
use rustix::io::Errno;

use super::fixed::FixedBuffers;
use super::io_vec::IoVec;
use super::read_window::ReadWindow;
use super::{FileHandle, Transfer, TransferEngine, TransferKind, TransferOutcome, TransferQueue};

/// While fewer transfers than this are in the kernel, each is submitted at once: this many keep the
/// disk busy while the next ones are prepared. Transfers of at least [`WAKE_UP_BYTES`] always are:
/// the checksums of the next ones may take longer than the disk takes for those in the kernel.
const EAGER_SUBMIT_MAX: usize = 2;

/// Bytes of the transfers that one wake-up of the caller awaits, and that are completed before new
/// ones are submitted. Waking up for each small transfer costs more than the disk gains from a full
/// queue; waiting for several large ones would let the queue run empty.
const WAKE_UP_BYTES: usize = 1 << 20;

/// Maximum number of rings, each with a thread, that wait for a hung kernel. At this limit further
/// calls time out at once.
const STUCK_RINGS_MAX: u64 = 32;

/// Reads and writes through `io_uring`.
pub struct UringEngine {
    depth: u32,
    clock: Arc<dyn Clock>,
    /// `None` after its end, too.
    fixed: RwLock<Option<Arc<FixedBuffers>>>,
    read_window: ReadWindow,
    idle: Arc<Mutex<Vec<Ring>>>,
    /// Rings that wait for the kernel after the deadline of their call.
    stuck: Arc<AtomicU64>,
}

/// A transfer in flight, with the address list that the kernel reads.
struct InFlightTransfer {
    number: usize,
    transfer: Transfer,
    bytes: usize,
    io_vecs: Vec<IoVec>,
}

// SAFETY: the addresses in `io_vecs` point into buffers that `transfer` in the same value owns and
// does not move. The buffers may be used from any thread.
unsafe impl Send for InFlightTransfer {}

/// A ring and its transfers in flight.
struct Ring {
    queue: IoUring,
    /// By the `user_data` of their completion. Not dropped while the kernel may use the buffers.
    transfers: ManuallyDrop<Vec<Option<InFlightTransfer>>>,
    /// Indices of `transfers` that are not in use.
    free_slots: Vec<usize>,
    in_flight_bytes: usize,
    /// Those of reads.
    in_flight_read_bytes: usize,
    /// The registered pool memory, if this ring shares it.
    fixed: Option<Arc<FixedBuffers>>,
}

impl UringEngine {
    /// An engine with at most `queue_depth` transfers in flight per call.
    ///
    /// Transfers from and to slabs of `pool` save the pinning of pages if its region can be
    /// registered with the kernel; [`TransferEngine::is_registered`] returns whether it was.
    ///
    /// # Errors
    /// If the kernel does not allow `io_uring`.
    pub fn new(queue_depth: u32, pool: Option<&Pool>, clock: Arc<dyn Clock>) -> io::Result<Self> {
        let depth = queue_depth.max(1);
        let fixed = pool.and_then(FixedBuffers::register).map(Arc::new);
        let first = Ring::new(depth, fixed.as_ref())?;
        // `None` if this ring cannot share the registration (before Linux 6.12). Then no other can.
        let fixed = first.fixed.clone();
        let idle = Arc::new(Mutex::new(vec![first]));
        let (fixed, read_window) = (RwLock::new(fixed), ReadWindow::new());
        Ok(Self { depth, clock, fixed, read_window, idle, stuck: Arc::default() })
    }

    fn take_ring(&self) -> io::Result<Ring> {
        let fixed = self.fixed();
        loop {
            let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
            match idle {
                // A ring with a registration that has ended is closed.
                Some(ring) if ring.fixed.is_some() && fixed.is_none() => drop(ring),
                Some(ring) => return Ok(ring),
                None => return Ring::new(self.depth, fixed.as_ref()),
            }
        }
    }

    fn fixed(&self) -> Option<Arc<FixedBuffers>> {
        self.fixed.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns a ring to the idle ones, after the kernel has completed its transfers.
    fn return_ring(&self, mut ring: Ring) {
        if ring.in_flight_count() == 0 {
            if ring.fixed.is_some() && !self.is_registered() {
                return;
            }
            self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(ring);
            return;
        }
        let (idle, stuck) = (Arc::clone(&self.idle), Arc::clone(&self.stuck));
        // Relaxed: only a limit and a statistic depend on it.
        stuck.fetch_add(1, Ordering::Relaxed);
        let wait = move || {
            let drained = ring.drain();
            stuck.fetch_sub(1, Ordering::Relaxed);
            // Otherwise the ring is dropped, which leaks its buffers.
            if drained.is_ok() {
                idle.lock().unwrap_or_else(PoisonError::into_inner).push(ring);
            }
        };
        if thread::Builder::new().name("cascade-late-io".to_owned()).spawn(wait).is_err() {
            // Dropping `wait` drops the ring, which leaks its buffers: the kernel may still use
            // them.
        }
    }

    /// Submits and waits until all transfers are complete or the deadline passes. After an error
    /// `ended` has the transfers that ended but were not reported to the queue.
    fn drive(
        &self,
        ring: &mut Ring,
        queue: &mut dyn TransferQueue,
        ended: &mut VecDeque<(usize, TransferOutcome)>,
        deadline: Deadline,
    ) -> io::Result<()> {
        loop {
            while ring.in_flight_count() < self.depth as usize
                && self.read_window.has_room(ring.in_flight_read_bytes)
            {
                let Some((number, transfer)) = queue.next_transfer() else { break };
                let file = match transfer.file.system() {
                    Ok(file) => Fd(file.as_raw_fd()),
                    Err(error) => {
                        let outcome =
                            TransferOutcome { transfer: Some(transfer), result: Err(error) };
                        ended.push_back((number, outcome));
                        continue;
                    }
                };
                let is_large = transfer.total_bytes() >= WAKE_UP_BYTES;
                ring.push(number, transfer, file);
                if is_large || ring.submitted() < EAGER_SUBMIT_MAX {
                    // The disk starts with this transfer while the next one is prepared.
                    ring.wait(0, Duration::ZERO)?;
                }
            }
            if !ended.is_empty() {
                // The new transfers are submitted first: the disk works while the caller computes
                // checksums.
                ring.wait(0, Duration::ZERO)?;
                let mut bytes = 0;
                // A completion may add transfers: a short one is continued. They are submitted
                // before the rest is completed.
                while bytes < WAKE_UP_BYTES
                    && let Some((number, outcome)) = ended.pop_front()
                {
                    bytes += *outcome.result.as_ref().unwrap_or(&0);
                    queue.complete(number, outcome);
                }
                ring.reap(|number, outcome| ended.push_back((number, outcome)));
                continue;
            }
            if ring.in_flight_count() == 0 {
                return Ok(());
            }
            let left = deadline.remaining(self.clock.as_ref());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            // Submitted first, so that the disk works meanwhile.
            ring.wait(0, Duration::ZERO)?;
            if queue.idle() {
                ring.reap(|number, outcome| ended.push_back((number, outcome)));
                continue;
            }
            ring.wait(ring.wake_up_count(), left)?;
            let (before, read_bytes) = (ring.in_flight_count(), ring.in_flight_read_bytes);
            ring.reap(|number, outcome| ended.push_back((number, outcome)));
            self.read_window.note(before, read_bytes, ring.in_flight_count());
        }
    }
}

impl TransferEngine for UringEngine {
    fn name(&self) -> &'static str {
        "io_uring"
    }

    fn is_registered(&self) -> bool {
        self.fixed().is_some()
    }

    fn release_pool(&self) {
        let fixed = self.fixed.write().unwrap_or_else(PoisonError::into_inner).take();
        let Some(fixed) = fixed else { return };
        fixed.end();
        // Those in use are closed when they are returned or taken the next time.
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        idle.retain(|ring| ring.fixed.is_none());
    }

    fn stuck_calls(&self) -> u64 {
        self.stuck.load(Ordering::Relaxed)
    }

    fn run(&self, queue: &mut dyn TransferQueue, deadline: Deadline) {
        if self.stuck_calls() >= STUCK_RINGS_MAX {
            return fail_remaining(queue, &io::ErrorKind::TimedOut.into());
        }
        let mut ring = match self.take_ring() {
            Ok(ring) => ring,
            Err(error) => return fail_remaining(queue, &error),
        };
        let mut ended = VecDeque::new();
        let driven = self.drive(&mut ring, queue, &mut ended, deadline);
        for (number, outcome) in ended {
            queue.complete(number, outcome);
        }
        let in_flight = ring.transfers.iter().flatten();
        in_flight
            .clone()
            .filter_map(InFlightTransfer::syncs)
            .for_each(|file| file.late_syncs().begin());
        let unfinished: Vec<_> = in_flight.map(|in_flight| in_flight.number).collect();
        self.return_ring(ring);
        if let Err(error) = driven {
            for number in unfinished {
                queue.complete(
                    number,
                    TransferOutcome { transfer: None, result: Err(clone_error(&error)) },
                );
            }
            // After a time-out the other transfers stay in the queue: they were not started.
            if error.kind() != io::ErrorKind::TimedOut {
                fail_remaining(queue, &error);
            }
        }
    }
}

/// Completes all transfers that were not started with an error.
fn fail_remaining(queue: &mut dyn TransferQueue, error: &io::Error) {
    while let Some((number, transfer)) = queue.next_transfer() {
        queue.complete(
            number,
            TransferOutcome { transfer: Some(transfer), result: Err(clone_error(error)) },
        );
    }
}

fn clone_error(error: &io::Error) -> io::Error {
    error.raw_os_error().map_or_else(|| error.kind().into(), io::Error::from_raw_os_error)
}

impl Ring {
    fn new(depth: u32, fixed: Option<&Arc<FixedBuffers>>) -> io::Result<Self> {
        let queue = IoUring::new(depth.next_power_of_two())?;
        let transfers = ManuallyDrop::new((0..depth).map(|_| None).collect());
        let free_slots = (0..depth as usize).collect();
        let fixed = fixed.filter(|fixed| fixed.share_with(&queue).is_ok()).cloned();
        Ok(Self {
            queue,
            transfers,
            free_slots,
            in_flight_bytes: 0,
            in_flight_read_bytes: 0,
            fixed,
        })
    }

    fn in_flight_count(&self) -> usize {
        self.transfers.len() - self.free_slots.len()
    }

    /// The number of completions to wait for: at most a quarter of the transfers, so that the disk
    /// still has work, and no more than [`WAKE_UP_BYTES`].
    fn wake_up_count(&self) -> usize {
        let count = self.in_flight_count();
        let transfer_bytes = (self.in_flight_bytes / count.max(1)).max(1);
        (WAKE_UP_BYTES / transfer_bytes).min(count / 4).max(1)
    }

    /// Number of transfers submitted to the kernel.
    fn submitted(&mut self) -> usize {
        self.in_flight_count() - self.queue.submission().len()
    }

    /// Adds a transfer of a file to the submission queue. The caller limits the number to the
    /// depth.
    fn push(&mut self, number: usize, transfer: Transfer, file: Fd) {
        let slot = self.free_slots.pop().expect("the caller limits transfers to the depth");
        let bytes = transfer.total_bytes();
        let io_vecs = Vec::new();
        let mut in_flight = InFlightTransfer { number, transfer, bytes, io_vecs };
        let entry = in_flight.submission(file, self.fixed.as_deref()).user_data(slot as u64);
        self.in_flight_bytes += bytes;
        self.in_flight_read_bytes += in_flight.read_bytes();
        self.transfers[slot] = Some(in_flight);
        // SAFETY: the entry's addresses point into buffers and a list that the `InFlightTransfer`
        // owns. `transfers` keeps it until its completion is reaped, and leaks it if the ring is
        // dropped before.
        let pushed = unsafe { self.queue.submission().push(&entry) };
        pushed.expect("the submission queue has `depth` entries");
    }

    /// Submits, and waits for this many completions or until the time-out.
    fn wait(&mut self, want: usize, limit: Duration) -> io::Result<()> {
        if want == 0 {
            if self.queue.submission().is_empty() {
                return Ok(());
            }
            return match self.queue.submit() {
                Err(error) if error.raw_os_error() == Some(Errno::BUSY.raw_os_error()) => Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(()),
                other => other.map(drop),
            };
        }
        let limit = Timespec::from(limit);
        let args = SubmitArgs::new().timespec(&limit);
        match self.queue.submitter().submit_with_args(want, &args) {
            Ok(_submitted) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(()),
            // `ETIME`: the limit passed. The caller checks its deadline.
            Err(error) if error.raw_os_error() == Some(Errno::TIME.raw_os_error()) => Ok(()),
            Err(error) if error.raw_os_error() == Some(Errno::BUSY.raw_os_error()) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Processes the completions of the kernel.
    fn reap(&mut self, mut finish: impl FnMut(usize, TransferOutcome)) {
        for completion in self.queue.completion() {
            let slot = usize::try_from(completion.user_data())
                .expect("user data is an index of `transfers`");
            let in_flight = self.transfers[slot].take().expect("a transfer completes once");
            self.free_slots.push(slot);
            self.in_flight_bytes -= in_flight.bytes;
            self.in_flight_read_bytes -= in_flight.read_bytes();
            let result = usize::try_from(completion.result())
                .map_err(|_| io::Error::from_raw_os_error(-completion.result()));
            finish(
                in_flight.number,
                TransferOutcome { transfer: Some(in_flight.transfer), result },
            );
        }
    }

    /// Waits without a deadline until the kernel has completed every transfer.
    fn drain(&mut self) -> io::Result<()> {
        while self.in_flight_count() > 0 {
            // The limit is of no importance here: the loop waits again.
            self.wait(self.in_flight_count(), Duration::from_secs(3600))?;
            self.reap(|_number, outcome| outcome.end_late());
        }
        Ok(())
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // Otherwise the kernel may still write to the buffers. They are leaked, because a leak is
        // better than two writers of one page.
        if self.in_flight_count() == 0 {
            return drop(mem::take(&mut *self.transfers));
        }
        // The results of its syncs stay unknown.
        let syncs = self.transfers.iter().flatten().filter_map(InFlightTransfer::syncs);
        syncs.for_each(|file| file.late_syncs().end(true));
    }
}

impl InFlightTransfer {
    /// The file of a sync.
    fn syncs(&self) -> Option<&FileHandle> {
        (self.transfer.kind == TransferKind::Sync).then_some(&*self.transfer.file)
    }

    fn read_bytes(&self) -> usize {
        if self.transfer.kind == TransferKind::Read { self.bytes } else { 0 }
    }

    /// The entry of a transfer with one contiguous piece, which needs no address list. Only such a
    /// piece can use a fixed buffer.
    fn contiguous(
        &mut self,
        file: Fd,
        offset: u64,
        fixed: Option<&FixedBuffers>,
    ) -> Option<squeue::Entry> {
        /// The only piece, if there is just one.
        fn only(mut pieces: impl Iterator<Item = IoVec>) -> Option<IoVec> {
            pieces.next().filter(|_| pieces.next().is_none())
        }
        let is_read = self.transfer.kind == TransferKind::Read;
        // A sync has no pieces.
        let IoVec { base, bytes } = if is_read {
            only(self.transfer.pieces_mut().map(IoVec::to_read))?
        } else {
            only(self.transfer.pieces().map(IoVec::to_write))?
        };
        let length = u32::try_from(bytes).ok()?;
        let index = fixed.and_then(|fixed| fixed.index_of(&IoVec { base, bytes }));
        Some(match (is_read, index) {
            (true, Some(index)) => {
                opcode::ReadFixed::new(file, base, length, index).offset(offset).build()
            }
            (false, Some(index)) => {
                opcode::WriteFixed::new(file, base, length, index).offset(offset).build()
            }
            (true, None) => opcode::Read::new(file, base, length).offset(offset).build(),
            (false, None) => opcode::Write::new(file, base, length).offset(offset).build(),
        })
    }

    fn submission(&mut self, file: Fd, fixed: Option<&FixedBuffers>) -> squeue::Entry {
        let offset = self.transfer.next_offset();
        if let Some(entry) = self.contiguous(file, offset, fixed) {
            return entry;
        }
        // The list is on the heap. So its address stays valid when `self` is moved to its slot.
        self.io_vecs = match self.transfer.kind {
            TransferKind::Read => self.transfer.pieces_mut().map(IoVec::to_read).collect(),
            TransferKind::Write => self.transfer.pieces().map(IoVec::to_write).collect(),
            TransferKind::Sync => Vec::new(),
        };
        let count = u32::try_from(self.io_vecs.len()).expect("a transfer has few buffers");
        let io_vecs = self.io_vecs.as_ptr();
        match self.transfer.kind {
            TransferKind::Read => {
                opcode::Readv::new(file, io_vecs.cast(), count).offset(offset).build()
            }
            TransferKind::Write => {
                opcode::Writev::new(file, io_vecs.cast(), count).offset(offset).build()
            }
            TransferKind::Sync => opcode::Fsync::new(file).flags(FsyncFlags::DATASYNC).build(),
        }
    }
}

impl fmt::Debug for UringEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UringEngine").field("depth", &self.depth).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::OwnedFd;

    use cascade_runtime::SystemClock;

    use super::*;
    use crate::conformance::deadline;
    use crate::io::TransferBatch;

    /// The ring that waited for a late sync threw its error away, and the next sync succeeded.
    #[test]
    fn the_error_of_a_late_sync_is_reported_by_the_next_one() {
        // A kernel without io_uring has one engine.
        let Ok(engine) = UringEngine::new(1, None, Arc::new(SystemClock)) else { return };
        let (pipe, _writer) = io::pipe().unwrap();
        // A pipe cannot be synced.
        let file = Arc::new(FileHandle::from(File::from(OwnedFd::from(pipe))));
        let mut batch = TransferBatch::new(vec![Transfer::sync(Arc::clone(&file))]);
        engine.run(&mut batch, Deadline::at(Duration::ZERO));
        let late = batch.outcomes.remove(0).unwrap();
        assert!(late.transfer.is_none());
        assert_eq!(late.result.unwrap_err().kind(), io::ErrorKind::TimedOut);
        let limit = deadline();
        while engine.stuck_calls() > 0 {
            assert!(!limit.has_passed(&SystemClock), "the sync never ended");
            cascade_runtime::yield_now();
        }
        assert_eq!(file.late_syncs().result().unwrap_err().kind(), io::ErrorKind::Other);
        file.late_syncs().result().unwrap();
    }
}
