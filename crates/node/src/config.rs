//! Everything that a node needs to know, in one typed value that was checked.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

pub use cascade_store::KeepPool;
use cascade_store::StoreConfig;

mod admin_group;
mod build;
mod change;
mod check;
mod difference;
mod environment;
mod error;
mod file;
mod key;
mod keys;
mod reference;
mod renamed;
mod room;
mod settings;
mod value;

pub use admin_group::AdminGroup;
pub use change::{ShownKey, shown, with_value};
pub use check::SOCKET_PATH_BYTES_MAX;
pub use difference::{Difference, difference};
pub use environment::Environment;
pub use error::ConfigError;
pub use key::Key;
pub use keys::{KEYS, SECTIONS, TENANT_KEYS};
pub use reference::{example, reference};
pub use room::Room;
pub use settings::{Setting, Settings, Source};
pub use value::{Kind, Value};

/// A node's settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeConfig {
    /// The Unix socket for workers on this host.
    pub socket: PathBuf,
    /// Permissions of the socket's file. Default: 0600.
    pub socket_mode: u32,
    /// Users that may administer the node beside its own user and root.
    pub admin_group: Option<AdminGroup>,
    /// The TCP port for everything remote; nothing listens there without it.
    pub listen: Option<SocketAddr>,
    /// Who may use the TCP port.
    pub security: SecurityConfig,
    /// The store of the default tenant.
    pub store: StoreConfig,
    /// Tenants beside the default one, each with a store of its own.
    pub tenants: Vec<TenantConfig>,
    /// A file with the key that the default tenant's file tier is encrypted with.
    pub encryption_key_file: Option<PathBuf>,
    /// What clients may take.
    pub limits: LimitsConfig,
    /// Where the pool survives a crash of the node; without it the pool has no name. Default of
    /// the configuration file: `/dev/shm`.
    pub pool_directory: Option<PathBuf>,
    /// When the next node finds this one's blocks in DRAM.
    pub keep_pool: KeepPool,
    /// How long a clean shutdown may take. Default: 30 s.
    pub shutdown_timeout: Duration,
    /// What is written to standard error.
    pub log: LogConfig,
    /// Where traces go (an OTLP endpoint over HTTP). Default: nowhere.
    pub trace_endpoint: Option<String>,
    /// What set each key; empty in a configuration that was not loaded.
    pub settings: Settings,
}

/// Who may use the TCP port, and how the bytes travel.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SecurityConfig {
    /// A file with the token that callers present.
    pub token_file: Option<PathBuf>,
    /// The node's certificate chain, PEM.
    pub certificate: Option<PathBuf>,
    /// The certificate's private key, PEM.
    pub private_key: Option<PathBuf>,
    /// The CA certificate for client authentication (mutual TLS), PEM.
    pub client_authority: Option<PathBuf>,
}

/// One tenant: an identity with a store of its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TenantConfig {
    /// Its name in metrics and admin calls.
    pub name: String,
    /// Users of this host that are this tenant.
    pub users: Vec<u32>,
    /// A file with the token that proves this tenant.
    pub token_file: Option<PathBuf>,
    /// Its store: quotas are its tiers' capacities.
    pub store: StoreConfig,
    /// A file with the key that its file tier is encrypted with.
    pub encryption_key_file: Option<PathBuf>,
}

/// Bounds of what clients may take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LimitsConfig {
    /// Connections at a time. Default: 4096.
    pub connections_max: usize,
    /// Share of a tenant's DRAM that one client may hold leased or reserved, in percent.
    /// Default: 50.
    pub client_share_percent: u8,
    /// Threads that serve requests. Default: 64.
    pub threads_max: usize,
}

/// What is written to standard error.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LogConfig {
    /// One JSON object a line rather than text.
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
    /// The defaults, for a socket.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self {
            socket: socket.into(),
            socket_mode: 0o600,
            admin_group: None,
            listen: None,
            security: SecurityConfig::default(),
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

/// Where settings come from beside the built-in values and the environment.
#[derive(Debug, Clone, Default)]
pub struct Sources {
    /// The configuration file; else the one that `CASCADE_CONFIG` names.
    pub file: Option<PathBuf>,
    /// Keys that the command line sets, each with its text.
    pub flags: Vec<(&'static Key, String)>,
}

/// Reads all sources, the later winning: built-in values, file, environment, flags; and checks.
///
/// # Errors
/// What is wrong, where, and what would be right.
pub fn load(sources: &Sources, environment: &Environment) -> Result<NodeConfig, ConfigError> {
    let mut settings = Settings::built_in();
    if let Some(path) = sources.file.clone().or_else(|| environment.config_file()) {
        file::read(&path, &mut settings)?;
    }
    environment.apply(&mut settings)?;
    for (key, text) in &sources.flags {
        let place = Source::Flag(key.flag.unwrap_or(key.path));
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
