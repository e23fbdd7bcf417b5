//! `cascade config`: settings of a running node.

use std::path::Path;

use cascade_node::admin::SettingChange;
use cascade_node::config::SettingInfo;
use clap::{Args, Subcommand};
use serde_json::json;

use crate::connection::ConnectionArgs;
use crate::{EXIT_OK, Failure, Screen, write_json};

/// `cascade config`.
#[derive(Debug, Subcommand)]
pub(super) enum ConfigVerb {
    /// Print settings of the running node and their sources.
    #[command(after_help = "\
Examples:
  cascade config get
      Print all settings. To see those of a node before it starts: cascade serve --print-config.
  cascade config get log_filter advanced
      Print a setting and a section.")]
    Get(GetArgs),
    /// Change a setting of the running node until its next restart or reload.
    #[command(after_help = "\
Examples:
  cascade config set log_filter debug
      Change the log level without a restart. To keep it, also set it in the configuration file.
  cascade config set connections_max 8192
  cascade config set files_capacity 2TiB
      Give the file tier more or less of the disk. It shrinks in the background.
  cascade config set dram 64GiB --timeout 60
      Give memory back to the system: at most 60 s for blocks in use.

docs/configuration.md marks the settings that can be changed without a restart.")]
    Set(SetArgs),
}

/// The settings to print.
#[derive(Debug, Args)]
pub(super) struct GetArgs {
    /// Settings or sections, such as dram or advanced [default: all].
    #[arg(value_name = "KEY")]
    keys: Vec<String>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    connection: ConnectionArgs,
}

/// The setting to change.
#[derive(Debug, Args)]
pub(super) struct SetArgs {
    /// Name of the setting, such as `log_filter`.
    #[arg(value_name = "KEY")]
    key: String,
    /// New value, written as on the command line.
    #[arg(value_name = "VALUE")]
    value: String,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    connection: ConnectionArgs,
}

pub(super) fn run(verb: &ConfigVerb, screen: &mut Screen) -> Result<i32, Failure> {
    match verb {
        ConfigVerb::Get(args) => get(args, screen),
        ConfigVerb::Set(args) => set(args, screen),
    }
}

fn get(args: &GetArgs, screen: &mut Screen) -> Result<i32, Failure> {
    let request = json!({ "keys": args.keys });
    let shown: Vec<SettingInfo> = args.connection.connect()?.request("config", &request)?;
    if args.json {
        write_json(Path::new("-"), &shown, screen)?;
        return Ok(EXIT_OK);
    }
    for SettingInfo { key, value, source, .. } in shown {
        let value = value.unwrap_or_else(|| "not set".to_owned());
        let source = screen.dim(&format!("# {source}"));
        screen.line(format!("{:<48} {source}", format!("{key} = {value}")))?;
    }
    Ok(EXIT_OK)
}

fn set(args: &SetArgs, screen: &mut Screen) -> Result<i32, Failure> {
    let request = json!({ "key": args.key, "value": args.value });
    let changed: SettingChange = args.connection.connect()?.request("config-set", &request)?;
    if args.json {
        write_json(Path::new("-"), &changed, screen)?;
        return Ok(EXIT_OK);
    }
    let text = |value: Option<String>| value.unwrap_or_else(|| "not set".to_owned());
    let SettingChange { key, before, now, note } = changed;
    screen.line(format!("{key} = {} (was {})", text(now), text(before)))?;
    if let Some(note) = note {
        screen.line(note)?;
    }
    Ok(EXIT_OK)
}
