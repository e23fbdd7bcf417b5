//! `cascade keys`: the keys of the blocks that a node has.

use std::path::Path;

use cascade_block::ByteSize;
use cascade_node::admin::{KeyListing, KeyRow};
use cascade_replay::figures::span;
use clap::Args;
use serde_json::json;

use crate::connection::ConnectionArgs;
use crate::keys::check_beginning;
use crate::{Count, EXIT_OK, Failure, Screen, write_json};

/// The keys to list.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  cascade keys
      List the first 100 keys: length and tiers of the block, and when it was last read.
  cascade keys --tier files --prefix 4bf5 --limit 1000
      List keys of blocks in files that begin with these digits.
  cascade keys --limit 1000000 --json | jq -r '.keys[].key' > keys.txt
      Write all keys to a file. `next` in the JSON is null if there are no more.

A tenant sees its own keys only. The order is the node's. Each request lists 1,000 keys at most, and
holds up no other calls. A key that is stored while the list is made is listed once; keys that are
put or removed meanwhile may be listed. Keys are hashes: what they stand for is not in them.")]
pub(super) struct KeysArgs {
    /// Tenant of the keys [default: the tenant of the user or token].
    #[arg(long, value_name = "NAME")]
    tenant: Option<String>,
    /// Only keys of blocks in this tier, such as dram or files.
    #[arg(long, value_name = "TIER")]
    tier: Option<String>,
    /// Only keys that begin with these hexadecimal digits.
    #[arg(long, value_name = "DIGITS")]
    prefix: Option<String>,
    /// Most keys to list.
    #[arg(long, value_name = "N", default_value = "100")]
    limit: Count,
    /// Continue a list: the cursor that it ended with.
    #[arg(long, value_name = "CURSOR")]
    cursor: Option<String>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    connection: ConnectionArgs,
}

pub(super) fn run(args: &KeysArgs, screen: &mut Screen) -> Result<i32, Failure> {
    args.prefix.as_deref().map_or(Ok(()), check_beginning)?;
    let limit = usize::try_from(args.limit.get()).unwrap_or(usize::MAX);
    let connection = args.connection.connect()?;
    let mut cursor = args.cursor.clone();
    let mut all = Vec::new();
    let mut count = 0;
    let tenant = loop {
        let request = json!({
            "tenant": args.tenant, "tier": args.tier, "digits": args.prefix, "cursor": cursor,
            "limit": limit - count,
        });
        let page: KeyListing = connection.request("keys", &request)?;
        if !args.json && count == 0 && !page.keys.is_empty() {
            screen.line(screen.dim(&line("key", "size", "tiers", "last read")))?;
        }
        count += page.keys.len();
        cursor = page.next;
        if args.json {
            all.extend(page.keys);
        } else {
            page.keys.iter().try_for_each(|key| screen.line(row(key)))?;
        }
        // A page may have no keys although others follow: it looks at a part of the store.
        if cursor.is_none() || count >= limit {
            break page.tenant;
        }
    };
    if args.json {
        let listing = KeyListing { tenant, keys: all, next: cursor };
        write_json(Path::new("-"), &listing, screen)?;
    } else if let Some(cursor) = cursor {
        screen.notice(format!("there may be more: the same command with --cursor {cursor}"))?;
    } else if count == 0 {
        screen.notice(format!("tenant {tenant} has no such keys"))?;
    }
    Ok(EXIT_OK)
}

fn row(key: &KeyRow) -> String {
    let tiers = match key.tiers.as_slice() {
        [] => "unavailable".to_owned(),
        tiers => tiers.join("+"),
    };
    let last_read = match key.idle_s {
        Some(idle) => format!("{} ago", span(idle as f64)),
        None => "never".to_owned(),
    };
    line(&key.key, &ByteSize(u64::from(key.bytes)).rounded(), &tiers, &last_read)
}

fn line(key: &str, size: &str, tiers: &str, last_read: &str) -> String {
    format!("{key:<64}  {size:>8}  {tiers:<11}  {last_read}")
}
