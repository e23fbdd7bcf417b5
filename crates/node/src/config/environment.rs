//! What the process's environment says: the one place that reads it.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

use super::error::ConfigError;
use super::keys::{KEYS, edits, nearest};
use super::renamed::renamed_variable;
use super::room::Room;
use super::settings::{Settings, Source};

/// Variables beside those of keys that mean something to a node.
const CONFIG: &str = "CASCADE_CONFIG";
const NODE: &str = "CASCADE_NODE";
/// Variables that look like a key's and are none.
const OTHERS: [&str; 2] = [CONFIG, NODE];
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

    /// Where a client finds the node when nobody says: the socket that `CASCADE_NODE` names, as a
    /// path or `unix:PATH`, else `CASCADE_SOCKET`, which a node reads too, else the default one.
    pub fn socket(&self) -> PathBuf {
        let given = |name| self.variables.get(name).map(PathBuf::from);
        let node = given(NODE).map(|place| match place.to_str() {
            Some(text) => PathBuf::from(text.strip_prefix("unix:").unwrap_or(text)),
            None => place,
        });
        node.or_else(|| given("CASCADE_SOCKET")).unwrap_or_else(|| self.default_socket())
    }

    pub(super) fn apply(&self, settings: &mut Settings) -> Result<(), ConfigError> {
        for (name, value) in &self.variables {
            let Some(tail) = name.strip_prefix("CASCADE_") else { continue };
            let place = Source::Environment(name.clone());
            let Some(key) = KEYS.iter().find(|key| key.environment() == *name) else {
                refuse_unknown(tail, place)?;
                continue;
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

/// Refuses an old name, and one that is almost a key's. Clients and tools have variables of their
/// own, and Kubernetes makes some for a service with this name.
fn refuse_unknown(tail: &str, place: Source) -> Result<(), ConfigError> {
    let name = format!("CASCADE_{tail}");
    if OTHERS.contains(&&*name)
        || tail.contains("_SERVICE_")
        || tail.contains("_PORT_")
        || tail.ends_with("_PORT")
    {
        return Ok(());
    }
    if let Some(new) = renamed_variable(tail) {
        let new = format!("CASCADE_{}", new.to_uppercase());
        return Err(ConfigError::Renamed { old: name, new, advice: "", place });
    }
    let names: Vec<String> = KEYS.iter().map(|key| key.path.to_uppercase()).collect();
    let is_close = |found: &&str| edits(tail, found) <= 1 + found.len() / 6;
    match nearest(tail, names.iter().map(String::as_str)).filter(is_close) {
        Some(found) => {
            let nearest = Some(format!("CASCADE_{found}"));
            Err(ConfigError::Unknown { what: "key", name, nearest, place })
        }
        None => Ok(()),
    }
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
            "CASCADE_NODE",
            "CASCADE_CONFIG",
            "CASCADE_NODE_SERVICE_HOST",
            "CASCADE_NODE_PORT",
            "CASCADE_NODE_PORT_9000_TCP_ADDR",
            "CASCADE_KILL_ROUNDS",
            "CASCADE_TOKEN",
        ] {
            let tail = name.strip_prefix("CASCADE_").unwrap();
            refuse_unknown(tail, Source::Default).unwrap();
        }
        for (name, hint) in [
            ("CASCADE_FILES_CAPACTIY", "did you mean \"CASCADE_FILES_CAPACITY\""),
            ("CASCADE_DRAMM", "CASCADE_DRAM"),
            ("CASCADE_DRAM_CAPACITY", "is now called CASCADE_DRAM"),
            ("CASCADE_DIRTY_BYTES_MAX", "is now called CASCADE_DIRTY_MAX"),
        ] {
            let tail = name.strip_prefix("CASCADE_").unwrap();
            let said = refuse_unknown(tail, Source::Default).unwrap_err().to_string();
            assert!(said.contains(hint), "{name}: {said}");
        }
    }

    #[test]
    fn a_client_looks_where_it_is_told_and_else_where_the_node_is() {
        let socket = |variables: &[(&str, &str)]| {
            let variables = variables.iter().map(|(name, value)| (*name, *value));
            Environment::new(variables, 0).socket()
        };
        assert_eq!(socket(&[]), PathBuf::from("/run/cascade/cascade.sock"));
        assert_eq!(socket(&[("CASCADE_SOCKET", "/a")]), PathBuf::from("/a"));
        assert_eq!(
            socket(&[("CASCADE_NODE", "/b"), ("CASCADE_SOCKET", "/a")]),
            PathBuf::from("/b")
        );
        assert_eq!(socket(&[("CASCADE_NODE", "unix:/b")]), PathBuf::from("/b"));
        assert_eq!(socket(&[("CASCADE_NODE", "")]), PathBuf::from("/run/cascade/cascade.sock"));
    }
}
