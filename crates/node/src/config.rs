//! The node's configuration: one typed value, loaded from all sources and checked.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

pub use cascade_store::KeepPool;
use cascade_store::StoreConfig;

mod admin_group;
mod build;
mod change;
mod check;
mod cluster;
mod default_capacity;
mod difference;
mod environment;
mod error;
mod file;
mod gpu_node;
mod key;
mod keys;
mod reference;
mod settings;
mod value;

pub use admin_group::AdminGroup;
pub use change::{SettingInfo, list_settings, with_value};
pub use cluster::ClusterSettings;
pub use default_capacity::AvailableSpace;
pub use difference::{ConfigDifference, difference};
pub use environment::Environment;
pub use error::ConfigError;
pub use gpu_node::GpuNodeConfig;
pub use key::SettingKey;
pub use keys::{KEYS, SECTIONS, TENANT_KEYS};
pub use reference::{example, reference};
pub use settings::{Setting, SettingSource, Settings};
pub use value::{SettingValue, ValueKind};

/// A node's settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeConfig {
    /// Path of the Unix socket for processes on this host.
    pub socket: PathBuf,
    /// Permissions of the socket file. Default: 0600.
    pub socket_mode: u32,
    /// Group whose members may administer the node, in addition to its own user and root.
    pub admin_group: Option<AdminGroup>,
    /// TCP address for HTTP. Default: none, and no port is opened.
    pub listen: Option<SocketAddr>,
    /// Authentication and TLS of the TCP port.
    pub security: SecurityConfig,
    /// The GPU whose memory holds the blocks, by its UUID. Default: none, and DRAM holds them. Its
    /// share of the memory is `StoreConfig::dram_bytes`.
    pub gpu: Option<String>,
    /// Memory of the GPU that stays free for others. Default: 512 MiB.
    pub gpu_reserve_bytes: u64,
    /// The node in the memory of a GPU that [`crate::process::run`] starts. Default: none.
    pub gpu_node: Option<GpuNodeConfig>,
    /// The cluster that the node takes part in. Default: none.
    pub cluster: Option<ClusterSettings>,
    /// The store of the default tenant.
    pub store: StoreConfig,
    /// All tenants except the default one, each with its own store.
    pub tenants: Vec<TenantConfig>,
    /// File with the encryption key of the default tenant's file tier.
    pub encryption_key_file: Option<PathBuf>,
    /// Limits for clients.
    pub limits: LimitsConfig,
    /// Directory of the pool file, which survives a crash of the node. Without it the pool is
    /// anonymous. The configuration file's default is `/dev/shm`.
    pub pool_directory: Option<PathBuf>,
    /// When the next start recovers blocks from the pool.
    pub keep_pool: KeepPool,
    /// Time limit of a clean shutdown. Default: 30 s.
    pub shutdown_timeout: Duration,
    /// Format and filter of the log, which goes to standard error.
    pub log: LogConfig,
    /// OTLP endpoint for traces, over HTTP. Default: none, and no traces are sent.
    pub trace_endpoint: Option<String>,
    /// The value and origin of each key. Empty in a configuration that was not loaded.
    pub settings: Settings,
}

/// Authentication and TLS of the TCP port.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SecurityConfig {
    /// File with the token that clients of the port must present.
    pub token_file: Option<PathBuf>,
    /// The node's certificate chain, PEM.
    pub certificate: Option<PathBuf>,
    /// The certificate's private key, PEM.
    pub private_key: Option<PathBuf>,
    /// The CA certificate for client authentication (mutual TLS), PEM.
    pub client_authority: Option<PathBuf>,
}

/// One tenant: an identity with its own store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TenantConfig {
    /// Name in metrics and admin commands.
    pub name: String,
    /// UIDs of this host that belong to this tenant.
    pub users: Vec<u32>,
    /// File with the token that authenticates this tenant.
    pub token_file: Option<PathBuf>,
    /// The tenant's store. The capacities of its tiers are the tenant's quotas.
    pub store: StoreConfig,
    /// File with the encryption key of the tenant's file tier.
    pub encryption_key_file: Option<PathBuf>,
}

/// Limits for clients.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LimitsConfig {
    /// Connection limit. Default: 4096.
    pub connections_max: usize,
    /// Share of a tenant's DRAM that one client may hold under lease or reserved, in percent.
    /// Default: 50.
    pub client_share_percent: u8,
    /// Threads that serve requests. Default: 64.
    pub threads_max: usize,
}

/// Format and filter of the log.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LogConfig {
    /// Whether to write one JSON object per line instead of text.
    pub json: bool,
    /// A filter such as `info` or `cascade_node=debug`. Default: `info`.
    pub filter: Option<String>,
}

impl Default for LimitsConfig {
    fn default() -> Self {
        Self { connections_max: 4096, client_share_percent: 50, threads_max: 64 }
    }
}

impl NodeConfig {
    /// The defaults, for a socket path.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self {
            socket: socket.into(),
            socket_mode: 0o600,
            admin_group: None,
            listen: None,
            security: SecurityConfig::default(),
            gpu: None,
            gpu_reserve_bytes: 512 << 20,
            gpu_node: None,
            cluster: None,
            store: StoreConfig::default(),
            tenants: Vec::new(),
            encryption_key_file: None,
            limits: LimitsConfig::default(),
            pool_directory: None,
            keep_pool: KeepPool::default(),
            shutdown_timeout: Duration::from_secs(30),
            log: LogConfig::default(),
            trace_endpoint: None,
            settings: Settings::default(),
        }
    }
}

/// Sources of settings, in addition to the built-in defaults and the environment.
#[derive(Debug, Clone, Default)]
pub struct ConfigSources {
    /// The configuration file. Without it, the file that `CASCADE_CONFIG` names is read.
    pub file: Option<PathBuf>,
    /// Keys set on the command line, each with its value as text.
    pub flags: Vec<(&'static SettingKey, String)>,
}

/// Reads all sources and checks the result. Later sources override earlier ones: built-in
/// defaults, file, environment, flags.
///
/// # Errors
/// The first setting that is wrong, with its place and the expected value.
pub fn load(sources: &ConfigSources, environment: &Environment) -> Result<NodeConfig, ConfigError> {
    let mut settings = Settings::built_in();
    if let Some(path) = sources.file.clone().or_else(|| environment.config_file()) {
        file::read(&path, &mut settings)?;
    }
    environment.apply(&mut settings)?;
    for (key, text) in &sources.flags {
        let place = SettingSource::Flag(key.flag.unwrap_or(key.path));
        let value = key.parse(text).map_err(|reason| {
            let place = place.clone();
            ConfigError::Value { key: key.path.to_owned(), reason, place }
        })?;
        settings.node.set(key, value, place);
    }
    let config = build::node_config(settings, environment)?;
    config.check()?;
    Ok(config)
}
