//! The functions of libibverbs that are used here.
#![expect(unsafe_code, reason = "turns addresses into functions, by a macro")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::mem::transmute;
use std::ptr::NonNull;

use super::abi::{
    Channel, CompletionQueue, Context, DeviceState, MemoryRegion, Opaque, PortState, QueuePair,
    QueuePairInit, QueuePairState,
};
use super::error::Unavailable;
use super::library::{LIBRARY, Library};

macro_rules! functions {
    (needed { $($field:ident: $name:literal, ($($argument:ty),*) -> $result:ty;)* }
     optional { $($more:ident: $other:literal, ($($extra:ty),*) -> $answer:ty;)* }) => {
        /// What was found in the library.
        #[derive(Debug)]
        pub(super) struct Functions {
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) -> $result,)*
            $(pub(super) $more: Option<unsafe extern "C" fn($($extra),*) -> $answer>,)*
        }

        impl Functions {
            /// Asks `find` for each function; returns the name of the first missing one.
            fn find(
                find: impl Fn(&CStr) -> Option<NonNull<c_void>>,
            ) -> Result<Self, &'static CStr> {
                Ok(Self {
                    $($field: {
                        let address = find($name).ok_or($name)?;
                        // SAFETY: a function of libibverbs with this name has these arguments:
                        // they were copied from `verbs.h`.
                        unsafe {
                            transmute::<
                                NonNull<c_void>,
                                unsafe extern "C" fn($($argument),*) -> $result,
                            >(address)
                        }
                    },)*
                    $($more: find($other).map(|address| {
                        // SAFETY: as above.
                        unsafe {
                            transmute::<
                                NonNull<c_void>,
                                unsafe extern "C" fn($($extra),*) -> $answer,
                            >(address)
                        }
                    }),)*
                })
            }
        }
    };
}

functions! {
needed {
    get_device_list: c"ibv_get_device_list", (*mut c_int) -> *mut *mut Opaque;
    free_device_list: c"ibv_free_device_list", (*mut *mut Opaque) -> ();
    get_device_name: c"ibv_get_device_name", (*mut Opaque) -> *const c_char;
    open_device: c"ibv_open_device", (*mut Opaque) -> *mut Context;
    close_device: c"ibv_close_device", (*mut Context) -> c_int;
    query_device: c"ibv_query_device", (*mut Context, *mut DeviceState) -> c_int;
    query_port: c"ibv_query_port", (*mut Context, u8, *mut PortState) -> c_int;
    alloc_pd: c"ibv_alloc_pd", (*mut Context) -> *mut Opaque;
    dealloc_pd: c"ibv_dealloc_pd", (*mut Opaque) -> c_int;
    reg_mr: c"ibv_reg_mr", (*mut Opaque, *mut c_void, usize, c_int) -> *mut MemoryRegion;
    dereg_mr: c"ibv_dereg_mr", (*mut MemoryRegion) -> c_int;
    create_comp_channel: c"ibv_create_comp_channel", (*mut Context) -> *mut Channel;
    destroy_comp_channel: c"ibv_destroy_comp_channel", (*mut Channel) -> c_int;
    create_cq: c"ibv_create_cq",
        (*mut Context, c_int, *mut c_void, *mut Channel, c_int) -> *mut CompletionQueue;
    destroy_cq: c"ibv_destroy_cq", (*mut CompletionQueue) -> c_int;
    get_cq_event: c"ibv_get_cq_event",
        (*mut Channel, *mut *mut CompletionQueue, *mut *mut c_void) -> c_int;
    ack_cq_events: c"ibv_ack_cq_events", (*mut CompletionQueue, c_uint) -> ();
    create_qp: c"ibv_create_qp", (*mut Opaque, *mut QueuePairInit) -> *mut QueuePair;
    modify_qp: c"ibv_modify_qp", (*mut QueuePair, *mut QueuePairState, c_int) -> c_int;
    destroy_qp: c"ibv_destroy_qp", (*mut QueuePair) -> c_int;
}
optional {
    reg_mr_iova2: c"ibv_reg_mr_iova2",
        (*mut Opaque, *mut c_void, usize, u64, c_uint) -> *mut MemoryRegion;
    reg_dmabuf_mr: c"ibv_reg_dmabuf_mr",
        (*mut Opaque, u64, usize, u64, c_int, c_int) -> *mut MemoryRegion;
}
}

/// The library, ready for use.
#[derive(Debug)]
pub struct Verbs {
    pub(super) functions: Functions,
}

impl Verbs {
    /// Opens libibverbs.
    ///
    /// # Errors
    /// If it is not installed, or too old.
    pub fn open() -> Result<Self, Unavailable> {
        Self::open_named(LIBRARY)
    }

    fn open_named(name: &CStr) -> Result<Self, Unavailable> {
        let text = |name: &CStr| name.to_string_lossy().into_owned();
        let library = Library::open(name)
            .map_err(|reason| Unavailable::NoLibrary { library: text(name), reason })?;
        let functions = Functions::find(|function| library.find(function)).map_err(|function| {
            Unavailable::MissingFunction { library: text(name), function: text(function) }
        })?;
        Ok(Self { functions })
    }

    /// Whether memory can be registered by a DMA-BUF descriptor.
    pub fn has_dmabuf(&self) -> bool {
        self.functions.reg_dmabuf_mr.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_says_what_to_install() {
        let error = Verbs::open_named(c"libibverbs-none.so.1").unwrap_err();
        let text = error.to_string();
        assert!(text.contains("libibverbs-none.so.1"), "{text}");
        assert!(text.contains("install"), "{text}");
    }

    #[test]
    fn a_library_without_verbs_is_refused_by_name() {
        let error = Verbs::open_named(c"libc.so.6").unwrap_err();
        let text = error.to_string();
        assert!(text.contains("libc.so.6 has no ibv_get_device_list"), "{text}");
    }
}
