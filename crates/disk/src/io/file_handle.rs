//! An open file: the system's, or one of another implementation of the file operations.

use std::fs::File;
use std::io;

use super::late_syncs::LateSyncs;

/// An open file of an implementation of [`super::FileOperations`].
///
/// Only the implementation that opened a file looks into its handle: the system's takes
/// [`Self::system`], another one [`Self::number`]. Dropping the handle closes a system file. An
/// implementation of another kind is not told about it.
#[derive(Debug)]
pub struct FileHandle {
    kind: Kind,
    late_syncs: LateSyncs,
}

#[derive(Debug)]
enum Kind {
    System(File),
    Other(u64),
}

impl FileHandle {
    /// A file that is not the system's. The number means something to the implementation that gave
    /// it, and to nothing else.
    pub fn other(number: u64) -> Self {
        Self { kind: Kind::Other(number), late_syncs: LateSyncs::default() }
    }

    /// The file of the system.
    ///
    /// # Errors
    /// `Unsupported` if another implementation opened the file.
    pub fn system(&self) -> io::Result<&File> {
        match &self.kind {
            Kind::System(file) => Ok(file),
            Kind::Other(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// The number given to [`Self::other`], or `None` for a system file.
    pub fn number(&self) -> Option<u64> {
        match &self.kind {
            Kind::System(_) => None,
            Kind::Other(number) => Some(*number),
        }
    }

    /// Its syncs whose callers have gone.
    pub(super) fn late_syncs(&self) -> &LateSyncs {
        &self.late_syncs
    }
}

impl From<File> for FileHandle {
    fn from(file: File) -> Self {
        Self { kind: Kind::System(file), late_syncs: LateSyncs::default() }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt as _;
    use std::sync::Arc;

    use cascade_runtime::SystemClock;

    use super::*;
    use crate::IoEngine;
    use crate::conformance::{content, deadline};
    use crate::format::PAGE_BYTES;
    use crate::io::{
        Buffer, FileIo, FileOperations as _, PageBuffer, SystemFiles, Transfer, TransferKind,
    };

    #[test]
    fn engines_refuse_files_of_another_implementation_and_return_their_buffers() {
        let bytes = content(1, PAGE_BYTES);
        let system = tempfile::tempfile().unwrap();
        system.write_all_at(&bytes, 0).unwrap();
        let system = Arc::new(FileHandle::from(system));
        let other = Arc::new(FileHandle::other(7));
        assert_eq!((system.number(), other.number()), (None, Some(7)));
        let read = |file: &Arc<FileHandle>| {
            let buffers = vec![Buffer::Pages(PageBuffer::zeroed(PAGE_BYTES))];
            Transfer::new(TransferKind::Read, Arc::clone(file), 0, buffers)
        };
        for kind in [IoEngine::Psync, IoEngine::Uring] {
            // A kernel without io_uring has one engine.
            let Ok(io) = FileIo::system(kind, false, 2, None, Arc::new(SystemClock)) else {
                continue;
            };
            let transfers = [&other, &system, &other, &other, &system].map(read).into();
            let mut results = io.transfer_all(transfers, deadline());
            results.extend(io.transfer_all(vec![Transfer::sync(Arc::clone(&other))], deadline()));
            for (at, (transfer, result)) in results.into_iter().enumerate() {
                let transfer = transfer.expect("no device uses the buffers");
                if transfer.file.number().is_some() {
                    let kind = result.unwrap_err().kind();
                    assert_eq!(kind, io::ErrorKind::Unsupported, "transfer {at}");
                } else {
                    result.unwrap();
                    assert_eq!(transfer.buffers[0].bytes(), bytes, "transfer {at}");
                }
            }
        }
    }

    #[test]
    fn the_system_refuses_files_of_another_implementation() {
        let file = FileHandle::other(7);
        let results = [
            SystemFiles.truncate(&file, 0),
            SystemFiles.length(&file).map(drop),
            SystemFiles.read(&file, 0, &mut [0; 8]).map(drop),
            SystemFiles.next_data(&file, 0).map(drop),
        ];
        for result in results {
            assert_eq!(result.unwrap_err().kind(), io::ErrorKind::Unsupported);
        }
    }
}
