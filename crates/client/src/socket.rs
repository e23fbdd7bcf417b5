//! The socket that a client in this process uses: reads the environment variables for it.

use std::ffi::OsString;
use std::path::PathBuf;

/// The socket that a client uses when its caller names none: `CASCADE_NODE`, else
/// `CASCADE_SOCKET`, else [`default_socket`].
pub fn socket_of_process() -> PathBuf {
    cascade_wire::client_socket(variable, user())
}

/// The default socket of this process's user.
pub fn default_socket() -> PathBuf {
    cascade_wire::default_socket(variable, user())
}

#[expect(clippy::disallowed_methods, reason = "a worker has no configuration of a node")]
fn variable(name: &str) -> Option<OsString> {
    std::env::var_os(name)
}

fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}
