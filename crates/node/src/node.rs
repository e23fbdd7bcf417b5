//! The node: its tenants' stores and what it knows of its clients, behind every socket it serves.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use cascade_block::{Clock, SystemClock};
use cascade_store::{Store, StoreError};
use thiserror::Error;

use crate::NodeConfig;
use crate::history::History;
use crate::http::HttpError;
use crate::own_process::OwnProcess;
use crate::status::{NodeState, NodeStatus, Status, TenantStatus};
use crate::telemetry::{Spans, TelemetryError};
use crate::traffic::Traffic;

/// Why a node could not start or go on, by what the operator can do.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum NodeError {
    /// A tenant's store could not be opened.
    #[error("cannot open the store of tenant {tenant:?}")]
    Store {
        /// The tenant.
        tenant: String,
        /// Why.
        #[source]
        source: StoreError,
    },
    /// The TCP port cannot be served.
    #[error(transparent)]
    Http(#[from] HttpError),
    /// Logs or traces cannot be written.
    #[error(transparent)]
    Telemetry(#[from] TelemetryError),
}

/// One node. Clones are handles on it.
#[derive(Debug, Clone)]
pub struct Node(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    config: NodeConfig,
    store: Store,
    started: Duration,
    state: AtomicU8,
    traffic: Traffic,
    history: History,
    address: OnceLock<SocketAddr>,
    spans: Mutex<Option<Spans>>,
}

impl Node {
    /// Opens the stores. Serves nothing yet.
    pub fn open(config: NodeConfig) -> Result<Self, NodeError> {
        let store = Store::open(config.store.clone())
            .map_err(|source| NodeError::Store { tenant: "default".to_owned(), source })?;
        Ok(Self(Arc::new(Inner {
            config,
            store,
            started: SystemClock.monotonic(),
            state: AtomicU8::new(NodeState::Starting as u8),
            traffic: Traffic::default(),
            history: History::default(),
            address: OnceLock::new(),
            spans: Mutex::new(None),
        })))
    }

    /// The settings it runs with.
    pub fn config(&self) -> &NodeConfig {
        &self.0.config
    }

    /// The default tenant's store.
    pub fn store(&self) -> &Store {
        &self.0.store
    }

    /// Where it is in its life.
    pub fn state(&self) -> NodeState {
        NodeState::ALL[usize::from(self.0.state.load(Ordering::Acquire))]
    }

    /// Says where it is in its life from now on.
    pub fn set_state(&self, state: NodeState) {
        self.0.state.store(state as u8, Ordering::Release);
    }

    /// Where answered requests are counted.
    pub fn traffic(&self) -> &Traffic {
        &self.0.traffic
    }

    /// Says whose spans the status tells of.
    pub fn set_spans(&self, spans: Spans) {
        *self.0.spans.lock().unwrap_or_else(PoisonError::into_inner) = Some(spans);
    }

    /// Says where the TCP port is; the first time counts.
    pub(crate) fn note_address(&self, address: SocketAddr) {
        self.0.address.get_or_init(|| address);
    }

    pub(crate) fn history(&self) -> &History {
        &self.0.history
    }

    /// What it holds and does, at this moment.
    pub fn status(&self) -> Status {
        let inner = &self.0;
        let process = OwnProcess::now();
        let spans = inner.spans.lock().unwrap_or_else(PoisonError::into_inner);
        Status {
            node: NodeStatus {
                version: env!("CARGO_PKG_VERSION").to_owned(),
                pid: std::process::id(),
                state: self.state(),
                at_unix_ms: SystemClock.unix_ms(),
                uptime_s: SystemClock.monotonic().saturating_sub(inner.started).as_secs_f64(),
                socket: inner.config.socket.display().to_string(),
                listen: inner.address.get().map(ToString::to_string),
                threads: process.threads,
                cpu_s: process.cpu_s,
                memory_bytes: process.memory_bytes,
            },
            tenants: vec![TenantStatus::of("default", &inner.store.stats())],
            server: inner.traffic.status(),
            traces: spans.as_ref().map(Spans::status),
            ..Status::default()
        }
    }
}
