//! The error of the HTTP server.

use std::net::SocketAddr;
use std::path::PathBuf;

use cascade_store::SecretError;
use thiserror::Error;

use crate::config::ConfigError;

/// An error of the HTTP server. Each variant names what the operator can change.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum HttpError {
    /// Listening on the address failed.
    #[error("cannot listen on {address}; check that it is an address of this host and not in use")]
    Bind {
        /// The address.
        address: SocketAddr,
        /// The error of the kernel.
        #[source]
        source: std::io::Error,
    },
    /// The security settings contradict each other, or the port needs authentication.
    #[error(transparent)]
    Settings(#[from] ConfigError),
    /// A file with a secret cannot be read, or others can read it.
    #[error("{setting}: {source}")]
    Secret {
        /// The setting.
        setting: &'static str,
        /// What is wrong, and what to do.
        source: SecretError,
    },
    /// A file that a setting names is not valid.
    #[error("{setting}: {path:?} {reason}")]
    File {
        /// The setting.
        setting: &'static str,
        /// The file.
        path: PathBuf,
        /// What is wrong, and what to do.
        reason: &'static str,
        /// The cause, if there is one.
        #[source]
        source: Option<Box<dyn std::error::Error + Send + Sync>>,
    },
    /// A thread could not be started.
    #[error("cannot start the thread of the HTTP server")]
    Thread(#[source] std::io::Error),
}
