//! The kernel that copies lists of fragments: its text, its module and its launches.
#![expect(unsafe_code, reason = "calls the driver")]

use std::ffi::{CStr, c_char, c_void};
use std::fmt;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

use crate::context::Context;
use crate::driver::Driver;
use crate::error::CudaError;
use crate::functions::{Address, Handle, Status};
use crate::pinned::PinnedBuffer;
use crate::stream::Stream;

#[cfg(test)]
mod tests;

/// The kernel in PTX, which the driver compiles for its device. Ends with a zero.
const TEXT: &str = concat!(include_str!("kernels/copy.ptx"), "\0");
/// Its name.
const ENTRY: &CStr = c"cascade_copy";
/// Threads of a block: whole warps, at most what the text declares.
const THREADS: u32 = 512;
/// Blocks of a launch that copies over the bus. Few, so that most of the device computes meanwhile;
/// how many is not measured.
pub(crate) const BLOCKS: u32 = 16;
/// Blocks of a launch that copies within the memory of devices, which needs more bytes in flight
/// than the bus: 2 KiB a warp, so 4 MiB. Not measured.
pub(crate) const BLOCKS_ON_DEVICE: u32 = 128;
/// Warps of such a launch.
pub(crate) const WARPS_ON_DEVICE: usize = BLOCKS_ON_DEVICE as usize * THREADS as usize / 32;
/// Fragments of a launch.
pub(crate) const FRAGMENTS_MAX: usize = 4096;
/// Bytes of an array of a list.
const ARRAY_BYTES: usize = FRAGMENTS_MAX * size_of::<u64>();

/// Functions that kernels need. A driver may lack any of them.
const NEEDED: [&str; 5] = [
    "cuModuleLoadDataEx",
    "cuModuleGetFunction",
    "cuModuleUnload",
    "cuLaunchKernel",
    "cuMemHostGetDevicePointer_v2",
];

/// The functions of [`NEEDED`] that a driver lacks. With any of them it has no kernels.
pub(crate) fn missing_functions(driver: &Driver) -> Vec<&'static str> {
    NEEDED.into_iter().filter(|name| driver.need(&[name]).is_err()).collect()
}

/// The kernel, loaded for one context.
pub(crate) struct Kernel {
    context: Arc<Context>,
    module: Handle,
    function: Handle,
}

// SAFETY: the handles are addresses that only the driver follows, from any thread.
unsafe impl Send for Kernel {}
// SAFETY: the driver may be called about one function by several threads at once.
unsafe impl Sync for Kernel {}

impl Kernel {
    /// Loads it. The driver compiles the text, unless it has kept an earlier result.
    ///
    /// # Errors
    /// If the driver lacks a function or refuses the text, such as for a device before compute
    /// capability 8.0.
    pub(crate) fn load(context: &Arc<Context>) -> Result<Self, CudaError> {
        context.driver().need(&NEEDED)?;
        context.with(|| {
            let mut module = null_mut();
            let load = |load: Load| {
                // SAFETY: the text ends with a zero, there are no options, and the result is
                // written to a local variable.
                unsafe { load(&raw mut module, TEXT.as_ptr().cast(), 0, null_mut(), null_mut()) }
            };
            context.call(|functions| &functions.module_load, load)?;
            // Unloads the module if the function is not found.
            let context = Arc::clone(context);
            let mut kernel = Self { context, module, function: null_mut() };
            let mut function = null_mut();
            let get = |get: unsafe extern "C" fn(*mut Handle, Handle, *const c_char) -> Status| {
                // SAFETY: the module is loaded, the name ends with a zero, and the result is
                // written to a local variable.
                unsafe { get(&raw mut function, module, ENTRY.as_ptr()) }
            };
            kernel.context.call(|functions| &functions.module_get_function, get)?;
            kernel.function = function;
            Ok(kernel)
        })
    }

    /// Starts the copies of a list, by this many blocks of threads.
    ///
    /// # Safety
    /// For each copy, target and source are memory that the device can access, and stay so until
    /// the copy is over; nothing else accesses the targets or writes the sources until then. The
    /// list is not written and not dropped until then.
    pub(crate) unsafe fn launch(
        &self,
        stream: &Stream,
        list: &List,
        blocks: u32,
    ) -> Result<(), CudaError> {
        let mut arguments = list.arguments();
        let mut arguments = arguments.each_mut().map(|it| std::ptr::from_mut(it).cast::<c_void>());
        let arguments = arguments.as_mut_ptr();
        let (function, stream) = (self.function, stream.handle());
        let launch = |launch: Launch| {
            // SAFETY: a function of a loaded module with as many parameters of these types, which
            // a test reads from its text; the copies by the caller's promise.
            unsafe {
                launch(function, blocks, 1, 1, THREADS, 1, 1, 0, stream, arguments, null_mut())
            }
        };
        self.context.call(|functions| &functions.launch_kernel, launch)
    }
}

type Load =
    unsafe extern "C" fn(*mut Handle, *const c_void, u32, *mut u32, *mut *mut c_void) -> Status;
type Launch = unsafe extern "C" fn(
    Handle,
    u32,
    u32,
    u32,
    u32,
    u32,
    u32,
    u32,
    Handle,
    *mut *mut c_void,
    *mut *mut c_void,
) -> Status;

impl Drop for Kernel {
    fn drop(&mut self) {
        let unload = |unload: unsafe extern "C" fn(Handle) -> Status| {
            // SAFETY: loaded by `load` and unloaded once; copies hold the kernel until they are
            // over.
            unsafe { unload(self.module) }
        };
        self.context.release(|functions| &functions.module_unload, unload);
    }
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Kernel({:p})", self.function)
    }
}

/// A list of fragments that a kernel reads, in host memory.
#[derive(Debug)]
pub(crate) struct List {
    buffer: PinnedBuffer,
    /// Its address for the device.
    address: Address,
    count: usize,
}

impl List {
    /// An empty list.
    pub(crate) fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        let buffer = PinnedBuffer::new(context, 3 * ARRAY_BYTES)?;
        let address = device_address(context, buffer.start())?;
        Ok(Self { buffer, address, count: 0 })
    }

    /// Replaces its fragments: target, source and length of each. Call it only while no kernel
    /// reads the list.
    ///
    /// # Panics
    /// If there are more than [`FRAGMENTS_MAX`].
    pub(crate) fn fill(&mut self, fragments: &[(Address, Address, usize)]) {
        assert!(fragments.len() <= FRAGMENTS_MAX, "a plan keeps to its limits");
        let (targets, rest) = self.buffer.bytes().split_at_mut(ARRAY_BYTES);
        let (sources, lengths) = rest.split_at_mut(ARRAY_BYTES);
        for (at, (target, source, length)) in fragments.iter().enumerate() {
            let place = at * size_of::<u64>()..(at + 1) * size_of::<u64>();
            // Every host and device with CUDA is little endian.
            targets[place.clone()].copy_from_slice(&target.to_le_bytes());
            sources[place.clone()].copy_from_slice(&source.to_le_bytes());
            lengths[place].copy_from_slice(&(*length as u64).to_le_bytes());
        }
        self.count = fragments.len();
    }

    /// The arguments of the kernel.
    fn arguments(&self) -> [u64; 4] {
        let array = |at: usize| self.address + (at * ARRAY_BYTES) as Address;
        [array(0), array(1), array(2), self.count as u64]
    }
}

/// The address by which the device accesses host memory that is registered or the driver's own.
/// It may differ from the host's.
pub(crate) fn device_address(
    context: &Arc<Context>,
    start: NonNull<u8>,
) -> Result<Address, CudaError> {
    let mut address = 0;
    let get = |get: unsafe extern "C" fn(*mut Address, *mut c_void, u32) -> Status| {
        // SAFETY: writes to a local variable; the driver checks the memory.
        unsafe { get(&raw mut address, start.as_ptr().cast(), 0) }
    };
    context
        .with(|| context.call(|functions| &functions.mem_host_get_device_pointer, get))
        .map(|()| address)
}
