//! Memory of a device that several processes map: anonymous files with a name of ours.
#![expect(unsafe_code, reason = "calls the kernel")]

use std::ffi::{CString, c_int, c_uint};
use std::fs::{File, read_link};
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};

use crate::device_memory::Mapping;

/// How the kernel shows an anonymous file, and our name; the number of the device follows.
const KERNEL_PREFIX: &str = "/memfd:";
const NAME: &str = "cascade-fake-gpu-memory-of-device-";

/// An allocation, and how it is used in this process.
#[derive(Debug)]
pub(crate) struct Allocation {
    file: OwnedFd,
    pub(crate) bytes: usize,
    pub(crate) device: c_int,
    /// Whether this process allocated it; if not, it counts where it was allocated.
    pub(crate) is_own: bool,
    pub(crate) is_released: bool,
    pub(crate) mappings: usize,
}

impl Allocation {
    /// Zeroed memory. Its length never changes, so that no process maps more than there is.
    pub(crate) fn create(device: c_int, bytes: usize) -> Option<Self> {
        let name = CString::new(format!("{NAME}{device}")).ok()?;
        let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
        // SAFETY: takes a string.
        let file = unsafe { libc::memfd_create(name.as_ptr(), flags as c_uint) };
        if file == -1 {
            return None;
        }
        // SAFETY: a new descriptor that nothing else owns.
        let file = unsafe { File::from_raw_fd(file) };
        file.set_len(u64::try_from(bytes).ok()?).ok()?;
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        // SAFETY: changes a file of ours.
        let sealed = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) };
        let file = OwnedFd::from(file);
        (sealed == 0).then(|| Self::new(file, bytes, device, true))
    }

    fn new(file: OwnedFd, bytes: usize, device: c_int, is_own: bool) -> Self {
        Self { file, bytes, device, is_own, is_released: false, mappings: 0 }
    }

    /// The allocation of a descriptor that a fake driver exported; none of any other one.
    pub(crate) fn import(descriptor: c_int) -> Option<Self> {
        if descriptor < 0 {
            return None;
        }
        // SAFETY: used only to copy it, which fails if it is not open.
        let descriptor = unsafe { BorrowedFd::borrow_raw(descriptor) };
        let file = File::from(descriptor.try_clone_to_owned().ok()?);
        let name = read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()?;
        let name = name.to_str()?.strip_prefix(KERNEL_PREFIX)?.strip_prefix(NAME)?;
        let device = name.split(' ').next()?.parse().ok()?;
        let bytes = usize::try_from(file.metadata().ok()?.len()).ok()?;
        Some(Self::new(file.into(), bytes, device, false))
    }

    /// A new descriptor, for the caller of the driver. Programs that the process starts get it,
    /// too: no document says that those of a GPU's driver are closed then.
    pub(crate) fn export(&self) -> Option<c_int> {
        // SAFETY: copies a descriptor of ours.
        let copy = unsafe { libc::dup(self.file.as_raw_fd()) };
        (copy != -1).then_some(copy)
    }

    /// Maps its first bytes into this process.
    pub(crate) fn map(&self, bytes: usize) -> Option<Mapping> {
        Mapping::shared(bytes, self.file.as_fd())
    }
}
