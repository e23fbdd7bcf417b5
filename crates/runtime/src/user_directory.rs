//! Where the processes of a user find each other. No I/O.

use std::ffi::OsString;
use std::path::PathBuf;

const RUNTIME_DIRECTORY: &str = "XDG_RUNTIME_DIR";

/// The directory of a user's sockets and tokens. `variable` looks up an environment variable; an
/// empty one, or a relative path, counts as not set.
pub fn user_directory(variable: impl Fn(&str) -> Option<OsString>, user: u32) -> PathBuf {
    let runtime = variable(RUNTIME_DIRECTORY).map(PathBuf::from);
    match runtime.filter(|directory| directory.is_absolute()) {
        Some(directory) => directory,
        None if user == 0 => PathBuf::from("/run/cascade"),
        None => PathBuf::from(format!("/tmp/cascade-{user}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_has_a_directory_of_its_own() {
        let of = |value: &str, user| {
            user_directory(|name| (name == RUNTIME_DIRECTORY).then(|| value.into()), user)
        };
        assert_eq!(user_directory(|_| None, 0), PathBuf::from("/run/cascade"));
        assert_eq!(user_directory(|_| None, 1000), PathBuf::from("/tmp/cascade-1000"));
        assert_eq!(of("/run/user/1000", 1000), PathBuf::from("/run/user/1000"));
        assert_eq!(of("run", 1000), PathBuf::from("/tmp/cascade-1000"));
        assert_eq!(of("", 0), PathBuf::from("/run/cascade"));
    }
}
