//! The error of a node.

use std::path::PathBuf;

use cascade_store::StoreError;
use thiserror::Error;

use crate::cluster::JoinError;
use crate::gpu::GpuError;
use crate::http::HttpError;
use crate::resize::ResizeError;
use crate::socket_place::SocketPlaceError;
use crate::telemetry::TelemetryError;
use crate::tenants::TenantError;

/// Why a node could not start or continue, by what the operator can do.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum NodeError {
    /// The tenants cannot be served.
    #[error(transparent)]
    Tenant(#[from] TenantError),
    /// A tenant's store could not be closed cleanly.
    #[error("cannot close the store of tenant {tenant:?}")]
    Store {
        /// The tenant.
        tenant: String,
        /// Why.
        #[source]
        source: StoreError,
    },
    /// The node cannot take part in its cluster.
    #[error(transparent)]
    Join(#[from] JoinError),
    /// A resource of the process could not be created or used.
    #[error("cannot {operation}")]
    Server {
        /// What failed.
        operation: &'static str,
        /// The error of the operating system.
        #[source]
        source: std::io::Error,
    },
    /// The node must not listen at the configured path.
    #[error("cannot listen at {}", path.display())]
    Place {
        /// The socket's path.
        path: PathBuf,
        /// Why not.
        #[source]
        source: SocketPlaceError,
    },
    /// The Unix socket cannot be created.
    #[error("cannot {operation} at {}", path.display())]
    Socket {
        /// The socket's path.
        path: PathBuf,
        /// What failed.
        operation: &'static str,
        /// The error of the operating system.
        #[source]
        source: std::io::Error,
    },
    /// The TCP port cannot be served.
    #[error(transparent)]
    Http(#[from] HttpError),
    /// The GPU was lost.
    #[error(transparent)]
    Gpu(GpuError),
    /// A capacity could not be changed.
    #[error(transparent)]
    Resize(#[from] ResizeError),
    /// Logs or traces cannot be written.
    #[error(transparent)]
    Telemetry(#[from] TelemetryError),
    /// The node stopped before every block was written.
    #[error("the node stopped, but {unfinished}")]
    Unfinished {
        /// What was not finished.
        unfinished: String,
    },
}
