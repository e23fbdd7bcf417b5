//! The settings of a node that takes part in a cluster.

use std::net::SocketAddr;
use std::path::PathBuf;

use super::NodeConfig;
use super::error::ConfigError;
use super::settings::Values;

/// What comes before the path of a list of hosts.
const HOSTS: &str = "hosts:";

/// How a node takes part in a cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterSettings {
    /// The file with the list of hosts.
    pub hosts_file: PathBuf,
    /// The name of this node in the list. Default: the name of the host.
    pub node_name: Option<String>,
    /// Where this node answers the others. Default: its address in the list.
    pub listen: Option<SocketAddr>,
    /// File with the token that all nodes know.
    pub token_file: Option<PathBuf>,
    /// The node's certificate chain, PEM.
    pub certificate: Option<PathBuf>,
    /// The certificate's private key, PEM.
    pub private_key: Option<PathBuf>,
    /// The CA certificate that signs those of all nodes, PEM.
    pub authority: Option<PathBuf>,
}

impl ClusterSettings {
    /// The keys that mean nothing without `cluster`.
    const KEYS: [&str; 6] = [
        "node_name",
        "peer_listen",
        "peer_token_file",
        "peer_tls_certificate",
        "peer_tls_private_key",
        "peer_tls_ca",
    ];

    pub(super) fn of(values: &Values) -> Result<Option<Self>, ConfigError> {
        let Some(text) = values.text("cluster") else { return Ok(None) };
        let Some(path) = text.strip_prefix(HOSTS).filter(|path| !path.is_empty()) else {
            return Err(ConfigError::Value {
                key: "cluster".to_owned(),
                reason: format!("{text:?} is no list of hosts; use hosts:FILE"),
                place: values.source("cluster"),
            });
        };
        Ok(Some(Self {
            hosts_file: PathBuf::from(path),
            node_name: values.text("node_name"),
            listen: values.address("peer_listen"),
            token_file: values.path("peer_token_file"),
            certificate: values.path("peer_tls_certificate"),
            private_key: values.path("peer_tls_private_key"),
            authority: values.path("peer_tls_ca"),
        }))
    }

    /// Refuses settings without an effect, and an incomplete set of TLS files.
    pub(super) fn check(config: &NodeConfig) -> Result<(), ConfigError> {
        let refuse = |keys: &str, reason: &str, advice: &str| {
            Err(ConfigError::contradiction(keys, reason, advice))
        };
        let Some(cluster) = &config.cluster else {
            let given = Self::KEYS.into_iter().find(|key| config.settings.node.is_given(key));
            return given.map_or(Ok(()), |key| {
                refuse(
                    &config.with_sources(&[key]),
                    "it has no effect without a cluster",
                    "set cluster, or remove it",
                )
            });
        };
        if config.gpu.is_some() || config.gpu_node.is_some() {
            let keys = "cluster, gpu";
            return refuse(keys, "blocks in GPU memory are not given to other nodes", {
                "remove one of them"
            });
        }
        let files = [&cluster.certificate, &cluster.private_key, &cluster.authority];
        let count = files.iter().filter(|file| file.is_some()).count();
        if count != 0 && count != files.len() {
            return refuse(
                "peer_tls_certificate, peer_tls_private_key, peer_tls_ca",
                "some of them are not set",
                "TLS between nodes is mutual and needs all three: set all or none",
            );
        }
        Ok(())
    }
}
