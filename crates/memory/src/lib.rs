//! The memory pool: one region of the host or of a device, the slabs allocated from it, and their
//! access rules.
#![warn(clippy::disallowed_types)]

mod advice;
mod available;
mod config;
mod copy;
mod device;
mod error;
mod fault;
mod heap;
mod holders;
mod host_region;
mod locked_file;
mod magazine;
mod mapping;
mod named;
mod pages;
mod peer_region;
mod pool;
mod process_mark;
mod region;
mod strided;
mod sync;
mod words;

pub use advice::{prefer_huge_pages, prefetch, prefetch_block};
pub use available::available_bytes;
pub use config::PoolConfig;
pub use copy::{copy_in, copy_out};
pub use device::{
    DeviceError, DeviceId, DeviceImporter, DeviceMemory, DmaBuf, FakeDevice, SharedDeviceMemory,
};
pub use error::MemoryError;
pub use host_region::HostRegion;
pub use locked_file::LockedFile;
pub use named::{IdlePoolFiles, PoolFiles};
pub use pages::{HugePages, PageReport, PageSource};
pub use peer_region::PeerRegion;
pub use pool::{
    Attachment, BackingMemory, DIRECT_ALIGN, HostSlab, HostSlabMut, Lender, Pool, PoolStats, Slab,
    SlabMut, WipeReport, WithheldMemory,
};
pub use process_mark::process_mark;
pub use region::{Region, RegionKind};
pub use strided::StridedPages;
pub use words::SharedWords;
