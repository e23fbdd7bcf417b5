//! The admin request `keys`: a page of the keys of a tenant.

use std::time::Duration;

use cascade_block::{BlockKey, with_causes};
use cascade_runtime::{Clock as _, SystemClock};
use cascade_store::{CallOptions, ListRequest, ListedKey, Store};
use serde::Deserialize;

use super::commands::named_or_own;
use super::responses::{KeyListing, KeyRow};
use crate::Node;
use crate::explain::key_prefix;
use crate::tenants::Tenant;

/// Most keys of one page: so many fit one message.
const PAGE_MAX: usize = 1000;

/// Arguments of `keys`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ListKeys {
    /// The tenant, by default the caller's own.
    #[serde(default)]
    tenant: Option<String>,
    /// Only keys of blocks in this tier.
    #[serde(default)]
    tier: Option<String>,
    /// Only keys that begin with these hexadecimal digits.
    #[serde(default)]
    digits: Option<String>,
    /// Where the page begins: `next` of the page before it.
    #[serde(default)]
    cursor: Option<String>,
    /// Most keys of the page.
    #[serde(default)]
    limit: Option<usize>,
}

pub(super) fn keys(
    node: &Node,
    caller: &Tenant,
    request: &ListKeys,
    time: Duration,
) -> Result<KeyListing, String> {
    let tenant = named_or_own(node, caller, request.tenant.as_deref())?;
    let store = tenant.store();
    let tier = request.tier.as_deref();
    check_tier(store, tier)?;
    let from = request.cursor.as_deref().map_or(Ok(0), |cursor| position(node, cursor))?;
    let most = request.limit.unwrap_or(PAGE_MAX).min(PAGE_MAX);
    let digits = request.digits.as_deref().unwrap_or_default();
    let is_match = key_prefix(digits).ok_or_else(|| {
        let digits: String = digits.chars().take(80).collect();
        format!("{digits:?} is no beginning of a key: use 1 to 64 hexadecimal digits")
    })?;
    let options = CallOptions { timeout: Some(time), ..CallOptions::default() };
    let page = store.list_keys(&ListRequest { from, most, tier }, is_match, options);
    let page = page.map_err(|error| with_causes(&error))?;
    let now_unix_ms = SystemClock.unix_ms();
    Ok(KeyListing {
        tenant: tenant.name().to_owned(),
        keys: page.keys.iter().map(|key| row(key, now_unix_ms)).collect(),
        next: page.next.map(|next| format!("{:x}-{next:x}", node.run_id())),
    })
}

fn check_tier(store: &Store, tier: Option<&str>) -> Result<(), String> {
    let names = store.tier_names();
    match tier {
        Some(tier) if !names.contains(&tier) => {
            let tier: String = tier.chars().take(80).collect();
            Err(format!("there is no tier {tier:?}; the tiers are {}", names.join(", ")))
        }
        _ => Ok(()),
    }
}

/// The position of a cursor. It means something to the run of the node that returned it only.
fn position(node: &Node, cursor: &str) -> Result<u32, String> {
    let (run, at) = cursor.split_once('-').unwrap_or_default();
    let (run, at) = (u64::from_str_radix(run, 16), u32::from_str_radix(at, 16));
    match (run, at) {
        (Ok(run), Ok(at)) if run == node.run_id() => Ok(at),
        (Ok(_), Ok(_)) => {
            Err("the cursor is of an earlier run of the node; list the keys from the start".into())
        }
        _ => Err("the cursor is not one of this command; use the one that it printed".into()),
    }
}

fn row(key: &ListedKey, now_unix_ms: u64) -> KeyRow {
    let seconds = |since: u64| now_unix_ms.saturating_sub(since) / 1000;
    KeyRow {
        key: BlockKey::to_string(&key.key),
        bytes: key.bytes,
        tiers: key.tiers.iter().map(ToString::to_string).collect(),
        age_s: key.put_unix_ms.map(seconds),
        idle_s: key.used_unix_ms.map(seconds),
        uses: key.uses,
    }
}
