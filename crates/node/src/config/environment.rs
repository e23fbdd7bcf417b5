//! What the process's environment says: the one place that reads it.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

use super::error::ConfigError;
use super::keys::{KEYS, SECTIONS, nearest};
use super::room::Room;
use super::settings::{Settings, Source};

/// Variables beside those of keys that mean something to a node.
const CONFIG: &str = "CASCADE_CONFIG";
const RUNTIME_DIRECTORY: &str = "XDG_RUNTIME_DIR";
const NOTIFY_SOCKET: &str = "NOTIFY_SOCKET";

/// The variables that concern a node, and who runs it.
#[derive(Debug, Clone)]
pub struct Environment {
    variables: BTreeMap<String, OsString>,
    /// Number of the user who runs the process.
    pub user: u32,
    /// Where users' names are looked up.
    pub passwd: PathBuf,
    /// Where groups' names are looked up.
    pub groups: PathBuf,
    /// What tells the room that a file system has for a directory.
    pub room_of: fn(&Path) -> io::Result<Room>,
}

impl Environment {
    /// This process's.
    pub fn of_process() -> Self {
        Self::new(std::env::vars_os(), rustix::process::geteuid().as_raw())
    }

    /// One of these variables alone, for a user.
    pub fn new(
        variables: impl IntoIterator<Item = (impl Into<OsString>, impl Into<OsString>)>,
        user: u32,
    ) -> Self {
        let concerns = |name: &String| {
            name.starts_with("CASCADE_") || [RUNTIME_DIRECTORY, NOTIFY_SOCKET].contains(&&**name)
        };
        let named = variables.into_iter().filter_map(|(name, value)| {
            let name = name.into().into_string().ok().filter(concerns)?;
            Some((name, value.into())).filter(|(_, value)| !value.is_empty())
        });
        Self {
            variables: named.collect(),
            user,
            passwd: "/etc/passwd".into(),
            groups: "/etc/group".into(),
            room_of: Room::of,
        }
    }

    /// The configuration file that `CASCADE_CONFIG` names.
    pub fn config_file(&self) -> Option<PathBuf> {
        self.variables.get(CONFIG).map(PathBuf::from)
    }

    /// Where a supervisor such as systemd wants to hear of the node's state.
    pub fn notify_socket(&self) -> Option<OsString> {
        self.variables.get(NOTIFY_SOCKET).cloned()
    }

    /// Where a node listens, and a client looks for it, when nobody says.
    pub fn default_socket(&self) -> PathBuf {
        let runtime = self.variables.get(RUNTIME_DIRECTORY).map(PathBuf::from);
        match runtime.filter(|directory| directory.is_absolute()) {
            Some(directory) => directory.join("cascade.sock"),
            None if self.user == 0 => PathBuf::from("/run/cascade/cascade.sock"),
            None => PathBuf::from(format!("/tmp/cascade-{}/cascade.sock", self.user)),
        }
    }

    /// The socket of `CASCADE_NODE_SOCKET`, else the default one: for commands that talk to a node.
    pub fn socket(&self) -> PathBuf {
        let given = self.variables.get("CASCADE_NODE_SOCKET").map(PathBuf::from);
        given.unwrap_or_else(|| self.default_socket())
    }

    pub(super) fn apply(&self, settings: &mut Settings) -> Result<(), ConfigError> {
        for (name, value) in self.variables.iter().filter(|(name, _)| is_of_a_key(name)) {
            let place = Source::Environment(name.clone());
            let Some(key) = KEYS.iter().find(|key| key.environment() == *name) else {
                let names: Vec<String> = KEYS.iter().map(super::Key::environment).collect();
                let nearest = nearest(name, names.iter().map(String::as_str)).map(str::to_owned);
                return Err(ConfigError::Unknown {
                    what: "key",
                    name: name.clone(),
                    nearest,
                    place,
                });
            };
            let wrong = |reason| {
                let place = place.clone();
                ConfigError::Value { key: key.path.to_owned(), reason, place }
            };
            let text = value.to_str().ok_or_else(|| wrong("is not UTF-8".to_owned()))?;
            let value = key.parse(text).map_err(wrong)?;
            settings.node.set(key, value, place);
        }
        Ok(())
    }
}

/// Whether a variable is meant for the node's configuration. Clients and tools have others, and
/// Kubernetes makes some of its own for a service with this name.
fn is_of_a_key(name: &str) -> bool {
    let is_of_kubernetes =
        name.contains("_SERVICE_") || name.contains("_PORT_") || name.ends_with("_PORT");
    let tail = name.strip_prefix("CASCADE_").unwrap_or_default();
    let mut sections = SECTIONS.iter().map(|(section, _)| section.to_uppercase());
    !is_of_kubernetes
        && sections.any(|section| {
            tail.strip_prefix(section.as_str()).is_some_and(|name| name.starts_with('_'))
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_socket_is_where_only_its_user_may_write() {
        let none = [("HOME", "/root")];
        let socket = |user| Environment::new(none, user).default_socket();
        assert_eq!(socket(0), PathBuf::from("/run/cascade/cascade.sock"));
        assert_eq!(socket(1000), PathBuf::from("/tmp/cascade-1000/cascade.sock"));
        let login = Environment::new([("XDG_RUNTIME_DIR", "/run/user/1000")], 1000);
        assert_eq!(login.default_socket(), PathBuf::from("/run/user/1000/cascade.sock"));
        let odd = Environment::new([("XDG_RUNTIME_DIR", "run")], 1000);
        assert_eq!(odd.default_socket(), PathBuf::from("/tmp/cascade-1000/cascade.sock"));
    }

    #[test]
    fn variables_of_others_are_left_alone() {
        for name in [
            "CASCADE_NODE_SERVICE_HOST",
            "CASCADE_NODE_PORT",
            "CASCADE_NODE_PORT_9000_TCP_ADDR",
            "CASCADE_KILL_ROUNDS",
            "CASCADE_TOKEN",
        ] {
            assert!(!is_of_a_key(name), "{name}");
        }
        assert!(is_of_a_key("CASCADE_DRAM_CAPACTIY"));
    }
}
