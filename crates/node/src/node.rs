//! The node: its tenants' stores, client sessions, settings and counters, shared by its sockets.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};
use std::time::Duration;

use cascade_block::ByteSize;
use cascade_runtime::{Clock, SystemClock};
use cascade_store::{CallOptions, Store};
use tokio::sync::Notify;

use crate::NodeConfig;
use crate::cluster::NodeCluster;
use crate::config::{self, ConfigDifference};
use crate::controls::ProcessControls;
use crate::error::NodeError;
use crate::gpu::NodeGpu;
use crate::gpu_node::GpuNode;
use crate::process_stats::ProcessStats;
use crate::resize::{self, DRAM};
use crate::samples::Samples;
use crate::server::{ClientSessions, ClientSnapshot};
use crate::status::{ClientsStatus, NodeState, NodeStatus, Status, StatusView, TenantStatus};
use crate::telemetry::Spans;
use crate::tenants::{Tenant, Tenants};
use crate::traffic::Traffic;

/// Maximum number of hot prefixes in a tenant's status.
const HOT_PREFIXES: usize = 10;

/// How long a reload waits for tiers that change their capacities.
const RELOAD_TIMEOUT: Duration = Duration::from_secs(10);

/// The settings that a running node can change.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LiveSettings {
    /// Connection limit.
    pub(crate) connections_max: usize,
    /// Share of a tenant's DRAM that one client may hold; applies to new sessions.
    pub(crate) client_share_percent: u8,
    /// Time limit of a clean shutdown.
    pub(crate) shutdown_timeout: Duration,
}

impl LiveSettings {
    fn of(config: &NodeConfig) -> Self {
        Self {
            connections_max: config.limits.connections_max,
            client_share_percent: config.limits.client_share_percent,
            shutdown_timeout: config.shutdown_timeout,
        }
    }
}

/// One node. A clone is another handle on the same node.
#[derive(Debug, Clone)]
pub struct Node(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    config: NodeConfig,
    live: RwLock<LiveSettings>,
    /// The configuration with the changes since the start.
    current: Mutex<NodeConfig>,
    controls: OnceLock<ProcessControls>,
    gpu_node: Option<Arc<GpuNode>>,
    /// Set once the stores are open.
    tenants: OnceLock<Tenants>,
    /// Set with them, if the node takes part in a cluster.
    cluster: OnceLock<NodeCluster>,
    sessions: ClientSessions,
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
    /// A node with open stores. Serves no socket yet.
    pub fn open(config: NodeConfig) -> Result<Self, NodeError> {
        let node = Self::new(config)?;
        node.open_stores()?;
        Ok(node)
    }

    /// A node without its stores, which [`Node::open_stores`] opens.
    pub(crate) fn new(config: NodeConfig) -> Result<Self, NodeError> {
        let epoch = random_bytes().map_err(|source| NodeError::Server {
            operation: "get random bytes for the epoch",
            source,
        })?;
        Ok(Self(Arc::new(Inner {
            live: RwLock::new(LiveSettings::of(&config)),
            current: Mutex::new(config.clone()),
            controls: OnceLock::new(),
            gpu_node: config.gpu_node.clone().map(|gpu| Arc::new(GpuNode::new(gpu))),
            config,
            tenants: OnceLock::new(),
            cluster: OnceLock::new(),
            sessions: ClientSessions::default(),
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

    /// Opens the stores: allocates all memory, and recovers blocks of earlier runs.
    pub(crate) fn open_stores(&self) -> Result<(), NodeError> {
        let cluster = self.0.config.cluster.as_ref().map(NodeCluster::start).transpose()?;
        let config = cluster.as_ref().map(|cluster| cluster.with_sources(&self.0.config));
        let tenants = Tenants::open(config.as_ref().unwrap_or(&self.0.config))?;
        if let Some(cluster) = cluster {
            cluster.serve(tenants.all(), self.epoch())?;
            self.0.cluster.get_or_init(|| cluster);
        }
        tenants.all().iter().for_each(|tenant| log_recovery(tenant));
        self.0.tenants.get_or_init(|| tenants);
        Ok(())
    }

    /// Whether the stores are open.
    pub(crate) fn has_stores(&self) -> bool {
        self.0.tenants.get().is_some()
    }

    /// How far the start is, in words: of a large pool the allocation takes minutes.
    pub(crate) fn progress_of_start(&self) -> String {
        let of_pools = self.0.config.dram_bytes();
        let has = ProcessStats::now().memory_bytes.min(of_pools);
        // A share: everyone who reaches the port may ask whether the node is ready.
        let percent = has.saturating_mul(100) / of_pools.max(1);
        format!("starting: {percent} % of the memory is allocated")
    }

    /// Stops the node when the memory of its GPU is needed, if it has one.
    pub(crate) fn watch_gpu(&self, stop: &Arc<Notify>) -> std::io::Result<()> {
        self.tenants().gpu().map_or(Ok(()), |gpu| gpu.clone().watch(Arc::clone(stop)))
    }

    /// Whether the GPU that holds the blocks still works, if there is one.
    pub(crate) fn check_gpu(&self) -> Result<(), NodeError> {
        self.tenants().gpu().map_or(Ok(()), |gpu| gpu.check().map_err(NodeError::Gpu))
    }

    /// The node in the memory of a GPU that belongs to this one.
    pub(crate) fn gpu_node(&self) -> Option<&Arc<GpuNode>> {
        self.0.gpu_node.as_ref()
    }

    /// The configuration at the start.
    pub fn config(&self) -> &NodeConfig {
        &self.0.config
    }

    /// The settings that can change at run time.
    pub(crate) fn live_settings(&self) -> LiveSettings {
        *self.0.live.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The configuration with the changes since the start.
    pub(crate) fn current_config(&self) -> NodeConfig {
        self.0.current.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Applies the settings of another configuration that can change at run time. Returns these,
    /// and the settings that need a restart.
    ///
    /// # Errors
    /// The log filter is invalid, or a capacity does not change. No other setting changes then.
    pub(crate) fn apply_config(&self, new: &NodeConfig) -> Result<ConfigDifference, NodeError> {
        let mut current = self.0.current.lock().unwrap_or_else(PoisonError::into_inner);
        let mut difference = self.difference(&current, new);
        let is_dram = |key: &String| key == DRAM;
        let tenants = self.0.tenants.get();
        if tenants.is_some_and(|tenants| resize::exceeds_start(tenants, new))
            && config::difference(&self.0.config, new).live.iter().any(is_dram)
        {
            difference.live.retain(|key| !is_dram(key));
            difference.restart.push(DRAM.to_owned());
        }
        self.replace_config(&mut current, new, &difference.live, RELOAD_TIMEOUT)?;
        Ok(difference)
    }

    /// Applies `new` as [`Node::apply_config`] does, if the configuration is still `before`, from
    /// which `new` was made by a change of one key. Returns whether it was: otherwise `new` would
    /// undo another change.
    pub(crate) fn apply_change(
        &self,
        before: &NodeConfig,
        new: &NodeConfig,
        key: &str,
        time: Duration,
    ) -> Result<bool, NodeError> {
        let mut current = self.0.current.lock().unwrap_or_else(PoisonError::into_inner);
        if *current != *before {
            return Ok(false);
        }
        // Also without a difference: an earlier change of a capacity may have got only a part.
        self.replace_config(&mut current, new, &[key.to_owned()], time).map(|()| true)
    }

    /// `current` is locked by the caller: two concurrent changes must not each compare with the
    /// other's old state.
    fn replace_config(
        &self,
        current: &mut NodeConfig,
        new: &NodeConfig,
        changed: &[String],
        time: Duration,
    ) -> Result<(), NodeError> {
        // What can fail goes first. An invalid log filter is refused before anything has changed.
        let set_filter = |config: &NodeConfig| {
            let filter = config.log.filter.as_deref().unwrap_or("info");
            self.0.controls.get().map_or(Ok(()), |controls| controls.log.set(filter))
        };
        set_filter(new)?;
        if let Some(tenants) = self.0.tenants.get() {
            let options = CallOptions { timeout: Some(time), ..CallOptions::default() };
            let resized = resize::resize(tenants, self.sessions(), new, changed, options);
            if let Err(error) = resized {
                set_filter(current)?;
                return Err(error.into());
            }
        }
        // One assignment for all of them: a reader never gets a mixture of old and new settings.
        *self.0.live.write().unwrap_or_else(PoisonError::into_inner) = LiveSettings::of(new);
        *current = new.clone();
        Ok(())
    }

    /// How a configuration differs. Live settings are compared with the last change, the others
    /// with the start: these stay different until the node is restarted.
    fn difference(&self, current: &NodeConfig, new: &NodeConfig) -> ConfigDifference {
        let live = config::difference(current, new).live;
        ConfigDifference { live, restart: config::difference(&self.0.config, new).restart }
    }

    /// Sets the handles on the process. Only the first call has an effect.
    pub(crate) fn set_controls(&self, controls: ProcessControls) {
        self.0.controls.get_or_init(|| controls);
    }

    /// The handles on the process; none in a node that is embedded in another program.
    pub(crate) fn controls(&self) -> Option<&ProcessControls> {
        self.0.controls.get()
    }

    /// The tenants.
    ///
    /// # Panics
    /// If the stores are not open yet. A node that this crate returns has open stores.
    pub fn tenants(&self) -> &Tenants {
        self.0.tenants.get().expect("nothing that needs a store is served before they are open")
    }

    /// The default tenant's store.
    pub fn store(&self) -> &Store {
        self.tenants().all()[0].store()
    }

    /// A random identifier of this run of the node.
    pub fn epoch(&self) -> u64 {
        self.0.epoch
    }

    /// Whether the node is starting, serving or draining.
    pub fn state(&self) -> NodeState {
        // Only `set_state` writes it, so the index is valid.
        NodeState::ALL[usize::from(self.0.state.load(Ordering::Acquire))]
    }

    /// Sets the state.
    pub fn set_state(&self, state: NodeState) {
        self.0.state.store(state as u8, Ordering::Release);
    }

    /// The counters of answered requests.
    pub fn traffic(&self) -> &Traffic {
        &self.0.traffic
    }

    /// Whether spans of requests are exported to a collector.
    pub(crate) fn is_tracing(&self) -> bool {
        // Relaxed: a request that misses the change has no span, which affects nothing else.
        self.0.is_tracing.load(Ordering::Relaxed)
    }

    /// Sets the exporter of spans; requests are traced from now on.
    pub fn set_spans(&self, spans: Spans) {
        self.0.is_tracing.store(true, Ordering::Relaxed);
        *self.0.spans.lock().unwrap_or_else(PoisonError::into_inner) = Some(spans);
    }

    /// Sets the address of the TCP port. Only the first call has an effect.
    pub(crate) fn set_address(&self, address: SocketAddr) {
        self.0.address.get_or_init(|| address);
    }

    pub(crate) fn address(&self) -> Option<SocketAddr> {
        self.0.address.get().copied()
    }

    pub(crate) fn samples(&self) -> &Samples {
        &self.0.samples
    }

    /// Differs from that of other runs of a node: its start on the system's clock, in nanoseconds.
    pub(crate) fn run_id(&self) -> u64 {
        u64::try_from(self.0.started.as_nanos()).unwrap_or(u64::MAX)
    }

    pub(crate) fn sessions(&self) -> &ClientSessions {
        &self.0.sessions
    }

    /// The clients that are connected or hold memory.
    pub fn clients(&self) -> Vec<ClientSnapshot> {
        self.0.sessions.all().iter().map(|session| session.snapshot()).collect()
    }

    /// Flushes and closes every store.
    ///
    /// # Errors
    /// The first store that could not be closed. The others are closed all the same.
    pub fn close(&self) -> Result<(), NodeError> {
        // Others read nothing of stores that end.
        if let Some(cluster) = self.0.cluster.get() {
            cluster.stop();
        }
        let mut first = Ok(());
        // Not ended by an error: every store has pending blocks of its own.
        for tenant in self.tenants().all() {
            let closed = tenant.store().close();
            let tenant = tenant.name().to_owned();
            first = first.and(closed.map_err(|source| NodeError::Store { tenant, source }));
        }
        first
    }

    /// The current status of the node, its tenants and its clients.
    pub fn status(&self) -> Status {
        let inner = &self.0;
        let process = ProcessStats::now();
        let tenants = self.tenants().all().iter().map(|tenant| {
            let store = tenant.store();
            let hot = store.hot_prefixes(HOT_PREFIXES);
            TenantStatus::of(tenant.name(), &store.stats(), SystemClock.unix_ms())
                .with_hot_prefixes(&hot)
        });
        let tenants = tenants.collect();
        let spans = inner.spans.lock().unwrap_or_else(PoisonError::into_inner);
        Status {
            view: StatusView::All,
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
                gpu: self.tenants().gpu().map(NodeGpu::status),
                gpu_node: inner.gpu_node.as_ref().map(|gpu| gpu.status()),
            },
            tenants,
            clients: ClientsStatus::of(&self.clients(), inner.sessions.reaped()),
            cluster: inner.cluster.get().map(NodeCluster::status),
            server: inner.traffic.status(),
            traces: spans.as_ref().map(Spans::status),
            notes: inner.gpu_node.iter().filter_map(|gpu| gpu.status().note()).collect(),
        }
    }
}

/// Logs the blocks that a store recovered from earlier runs, and its notes about lost ones.
fn log_recovery(tenant: &Tenant) {
    let stats = tenant.store().stats();
    let tenant = tenant.name();
    if let Some(warm) = stats.warm.filter(|warm| warm.runs > 1) {
        tracing::info!(
            tenant,
            blocks = warm.recovered_blocks,
            bytes = %ByteSize(warm.recovered_bytes).rounded(),
            rejected_records = warm.rejected_records,
            took_ms = warm.recover_ms,
            "recovered blocks of the previous run in DRAM"
        );
    }
    for ((tier, stage), blocks) in stats.stages.iter().zip(&stats.stage_blocks) {
        if let Some(encryption) = &stage.encryption {
            tracing::info!(tenant, tier, encryption, "blocks are encrypted");
        }
        // A tier without recovered blocks is the usual case of a first start, and not worth a line.
        if *blocks > 0 {
            let bytes = ByteSize(stage.used_bytes).rounded();
            tracing::info!(tenant, tier, blocks, %bytes, "recovered blocks of earlier runs");
        }
    }
    for note in &stats.notes {
        tracing::warn!(tenant, "{note}");
    }
}

/// Random bytes of the kernel's generator.
pub(crate) fn random_bytes<const N: usize>() -> std::io::Result<[u8; N]> {
    let mut bytes = [0; N];
    let count = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    // `getrandom(2)` never returns fewer than 256 requested bytes once the generator is ready.
    debug_assert_eq!(count, N, "requests of up to 256 bytes are answered in full");
    Ok(bytes)
}
