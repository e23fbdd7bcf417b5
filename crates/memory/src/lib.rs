//! The shared-memory pool: one mapping, the slabs cut from it, and who may touch them.

mod pool;
mod region;
mod slab;

pub use pool::{HugePages, MemoryError, Pool, PoolConfig, PoolStats};
pub use region::Region;
pub use slab::{Slab, SlabMut};
