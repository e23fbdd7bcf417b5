//! The shared library of the driver, opened at run time.
#![expect(unsafe_code, reason = "loads a library and finds functions in it")]

use std::ffi::{CStr, CString, OsString, c_void};
use std::os::unix::ffi::OsStringExt as _;
use std::ptr::NonNull;

/// The variable that names another library of the driver, such as the fake one.
pub const LIBRARY_VARIABLE: &str = "CASCADE_CUDA_LIBRARY";

/// The library that every installation of the driver has.
pub const LIBRARY: &str = "libcuda.so.1";

/// The library that [`LIBRARY_VARIABLE`] names. An empty variable counts as not set.
#[expect(clippy::disallowed_methods, reason = "a worker has no configuration of a node")]
pub fn named_library() -> Option<OsString> {
    std::env::var_os(LIBRARY_VARIABLE).filter(|name| !name.is_empty())
}

/// The library that this process is to use.
pub(crate) fn library_name() -> OsString {
    named_library().unwrap_or_else(|| LIBRARY.into())
}

/// An open library. Never closed: the driver has threads that would run on without their code.
#[derive(Debug)]
pub(crate) struct Library(NonNull<c_void>);

// SAFETY: the handle is a number to the loader, which any thread may use.
unsafe impl Send for Library {}
// SAFETY: `dlsym` may be called by several threads at once.
unsafe impl Sync for Library {}

impl Library {
    /// Opens a library, or returns the loader's reason.
    pub(crate) fn open(name: OsString) -> Result<Self, String> {
        let name = CString::new(name.into_vec()).map_err(|error| error.to_string())?;
        // SAFETY: the name ends with a zero. The constructors of the library run: the user chose
        // it, as with every library of the system.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        NonNull::new(handle).map(Self).ok_or_else(last_error)
    }

    /// The address of a function.
    pub(crate) fn find(&self, name: &CStr) -> Option<NonNull<c_void>> {
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
