//! The file operations of a simulated disk.

use std::io::{self, IoSliceMut};
use std::path::{Path, PathBuf};
use std::time::Duration;

use cascade_disk::io::{FileHandle, FileIdentity, FileOperations, HeldLock, LockedBy, OpenMode};
use cascade_runtime::{now, sleep};

use super::content::{Content, SyncPoint};
use super::device::{Device, OpenFile, device_error, note};
use super::faults::{CallKind, DiskFault};
use super::{SimDisk, wait_until};

/// Attempts to take a lock that is held, and the pause between two.
const LOCK_ATTEMPTS: u32 = 50;
const LOCK_PAUSE: Duration = Duration::from_millis(10);

/// File operations on a simulated disk.
#[derive(Debug, Clone)]
pub(super) struct SimFiles(pub(super) SimDisk);

/// A lock of a path of a simulated disk.
#[derive(Debug)]
struct SimLock {
    disk: SimDisk,
    path: PathBuf,
    inode: u64,
    number: u64,
}

impl SimFiles {
    /// One step of an operation: takes its time, then has its effect at once.
    fn step<T>(
        &self,
        kind: CallKind,
        bytes: usize,
        act: impl FnOnce(&mut Device, Option<DiskFault>, Duration) -> io::Result<T>,
    ) -> io::Result<T> {
        let (effect, due) = self.0.device().plan_call(kind, bytes, now());
        wait_until(due);
        let mut device = self.0.device();
        let result = act(&mut device, effect, now());
        let noted = result.as_ref().map(|_| bytes).map_err(|error| error.kind().into());
        note(kind, 0, 0, &noted);
        result
    }

    /// A step that changes or looks up names.
    fn name_step<T>(
        &self,
        act: impl FnOnce(&mut Device, Duration) -> io::Result<T>,
    ) -> io::Result<T> {
        self.step(CallKind::Name, 0, |device, effect, now| {
            if let Some(fault) = effect {
                device.count_fault(fault, now);
                return Err(device_error());
            }
            act(device, now)
        })
    }

    fn write(&self, inode: u64, bytes: &[u8]) -> io::Result<()> {
        let mut written = 0;
        while written < bytes.len() {
            let rest = &bytes[written..];
            written += self.step(CallKind::Write, rest.len(), |device, effect, now| {
                device.write(inode, written as u64, rest, effect, now)
            })?;
        }
        Ok(())
    }

    fn sync_inode(&self, inode: u64) -> io::Result<()> {
        let point = self.0.device().begin_sync(inode)?;
        self.end_sync(inode, point)
    }

    fn end_sync(&self, inode: u64, point: SyncPoint) -> io::Result<()> {
        self.step(CallKind::Sync, 0, |device, effect, now| {
            device.end_sync(inode, Some(point), effect, now)
        })
    }

    fn inode(&self, file: &FileHandle) -> io::Result<u64> {
        let number = file.number().ok_or(io::ErrorKind::Unsupported)?;
        self.0.device().handle(number).map(|file| file.inode)
    }
}

impl FileOperations for SimFiles {
    fn open(&self, path: &Path, mode: OpenMode, direct: bool) -> io::Result<FileHandle> {
        self.name_step(|device, now| {
            let inode = match mode {
                OpenMode::Create { .. } if direct && !device.settings.supports_direct => {
                    return Err(io::ErrorKind::InvalidInput.into());
                }
                OpenMode::Create { allocate_bytes } => device.create(path, allocate_bytes, now)?,
                OpenMode::Read | OpenMode::Write => device.file(path)?,
            };
            if direct && !device.settings.supports_direct {
                return Err(io::ErrorKind::InvalidInput.into());
            }
            let is_writable = mode != OpenMode::Read;
            let number = device.add_handle(OpenFile { inode, is_direct: direct, is_writable });
            Ok(FileHandle::other(number))
        })
    }

    fn truncate(&self, file: &FileHandle, bytes: u64) -> io::Result<()> {
        let inode = self.inode(file)?;
        self.name_step(|device, _| device.change(inode, |content| content.truncate(bytes)))
    }

    fn length(&self, file: &FileHandle) -> io::Result<u64> {
        let inode = self.inode(file)?;
        self.name_step(|device, _| device.content(inode).map(|content| content.length()))
    }

    fn read(&self, file: &FileHandle, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        let inode = self.inode(file)?;
        self.step(CallKind::Read, buffer.len(), |device, effect, now| {
            // The operation is continued until the buffer or the file ends.
            let effect = effect.filter(|fault| *fault != DiskFault::ShortTransfer);
            device.read(inode, offset, &mut [IoSliceMut::new(buffer)], effect, now)
        })
    }

    fn next_data(&self, file: &FileHandle, offset: u64) -> io::Result<Option<u64>> {
        let inode = self.inode(file)?;
        self.name_step(|device, _| device.content(inode).map(|content| content.next_data(offset)))
    }

    fn replace(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        let (inode, temporary) = self.name_step(|device, now| {
            let mut number = 0;
            loop {
                let mut name = path.as_os_str().to_owned();
                name.push(format!(".{number}.tmp"));
                let temporary = PathBuf::from(name);
                match device.create(&temporary, 0, now) {
                    Err(error) if error.kind() == io::ErrorKind::AlreadyExists => number += 1,
                    created => return Ok((created?, temporary)),
                }
            }
        })?;
        let replaced = self
            .write(inode, bytes)
            .and_then(|()| self.sync_inode(inode))
            .and_then(|()| self.name_step(|device, _| device.rename(&temporary, path)));
        if replaced.is_err() {
            // Best effort, as on a real file system.
            let removed = self.remove(&temporary);
            drop(removed);
        }
        replaced?;
        path.parent().map_or(Ok(()), |directory| self.sync_directory(directory))
    }

    fn overwrite(&self, path: &Path) -> io::Result<u64> {
        let inode = self.name_step(|device, _| device.file(path))?;
        let bytes = self.step(CallKind::Write, 0, |device, effect, now| {
            if let Some(fault) = effect {
                device.count_fault(fault, now);
                return Err(device_error());
            }
            device.change(inode, Content::overwrite)
        })?;
        self.sync_inode(inode)?;
        Ok(bytes)
    }

    fn set_aside(&self, path: &Path) -> io::Result<PathBuf> {
        self.name_step(|device, _| device.set_aside(path))
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.name_step(|device, _| device.remove(path))
    }

    fn make_directory(&self, path: &Path) -> io::Result<()> {
        self.name_step(|device, _| device.make_directory(path))
    }

    fn directory_identity(&self, directory: &Path) -> io::Result<FileIdentity> {
        self.name_step(|device, now| {
            let inode = device.resolve(directory)?;
            device.directory(inode)?;
            // Not at an opening, which holds no lock: the tier would keep to the other directory.
            let is_other =
                !device.locks.is_empty() && device.faults.is_active(DiskFault::OtherDirectory, now);
            if is_other {
                device.count_fault(DiskFault::OtherDirectory, now);
            }
            Ok(FileIdentity { device: 1 + u64::from(is_other), inode })
        })
    }

    fn lock_file(&self, path: &Path) -> io::Result<Box<dyn HeldLock>> {
        for _ in 1..LOCK_ATTEMPTS {
            if let Some(lock) = self.try_lock(path)? {
                return Ok(lock);
            }
            sleep(LOCK_PAUSE);
        }
        let pid = Some(self.0.device().process());
        self.try_lock(path)?.ok_or_else(|| LockedBy { pid }.into())
    }

    fn sync_directory(&self, path: &Path) -> io::Result<()> {
        let (inode, last) = {
            let mut device = self.0.device();
            let inode = device.resolve(path)?;
            device.directory(inode)?;
            (inode, device.name_changes)
        };
        self.step(CallKind::Sync, 0, |device, effect, now| {
            device.end_directory_sync(inode, last, effect, now)
        })
    }

    fn list(&self, path: &Path) -> io::Result<Vec<PathBuf>> {
        self.name_step(|device, _| device.list(path))
    }
}

impl SimFiles {
    fn try_lock(&self, path: &Path) -> io::Result<Option<Box<dyn HeldLock>>> {
        let lock = |(inode, number)| -> Box<dyn HeldLock> {
            Box::new(SimLock { disk: self.0.clone(), path: path.to_owned(), inode, number })
        };
        self.name_step(|device, now| Ok(device.lock(path, now)?.map(lock)))
    }
}

impl HeldLock for SimLock {
    fn is_current(&self) -> io::Result<bool> {
        SimFiles(self.disk.clone())
            .name_step(|device, _| device.is_locked(&self.path, self.inode, self.number))
    }
}

impl Drop for SimLock {
    fn drop(&mut self) {
        self.disk.device().unlock(self.inode, self.number);
    }
}
