//! A node's status: one value behind `cascade status`, the metrics and the status page.

mod gather;
mod histogram;
mod view;

use serde::{Deserialize, Serialize};

pub use histogram::Histogram;
pub use view::{ALL_TENANTS, View};

/// What a node holds and does, at one moment.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// How much of the node this shows: what its reader may see.
    pub view: View,
    /// The process.
    pub node: NodeStatus,
    /// Each tenant's store, `default` first.
    pub tenants: Vec<TenantStatus>,
    /// Who uses the Unix socket.
    pub clients: ClientsStatus,
    /// What the node did for them, and what that cost.
    pub server: ServerStatus,
    /// Spans sent to a collector, when traces are on.
    pub traces: Option<TraceStatus>,
    /// What an operator should know about the node as a whole.
    pub notes: Vec<String>,
}

/// Where a node is in its life.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NodeState {
    /// It opens its stores.
    #[default]
    Starting,
    /// It serves.
    Serving,
    /// It takes nothing new and writes down what it has.
    Draining,
}

impl NodeState {
    /// Every state, in the order of a life.
    pub const ALL: [Self; 3] = [Self::Starting, Self::Serving, Self::Draining];

    /// Its name in metrics and JSON.
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
    /// Cascade's version.
    pub version: String,
    /// Its process id.
    pub pid: u32,
    /// Where it is in its life.
    pub state: NodeState,
    /// Milliseconds since 1970 UTC when this was taken.
    pub at_unix_ms: u64,
    /// Seconds since it started.
    pub uptime_s: f64,
    /// The Unix socket.
    pub socket: String,
    /// The TCP address, when there is one.
    pub listen: Option<String>,
    /// Threads of the process.
    pub threads: u64,
    /// Seconds of processor time, user and system.
    pub cpu_s: f64,
    /// Memory that the process holds, the pools' touched pages included.
    pub memory_bytes: u64,
    /// Address space of the process.
    pub virtual_memory_bytes: u64,
    /// Descriptors that are open.
    pub open_files: u64,
    /// Descriptors that may be open.
    pub open_files_max: u64,
    /// Seconds since 1970 UTC when the process started.
    pub started_unix_s: f64,
}

/// One tenant's store.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct TenantStatus {
    /// The tenant.
    pub name: String,
    /// How much of what was requested was there.
    pub hit_rate: HitRate,
    /// Lookups of chains.
    pub lookups: LookupStatus,
    /// Blocks read by get and view.
    pub gets: GetStatus,
    /// Blocks given to put.
    pub puts: PutStatus,
    /// Places that blocks are in, fast to slow.
    pub tiers: Vec<TierStatus>,
    /// What moved between tiers.
    pub mover: MoverStatus,
    /// What left DRAM or the lower tiers.
    pub evictions: EvictionStatus,
    /// Blocks found damaged, answered as misses.
    pub damaged_blocks: u64,
    /// What is known of blocks.
    pub catalog: CatalogStatus,
    /// The memory behind the DRAM tier.
    pub pool: PoolStatus,
    /// What more capacity would give.
    pub shadows: Vec<ShadowStatus>,
    /// Prefixes that are asked for most.
    pub hot_prefixes: Vec<HotPrefix>,
    /// What came back from before the last restart, when the pool is kept.
    pub warm_restart: Option<WarmRestartStatus>,
    /// What an operator should know, such as a tier that was left out.
    pub notes: Vec<String>,
}

/// The hit rate: blocks matched over blocks requested, each request counted once.
///
/// Requested are the blocks of lookups, and those that get and view read without a lookup before.
/// Every page, metric and command shows this figure and no other as the hit rate.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct HitRate {
    /// Blocks requested.
    pub requested_blocks: u64,
    /// Of these, known in a tier that answers.
    pub matched_blocks: u64,
    /// Matched over requested, 0 to 1; none before the first request.
    pub ratio: Option<f64>,
}

/// Lookups of chains.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LookupStatus {
    /// Lookups.
    pub requests: u64,
    /// Blocks that they requested.
    pub requested_blocks: u64,
    /// Leading blocks that were there.
    pub matched_blocks: u64,
}

/// Blocks read by get and view: hits, misses and failures add up to them.
///
/// Loads of what a lookup matched are among them, so their share of hits is not the hit rate.
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
    /// Of the misses, those in a tier whose breaker was open.
    pub shed: u64,
    /// Bytes handed out.
    pub bytes: u64,
}

/// Blocks given to put, by what became of them; the outcomes add up to `blocks`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PutStatus {
    /// Blocks given.
    pub blocks: u64,
    /// Of these, stored.
    pub stored: u64,
    /// Of these, known by their content.
    pub deduplicated: u64,
    /// Of these, there already.
    pub present: u64,
    /// Of these, refused because the key names other bytes.
    pub conflicts: u64,
    /// Of these, not taken.
    pub declined: u64,
    /// Of these, failed.
    pub failures: u64,
    /// Bytes written into the first tier.
    pub bytes: u64,
}

/// One tier.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct TierStatus {
    /// Its name, such as `dram` or `files`.
    pub name: String,
    /// Bytes it may use.
    pub capacity_bytes: u64,
    /// Bytes in use.
    pub used_bytes: u64,
    /// Blocks in it, where that is counted.
    pub blocks: Option<u64>,
    /// Files or other containers, where it has any.
    pub files: Option<u64>,
    /// Blocks served from it.
    pub hits: u64,
    /// Their bytes.
    pub hit_bytes: u64,
    /// Requested blocks that were matched in it.
    pub matched_blocks: u64,
    /// Blocks found damaged in it.
    pub damaged_blocks: u64,
    /// Headers, footers and other structures of its files that were found damaged.
    #[serde(default)]
    pub damaged_structures: u64,
    /// Whether it serves, where that is watched.
    pub health: Option<HealthStatus>,
    /// What an operator should know, such as a fallback that was taken.
    pub notes: Vec<String>,
}

/// Whether a tier is used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HealthState {
    /// It is used.
    #[default]
    Healthy,
    /// Its breaker is open: it is passed over.
    Open,
    /// Its breaker is open, and a probe is under way.
    Probing,
}

impl HealthState {
    /// Every state.
    pub const ALL: [Self; 3] = [Self::Healthy, Self::Open, Self::Probing];

    /// Its name in metrics and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Healthy => "healthy",
            Self::Open => "open",
            Self::Probing => "probing",
        }
    }
}

/// A tier's health.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct HealthStatus {
    /// Whether it is used.
    pub state: HealthState,
    /// Seconds in this state.
    pub since_s: f64,
    /// Times that its breaker opened.
    pub opened: u64,
    /// Calls that have not come back long after their deadline.
    pub stuck_calls: u64,
    /// What failed last.
    pub last_error: Option<String>,
    /// Whether it is read; while it is not, it counts as having no block.
    #[serde(default)]
    pub reads: HealthState,
    /// Whether it is written; while it is not, new blocks are kept above it alone.
    #[serde(default)]
    pub writes: HealthState,
}

/// What moved between tiers.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoverStatus {
    /// Blocks written to a lower tier.
    pub demoted_blocks: u64,
    /// Their bytes.
    pub demoted_bytes: u64,
    /// Blocks brought up from a lower tier.
    pub promoted_blocks: u64,
    /// Their bytes.
    pub promoted_bytes: u64,
    /// Bytes that wait to be written to lower tiers.
    pub pending_bytes: u64,
    /// Blocks that a lower tier failed to take.
    pub demote_failures: u64,
    /// Blocks that a lower tier never takes.
    pub demote_declines: u64,
    /// Names that a lower tier could not be told to learn or to forget.
    pub name_failures: u64,
    /// Blocks asked for by prefetch.
    pub prefetched_blocks: u64,
    /// Of these, read before they were evicted again.
    pub prefetched_used_blocks: u64,
}

/// What left the tiers to make room.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EvictionStatus {
    /// Blocks that left DRAM.
    pub blocks: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Of these, blocks that no other tier had.
    pub lost_blocks: u64,
    /// Blocks that a lower tier dropped.
    pub reclaimed_blocks: u64,
}

/// What is known of blocks.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CatalogStatus {
    /// Keys known in any tier.
    pub keys: u64,
    /// Distinct contents known in any tier.
    pub contents: u64,
    /// Bytes of the distinct contents, each counted once.
    pub content_bytes: u64,
    /// Memory of the catalog and the policy.
    pub memory_bytes: u64,
    /// Protected blocks in DRAM.
    pub protected_blocks: u64,
    /// Blocks that were to be protected, but the quota was full.
    pub protection_refused: u64,
}

/// The memory behind the DRAM tier.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolStatus {
    /// Its size.
    pub capacity_bytes: u64,
    /// Bytes that slabs hold, rounding included.
    pub reserved_bytes: u64,
    /// Bytes that slabs asked for.
    pub requested_bytes: u64,
    /// Free bytes, those kept ready for the sizes in use included.
    pub free_bytes: u64,
    /// The largest piece that is free in a row.
    pub largest_free_bytes: u64,
    /// Bytes on huge pages.
    pub huge_bytes: u64,
}

/// What another capacity of a tier would give.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ShadowStatus {
    /// The tier.
    pub tier: String,
    /// The capacity, in percent of the one it has.
    pub capacity_percent: u32,
    /// The same in bytes.
    pub capacity_bytes: u64,
    /// Share of the blocks requested by lookups that would match, 0 to 1.
    pub predicted_hit_rate: f64,
}

/// A prefix that is asked for often.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct HotPrefix {
    /// The key of its last block, in hexadecimal digits.
    pub key: String,
    /// Its length in blocks.
    pub depth_blocks: u64,
    /// Requests that asked for it lately.
    pub requests: u64,
    /// Bytes of it that are in a tier.
    pub resident_bytes: u64,
    /// Tiers that have some of it, fast to slow.
    pub tiers: Vec<String>,
}

/// What came back from before the last restart.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct WarmRestartStatus {
    /// Blocks found in the pool again.
    pub recovered_blocks: u64,
    /// Their bytes.
    pub recovered_bytes: u64,
    /// Records that were not trusted.
    pub rejected_records: u64,
    /// How long it took.
    pub recover_s: f64,
}

/// Who uses the Unix socket.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ClientsStatus {
    /// Clients connected.
    pub connected: u64,
    /// Of these, stopped by a signal.
    pub stopped: u64,
    /// Of these, holding leases without a word for a minute.
    pub silent: u64,
    /// Blocks under lease.
    pub leases: u64,
    /// Their bytes.
    pub leased_bytes: u64,
    /// Bytes that clients are filling.
    pub reserved_bytes: u64,
    /// Age of the oldest lease.
    pub oldest_lease_s: Option<f64>,
    /// Clients that were cut off or died while they held something.
    pub reaped: u64,
    /// The clients that hold most.
    pub list: Vec<ClientStatus>,
}

/// One client.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ClientStatus {
    /// Its process id.
    pub pid: u32,
    /// Its program's name.
    pub name: String,
    /// The tenant it is.
    pub tenant: String,
    /// Blocks it has leased.
    pub leases: u64,
    /// Their bytes.
    pub leased_bytes: u64,
    /// Bytes it is filling.
    pub reserved_bytes: u64,
    /// Age of its oldest lease.
    pub oldest_lease_s: Option<f64>,
    /// Seconds since its last request.
    pub silent_s: f64,
    /// Whether a signal stopped it.
    pub is_stopped: bool,
}

/// What the node did for its clients.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ServerStatus {
    /// Requests over the Unix socket, by operation.
    pub operations: Vec<OperationStatus>,
    /// Blocks found by each lookup.
    pub lookup_hit_blocks: Histogram,
    /// Share of each lookup's blocks that were found, 0 to 1.
    pub lookup_hit_ratio: Histogram,
    /// Connections over HTTP.
    pub http: HttpStatus,
}

/// Requests of one kind.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct OperationStatus {
    /// The operation.
    pub operation: String,
    /// Requests that failed as a whole.
    pub failures: u64,
    /// Seconds from a request's arrival to its answer.
    pub duration_s: Histogram,
    /// Blocks in a request.
    pub blocks: Histogram,
    /// Bytes of the blocks in a request.
    pub bytes: Histogram,
    /// Bytes a second of a request that moved bytes.
    pub bytes_per_second: Histogram,
}

/// Connections over HTTP.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HttpStatus {
    /// Connections now.
    pub connections: u64,
    /// Requests answered.
    pub requests: u64,
    /// Of these, refused for want of a token or of a name that is ours.
    pub refused: u64,
    /// Connections turned away because there were too many.
    pub turned_away: u64,
    /// TLS handshakes that failed.
    pub handshake_failures: u64,
}

/// Spans sent to a collector.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceStatus {
    /// Spans that the collector took.
    pub exported_spans: u64,
    /// Spans that were dropped because the collector was slow, away or refused them.
    pub lost_spans: u64,
}
