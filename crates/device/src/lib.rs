//! GPU memory through the CUDA driver, which is found at run time: contexts, streams, events,
//! memory, copies.
//!
//! Nothing here links with CUDA and nothing panics without it: what is missing is an
//! [`Unavailable`] that says so. [`CudaMemory`] is the memory of a GPU for `Store::open_on_device`;
//! [`Copier`] moves blocks between slabs and device memory in the order of a stream;
//! [`ShareableMemory`] is memory that other processes map as [`ImportedMemory`].
#![warn(clippy::disallowed_types)]

mod abandoned;
mod allocation;
mod batch;
mod calibration;
mod context;
mod copier;
mod copy_counts;
mod copy_plan;
mod costs;
mod cuda_memory;
mod device_uuid;
mod dmabuf;
mod driver;
mod error;
mod event;
mod foreign;
mod functions;
mod kernel;
mod library;
mod mapped;
mod pinned;
mod plan;
mod pool_side;
mod registered;
mod report;
mod shareable;
mod staging;
mod stream;
mod transfer;
mod version;
mod ways;

pub use allocation::{DeviceAllocation, DevicePiece};
pub use batch::BatchForm;
pub use context::Context;
pub use copier::{Copier, Copy, Pending};
pub use copy_counts::{CopyCount, CopyReport};
pub use costs::{Costs, Curve, Rate, WayCosts};
pub use cuda_memory::{CudaImporter, CudaMemory, CudaMemoryConfig};
pub use device_uuid::DeviceUuid;
pub use driver::Driver;
pub use error::{CallError, CudaError, Unavailable};
pub use event::Event;
pub use foreign::ForeignMemory;
pub use library::{LIBRARY, LIBRARY_VARIABLE, named_library};
pub use plan::{Borders, Call, CopyPlan, Direction, Limits, PlannedCopy, Slice, Way, plan};
pub use registered::{HostMemory, RegisteredPool, RegistrationReport};
pub use report::{DeviceFacts, DriverReport};
pub use shareable::{ImportedMemory, ShareableMemory};
pub use stream::Stream;
pub use transfer::{Fragment, Slabs, Transfer};
pub use version::DriverVersion;
