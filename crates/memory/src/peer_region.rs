//! The mapping of a region that another process made.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;

use rustix::fs::fstat;
use rustix::mm::ProtFlags;

use crate::MemoryError;
use crate::fault::Watch;
use crate::mapping::Mapping;

/// A region of another process, mapped in this one for as long as this value lives.
#[derive(Debug)]
pub struct PeerRegion {
    mapping: Mapping,
    /// Other processes of the user may truncate a named file.
    _watch: Watch,
}

impl PeerRegion {
    /// Maps a region from the descriptor that its process sent.
    ///
    /// # Errors
    /// If the file has another length than the process said.
    pub fn map(file: OwnedFd, bytes: usize, is_writable: bool) -> Result<Self, MemoryError> {
        let refused = |source: io::Error| MemoryError::Map { bytes, source };
        let actual = fstat(&file).map_err(|error| refused(error.into()))?.st_size;
        // A mapping beyond the end of the file would raise SIGBUS when it is read.
        if usize::try_from(actual).ok() != Some(bytes) || bytes == 0 {
            let text = format!("the file is {actual} bytes long");
            return Err(refused(io::Error::new(io::ErrorKind::InvalidData, text)));
        }
        let write = if is_writable { ProtFlags::WRITE } else { ProtFlags::empty() };
        let mapping = Mapping::of_file(&file, bytes, ProtFlags::READ | write).map_err(refused)?;
        let watch = Watch::over(mapping.base().as_ptr().addr(), bytes).map_err(refused)?;
        // The mapping keeps the memory, so the descriptor is not needed any more.
        drop(File::from(file));
        Ok(Self { mapping, _watch: watch })
    }

    /// Excludes the mapping from children that are forked from now on.
    pub(crate) fn exclude_from_children(&mut self) -> Result<(), MemoryError> {
        let bytes = self.mapping.bytes();
        let refused = |source| MemoryError::Map { bytes, source };
        self.mapping.exclude_from_children().map_err(refused)
    }

    /// Start of the mapping in this process.
    pub fn base(&self) -> NonNull<u8> {
        self.mapping.base()
    }

    /// Length of the mapping.
    pub fn bytes(&self) -> usize {
        self.mapping.bytes()
    }
}
