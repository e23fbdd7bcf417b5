//! A node's status: the source of `cascade status`, the metrics and the status page.

mod gather;
mod histogram;
mod view;

use serde::{Deserialize, Serialize};

use crate::gpu::GpuStatus;
use crate::gpu_node::GpuNodeStatus;

pub use histogram::Histogram;
pub use view::{ALL_TENANTS, StatusView};

/// The status of a node at one moment.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The part of the node that this status covers.
    pub view: StatusView,
    /// The process.
    pub node: NodeStatus,
    /// The stores of the tenants, `default` first.
    pub tenants: Vec<TenantStatus>,
    /// Clients of the Unix socket.
    pub clients: ClientsStatus,
    /// The cluster that the node takes part in.
    #[serde(default)]
    pub cluster: Option<ClusterStatus>,
    /// Requests and connections.
    pub server: ServerStatus,
    /// Spans sent to a collector, if traces are on.
    pub traces: Option<TraceStatus>,
    /// Notes for the operator about the node.
    pub notes: Vec<String>,
}

/// The phase of a node's life.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NodeState {
    /// Opens its stores.
    #[default]
    Starting,
    /// Serves requests.
    Serving,
    /// Refuses new blocks and writes pending ones to lower tiers.
    Draining,
}

impl NodeState {
    /// All states, in chronological order.
    pub const ALL: [Self; 3] = [Self::Starting, Self::Serving, Self::Draining];

    /// The name in metrics and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Serving => "serving",
            Self::Draining => "draining",
        }
    }
}

/// The process.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct NodeStatus {
    /// Version of Cascade.
    pub version: String,
    /// Process ID.
    pub pid: u32,
    /// The phase of its life.
    pub state: NodeState,
    /// Time of this status, in milliseconds since 1970 UTC.
    pub at_unix_ms: u64,
    /// Seconds since the start.
    pub uptime_s: f64,
    /// Path of the Unix socket.
    pub socket: String,
    /// The TCP address, if there is one.
    pub listen: Option<String>,
    /// Threads of the process.
    pub threads: u64,
    /// CPU time in seconds, user and system.
    pub cpu_s: f64,
    /// Resident memory, including touched pages of the pools.
    pub memory_bytes: u64,
    /// Virtual memory.
    pub virtual_memory_bytes: u64,
    /// Open descriptors.
    pub open_files: u64,
    /// Limit of open descriptors.
    pub open_files_max: u64,
    /// Start time of the process, in seconds since 1970 UTC.
    pub started_unix_s: f64,
    /// The GPU that holds the blocks, if it is not DRAM.
    pub gpu: Option<GpuStatus>,
    /// The node in the memory of a GPU that this node starts.
    pub gpu_node: Option<GpuNodeStatus>,
}

/// The cluster that a node takes part in.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ClusterStatus {
    /// The name of this node.
    pub node_name: String,
    /// The other nodes.
    pub nodes: Vec<PeerStatus>,
}

/// Another node of the cluster.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct PeerStatus {
    /// Its name.
    pub name: String,
    /// Where it answers.
    pub address: String,
    /// `up`; `suspect`: it answered too late, and is asked only whether it is there; or `away`:
    /// there is no connection.
    pub state: String,
    /// Identifies its run.
    pub epoch: Option<u64>,
    /// Blocks in its DRAM, as it said within the last seconds.
    pub blocks: Option<u64>,
    /// Their bytes.
    pub bytes: Option<u64>,
    /// Blocks fetched from it.
    pub fetched_blocks: u64,
    /// Their bytes.
    pub fetched_bytes: u64,
    /// The last error, until it answers again.
    pub error: Option<String>,
}

impl PeerStatus {
    /// The names of all states.
    pub const STATES: [&'static str; 3] = ["up", "suspect", "away"];
}

/// The store of a tenant.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct TenantStatus {
    /// Name of the tenant.
    pub name: String,
    /// The hit rate.
    pub hit_rate: HitRate,
    /// Lookups of chains.
    pub lookups: LookupStatus,
    /// Blocks read by get and view.
    pub gets: GetStatus,
    /// Blocks put.
    pub puts: PutStatus,
    /// The tiers, fast to slow.
    pub tiers: Vec<TierStatus>,
    /// Copies between tiers.
    pub mover: MoverStatus,
    /// Blocks dropped to free space.
    pub evictions: EvictionStatus,
    /// Blocks that failed their checksum and were answered as misses.
    pub damaged_blocks: u64,
    /// The catalog of blocks.
    pub catalog: CatalogStatus,
    /// How long the store's lock was held for many keys at once, in seconds.
    pub lock_hold_s: Histogram,
    /// The memory of the DRAM tier.
    pub pool: PoolStatus,
    /// Predicted hit rates at other capacities.
    pub shadows: Vec<ShadowStatus>,
    /// The most requested prefixes.
    pub hot_prefixes: Vec<HotPrefix>,
    /// What the last restart recovered, if the pool is kept.
    pub warm_restart: Option<WarmRestartStatus>,
    /// Notes for the operator, such as a tier that was left out.
    pub notes: Vec<String>,
}

/// The hit rate: blocks matched over blocks requested, each request counted once.
///
/// Blocks of lookups are requested, and so are blocks that get and view read without a lookup. All
/// pages, metrics and commands show this figure as the hit rate.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct HitRate {
    /// Blocks requested.
    pub requested_blocks: u64,
    /// Of these, blocks in an available tier.
    pub matched_blocks: u64,
    /// Matched over requested, 0 to 1. `None` before the first request.
    pub ratio: Option<f64>,
}

/// Lookups of chains.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LookupStatus {
    /// Lookups.
    pub requests: u64,
    /// Blocks that they requested.
    pub requested_blocks: u64,
    /// Leading blocks that matched.
    pub matched_blocks: u64,
}

/// Blocks read by get and view. Hits, misses and failures add up to `blocks`.
///
/// They include loads after a lookup, so hits over blocks is not the hit rate.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GetStatus {
    /// Blocks read.
    pub blocks: u64,
    /// Of these, found.
    pub hits: u64,
    /// Of these, not found.
    pub misses: u64,
    /// Of these, failed.
    pub failures: u64,
    /// Of the misses, blocks in a tier whose circuit was open.
    pub shed: u64,
    /// Bytes returned.
    pub bytes: u64,
}

/// Blocks put, by outcome. The outcomes add up to `blocks`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PutStatus {
    /// Blocks put.
    pub blocks: u64,
    /// Of these, stored.
    pub stored: u64,
    /// Of these, deduplicated: another key has the same bytes.
    pub deduplicated: u64,
    /// Of these, already present under the key.
    pub present: u64,
    /// Of these, refused because the key has other bytes.
    pub conflicts: u64,
    /// Of these, not admitted.
    pub declined: u64,
    /// Of these, failed.
    pub failures: u64,
    /// Bytes written to the first tier.
    pub bytes: u64,
}

/// One tier.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct TierStatus {
    /// The name, such as `dram` or `files`.
    pub name: String,
    /// Capacity.
    pub capacity_bytes: u64,
    /// Bytes in use.
    pub used_bytes: u64,
    /// Blocks in the tier, if it counts them.
    pub blocks: Option<u64>,
    /// Files of the tier, if it has any.
    pub files: Option<u64>,
    /// Blocks that reads got from this tier.
    pub hits: u64,
    /// Their bytes.
    pub hit_bytes: u64,
    /// Requested blocks that matched in this tier.
    pub matched_blocks: u64,
    /// Blocks that failed their checksum.
    pub damaged_blocks: u64,
    /// Damaged headers, footers and other structures of its files.
    pub damaged_structures: u64,
    /// Health of the tier, if it has a circuit breaker.
    pub health: Option<HealthStatus>,
    /// How its blocks are encrypted, and the key of new ones; none if they are not.
    pub encryption: Option<String>,
    /// Notes for the operator, such as a fallback in use.
    pub notes: Vec<String>,
}

/// State of a circuit breaker.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HealthState {
    /// The circuit is closed: the tier is used.
    #[default]
    Healthy,
    /// The circuit is open: the tier is not used.
    Open,
    /// The circuit is open, and a probe is in flight.
    Probing,
}

impl HealthState {
    /// All states.
    pub const ALL: [Self; 3] = [Self::Healthy, Self::Open, Self::Probing];

    /// The name in metrics and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Healthy => "healthy",
            Self::Open => "open",
            Self::Probing => "probing",
        }
    }
}

/// Health of a tier.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct HealthStatus {
    /// State of the tier.
    pub state: HealthState,
    /// Seconds in this state.
    pub since_s: f64,
    /// Times that the circuit opened.
    pub opened: u64,
    /// Calls that have not returned long after their deadline.
    pub stuck_calls: u64,
    /// The last error.
    pub last_error: Option<String>,
    /// State for reads. While the circuit is open, blocks of the tier are misses.
    pub reads: HealthState,
    /// State for writes. While the circuit is open, new blocks stay in the tiers above.
    pub writes: HealthState,
}

/// Copies between tiers.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoverStatus {
    /// Blocks written to a lower tier.
    pub demoted_blocks: u64,
    /// Their bytes.
    pub demoted_bytes: u64,
    /// Blocks copied up from a lower tier.
    pub promoted_blocks: u64,
    /// Their bytes.
    pub promoted_bytes: u64,
    /// Bytes waiting to be written to lower tiers.
    pub pending_bytes: u64,
    /// Blocks that could not be written to a lower tier.
    pub demote_failures: u64,
    /// Blocks that a lower tier does not accept.
    pub demote_declines: u64,
    /// Keys that could not be added to or removed from a lower tier.
    pub name_failures: u64,
    /// Blocks requested by prefetch.
    pub prefetched_blocks: u64,
    /// Of these, read before they were evicted.
    pub prefetched_used_blocks: u64,
}

/// Blocks dropped to free space.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EvictionStatus {
    /// Blocks evicted from DRAM.
    pub blocks: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Of these, blocks that were in no other tier.
    pub lost_blocks: u64,
    /// Blocks dropped by a lower tier.
    pub reclaimed_blocks: u64,
}

/// The catalog of blocks.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CatalogStatus {
    /// Keys, in any tier.
    pub keys: u64,
    /// Distinct contents, in any tier.
    pub contents: u64,
    /// Bytes of distinct contents, each counted once.
    pub content_bytes: u64,
    /// Memory of the catalog and the eviction policy.
    pub memory_bytes: u64,
    /// Protected blocks in DRAM.
    pub protected_blocks: u64,
    /// Blocks not protected because the protected share was full.
    pub protection_refused: u64,
}

/// The memory of the DRAM tier.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolStatus {
    /// Size of the pool.
    pub capacity_bytes: u64,
    /// Bytes in slabs, including rounding.
    pub reserved_bytes: u64,
    /// Bytes in slabs, without rounding.
    pub requested_bytes: u64,
    /// Free bytes, including those cached for slabs of common sizes.
    pub free_bytes: u64,
    /// The largest contiguous free range.
    pub largest_free_bytes: u64,
    /// Bytes on huge pages.
    pub huge_bytes: u64,
}

/// Predicted hit rate of a tier at another capacity.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ShadowStatus {
    /// The tier.
    pub tier: String,
    /// The capacity, in percent of the present one.
    pub capacity_percent: u32,
    /// The capacity in bytes.
    pub capacity_bytes: u64,
    /// Share of the blocks requested by lookups that would match, 0 to 1.
    pub predicted_hit_rate: f64,
}

/// A frequently requested prefix.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct HotPrefix {
    /// The key of its last block, in hexadecimal digits.
    pub key: String,
    /// Its length in blocks.
    pub depth_blocks: u64,
    /// Recent requests for it.
    pub requests: u64,
    /// Bytes of its blocks in the fastest tier that has any of them.
    pub resident_bytes: u64,
    /// Tiers that have blocks of it, fast to slow.
    pub tiers: Vec<String>,
}

/// What the last restart recovered.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct WarmRestartStatus {
    /// Blocks recovered from the pool.
    pub recovered_blocks: u64,
    /// Their bytes.
    pub recovered_bytes: u64,
    /// Records that were rejected.
    pub rejected_records: u64,
    /// Duration of the recovery.
    pub recover_s: f64,
}

/// Clients of the Unix socket.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ClientsStatus {
    /// Connected clients.
    pub connected: u64,
    /// Of these, stopped by a signal.
    pub stopped: u64,
    /// Of these, clients that hold leases and have been idle for a minute.
    pub silent: u64,
    /// Blocks under lease.
    pub leases: u64,
    /// Their bytes.
    pub leased_bytes: u64,
    /// Bytes reserved by clients and not sealed yet.
    pub reserved_bytes: u64,
    /// Age of the oldest lease.
    pub oldest_lease_s: Option<f64>,
    /// Clients that disconnected or died while they held leases or reservations.
    pub reaped: u64,
    /// The clients that hold most memory.
    pub list: Vec<ClientStatus>,
}

/// One client.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ClientStatus {
    /// Process ID.
    pub pid: u32,
    /// Name of the program.
    pub name: String,
    /// Its tenant.
    pub tenant: String,
    /// Blocks under lease.
    pub leases: u64,
    /// Their bytes.
    pub leased_bytes: u64,
    /// Bytes reserved and not sealed yet.
    pub reserved_bytes: u64,
    /// Age of its oldest lease.
    pub oldest_lease_s: Option<f64>,
    /// Seconds since its last request.
    pub silent_s: f64,
    /// Whether a signal stopped it.
    pub is_stopped: bool,
}

/// Requests and connections.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ServerStatus {
    /// Requests on the Unix socket, by operation.
    pub operations: Vec<OperationStatus>,
    /// Leading blocks that each lookup matched.
    pub lookup_hit_blocks: Histogram,
    /// Share of the blocks of each lookup that matched, 0 to 1.
    pub lookup_hit_ratio: Histogram,
    /// HTTP connections and requests.
    pub http: HttpStatus,
}

/// Requests of one operation.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct OperationStatus {
    /// The operation.
    pub operation: String,
    /// Requests that failed as a whole.
    pub failures: u64,
    /// Duration of a request in seconds.
    pub duration_s: Histogram,
    /// Blocks per request.
    pub blocks: Histogram,
    /// Bytes of the blocks that a request copied or leased.
    pub bytes: Histogram,
    /// Throughput of a request that copied or leased blocks.
    pub bytes_per_second: Histogram,
}

/// HTTP connections and requests.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HttpStatus {
    /// Open connections.
    pub connections: u64,
    /// Requests.
    pub requests: u64,
    /// Of these, refused for a missing or wrong token, or a wrong `Host` header.
    pub refused: u64,
    /// Connections that reached the limit, and were limited to health checks or closed.
    pub turned_away: u64,
    /// TLS handshakes that failed.
    pub handshake_failures: u64,
}

/// Spans sent to the trace collector.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceStatus {
    /// Spans that the collector accepted.
    pub exported_spans: u64,
    /// Spans dropped because the collector was slow, unavailable or refused them.
    pub lost_spans: u64,
}
