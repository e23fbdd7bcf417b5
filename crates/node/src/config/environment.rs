//! The environment of a node and of the command. `cascade_client` reads a client's own variables.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

use strsim::osa_distance;

use super::default_capacity::AvailableSpace;
use super::error::ConfigError;
use super::keys::{KEYS, nearest_name};
use super::settings::{SettingSource, Settings};

const CONFIG: &str = "CASCADE_CONFIG";
const NODE: &str = "CASCADE_NODE";
/// Known variables that set no key.
const OTHERS: [&str; 3] = [CONFIG, NODE, cascade_device::LIBRARY_VARIABLE];
const RUNTIME_DIRECTORY: &str = "XDG_RUNTIME_DIR";
const NOTIFY_SOCKET: &str = "NOTIFY_SOCKET";

/// The variables that a node reads, and the user and host files that settings depend on.
#[derive(Debug, Clone)]
pub struct Environment {
    variables: BTreeMap<String, OsString>,
    /// Effective UID of the process.
    pub user: u32,
    /// File in which user names are looked up.
    pub passwd: PathBuf,
    /// File in which group names are looked up.
    pub groups: PathBuf,
    /// Measures the space that a file system has for a directory.
    pub available_space: fn(&Path) -> io::Result<AvailableSpace>,
}

impl Environment {
    /// The environment of this process.
    pub fn of_process() -> Self {
        Self::new(std::env::vars_os(), rustix::process::geteuid().as_raw())
    }

    /// An environment of these variables only, for a user. An empty variable counts as not set.
    pub fn new(
        variables: impl IntoIterator<Item = (impl Into<OsString>, impl Into<OsString>)>,
        user: u32,
    ) -> Self {
        let is_relevant = |name: &String| {
            name.starts_with("CASCADE_") || [RUNTIME_DIRECTORY, NOTIFY_SOCKET].contains(&&**name)
        };
        let relevant = variables.into_iter().filter_map(|(name, value)| {
            let name = name.into().into_string().ok().filter(is_relevant)?;
            Some((name, value.into())).filter(|(_, value)| !value.is_empty())
        });
        Self {
            variables: relevant.collect(),
            user,
            passwd: "/etc/passwd".into(),
            groups: "/etc/group".into(),
            available_space: AvailableSpace::of,
        }
    }

    /// The configuration file that `CASCADE_CONFIG` names.
    pub fn config_file(&self) -> Option<PathBuf> {
        self.variables.get(CONFIG).map(PathBuf::from)
    }

    /// The socket on which a service manager such as systemd expects state notifications.
    pub fn notify_socket(&self) -> Option<OsString> {
        self.variables.get(NOTIFY_SOCKET).cloned()
    }

    /// The default Unix socket of a node.
    pub fn default_socket(&self) -> PathBuf {
        cascade_wire::default_socket(|name| self.variables.get(name).cloned(), self.user)
    }

    /// The socket that a client in this environment uses when its caller names none.
    pub fn socket(&self) -> PathBuf {
        cascade_wire::client_socket(|name| self.variables.get(name).cloned(), self.user)
    }

    pub(super) fn apply(&self, settings: &mut Settings) -> Result<(), ConfigError> {
        for (name, value) in &self.variables {
            let Some(tail) = name.strip_prefix("CASCADE_") else { continue };
            let place = SettingSource::Environment(name.clone());
            let Some(key) = KEYS.iter().find(|key| key.environment() == *name) else {
                check_unknown(tail, place)?;
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

/// Refuses the variable `CASCADE_tail` if it is close to the variable of a key.
///
/// Other unknown names are accepted: clients and tools have their own variables, and Kubernetes
/// sets some for a service that is named `cascade`.
fn check_unknown(tail: &str, place: SettingSource) -> Result<(), ConfigError> {
    let name = format!("CASCADE_{tail}");
    if OTHERS.contains(&&*name)
        || tail.contains("_SERVICE_")
        || tail.contains("_PORT_")
        || tail.ends_with("_PORT")
    {
        return Ok(());
    }
    let names: Vec<String> = KEYS.iter().map(|key| key.path.to_uppercase()).collect();
    // One typing error, such as two letters that changed places, and one more for each six letters.
    let is_close = |found: &&str| osa_distance(tail, found) <= 1 + found.len() / 6;
    match nearest_name(tail, names.iter().map(String::as_str)).filter(is_close) {
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
    fn only_misspelled_variables_are_refused() {
        for name in [
            "CASCADE_NODE",
            "CASCADE_CONFIG",
            "CASCADE_CUDA_LIBRARY",
            "CASCADE_NODE_SERVICE_HOST",
            "CASCADE_NODE_PORT",
            "CASCADE_NODE_PORT_9000_TCP_ADDR",
            "CASCADE_KILL_ROUNDS",
            "CASCADE_TOKEN",
        ] {
            let tail = name.strip_prefix("CASCADE_").unwrap();
            check_unknown(tail, SettingSource::Default).unwrap();
        }
        for (name, hint) in [
            ("CASCADE_FILES_CAPACTIY", "did you mean \"CASCADE_FILES_CAPACITY\""),
            ("CASCADE_DRAMM", "CASCADE_DRAM"),
            ("CASCADE_DRMA", "CASCADE_DRAM"),
        ] {
            let tail = name.strip_prefix("CASCADE_").unwrap();
            let message = check_unknown(tail, SettingSource::Default).unwrap_err().to_string();
            assert!(message.contains(hint), "{name}: {message}");
        }
    }

    #[test]
    fn an_empty_variable_counts_as_not_set() {
        let empty = Environment::new([("CASCADE_NODE", ""), ("CASCADE_SOCKET", "/a")], 0);
        assert_eq!(empty.socket(), PathBuf::from("/a"));
    }
}
