//! RDMA through libibverbs, which is opened at run time: devices, registered memory, links.
//!
//! A [`Link`] is a set of reliable connected queue pairs to one peer. It posts chains of work
//! requests and counts completions. Nothing here links with libibverbs: where it or a device is
//! missing, [`VerbsError::Unavailable`] says so.

mod abi;
mod address;
mod chain;
mod choice;
mod connection;
#[cfg(test)]
mod cost;
mod device;
mod error;
#[cfg(test)]
mod fake;
mod flush;
mod functions;
#[cfg(test)]
mod gpu;
mod lane;
mod library;
mod link;
mod memory;
mod queue_pair;
mod rdma;
mod settings;
mod sysfs;

pub use address::LinkAddress;
pub use chain::Move;
pub use choice::{Nearness, Target, choose_gid, nearest};
pub(crate) use connection::{NotOpened, RdmaConnection};
pub use device::Device;
pub use error::{Status, Unavailable, VerbsError};
pub use flush::FlushPlace;
pub use functions::Verbs;
pub use link::{Link, OpenLink, Posted};
pub use memory::{RegisteredMemory, RemoteMemory};
pub(crate) use rdma::Rdma;
pub use settings::{Flush, VerbsSettings};
pub use sysfs::{DeviceFacts, Gid, GidKind, LinkLayer, PortFacts, SYSFS, read_devices};
