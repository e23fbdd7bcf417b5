//! Probes of a file tier's device: whether it supports direct I/O, and whether it answers.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use cascade_runtime::{Deadline, fill_random};

use crate::format::PAGE_BYTES;
use crate::io::{
    Buffer, FileHandle, FileIo, OpenMode, PageBuffer, Transfer, TransferKind, is_not_own,
};
use crate::lock::DirectoryLock;
use crate::{DiskError, FilesConfig};

/// A write probe fails at once while this many calls hang in the kernel. Each further probe would
/// hang too and occupy a thread.
const STUCK_CALLS_MAX: u64 = 8;

fn probe_path(config: &FilesConfig) -> PathBuf {
    config.directory.join(format!("{}.probe", config.writer))
}

/// Whether the file system supports `O_DIRECT`.
pub(crate) fn probe_direct(
    io: &FileIo,
    config: &FilesConfig,
    deadline: Deadline,
) -> Result<bool, DiskError> {
    let path = probe_path(config);
    let probe = path.clone();
    io.call("create", &path, deadline, move |files| {
        match files.remove(&probe) {
            Err(error) if error.kind() == io::ErrorKind::IsADirectory => {
                files.set_aside(&probe)?;
            }
            // If it could not be removed, the `open` below returns the error.
            Ok(()) | Err(_) => {}
        }
        // A file system without `O_DIRECT` rejects it when a file is opened.
        let opened = files.open(&probe, OpenMode::Create { allocate_bytes: 0 }, true);
        let removed = files.remove(&probe);
        match opened {
            Ok(_file) => removed.map(|()| true),
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(false),
            Err(error) => Err(error),
        }
    })
}

/// Writes a page to the probe file beside the blocks, syncs it and reads it back, with the I/O
/// engine that transfers blocks. It takes no lock of the tier, so that it does not wait for block
/// writes.
pub(crate) fn probe(
    io: &FileIo,
    config: &FilesConfig,
    lock: &Arc<DirectoryLock>,
    direct: bool,
    deadline: Deadline,
) -> Result<(), DiskError> {
    let path = probe_path(config);
    if io.stuck_calls() >= STUCK_CALLS_MAX {
        // The device has not completed earlier calls.
        return Err(DiskError::Timeout { operation: "probe", path });
    }
    let (target, lock) = (path.clone(), Arc::clone(lock));
    let file = io.call("open", &path, deadline, move |files| {
        // Before anything is written: the path may lead to another directory by now.
        lock.check_or_relock(files)?;
        match files.open(&target, OpenMode::Write, direct) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                files.open(&target, OpenMode::Create { allocate_bytes: 0 }, direct)
            }
            Err(error) if error.kind() == io::ErrorKind::IsADirectory || is_not_own(&error) => {
                files.set_aside(&target)?;
                files.open(&target, OpenMode::Create { allocate_bytes: 0 }, direct)
            }
            opened => opened,
        }
    })?;
    let failed = |operation, source| DiskError::from_io(operation, &path, source);
    let mut written = PageBuffer::zeroed(PAGE_BYTES);
    // Random, so that the page of an earlier probe is not taken for this one.
    let mut mark = [0; 16];
    fill_random(&mut mark).map_err(|source| failed("probe", source))?;
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
    let mut last = None;
    for (operation, transfer) in steps {
        let (transfer, result) = io.transfer_all(vec![transfer], deadline).remove(0);
        result.map_err(|source| failed(operation, source))?;
        last = transfer;
    }
    let read = last.expect("a completed transfer is returned");
    let is_same = read.buffers[0].bytes().chunks(mark.len()).all(|piece| *piece == mark);
    if is_same {
        Ok(())
    } else {
        Err(failed("read", io::Error::other("it returned other bytes than were written")))
    }
}

/// Reads a page of a file that holds blocks, if there is one, and checks that the directory is
/// still the one that was opened. It writes nothing, because a file system that rejects writes may
/// still be readable.
pub(crate) fn probe_reads(
    io: &FileIo,
    config: &FilesConfig,
    lock: &Arc<DirectoryLock>,
    blocks: Option<Arc<FileHandle>>,
    deadline: Deadline,
) -> Result<(), DiskError> {
    let lock = Arc::clone(lock);
    io.call_reading("check", &config.directory, deadline, move |files| {
        lock.check_directory(files)
    })?;
    let Some(file) = blocks else { return Ok(()) };
    let page = Buffer::Pages(PageBuffer::zeroed(PAGE_BYTES));
    let transfer = Transfer::new(TransferKind::Read, file, 0, vec![page]);
    match io.transfer_all(vec![transfer], deadline).remove(0).1 {
        // A truncated file is damaged, but its device answers.
        Err(error) if error.kind() != io::ErrorKind::UnexpectedEof => {
            Err(DiskError::from_io("read a page below", &config.directory, error))
        }
        Ok(()) | Err(_) => Ok(()),
    }
}
