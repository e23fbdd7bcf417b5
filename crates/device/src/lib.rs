//! GPU memory through the CUDA driver, which is found at run time: contexts, streams, events,
//! memory, copies.
//!
//! Nothing here links with CUDA and nothing panics without it: what is missing is an
//! [`Unavailable`] that says so. [`CudaMemory`] is the memory of a GPU for `Store::open_on_device`;
//! [`Copier`] moves blocks between slabs and device memory in the order of a stream.
#![warn(clippy::disallowed_types)]

mod abandoned;
mod allocation;
mod batch;
mod context;
mod copier;
mod cuda_memory;
mod driver;
mod error;
mod event;
mod functions;
mod library;
mod pinned;
mod registered;
mod report;
mod staging;
mod stream;
mod version;

pub use allocation::{DeviceAllocation, DevicePiece};
pub use batch::BatchForm;
pub use context::Context;
pub use copier::{Copier, Copy, Pending};
pub use cuda_memory::{CudaMemory, CudaMemoryConfig};
pub use driver::Driver;
pub use error::{CallError, CudaError, Unavailable};
pub use event::Event;
pub use library::{LIBRARY, LIBRARY_VARIABLE, named_library};
pub use registered::{HostMemory, RegisteredPool, RegistrationReport};
pub use report::{DeviceFacts, DriverReport};
pub use stream::Stream;
pub use version::DriverVersion;
