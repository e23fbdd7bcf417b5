//! The node: its tenants' stores and what it knows of its clients, behind every socket it serves.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use cascade_block::{Clock, SystemClock};
use cascade_store::{Store, StoreError};
use thiserror::Error;

use crate::NodeConfig;
use crate::calls::{CallFigures, Calls};
use crate::server::{Peer, SessionFacts, Sessions};
use crate::socket_place::SocketPlaceError;
use crate::status::Status;
use crate::tenants::{Tenant, Tenants};

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
    /// A socket could not be made or served.
    #[error("cannot {operation}")]
    Server {
        /// What failed.
        operation: &'static str,
        /// What the kernel said.
        #[source]
        source: std::io::Error,
    },
    /// The Unix socket cannot be there.
    #[error("cannot listen at {}", path.display())]
    Place {
        /// Where.
        path: PathBuf,
        /// Why not.
        #[source]
        source: SocketPlaceError,
    },
    /// The Unix socket cannot be made.
    #[error("cannot {operation} at {}", path.display())]
    Socket {
        /// Where.
        path: PathBuf,
        /// What failed.
        operation: &'static str,
        /// What the kernel said.
        #[source]
        source: std::io::Error,
    },
    /// The node stopped, but not all could be written down.
    #[error("the node stopped, but {unfinished}")]
    Unfinished {
        /// What is missing.
        unfinished: String,
    },
}

/// What a node does at the moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// It opens its stores.
    Starting,
    /// It serves.
    Serving,
    /// It stops: nothing new is taken.
    Draining,
}

/// What a running node takes from a configuration that was read again.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Live {
    /// Connections at a time.
    pub(crate) connections_max: usize,
    /// Share of a tenant's DRAM that a client which connects from now on may hold.
    pub(crate) client_share_percent: u8,
    /// How long a clean shutdown may take.
    pub(crate) shutdown_timeout: Duration,
}

impl Live {
    fn of(config: &NodeConfig) -> Self {
        Self {
            connections_max: config.limits.connections_max,
            client_share_percent: config.limits.client_share_percent,
            shutdown_timeout: config.shutdown_timeout,
        }
    }
}

/// One node. Clones are handles on it.
#[derive(Debug, Clone)]
pub struct Node(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    config: NodeConfig,
    live: RwLock<Live>,
    tenants: Tenants,
    sessions: Sessions,
    calls: Calls,
    epoch: u64,
    phase: AtomicU8,
    started: Duration,
}

impl Node {
    /// Opens the stores. Serves nothing yet.
    pub fn open(config: NodeConfig) -> Result<Self, NodeError> {
        let store = Store::open(config.store.clone())
            .map_err(|source| NodeError::Store { tenant: "default".to_owned(), source })?;
        let epoch = random().map_err(|source| NodeError::Server {
            operation: "draw a random number for the epoch",
            source,
        })?;
        Ok(Self(Arc::new(Inner {
            live: RwLock::new(Live::of(&config)),
            config,
            tenants: Tenants::of_default(store),
            sessions: Sessions::default(),
            calls: Calls::default(),
            epoch: u64::from_le_bytes(epoch),
            phase: AtomicU8::new(Phase::Starting as u8),
            started: SystemClock.monotonic(),
        })))
    }

    /// The settings it runs with.
    pub fn config(&self) -> &NodeConfig {
        &self.0.config
    }

    /// Those settings that may change while it runs.
    pub(crate) fn live(&self) -> Live {
        *self.0.live.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes what a running node can take from another configuration.
    pub(crate) fn follow(&self, config: &NodeConfig) {
        *self.0.live.write().unwrap_or_else(PoisonError::into_inner) = Live::of(config);
    }

    /// Its tenants.
    pub fn tenants(&self) -> &Tenants {
        &self.0.tenants
    }

    /// Names this run: it differs after every start.
    pub fn epoch(&self) -> u64 {
        self.0.epoch
    }

    /// What it does at the moment.
    pub fn phase(&self) -> Phase {
        match self.0.phase.load(Ordering::Acquire) {
            0 => Phase::Starting,
            1 => Phase::Serving,
            _ => Phase::Draining,
        }
    }

    /// Enters a phase.
    pub fn set_phase(&self, phase: Phase) {
        self.0.phase.store(phase as u8, Ordering::Release);
    }

    /// How long it has run.
    pub fn uptime(&self) -> Duration {
        SystemClock.monotonic().saturating_sub(self.0.started)
    }

    /// Its clients.
    pub fn clients(&self) -> Vec<SessionFacts> {
        self.0.sessions.all().iter().map(|session| session.facts()).collect()
    }

    /// What clients asked, by kind.
    pub fn call_figures(&self) -> Vec<CallFigures> {
        self.0.calls.figures()
    }

    /// Flushes and closes its stores.
    pub fn close(&self) -> Result<(), NodeError> {
        let mut first = Ok(());
        for tenant in self.0.tenants.all() {
            let closed = tenant.store().close();
            let tenant = tenant.name().to_owned();
            first = first.and(closed.map_err(|source| NodeError::Store { tenant, source }));
        }
        first
    }

    /// What it holds and does, at this moment.
    pub fn status(&self) -> Status {
        Status { uptime_s: self.uptime().as_secs_f64() }
    }

    pub(crate) fn calls(&self) -> &Calls {
        &self.0.calls
    }

    pub(crate) fn sessions(&self) -> &Sessions {
        &self.0.sessions
    }

    /// Answers an administrator. The text is JSON; a refusal is for a person to read.
    pub(crate) fn administer(
        &self,
        asks: &Tenant,
        topic: &str,
        arguments: &str,
        time: Duration,
    ) -> Result<String, String> {
        crate::admin::answer(self, asks, topic, arguments, time)
    }

    /// A client holds nothing any more that an earlier node gave it.
    #[expect(clippy::unused_self, reason = "the pool of an earlier node comes with warm restarts")]
    pub(crate) fn forget_epoch(&self, peer: Peer, epoch: u64) {
        tracing::debug!(process = peer.process, epoch, "a client let go of an earlier node's pool");
    }
}

/// Bytes that nobody can guess.
pub(crate) fn random<const N: usize>() -> std::io::Result<[u8; N]> {
    let mut bytes = [0; N];
    let count = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    debug_assert_eq!(count, N, "short requests are answered in full");
    Ok(bytes)
}
