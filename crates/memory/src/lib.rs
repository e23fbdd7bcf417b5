//! The shared-memory pool: one mapping, the slabs allocated from it, and their access rules.
#![warn(clippy::disallowed_types)]

mod advice;
mod copy;
mod fault;
mod header;
mod heap;
mod holders;
mod lent;
mod magazine;
mod named;
mod pages;
mod pool;
mod process_mark;
mod region;
mod slab;
mod strided;
mod sync;
mod words;

pub use advice::{prefer_huge_pages, prefetch};
pub use copy::{copy_in, copy_out};
pub use lent::{Attachment, Lender};
pub use named::{IdlePoolFiles, PoolFiles};
pub use pages::{HugePages, PageReport, PageSource};
pub use pool::{DIRECT_ALIGN, MemoryError, Pool, PoolConfig, PoolStats, WipeReport};
pub use process_mark::process_mark;
pub use region::Region;
pub use slab::{Slab, SlabMut};
pub use strided::StridedPages;
pub use words::SharedWords;
