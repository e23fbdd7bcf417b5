//! The admin commands: what an administrator may do to a node, and a tenant to its own blocks.

use std::time::Duration;

use cascade_block::{BlockKey, with_causes};
use cascade_runtime::{Deadline, SystemClock};
use cascade_store::CallOptions;
use serde::Deserialize;

use super::responses::{
    ClearResult, DeleteResult, DrainResult, FlushResult, FoundKeys, NodeIdentity, ReloadResult,
    SettingChange,
};
use super::{find_tenant, require_administrator};
use crate::config::{self, KeepPool, SettingInfo};
use crate::gpu_node::GpuNodeStatus;
use crate::resize::{self, FILES_CAPACITY};
use crate::status::NodeState;
use crate::tenants::{DEFAULT_TENANT, Tenant};
use crate::{Node, explain};

/// Maximum number of keys in a response to `find`.
const FOUND_MAX: usize = 16;
/// Maximum number of keys in one request; so many fit one message.
const KEYS_MAX: usize = 4096;

/// Arguments of `flush` and `clear`: the tenant, by default the caller's own.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TenantArgument {
    #[serde(default)]
    tenant: Option<String>,
}

/// Arguments of `find`: the first digits of a key.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Find {
    #[serde(default)]
    tenant: Option<String>,
    digits: String,
}

/// Arguments of `delete`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Delete {
    #[serde(default)]
    tenant: Option<String>,
    keys: Vec<String>,
}

/// Arguments of `config`: the keys of the settings to show, none for all.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ShowConfig {
    #[serde(default)]
    keys: Vec<String>,
}

/// Arguments of `config-set`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SetConfig {
    key: String,
    value: String,
}

/// Arguments of `drain`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Drain {
    /// Shut the process down once every block is written.
    #[serde(default)]
    exit: bool,
    /// Cancel a drain: accept clients and blocks again.
    #[serde(default)]
    cancel: bool,
}

pub(super) fn version(node: &Node, caller: &Tenant) -> NodeIdentity {
    NodeIdentity {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
        state: node.state(),
        socket: node.config().socket.display().to_string(),
        protocol: cascade_wire::VERSION,
        tenant: caller.name().to_owned(),
        is_administrator: caller.name() == DEFAULT_TENANT,
    }
}

pub(super) fn named_or_own<'a>(
    node: &'a Node,
    caller: &'a Tenant,
    name: Option<&str>,
) -> Result<&'a Tenant, String> {
    find_tenant(node, caller, name.unwrap_or(caller.name()))
}

fn with_timeout(time: Duration) -> CallOptions {
    CallOptions { timeout: Some(time), ..CallOptions::default() }
}

pub(super) fn find(
    node: &Node,
    caller: &Tenant,
    request: &Find,
    time: Duration,
) -> Result<FoundKeys, String> {
    let tenant = named_or_own(node, caller, request.tenant.as_deref())?;
    let keys =
        explain::find_by_prefix(tenant.store(), &request.digits, FOUND_MAX, with_timeout(time))?;
    Ok(FoundKeys { keys: keys.iter().map(ToString::to_string).collect() })
}

pub(super) fn flush(
    node: &Node,
    caller: &Tenant,
    request: &TenantArgument,
    time: Duration,
) -> Result<Vec<FlushResult>, String> {
    match &request.tenant {
        // An administrator that names no tenant flushes all of them.
        None if caller.name() == DEFAULT_TENANT => Ok(flush_all(node, time)),
        name => Ok(vec![flush_one(node, named_or_own(node, caller, name.as_deref())?, time)]),
    }
}

/// Flushes every tenant under one deadline for all.
fn flush_all(node: &Node, time: Duration) -> Vec<FlushResult> {
    let deadline = Deadline::after(&SystemClock, time);
    let tenants = node.tenants().all().iter();
    tenants.map(|tenant| flush_one(node, tenant, deadline.remaining(&SystemClock))).collect()
}

fn flush_one(node: &Node, tenant: &Tenant, time: Duration) -> FlushResult {
    let store = tenant.store();
    let mut mark = store.flush_mark();
    let flushed = store.flush_since(&mut mark, with_timeout(time));
    let stats = store.stats();
    let is_kept = !stats.stages.is_empty() || node.config().keep_pool == KeepPool::Always;
    FlushResult {
        tenant: tenant.name().to_owned(),
        error: flushed.err().map(|error| with_causes(&error)),
        pending_bytes: stats.pending_bytes,
        unkept_blocks: if is_kept { 0 } else { stats.keys },
    }
}

pub(super) fn delete(
    node: &Node,
    caller: &Tenant,
    request: &Delete,
    time: Duration,
) -> Result<DeleteResult, String> {
    let tenant = named_or_own(node, caller, request.tenant.as_deref())?;
    if request.keys.len() > KEYS_MAX {
        let count = request.keys.len();
        return Err(format!(
            "cannot delete {count} blocks in one request; send at most {KEYS_MAX}"
        ));
    }
    let keys = explain::resolve_keys(tenant.store(), &request.keys, with_timeout(time))?;
    node.sessions().drop_pins(tenant, Some(&keys));
    let was_here = tenant.store().delete(&keys);
    tracing::info!(tenant = tenant.name(), keys = keys.len(), "blocks were deleted on request");
    let keys = keys.iter().map(BlockKey::to_string).collect();
    Ok(DeleteResult { tenant: tenant.name().to_owned(), keys, was_here })
}

pub(super) fn clear(
    node: &Node,
    caller: &Tenant,
    request: &TenantArgument,
) -> Result<ClearResult, String> {
    let tenant = named_or_own(node, caller, request.tenant.as_deref())?;
    let before = tenant.store().stats();
    node.sessions().drop_pins(tenant, None);
    tenant.store().clear();
    let blocks = before.keys;
    tracing::info!(tenant = tenant.name(), blocks, "a tenant's blocks were cleared on request");
    let tenant = tenant.name().to_owned();
    Ok(ClearResult { tenant, blocks, bytes: before.content_bytes })
}

pub(super) fn config(
    node: &Node,
    caller: &Tenant,
    request: &ShowConfig,
) -> Result<Vec<SettingInfo>, String> {
    require_administrator(caller)?;
    config::list_settings(&node.current_config(), &request.keys)
}

pub(super) fn set(
    node: &Node,
    caller: &Tenant,
    request: &SetConfig,
    time: Duration,
) -> Result<SettingChange, String> {
    require_administrator(caller)?;
    let (before, new) = loop {
        let before = node.current_config();
        let new = config::with_value(&before, &request.key, &request.value)?;
        // Each repetition means that another change succeeded.
        // The rest is for the answer.
        let changed = node.apply_change(&before, &new, &request.key, time / 10 * 9);
        if changed.map_err(|error| with_causes(&error))? {
            break (before, new);
        }
    };
    let value = |config: &crate::NodeConfig| {
        let shown =
            config::list_settings(config, std::slice::from_ref(&request.key)).unwrap_or_default();
        shown.into_iter().next().and_then(|setting| setting.value)
    };
    let (key, now) = (request.key.clone(), value(&new));
    tracing::info!(%key, now, "a setting was changed on request");
    let is_files = key == FILES_CAPACITY;
    let note = is_files.then(|| resize::shrinking_files(node.tenants())).flatten();
    Ok(SettingChange { key, before: value(&before), now, note })
}

/// Loads the configuration again and applies the settings that a running node can change. Reads the
/// token and the certificates of the HTTP port again, from the files that were set at the start.
pub(crate) fn reload(node: &Node) -> Result<ReloadResult, String> {
    let controls = node.controls().ok_or_else(embedded_node)?;
    let new = controls.load_config().map_err(|error| with_causes(&error))?;
    // The files first: if one is refused, the settings stay as they are.
    if let Some(access) = controls.http_access.get() {
        access.reload(&node.config().security).map_err(|error| with_causes(&error))?;
    }
    let difference = node.apply_config(&new).map_err(|error| with_causes(&error))?;
    let (live, restart) = (difference.live.join(", "), difference.restart.join(", "));
    tracing::info!(changed = %live, needs_restart = %restart, "the configuration was reloaded");
    Ok(ReloadResult { changed: difference.live, needs_restart: difference.restart })
}

fn embedded_node() -> String {
    "this node is embedded in another program; only `cascade serve` supports this command"
        .to_owned()
}

pub(super) fn drain(
    node: &Node,
    caller: &Tenant,
    request: &Drain,
    time: Duration,
) -> Result<DrainResult, String> {
    require_administrator(caller)?;
    let stop = node.controls().map(|controls| &controls.stop);
    if request.exit && stop.is_none() {
        return Err(embedded_node());
    }
    let state = if request.cancel { NodeState::Serving } else { NodeState::Draining };
    // The state first: no new slabs are granted while the flush runs.
    node.set_state(state);
    tracing::info!(
        state = state.name(),
        exit = request.exit,
        "the node's state was set on request"
    );
    let tenants = if request.cancel { Vec::new() } else { flush_all(node, time) };
    let is_written = tenants.iter().all(|it| it.error.is_none() && it.pending_bytes == 0);
    // With unwritten blocks the node keeps running: the operator decides whether to lose them.
    let is_ending = request.exit && is_written;
    if let Some(stop) = stop.filter(|_| is_ending) {
        stop.notify_one();
    }
    let sessions = node.sessions().all();
    let clients = sessions.iter().filter(|session| !session.is_administrator()).count();
    let pid = std::process::id();
    Ok(DrainResult { state, pid, is_written, tenants, clients, is_ending })
}

/// Starts the node of the GPU, unless it runs. Returns what it did before.
pub(super) fn start_hbm(node: &Node, caller: &Tenant) -> Result<GpuNodeStatus, String> {
    require_administrator(caller)?;
    let gpu = node.gpu_node().ok_or("this node has no GPU; set gpu and hbm, and restart it")?;
    let before = gpu.status();
    gpu.start();
    Ok(before)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{ConfigSources, Environment, load, with_value};

    /// Each change is made from a copy of the configuration. The slower of two changes at the same
    /// time restored the old value of the other setting, and both were reported as done.
    #[test]
    fn a_change_does_not_undo_another_that_was_applied_meanwhile() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("cascade.sock");
        let variables = [
            ("CASCADE_SOCKET", socket.to_str().unwrap()),
            ("CASCADE_DRAM", "4MiB"),
            ("CASCADE_HUGE_PAGES", "false"),
            ("CASCADE_KEEP_POOL", "never"),
        ];
        let config = load(&ConfigSources::default(), &Environment::new(variables, 1000)).unwrap();
        let node = Node::open(config).unwrap();
        let before = node.current_config();
        let slower = with_value(&before, "client_share", "10%").unwrap();
        let caller = node.tenants().by_name(DEFAULT_TENANT).unwrap();
        let request = |key: &str, value: &str| SetConfig { key: key.into(), value: value.into() };
        let time = Duration::from_secs(10);
        set(&node, caller, &request("connections_max", "100"), time).unwrap();
        let is_applied = node.apply_change(&before, &slower, "client_share", time).unwrap();
        assert!(!is_applied, "`before` is no longer in force");
        set(&node, caller, &request("client_share", "10%"), time).unwrap();
        let live = node.live_settings();
        assert_eq!((live.connections_max, live.client_share_percent), (100, 10));
    }
}
