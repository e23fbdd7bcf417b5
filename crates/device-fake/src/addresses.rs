//! What `cuGetProcAddress_v2` knows: names, the versions in which each form appeared, addresses.
#![expect(unsafe_code, reason = "exports a function with C's interface")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::null_mut;

use crate::exports::{
    contexts, copies, devices, kernels, memory, order, unsupported, virtual_memory, write,
};
use crate::settings::Settings;
use crate::state::NOT_FOUND;
use crate::world::{Needs, Status, World};

#[unsafe(export_name = "cuGetProcAddress_v2")]
pub(crate) unsafe extern "C" fn get_proc_address(
    symbol: *const c_char,
    function: *mut *mut c_void,
    version: c_int,
    _flags: u64,
    status: *mut c_int,
) -> Status {
    World::call("cuGetProcAddress_v2", Needs::Nothing, |world, _| {
        // SAFETY: a string of the caller.
        let symbol = unsafe { CStr::from_ptr(symbol) };
        let found = find(symbol, version, &world.settings);
        // SAFETY: the caller's promise.
        unsafe { write(status, c_int::from(found.is_none())) }?;
        let address = found.map_or(null_mut(), std::ptr::with_exposed_provenance_mut);
        // SAFETY: as above.
        unsafe { write(function, address) }?;
        found.map(drop).ok_or(NOT_FOUND)
    })
}

/// The address of the newest form of a function that a version of CUDA has, as a number.
///
/// Drivers below 12.8 have no batched copy, and those below 13.0 only its first form.
fn find(base: &CStr, version: i32, settings: &Settings) -> Option<usize> {
    let version = version.min(settings.version);
    let forms = entries()
        .into_iter()
        .filter(|(name, _, since, _)| name.as_bytes() == base.to_bytes() && *since <= version);
    let (_, exported, _, address) = forms.max_by_key(|(_, _, since, _)| *since)?;
    (!settings.is_absent(exported)).then(|| address.expose_provenance())
}

macro_rules! entries {
    ($($base:literal, $exported:literal, $since:literal, $($function:ident)::+;)*) => {
        /// Base name, exported name, first version and address of each function.
        fn entries() -> impl IntoIterator<Item = (&'static str, &'static str, i32, *const ())> {
            [$(($base, $exported, $since, $($function)::+ as *const ())),*]
        }
    };
}

entries! {
    "cuInit", "cuInit", 2000, devices::init;
    "cuDriverGetVersion", "cuDriverGetVersion", 2020, devices::driver_get_version;
    "cuGetErrorName", "cuGetErrorName", 6000, devices::get_error_name;
    "cuGetErrorString", "cuGetErrorString", 6000, devices::get_error_string;
    "cuDeviceGetCount", "cuDeviceGetCount", 2000, devices::get_count;
    "cuDeviceGet", "cuDeviceGet", 2000, devices::get;
    "cuDeviceGetName", "cuDeviceGetName", 2000, devices::get_name;
    "cuDeviceTotalMem", "cuDeviceTotalMem_v2", 3020, devices::total_mem;
    "cuDeviceGetAttribute", "cuDeviceGetAttribute", 2000, devices::get_attribute;
    "cuDeviceGetUuid", "cuDeviceGetUuid_v2", 11_040, devices::get_uuid;
    "cuDeviceGetPCIBusId", "cuDeviceGetPCIBusId", 4010, devices::get_pci_bus_id;
    "cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRetain", 7000, contexts::retain;
    "cuDevicePrimaryCtxRelease", "cuDevicePrimaryCtxRelease_v2", 11_000, contexts::release;
    "cuCtxPushCurrent", "cuCtxPushCurrent_v2", 4000, contexts::push;
    "cuCtxPopCurrent", "cuCtxPopCurrent_v2", 4000, contexts::pop;
    "cuMemGetInfo", "cuMemGetInfo_v2", 3020, memory::get_info;
    "cuMemAlloc", "cuMemAlloc_v2", 3020, memory::allocate;
    "cuMemFree", "cuMemFree_v2", 3020, memory::free;
    "cuMemGetAddressRange", "cuMemGetAddressRange_v2", 3020, memory::get_address_range;
    "cuMemHostRegister", "cuMemHostRegister_v2", 6050, memory::register;
    "cuMemHostUnregister", "cuMemHostUnregister", 4000, memory::unregister;
    "cuMemHostGetDevicePointer", "cuMemHostGetDevicePointer_v2", 3020, memory::get_device_pointer;
    "cuMemAllocHost", "cuMemAllocHost_v2", 3020, memory::allocate_host;
    "cuMemFreeHost", "cuMemFreeHost", 2000, memory::free_host;
    "cuMemcpyHtoDAsync", "cuMemcpyHtoDAsync_v2", 3020, copies::to_device;
    "cuMemcpyDtoHAsync", "cuMemcpyDtoHAsync_v2", 3020, copies::to_host;
    "cuMemcpyDtoDAsync", "cuMemcpyDtoDAsync_v2", 3020, copies::within;
    "cuMemsetD8Async", "cuMemsetD8Async", 3020, copies::fill;
    "cuMemcpyBatchAsync", "cuMemcpyBatchAsync", 12_080, copies::batch_with_index;
    "cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2", 13_000, copies::batch_without_index;
    "cuStreamCreateWithPriority", "cuStreamCreateWithPriority", 5050, order::stream_create;
    "cuStreamDestroy", "cuStreamDestroy_v2", 4000, order::stream_destroy;
    "cuStreamWaitEvent", "cuStreamWaitEvent", 3020, order::stream_wait_event;
    "cuStreamQuery", "cuStreamQuery", 2000, order::stream_query;
    "cuStreamSynchronize", "cuStreamSynchronize", 2000, order::stream_synchronize;
    "cuLaunchHostFunc", "cuLaunchHostFunc", 10_000, order::launch_host_function;
    "cuEventCreate", "cuEventCreate", 2000, order::event_create;
    "cuEventRecord", "cuEventRecord", 2000, order::event_record;
    "cuEventQuery", "cuEventQuery", 2000, order::event_query;
    "cuEventSynchronize", "cuEventSynchronize", 2000, order::event_synchronize;
    "cuEventElapsedTime", "cuEventElapsedTime", 2000, order::event_elapsed_time;
    "cuCtxSynchronize", "cuCtxSynchronize", 2000, order::context_synchronize;
    "cuEventDestroy", "cuEventDestroy_v2", 4000, order::event_destroy;
    "cuPointerGetAttributes", "cuPointerGetAttributes", 7000, unsupported::pointer_get_attributes;
    "cuMemcpyPeerAsync", "cuMemcpyPeerAsync", 4000, unsupported::memcpy_peer;
    "cuMemcpy2DAsync", "cuMemcpy2DAsync_v2", 3020, unsupported::memcpy_rows;
    "cuModuleLoadDataEx", "cuModuleLoadDataEx", 2010, kernels::load;
    "cuModuleGetFunction", "cuModuleGetFunction", 2000, kernels::get_function;
    "cuModuleUnload", "cuModuleUnload", 2000, kernels::unload;
    "cuLaunchKernel", "cuLaunchKernel", 4000, kernels::launch;
    "cuMemGetAllocationGranularity", "cuMemGetAllocationGranularity", 10_020,
        virtual_memory::get_granularity;
    "cuMemCreate", "cuMemCreate", 10_020, virtual_memory::create;
    "cuMemRelease", "cuMemRelease", 10_020, virtual_memory::release;
    "cuMemAddressReserve", "cuMemAddressReserve", 10_020, virtual_memory::reserve;
    "cuMemAddressFree", "cuMemAddressFree", 10_020, virtual_memory::free;
    "cuMemMap", "cuMemMap", 10_020, virtual_memory::map;
    "cuMemUnmap", "cuMemUnmap", 10_020, virtual_memory::unmap;
    "cuMemSetAccess", "cuMemSetAccess", 10_020, virtual_memory::set_access;
    "cuMemExportToShareableHandle", "cuMemExportToShareableHandle", 10_020, virtual_memory::export;
    "cuMemImportFromShareableHandle", "cuMemImportFromShareableHandle", 10_020,
        virtual_memory::import;
    "cuMemGetHandleForAddressRange", "cuMemGetHandleForAddressRange", 11_070,
        virtual_memory::get_handle_for_range;
    "cuDeviceCanAccessPeer", "cuDeviceCanAccessPeer", 4000, devices::can_access_peer;
    "cuCtxEnablePeerAccess", "cuCtxEnablePeerAccess", 4000, unsupported::enable_peer_access;
    "cuIpcGetEventHandle", "cuIpcGetEventHandle", 4010, unsupported::ipc_get_event_handle;
    "cuIpcOpenEventHandle", "cuIpcOpenEventHandle", 4010, unsupported::ipc_open_event_handle;
}
