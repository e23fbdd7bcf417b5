//! Functions about modules and kernels. A module has the kernels whose entries its text declares
//! and that this fake knows by name; it does not run the text.
#![expect(unsafe_code, reason = "exports functions with C's interface")]

use std::ffi::{CStr, c_char, c_uint, c_void};
use std::slice;

use super::write;
use crate::kernels::COPY;
use crate::state::{INVALID_HANDLE, INVALID_PTX, INVALID_VALUE, Launch, NOT_FOUND, Work};
use crate::streams::submit;
use crate::world::{Needs, Status, World};

#[unsafe(export_name = "cuModuleLoadDataEx")]
pub(crate) unsafe extern "C" fn load(
    module: *mut *mut c_void,
    image: *const c_void,
    option_count: c_uint,
    _options: *mut c_uint,
    _values: *mut *mut c_void,
) -> Status {
    World::call("cuModuleLoadDataEx", Needs::Current, |_, state| {
        if image.is_null() || option_count > 0 {
            return Err(INVALID_VALUE);
        }
        // SAFETY: a text of the caller that ends with a zero: this fake has no other images.
        let text = unsafe { CStr::from_ptr(image.cast()) };
        let text = text.to_str().map_err(|_| INVALID_PTX)?;
        let lines = text.lines().map(str::trim).filter(|line| !line.starts_with("//"));
        let lines: Vec<&str> = lines.collect();
        let declares = |start: &str| lines.iter().any(|line| line.starts_with(start));
        if ![".version ", ".target sm_", ".address_size 64"].into_iter().all(declares) {
            return Err(INVALID_PTX);
        }
        let has_copy = declares(&format!(".visible .entry {COPY}("));
        let handle = state.new_handle();
        // SAFETY: the caller's promise.
        unsafe { write(module, std::ptr::without_provenance_mut(handle)) }?;
        let function = if has_copy { Some(state.new_handle()) } else { None };
        state.modules.insert(handle, function);
        Ok(())
    })
}

#[unsafe(export_name = "cuModuleGetFunction")]
pub(crate) unsafe extern "C" fn get_function(
    function: *mut *mut c_void,
    module: *mut c_void,
    name: *const c_char,
) -> Status {
    World::call("cuModuleGetFunction", Needs::Current, |_, state| {
        // SAFETY: a string of the caller.
        let name = unsafe { CStr::from_ptr(name) };
        let copy = *state.modules.get(&module.addr()).ok_or(INVALID_HANDLE)?;
        let found = copy.filter(|_| name.to_bytes() == COPY.as_bytes()).ok_or(NOT_FOUND)?;
        // SAFETY: the caller's promise.
        unsafe { write(function, std::ptr::without_provenance_mut(found)) }
    })
}

#[unsafe(export_name = "cuModuleUnload")]
pub(crate) unsafe extern "C" fn unload(module: *mut c_void) -> Status {
    World::release("cuModuleUnload", Needs::Current, |state| {
        state.modules.remove(&module.addr()).map(drop).ok_or(INVALID_HANDLE)
    })
}

/// Threads of a block: whole warps, at most what the kernel declares.
fn is_block(threads: c_uint) -> bool {
    (1..=512).contains(&threads) && threads.is_multiple_of(32)
}

#[unsafe(export_name = "cuLaunchKernel")]
pub(crate) unsafe extern "C" fn launch(
    function: *mut c_void,
    blocks_x: c_uint,
    blocks_y: c_uint,
    blocks_z: c_uint,
    threads_x: c_uint,
    threads_y: c_uint,
    threads_z: c_uint,
    shared_bytes: c_uint,
    stream: *mut c_void,
    arguments: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Status {
    World::call("cuLaunchKernel", Needs::Current, |_, state| {
        let is_known = state.modules.values().any(|copy| *copy == Some(function.addr()));
        if !is_known {
            return Err(INVALID_HANDLE);
        }
        let others = [blocks_y, blocks_z, threads_y, threads_z];
        if blocks_x == 0 || !is_block(threads_x) || others != [1; 4] {
            return Err(INVALID_VALUE);
        }
        if shared_bytes != 0 || arguments.is_null() || !extra.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: an address for each parameter of the kernel, by the caller's promise.
        let arguments = unsafe { slice::from_raw_parts(arguments, 4) };
        let mut values = [0_u64; 4];
        for (value, argument) in values.iter_mut().zip(arguments) {
            // SAFETY: the address of a number of 64 bits, by the caller's promise.
            *value = unsafe { argument.cast::<u64>().read() };
        }
        let [targets, sources, lengths, count] = values;
        let launch = Launch::new(state, [targets, sources, lengths], count)?;
        submit(state, stream.addr(), "cuLaunchKernel", Work::Kernel(launch))
    })
}
