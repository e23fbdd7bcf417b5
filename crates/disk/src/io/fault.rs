//! Fault injection: a disk that fails at the k-th call, for tests of everything that uses files.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cascade_runtime::Deadline;

use super::{
    FileHandle, FileIdentity, FileIo, FileOperations, HeldLock, OpenMode, Transfer, TransferBatch,
    TransferEngine, TransferKind, TransferOutcome, TransferQueue,
};
use crate::format::PAGE_BYTES;

/// The content of memory that a short read did not reach.
const UNREAD_BYTE: u8 = 0xa5;

/// The kind of a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// An I/O error; nothing is done.
    Io,
    /// A full device; nothing is done.
    NoSpace,
    /// A transfer moves and reports only its first page. Other calls fail with an I/O error.
    Short,
    /// A write fails after its first half. Other calls fail with an I/O error.
    Torn,
    /// The call times out and keeps its buffers until then.
    Hang,
}

/// Counts calls and makes one of them fail, optionally with all later ones.
#[derive(Debug)]
pub struct FaultPlan {
    fault: Fault,
    at_call: u64,
    is_permanent: bool,
    calls: AtomicU64,
}

impl FaultPlan {
    /// Call number `at_call`, counted from zero, fails; with `is_permanent` all later ones too.
    pub fn new(fault: Fault, at_call: u64, is_permanent: bool) -> Arc<Self> {
        Arc::new(Self { fault, at_call, is_permanent, calls: AtomicU64::new(0) })
    }

    /// The number of calls so far.
    pub fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }

    fn next_fault(&self) -> Option<Fault> {
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        let fails = call == self.at_call || (self.is_permanent && call > self.at_call);
        fails.then_some(self.fault)
    }

    fn check_operation(&self) -> io::Result<()> {
        match self.next_fault() {
            None => Ok(()),
            Some(Fault::NoSpace) => Err(io::ErrorKind::StorageFull.into()),
            Some(Fault::Hang) => Err(io::ErrorKind::TimedOut.into()),
            Some(Fault::Io | Fault::Short | Fault::Torn) => Err(io_error()),
        }
    }

    /// The same I/O with the faults of this plan.
    pub fn wrap(self: &Arc<Self>, io: &FileIo) -> FileIo {
        FileIo {
            engine: Arc::new(FaultyEngine {
                inner: Arc::clone(&io.engine),
                plan: Arc::clone(self),
            }),
            files: Arc::new(FaultyFiles { inner: Arc::clone(&io.files), plan: Arc::clone(self) }),
            workers: Arc::clone(&io.workers),
            read_workers: Arc::clone(&io.read_workers),
            background: Arc::clone(&io.background),
            clock: Arc::clone(&io.clock),
            ring_refusal: io.ring_refusal,
            directory_syncs: Arc::clone(&io.directory_syncs),
        }
    }
}

fn io_error() -> io::Error {
    rustix::io::Errno::IO.into()
}

#[derive(Debug)]
struct FaultyEngine {
    inner: Arc<dyn TransferEngine>,
    plan: Arc<FaultPlan>,
}

impl FaultyEngine {
    fn run_single(&self, transfer: Transfer, deadline: Deadline) -> TransferOutcome {
        let mut batch = TransferBatch::new(vec![transfer]);
        self.inner.run(&mut batch, deadline);
        batch.outcomes.pop().flatten().expect("the engine completes each transfer that it took")
    }

    /// Executes only the first bytes of a write. Returns the number of bytes written.
    fn run_partial(
        &self,
        transfer: &Transfer,
        bytes: usize,
        deadline: Deadline,
    ) -> io::Result<usize> {
        if transfer.kind != TransferKind::Write || bytes == 0 {
            return Ok(0);
        }
        let slices = transfer.slices();
        let head: Vec<u8> = slices.iter().flat_map(|slice| slice.iter().copied()).collect();
        let pages = super::PageBuffer::copied(&head[..bytes]);
        let part = Transfer::new(
            TransferKind::Write,
            Arc::clone(&transfer.file),
            transfer.next_offset(),
            vec![super::Buffer::Pages(pages)],
        );
        self.run_single(part, deadline).result
    }

    /// Executes a read and reports only its first page. The memory after that page is overwritten,
    /// so that a caller that takes it for read bytes gets wrong ones. A sync has no bytes.
    fn read_first_page(&self, transfer: Transfer, deadline: Deadline) -> TransferOutcome {
        let mut outcome = self.run_single(transfer, deadline);
        if let (Some(transfer), Ok(bytes)) = (&mut outcome.transfer, &mut outcome.result) {
            *bytes = (*bytes).min(PAGE_BYTES);
            let mut skip = PAGE_BYTES;
            for mut slice in transfer.slices_mut() {
                let skipped = skip.min(slice.len());
                skip -= skipped;
                slice[skipped..].fill(UNREAD_BYTE);
            }
        }
        outcome
    }

    fn fail(&self, transfer: Transfer, fault: Fault, deadline: Deadline) -> TransferOutcome {
        let bytes: usize = transfer.slices().iter().map(|slice| slice.len()).sum();
        let result = match fault {
            Fault::Io => Err(io_error()),
            Fault::NoSpace => Err(io::ErrorKind::StorageFull.into()),
            Fault::Short if transfer.kind == TransferKind::Write => {
                self.run_partial(&transfer, PAGE_BYTES.min(bytes), deadline)
            }
            Fault::Short => return self.read_first_page(transfer, deadline),
            Fault::Torn => self
                .run_partial(&transfer, bytes / 2 / PAGE_BYTES * PAGE_BYTES, deadline)
                .and_then(|_| Err(io_error())),
            Fault::Hang => {
                return TransferOutcome {
                    transfer: None,
                    result: Err(io::ErrorKind::TimedOut.into()),
                };
            }
        };
        TransferOutcome { transfer: Some(transfer), result }
    }
}

impl TransferEngine for FaultyEngine {
    fn release_pool(&self) {
        self.inner.release_pool();
    }

    fn name(&self) -> &'static str {
        "faulty"
    }

    fn stuck_calls(&self) -> u64 {
        self.inner.stuck_calls()
    }

    fn run(&self, queue: &mut dyn TransferQueue, deadline: Deadline) {
        // One transfer at a time, so that call number k is the same one in every run.
        while let Some((number, transfer)) = queue.next_transfer() {
            let outcome = match self.plan.next_fault() {
                None => self.run_single(transfer, deadline),
                Some(fault) => self.fail(transfer, fault, deadline),
            };
            queue.complete(number, outcome);
        }
    }
}

#[derive(Debug)]
struct FaultyFiles {
    inner: Arc<dyn FileOperations>,
    plan: Arc<FaultPlan>,
}

impl FileOperations for FaultyFiles {
    fn open(&self, path: &Path, mode: OpenMode, direct: bool) -> io::Result<FileHandle> {
        self.plan.check_operation()?;
        self.inner.open(path, mode, direct)
    }

    fn truncate(&self, file: &FileHandle, bytes: u64) -> io::Result<()> {
        self.plan.check_operation()?;
        self.inner.truncate(file, bytes)
    }

    fn length(&self, file: &FileHandle) -> io::Result<u64> {
        self.plan.check_operation()?;
        self.inner.length(file)
    }

    fn has_name(&self, file: &FileHandle) -> io::Result<bool> {
        self.inner.has_name(file)
    }

    fn read(&self, file: &FileHandle, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        self.plan.check_operation()?;
        self.inner.read(file, offset, buffer)
    }

    fn next_data(&self, file: &FileHandle, offset: u64) -> io::Result<Option<u64>> {
        self.plan.check_operation()?;
        self.inner.next_data(file, offset)
    }

    fn replace(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        self.plan.check_operation()?;
        self.inner.replace(path, bytes)
    }

    fn overwrite(&self, path: &Path) -> io::Result<u64> {
        self.plan.check_operation()?;
        self.inner.overwrite(path)
    }

    fn set_aside(&self, path: &Path) -> io::Result<PathBuf> {
        self.plan.check_operation()?;
        self.inner.set_aside(path)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.plan.check_operation()?;
        self.inner.remove(path)
    }

    fn make_directory(&self, path: &Path) -> io::Result<()> {
        self.plan.check_operation()?;
        self.inner.make_directory(path)
    }

    fn directory_identity(&self, directory: &Path) -> io::Result<FileIdentity> {
        self.plan.check_operation()?;
        self.inner.directory_identity(directory)
    }

    fn check_directory(&self, directory: &Path) -> io::Result<u32> {
        self.plan.check_operation()?;
        self.inner.check_directory(directory)
    }

    fn check_not_link(&self, path: &Path) -> io::Result<()> {
        self.plan.check_operation()?;
        self.inner.check_not_link(path)
    }

    fn lock_file(&self, path: &Path) -> io::Result<Box<dyn HeldLock>> {
        self.plan.check_operation()?;
        let inner = self.inner.lock_file(path)?;
        Ok(Box::new(FaultyLock { inner, plan: Arc::clone(&self.plan) }))
    }

    fn sync_directory(&self, path: &Path) -> io::Result<()> {
        self.plan.check_operation()?;
        self.inner.sync_directory(path)
    }

    fn list(&self, path: &Path) -> io::Result<Vec<PathBuf>> {
        self.plan.check_operation()?;
        self.inner.list(path)
    }
}

#[derive(Debug)]
struct FaultyLock {
    inner: Box<dyn HeldLock>,
    plan: Arc<FaultPlan>,
}

impl HeldLock for FaultyLock {
    fn is_current(&self) -> io::Result<bool> {
        self.plan.check_operation()?;
        self.inner.is_current()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt as _;

    use cascade_runtime::SystemClock;

    use super::*;
    use crate::IoEngine;
    use crate::conformance::deadline;
    use crate::io::{Buffer, PageBuffer, SystemFiles};

    /// A short read executed and reported the whole transfer, so no test covered the continuation.
    #[test]
    fn a_short_read_moves_one_page_and_is_continued() {
        let content = crate::conformance::content(1, 3 * PAGE_BYTES);
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&content, 0).unwrap();
        let file = Arc::new(FileHandle::from(file));
        let read = || {
            let buffers = vec![Buffer::Pages(PageBuffer::zeroed(content.len()))];
            Transfer::new(TransferKind::Read, Arc::clone(&file), 0, buffers)
        };
        let clock = Arc::new(SystemClock);
        let io = FileIo::system(IoEngine::Psync, false, 2, None, clock).unwrap();

        let mut batch = TransferBatch::new(vec![read()]);
        FaultPlan::new(Fault::Short, 0, false).wrap(&io).engine.run(&mut batch, deadline());
        let outcome = batch.outcomes.pop().flatten().unwrap();
        assert_eq!(outcome.result.unwrap(), PAGE_BYTES);
        let buffers = outcome.transfer.unwrap().buffers;
        assert_eq!(buffers[0].bytes()[..PAGE_BYTES], content[..PAGE_BYTES]);
        assert!(buffers[0].bytes()[PAGE_BYTES..].iter().all(|byte| *byte == UNREAD_BYTE));

        for is_permanent in [false, true] {
            let plan = FaultPlan::new(Fault::Short, 0, is_permanent);
            let (transfer, result) =
                plan.wrap(&io).transfer_all(vec![read()], deadline()).remove(0);
            result.unwrap();
            assert_eq!(transfer.unwrap().buffers[0].bytes(), content);
            assert_eq!(plan.calls(), if is_permanent { 3 } else { 2 });
        }
    }

    /// An operation that is not counted reaches the system: there it fails with another error, or
    /// succeeds.
    #[test]
    fn each_file_operation_is_a_call_that_can_fail() {
        let directory = tempfile::tempdir().unwrap();
        let (there, path) = (directory.path(), directory.path().join("one"));
        let plan = FaultPlan::new(Fault::Io, 1, true);
        let inner: Arc<dyn FileOperations> = Arc::new(SystemFiles);
        let files = FaultyFiles { inner, plan: Arc::clone(&plan) };
        let held = files.lock_file(&there.join("held")).unwrap();
        let file = FileHandle::other(1);
        let failed = [
            files.open(&path, OpenMode::Create { allocate_bytes: 0 }, false).map(drop),
            files.truncate(&file, 0),
            files.length(&file).map(drop),
            files.read(&file, 0, &mut [0; 8]).map(drop),
            files.next_data(&file, 0).map(drop),
            files.replace(&path, &[1]),
            files.overwrite(&path).map(drop),
            files.set_aside(&path).map(drop),
            files.remove(&path),
            files.make_directory(there),
            files.directory_identity(there).map(drop),
            files.check_directory(there).map(drop),
            files.check_not_link(there),
            files.lock_file(&path).map(drop),
            held.is_current().map(drop),
            files.sync_directory(there),
            files.list(there).map(drop),
        ];
        for (at, result) in failed.iter().enumerate() {
            let error = result.as_ref().unwrap_err().raw_os_error();
            assert_eq!(error, io_error().raw_os_error(), "operation {at}");
        }
        assert_eq!(plan.calls(), 1 + failed.len() as u64);
    }
}
