//! `cascade tenant`: what an operator does with one tenant's data.

use std::path::Path;

use clap::{Args, Subcommand};
use serde_json::{Value, json};

use crate::cli::reach::Reach;
use crate::cli::{EXIT_FAILED, EXIT_OK, Failure, Screen, write_json};

/// `cascade tenant`.
#[derive(Debug, Subcommand)]
pub(super) enum TenantVerb {
    /// Remove and overwrite everything that a tenant has in all tiers, and say what that was.
    #[command(after_help = "\
Examples:
  cascade tenant forget alice --yes
      Prints a receipt: blocks, bytes and files that were removed and overwritten, tier by tier.
  cascade tenant forget alice --yes --json > receipt.json

Exit code 1 if something could not be removed; the receipt names it. What overwriting does not
guarantee on flash and copy-on-write file systems stands in docs/security.md.")]
    Forget(ForgetArgs),
}

/// Whom to forget.
#[derive(Debug, Args)]
pub(super) struct ForgetArgs {
    /// The tenant.
    #[arg(value_name = "NAME")]
    name: String,
    /// Do it: what is removed does not come back.
    #[arg(long)]
    yes: bool,
    /// Print the receipt as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    reach: Reach,
}

pub(super) fn run(verb: &TenantVerb, screen: &mut Screen) -> Result<i32, Failure> {
    let TenantVerb::Forget(args) = verb;
    if !args.yes {
        return Err(Failure::usage(
            format!("forgetting {:?} removes all of its blocks for good", args.name),
            "add --yes to do it",
        ));
    }
    let receipt: Value =
        args.reach.connect()?.ask("tenant.forget", &json!({ "name": args.name }))?;
    write_json(Path::new("-"), &receipt, screen)?;
    let is_complete = receipt.get("is_complete").and_then(Value::as_bool).unwrap_or(false);
    Ok(if is_complete { EXIT_OK } else { EXIT_FAILED })
}
