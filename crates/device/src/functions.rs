//! The functions of the CUDA driver that we know, each of which may be absent.
//!
//! Names, versions and arguments are those of NVIDIA's headers `cuda.h` and `cudaTypedefs.h` of
//! CUDA 12.8 and 13.0. They were compared with the bindings that bindgen made from these headers
//! (cudarc, `src/driver/sys/mod.rs`) and with those of NVIDIA's `cuda-python`.
#![expect(unsafe_code, reason = "turns addresses into functions, by a macro")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::mem::transmute;
use std::ptr::NonNull;

/// `CUresult`.
pub(crate) type Status = c_int;
/// `CUdevice`.
pub(crate) type DeviceNumber = c_int;
/// `CUdeviceptr`.
pub(crate) type Address = c_ulonglong;
/// `CUcontext`, `CUstream`, `CUevent`, `CUmodule`, `CUfunction`: addresses that only the driver
/// follows.
pub(crate) type Handle = *mut c_void;
/// `CUhostFn`.
pub(crate) type HostFunction = Option<unsafe extern "C" fn(*mut c_void)>;

/// `CUmemLocation`. Zero is no location.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct MemoryLocation {
    pub(crate) kind: c_uint,
    pub(crate) id: c_int,
}

/// `CUmemcpyAttributes`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct CopyAttributes {
    pub(crate) source_access_order: c_uint,
    pub(crate) source_hint: MemoryLocation,
    pub(crate) target_hint: MemoryLocation,
    pub(crate) flags: c_uint,
}

/// `CU_MEMCPY_SRC_ACCESS_ORDER_STREAM`: sources are read in the order of the stream. `ANY` would
/// let a copy read before the event that its stream waits for.
pub(crate) const ACCESS_IN_STREAM_ORDER: c_uint = 1;

/// `CUuuid`.
pub(crate) type Uuid = [u8; 16];

/// `CUipcEventHandle`. A structure and not an array: C passes an array by its address.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct EventHandle(pub(crate) [u8; 64]);

/// How a function is found.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Symbol {
    /// The name that `cuGetProcAddress` takes.
    pub(crate) base: &'static CStr,
    /// The version of CUDA in which this form of it appeared, as the driver counts them.
    pub(crate) since: c_int,
    /// The name that the library exports for this form.
    pub(crate) exported: &'static CStr,
}

/// A function that may be absent.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Function<F> {
    pub(crate) name: &'static str,
    pub(crate) pointer: Option<F>,
}

macro_rules! functions {
    ($($(#[$doc:meta])* $field:ident: $base:literal, $since:literal, $exported:literal,
       ($($argument:ty),*);)*) => {
        /// What was found in the driver's library.
        #[derive(Debug)]
        pub(crate) struct Functions {
            $($(#[$doc])* pub(crate) $field:
                Function<unsafe extern "C" fn($($argument),*) -> Status>,)*
        }

        impl Functions {
            /// Asks `find` for each function.
            pub(crate) fn find(find: impl Fn(&Symbol) -> Option<NonNull<c_void>>) -> Self {
                Self { $($field: {
                    let symbol = Symbol { base: $base, since: $since, exported: $exported };
                    let pointer = find(&symbol).map(|address| {
                        // SAFETY: a driver's function of this name and version has these
                        // arguments: see the module. A library that exports another function by
                        // such a name is not a driver; the user chose it.
                        unsafe {
                            transmute::<
                                NonNull<c_void>,
                                unsafe extern "C" fn($($argument),*) -> Status,
                            >(address)
                        }
                    });
                    Function { name: text($exported), pointer }
                },)* }
            }

            /// The functions that a driver of a version should have and this one has not.
            pub(crate) fn missing(&self, version: c_int) -> Vec<&'static str> {
                let mut missing = Vec::new();
                $(if self.$field.pointer.is_none() && $since <= version {
                    missing.push(self.$field.name);
                })*
                missing
            }
        }
    };
}

/// A name as text. The names are ASCII.
const fn text(name: &'static CStr) -> &'static str {
    match name.to_str() {
        Ok(name) => name,
        Err(_) => "",
    }
}

functions! {
    init: c"cuInit", 2000, c"cuInit", (c_uint);
    driver_get_version: c"cuDriverGetVersion", 2020, c"cuDriverGetVersion", (*mut c_int);
    get_error_name: c"cuGetErrorName", 6000, c"cuGetErrorName", (Status, *mut *const c_char);
    get_error_string: c"cuGetErrorString", 6000, c"cuGetErrorString",
        (Status, *mut *const c_char);
    device_get_count: c"cuDeviceGetCount", 2000, c"cuDeviceGetCount", (*mut c_int);
    device_get: c"cuDeviceGet", 2000, c"cuDeviceGet", (*mut DeviceNumber, c_int);
    device_get_name: c"cuDeviceGetName", 2000, c"cuDeviceGetName",
        (*mut c_char, c_int, DeviceNumber);
    device_total_mem: c"cuDeviceTotalMem", 3020, c"cuDeviceTotalMem_v2",
        (*mut usize, DeviceNumber);
    device_get_attribute: c"cuDeviceGetAttribute", 2000, c"cuDeviceGetAttribute",
        (*mut c_int, c_uint, DeviceNumber);
    device_get_uuid: c"cuDeviceGetUuid", 11_040, c"cuDeviceGetUuid_v2",
        (*mut Uuid, DeviceNumber);
    device_get_pci_bus_id: c"cuDeviceGetPCIBusId", 4010, c"cuDeviceGetPCIBusId",
        (*mut c_char, c_int, DeviceNumber);
    primary_ctx_retain: c"cuDevicePrimaryCtxRetain", 7000, c"cuDevicePrimaryCtxRetain",
        (*mut Handle, DeviceNumber);
    primary_ctx_release: c"cuDevicePrimaryCtxRelease", 11_000, c"cuDevicePrimaryCtxRelease_v2",
        (DeviceNumber);
    ctx_push_current: c"cuCtxPushCurrent", 4000, c"cuCtxPushCurrent_v2", (Handle);
    ctx_pop_current: c"cuCtxPopCurrent", 4000, c"cuCtxPopCurrent_v2", (*mut Handle);
    mem_get_info: c"cuMemGetInfo", 3020, c"cuMemGetInfo_v2", (*mut usize, *mut usize);
    pointer_get_attributes: c"cuPointerGetAttributes", 7000, c"cuPointerGetAttributes",
        (c_uint, *mut c_uint, *mut *mut c_void, Address);
    mem_get_address_range: c"cuMemGetAddressRange", 3020, c"cuMemGetAddressRange_v2",
        (*mut Address, *mut usize, Address);
    mem_host_register: c"cuMemHostRegister", 6050, c"cuMemHostRegister_v2",
        (*mut c_void, usize, c_uint);
    mem_host_unregister: c"cuMemHostUnregister", 4000, c"cuMemHostUnregister", (*mut c_void);
    mem_host_get_device_pointer: c"cuMemHostGetDevicePointer", 3020,
        c"cuMemHostGetDevicePointer_v2", (*mut Address, *mut c_void, c_uint);
    /// For buffers of our own, where memory cannot be registered.
    mem_alloc_host: c"cuMemAllocHost", 3020, c"cuMemAllocHost_v2", (*mut *mut c_void, usize);
    mem_free_host: c"cuMemFreeHost", 2000, c"cuMemFreeHost", (*mut c_void);
    mem_alloc: c"cuMemAlloc", 3020, c"cuMemAlloc_v2", (*mut Address, usize);
    mem_free: c"cuMemFree", 3020, c"cuMemFree_v2", (Address);
    memset_async: c"cuMemsetD8Async", 3020, c"cuMemsetD8Async", (Address, u8, usize, Handle);
    memcpy_to_device_async: c"cuMemcpyHtoDAsync", 3020, c"cuMemcpyHtoDAsync_v2",
        (Address, *const c_void, usize, Handle);
    memcpy_to_host_async: c"cuMemcpyDtoHAsync", 3020, c"cuMemcpyDtoHAsync_v2",
        (*mut c_void, Address, usize, Handle);
    memcpy_within_async: c"cuMemcpyDtoDAsync", 3020, c"cuMemcpyDtoDAsync_v2",
        (Address, Address, usize, Handle);
    memcpy_peer_async: c"cuMemcpyPeerAsync", 4000, c"cuMemcpyPeerAsync",
        (Address, Handle, Address, Handle, usize, Handle);
    /// Its first argument is a `CUDA_MEMCPY2D`.
    memcpy_rows_async: c"cuMemcpy2DAsync", 3020, c"cuMemcpy2DAsync_v2", (*const c_void, Handle);
    /// CUDA 12.8: the last argument but one receives the index of a copy that failed.
    memcpy_batch_with_index: c"cuMemcpyBatchAsync", 12_080, c"cuMemcpyBatchAsync",
        (*mut Address, *mut Address, *mut usize, usize, *mut CopyAttributes, *mut usize, usize,
         *mut usize, Handle);
    /// CUDA 13.0: without that argument.
    memcpy_batch: c"cuMemcpyBatchAsync", 13_000, c"cuMemcpyBatchAsync_v2",
        (*mut Address, *mut Address, *mut usize, usize, *mut CopyAttributes, *mut usize, usize,
         Handle);
    stream_create: c"cuStreamCreateWithPriority", 5050, c"cuStreamCreateWithPriority",
        (*mut Handle, c_uint, c_int);
    stream_destroy: c"cuStreamDestroy", 4000, c"cuStreamDestroy_v2", (Handle);
    stream_wait_event: c"cuStreamWaitEvent", 3020, c"cuStreamWaitEvent",
        (Handle, Handle, c_uint);
    stream_query: c"cuStreamQuery", 2000, c"cuStreamQuery", (Handle);
    stream_synchronize: c"cuStreamSynchronize", 2000, c"cuStreamSynchronize", (Handle);
    launch_host_function: c"cuLaunchHostFunc", 10_000, c"cuLaunchHostFunc",
        (Handle, HostFunction, *mut c_void);
    event_create: c"cuEventCreate", 2000, c"cuEventCreate", (*mut Handle, c_uint);
    event_record: c"cuEventRecord", 2000, c"cuEventRecord", (Handle, Handle);
    event_query: c"cuEventQuery", 2000, c"cuEventQuery", (Handle);
    event_synchronize: c"cuEventSynchronize", 2000, c"cuEventSynchronize", (Handle);
    event_elapsed_time: c"cuEventElapsedTime", 2000, c"cuEventElapsedTime",
        (*mut f32, Handle, Handle);
    event_destroy: c"cuEventDestroy", 4000, c"cuEventDestroy_v2", (Handle);
    module_load: c"cuModuleLoadDataEx", 2010, c"cuModuleLoadDataEx",
        (*mut Handle, *const c_void, c_uint, *mut c_uint, *mut *mut c_void);
    module_get_function: c"cuModuleGetFunction", 2000, c"cuModuleGetFunction",
        (*mut Handle, Handle, *const c_char);
    module_unload: c"cuModuleUnload", 2000, c"cuModuleUnload", (Handle);
    launch_kernel: c"cuLaunchKernel", 4000, c"cuLaunchKernel",
        (Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle,
         *mut *mut c_void, *mut *mut c_void);
    /// The second argument here and below is a `CUmemAllocationProp`.
    mem_get_granularity: c"cuMemGetAllocationGranularity", 10_020,
        c"cuMemGetAllocationGranularity", (*mut usize, *const c_void, c_uint);
    mem_create: c"cuMemCreate", 10_020, c"cuMemCreate",
        (*mut u64, usize, *const c_void, c_ulonglong);
    mem_release: c"cuMemRelease", 10_020, c"cuMemRelease", (u64);
    mem_address_reserve: c"cuMemAddressReserve", 10_020, c"cuMemAddressReserve",
        (*mut Address, usize, usize, Address, c_ulonglong);
    mem_address_free: c"cuMemAddressFree", 10_020, c"cuMemAddressFree", (Address, usize);
    mem_map: c"cuMemMap", 10_020, c"cuMemMap", (Address, usize, usize, u64, c_ulonglong);
    mem_unmap: c"cuMemUnmap", 10_020, c"cuMemUnmap", (Address, usize);
    /// Takes `CUmemAccessDesc` values.
    mem_set_access: c"cuMemSetAccess", 10_020, c"cuMemSetAccess",
        (Address, usize, *const c_void, usize);
    mem_export: c"cuMemExportToShareableHandle", 10_020, c"cuMemExportToShareableHandle",
        (*mut c_void, u64, c_uint, c_ulonglong);
    mem_import: c"cuMemImportFromShareableHandle", 10_020, c"cuMemImportFromShareableHandle",
        (*mut u64, *mut c_void, c_uint);
    mem_get_handle_for_range: c"cuMemGetHandleForAddressRange", 11_070,
        c"cuMemGetHandleForAddressRange", (*mut c_void, Address, usize, c_uint, c_ulonglong);
    device_can_access_peer: c"cuDeviceCanAccessPeer", 4000, c"cuDeviceCanAccessPeer",
        (*mut c_int, DeviceNumber, DeviceNumber);
    ctx_enable_peer_access: c"cuCtxEnablePeerAccess", 4000, c"cuCtxEnablePeerAccess",
        (Handle, c_uint);
    ipc_get_event_handle: c"cuIpcGetEventHandle", 4010, c"cuIpcGetEventHandle",
        (*mut EventHandle, Handle);
    ipc_open_event_handle: c"cuIpcOpenEventHandle", 4010, c"cuIpcOpenEventHandle",
        (*mut Handle, EventHandle);
}
