//! The functions of the driver, as `cuda.h` declares them.
//!
//! Arguments are those of NVIDIA's headers `cuda.h` of CUDA 12.8 and 13.0; they were compared with
//! the bindings that bindgen made from these headers (cudarc, `src/driver/sys/mod.rs`) and with
//! those of NVIDIA's `cuda-python`. They are written here again and not shared with the crate that
//! is tested, so that a wrong declaration of one side is found.

pub(crate) mod contexts;
pub(crate) mod control;
pub(crate) mod copies;
pub(crate) mod devices;
pub(crate) mod kernels;
pub(crate) mod memory;
pub(crate) mod order;
pub(crate) mod unsupported;
pub(crate) mod virtual_memory;

use crate::state::INVALID_VALUE;

/// Writes a result of a function.
///
/// # Safety
/// The caller of the driver passes null, or an address where such a value may be written.
#[expect(unsafe_code, reason = "writes where the caller of the driver says")]
pub(crate) unsafe fn write<T>(target: *mut T, value: T) -> Result<(), i32> {
    if target.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: not null, and the promise above.
    unsafe { target.write(value) };
    Ok(())
}
