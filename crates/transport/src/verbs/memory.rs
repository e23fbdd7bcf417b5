//! Memory that a device may access, and the description of it that a peer needs.
#![expect(unsafe_code, reason = "gives memory to a device")]

use std::any::Any;
use std::fmt;
use std::os::fd::AsRawFd as _;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use cascade_block::checksum;
use cascade_memory::DmaBuf;

use super::abi::{
    ACCESS_LOCAL_WRITE, ACCESS_RELAXED_ORDERING, ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE,
    MemoryRegion,
};
use super::device::{Device, failed};
use super::error::VerbsError;
use super::settings::LANES_MAX;
use crate::limits::GPUS_MAX;
use crate::{Access, Direction, Region};

/// Bytes for flushes of each queue pair.
pub(super) const SCRATCH_BYTES: u64 = 8;

/// Memory that a device reads and writes. It is registered until this value is dropped.
pub struct RegisteredMemory {
    device: Arc<Device>,
    region: NonNull<MemoryRegion>,
    address: u64,
    bytes: u64,
    pub(super) local_key: u32,
    remote_key: u32,
    access: Access,
    /// The number of the GPU that has the memory; none for memory of the host.
    pub(super) gpu: Option<u8>,
    /// Keeps the memory mapped. None once it had to be leaked.
    owner: Option<Box<dyn Any + Send + Sync>>,
}

// SAFETY: the registration has no thread affinity; it ends once, by `drop`.
unsafe impl Send for RegisteredMemory {}
// SAFETY: a shared reference only gives numbers.
unsafe impl Sync for RegisteredMemory {}

impl fmt::Debug for RegisteredMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (bytes, device) = (self.bytes, self.device.name());
        write!(f, "RegisteredMemory({bytes} bytes at {:#x}, {device})", self.address)
    }
}

fn flags(device: &Device, access: Access) -> i32 {
    let mut flags = ACCESS_LOCAL_WRITE;
    if access.read {
        flags |= ACCESS_REMOTE_READ;
    }
    if access.write {
        flags |= ACCESS_REMOTE_WRITE;
    }
    if device.settings.relaxed_ordering {
        flags |= ACCESS_RELAXED_ORDERING;
    }
    flags
}

impl RegisteredMemory {
    /// Registers memory of this process.
    ///
    /// # Errors
    /// If the device refuses, often because too little memory may be locked.
    ///
    /// # Safety
    /// `base` is the start of `bytes` bytes that stay mapped readable and writable until `owner`
    /// is dropped. No Rust reference to them exists while a link of this process, or a peer that
    /// `access` admits, reads or writes them.
    pub unsafe fn register(
        device: &Arc<Device>,
        base: NonNull<u8>,
        bytes: usize,
        access: Access,
        owner: impl Any + Send + Sync,
    ) -> Result<Self, VerbsError> {
        let functions = &device.verbs.functions;
        let (domain, start) = (device.domain.as_ptr(), base.as_ptr().cast());
        let address = base.as_ptr().expose_provenance() as u64;
        let flags = flags(device, access);
        // An older library has no optional flags; the plain function refuses them.
        let region = match functions.reg_mr_iova2 {
            Some(register) if flags & ACCESS_RELAXED_ORDERING != 0 => {
                // SAFETY: the domain is allocated, and the caller keeps the memory mapped.
                unsafe { register(domain, start, bytes, address, flags.cast_unsigned()) }
            }
            _ => {
                let flags = flags & !ACCESS_RELAXED_ORDERING;
                // SAFETY: as above.
                unsafe { (functions.reg_mr)(domain, start, bytes, flags) }
            }
        };
        let region = NonNull::new(region).ok_or_else(|| failed("ibv_reg_mr"))?;
        Ok(Self::of_region(device, region, address, bytes, access, Box::new(owner)))
    }

    /// Registers a region of an endpoint.
    pub(super) fn of_region_of_endpoint(
        device: &Arc<Device>,
        region: Arc<Region>,
    ) -> Result<Self, VerbsError> {
        let (bytes, access) = (region.bytes(), region.access());
        if let Some((range, gpu)) = region.dmabuf() {
            let owner = Arc::clone(&region);
            // SAFETY: the region keeps its memory. Who may use it while a batch runs is the
            // contract of `Region::of_dmabuf`.
            return unsafe { Self::register_dmabuf(device, (range, gpu), access, owner) };
        }
        let (base, owner) = (region.base(), region);
        // SAFETY: the region keeps its memory mapped. Who may use it while a batch runs is the
        // contract of `Region::of_memory`.
        unsafe { Self::register(device, base, bytes, access, owner) }
    }

    /// Registers memory of a GPU by its DMA-BUF descriptor. It was not tested with a GPU.
    ///
    /// # Errors
    /// If the library, the kernel or the device cannot do that.
    ///
    /// # Safety
    /// The range stays allocated until `owner` is dropped. No other work of its GPU accesses a
    /// part of it while a batch of this process, or of a peer that `access` admits, does.
    pub unsafe fn register_dmabuf(
        device: &Arc<Device>,
        (range, gpu): (&DmaBuf, u8),
        access: Access,
        owner: impl Any + Send + Sync,
    ) -> Result<Self, VerbsError> {
        let call = "ibv_reg_dmabuf_mr";
        let register = device.verbs.functions.reg_dmabuf_mr;
        let register = register.ok_or(VerbsError::Call { call, code: libc::EOPNOTSUPP })?;
        let (domain, flags) = (device.domain.as_ptr(), flags(device, access));
        let descriptor = range.descriptor.as_raw_fd();
        let (offset, bytes, address) = (range.offset, range.bytes, range.address);
        // SAFETY: the domain is allocated, the descriptor is open, and the caller keeps the memory.
        // Devices want the address on the wire at the same place in its page as the offset.
        let region = unsafe { register(domain, offset, bytes, address, descriptor, flags) };
        let region = NonNull::new(region).ok_or_else(|| failed(call))?;
        let mut memory = Self::of_region(device, region, address, bytes, access, Box::new(owner));
        memory.gpu = Some(gpu);
        Ok(memory)
    }

    /// Where flushes of a link land: [`SCRATCH_BYTES`] for each queue pair. Nothing reads them.
    pub(super) fn scratch(device: &Arc<Device>, access: Access) -> Result<Self, VerbsError> {
        let memory: Arc<[AtomicU64; LANES_MAX]> = Arc::default();
        let base = NonNull::from(&*memory).cast();
        // SAFETY: the owner keeps the memory, which only the device accesses.
        unsafe { Self::register(device, base, size_of_val(&*memory), access, memory) }
    }

    fn of_region(
        device: &Arc<Device>,
        region: NonNull<MemoryRegion>,
        address: u64,
        bytes: usize,
        access: Access,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Self {
        // SAFETY: the library allocated the structure, which lives until it is deregistered.
        let registered = unsafe { region.as_ref() };
        let (local_key, remote_key) = (registered.local_key, registered.remote_key);
        let (device, owner, bytes) = (Arc::clone(device), Some(owner), bytes as u64);
        Self { device, region, address, bytes, local_key, remote_key, access, gpu: None, owner }
    }

    /// What a peer needs to access it.
    pub fn remote(&self) -> RemoteMemory {
        let (address, bytes) = (self.address, self.bytes);
        RemoteMemory { address, bytes, key: self.remote_key, access: self.access, gpu: self.gpu }
    }

    /// The address of its first byte, for the device.
    pub(super) fn start(&self) -> u64 {
        self.address
    }

    /// Its length.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The address of a place, for the device.
    #[inline]
    pub(super) fn at(&self, offset: u64, bytes: u64) -> Result<u64, VerbsError> {
        within(offset, bytes, self.bytes).map(|()| self.address + offset)
    }
}

impl Drop for RegisteredMemory {
    fn drop(&mut self) {
        let deregister = self.device.verbs.functions.dereg_mr;
        // SAFETY: the registration ends once. Afterwards the device does not access the memory.
        let code = unsafe { deregister(self.region.as_ptr()) };
        if code != 0 {
            // The device may still access the memory, so it must never be used for anything else.
            self.owner.take().map(Box::leak);
        }
    }
}

fn within(offset: u64, bytes: u64, total: u64) -> Result<(), VerbsError> {
    let is_within = offset.checked_add(bytes).is_some_and(|end| end <= total);
    if is_within { Ok(()) } else { Err(VerbsError::OutOfBounds { offset, bytes, total }) }
}

/// Registered memory of a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemoteMemory {
    address: u64,
    bytes: u64,
    pub(super) key: u32,
    access: Access,
    /// The number of the peer's GPU that has the memory; none for memory of the host.
    pub(super) gpu: Option<u8>,
}

/// Flags of a description, in front of the number of the GPU.
const READ: u8 = 1;
const WRITE: u8 = 2;
const ON_GPU: u8 = 4;

const MAGIC: [u8; 4] = *b"CVRM";
const VERSION: u16 = 1;
const LENGTH: u16 = 4 + 2 + 2 + 8 + 8 + 4 + 4 + 4;

impl RemoteMemory {
    /// Length of a description.
    pub(super) const BYTES: usize = LENGTH as usize;

    /// Its length.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The address of a place, for the peer's device.
    #[inline]
    pub(super) fn at(
        &self,
        offset: u64,
        bytes: u64,
        direction: Direction,
    ) -> Result<u64, VerbsError> {
        match direction {
            Direction::Read if !self.access.read => return Err(VerbsError::NotAllowed("read")),
            Direction::Write if !self.access.write => return Err(VerbsError::NotAllowed("write")),
            _ => {}
        }
        within(offset, bytes, self.bytes).map(|()| self.address + offset)
    }

    /// Whether the peer's memory can be read.
    pub(super) fn is_readable(&self) -> bool {
        self.access.read
    }

    /// The description as bytes: little endian, with a version and a checksum.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(Self::BYTES);
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(LENGTH.to_le_bytes());
        bytes.extend(self.address.to_le_bytes());
        bytes.extend(self.bytes.to_le_bytes());
        bytes.extend(self.key.to_le_bytes());
        let mut flags = 0;
        for (is_set, flag) in
            [(self.access.read, READ), (self.access.write, WRITE), (self.gpu.is_some(), ON_GPU)]
        {
            flags |= if is_set { flag } else { 0 };
        }
        bytes.extend([flags, self.gpu.unwrap_or(0), 0, 0]);
        bytes.extend(checksum(&bytes).to_le_bytes());
        bytes
    }

    /// The description that bytes of a peer stand for.
    ///
    /// # Errors
    /// If they are no description of this version.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, VerbsError> {
        let invalid = |reason| VerbsError::Invalid { what: "description of memory", reason };
        let bytes: &[u8; Self::BYTES] =
            bytes.try_into().map_err(|_| invalid("its length is not that of version 1"))?;
        let (body, sum) = bytes.split_at(Self::BYTES - 4);
        if sum != checksum(body).to_le_bytes() {
            return Err(invalid("its checksum does not match"));
        }
        let (head, rest) = body.split_at(8);
        if head != [&MAGIC[..], &VERSION.to_le_bytes(), &LENGTH.to_le_bytes()].concat() {
            return Err(invalid("it does not begin like one of version 1"));
        }
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&rest[at..at + 8]);
            u64::from_le_bytes(word)
        };
        let (address, bytes, key_and_access) = (word(0), word(8), word(16));
        if address.checked_add(bytes).is_none() {
            return Err(invalid("its end overflows"));
        }
        let [k0, k1, k2, k3, flags, gpu, ..] = key_and_access.to_le_bytes();
        let access = Access { read: flags & READ != 0, write: flags & WRITE != 0 };
        let gpu = (flags & ON_GPU != 0).then_some(gpu);
        if gpu.is_some_and(|gpu| usize::from(gpu) >= GPUS_MAX) {
            return Err(invalid("the number of its GPU is beyond the limit"));
        }
        Ok(Self { address, bytes, key: u32::from_le_bytes([k0, k1, k2, k3]), access, gpu })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory() -> RemoteMemory {
        let access = Access { read: true, write: false };
        RemoteMemory { address: 0x1000, bytes: 4096, key: 9, access, gpu: None }
    }

    #[test]
    fn places_beyond_the_end_and_other_accesses_are_refused() {
        let memory = memory();
        assert_eq!(memory.at(96, 4000, Direction::Read), Ok(0x1060));
        assert_eq!(memory.at(4096, 0, Direction::Read), Ok(0x2000));
        for (offset, bytes) in [(96, 4001), (4097, 0), (u64::MAX, 2), (1, u64::MAX)] {
            let refused = memory.at(offset, bytes, Direction::Read).unwrap_err();
            assert!(matches!(refused, VerbsError::OutOfBounds { .. }), "{refused}");
        }
        let refused = memory.at(0, 1, Direction::Write).unwrap_err();
        assert_eq!(refused, VerbsError::NotAllowed("write"));
    }

    #[test]
    fn version_one_is_these_bytes() {
        let mut expected = b"CVRM\x01\0\x24\0".to_vec();
        expected.extend([0, 16, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 1, 0, 0, 0]);
        let sum = checksum(&expected).to_le_bytes();
        expected.extend(sum);
        assert_eq!(memory().to_bytes(), expected);
        assert_eq!(RemoteMemory::from_bytes(&expected), Ok(memory()));
        for at in 0..expected.len() {
            let mut damaged = expected.clone();
            damaged[at] ^= 1;
            RemoteMemory::from_bytes(&damaged).unwrap_err();
            RemoteMemory::from_bytes(&expected[..at]).unwrap_err();
        }
        let of_gpu = RemoteMemory { gpu: Some(3), ..memory() };
        assert_eq!(of_gpu.to_bytes()[28..32], [5, 3, 0, 0]);
        assert_eq!(RemoteMemory::from_bytes(&of_gpu.to_bytes()), Ok(of_gpu));
        let far = RemoteMemory { gpu: Some(16), ..memory() };
        RemoteMemory::from_bytes(&far.to_bytes()).unwrap_err();
        let wraps = RemoteMemory { address: u64::MAX, ..memory() };
        RemoteMemory::from_bytes(&wraps.to_bytes()).unwrap_err();
    }
}
