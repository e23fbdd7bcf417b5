//! Functions about the driver and its devices.
#![expect(unsafe_code, reason = "exports functions with C's interface")]

use std::ffi::{CStr, c_char, c_int, c_uint};

use super::write;
use crate::state::{INVALID_DEVICE, INVALID_VALUE, NO_DEVICE, State};
use crate::world::{Needs, SUCCESS, Status, World};

/// What every check looks for to tell a fake from a GPU.
const NAME: &CStr = c"fake GPU of cascade (host memory)";

fn check_device(world: &World, device: c_int) -> Result<(), Status> {
    let exists = (0..world.settings.devices).contains(&device);
    exists.then_some(()).ok_or(INVALID_DEVICE)
}

#[unsafe(export_name = "cuInit")]
pub(crate) unsafe extern "C" fn init(flags: c_uint) -> Status {
    World::call("cuInit", Needs::Nothing, |world, state| {
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        if world.settings.devices == 0 {
            return Err(NO_DEVICE);
        }
        state.is_initialized = true;
        Ok(())
    })
}

#[unsafe(export_name = "cuDeviceCanAccessPeer")]
pub(crate) unsafe extern "C" fn can_access_peer(
    can_access: *mut c_int,
    device: c_int,
    peer: c_int,
) -> Status {
    World::call("cuDeviceCanAccessPeer", Needs::Start, |world, _| {
        check_device(world, device)?;
        check_device(world, peer)?;
        let can = device != peer && world.settings.has_peers;
        // SAFETY: the caller's promise.
        unsafe { write(can_access, c_int::from(can)) }
    })
}

#[unsafe(export_name = "cuDriverGetVersion")]
pub(crate) unsafe extern "C" fn driver_get_version(version: *mut c_int) -> Status {
    World::call("cuDriverGetVersion", Needs::Nothing, |world, _: &mut State| {
        // SAFETY: the caller's promise.
        unsafe { write(version, world.settings.version) }
    })
}

#[unsafe(export_name = "cuGetErrorName")]
pub(crate) unsafe extern "C" fn get_error_name(error: Status, text: *mut *const c_char) -> Status {
    World::call("cuGetErrorName", Needs::Nothing, |_, _| {
        let name = match error {
            SUCCESS => c"CUDA_SUCCESS",
            1 => c"CUDA_ERROR_INVALID_VALUE",
            2 => c"CUDA_ERROR_OUT_OF_MEMORY",
            3 => c"CUDA_ERROR_NOT_INITIALIZED",
            100 => c"CUDA_ERROR_NO_DEVICE",
            201 => c"CUDA_ERROR_INVALID_CONTEXT",
            217 => c"CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
            304 => c"CUDA_ERROR_OPERATING_SYSTEM",
            400 => c"CUDA_ERROR_INVALID_HANDLE",
            700 => c"CUDA_ERROR_ILLEGAL_ADDRESS",
            801 => c"CUDA_ERROR_NOT_SUPPORTED",
            999 => c"CUDA_ERROR_UNKNOWN",
            _ => return Err(INVALID_VALUE),
        };
        // SAFETY: the caller's promise.
        unsafe { write(text, name.as_ptr()) }
    })
}

#[unsafe(export_name = "cuGetErrorString")]
pub(crate) unsafe extern "C" fn get_error_string(
    _error: Status,
    text: *mut *const c_char,
) -> Status {
    World::call("cuGetErrorString", Needs::Nothing, |_, _| {
        // SAFETY: the caller's promise.
        unsafe { write(text, c"an error of the fake driver".as_ptr()) }
    })
}

#[unsafe(export_name = "cuDeviceGetCount")]
pub(crate) unsafe extern "C" fn get_count(count: *mut c_int) -> Status {
    World::call("cuDeviceGetCount", Needs::Start, |world, _| {
        // SAFETY: the caller's promise.
        unsafe { write(count, world.settings.devices) }
    })
}

#[unsafe(export_name = "cuDeviceGet")]
pub(crate) unsafe extern "C" fn get(device: *mut c_int, ordinal: c_int) -> Status {
    World::call("cuDeviceGet", Needs::Start, |world, _| {
        check_device(world, ordinal)?;
        // SAFETY: the caller's promise.
        unsafe { write(device, ordinal) }
    })
}

/// Writes text of at most `length` bytes, with a zero at its end.
///
/// # Safety
/// `target` has that many bytes.
unsafe fn write_text(target: *mut c_char, length: c_int, text: &CStr) -> Result<(), Status> {
    let bytes = text.to_bytes_with_nul();
    if target.is_null() || usize::try_from(length).unwrap_or(0) < bytes.len() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: checked above.
    unsafe { target.cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    Ok(())
}

#[unsafe(export_name = "cuDeviceGetName")]
pub(crate) unsafe extern "C" fn get_name(
    name: *mut c_char,
    length: c_int,
    device: c_int,
) -> Status {
    World::call("cuDeviceGetName", Needs::Start, |world, _| {
        check_device(world, device)?;
        // SAFETY: the caller's promise.
        unsafe { write_text(name, length, NAME) }
    })
}

#[unsafe(export_name = "cuDeviceGetPCIBusId")]
pub(crate) unsafe extern "C" fn get_pci_bus_id(
    text: *mut c_char,
    length: c_int,
    device: c_int,
) -> Status {
    World::call("cuDeviceGetPCIBusId", Needs::Start, |world, _| {
        check_device(world, device)?;
        // SAFETY: the caller's promise.
        unsafe { write_text(text, length, c"0000:FA:CE.0") }
    })
}

#[unsafe(export_name = "cuDeviceTotalMem_v2")]
pub(crate) unsafe extern "C" fn total_mem(bytes: *mut usize, device: c_int) -> Status {
    World::call("cuDeviceTotalMem_v2", Needs::Start, |world, _| {
        check_device(world, device)?;
        // SAFETY: the caller's promise.
        unsafe { write(bytes, world.settings.bytes) }
    })
}

#[unsafe(export_name = "cuDeviceGetAttribute")]
pub(crate) unsafe extern "C" fn get_attribute(
    value: *mut c_int,
    attribute: c_uint,
    device: c_int,
) -> Status {
    World::call("cuDeviceGetAttribute", Needs::Start, |world, _| {
        check_device(world, device)?;
        let default = match attribute {
            // Major compute capability 9, as Hopper has it.
            75 => 9,
            // Virtual memory management, descriptors of its memory, and DMA-BUF.
            102 | 103 | 124 => 1,
            _ => 0,
        };
        // SAFETY: the caller's promise.
        unsafe { write(value, world.settings.attribute(attribute).unwrap_or(default)) }
    })
}

#[unsafe(export_name = "cuDeviceGetUuid_v2")]
pub(crate) unsafe extern "C" fn get_uuid(uuid: *mut [u8; 16], device: c_int) -> Status {
    World::call("cuDeviceGetUuid_v2", Needs::Start, |world, _| {
        check_device(world, device)?;
        let mut bytes = [0xfa; 16];
        bytes[15] = u8::try_from((0xfa + device) % 256).unwrap_or_default();
        // SAFETY: the caller's promise.
        unsafe { write(uuid, bytes) }
    })
}
