//! `cascade tenant`: operations on the data of one tenant.

use std::path::Path;

use cascade_block::ByteSize;
use cascade_node::tenants::Receipt;
use cascade_replay::figures::grouped;
use clap::{Args, Subcommand};
use serde_json::json;

use crate::connection::ConnectionArgs;
use crate::{EXIT_FAILED, EXIT_OK, Failure, Screen, write_json};

/// `cascade tenant`.
#[derive(Debug, Subcommand)]
pub(super) enum TenantVerb {
    /// Remove and overwrite all data of a tenant in all tiers, and print a receipt.
    #[command(after_help = "\
Examples:
  cascade tenant forget alice --yes
      Print a receipt: the blocks, bytes and files that were removed and overwritten in each tier.
  cascade tenant forget alice --yes --json > receipt.json
      Keep the receipt as JSON.

The exit code is 1 if something could not be removed; the receipt names it. docs/security.md
describes what overwriting cannot guarantee on flash and copy-on-write file systems.")]
    Forget(ForgetArgs),
}

/// The tenant to forget.
#[derive(Debug, Args)]
pub(super) struct ForgetArgs {
    /// Name of the tenant.
    #[arg(value_name = "NAME")]
    name: String,
    /// Confirm the removal, which cannot be undone.
    #[arg(long)]
    yes: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    connection: ConnectionArgs,
}

pub(super) fn run(verb: &TenantVerb, screen: &mut Screen) -> Result<i32, Failure> {
    let TenantVerb::Forget(args) = verb;
    if !args.yes {
        return Err(Failure::usage(
            format!("this removes all blocks of tenant {:?} and cannot be undone", args.name),
            "add --yes to confirm",
        ));
    }
    let request = json!({ "tenant": args.name });
    let receipt: Receipt = args.connection.connect()?.request("forget", &request)?;
    if args.json {
        write_json(Path::new("-"), &receipt, screen)?;
    } else {
        show(&receipt, screen)?;
    }
    Ok(if receipt.is_complete { EXIT_OK } else { EXIT_FAILED })
}

fn show(receipt: &Receipt, screen: &mut Screen) -> Result<(), Failure> {
    let size = |bytes: u64| ByteSize(bytes).rounded();
    for tier in &receipt.tiers {
        screen.line(format!(
            "{:<8} {} blocks ({}) removed, {} files ({}) overwritten and removed",
            tier.tier,
            grouped(tier.blocks),
            size(tier.bytes),
            grouped(tier.files_removed),
            size(tier.overwritten_bytes),
        ))?;
    }
    let memory = receipt.memory;
    let zeroed = size(memory.zeroed_bytes);
    let (held, left) = (size(memory.held_bytes), size(memory.left_bytes));
    screen.line(format!(
        "memory   {zeroed} zeroed, {held} still held by clients, {left} not zeroed in time"
    ))?;
    for left in &receipt.left {
        let text = screen.verdict(false, &format!("NOT removed: {}: {}", left.what, left.why));
        screen.line(text)?;
    }
    let verdict = if receipt.is_complete { "nothing remains" } else { "some data REMAINS" };
    let verdict = format!("tenant {}: {verdict}", receipt.tenant);
    let verdict = screen.verdict(receipt.is_complete, &verdict);
    screen.line(verdict)
}
