//! Functions about memory of devices and of the host.
#![expect(unsafe_code, reason = "exports functions with C's interface")]

use std::ffi::{c_uint, c_void};
use std::time::Duration;

use cascade_runtime::sleep;

use super::write;
use crate::device_memory::Mapping;
use crate::kernels::device_address;
use crate::state::{
    ALREADY_REGISTERED, INVALID_VALUE, Memory, NOT_REGISTERED, OUT_OF_MEMORY, Side, State,
};
use crate::world::{Needs, Status, World};

#[unsafe(export_name = "cuMemGetInfo_v2")]
pub(crate) unsafe extern "C" fn get_info(free: *mut usize, total: *mut usize) -> Status {
    World::call("cuMemGetInfo_v2", Needs::Current, |world, state| {
        let all = world.settings.bytes;
        let used = state.used_bytes.saturating_add(world.settings.taken_bytes());
        // SAFETY: the caller's promise.
        unsafe { write(free, all.saturating_sub(used)) }?;
        // SAFETY: as above.
        unsafe { write(total, all) }
    })
}

#[unsafe(export_name = "cuMemAlloc_v2")]
pub(crate) unsafe extern "C" fn allocate(address: *mut u64, bytes: usize) -> Status {
    World::call("cuMemAlloc_v2", Needs::Current, |world, state| {
        if bytes == 0 {
            return Err(INVALID_VALUE);
        }
        let used = state.used_bytes.checked_add(bytes);
        let used = used.filter(|used| *used <= world.settings.bytes).ok_or(OUT_OF_MEMORY)?;
        let key = state.take_addresses(bytes)?;
        let mapping = Mapping::accessible(bytes).ok_or(OUT_OF_MEMORY)?;
        // SAFETY: the caller's promise.
        unsafe { write(address, key as u64) }?;
        let start = mapping.start();
        state.used_bytes = used;
        state.device.insert(key, Memory::new(bytes, start, Some(mapping)));
        Ok(())
    })
}

#[unsafe(export_name = "cuMemFree_v2")]
pub(crate) unsafe extern "C" fn free(address: u64) -> Status {
    World::release("cuMemFree_v2", Needs::Current, |state| {
        let key = usize::try_from(address).map_err(|_| INVALID_VALUE)?;
        if state.device.get(&key).is_some_and(|memory| memory.allocation.is_some()) {
            return Err(INVALID_VALUE);
        }
        let memory = state.remove(Side::Device, key, INVALID_VALUE)?;
        state.used_bytes -= memory.bytes;
        Ok(())
    })
}

#[unsafe(export_name = "cuMemGetAddressRange_v2")]
pub(crate) unsafe extern "C" fn get_address_range(
    base: *mut u64,
    bytes: *mut usize,
    address: u64,
) -> Status {
    World::call("cuMemGetAddressRange_v2", Needs::Current, |_, state| {
        let address = usize::try_from(address).map_err(|_| INVALID_VALUE)?;
        let place = state.find(address, 1)?;
        let length = state.map(place.side)[&place.key].bytes;
        // SAFETY: the caller's promise.
        unsafe { write(base, place.key as u64) }?;
        // SAFETY: as above.
        unsafe { write(bytes, length) }
    })
}

/// Whether host memory overlaps what is registered or allocated.
fn overlaps(state: &State, first: usize, bytes: usize) -> bool {
    let before = state.host.range(..first.saturating_add(bytes)).next_back();
    before.is_some_and(|(key, memory)| key + memory.bytes > first)
}

#[unsafe(export_name = "cuMemHostRegister_v2")]
pub(crate) unsafe extern "C" fn register(
    start: *mut c_void,
    bytes: usize,
    flags: c_uint,
) -> Status {
    let delay = World::get().settings.delay_us("cuMemHostRegister_v2");
    if delay > 0 {
        // Before the state is locked: other calls go on, as they do beside a real registration.
        sleep(Duration::from_micros(delay));
    }
    World::call("cuMemHostRegister_v2", Needs::Current, |_, state| {
        let start = start.expose_provenance();
        if start == 0 || bytes == 0 || flags > 15 {
            return Err(INVALID_VALUE);
        }
        if overlaps(state, start, bytes) {
            return Err(ALREADY_REGISTERED);
        }
        state.host.insert(start, Memory::new(bytes, start, None));
        Ok(())
    })
}

#[unsafe(export_name = "cuMemHostUnregister")]
pub(crate) unsafe extern "C" fn unregister(start: *mut c_void) -> Status {
    World::release("cuMemHostUnregister", Needs::Current, |state| {
        let key = start.addr();
        if state.host.get(&key).is_some_and(|memory| memory.mapping.is_some()) {
            return Err(NOT_REGISTERED);
        }
        state.remove(Side::Host, key, NOT_REGISTERED).map(drop)
    })
}

#[unsafe(export_name = "cuMemHostGetDevicePointer_v2")]
pub(crate) unsafe extern "C" fn get_device_pointer(
    address: *mut u64,
    start: *mut c_void,
    _flags: c_uint,
) -> Status {
    World::call("cuMemHostGetDevicePointer_v2", Needs::Current, |_, state| {
        state.find(start.addr(), 1)?;
        // SAFETY: the caller's promise.
        unsafe { write(address, device_address(start.addr())) }
    })
}

#[unsafe(export_name = "cuMemAllocHost_v2")]
pub(crate) unsafe extern "C" fn allocate_host(start: *mut *mut c_void, bytes: usize) -> Status {
    World::call("cuMemAllocHost_v2", Needs::Current, |_, state| {
        let mapping = Mapping::accessible(bytes).ok_or(OUT_OF_MEMORY)?;
        let key = mapping.start();
        // SAFETY: the caller's promise.
        unsafe { write(start, std::ptr::with_exposed_provenance_mut(key)) }?;
        let bytes = mapping.bytes();
        state.host.insert(key, Memory::new(bytes, key, Some(mapping)));
        Ok(())
    })
}

#[unsafe(export_name = "cuMemFreeHost")]
pub(crate) unsafe extern "C" fn free_host(start: *mut c_void) -> Status {
    World::release("cuMemFreeHost", Needs::Current, |state| {
        let key = start.addr();
        if state.host.get(&key).is_some_and(|memory| memory.mapping.is_none()) {
            return Err(INVALID_VALUE);
        }
        state.remove(Side::Host, key, INVALID_VALUE).map(drop)
    })
}
