//! A probe of the device below a file tier: a page there and back, as blocks go.

use std::fs::File;
use std::io;
use std::sync::Arc;

use cascade_block::Deadline;

use crate::format::PAGE_BYTES;
use crate::io::{Buffer, FileIo, OpenMode, PageBuffer, Transfer, TransferKind};
use crate::lock::DirectoryLock;
use crate::random::random_bytes;
use crate::{DiskError, FileTierConfig};

/// A probe of writes is not begun while so many calls hang in the kernel: each would hang too, and
/// keep a thread.
const STUCK_CALLS_MAX: u64 = 8;

/// Writes a page to a file of its own beside the blocks, syncs it and reads it back, through the
/// engine that moves blocks. Takes part in no queue of theirs, so that it does not wait for them.
pub(crate) fn probe(
    io: &Io,
    config: &FileTierConfig,
    lock: &Arc<DirectoryLock>,
    direct: bool,
    deadline: Deadline,
) -> Result<(), DiskError> {
    let path = config.directory.join(format!("{}.probe", config.writer));
    if io.stuck_calls() >= STUCK_CALLS_MAX {
        // The device has not answered what was asked of it before.
        return Err(DiskError::Timeout { operation: "probe", path });
    }
    let (target, lock) = (path.clone(), Arc::clone(lock));
    let file = io.call("open", &path, deadline, move |files| {
        lock.check_or_relock()?;
        match files.open(&target, OpenMode::Write, direct) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                files.open(&target, OpenMode::Create { allocate_bytes: 0 }, direct)
            }
            Err(error) if error.kind() == io::ErrorKind::IsADirectory => {
                files.set_aside(&target)?;
                files.open(&target, OpenMode::Create { allocate_bytes: 0 }, direct)
            }
            opened => opened,
        }
    })?;
    let failed = |operation, source| DiskError::from_io(operation, &path, source);
    let mut written = PageBuffer::zeroed(PAGE_BYTES);
    let mark: [u8; 16] = random_bytes().map_err(|source| failed("probe", source))?;
    for piece in written.bytes_mut().chunks_mut(mark.len()) {
        piece.copy_from_slice(&mark[..piece.len()]);
    }
    let file = Arc::new(file);
    let page = |kind, pages| Transfer::new(kind, Arc::clone(&file), 0, vec![Buffer::Pages(pages)]);
    let steps = [
        ("write", page(TransferKind::Write, written)),
        ("sync", Transfer::sync(Arc::clone(&file))),
        ("read", page(TransferKind::Read, PageBuffer::zeroed(PAGE_BYTES))),
    ];
    let mut found = None;
    for (operation, transfer) in steps {
        let (transfer, result) = io.transfer_all(vec![transfer], deadline).remove(0);
        result.map_err(|source| failed(operation, source))?;
        found = transfer;
    }
    let read = found.expect("a finished transfer comes back");
    let is_same = read.buffers[0].bytes().chunks(mark.len()).all(|piece| *piece == mark);
    if is_same { Ok(()) } else { Err(failed("read", io::Error::other("it holds other bytes"))) }
}

/// Reads a page of a file that holds blocks, if there is one, through the engine that moves blocks;
/// and looks whether the directory is still the one that was opened. Writes nothing: a file system
/// that takes no writes may well be read.
pub(crate) fn probe_reads(
    io: &Io,
    config: &FileTierConfig,
    lock: &Arc<DirectoryLock>,
    blocks: Option<Arc<File>>,
    deadline: Deadline,
) -> Result<(), DiskError> {
    let place = Arc::clone(lock);
    io.call_reading("look at", &config.directory, deadline, move |_| place.check_directory())?;
    let Some(file) = blocks else { return Ok(()) };
    let page = Buffer::Pages(PageBuffer::zeroed(PAGE_BYTES));
    let transfer = Transfer::new(TransferKind::Read, file, 0, vec![page]);
    match io.transfer_all(vec![transfer], deadline).remove(0).1 {
        // A file that was cut is damaged; its device gave an answer.
        Err(error) if error.kind() != io::ErrorKind::UnexpectedEof => {
            Err(DiskError::from_io("read a page below", &config.directory, error))
        }
        Ok(()) | Err(_) => Ok(()),
    }
}
