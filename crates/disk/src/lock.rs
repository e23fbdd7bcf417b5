//! One writer a name: an exclusive lock that ends with the process that holds it.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use cascade_block::Deadline;
use rustix::fs::{FlockOperation, flock};

use crate::io::{Io, OpenMode};
use crate::{DiskError, FileTierConfig, WriterName};

/// Held as long as this value lives. The kernel gives it back when the process dies.
#[derive(Debug)]
pub(crate) struct DirectoryLock {
    _file: File,
    place: LockPlace,
}

/// Where the lock file lies, and what tells it from others that come to lie there.
#[derive(Debug, Clone)]
pub(crate) struct LockPlace {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl LockPlace {
    /// An error if the lock file is no longer there: then neither is what it stands for. May hang.
    pub(crate) fn check(&self) -> io::Result<()> {
        let found = std::fs::metadata(&self.path)?;
        if (found.dev(), found.ino()) == (self.device, self.inode) {
            return Ok(());
        }
        Err(io::Error::other("another directory lies there now: look whether it is still mounted"))
    }
}

impl DirectoryLock {
    /// Makes the directory if it is missing, and takes the lock of its writer.
    pub(crate) fn make(
        io: &Io,
        config: &FileTierConfig,
        deadline: Deadline,
    ) -> Result<Self, DiskError> {
        let (directory, writer) = (config.directory.clone(), config.writer.clone());
        io.call("lock", &config.directory, deadline, move |files| {
            files.make_directory(&directory)?;
            Ok(Self::take(&directory, &writer))
        })?
    }

    pub(crate) fn place(&self) -> &LockPlace {
        &self.place
    }

    /// Takes the lock of a writer, or says who has it.
    fn take(directory: &Path, writer: &WriterName) -> Result<Self, DiskError> {
        let path = directory.join(format!("{writer}.lock"));
        let failed = |source| DiskError::from_io("lock", &path, source);
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&path)
            .map_err(failed)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                let mut text = String::new();
                let pid =
                    file.read_to_string(&mut text).ok().and_then(|_| text.trim().parse().ok());
                return Err(DiskError::Locked { path, pid });
            }
            Err(error) => return Err(failed(error.into())),
        }
        file.set_len(0)
            .and_then(|()| file.rewind())
            .and_then(|()| writeln!(file, "{}", std::process::id()))
            .map_err(failed)?;
        let found = file.metadata().map_err(failed)?;
        let place = LockPlace { path: path.clone(), device: found.dev(), inode: found.ino() };
        Ok(Self { _file: file, place })
    }
}

/// Whether the file system takes `O_DIRECT`.
pub(crate) fn probe_direct(
    io: &Io,
    config: &FileTierConfig,
    deadline: Deadline,
) -> Result<bool, DiskError> {
    let path = config.directory.join(format!("{}.probe", config.writer));
    let probe = path.clone();
    io.call("create", &path, deadline, move |files| {
        let leftover = files.remove(&probe);
        drop(leftover);
        let opened = files.open(&probe, OpenMode::Create { allocate_bytes: 0 }, true);
        let removed = files.remove(&probe);
        match opened {
            Ok(_file) => removed.map(|()| true),
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(false),
            Err(error) => Err(error),
        }
    })
}
