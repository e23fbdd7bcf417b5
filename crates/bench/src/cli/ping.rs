//! `cascade ping` and `cascade version`: whether a node answers, and which one it is.

use std::path::Path;

use cascade_block::{Clock as _, SystemClock};
use cascade_node::admin::Identity;
use clap::Args;
use serde_json::json;

use crate::cli::reach::Reach;
use crate::cli::{Count, EXIT_OK, Failure, Screen, write_json};
use crate::replay::summary::duration;

/// How often to ask which node.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  cascade ping
      Prints the time that the answer took. Exit code 1 if there is none: for scripts and probes.
  cascade ping --count 5 --timeout 1s
      Five times, at most a second each.")]
pub(super) struct PingArgs {
    /// How often to ask.
    #[arg(long, value_name = "N", default_value_t = Count::MIN)]
    count: Count,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    reach: Reach,
}

pub(super) fn ping(args: &PingArgs, screen: &mut Screen) -> Result<i32, Failure> {
    let asker = args.reach.connect()?;
    let socket = asker.socket().display().to_string();
    let mut times_us = Vec::new();
    for _ in 0..args.count.get() {
        let began = SystemClock.monotonic();
        asker.ping()?;
        let took_us = SystemClock.monotonic().saturating_sub(began).as_secs_f64() * 1e6;
        if !args.json {
            screen.line(format!("{socket} answers in {}", duration(took_us)))?;
        }
        times_us.push(took_us);
    }
    if args.json {
        write_json(Path::new("-"), &json!({ "socket": socket, "times_us": times_us }), screen)?;
    }
    Ok(EXIT_OK)
}

/// Which node.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  cascade version
      This command's version, and that of the node, if one answers.
  cascade version --json | jq -r .node.version
      After an upgrade: does the node run it?

cascade --version prints this command's version alone. The exit code is 0 without a node, too.")]
pub(super) struct VersionArgs {
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    reach: Reach,
}

pub(super) fn version(args: &VersionArgs, screen: &mut Screen) -> Result<i32, Failure> {
    let own = env!("CARGO_PKG_VERSION");
    let node = args.reach.connect().and_then(|it| it.ask::<Identity>("version", &json!({})));
    let node = match node {
        Err(failure @ (Failure::Usage { .. } | Failure::Read { .. })) => return Err(failure),
        Err(failure) => Err(failure.to_string()),
        Ok(node) => Ok(node),
    };
    if args.json {
        let (node, reason) = match node {
            Ok(node) => (Some(node), None),
            Err(reason) => (None, Some(reason)),
        };
        let protocol = cascade_wire::VERSION;
        let all = json!({ "version": own, "protocol": protocol, "node": node, "no_node": reason });
        write_json(Path::new("-"), &all, screen)?;
        return Ok(EXIT_OK);
    }
    screen.line(format!("command {own}, wire protocol {}", cascade_wire::VERSION))?;
    screen.line(match node {
        Ok(node) => format!(
            "node    {}, wire protocol {}: process {}, {}, at {}",
            node.version,
            node.protocol,
            node.pid,
            node.state.name(),
            node.socket
        ),
        Err(reason) => format!("node    none: {}", reason.lines().next().unwrap_or_default()),
    })?;
    Ok(EXIT_OK)
}
