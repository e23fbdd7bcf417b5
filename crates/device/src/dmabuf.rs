//! Memory of a device as RDMA devices take it: a DMA-BUF descriptor of the pages that it lies in.
#![expect(unsafe_code, reason = "calls the driver")]

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::os::fd::{FromRawFd as _, OwnedFd};

use cascade_memory::DmaBuf;

use crate::context::Context;
use crate::error::{CudaError, OPERATING_SYSTEM};
use crate::functions::{Address, Status};
use crate::report::attribute;

/// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`.
const DMA_BUF: c_uint = 1;
/// `CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED`.
const DMA_BUF_SUPPORTED: c_uint = 124;
/// The driver takes ranges of whole pages of the host.
const PAGE_BYTES: Address = 4096;
const FUNCTION: &str = "cuMemGetHandleForAddressRange";

/// Describes `bytes` bytes from an address on, which must be memory of the context's device.
///
/// # Errors
/// If the driver is older than CUDA 11.7, or its kernel module has no DMA-BUF.
pub(crate) fn describe(
    context: &Context,
    address: Address,
    bytes: usize,
) -> Result<DmaBuf, CudaError> {
    type Call = unsafe extern "C" fn(*mut c_void, Address, usize, c_uint, c_ulonglong) -> Status;
    context.check()?;
    let driver = context.driver();
    // A driver that does not tell refuses the call.
    let supported = attribute(driver, context.device(), DMA_BUF_SUPPORTED);
    if supported.is_ok_and(|value| value == 0) {
        return Err(CudaError::NoDmaBuf);
    }
    driver.need(&[FUNCTION])?;
    let start = address / PAGE_BYTES * PAGE_BYTES;
    let end = (address + bytes as Address).next_multiple_of(PAGE_BYTES);
    // Both are within an address space of fewer than 64 bits.
    let length = usize::try_from(end - start).unwrap_or(usize::MAX);
    context.with(|| {
        let mut number: c_int = -1;
        let get = |get: Call| {
            // SAFETY: for this kind of handle it writes one `int`, to a local variable.
            unsafe { get((&raw mut number).cast(), start, length, DMA_BUF, 0) }
        };
        context.call(|functions| &functions.mem_get_handle_for_range, get)?;
        // SAFETY: `fcntl` checks the descriptor. Programs that this process starts do not get it.
        let set = unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) };
        if set == -1 {
            return Err(driver.call_error(FUNCTION, OPERATING_SYSTEM).into());
        }
        // SAFETY: a new descriptor that the driver gave to its caller.
        let descriptor = unsafe { OwnedFd::from_raw_fd(number) };
        Ok(DmaBuf { descriptor, offset: address - start, bytes, address })
    })
}
