//! A CUDA driver over host memory, for tests where there is no GPU. It never stands for a speed.
//!
//! A shared library with the functions of `libcuda.so.1` that `cascade-device` knows; select it by
//! `CASCADE_CUDA_LIBRARY`. Streams are threads. Addresses of its memory are mapped without access,
//! so that an instruction that follows one ends the process, as it would be wrong on a GPU. It is
//! stricter than a GPU: it refuses copies of host memory that is not registered, and copies over a
//! border between two registrations; memory that is freed under a copy kills the context. Kernels
//! are known by name and written in Rust. They access host memory by other addresses than copies.
//!
//! Variables, read when the first function is called; lists are separated by commas:
//!
//! - `FAKE_CUDA_VERSION`: version of the driver; 13000.
//! - `FAKE_CUDA_DEVICES`: number of devices; 1.
//! - `FAKE_CUDA_BYTES`: memory of a device; 1 GiB.
//! - `FAKE_CUDA_ATTRIBUTE`: `NUMBER=VALUE` of all devices.
//! - `FAKE_CUDA_ABSENT`: functions that `cuGetProcAddress_v2` does not find.
//! - `FAKE_CUDA_FAIL`: `NAME=CODE`: each call fails; `NAME=CODE@N`: the Nth call fails; `*` as
//!   name: of all calls. A release that fails has released.
//! - `FAKE_CUDA_DELAY_US`: `NAME=TIME`: a pause in the middle of each copy that it starts; for
//!   `cuMemHostRegister_v2`, before it registers.
//! - `FAKE_CUDA_HOLD`: work that was started by these functions waits until `fakeCudaRelease`.
//! - `FAKE_CUDA_DIE_AT_COPY`: the Nth copy kills the context.
//! - `FAKE_CUDA_SEED`: order of the copies of a batch, and of the fragments of a kernel.
//! - `FAKE_CUDA_REPORT`: file that gets the counts of live objects when the process ends.
//!
//! Names are the exported ones, such as `cuMemAlloc_v2`. Three functions of its own are for tests
//! that load it: `fakeCudaHold`, `fakeCudaRelease` and `fakeCudaCount`.

mod addresses;
mod device_memory;
mod exports;
mod kernels;
mod settings;
mod shared_memory;
mod state;
mod streams;
mod wake;
mod world;
