//! A stand-in for the memory of a device, for tests. It is host memory, and never a measure of
//! speed.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::ProtFlags;

use super::{DeviceError, DeviceMemory};
use crate::MemoryError;
use crate::mapping::Mapping;

/// Device memory that is not one: an in-memory file, for tests where there is no device.
///
/// The file is mapped without access at its base address, so that every instruction that follows an
/// address of this memory raises SIGSEGV, as it would be wrong on a device. Copies go through the
/// file.
#[derive(Debug)]
pub struct FakeDevice {
    file: File,
    inaccessible: Mapping,
    /// Operations that fail, starting with the next one.
    failures: AtomicUsize,
    refuses_reads: AtomicBool,
    is_lost: AtomicBool,
    bytes_out: AtomicUsize,
}

impl FakeDevice {
    /// A fake device with zeroed memory.
    ///
    /// # Errors
    /// If the kernel refuses the file or the mapping.
    pub fn new(bytes: usize) -> Result<Arc<Self>, MemoryError> {
        let refused = |source| MemoryError::Map { bytes, source };
        Self::map(bytes).map(Arc::new).map_err(refused)
    }

    fn map(bytes: usize) -> io::Result<Self> {
        let file = File::from(memfd_create("cascade-fake-device", MemfdFlags::CLOEXEC)?);
        ftruncate(&file, bytes as u64)?;
        let inaccessible = Mapping::of_file(&file, bytes, ProtFlags::empty())?;
        let [failures, bytes_out] = [0, 0].map(AtomicUsize::new);
        let [refuses_reads, is_lost] = [false, false].map(AtomicBool::new);
        Ok(Self { file, inaccessible, failures, refuses_reads, is_lost, bytes_out })
    }

    /// Fails the next `count` operations.
    pub fn fail_next(&self, count: usize) {
        self.failures.store(count, Ordering::SeqCst);
    }

    /// Whether all copies to the host fail from now on.
    pub fn refuse_reads(&self, refuses: bool) {
        self.refuses_reads.store(refuses, Ordering::SeqCst);
    }

    /// Fails all operations from now on, as a device whose context died.
    pub fn lose(&self) {
        self.is_lost.store(true, Ordering::SeqCst);
    }

    /// Bytes copied to the host so far.
    pub fn bytes_copied_out(&self) -> usize {
        self.bytes_out.load(Ordering::SeqCst)
    }

    /// All bytes, as the device sees them. Not counted as a copy.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn contents(&self) -> io::Result<Vec<u8>> {
        let mut contents = vec![0; self.inaccessible.bytes()];
        self.file.read_exact_at(&mut contents, 0)?;
        Ok(contents)
    }

    /// Flips a bit, as a fault of the memory would.
    ///
    /// # Errors
    /// If the file cannot be read or written.
    pub fn flip_bit(&self, offset: usize) -> io::Result<()> {
        let mut byte = [0];
        self.file.read_exact_at(&mut byte, offset as u64)?;
        self.file.write_all_at(&[byte[0] ^ 4], offset as u64)
    }

    fn run(
        &self,
        operation: &'static str,
        (offset, bytes): (usize, usize),
        run: impl FnOnce() -> io::Result<()>,
    ) -> Result<(), DeviceError> {
        if self.is_lost.load(Ordering::SeqCst) {
            return Err(DeviceError::Lost);
        }
        let failed = |error: io::Error| {
            let source = Arc::new(error);
            DeviceError::Failed { operation, offset, bytes, source }
        };
        let less = |left: usize| left.checked_sub(1);
        if self.failures.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less).is_ok() {
            return Err(failed(io::Error::other("the test made this operation fail")));
        }
        let end = offset.checked_add(bytes);
        if end.is_none_or(|end| end > self.inaccessible.bytes()) {
            return Err(failed(io::ErrorKind::InvalidInput.into()));
        }
        run().map_err(failed)
    }
}

impl DeviceMemory for FakeDevice {
    fn base(&self) -> u64 {
        self.inaccessible.base().as_ptr().addr() as u64
    }

    fn bytes(&self) -> usize {
        self.inaccessible.bytes()
    }

    fn copy_in(&self, offset: usize, source: &[u8]) -> Result<(), DeviceError> {
        let write = || self.file.write_all_at(source, offset as u64);
        self.run("write", (offset, source.len()), write)
    }

    fn copy_out(&self, offset: usize, target: &mut [u8]) -> Result<(), DeviceError> {
        let bytes = target.len();
        let refuses = self.refuses_reads.load(Ordering::SeqCst);
        self.run("read", (offset, bytes), || {
            if refuses {
                return Err(io::Error::other("the test made reads fail"));
            }
            self.file.read_exact_at(target, offset as u64)
        })?;
        self.bytes_out.fetch_add(bytes, Ordering::SeqCst);
        Ok(())
    }

    fn zero(&self, offset: usize, bytes: usize) -> Result<(), DeviceError> {
        let write = || self.file.write_all_at(&vec![0; bytes], offset as u64);
        self.run("zero", (offset, bytes), write)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![expect(unsafe_code, reason = "follows an address of a device, in a child process")]

    use super::*;

    #[test]
    fn an_access_to_its_addresses_ends_the_process() {
        let device = FakeDevice::new(4096).expect("a page is there");
        device.copy_in(0, &[7; 4096]).expect("a fake device works");
        let base = device.inaccessible.base();
        // SAFETY: the child does nothing but read a byte and end.
        let child = unsafe { libc::fork() };
        assert!(child >= 0, "a process can be created");
        if child == 0 {
            // SAFETY: restores the kernel's own action, which a sanitizer or a handler replaced.
            unsafe { libc::signal(libc::SIGSEGV, libc::SIG_DFL) };
            // SAFETY: this read is what the test is about: the kernel ends the child.
            let byte = unsafe { base.read_volatile() };
            // SAFETY: ends the child without the parent's handlers.
            unsafe { libc::_exit(i32::from(byte)) };
        }
        let mut status = 0;
        // SAFETY: waits for the child from above and writes to a local variable.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert!(libc::WIFSIGNALED(status), "the child read {status:#x}");
        assert_eq!(libc::WTERMSIG(status), libc::SIGSEGV);
    }
}
