//! A region: memory of this process that batches read and write. Hands out spans of it.
#![expect(unsafe_code, reason = "spans point into memory that this crate did not allocate")]

use std::any::Any;
use std::fmt;
use std::fs::File;
use std::ptr::{self, NonNull};

use cascade_block::{Checksum, checksum};
use cascade_memory::{DmaBuf, HostRegion, HugePages, PoolConfig, copy_in, prefetch_block};

use crate::limits::GPUS_MAX;
use crate::{Refusal, TransportError};

/// What peers may do with a region. The process itself may always do both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Access {
    /// Peers may read it.
    pub read: bool,
    /// Peers may write it.
    pub write: bool,
}

impl Access {
    /// Peers may not access it.
    pub const LOCAL: Self = Self { read: false, write: false };
    /// Peers may read it.
    pub const READ: Self = Self { read: true, write: false };
    /// Peers may write it.
    pub const WRITE: Self = Self { read: false, write: true };
    /// Peers may do both.
    pub const BOTH: Self = Self { read: true, write: true };
}

/// Memory of this process.
pub struct Region {
    base: NonNull<u8>,
    bytes: usize,
    access: Access,
    memory: Memory,
}

/// Keeps the memory of a region.
enum Memory {
    /// A file that other processes can map.
    Shared(HostRegion),
    /// The caller's.
    Foreign { _owner: Box<dyn Any + Send + Sync> },
    /// Of a GPU: no instruction of a processor may access it.
    Gpu { range: DmaBuf, gpu: u8, _owner: Box<dyn Any + Send + Sync> },
}

// SAFETY: a region is an address range without thread affinity; its memory moves with it.
unsafe impl Send for Region {}
// SAFETY: a shared region hands out only spans. What they may be used for while others use the
// same bytes is the contract of `Region::of_memory`.
unsafe impl Sync for Region {}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let base = self.base.as_ptr();
        write!(f, "Region({base:?}, {} bytes, {:?})", self.bytes, self.access)
    }
}

impl Region {
    /// Allocates memory that processes of this host can map.
    pub fn shared(bytes: usize, access: Access) -> Result<Self, TransportError> {
        let config =
            PoolConfig { capacity_bytes: bytes, huge_pages: HugePages::Auto, populate: true };
        let mapped = HostRegion::map(&config);
        let host =
            mapped.map_err(|error| TransportError::memory(bytes, std::io::Error::other(error)))?;
        Ok(Self { base: host.base(), bytes, access, memory: Memory::Shared(host) })
    }

    /// Allocates memory of this process alone.
    ///
    /// # Panics
    /// If there is no memory.
    pub fn private(bytes: usize, access: Access) -> Self {
        let mut memory = vec![0_u8; bytes];
        let base = NonNull::from(memory.as_mut_slice()).cast();
        // SAFETY: the vector owns its bytes, which do not move with it. It is the owner of the
        // region, which makes no reference to them.
        unsafe { Self::of_memory(base, bytes, access, memory) }
    }

    /// Memory of the caller's, such as the pages of an inference engine.
    ///
    /// # Safety
    /// `base` is the start of `bytes` bytes of initialised host memory that stay mapped readable
    /// and writable until `owner` is dropped. No Rust reference to them exists while a batch of
    /// this process or of a peer that `access` admits reads or writes them.
    pub unsafe fn of_memory(
        base: NonNull<u8>,
        bytes: usize,
        access: Access,
        owner: impl Any + Send + Sync,
    ) -> Self {
        Self { base, bytes, access, memory: Memory::Foreign { _owner: Box::new(owner) } }
    }

    /// Memory of a GPU. Only RDMA reaches it, so that the endpoint must use a device.
    ///
    /// `gpu` is a number below 16, different for each GPU whose memory the endpoint has.
    ///
    /// # Errors
    /// If peers may write it and not read it: a read follows their writes, so that the GPU has the
    /// bytes. If there are too many GPUs.
    ///
    /// # Safety
    /// The range stays allocated until `owner` is dropped. No other work of the GPU accesses a part
    /// of it while a batch of this process, or of a peer that `access` admits, does.
    pub unsafe fn of_dmabuf(
        range: DmaBuf,
        gpu: u8,
        access: Access,
        owner: impl Any + Send + Sync,
    ) -> Result<Self, TransportError> {
        if access.write && !access.read {
            let text = "peers that may write memory of a GPU must be allowed to read it: a read \
                        follows their writes";
            return Err(TransportError::Unavailable(text.to_owned()));
        }
        if usize::from(gpu) >= GPUS_MAX {
            let (what, value) = ("the number of a GPU", gpu.into());
            return Err(TransportError::TooLarge { what, value, limit: GPUS_MAX - 1 });
        }
        let (base, bytes) = (NonNull::dangling(), range.bytes);
        let memory = Memory::Gpu { range, gpu, _owner: Box::new(owner) };
        Ok(Self { base, bytes, access, memory })
    }

    /// Its length.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// What peers may do with it.
    pub fn access(&self) -> Access {
        self.access
    }

    /// Its first byte. Of memory of a GPU, no address at all.
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// The memory of a GPU, and the GPU's number.
    pub(crate) fn dmabuf(&self) -> Option<(&DmaBuf, u8)> {
        match &self.memory {
            Memory::Gpu { range, gpu, .. } => Some((range, *gpu)),
            _ => None,
        }
    }

    /// Its memory as a file, if other processes can map it.
    pub(crate) fn file(&self) -> Option<&File> {
        match &self.memory {
            Memory::Shared(host) => Some(host.file()),
            Memory::Foreign { .. } | Memory::Gpu { .. } => None,
        }
    }

    /// The bytes of a place. They stay mapped while the region lives.
    pub(crate) fn span(&self, offset: u64, bytes: u64) -> Result<Span, Refusal> {
        if self.dmabuf().is_some() {
            return Err(Refusal::GpuMemory);
        }
        span_of(self.base, self.bytes, offset, bytes)
    }

    /// Copies bytes into the region.
    ///
    /// # Errors
    /// If they do not fit.
    pub fn fill(&self, offset: u64, bytes: &[u8]) -> Result<(), Refusal> {
        let span = self.span(offset, bytes.len() as u64)?;
        // SAFETY: the span lies in this region's memory, which lives and which, by the contract of
        // `of_memory`, nobody else accesses during the copy; the caller's slice is not in it,
        // because no reference into the region exists.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), span.base(), bytes.len()) };
        Ok(())
    }

    /// Copies bytes out of the region.
    ///
    /// # Errors
    /// If they reach beyond its end.
    pub fn fetch(&self, offset: u64, into: &mut [u8]) -> Result<(), Refusal> {
        let span = self.span(offset, into.len() as u64)?;
        // SAFETY: as in `fill`, in the other direction.
        unsafe { ptr::copy_nonoverlapping(span.base(), into.as_mut_ptr(), into.len()) };
        Ok(())
    }
}

/// The bytes of a place in a mapping of `total` bytes from `base`.
pub(crate) fn span_of(
    base: NonNull<u8>,
    total: usize,
    offset: u64,
    bytes: u64,
) -> Result<Span, Refusal> {
    let end = offset.checked_add(bytes).ok_or(Refusal::OutOfBounds)?;
    if end > total as u64 {
        return Err(Refusal::OutOfBounds);
    }
    let (offset, bytes) = (usize::try_from(offset), usize::try_from(bytes));
    let (Ok(offset), Ok(bytes)) = (offset, bytes) else {
        return Err(Refusal::OutOfBounds);
    };
    // SAFETY: `offset` is at most `total`, the length of the mapping.
    let at = unsafe { base.add(offset) };
    Ok(Span(libc::iovec { iov_base: at.as_ptr().cast(), iov_len: bytes }))
}

/// A run of bytes in memory, in the form that the kernel takes. Whoever holds it keeps the memory
/// mapped: a snapshot of the regions, or the buffer that it was made of.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Span(libc::iovec);

// SAFETY: a span is an address and a length. Who may use it when is argued where it is used.
unsafe impl Send for Span {}
// SAFETY: as above; a shared span gives only the address.
unsafe impl Sync for Span {}

impl fmt::Debug for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Span({:?}, {} bytes)", self.0.iov_base, self.0.iov_len)
    }
}

impl Span {
    /// The bytes of a buffer of this crate's own, which only the kernel reads through it.
    pub(crate) fn of_bytes(bytes: &[u8]) -> Self {
        Self(libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() })
    }

    /// A buffer of this crate's own, which the kernel fills through it.
    pub(crate) fn of_buffer(bytes: &mut [u8]) -> Self {
        Self(libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() })
    }

    pub(crate) fn base(self) -> *mut u8 {
        self.0.iov_base.cast()
    }

    pub(crate) fn bytes(self) -> usize {
        self.0.iov_len
    }

    /// The rest after the first `count` bytes.
    pub(crate) fn after(self, count: usize) -> Self {
        debug_assert!(count <= self.bytes(), "only sent bytes are skipped");
        let rest = self.base().wrapping_add(count);
        Self(libc::iovec { iov_base: rest.cast(), iov_len: self.bytes() - count })
    }

    /// `bytes` bytes from an offset on.
    pub(crate) fn part(self, offset: usize, bytes: usize) -> Self {
        let rest = self.after(offset);
        debug_assert!(bytes <= rest.bytes(), "a part lies in its span");
        Self(libc::iovec { iov_base: rest.0.iov_base, iov_len: bytes })
    }

    /// The bytes, to be read at once.
    pub(crate) fn as_slice(&self) -> &[u8] {
        // SAFETY: as in `checksum`.
        unsafe { std::slice::from_raw_parts(self.base(), self.bytes()) }
    }

    /// Copies to the start of the span; the bytes are not in it.
    pub(crate) fn fill_start(self, bytes: &[u8]) {
        assert!(bytes.len() <= self.bytes(), "no more is copied than fits");
        // SAFETY: the holder keeps the span mapped, and by the contract of `Region::of_memory`
        // nobody else accesses it while a batch writes it. The caller's slice is a buffer of this
        // crate's own, which no region has.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), self.base(), bytes.len()) };
    }

    /// Starts to bring the first bytes into the cache.
    pub(crate) fn prefetch(self) {
        prefetch_block(self.as_slice());
    }

    /// The CRC-32C of the bytes.
    pub(crate) fn checksum(self) -> Checksum {
        // SAFETY: the holder keeps the bytes mapped, and the contract of `Region::of_memory` keeps
        // all others from writing them while a batch moves them. A peer that writes the same bytes
        // in two batches gets a checksum that does not match.
        checksum(unsafe { std::slice::from_raw_parts(self.base(), self.bytes()) })
    }

    /// Appends the first `count` bytes to a buffer.
    #[cfg(feature = "simulated")]
    pub(crate) fn append_to(self, count: usize, buffer: &mut Vec<u8>) {
        assert!(count <= self.bytes(), "no more bytes than there are");
        // SAFETY: as in `checksum`; the buffer is not in the span, because no reference into a
        // region exists.
        buffer.extend_from_slice(unsafe { std::slice::from_raw_parts(self.base(), count) });
    }

    /// Fills the first bytes from a buffer.
    #[cfg(feature = "simulated")]
    pub(crate) fn fill_from(self, bytes: &[u8]) {
        assert!(bytes.len() <= self.bytes(), "no more bytes than there is room for");
        // SAFETY: the holder keeps the bytes mapped, and by the contract of `Region::of_memory`
        // nobody else uses them while a batch writes them. The buffer is this crate's own, so that
        // the two do not overlap.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), self.base(), bytes.len()) };
    }

    /// Copies from a span of the same length, in another mapping.
    pub(crate) fn copy_from(self, source: Self) {
        // SAFETY: the holder keeps the bytes mapped. By the contract of `Region::of_memory`, nobody
        // writes the source and nobody else uses the target while a batch moves them. The two
        // are in different mappings, so that they do not overlap.
        let target = unsafe { std::slice::from_raw_parts_mut(self.base(), self.bytes()) };
        // SAFETY: as above.
        let source = unsafe { std::slice::from_raw_parts(source.base(), source.bytes()) };
        copy_in(target, source);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_beyond_the_end_is_refused() {
        let region = Region::shared(8192, Access::BOTH).unwrap();
        assert_eq!(region.span(0, 8192).unwrap().bytes(), 8192);
        assert_eq!(region.span(8192, 0).unwrap().bytes(), 0);
        for (offset, bytes) in [(0, 8193), (8192, 1), (u64::MAX, 1), (1, u64::MAX), (8193, 0)] {
            assert_eq!(region.span(offset, bytes).unwrap_err(), Refusal::OutOfBounds);
        }
    }

    #[test]
    fn no_processor_reads_memory_of_a_gpu() {
        let range = || {
            let descriptor = std::fs::File::open("/dev/null").unwrap().into();
            DmaBuf { descriptor, offset: 0, bytes: 4096, address: 1 << 40 }
        };
        // SAFETY: nothing accesses the memory, which does not exist.
        let region = unsafe { Region::of_dmabuf(range(), 0, Access::BOTH, ()) }.unwrap();
        assert_eq!(region.span(0, 16).unwrap_err(), Refusal::GpuMemory);
        assert_eq!(region.fill(0, b"block"), Err(Refusal::GpuMemory));
        assert_eq!(region.fetch(0, &mut [0]), Err(Refusal::GpuMemory));
        assert!(region.file().is_none());
        // SAFETY: as above.
        let refused = unsafe { Region::of_dmabuf(range(), 0, Access::WRITE, ()) }.unwrap_err();
        assert!(refused.to_string().contains("must be allowed to read it"), "{refused}");
        // SAFETY: as above.
        let refused = unsafe { Region::of_dmabuf(range(), 16, Access::READ, ()) }.unwrap_err();
        assert!(matches!(refused, TransportError::TooLarge { limit: 15, .. }), "{refused}");
    }

    #[test]
    fn bytes_come_back_from_where_they_were_put() {
        let region = Region::shared(4096, Access::LOCAL).unwrap();
        region.fill(100, b"block").unwrap();
        let mut back = [0; 6];
        region.fetch(99, &mut back).unwrap();
        assert_eq!(&back, b"\0block");
        assert_eq!(region.fill(4092, b"block"), Err(Refusal::OutOfBounds));
    }
}
