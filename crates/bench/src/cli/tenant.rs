//! `cascade tenant`: operations on the data of one tenant.

use std::path::Path;

use clap::{Args, Subcommand};
use serde_json::{Value, json};

use crate::cli::connection::ConnectionArgs;
use crate::cli::{EXIT_FAILED, EXIT_OK, Failure, Screen, write_json};

/// `cascade tenant`.
#[derive(Debug, Subcommand)]
pub(super) enum TenantVerb {
    /// Remove and overwrite all data of a tenant in all tiers, and print a receipt.
    #[command(after_help = "\
Examples:
  cascade tenant forget alice --yes
      Print a receipt: the blocks, bytes and files that were removed and overwritten in each tier.
  cascade tenant forget alice --yes --json > receipt.json

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
    /// Print the receipt as JSON.
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
    let receipt: Value = args.connection.connect()?.request("forget", &request)?;
    write_json(Path::new("-"), &receipt, screen)?;
    let is_complete = receipt.get("is_complete").and_then(Value::as_bool).unwrap_or(false);
    Ok(if is_complete { EXIT_OK } else { EXIT_FAILED })
}
