//! The node in the memory of a GPU that a node in DRAM starts: what the configuration says of it.

use std::path::{Path, PathBuf};

use super::keys::KEYS;
use super::settings::Settings;

/// The keys that the node of the GPU has in common with the node that starts it.
const SHARED: &[&str] = &[
    "gpu",
    "hbm",
    "hbm_reserve",
    "policy",
    "socket_mode",
    "admin_group",
    "connections_max",
    "client_share",
    "threads_max",
    "log_format",
    "log_filter",
    "timeout",
    "shutdown_timeout",
];

/// A node in the memory of a GPU, which a node in DRAM starts in a process of its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuNodeConfig {
    /// The GPU's UUID.
    pub uuid: String,
    /// The socket of the node.
    pub socket: PathBuf,
}

impl GpuNodeConfig {
    /// The node that belongs to the node at `socket`: its socket has `.hbm` behind the name.
    pub(super) fn beside(socket: &Path, uuid: String) -> Self {
        let mut name = socket.as_os_str().to_owned();
        name.push(".hbm");
        Self { uuid, socket: name.into() }
    }
}

impl Settings {
    /// The variables that configure the node of the GPU, and those that it must not inherit.
    pub(crate) fn of_gpu_node(&self, node: &GpuNodeConfig) -> Vec<(String, Option<String>)> {
        let of_key = |path: &str| match path {
            "socket" => Some(node.socket.display().to_string()),
            _ if SHARED.contains(&path) => self.node.text(path),
            _ => None,
        };
        let mut variables: Vec<_> =
            KEYS.iter().map(|key| (key.environment(), of_key(key.path))).collect();
        // Its configuration is complete, and the service manager waits for the node that starts it.
        variables.extend(["CASCADE_CONFIG", "NOTIFY_SOCKET"].map(|name| (name.to_owned(), None)));
        variables
    }
}

/// What is behind `Hbm|` in a pipeline, if `Dram` is.
pub(super) fn pipeline_below_hbm(pipeline: &str) -> Option<&str> {
    let (first, rest) = pipeline.split_once('|')?;
    let second = rest.split('|').next().unwrap_or_default();
    let is = |stage: &str, name: &str| stage.trim().eq_ignore_ascii_case(name);
    (is(first, "hbm") && (is(second, "dram") || is(second, "cache"))).then_some(rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_pipeline_with_dram_below_hbm_has_a_node_for_each() {
        for (pipeline, below) in [
            ("Hbm|Dram", Some("Dram")),
            (" hbm | dram|Files", Some(" dram|Files")),
            ("Hbm|Cache|Posix", Some("Cache|Posix")),
            ("Hbm", None),
            ("Hbm|Files", None),
            ("Hbm|Files|Dram", None),
            ("Dram|Hbm", None),
            ("", None),
        ] {
            assert_eq!(pipeline_below_hbm(pipeline), below, "{pipeline:?}");
        }
    }

    #[test]
    fn the_node_of_the_gpu_inherits_no_other_key() {
        let node = GpuNodeConfig::beside(Path::new("/run/c.sock"), "GPU-1".to_owned());
        let variables = Settings::built_in().of_gpu_node(&node);
        let value = |name: &str| variables.iter().find(|(it, _)| it == name).unwrap().1.clone();
        assert_eq!(value("CASCADE_SOCKET").unwrap(), "/run/c.sock.hbm");
        assert_eq!(value("CASCADE_HBM_RESERVE").unwrap(), "512MiB");
        for name in ["CASCADE_DRAM", "CASCADE_FILES", "CASCADE_LISTEN", "NOTIFY_SOCKET"] {
            assert_eq!(value(name), None, "{name}");
        }
        for path in SHARED {
            assert!(KEYS.iter().any(|key| key.path == *path), "{path}");
        }
    }
}
