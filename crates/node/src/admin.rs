//! What administrators ask over the Unix socket, in words and JSON.

mod answers;
mod orders;

use std::time::Duration;

use cascade_store::CallOptions;
use serde::Serialize;

use crate::Node;
use crate::explain::{ChainStory, Question};
use crate::status::View;
use crate::tenants::{DEFAULT, Leftover, Receipt, Tenant};

pub use answers::{Changed, Cleared, Deleted, Drained, Flushed, Found, Identity, Reloaded};
pub(crate) use orders::reload;

/// Topics that there are.
const TOPICS: &str = "status, stats, explain, find, version, flush, delete, clear, forget, config, \
                      config-set, reload, drain";

/// Answers a question. A tenant may ask about itself; the node's own user about all.
pub(crate) fn answer(
    node: &Node,
    asks: &Tenant,
    topic: &str,
    arguments: &str,
    time: Duration,
) -> Result<String, String> {
    match topic {
        "status" => json(&status(node, asks)),
        "stats" => json(&asks.store().stats()),
        "explain" => {
            let asked: Explain = read(topic, arguments)?;
            let tenant = asked.tenant.as_deref().unwrap_or(asks.name());
            let tenant = reach(node, asks, tenant)?;
            let options = CallOptions { timeout: Some(time), ..CallOptions::default() };
            json(&ChainStory::of(tenant.store(), &asked.question, options)?)
        }
        "find" => json(&orders::find(node, asks, &read(topic, arguments)?, time)?),
        "version" => json(&orders::version(node, asks)),
        "flush" => json(&orders::flush(node, asks, &read(topic, arguments)?, time)?),
        "delete" => json(&orders::delete(node, asks, &read(topic, arguments)?, time)?),
        "clear" => json(&orders::clear(node, asks, &read(topic, arguments)?)?),
        "config" => json(&orders::config(node, asks, &read(topic, arguments)?)?),
        "config-set" => json(&orders::set(node, asks, &read(topic, arguments)?)?),
        "reload" => {
            require_administrator(asks)?;
            json(&reload(node)?)
        }
        "drain" => json(&orders::drain(node, asks, &read(topic, arguments)?, time)?),
        "forget" => {
            let Forget { tenant } = read(topic, arguments)?;
            json(&forget(node, asks, &tenant, time)?)
        }
        _ => Err(format!("there is no topic {topic:?}; there are {TOPICS}")),
    }
}

fn json(value: &impl Serialize) -> Result<String, String> {
    serde_json::to_string(value).map_err(|error| error.to_string())
}

fn read<'a, T: serde::Deserialize<'a>>(topic: &str, arguments: &'a str) -> Result<T, String> {
    serde_json::from_str(arguments).map_err(|error| format!("{topic}: {error}"))
}

/// A tenant by name, if who asks may know of it. Who may not is not told which there are.
fn reach<'a>(node: &'a Node, asks: &Tenant, name: &str) -> Result<&'a Tenant, String> {
    let may_ask = asks.name() == name || asks.name() == DEFAULT;
    let found = node.tenants().named(name).filter(|_| may_ask);
    found.map(AsRef::as_ref).ok_or_else(|| {
        if asks.name() == DEFAULT {
            let names = node.tenants().all().iter().map(|tenant| tenant.name());
            let names: Vec<&str> = names.collect();
            return format!("there is no tenant {name:?}; tenants: {}", names.join(", "));
        }
        let asks = asks.name();
        format!("tenant {asks:?} has no say over {name:?}: it is not its own, or there is none")
    })
}

/// Refuses what concerns the whole node to tenants other than the node's own.
fn require_administrator(asks: &Tenant) -> Result<(), String> {
    if asks.name() == DEFAULT {
        return Ok(());
    }
    Err(format!(
        "tenant {:?} does not administer this node; its own user, root and members of \
         admin_group do",
        asks.name()
    ))
}

/// A tenant that is not the node's own sees itself and its own clients alone.
fn status(node: &Node, asks: &Tenant) -> crate::status::Status {
    node.status().seen_by(&View::of_tenant(asks), node)
}

/// Which chain to explain, and whose.
#[derive(Debug, serde::Deserialize)]
struct Explain {
    #[serde(default)]
    tenant: Option<String>,
    #[serde(flatten)]
    question: Question,
}

/// Which tenant to forget.
#[derive(Debug, serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Forget {
    tenant: String,
}

/// Forgets a tenant: its own people may ask for that, and the node's own user for every tenant.
fn forget(node: &Node, asks: &Tenant, name: &str, time: Duration) -> Result<Receipt, String> {
    let tenant = reach(node, asks, name)?;
    tracing::info!(tenant = name, asked_by = asks.name(), "everything of a tenant is removed");
    node.sessions().forget_pins(tenant, None);
    let mut receipt = tenant.forget(time).map_err(|error| error.to_string())?;
    if receipt.memory.held_bytes > 0 {
        let held = |client: &crate::SessionFacts| client.leased_bytes + client.reserved_bytes;
        let holders = node.clients().into_iter();
        let holders = holders.filter(|client| client.tenant == name && held(client) > 0);
        receipt.left.extend(holders.map(|client| Leftover {
            what: format!("client {:?}, process {}", client.name, client.process),
            why: format!("holds {} bytes; end it, and they are zeroed", held(&client)),
        }));
    }
    tracing::info!(tenant = name, complete = receipt.is_complete, "a tenant was forgotten");
    Ok(receipt)
}
