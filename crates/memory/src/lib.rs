//! The shared-memory pool: one mapping, the slabs cut from it, and who may touch them.

mod copy;
mod pool;
mod region;
mod slab;

pub use copy::copy_in;
pub use pool::{HugePages, MemoryError, Pool, PoolConfig, PoolStats};
pub use region::Region;
pub use slab::{Slab, SlabMut};
