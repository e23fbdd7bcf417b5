//! The admin topics that clients send over the Unix socket; requests and responses are JSON.

mod commands;
mod listing;
mod responses;

use std::time::Duration;

use cascade_block::with_causes;
use cascade_store::CallOptions;
use serde::Serialize;

use crate::Node;
use crate::explain::{ChainReport, ExplainRequest};
use crate::status::StatusView;
use crate::tenants::{DEFAULT_TENANT, Leftover, Receipt, Tenant};

pub(crate) use commands::reload;
pub use responses::{
    ClearResult, DeleteResult, DrainResult, FlushResult, FoundKeys, KeyListing, KeyRow,
    NodeIdentity, ReloadResult, SettingChange,
};

/// All topics, for the error message about an unknown one.
const TOPICS: &str = "status, stats, explain, find, keys, version, flush, delete, clear, forget, \
                      config, config-set, reload, drain, hbm-start";

/// Executes an admin request. The default tenant may name every tenant; the others only themselves.
pub(crate) fn answer(
    node: &Node,
    caller: &Tenant,
    topic: &str,
    arguments: &str,
    time: Duration,
) -> Result<String, String> {
    match topic {
        "status" => json(&status(node, caller)),
        "stats" => json(&caller.store().stats()),
        "explain" => {
            let request: Explain = parse(topic, arguments)?;
            let tenant = request.tenant.as_deref().unwrap_or(caller.name());
            let tenant = find_tenant(node, caller, tenant)?;
            let options = CallOptions { timeout: Some(time), ..CallOptions::default() };
            json(&ChainReport::query(tenant.store(), &request.question, options)?)
        }
        "find" => json(&commands::find(node, caller, &parse(topic, arguments)?, time)?),
        "keys" => json(&listing::keys(node, caller, &parse(topic, arguments)?, time)?),
        "version" => json(&commands::version(node, caller)),
        "flush" => json(&commands::flush(node, caller, &parse(topic, arguments)?, time)?),
        "delete" => json(&commands::delete(node, caller, &parse(topic, arguments)?, time)?),
        "clear" => json(&commands::clear(node, caller, &parse(topic, arguments)?)?),
        "config" => json(&commands::config(node, caller, &parse(topic, arguments)?)?),
        "config-set" => json(&commands::set(node, caller, &parse(topic, arguments)?, time)?),
        "reload" => {
            require_administrator(caller)?;
            json(&reload(node)?)
        }
        "drain" => json(&commands::drain(node, caller, &parse(topic, arguments)?, time)?),
        "hbm-start" => json(&commands::start_hbm(node, caller)?),
        "forget" => {
            let Forget { tenant } = parse(topic, arguments)?;
            json(&forget(node, caller, &tenant, time)?)
        }
        _ => Err(format!("unknown admin topic {topic:?}; the topics are {TOPICS}")),
    }
}

fn json(value: &impl Serialize) -> Result<String, String> {
    serde_json::to_string(value).map_err(|error| error.to_string())
}

fn parse<'a, T: serde::Deserialize<'a>>(topic: &str, arguments: &'a str) -> Result<T, String> {
    serde_json::from_str(arguments).map_err(|error| format!("arguments of {topic}: {error}"))
}

/// A tenant by name, if the caller has access to it.
///
/// A tenant without access gets the same error whether or not `name` exists, so that it cannot
/// probe for the names of others.
fn find_tenant<'a>(node: &'a Node, caller: &Tenant, name: &str) -> Result<&'a Tenant, String> {
    let has_access = caller.name() == name || caller.name() == DEFAULT_TENANT;
    let found = node.tenants().by_name(name).filter(|_| has_access);
    found.map(AsRef::as_ref).ok_or_else(|| {
        if caller.name() == DEFAULT_TENANT {
            let names = node.tenants().all().iter().map(|tenant| tenant.name());
            let names: Vec<&str> = names.collect();
            return format!("there is no tenant {name:?}; the tenants are {}", names.join(", "));
        }
        let caller = caller.name();
        format!("tenant {caller:?} has no access to tenant {name:?}, or there is no such tenant")
    })
}

/// Rejects a request about the whole node unless the caller is the default tenant.
fn require_administrator(caller: &Tenant) -> Result<(), String> {
    if caller.name() == DEFAULT_TENANT {
        return Ok(());
    }
    Err(format!(
        "tenant {:?} is no administrator of this node; run the command as the node's own user, as \
         root or as a member of admin_group",
        caller.name()
    ))
}

/// The status as the caller may see it: a tenant other than the default one sees only itself and
/// its own clients.
fn status(node: &Node, caller: &Tenant) -> crate::status::Status {
    node.status().seen_by(&StatusView::of_tenant(caller), node.clients())
}

/// Arguments of `explain`.
#[derive(Debug, serde::Deserialize)]
struct Explain {
    #[serde(default)]
    tenant: Option<String>,
    #[serde(flatten)]
    question: ExplainRequest,
}

/// Arguments of `forget`.
#[derive(Debug, serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Forget {
    tenant: String,
}

/// Erases a tenant's blocks. A tenant may erase itself, the default tenant may erase any.
fn forget(node: &Node, caller: &Tenant, name: &str, time: Duration) -> Result<Receipt, String> {
    let tenant = find_tenant(node, caller, name)?;
    tracing::info!(tenant = name, requested_by = caller.name(), "erasing a tenant's blocks");
    // The erase removes pinned blocks too: the sessions' records of their pins are void.
    node.sessions().drop_pins(tenant, None);
    let mut receipt = tenant.forget(time).map_err(|error| with_causes(&error))?;
    if receipt.memory.held_bytes > 0 {
        let held = |client: &crate::ClientSnapshot| client.leased_bytes + client.reserved_bytes;
        let holders = node.clients().into_iter();
        let holders = holders.filter(|client| client.tenant == name && held(client) > 0);
        receipt.left.extend(holders.map(|client| Leftover {
            what: format!("client {:?}, process {}", client.name, client.process),
            why: format!("holds {} bytes; they are zeroed when it exits", held(&client)),
        }));
    }
    tracing::info!(tenant = name, complete = receipt.is_complete, "a tenant's blocks were erased");
    Ok(receipt)
}
