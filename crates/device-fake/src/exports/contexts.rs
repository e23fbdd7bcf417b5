//! Functions about the primary context of a device.
#![expect(unsafe_code, reason = "exports functions with C's interface")]

use std::ffi::{c_int, c_void};

use super::write;
use crate::state::{INVALID_CONTEXT, INVALID_DEVICE};
use crate::world::{Needs, Status, World, pop_current, push_current};

/// Handles of contexts; the device is added.
const CONTEXTS: usize = 0xfa_c000_0000;

#[unsafe(export_name = "cuDevicePrimaryCtxRetain")]
pub(crate) unsafe extern "C" fn retain(context: *mut *mut c_void, device: c_int) -> Status {
    World::call("cuDevicePrimaryCtxRetain", Needs::Context, |world, state| {
        let number = usize::try_from(device).map_err(|_| INVALID_DEVICE)?;
        if device >= world.settings.devices {
            return Err(INVALID_DEVICE);
        }
        let handle = std::ptr::without_provenance_mut(CONTEXTS + number);
        // SAFETY: the caller's promise.
        unsafe { write(context, handle) }?;
        *state.retained.entry(device).or_default() += 1;
        Ok(())
    })
}

#[unsafe(export_name = "cuDevicePrimaryCtxRelease_v2")]
pub(crate) unsafe extern "C" fn release(device: c_int) -> Status {
    World::release("cuDevicePrimaryCtxRelease_v2", Needs::Context, |state| {
        let retained = state.retained.get_mut(&device).filter(|count| **count > 0);
        let retained = retained.ok_or(INVALID_CONTEXT)?;
        *retained -= 1;
        if state.retained.values().all(|count| *count == 0) {
            // The driver frees what is left; somebody forgot it.
            state.leaked += state.live();
            state.device.clear();
            state.allocations.clear();
            state.reservations.clear();
            state.host.clear();
            state.events.clear();
            state.modules.clear();
            state.streams.values_mut().for_each(|stream| stream.is_destroyed = true);
        }
        Ok(())
    })
}

#[unsafe(export_name = "cuCtxPushCurrent_v2")]
pub(crate) unsafe extern "C" fn push(context: *mut c_void) -> Status {
    World::call("cuCtxPushCurrent_v2", Needs::Context, |_, state| {
        let device = context.addr().checked_sub(CONTEXTS).and_then(|it| i32::try_from(it).ok());
        let retained = device.and_then(|device| state.retained.get(&device));
        retained.filter(|count| **count > 0).ok_or(INVALID_CONTEXT)?;
        push_current(context.addr());
        Ok(())
    })
}

#[unsafe(export_name = "cuCtxPopCurrent_v2")]
pub(crate) unsafe extern "C" fn pop(context: *mut *mut c_void) -> Status {
    World::release("cuCtxPopCurrent_v2", Needs::Context, |_| {
        let popped = pop_current().ok_or(INVALID_CONTEXT)?;
        // SAFETY: the caller's promise.
        unsafe { write(context, std::ptr::without_provenance_mut(popped)) }
    })
}
