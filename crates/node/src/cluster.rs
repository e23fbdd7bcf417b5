//! This node's part in a cluster: its blocks for other nodes, and theirs as a source.

use std::fs;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Duration;

use cascade_block::BlockKey;
use cascade_cluster::{
    Cluster, ClusterConfig, ClusterError, Contents, Host, HostsError, LocalBlocks, parse_hosts,
};
use cascade_memory::Slab;
use cascade_store::{CallOptions, SecretError, SecretReaders, SourceList, read_secret};
use cascade_transport::TlsConfig;
use thiserror::Error;

use crate::NodeConfig;
use crate::config::ClusterSettings;
use crate::status::{ClusterStatus, PeerStatus};
use crate::tenants::Tenant;

/// Size limit of a list of hosts and of a token.
const FILE_BYTES_MAX: u64 = 64 << 10;

/// Why a node cannot take part in a cluster.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum JoinError {
    /// The list of hosts cannot be read.
    #[error("cannot read {}, the list of hosts of cluster", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// The list of hosts is wrong.
    #[error("{}: {source}", path.display())]
    Hosts {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: HostsError,
    },
    /// The token cannot be used.
    #[error("cannot use peer_token_file")]
    Token(#[source] SecretError),
    /// The node has no address.
    #[error("cannot find the address {address:?} of this node; set peer_listen")]
    Address {
        /// What was looked up.
        address: String,
        /// Why it was not found.
        #[source]
        source: io::Error,
    },
    /// The cluster refused it.
    #[error("cannot take part in the cluster: {0}")]
    Cluster(#[from] ClusterError),
}

/// This node's part in a cluster.
#[derive(Debug)]
pub(crate) struct NodeCluster {
    name: String,
    cluster: Cluster,
}

impl NodeCluster {
    /// Reads the list, and begins to connect to the other nodes.
    pub(crate) fn start(settings: &ClusterSettings) -> Result<Self, JoinError> {
        let path = &settings.hosts_file;
        let hosts = read_hosts(path)?;
        let name = settings.node_name.clone().unwrap_or_else(host_name);
        let own = hosts.iter().find(|host| host.name == name);
        let listen = match (settings.listen, own) {
            (Some(listen), _) => listen,
            (None, Some(own)) => look_up(&own.address)?,
            // The cluster refuses a node that is not in the list.
            (None, None) => SocketAddr::from(([127, 0, 0, 1], 0)),
        };
        let config = ClusterConfig {
            name: name.clone(),
            hosts,
            listen,
            token: settings.token_file.as_deref().map(read_token).transpose()?,
            tls: tls_of(settings),
        };
        Ok(Self { name, cluster: Cluster::start(config)? })
    }

    /// The configuration of stores that ask the other nodes.
    pub(crate) fn with_sources(&self, config: &NodeConfig) -> NodeConfig {
        let mut config = config.clone();
        let stores = config.tenants.iter_mut().map(|tenant| &mut tenant.store);
        for store in stores.chain([&mut config.store]) {
            store.sources = SourceList::new(vec![self.cluster.source()]);
        }
        config
    }

    /// Answers the other nodes with the blocks of these tenants.
    pub(crate) fn serve(&self, tenants: &[Arc<Tenant>], epoch: u64) -> Result<(), JoinError> {
        let tenants = tenants.iter().map(Arc::downgrade).collect();
        let address = self.cluster.serve(Arc::new(TenantBlocks { tenants, epoch }))?;
        tracing::info!(node = self.name, %address, "answers the other nodes of the cluster");
        Ok(())
    }

    pub(crate) fn status(&self) -> ClusterStatus {
        let peer = |node: cascade_cluster::NodeStatus| PeerStatus {
            name: node.host.name,
            address: node.host.address,
            state: node.state.name().to_owned(),
            epoch: node.contents.map(|contents| contents.epoch),
            blocks: node.contents.map(|contents| contents.blocks),
            bytes: node.contents.map(|contents| contents.bytes),
            fetched_blocks: node.fetched_blocks,
            fetched_bytes: node.fetched_bytes,
            error: node.error,
        };
        let nodes = self.cluster.nodes().into_iter().map(peer).collect();
        ClusterStatus { node_name: self.name.clone(), nodes }
    }

    pub(crate) fn stop(&self) {
        self.cluster.stop();
    }
}

/// The blocks of all tenants. A key is of one tenant, whose secret is in it: nobody finds a block
/// of a tenant whose keys he cannot compute.
struct TenantBlocks {
    /// Not shared: the stores end with the node.
    tenants: Vec<Weak<Tenant>>,
    epoch: u64,
}

impl LocalBlocks for TenantBlocks {
    fn view(&self, keys: &[BlockKey], timeout: Duration) -> Vec<Option<Slab>> {
        let options = CallOptions { timeout: Some(timeout), ..CallOptions::default() };
        let mut found: Vec<Option<Slab>> = vec![None; keys.len()];
        for tenant in self.tenants.iter().filter_map(Weak::upgrade) {
            let missing: Vec<usize> = (0..keys.len()).filter(|at| found[*at].is_none()).collect();
            if missing.is_empty() {
                break;
            }
            let wanted: Vec<BlockKey> = missing.iter().map(|at| keys[*at]).collect();
            let views = tenant.store().own().in_memory(&wanted, options);
            for (at, view) in missing.into_iter().zip(views) {
                found[at] = view;
            }
        }
        found
    }

    fn contents(&self) -> Contents {
        let mut contents = Contents { epoch: self.epoch, blocks: 0, bytes: 0 };
        for tenant in self.tenants.iter().filter_map(Weak::upgrade) {
            let stats = tenant.store().stats();
            contents.blocks += stats.dram_blocks;
            contents.bytes += stats.dram_bytes;
        }
        contents
    }
}

fn read_hosts(path: &Path) -> Result<Vec<Host>, JoinError> {
    let failed = |source| JoinError::Read { path: path.to_owned(), source };
    let bytes = fs::metadata(path).map_err(failed)?.len();
    if bytes > FILE_BYTES_MAX {
        let reason = format!("it has {bytes} bytes; the limit is {FILE_BYTES_MAX}");
        return Err(failed(io::Error::other(reason)));
    }
    let text = fs::read_to_string(path).map_err(failed)?;
    parse_hosts(&text).map_err(|source| JoinError::Hosts { path: path.to_owned(), source })
}

fn read_token(path: &Path) -> Result<Vec<u8>, JoinError> {
    let read = read_secret(path, FILE_BYTES_MAX, SecretReaders::Group);
    Ok(read.map_err(JoinError::Token)?.trim_ascii().to_vec())
}

fn tls_of(settings: &ClusterSettings) -> Option<TlsConfig> {
    let (certificate, key) = (settings.certificate.clone()?, settings.private_key.clone()?);
    let authority = settings.authority.clone()?;
    Some(TlsConfig::mutual(certificate, key, authority))
}

fn look_up(address: &str) -> Result<SocketAddr, JoinError> {
    let failed = |source| JoinError::Address { address: address.to_owned(), source };
    let mut found = address.to_socket_addrs().map_err(failed)?;
    found.next().ok_or_else(|| failed(io::Error::from(io::ErrorKind::NotFound)))
}

fn host_name() -> String {
    // Without it, the error names an empty name.
    let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    name.trim().to_owned()
}
