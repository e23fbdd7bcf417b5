//! An open file: the system's, or one of another implementation of the file operations.

use std::fs::File;
use std::io;

/// An open file of an implementation of [`super::FileOperations`].
///
/// Only the implementation that opened a file looks into its handle: the system's takes
/// [`Self::system`], another one [`Self::number`]. Dropping the handle closes a system file. An
/// implementation of another kind is not told about it.
#[derive(Debug)]
pub struct FileHandle(Kind);

#[derive(Debug)]
enum Kind {
    System(File),
    Other(u64),
}

impl FileHandle {
    /// A file that is not the system's. The number means something to the implementation that gave
    /// it, and to nothing else.
    pub fn other(number: u64) -> Self {
        Self(Kind::Other(number))
    }

    /// The file of the system.
    ///
    /// # Errors
    /// `Unsupported` if another implementation opened the file.
    pub fn system(&self) -> io::Result<&File> {
        match &self.0 {
            Kind::System(file) => Ok(file),
            Kind::Other(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// The number given to [`Self::other`], or `None` for a system file.
    pub fn number(&self) -> Option<u64> {
        match &self.0 {
            Kind::System(_) => None,
            Kind::Other(number) => Some(*number),
        }
    }
}

impl From<File> for FileHandle {
    fn from(file: File) -> Self {
        Self(Kind::System(file))
    }
}
