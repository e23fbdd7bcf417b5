//! The library libibverbs, opened at run time.
#![expect(unsafe_code, reason = "loads a library and finds functions in it")]

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

/// The library that rdma-core installs.
pub(super) const LIBRARY: &CStr = c"libibverbs.so.1";

/// An open library. Never closed: its providers register code that runs at the end of the process.
#[derive(Debug)]
pub(super) struct Library(NonNull<c_void>);

impl Library {
    /// Opens a library, or returns the loader's reason.
    pub(super) fn open(name: &CStr) -> Result<Self, String> {
        // SAFETY: the name ends with a zero. The constructors of the library run: it belongs to
        // the system, or to the directories that the user told the loader to search.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        NonNull::new(handle).map(Self).ok_or_else(last_error)
    }

    /// The address of a function.
    pub(super) fn find(&self, name: &CStr) -> Option<NonNull<c_void>> {
        // SAFETY: the library stays open, and the name ends with a zero.
        NonNull::new(unsafe { libc::dlsym(self.0.as_ptr(), name.as_ptr()) })
    }
}

fn last_error() -> String {
    // SAFETY: returns the error of this thread, or null.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "the loader gave no reason".to_owned();
    }
    // SAFETY: a string of the loader that lives until its next call in this thread.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_string_lossy().into_owned()
}
