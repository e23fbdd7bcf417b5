//! The node: its tenants' stores and what it knows of its clients, behind every socket it serves.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};
use std::time::Duration;

use cascade_block::{ByteSize, Clock, SystemClock};
use cascade_store::{Store, StoreError};
use thiserror::Error;

use crate::NodeConfig;
use crate::config::{self, Difference};
use crate::controls::Controls;
use crate::http::HttpError;
use crate::own_process::OwnProcess;
use crate::samples::Samples;
use crate::server::{SessionFacts, Sessions};
use crate::socket_place::SocketPlaceError;
use crate::status::{ClientsStatus, NodeState, NodeStatus, Status, TenantStatus, View};
use crate::telemetry::{Spans, TelemetryError};
use crate::tenants::{Tenant, TenantError, Tenants};
use crate::traffic::Traffic;

/// Prefixes that a status names.
const HOT_PREFIXES: usize = 10;

/// Why a node could not start or go on, by what the operator can do.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum NodeError {
    /// The tenants cannot be served.
    #[error(transparent)]
    Tenant(#[from] TenantError),
    /// A tenant's store could not be closed as it should.
    #[error("cannot close the store of tenant {tenant:?}")]
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
    /// The TCP port cannot be served.
    #[error(transparent)]
    Http(#[from] HttpError),
    /// Logs or traces cannot be written.
    #[error(transparent)]
    Telemetry(#[from] TelemetryError),
    /// The node stopped, but not all could be written down.
    #[error("the node stopped, but {unfinished}")]
    Unfinished {
        /// What is missing.
        unfinished: String,
    },
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
    /// The configuration with what changed since the start.
    current: Mutex<NodeConfig>,
    controls: OnceLock<Controls>,
    tenants: Tenants,
    sessions: Sessions,
    epoch: u64,
    state: AtomicU8,
    started: Duration,
    traffic: Traffic,
    samples: Samples,
    address: OnceLock<SocketAddr>,
    spans: Mutex<Option<Spans>>,
    is_tracing: AtomicBool,
}

impl Node {
    /// Opens the stores. Serves nothing yet.
    pub fn open(config: NodeConfig) -> Result<Self, NodeError> {
        let tenants = Tenants::open(&config)?;
        let epoch = random().map_err(|source| NodeError::Server {
            operation: "draw a random number for the epoch",
            source,
        })?;
        tenants.all().iter().for_each(|tenant| tell_recovered(tenant));
        Ok(Self(Arc::new(Inner {
            live: RwLock::new(Live::of(&config)),
            current: Mutex::new(config.clone()),
            controls: OnceLock::new(),
            config,
            tenants,
            sessions: Sessions::default(),
            epoch: u64::from_le_bytes(epoch),
            state: AtomicU8::new(NodeState::Starting as u8),
            started: SystemClock.monotonic(),
            traffic: Traffic::default(),
            samples: Samples::default(),
            address: OnceLock::new(),
            spans: Mutex::new(None),
            is_tracing: AtomicBool::new(false),
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

    /// The configuration with what changed since the start.
    pub(crate) fn current(&self) -> NodeConfig {
        self.0.current.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Takes what a running node can take from another configuration, and says what that is and
    /// what waits for a restart.
    ///
    /// # Errors
    /// If the log's filter is none; then nothing changes.
    pub(crate) fn follow(&self, new: &NodeConfig) -> Result<Difference, TelemetryError> {
        let mut current = self.0.current.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(controls) = self.0.controls.get() {
            controls.log.set(new.log.filter.as_deref().unwrap_or("info"))?;
        }
        *self.0.live.write().unwrap_or_else(PoisonError::into_inner) = Live::of(new);
        let live = config::difference(&current, new).live;
        *current = new.clone();
        Ok(Difference { live, restart: config::difference(&self.0.config, new).restart })
    }

    /// Gives the node what acts on its process; the first time counts.
    pub(crate) fn set_controls(&self, controls: Controls) {
        self.0.controls.get_or_init(|| controls);
    }

    /// What acts on its process; nothing in a node that is no process of its own.
    pub(crate) fn controls(&self) -> Option<&Controls> {
        self.0.controls.get()
    }

    /// Its tenants.
    pub fn tenants(&self) -> &Tenants {
        &self.0.tenants
    }

    /// The default tenant's store.
    pub fn store(&self) -> &Store {
        self.0.tenants.all()[0].store()
    }

    /// Names this run: it differs after every start.
    pub fn epoch(&self) -> u64 {
        self.0.epoch
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

    /// Whether spans of requests go to a collector.
    pub(crate) fn is_tracing(&self) -> bool {
        self.0.is_tracing.load(Ordering::Relaxed)
    }

    /// Says whose spans the status tells of.
    pub fn set_spans(&self, spans: Spans) {
        self.0.is_tracing.store(true, Ordering::Relaxed);
        *self.0.spans.lock().unwrap_or_else(PoisonError::into_inner) = Some(spans);
    }

    /// Says where the TCP port is; the first time counts.
    pub(crate) fn note_address(&self, address: SocketAddr) {
        self.0.address.get_or_init(|| address);
    }

    pub(crate) fn address(&self) -> Option<SocketAddr> {
        self.0.address.get().copied()
    }

    pub(crate) fn samples(&self) -> &Samples {
        &self.0.samples
    }

    pub(crate) fn sessions(&self) -> &Sessions {
        &self.0.sessions
    }

    /// Its clients.
    pub fn clients(&self) -> Vec<SessionFacts> {
        self.0.sessions.all().iter().map(|session| session.facts()).collect()
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
        let inner = &self.0;
        let process = OwnProcess::now();
        let tenants = inner.tenants.all().iter().map(|tenant| {
            let store = tenant.store();
            let hot = store.hot_prefixes(HOT_PREFIXES);
            TenantStatus::of(tenant.name(), &store.stats(), SystemClock.unix_ms()).with_hot(&hot)
        });
        let tenants = tenants.collect();
        let spans = inner.spans.lock().unwrap_or_else(PoisonError::into_inner);
        Status {
            view: View::All,
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
                virtual_memory_bytes: process.virtual_memory_bytes,
                open_files: process.open_files,
                open_files_max: process.open_files_max,
                started_unix_s: process.started_unix_s,
            },
            tenants,
            clients: ClientsStatus::of(&self.clients(), inner.sessions.reaped()),
            server: inner.traffic.status(),
            traces: spans.as_ref().map(Spans::status),
            notes: Vec::new(),
        }
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
}

/// Logs what a store found of an earlier run, and what it could not keep of it.
fn tell_recovered(tenant: &Tenant) {
    let stats = tenant.store().stats();
    let tenant = tenant.name();
    if let Some(warm) = stats.warm.filter(|warm| warm.runs > 1) {
        tracing::info!(
            tenant,
            blocks = warm.recovered_blocks,
            bytes = %ByteSize(warm.recovered_bytes).rounded(),
            rejected_records = warm.rejected_records,
            took_ms = warm.recover_ms,
            "blocks of the run before are in DRAM again"
        );
    }
    for ((tier, stage), blocks) in stats.stages.iter().zip(&stats.stage_blocks) {
        if *blocks > 0 {
            let bytes = ByteSize(stage.used_bytes).rounded();
            tracing::info!(tenant, tier, blocks, %bytes, "blocks of earlier runs were found");
        }
    }
    for note in &stats.notes {
        tracing::warn!(tenant, "{note}");
    }
}

/// Bytes that nobody can guess.
pub(crate) fn random<const N: usize>() -> std::io::Result<[u8; N]> {
    let mut bytes = [0; N];
    let count = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    debug_assert_eq!(count, N, "short requests are answered in full");
    Ok(bytes)
}
