//! Why a node cannot take part in a cluster.

use std::io;

use cascade_transport::TransportError;
use thiserror::Error;

/// Why a node cannot take part in a cluster.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ClusterError {
    /// The node is not in the list of hosts.
    #[error("no line of the list of hosts has the name {name:?}; add one, or set node_name")]
    NotListed {
        /// Its name.
        name: String,
    },
    /// The endpoint cannot be made, or cannot listen.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// A thread cannot be started.
    #[error("cannot start a thread of the cluster")]
    Thread(#[source] io::Error),
}
