//! The node: its tenants' stores and what it knows of its clients, behind every socket it serves.

use std::sync::Arc;
use std::time::Instant;

use cascade_store::{Store, StoreError};
use thiserror::Error;

use crate::NodeConfig;
use crate::status::Status;

/// Why a node could not start or go on, by what the operator can do.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum NodeError {
    /// This build has no server.
    #[error("this build cannot serve")]
    NotBuilt,
    /// A tenant's store could not be opened.
    #[error("cannot open the store of tenant {tenant:?}")]
    Store {
        /// The tenant.
        tenant: String,
        /// Why.
        #[source]
        source: StoreError,
    },
}

/// One node. Clones are handles on it.
#[derive(Debug, Clone)]
pub struct Node(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    config: NodeConfig,
    store: Store,
    started: Instant,
}

impl Node {
    /// Opens the stores. Serves nothing yet.
    pub fn open(config: NodeConfig) -> Result<Self, NodeError> {
        let store = Store::open(config.store.clone())
            .map_err(|source| NodeError::Store { tenant: "default".to_owned(), source })?;
        Ok(Self(Arc::new(Inner { config, store, started: Instant::now() })))
    }

    /// The settings it runs with.
    pub fn config(&self) -> &NodeConfig {
        &self.0.config
    }

    /// The default tenant's store.
    pub fn store(&self) -> &Store {
        &self.0.store
    }

    /// What it holds and does, at this moment.
    pub fn status(&self) -> Status {
        Status { uptime_s: self.0.started.elapsed().as_secs_f64(), ..Status::default() }
    }
}
