//! The address of a block in a tier.

/// Where a stage below DRAM keeps a block; only that stage understands it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Address(pub u64);
