//! Functions of the fake's own, for tests that load it.
#![expect(unsafe_code, reason = "exports functions with C's interface")]

use std::ffi::{CStr, c_char};

use crate::wake::announce;
use crate::world::World;

/// Holds the work that a function of this name started, and all that follows it in its stream.
#[unsafe(export_name = "fakeCudaHold")]
pub(crate) unsafe extern "C" fn hold(name: *const c_char) {
    // SAFETY: a string of the caller.
    let name = unsafe { CStr::from_ptr(name) };
    World::get().lock().held.insert(name.to_string_lossy().into_owned());
}

/// Lets all held work go on.
#[unsafe(export_name = "fakeCudaRelease")]
pub(crate) unsafe extern "C" fn release() {
    let world = World::get();
    let mut state = world.lock();
    state.held.clear();
    announce(&state, &world.changed);
}

/// The calls of a function so far, or `live`, `contexts`, `deaths`, `misused`, `copies`.
#[unsafe(export_name = "fakeCudaCount")]
pub(crate) unsafe extern "C" fn count(name: *const c_char) -> u64 {
    // SAFETY: a string of the caller.
    let name = unsafe { CStr::from_ptr(name) };
    World::get().lock().count(&name.to_string_lossy())
}
