//! The shared-memory pool: one mapping, the slabs allocated from it, and their access rules.
#![warn(clippy::disallowed_types)]

mod advice;
mod config;
mod copy;
mod error;
mod fault;
mod heap;
mod holders;
mod magazine;
mod mapping;
mod named;
mod pages;
mod pool;
mod process_mark;
mod region;
mod strided;
mod sync;
mod words;

pub use advice::{prefer_huge_pages, prefetch};
pub use config::PoolConfig;
pub use copy::{copy_in, copy_out};
pub use error::MemoryError;
pub use named::{IdlePoolFiles, PoolFiles};
pub use pages::{HugePages, PageReport, PageSource};
pub use pool::{Attachment, DIRECT_ALIGN, Lender, Pool, PoolStats, Slab, SlabMut, WipeReport};
pub use process_mark::process_mark;
pub use region::Region;
pub use strided::StridedPages;
pub use words::SharedWords;
