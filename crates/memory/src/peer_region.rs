//! The mapping of a region that another process made.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;

use rustix::fs::{SealFlags, fcntl_get_seals, fstat};
use rustix::mm::ProtFlags;

use crate::MemoryError;
use crate::fault::Watch;
use crate::mapping::Mapping;

/// A region of another process, mapped in this one for as long as this value lives.
#[derive(Debug)]
pub struct PeerRegion {
    mapping: Mapping,
    /// Other processes of the user may truncate a file that is not sealed.
    _watch: Option<Watch>,
}

impl PeerRegion {
    /// Maps a region from the descriptor that its process sent.
    ///
    /// # Errors
    /// If the file has another length than the process said.
    pub fn map(file: OwnedFd, bytes: usize, is_writable: bool) -> Result<Self, MemoryError> {
        let is_sealed = is_sealed(&file);
        Self::map_checked(file, bytes, is_writable, is_sealed)
    }

    /// Maps a region as [`Self::map`] does, and refuses a file that somebody could truncate.
    ///
    /// # Errors
    /// Also if the file is not sealed against that.
    pub fn map_sealed(file: OwnedFd, bytes: usize, is_writable: bool) -> Result<Self, MemoryError> {
        if !is_sealed(&file) {
            let text = "the file of the memory is not sealed: its process could truncate it";
            let source = io::Error::new(io::ErrorKind::InvalidData, text);
            return Err(MemoryError::Map { bytes, source });
        }
        Self::map_checked(file, bytes, is_writable, true)
    }

    fn map_checked(
        file: OwnedFd,
        bytes: usize,
        is_writable: bool,
        is_sealed: bool,
    ) -> Result<Self, MemoryError> {
        let refused = |source: io::Error| MemoryError::Map { bytes, source };
        let actual = fstat(&file).map_err(|error| refused(error.into()))?.st_size;
        // A mapping beyond the end of the file would raise SIGBUS when it is read.
        if usize::try_from(actual).ok() != Some(bytes) || bytes == 0 {
            let text = format!("the file is {actual} bytes long");
            return Err(refused(io::Error::new(io::ErrorKind::InvalidData, text)));
        }
        let write = if is_writable { ProtFlags::WRITE } else { ProtFlags::empty() };
        let mapping = Mapping::of_file(&file, bytes, ProtFlags::READ | write).map_err(refused)?;
        let watch = (!is_sealed).then(|| Watch::over(mapping.base().as_ptr().addr(), bytes));
        let watch = watch.transpose().map_err(refused)?;
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

/// Whether the kernel keeps everybody from truncating the file. Only anonymous files can have that.
fn is_sealed(file: &OwnedFd) -> bool {
    fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use rustix::fs::{MemfdFlags, fcntl_add_seals, ftruncate, memfd_create};

    use super::*;

    const BYTES: usize = 8192;

    fn file() -> OwnedFd {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create("cascade-test", flags).expect("a file in memory");
        ftruncate(&file, BYTES as u64).expect("8 KiB are there");
        file
    }

    #[test]
    fn a_file_that_its_process_could_truncate_is_refused_where_a_sealed_one_is_required() {
        let error = PeerRegion::map_sealed(file(), BYTES, true).unwrap_err();
        let source = std::error::Error::source(&error).map(ToString::to_string);
        assert!(source.is_some_and(|source| source.contains("is not sealed")), "{error}");
        let growing = file();
        fcntl_add_seals(&growing, SealFlags::GROW).unwrap();
        PeerRegion::map_sealed(growing, BYTES, true).unwrap_err();
        PeerRegion::map_sealed(std::fs::File::open("/dev/null").unwrap().into(), BYTES, true)
            .unwrap_err();
        let sealed = file();
        fcntl_add_seals(&sealed, SealFlags::SHRINK).unwrap();
        let region = PeerRegion::map_sealed(sealed.try_clone().unwrap(), BYTES, true).unwrap();
        assert_eq!(region.bytes(), BYTES);
        ftruncate(&sealed, 0).unwrap_err();
        PeerRegion::map_sealed(sealed, BYTES / 2, true).unwrap_err();
    }

    #[test]
    fn a_file_without_seals_is_mapped_where_none_are_required() {
        assert_eq!(PeerRegion::map(file(), BYTES, false).unwrap().bytes(), BYTES);
    }
}
