//! The memory that host slabs are pieces of, for libraries that have to know it as a whole.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use super::{Attachment, HostSlab, HostSlabMut, SlabOwner, SlabState};
use crate::pool::PoolInner;

/// Host memory that is divided into slabs: a pool of this process, or a node's pool that is mapped
/// here. It stays mapped as long as a clone of this value.
#[derive(Clone)]
pub struct BackingMemory(Backing);

#[derive(Clone)]
enum Backing {
    Pool(Arc<PoolInner>),
    Node(Arc<Attachment>),
}

impl SlabState {
    fn backing(&self) -> BackingMemory {
        BackingMemory(match &self.owner {
            SlabOwner::Pool(pool, _) => Backing::Pool(Arc::clone(pool)),
            SlabOwner::Node(from, _) => Backing::Node(Arc::clone(from)),
        })
    }
}

impl HostSlab {
    /// The memory that the slab is a piece of.
    pub fn backing(&self) -> BackingMemory {
        self.slab().0.backing()
    }
}

impl HostSlabMut {
    /// The memory that the slab is a piece of.
    pub fn backing(&self) -> BackingMemory {
        self.slab().0.backing()
    }
}

impl BackingMemory {
    /// The first byte and the length; none if it is memory of a device.
    pub fn span(&self) -> Option<(NonNull<u8>, usize)> {
        match &self.0 {
            Backing::Pool(pool) => pool.region.host().map(|host| (host.base(), host.bytes())),
            Backing::Node(from) => from.base().map(|base| (base, from.bytes())),
        }
    }

    /// Whether both are the same memory.
    pub fn is_same(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            (Backing::Pool(one), Backing::Pool(other)) => Arc::ptr_eq(one, other),
            (Backing::Node(one), Backing::Node(other)) => Arc::ptr_eq(one, other),
            (Backing::Pool(_), Backing::Node(_)) | (Backing::Node(_), Backing::Pool(_)) => false,
        }
    }
}

impl fmt::Debug for BackingMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (whose, bytes) = match &self.0 {
            Backing::Pool(pool) => ("pool", pool.region.bytes()),
            Backing::Node(from) => ("node's pool", from.bytes()),
        };
        write!(f, "BackingMemory({whose} of {bytes} bytes)")
    }
}
