//! What administrators ask over the Unix socket, in words and JSON.

use std::time::Duration;

use crate::Node;
use crate::tenants::{DEFAULT, Leftover, Tenant};

/// Topics that there are.
const TOPICS: &str = "status, forget";

pub(crate) fn answer(
    node: &Node,
    asks: &Tenant,
    topic: &str,
    arguments: &str,
    time: Duration,
) -> Result<String, String> {
    match topic {
        "status" => serde_json::to_string(&node.status()).map_err(|error| error.to_string()),
        "forget" => forget(node, asks, arguments, time),
        _ => Err(format!("there is no topic {topic:?}; there are {TOPICS}")),
    }
}

/// Which tenant to forget.
#[derive(Debug, serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Forget {
    tenant: String,
}

/// Forgets a tenant: its own people may ask for that, and the node's own user for every tenant.
fn forget(node: &Node, asks: &Tenant, arguments: &str, time: Duration) -> Result<String, String> {
    let Forget { tenant: name } =
        serde_json::from_str(arguments).map_err(|error| format!("forget: {error}"))?;
    // Who may not ask is not told which tenants there are.
    let may_ask = asks.name() == name || asks.name() == DEFAULT;
    let found = node.tenants().named(&name).filter(|_| may_ask);
    let tenant = found.ok_or_else(|| {
        format!("tenant {:?} cannot forget {name:?}: it is not its own, or there is none", {
            asks.name()
        })
    })?;
    tracing::info!(tenant = name, asked_by = asks.name(), "everything of a tenant is removed");
    let mut receipt = tenant.forget(time).map_err(|error| error.to_string())?;
    if receipt.memory.held_bytes > 0 {
        let holders = node.clients().into_iter();
        let holders = holders.filter(|it| it.tenant == name && it.held_bytes > 0);
        receipt.left.extend(holders.map(|client| Leftover {
            what: format!("client {:?}, process {}", client.name, client.process),
            why: format!("holds {} bytes; end it, and they are zeroed", client.held_bytes),
        }));
    }
    tracing::info!(tenant = name, complete = receipt.is_complete, "a tenant was forgotten");
    serde_json::to_string(&receipt).map_err(|error| error.to_string())
}
