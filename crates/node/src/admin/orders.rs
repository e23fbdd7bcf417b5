//! Orders: what an administrator tells a node to do, and what a tenant may do with its own blocks.

use std::time::Duration;

use cascade_block::{BlockKey, Deadline, SystemClock, with_causes};
use cascade_store::CallOptions;
use serde::Deserialize;

use super::answers::{Changed, Cleared, Deleted, Drained, Flushed, Found, Identity, Reloaded};
use super::{reach, require_administrator};
use crate::Node;
use crate::config::{self, ShownKey};
use crate::explain;
use crate::status::NodeState;
use crate::tenants::{DEFAULT, Tenant};

/// Keys that one answer tells of those that begin with some digits.
const FOUND_MAX: usize = 16;
/// Keys of one order: they fit one message.
const KEYS_MAX: usize = 4096;

/// Whose blocks; the caller's own without a name.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct OfTenant {
    #[serde(default)]
    tenant: Option<String>,
}

/// The first digits of a key.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Find {
    #[serde(default)]
    tenant: Option<String>,
    digits: String,
}

/// Which blocks to delete.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Delete {
    #[serde(default)]
    tenant: Option<String>,
    keys: Vec<String>,
}

/// Which settings to show; all without names.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Show {
    #[serde(default)]
    keys: Vec<String>,
}

/// Which setting to change.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Set {
    key: String,
    value: String,
}

/// How to drain.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Drain {
    /// End the process once all is written.
    #[serde(default)]
    exit: bool,
    /// Take new clients and blocks again.
    #[serde(default)]
    cancel: bool,
}

pub(super) fn version(node: &Node, asks: &Tenant) -> Identity {
    Identity {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
        state: node.state(),
        socket: node.config().socket.display().to_string(),
        protocol: cascade_wire::VERSION,
        tenant: asks.name().to_owned(),
        is_administrator: asks.name() == DEFAULT,
    }
}

fn tenant_of<'a>(
    node: &'a Node,
    asks: &'a Tenant,
    name: Option<&str>,
) -> Result<&'a Tenant, String> {
    reach(node, asks, name.unwrap_or(asks.name()))
}

fn within(time: Duration) -> CallOptions {
    CallOptions { timeout: Some(time), ..CallOptions::default() }
}

pub(super) fn find(
    node: &Node,
    asks: &Tenant,
    asked: &Find,
    time: Duration,
) -> Result<Found, String> {
    let tenant = tenant_of(node, asks, asked.tenant.as_deref())?;
    let keys = explain::find(tenant.store(), &asked.digits, FOUND_MAX, within(time))?;
    Ok(Found { keys: keys.iter().map(ToString::to_string).collect() })
}

pub(super) fn flush(
    node: &Node,
    asks: &Tenant,
    asked: &OfTenant,
    time: Duration,
) -> Result<Vec<Flushed>, String> {
    match &asked.tenant {
        // Who administers the node flushes all of it.
        None if asks.name() == DEFAULT => Ok(flush_all(node, time)),
        name => Ok(vec![flush_one(tenant_of(node, asks, name.as_deref())?, time)]),
    }
}

fn flush_all(node: &Node, time: Duration) -> Vec<Flushed> {
    let deadline = Deadline::after(&SystemClock, time);
    let tenants = node.tenants().all().iter();
    tenants.map(|tenant| flush_one(tenant, deadline.remaining(&SystemClock))).collect()
}

fn flush_one(tenant: &Tenant, time: Duration) -> Flushed {
    let store = tenant.store();
    let mut told = store.flush_mark();
    let flushed = store.flush_since(&mut told, within(time));
    Flushed {
        tenant: tenant.name().to_owned(),
        error: flushed.err().map(|error| with_causes(&error)),
        pending_bytes: store.stats().pending_bytes,
    }
}

pub(super) fn delete(
    node: &Node,
    asks: &Tenant,
    asked: &Delete,
    time: Duration,
) -> Result<Deleted, String> {
    let tenant = tenant_of(node, asks, asked.tenant.as_deref())?;
    if asked.keys.len() > KEYS_MAX {
        return Err(format!("{} keys; one order takes {KEYS_MAX}", asked.keys.len()));
    }
    let keys = explain::keys(tenant.store(), &asked.keys, within(time))?;
    node.sessions().forget_pins(tenant, Some(&keys));
    let was_here = tenant.store().delete(&keys);
    tracing::info!(tenant = tenant.name(), keys = keys.len(), "blocks are deleted by order");
    let keys = keys.iter().map(BlockKey::to_string).collect();
    Ok(Deleted { tenant: tenant.name().to_owned(), keys, was_here })
}

pub(super) fn clear(node: &Node, asks: &Tenant, asked: &OfTenant) -> Result<Cleared, String> {
    let tenant = tenant_of(node, asks, asked.tenant.as_deref())?;
    let before = tenant.store().stats();
    node.sessions().forget_pins(tenant, None);
    tenant.store().clear();
    tracing::info!(tenant = tenant.name(), blocks = before.keys, "a tenant is cleared by order");
    let tenant = tenant.name().to_owned();
    Ok(Cleared { tenant, blocks: before.keys, bytes: before.content_bytes })
}

pub(super) fn config(node: &Node, asks: &Tenant, asked: &Show) -> Result<Vec<ShownKey>, String> {
    require_administrator(asks)?;
    config::shown(&node.current(), &asked.keys)
}

pub(super) fn set(node: &Node, asks: &Tenant, asked: &Set) -> Result<Changed, String> {
    require_administrator(asks)?;
    let before = node.current();
    let new = config::with_value(&before, &asked.key, &asked.value)?;
    node.follow(&new).map_err(|error| with_causes(&error))?;
    let value = |config: &crate::NodeConfig| {
        let shown = config::shown(config, std::slice::from_ref(&asked.key)).unwrap_or_default();
        shown.into_iter().next().and_then(|setting| setting.value)
    };
    let (key, now) = (asked.key.clone(), value(&new));
    tracing::info!(%key, now, "a setting is changed by order");
    Ok(Changed { key, before: value(&before), now })
}

/// Reads the configuration again and takes what a running node can take.
pub(crate) fn reload(node: &Node) -> Result<Reloaded, String> {
    let controls = node.controls().ok_or_else(no_process)?;
    let new = controls.read_again().map_err(|error| with_causes(&error))?;
    let found = node.follow(&new).map_err(|error| with_causes(&error))?;
    let (live, restart) = (found.live.join(", "), found.restart.join(", "));
    tracing::info!(%live, waits_for_restart = %restart, "the configuration was read again");
    Ok(Reloaded { changed: found.live, needs_restart: found.restart })
}

fn no_process() -> String {
    "this node runs inside another program; `cascade serve` takes this order".to_owned()
}

pub(super) fn drain(
    node: &Node,
    asks: &Tenant,
    asked: &Drain,
    time: Duration,
) -> Result<Drained, String> {
    require_administrator(asks)?;
    let stop = node.controls().map(|controls| &controls.stop);
    if asked.exit && stop.is_none() {
        return Err(no_process());
    }
    let state = if asked.cancel { NodeState::Serving } else { NodeState::Draining };
    node.set_state(state);
    tracing::info!(state = state.name(), exit = asked.exit, "draining, by order");
    let tenants = if asked.cancel { Vec::new() } else { flush_all(node, time) };
    let is_written = tenants.iter().all(|it| it.error.is_none() && it.pending_bytes == 0);
    // What is not written would be lost: the operator decides then.
    let is_ending = asked.exit && is_written;
    if let Some(stop) = stop.filter(|_| is_ending) {
        stop.notify_one();
    }
    let sessions = node.sessions().all();
    let clients = sessions.iter().filter(|session| !session.is_administrator()).count();
    let pid = std::process::id();
    Ok(Drained { state, pid, is_written, tenants, clients, is_ending })
}
