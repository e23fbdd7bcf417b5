//! Where the Unix socket of a node is, for nodes and clients. No I/O.

use std::ffi::OsString;
use std::path::PathBuf;

use cascade_runtime::user_directory;

/// The longest path of a Unix socket: `sun_path` without the terminating zero.
pub const SOCKET_PATH_BYTES_MAX: usize = 107;

/// Variable with the socket that a client uses: a path, or `unix:PATH`.
const NODE: &str = "CASCADE_NODE";
/// Variable with the socket of a node.
const SOCKET: &str = "CASCADE_SOCKET";

/// The default Unix socket of a user, for nodes and clients. `variable` looks up an environment
/// variable; an empty one counts as not set.
pub fn default_socket(variable: impl Fn(&str) -> Option<OsString>, user: u32) -> PathBuf {
    user_directory(variable, user).join("cascade.sock")
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
    fn the_default_socket_is_in_the_directory_of_its_user() {
        let login = only(&[("XDG_RUNTIME_DIR", "/run/user/1000")]);
        assert_eq!(default_socket(login, 1000), PathBuf::from("/run/user/1000/cascade.sock"));
        let home = only(&[("HOME", "/root")]);
        assert_eq!(default_socket(home, 1000), PathBuf::from("/tmp/cascade-1000/cascade.sock"));
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
