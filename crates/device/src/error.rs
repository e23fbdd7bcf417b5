//! Why a GPU cannot be used, and why a call of its driver failed.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;

use crate::device_uuid::DeviceUuid;
use crate::version::DriverVersion;

/// `CUDA_SUCCESS`.
pub(crate) const SUCCESS: i32 = 0;
/// `CUDA_ERROR_INVALID_VALUE`.
pub(crate) const INVALID_VALUE: i32 = 1;
/// `CUDA_ERROR_NO_DEVICE`.
pub(crate) const NO_DEVICE: i32 = 100;
/// `CUDA_ERROR_OPERATING_SYSTEM`.
pub(crate) const OPERATING_SYSTEM: i32 = 304;
/// `CUDA_ERROR_NOT_READY`: the work before an event is not over.
pub(crate) const NOT_READY: i32 = 600;
/// `CUDA_ERROR_NOT_SUPPORTED`.
pub(crate) const NOT_SUPPORTED: i32 = 801;

/// Why there is no GPU to use. An ordinary state of a host, not a fault.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Unavailable {
    /// The library of the driver cannot be loaded.
    #[error(
        "cannot load the CUDA driver {library}: {reason}; install the NVIDIA driver, run the \
         container with --gpus all, or name the library in CASCADE_CUDA_LIBRARY"
    )]
    NoLibrary {
        /// What was loaded.
        library: String,
        /// The loader's reason.
        reason: String,
    },
    /// The driver is older than what this crate needs.
    #[error("{library} is CUDA {found}; {needed} is the oldest that works: update the driver")]
    TooOld {
        /// What was loaded.
        library: String,
        /// Its version.
        found: DriverVersion,
        /// The oldest version that works.
        needed: DriverVersion,
    },
    /// The driver works and there is no GPU.
    #[error(
        "the CUDA driver {library} finds no device; check nvidia-smi, CUDA_VISIBLE_DEVICES and \
         the devices of the container"
    )]
    NoDevice {
        /// What was loaded.
        library: String,
    },
    /// The library lacks a function.
    #[error("the CUDA driver {library} has no {function}; update the driver")]
    MissingFunction {
        /// What was loaded.
        library: String,
        /// The function.
        function: &'static str,
    },
    /// The driver refused to start.
    #[error("the CUDA driver {library} does not start")]
    Refused {
        /// What was loaded.
        library: String,
        /// The call that failed.
        #[source]
        source: CallError,
    },
    /// A parent of this process has started the driver, which does not work after a fork.
    #[error(
        "CUDA was started by the process that this one was forked from, and does not work after \
         a fork; start workers with `spawn` instead of `fork`"
    )]
    Forked,
}

/// A call of the driver that failed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{call} failed: {name} ({code}); {}", advice(*code))]
pub struct CallError {
    /// The function.
    pub call: &'static str,
    /// CUDA's number of the error.
    pub code: i32,
    /// CUDA's name of the error.
    pub name: String,
}

/// Why an operation on a GPU failed.
#[derive(Debug, Clone, Error)]
#[non_exhaustive]
pub enum CudaError {
    /// There is no GPU, or no longer one for this process.
    #[error(transparent)]
    Unavailable(#[from] Unavailable),
    /// A call failed; others may succeed.
    #[error(transparent)]
    Call(#[from] CallError),
    /// The driver lacks the function.
    #[error("the CUDA driver has no {function}; update the driver")]
    MissingFunction {
        /// The function.
        function: &'static str,
    },
    /// An earlier error ended the context: every call fails from now on, without asking the driver.
    #[error("the context of the GPU is lost since an earlier error; restart the process")]
    Poisoned {
        /// The first error.
        #[source]
        cause: Arc<CudaError>,
    },
    /// The device did not finish in time.
    #[error(
        "the GPU did not finish {work} within {} ms; look for a hanging kernel with nvidia-smi",
        waited.as_millis()
    )]
    TimedOut {
        /// What was waited for.
        work: &'static str,
        /// The time limit.
        waited: Duration,
    },
    /// A piece that does not lie in its memory.
    #[error("{bytes} bytes at {offset} do not lie in memory of {length} bytes")]
    Outside {
        /// Where the piece starts.
        offset: usize,
        /// Its length.
        bytes: usize,
        /// The length of the memory.
        length: usize,
    },
    /// A fragment of a slab or memory that its transfer has not.
    #[error("a fragment names {what} {index}, and the transfer has {count}")]
    Unnamed {
        /// Slab or memory.
        what: &'static str,
        /// What the fragment names.
        index: usize,
        /// How many there are.
        count: usize,
    },
    /// An earlier error left a buffer for staged copies in an unknown state: the next transfer is
    /// direct.
    #[error("an earlier error ended staged copies; the next transfer is made without them")]
    Broken,
    /// Two copies of one submission write the same bytes, in no order.
    #[error("two copies of one submission both write the byte at {target:#x}")]
    Overlap {
        /// The first such byte, as an offset in the pool or an address of the device.
        target: u64,
    },
    /// A slab that is not of the copier's pool.
    #[error("a slab is of another pool than that of this copier, or of one that was given back")]
    OtherPool,
    /// Kernels cannot access the pool.
    #[error("the driver has no address of the pool for kernels, so none can read or write it")]
    NotMapped,
    /// The system refused a thread.
    #[error("cannot start a thread to register memory; raise the limit of processes (ulimit -u)")]
    Thread {
        /// The system's reason.
        #[source]
        source: Arc<io::Error>,
    },
    /// The device or its driver has no memory that processes can share.
    #[error(
        "this GPU or its driver cannot share memory between processes: it has no {missing}, as in \
         WSL2 and on some virtual GPUs; keep blocks that processes share in host memory"
    )]
    NotShareable {
        /// What it lacks.
        missing: &'static str,
    },
    /// The device's memory cannot be described to RDMA devices.
    #[error(
        "the driver has no DMA-BUF for this device: load the open kernel modules of NVIDIA's \
         driver, or keep the blocks that RDMA moves in host memory"
    )]
    NoDmaBuf,
    /// Memory of another device than that of the context.
    #[error(
        "the memory is on the device {owner}, which {context} cannot access; use a context on \
         {owner}, or a GPU that is connected with it"
    )]
    OtherDevice {
        /// Where the memory is.
        owner: DeviceUuid,
        /// The device of the context.
        context: DeviceUuid,
    },
    /// A descriptor that the driver does not take.
    #[error("the file descriptor is not one of GPU memory that another process exported")]
    NotExported {
        /// The call that failed.
        #[source]
        source: CallError,
    },
    /// Another length than that of the memory that was exported.
    #[error("the exported memory does not have {bytes} bytes; both processes need its full length")]
    OtherLength {
        /// The length that was wanted.
        bytes: usize,
    },
    /// Two sides of a copy with different lengths.
    #[error("a copy of {source_bytes} bytes into {target_bytes} bytes")]
    Lengths {
        /// Length of the source.
        source_bytes: usize,
        /// Length of the target.
        target_bytes: usize,
    },
}

impl CudaError {
    /// Whether the context is lost with it.
    pub fn is_fatal(&self) -> bool {
        match self {
            Self::Call(error) => is_fatal(error.code),
            Self::Poisoned { .. } => true,
            _ => false,
        }
    }

    /// Whether the driver refused a call and can be asked again.
    pub(crate) fn is_refusal(&self) -> bool {
        matches!(self, Self::Call(_)) && !self.is_fatal()
    }
}

/// Whether the context is unusable after this error. These are the errors that CUDA documents as
/// leaving the process in an inconsistent state, the uncorrectable ones of memory and links, those
/// of a lost device or server, and the one that says nothing.
pub(crate) fn is_fatal(code: i32) -> bool {
    matches!(
        code,
        4 | 46 | 201 | 214 | 220 | 226 | 700 | 702 | 709 | 710 | 714..=719 | 806 | 810 | 999
    )
}

/// Names of the errors that users meet, for drivers without `cuGetErrorName`.
pub(crate) fn known_name(code: i32) -> &'static str {
    match code {
        INVALID_VALUE => "CUDA_ERROR_INVALID_VALUE",
        2 => "CUDA_ERROR_OUT_OF_MEMORY",
        3 => "CUDA_ERROR_NOT_INITIALIZED",
        4 => "CUDA_ERROR_DEINITIALIZED",
        NO_DEVICE => "CUDA_ERROR_NO_DEVICE",
        101 => "CUDA_ERROR_INVALID_DEVICE",
        201 => "CUDA_ERROR_INVALID_CONTEXT",
        209 => "CUDA_ERROR_NO_BINARY_FOR_GPU",
        214 => "CUDA_ERROR_ECC_UNCORRECTABLE",
        218 => "CUDA_ERROR_INVALID_PTX",
        222 => "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
        OPERATING_SYSTEM => "CUDA_ERROR_OPERATING_SYSTEM",
        400 => "CUDA_ERROR_INVALID_HANDLE",
        500 => "CUDA_ERROR_NOT_FOUND",
        NOT_READY => "CUDA_ERROR_NOT_READY",
        700 => "CUDA_ERROR_ILLEGAL_ADDRESS",
        712 => "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
        719 => "CUDA_ERROR_LAUNCH_FAILED",
        NOT_SUPPORTED => "CUDA_ERROR_NOT_SUPPORTED",
        802 => "CUDA_ERROR_SYSTEM_NOT_READY",
        803 => "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
        999 => "CUDA_ERROR_UNKNOWN",
        _ => "an error without a name",
    }
}

/// What to do about an error.
fn advice(code: i32) -> &'static str {
    match code {
        2 => "free memory of the GPU, or make the pool on it smaller",
        3 => "if this process was forked after CUDA was started, start it with `spawn`",
        46 | 101 => "check that the device is free, and CUDA_VISIBLE_DEVICES",
        NO_DEVICE => "check nvidia-smi and the devices of the container",
        209 | 218 | 221 | 222 => "the driver compiles no kernel for this GPU: update the driver",
        214 | 220 | 226 => "the hardware reports damage: check nvidia-smi -q, replace the device",
        700 | 714..=719 => "a kernel or copy accessed wrong memory: restart the process",
        712 => "the memory is registered already: register a pool once in a process",
        NOT_SUPPORTED => "this device or driver cannot do that: update the driver",
        802 => "start the fabric manager, and look at nvidia-smi",
        803 | 804 => "the kernel module and the library differ: reboot, or reinstall the driver",
        805..=810 => "restart the MPS server and its clients",
        999 => "look at `dmesg` for messages of the driver, and restart the process",
        _ => "look at `dmesg` for messages of the driver",
    }
}
