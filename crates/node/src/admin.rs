//! What administrators ask over the Unix socket, in words and JSON.

use std::time::Duration;

use crate::Node;
use crate::tenants::Tenant;

/// Topics that there are.
const TOPICS: &str = "status";

pub(crate) fn answer(
    node: &Node,
    _asks: &Tenant,
    topic: &str,
    _arguments: &str,
    _time: Duration,
) -> Result<String, String> {
    match topic {
        "status" => serde_json::to_string(&node.status()).map_err(|error| error.to_string()),
        _ => Err(format!("there is no topic {topic:?}; there are {TOPICS}")),
    }
}
