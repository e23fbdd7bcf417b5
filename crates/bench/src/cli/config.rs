//! `cascade config`: settings of a running node.

use std::path::Path;

use cascade_node::admin::Changed;
use cascade_node::config::ShownKey;
use clap::{Args, Subcommand};
use serde_json::json;

use crate::cli::reach::Reach;
use crate::cli::{EXIT_OK, Failure, Screen, write_json};

/// `cascade config`.
#[derive(Debug, Subcommand)]
pub(super) enum ConfigVerb {
    /// Print settings of the running node, with what set each.
    #[command(after_help = "\
Examples:
  cascade config get
      All of them. What a node would run with: cascade serve --print-config.
  cascade config get log_filter limits
      A setting, and a section.")]
    Get(GetArgs),
    /// Change a setting of the running node until it is started or reloaded.
    #[command(after_help = "\
Examples:
  cascade config set log_filter debug
      Without a restart. To keep it, set it in the configuration file too.
  cascade config set connections_max 8192

The other settings need a restart; docs/configuration.md marks those that do not.")]
    Set(SetArgs),
}

/// Which settings.
#[derive(Debug, Args)]
pub(super) struct GetArgs {
    /// Settings or sections, such as dram or advanced [default: all].
    #[arg(value_name = "KEY")]
    keys: Vec<String>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    reach: Reach,
}

/// Which setting.
#[derive(Debug, Args)]
pub(super) struct SetArgs {
    /// The setting, such as `log_filter`.
    #[arg(value_name = "KEY")]
    key: String,
    /// Its new value, as after a flag or in the environment.
    #[arg(value_name = "VALUE")]
    value: String,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    reach: Reach,
}

pub(super) fn run(verb: &ConfigVerb, screen: &mut Screen) -> Result<i32, Failure> {
    match verb {
        ConfigVerb::Get(args) => get(args, screen),
        ConfigVerb::Set(args) => set(args, screen),
    }
}

fn get(args: &GetArgs, screen: &mut Screen) -> Result<i32, Failure> {
    let question = json!({ "keys": args.keys });
    let shown: Vec<ShownKey> = args.reach.connect()?.ask("config", &question)?;
    if args.json {
        write_json(Path::new("-"), &shown, screen)?;
        return Ok(EXIT_OK);
    }
    for ShownKey { key, value, source, .. } in shown {
        let value = value.unwrap_or_else(|| "not set".to_owned());
        let source = screen.dim(&format!("# {source}"));
        screen.line(format!("{:<48} {source}", format!("{key} = {value}")))?;
    }
    Ok(EXIT_OK)
}

fn set(args: &SetArgs, screen: &mut Screen) -> Result<i32, Failure> {
    let order = json!({ "key": args.key, "value": args.value });
    let changed: Changed = args.reach.connect()?.ask("config-set", &order)?;
    if args.json {
        write_json(Path::new("-"), &changed, screen)?;
        return Ok(EXIT_OK);
    }
    let text = |value: Option<String>| value.unwrap_or_else(|| "not set".to_owned());
    let Changed { key, before, now } = changed;
    screen.line(format!("{key} = {} (was {})", text(now), text(before)))?;
    Ok(EXIT_OK)
}
