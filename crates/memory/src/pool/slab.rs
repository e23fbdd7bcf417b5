//! Slabs: pieces of the pool, with one writer until they are sealed and any number of readers
//! after.
#![expect(unsafe_code, reason = "turns offsets of the region into slices")]

mod header;
mod lent;

use std::any::Any;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::copy::{copy_in, copy_out};
use crate::heap::Extent;
use crate::holders::Holders;

use super::{Pool, PoolInner};
use header::{HEADER_BYTES, HeaderRef};

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

    /// Copies a block in.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn fill_from(&mut self, bytes: &[u8]) {
        copy_in(self, bytes);
    }

    /// The slab including its padding, for reads of whole sectors.
    pub fn padded_mut(&mut self) -> &mut [u8] {
        self.state_mut().padded_mut()
    }

    /// Offset in the pool's region, in bytes.
    pub fn offset(&self) -> usize {
        self.0.extent.offset
    }

    /// Bytes that the slab reserves in the pool, padding included.
    pub fn reserved_bytes(&self) -> usize {
        self.0.extent.bytes
    }

    /// The first byte, for I/O by the kernel; valid as long as the slab is held.
    pub fn pointer(&self) -> NonNull<u8> {
        self.0.pointer()
    }
}

impl SlabState {
    fn padded_mut(&mut self) -> &mut [u8] {
        // SAFETY: the extent is this slab's alone until it is dropped (in a pool of ours by the
        // heap, in a node's because the node lends it only once), mapped writable and
        // initialised (the kernel zeroes it). `&mut self` exists only while the slab has one
        // owner, and excludes every other slice of it.
        unsafe { std::slice::from_raw_parts_mut(self.pointer().as_ptr(), self.extent.bytes) }
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: the extent is this slab's alone until it is dropped, or sealed and then written
        // by no process (a node guarantees it for what it lent); it is mapped and initialised (the
        // kernel zeroes it), and `len` lies in it; writers need `&mut self`.
        unsafe { std::slice::from_raw_parts(self.pointer().as_ptr(), self.len) }
    }

    fn pointer(&self) -> NonNull<u8> {
        let base = match &self.owner {
            SlabOwner::Pool(pool, _) => pool.region.base(),
            SlabOwner::Node(from, _) => from.base(),
        };
        // SAFETY: `new` and `lent` checked that the extent lies inside the mapping, which the pool
        // or the attachment that this slab holds keeps until it is dropped.
        unsafe { base.add(self.extent.offset) }
    }
}

impl Deref for SlabMut {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.0.bytes()
    }
}

impl DerefMut for SlabMut {
    fn deref_mut(&mut self) -> &mut [u8] {
        let len = self.0.len;
        &mut self.state_mut().padded_mut()[..len]
    }
}

impl Drop for SlabState {
    fn drop(&mut self) {
        if matches!(&self.owner, SlabOwner::Pool(pool, epoch) if pool.is_wiped_since(*epoch)) {
            // Before the release: afterwards another thread may own the piece.
            self.padded_mut().fill(0);
        }
        let Extent { offset, bytes } = self.extent;
        match &mut self.owner {
            SlabOwner::Pool(pool, _) => pool.release(Extent { offset, bytes }, self.len),
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

    /// The first byte, for I/O by the kernel; valid as long as the slab is held.
    pub fn pointer(&self) -> NonNull<u8> {
        self.0.pointer()
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

    /// Copies the block out; for one block of a batch see [`copy_out`].
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn copy_to(&self, target: &mut [u8]) {
        copy_out(target, self, self.len());
    }
}

impl Clone for Slab {
    fn clone(&self) -> Self {
        self.0.holders.add();
        Self(self.0.clone())
    }
}

impl Drop for Slab {
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

impl Deref for Slab {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.0.bytes()
    }
}

impl AsRef<[u8]> for Slab {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl fmt::Debug for Slab {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Slab({} bytes at {})", self.0.len, self.0.extent.offset)
    }
}
