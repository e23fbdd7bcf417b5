//! Functions that this fake has without doing anything: they answer `CUDA_ERROR_NOT_SUPPORTED`.
#![expect(unsafe_code, reason = "exports functions with C's interface")]

use std::ffi::{c_uint, c_void};

use crate::state::NOT_SUPPORTED;
use crate::world::{Needs, Status, World};

/// `CUipcEventHandle`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct EventHandle([u8; 64]);

macro_rules! unsupported {
    ($($name:literal $function:ident($($argument:ty),*);)*) => {
        $(
            #[unsafe(export_name = $name)]
            pub(crate) unsafe extern "C" fn $function($(_: $argument),*) -> Status {
                World::call($name, Needs::Start, |_, _| Err(NOT_SUPPORTED))
            }
        )*
    };
}

unsupported! {
    "cuPointerGetAttributes"
        pointer_get_attributes(c_uint, *mut c_uint, *mut *mut c_void, u64);
    "cuMemcpyPeerAsync"
        memcpy_peer(u64, *mut c_void, u64, *mut c_void, usize, *mut c_void);
    "cuMemcpy2DAsync_v2" memcpy_rows(*const c_void, *mut c_void);
    "cuCtxEnablePeerAccess" enable_peer_access(*mut c_void, c_uint);
    "cuIpcGetEventHandle" ipc_get_event_handle(*mut EventHandle, *mut c_void);
    "cuIpcOpenEventHandle" ipc_open_event_handle(*mut *mut c_void, EventHandle);
}
