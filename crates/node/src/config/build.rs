//! Builds the typed configuration from settings, and derives defaults that depend on other keys.

use std::path::Path;

use cascade_block::{DigestAlgorithm, DigestMode};
use cascade_store::{FilesConfig, HealthConfig, IoEngine, PolicyKind, StoreConfig, WritePolicy};

use super::admin_group::{AdminGroup, user_id};
use super::cluster::ClusterSettings;
use super::default_capacity;
use super::environment::Environment;
use super::error::ConfigError;
use super::gpu_node::{GpuNodeConfig, pipeline_below_hbm};
use super::settings::{SettingSource, Settings, Values};
use super::value::SettingValue;
use super::{KeepPool, LimitsConfig, LogConfig, NodeConfig, SecurityConfig, TenantConfig};

const MIB: u64 = 1 << 20;

/// The configuration that the settings describe. Contradictions are checked separately.
pub(super) fn node_config(
    mut settings: Settings,
    environment: &Environment,
) -> Result<NodeConfig, ConfigError> {
    // In this order: the default of `segment_size` depends on `files_capacity`.
    derive_files_capacity(&mut settings, environment);
    set_derived_defaults(&mut settings.node, environment);
    let values = &settings.node;
    let mut store = store_config(values);
    let new = NodeConfig::new(values.path("socket").unwrap_or_default());
    let below_hbm = pipeline_below_hbm(&store.pipeline).map(str::to_owned);
    let (gpu, gpu_node) = match (values.text("gpu"), below_hbm) {
        (Some(uuid), Some(below)) => {
            store.pipeline = below;
            (None, Some(GpuNodeConfig::beside(&new.socket, uuid)))
        }
        (gpu, _) => (gpu, None),
    };
    if let (Some(_), Some(bytes)) = (&gpu, values.bytes("hbm")) {
        store.dram_bytes = bytes;
    }
    let tenants = settings.tenants.iter().map(|tenant| tenant_config(tenant, &store, environment));
    let tenants = tenants.collect::<Result<_, _>>()?;
    let keep_pool = match values.choice("keep_pool") {
        "always" => KeepPool::Always,
        "never" => KeepPool::Never,
        _ => KeepPool::AfterCrash,
    };
    let pool_directory = values.path("pool_directory");
    let has_gpu = gpu.is_some();
    let limits = LimitsConfig::default();
    let admin_group = admin_group(values, environment)?;
    Ok(NodeConfig {
        admin_group,
        socket_mode: values.mode("socket_mode").unwrap_or(new.socket_mode),
        listen: values.address("listen"),
        security: SecurityConfig {
            token_file: values.path("token_file"),
            certificate: values.path("tls_certificate"),
            private_key: values.path("tls_private_key"),
            client_authority: values.path("tls_client_ca"),
        },
        gpu,
        gpu_reserve_bytes: values.bytes("hbm_reserve").unwrap_or(new.gpu_reserve_bytes),
        gpu_node,
        cluster: ClusterSettings::of(values)?,
        store,
        tenants,
        encryption_key_file: values.path("encryption_key_file"),
        limits: LimitsConfig {
            connections_max: values.count("connections_max").unwrap_or(limits.connections_max),
            client_share_percent: values
                .percent("client_share")
                .unwrap_or(limits.client_share_percent),
            threads_max: values.count("threads_max").unwrap_or(limits.threads_max),
        },
        pool_directory: pool_directory.filter(|_| keep_pool != KeepPool::Never && !has_gpu),
        keep_pool,
        shutdown_timeout: values.duration("shutdown_timeout").unwrap_or(new.shutdown_timeout),
        log: LogConfig {
            json: values.choice("log_format") == "json",
            filter: values.text("log_filter"),
        },
        trace_endpoint: values.text("traces_endpoint"),
        settings,
        ..new
    })
}

fn admin_group(
    values: &Values,
    environment: &Environment,
) -> Result<Option<AdminGroup>, ConfigError> {
    let Some(name) = values.text("admin_group") else { return Ok(None) };
    let found = AdminGroup::find(&name, &environment.groups, &environment.passwd);
    found.map(Some).ok_or_else(|| ConfigError::Value {
        key: "admin_group".to_owned(),
        reason: format!(
            "{} has no group {name:?}; use a group name from it, or a GID (`getent group` lists \
             both)",
            environment.groups.display()
        ),
        place: values.source("admin_group"),
    })
}

/// Sets defaults that depend on other settings, where the key is not set.
fn set_derived_defaults(values: &mut Values, environment: &Environment) {
    values.set_default("socket", SettingValue::Path(environment.default_socket()));
    let has_gpu = values.text("gpu").is_some();
    let stages = [
        ("Hbm", has_gpu),
        ("Dram", !has_gpu || values.is_given("dram")),
        ("Files", values.path("files").is_some()),
    ];
    let stages = stages.iter().filter(|(_, is_there)| *is_there).map(|(stage, _)| *stage);
    let pipeline = stages.collect::<Vec<_>>().join("|");
    values.set_default("pipeline", SettingValue::Text(pipeline));
    let capacity = values.bytes("files_capacity").unwrap_or_default();
    values.set_default("segment_size", SettingValue::Size(default_segment_bytes(capacity)));
}

/// Without `files_capacity`, the file tier takes a share of the space on its file system. Tenants
/// without a quota get equal parts of this share.
fn derive_files_capacity(settings: &mut Settings, environment: &Environment) {
    let Some(directory) = settings.node.path("files") else { return };
    if settings.node.bytes("files_capacity").is_some() {
        return;
    }
    // A tenant with its own directory is probably on another disk, so it takes no part.
    let below = settings.tenants.iter().filter(|it| it.path("tenant.files").is_none());
    let quotas: Vec<Option<u64>> =
        below.map(|tenant| tenant.bytes("tenant.files_capacity")).collect();
    let reserved = quotas.iter().flatten().fold(0, |sum: u64, bytes| sum.saturating_add(*bytes));
    let shares = 1 + quotas.iter().filter(|quota| quota.is_none()).count() as u64;
    let room = (environment.available_space)(&directory);
    let (bytes, reason) = default_capacity::capacity(&directory, room, reserved, shares);
    let source = SettingSource::Derived(reason);
    settings.node.set_default_from("files_capacity", SettingValue::Size(bytes), source);
}

/// A sixteenth of the tier: reclaim drops one segment at a time, so each drops at most that share.
fn default_segment_bytes(capacity_bytes: u64) -> u64 {
    (capacity_bytes / 16).clamp(MIB, 256 * MIB).next_power_of_two()
}

fn store_config(values: &Values) -> StoreConfig {
    let built_in = StoreConfig::default();
    StoreConfig {
        pipeline: values.text("pipeline").unwrap_or(built_in.pipeline),
        dram_bytes: values.bytes("dram").unwrap_or(built_in.dram_bytes),
        huge_pages: values.is_on("huge_pages"),
        files: values.path("files").map(|directory| files_config(&directory, values)),
        policy: match values.choice("policy") {
            "lru" => PolicyKind::Lru,
            "s3fifo" => PolicyKind::S3Fifo,
            "arc" => PolicyKind::Arc,
            "waterfall" => PolicyKind::Waterfall,
            _ => PolicyKind::PrefixCost,
        },
        digest: match values.choice("digest") {
            "blake3" => DigestMode::On(DigestAlgorithm::Blake3),
            "sha256" => DigestMode::On(DigestAlgorithm::Sha256),
            _ => DigestMode::Off,
        },
        write: match values.choice("write") {
            "through" => WritePolicy::Through,
            _ => WritePolicy::Back,
        },
        dirty_bytes_max: values.bytes("dirty_max"),
        mover_bytes_per_second: values.bytes("mover_rate"),
        protected_percent: values.percent("protected_share").unwrap_or(built_in.protected_percent),
        admit_partial: values.is_on("admit_partial"),
        changes_max: values.count("changes_max").unwrap_or(built_in.changes_max),
        timeout: values.duration("timeout").unwrap_or(built_in.timeout),
        health: health_config(values),
        ..built_in
    }
}

fn health_config(values: &Values) -> HealthConfig {
    let built_in = HealthConfig::default();
    let count = |path| values.count(path).and_then(|count| u32::try_from(count).ok());
    HealthConfig {
        probe_interval: values.duration("probe_interval").unwrap_or(built_in.probe_interval),
        probe_timeout: values.duration("probe_timeout").unwrap_or(built_in.probe_timeout),
        window: count("failure_window").unwrap_or(built_in.window),
        threshold: count("failure_threshold").unwrap_or(built_in.threshold),
    }
}

fn files_config(directory: &Path, values: &Values) -> FilesConfig {
    let built_in = FilesConfig::new(directory);
    FilesConfig {
        capacity_bytes: values.bytes("files_capacity").unwrap_or(built_in.capacity_bytes),
        segment_bytes: values.bytes("segment_size").unwrap_or(built_in.segment_bytes),
        direct: values.is_on("direct_io"),
        engine: match values.choice("io_engine") {
            "uring" => IoEngine::Uring,
            "psync" => IoEngine::Psync,
            _ => IoEngine::Auto,
        },
        durable: values.is_on("durable"),
        ..built_in
    }
}

/// A tenant's store has the default tenant's settings, with its own quotas and directory.
fn tenant_config(
    values: &Values,
    default: &StoreConfig,
    environment: &Environment,
) -> Result<TenantConfig, ConfigError> {
    let name = values.text("tenant.name").unwrap_or_default();
    let mut store = default.clone();
    if let Some(bytes) = values.bytes("tenant.dram") {
        store.dram_bytes = bytes;
        store.dirty_bytes_max = store.dirty_bytes_max.map(|dirty| dirty.min(bytes));
    }
    if let Some(files) = &mut store.files {
        let below = || files.directory.join("tenants").join(&name);
        files.directory = values.path("tenant.files").unwrap_or_else(below);
        if let Some(bytes) = values.bytes("tenant.files_capacity") {
            files.capacity_bytes = bytes;
            files.segment_bytes = files.segment_bytes.min(default_segment_bytes(bytes));
        }
    }
    let users = values.list("tenant.users").iter().map(|user| {
        user_id(user, &environment.passwd).ok_or_else(|| ConfigError::Value {
            key: format!("tenant.users of {name:?}"),
            reason: format!(
                "{} has no user {user:?}; use the UID instead (`id -u {user}` prints it)",
                environment.passwd.display()
            ),
            place: values.source("tenant.users"),
        })
    });
    Ok(TenantConfig {
        users: users.collect::<Result<_, _>>()?,
        token_file: values.path("tenant.token_file"),
        encryption_key_file: values.path("tenant.encryption_key_file"),
        store,
        name,
    })
}
