//! Where the Unix socket of a node is, for nodes and clients. No I/O.

use std::ffi::OsString;
use std::path::PathBuf;

/// The longest path of a Unix socket: `sun_path` without the terminating zero.
pub const SOCKET_PATH_BYTES_MAX: usize = 107;

/// Variable with the socket that a client uses: a path, or `unix:PATH`.
const NODE: &str = "CASCADE_NODE";
/// Variable with the socket of a node.
const SOCKET: &str = "CASCADE_SOCKET";
const RUNTIME_DIRECTORY: &str = "XDG_RUNTIME_DIR";

/// The default Unix socket of a user, for nodes and clients. `variable` looks up an environment
/// variable; an empty one counts as not set.
pub fn default_socket(variable: impl Fn(&str) -> Option<OsString>, user: u32) -> PathBuf {
    let runtime = path_in(&variable, RUNTIME_DIRECTORY);
    match runtime.filter(|directory| directory.is_absolute()) {
        Some(directory) => directory.join("cascade.sock"),
        None if user == 0 => PathBuf::from("/run/cascade/cascade.sock"),
        None => PathBuf::from(format!("/tmp/cascade-{user}/cascade.sock")),
    }
}

/// The socket that a client uses when its caller names none: `CASCADE_NODE`, else
/// `CASCADE_SOCKET`, which nodes read too, else [`default_socket`].
pub fn client_socket(variable: impl Fn(&str) -> Option<OsString>, user: u32) -> PathBuf {
    let node = path_in(&variable, NODE).map(|path| match path.to_str() {
        Some(text) => PathBuf::from(text.strip_prefix("unix:").unwrap_or(text)),
        None => path,
    });
    node.or_else(|| path_in(&variable, SOCKET)).unwrap_or_else(|| default_socket(variable, user))
}

fn path_in(variable: &impl Fn(&str) -> Option<OsString>, name: &str) -> Option<PathBuf> {
    variable(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An environment with these variables only.
    fn only(variables: &[(&str, &str)]) -> impl Fn(&str) -> Option<OsString> {
        |name| variables.iter().find(|(it, _)| *it == name).map(|(_, value)| value.into())
    }

    #[test]
    fn the_default_socket_is_in_a_directory_of_its_user() {
        let socket = |user| default_socket(only(&[("HOME", "/root")]), user);
        assert_eq!(socket(0), PathBuf::from("/run/cascade/cascade.sock"));
        assert_eq!(socket(1000), PathBuf::from("/tmp/cascade-1000/cascade.sock"));
        let login = default_socket(only(&[(RUNTIME_DIRECTORY, "/run/user/1000")]), 1000);
        assert_eq!(login, PathBuf::from("/run/user/1000/cascade.sock"));
        let relative = default_socket(only(&[(RUNTIME_DIRECTORY, "run")]), 1000);
        assert_eq!(relative, PathBuf::from("/tmp/cascade-1000/cascade.sock"));
    }

    #[test]
    fn a_client_uses_the_socket_that_is_set_or_else_the_default() {
        let socket = |variables| client_socket(only(variables), 0);
        assert_eq!(socket(&[]), PathBuf::from("/run/cascade/cascade.sock"));
        assert_eq!(socket(&[(SOCKET, "/a")]), PathBuf::from("/a"));
        assert_eq!(socket(&[(NODE, "/b"), (SOCKET, "/a")]), PathBuf::from("/b"));
        assert_eq!(socket(&[(NODE, "unix:/b")]), PathBuf::from("/b"));
        assert_eq!(socket(&[(NODE, "")]), PathBuf::from("/run/cascade/cascade.sock"));
    }
}
