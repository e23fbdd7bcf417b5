//! One shared mapping of anonymous memory, addressed by offset.
#![expect(unsafe_code, reason = "maps memory and hands out pointers into it")]

use std::io;
use std::os::fd::OwnedFd;
use std::ptr::{self, NonNull};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// A shared mapping that lives as long as this value.
#[derive(Debug)]
pub struct Region {
    base: NonNull<u8>,
    bytes: usize,
    _file: OwnedFd,
}

// SAFETY: the mapping is plain memory without thread affinity; it is unmapped once, on drop.
unsafe impl Send for Region {}
// SAFETY: a shared Region gives out only addresses; access through them is argued by the slabs.
unsafe impl Sync for Region {}

impl Region {
    pub(crate) fn map(bytes: usize) -> io::Result<Self> {
        let file = memfd_create("cascade-pool", MemfdFlags::CLOEXEC)?;
        ftruncate(&file, bytes as u64)?;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice overlaps nothing.
        let base = unsafe { mmap(ptr::null_mut(), bytes, prot, MapFlags::SHARED, &file, 0) }?;
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, bytes, _file: file })
    }

    /// Where the mapping starts in this process.
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Length of the mapping.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: `base` and `bytes` are those of the mapping made in `map`; slabs hold the pool,
        // which holds this, so nothing points into it any more.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) };
        debug_assert!(unmapped.is_ok(), "unmapping our own mapping");
    }
}
