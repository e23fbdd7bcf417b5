//! Slabs: pieces of the pool, with one writer until they are sealed and any number of readers
//! after.
#![expect(unsafe_code, reason = "turns offsets of the region into slices")]

mod backing;
mod header;
mod host;
mod lent;

use std::any::Any;
use std::borrow::Cow;
use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::copy::{copy_in, copy_out};
use crate::heap::Extent;
use crate::holders::Holders;
use crate::{DeviceError, DeviceMemory, RegionKind};

use super::{Pool, PoolInner};
use header::{HEADER_BYTES, HeaderRef};

pub use backing::BackingMemory;
pub use host::{HostSlab, HostSlabMut};
pub use lent::{Attachment, Lender};

/// A writable piece of the pool with one owner. Freed when dropped.
///
/// Its initial bytes are arbitrary.
pub struct SlabMut(HeaderRef<SlabState>);

/// The state of a slab, which its clones share.
pub(crate) struct SlabState {
    owner: SlabOwner,
    /// Freed by `drop`.
    extent: Extent,
    /// Requested bytes; the visible length.
    len: usize,
    /// Dropped when writing ends.
    guard: Option<Box<dyn Any + Send + Sync>>,
    /// Checksum of the sealed bytes with [`HAS_SUM`] set, or zero.
    sum: AtomicU64,
    /// Clones of the sealed slab.
    holders: Holders,
}

/// Distinguishes a checksum of zero from no checksum.
const HAS_SUM: u64 = 1 << 32;

/// Owner of a slab's memory.
enum SlabOwner {
    /// A pool of this process, and its epoch when the slab was allocated: see
    /// [`crate::Pool::begin_wipe`].
    Pool(Arc<PoolInner>, usize),
    /// A node that lent a piece of its pool, and the hold to release on drop.
    Node(Arc<Attachment>, Option<u64>),
}

/// A sealed piece of the pool: immutable and shared by its clones.
///
/// Its memory is not reused while any clone lives, even if the store evicts the block.
pub struct Slab(HeaderRef<SlabState>);

const ONE_OWNER: &str = "a slab that can be written has one owner";
const ONE_KIND: &str = "a slab is in host or in device memory";

impl SlabMut {
    pub(crate) fn new(pool: Arc<PoolInner>, extent: Extent, len: usize, epoch: usize) -> Self {
        assert!(len <= extent.bytes, "a slab lies in its extent");
        assert!(extent.offset + extent.bytes <= pool.region.bytes(), "an extent of another pool");
        let sum = AtomicU64::new(0);
        let (owner, holders) = (SlabOwner::Pool(pool, epoch), Holders::one());
        Self(HeaderRef::new(SlabState { owner, extent, len, guard: None, sum, holders }))
    }

    /// A piece of another process's pool; `None` if it is outside the mapping.
    pub(crate) fn lent(
        from: Arc<Attachment>,
        hold: u64,
        offset: usize,
        len: usize,
    ) -> Option<Self> {
        let fits = offset.checked_add(len).is_some_and(|end| end <= from.bytes());
        let state = || SlabState {
            owner: SlabOwner::Node(from, Some(hold)),
            extent: Extent { offset, bytes: len },
            len,
            guard: None,
            sum: AtomicU64::new(0),
            holders: Holders::one(),
        };
        fits.then(|| Self(HeaderRef::new(state())))
    }

    fn state_mut(&mut self) -> &mut SlabState {
        // The reference of a `SlabMut` is cloned only once it is a `Slab`.
        self.0.get_mut().expect(ONE_OWNER)
    }

    /// The hold under which `node` lent this slab. The caller then releases it instead of drop.
    /// Returns the slab if another owner lent it.
    pub fn into_hold(mut self, node: &Arc<Attachment>) -> Result<u64, Self> {
        let hold = match &mut self.state_mut().owner {
            SlabOwner::Node(from, hold) if Arc::ptr_eq(from, node) => hold.take(),
            SlabOwner::Node(..) | SlabOwner::Pool(..) => None,
        };
        hold.ok_or(self)
    }

    /// Ends writing: from now on the bytes are immutable.
    #[inline]
    pub fn seal(mut self) -> Slab {
        self.state_mut().guard = None;
        Slab(self.0)
    }

    /// Attaches a guard that is dropped when the slab is sealed or dropped.
    pub fn attach_guard(&mut self, guard: Box<dyn Any + Send + Sync>) {
        self.state_mut().guard = Some(guard);
    }

    /// Shortens the visible length; the reserved bytes stay. A longer length changes nothing.
    pub fn truncate(&mut self, len: usize) {
        let cut = self.len().saturating_sub(len);
        if cut == 0 {
            return;
        }
        if let SlabOwner::Pool(pool, _) = &self.0.owner {
            pool.uncount_requested(cut);
        }
        self.state_mut().len -= cut;
    }

    /// Copies a block in. Never fails in host memory.
    ///
    /// # Errors
    /// If the device fails: the slab's bytes are arbitrary then.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn fill_from(&mut self, bytes: &[u8]) -> Result<(), DeviceError> {
        if let Some(host) = self.host_mut() {
            copy_in(host, bytes);
            return Ok(());
        }
        self.0.write_device(bytes)
    }

    /// The bytes, if the slab is in host memory.
    pub fn host(&self) -> Option<&[u8]> {
        self.0.host()
    }

    /// The bytes, for writing, if the slab is in host memory.
    pub fn host_mut(&mut self) -> Option<&mut [u8]> {
        let len = self.0.len;
        self.padded_host_mut().map(|padded| &mut padded[..len])
    }

    /// As [`Self::host_mut`] including the slab's padding, for reads of whole sectors.
    pub fn padded_host_mut(&mut self) -> Option<&mut [u8]> {
        self.state_mut().padded_host_mut()
    }

    /// The bytes: those of the slab in host memory, a copy of them in device memory.
    ///
    /// # Errors
    /// If the device fails.
    pub fn bytes_or_copy(&self) -> Result<Cow<'_, [u8]>, DeviceError> {
        self.0.bytes_or_copy()
    }

    /// As [`Slab::copy_to_in_batch`], before the slab is sealed.
    ///
    /// # Errors
    /// As [`Slab::copy_to`].
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn copy_to_in_batch(
        &self,
        target: &mut [u8],
        batch_bytes: usize,
    ) -> Result<(), DeviceError> {
        self.0.copy_out(target, batch_bytes)
    }

    /// Where its memory is.
    pub fn kind(&self) -> RegionKind {
        self.0.kind()
    }

    /// As [`Slab::device_address`], before the slab is sealed.
    pub fn device_address(&self) -> Option<u64> {
        self.0.device_address()
    }

    /// Length in bytes, without padding.
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Whether the length is zero.
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// Overwrites a part of the reserved bytes with zeroes.
    pub(super) fn zero(&mut self, part: Range<usize>) -> Result<(), DeviceError> {
        self.state_mut().zero(part)
    }

    /// Offset in the pool's region, in bytes.
    pub fn offset(&self) -> usize {
        self.0.extent.offset
    }

    /// Bytes that the slab reserves in the pool, padding included.
    pub fn reserved_bytes(&self) -> usize {
        self.0.extent.bytes
    }
}

impl SlabState {
    fn padded_host_mut(&mut self) -> Option<&mut [u8]> {
        let (start, bytes) = (self.host_pointer()?, self.extent.bytes);
        // SAFETY: the extent is this slab's alone until it is dropped (in a pool of ours by the
        // heap, in a node's because the node lends it only once), mapped writable and
        // initialised (the kernel zeroes it). `&mut self` exists only while the slab has one
        // owner, and excludes every other slice of it.
        Some(unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), bytes) })
    }

    fn host(&self) -> Option<&[u8]> {
        let start = self.host_pointer()?;
        // SAFETY: the extent is this slab's alone until it is dropped, or sealed and then written
        // by no process (a node guarantees it for what it lent); it is mapped and initialised (the
        // kernel zeroes it), and `len` lies in it; writers need `&mut self`.
        Some(unsafe { std::slice::from_raw_parts(start.as_ptr(), self.len) })
    }

    fn host_pointer(&self) -> Option<NonNull<u8>> {
        let base = match &self.owner {
            SlabOwner::Pool(pool, _) => pool.region.host()?.base(),
            SlabOwner::Node(from, _) => from.base()?,
        };
        // SAFETY: `new` and `lent` checked that the extent lies inside the mapping, which the pool
        // or the attachment that this slab holds keeps until it is dropped.
        Some(unsafe { base.add(self.extent.offset) })
    }

    fn device(&self) -> Option<&dyn DeviceMemory> {
        match &self.owner {
            SlabOwner::Pool(pool, _) => pool.region.device().map(|device| &**device),
            SlabOwner::Node(from, _) => from.device().map(|device| &**device),
        }
    }

    fn kind(&self) -> RegionKind {
        if self.device().is_some() { RegionKind::Device } else { RegionKind::Host }
    }

    fn device_address(&self) -> Option<u64> {
        self.device().map(|device| device.base() + self.extent.offset as u64)
    }

    fn write_device(&self, bytes: &[u8]) -> Result<(), DeviceError> {
        assert_eq!(self.len, bytes.len(), "a block is copied whole");
        self.device().expect(ONE_KIND).copy_in(self.extent.offset, bytes)
    }

    fn read_device(&self, bytes: &mut [u8]) -> Result<(), DeviceError> {
        assert_eq!(self.len, bytes.len(), "a block is copied whole");
        self.device().expect(ONE_KIND).copy_out(self.extent.offset, bytes)
    }

    fn copy_out(&self, target: &mut [u8], batch_bytes: usize) -> Result<(), DeviceError> {
        if let Some(host) = self.host() {
            copy_out(target, host, batch_bytes);
            return Ok(());
        }
        self.read_device(target)
    }

    fn bytes_or_copy(&self) -> Result<Cow<'_, [u8]>, DeviceError> {
        if let Some(host) = self.host() {
            return Ok(Cow::Borrowed(host));
        }
        let mut copy = vec![0; self.len];
        self.read_device(&mut copy)?;
        Ok(Cow::Owned(copy))
    }

    fn zero(&mut self, part: Range<usize>) -> Result<(), DeviceError> {
        if let Some(padded) = self.padded_host_mut() {
            padded[part].fill(0);
            return Ok(());
        }
        assert!(part.end <= self.extent.bytes, "a part of the slab");
        self.device().expect(ONE_KIND).zero(self.extent.offset + part.start, part.len())
    }
}

impl Drop for SlabState {
    fn drop(&mut self) {
        let is_wiped =
            matches!(&self.owner, SlabOwner::Pool(pool, epoch) if pool.is_wiped_since(*epoch));
        // Before the release: afterwards another thread may own the piece.
        let is_reusable = !is_wiped || self.zero(0..self.extent.bytes).is_ok();
        let Extent { offset, bytes } = self.extent;
        let extent = Extent { offset, bytes };
        match &mut self.owner {
            SlabOwner::Pool(pool, _) if is_reusable => pool.release(extent, self.len),
            SlabOwner::Pool(pool, _) => pool.keep_unzeroed(extent, self.len),
            SlabOwner::Node(from, hold) => {
                // `None` after `into_hold`: the caller releases it.
                if let Some(hold) = hold.take() {
                    from.release_hold(hold);
                }
            }
        }
    }
}

impl fmt::Debug for SlabMut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SlabMut({} bytes at {})", self.0.len, self.0.extent.offset)
    }
}

impl Slab {
    /// Memory of a slab besides its piece of the pool. Its clones share it.
    pub const STATE_BYTES: usize = HEADER_BYTES;

    /// Offset in the pool's region, in bytes.
    pub fn offset(&self) -> usize {
        self.0.extent.offset
    }

    /// The bytes, if the slab is in host memory.
    pub fn host(&self) -> Option<&[u8]> {
        self.0.host()
    }

    /// The bytes: those of the slab in host memory, a copy of them in device memory.
    ///
    /// # Errors
    /// If the device fails.
    pub fn bytes_or_copy(&self) -> Result<Cow<'_, [u8]>, DeviceError> {
        self.0.bytes_or_copy()
    }

    /// Where its memory is.
    pub fn kind(&self) -> RegionKind {
        self.0.kind()
    }

    /// The address of the first byte on the device, if the slab is in device memory. No instruction
    /// of a processor may access it.
    pub fn device_address(&self) -> Option<u64> {
        self.0.device_address()
    }

    /// Length in bytes, without padding.
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Whether the length is zero.
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// Compares a checksum of the bytes with the recorded one. The first call records its checksum.
    pub fn verify_checksum(&self, sum: u32) -> bool {
        let sum = HAS_SUM | u64::from(sum);
        // Relaxed: the word orders nothing; it is compared with bytes that do not change.
        let before = self.0.sum.compare_exchange(0, sum, Ordering::Relaxed, Ordering::Relaxed);
        before.map_or_else(|first| first == sum, |_| true)
    }

    /// The recorded checksum, if any.
    pub fn checksum(&self) -> Option<u32> {
        let sum = self.0.sum.load(Ordering::Relaxed);
        // XOR clears the mark, so the rest fits 32 bits; without the mark there is no checksum.
        u32::try_from(sum ^ HAS_SUM).ok().filter(|_| sum & HAS_SUM != 0)
    }

    /// Whether both are clones of one slab.
    pub fn is_same(&self, other: &Self) -> bool {
        self.0.is_same(&other.0)
    }

    /// Whether the slab is a piece of this pool.
    pub fn is_of(&self, pool: &Pool) -> bool {
        matches!(&self.0.owner, SlabOwner::Pool(of, _) if Arc::ptr_eq(of, &pool.0))
    }

    /// Number of clones of this slab, this one included.
    pub fn holders(&self) -> usize {
        self.0.holders.count()
    }

    /// Whether there are other clones of this slab of a pool. If so, the drop that leaves one clone
    /// reports `token`: see [`Pool::take_released`]. Calls for one slab must not overlap.
    pub fn watch(&self, token: usize) -> bool {
        self.0.holders.watch(token)
    }

    /// Bytes that the slab reserves in the pool, padding included.
    pub fn reserved_bytes(&self) -> usize {
        self.0.extent.bytes
    }

    /// Copies the block out; for one block of a batch see [`Self::copy_to_in_batch`]. Never fails
    /// in host memory.
    ///
    /// # Errors
    /// If the device fails: the bytes of the target are arbitrary then.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn copy_to(&self, target: &mut [u8]) -> Result<(), DeviceError> {
        self.copy_to_in_batch(target, self.len())
    }

    /// As [`Self::copy_to`] in a call that copies `batch_bytes` in total: see [`copy_out`].
    ///
    /// # Errors
    /// As [`Self::copy_to`].
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn copy_to_in_batch(
        &self,
        target: &mut [u8],
        batch_bytes: usize,
    ) -> Result<(), DeviceError> {
        self.0.copy_out(target, batch_bytes)
    }
}

impl Clone for Slab {
    #[inline]
    fn clone(&self) -> Self {
        self.0.holders.add();
        Self(self.0.clone())
    }
}

impl Drop for Slab {
    #[inline]
    fn drop(&mut self) {
        // Before the reference is dropped, so that slab and pool still live. The only holder has
        // nothing to report.
        if !self.0.is_only()
            && let Some(token) = self.0.holders.remove()
            && let SlabOwner::Pool(pool, _) = &self.0.owner
        {
            pool.report_release(token);
        }
    }
}

impl fmt::Debug for Slab {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Slab({} bytes at {})", self.0.len, self.0.extent.offset)
    }
}
