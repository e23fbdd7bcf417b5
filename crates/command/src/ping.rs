//! `cascade ping` and `cascade version`: whether a node answers, and which version it runs.

use std::path::Path;

use cascade_node::admin::NodeIdentity;
use cascade_replay::figures::duration;
use cascade_runtime::{Clock as _, SystemClock};
use clap::Args;
use serde_json::json;

use crate::connection::ConnectionArgs;
use crate::{Count, EXIT_OK, Failure, Screen, write_json};

/// The node and the number of pings.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  cascade ping
      Print the round-trip time. The exit code is 1 if the node does not answer.
  cascade ping --count 5 --timeout 1s
      Ping five times, with a time-out of one second each.")]
pub(super) struct PingArgs {
    /// Number of pings.
    #[arg(long, value_name = "N", default_value_t = Count::MIN)]
    count: Count,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    connection: ConnectionArgs,
}

pub(super) fn ping(args: &PingArgs, screen: &mut Screen) -> Result<i32, Failure> {
    let connection = args.connection.connect()?;
    let socket = connection.socket().display().to_string();
    let mut times_us = Vec::new();
    for _ in 0..args.count.get() {
        let began = SystemClock.monotonic();
        connection.ping()?;
        // Of whole nanoseconds, so that a time has at most three decimals.
        let took_us = SystemClock.monotonic().saturating_sub(began).as_nanos() as f64 / 1e3;
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

/// The node and the output format.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  cascade version
      Print the version of this command and, if a node answers, of the node.
  cascade version --json | jq -r .node.version
      Check after an upgrade which version the node runs.

cascade --version prints only the version of this command. The exit code is 0 even if no node
answers.")]
pub(super) struct VersionArgs {
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    connection: ConnectionArgs,
}

pub(super) fn version(args: &VersionArgs, screen: &mut Screen) -> Result<i32, Failure> {
    let own = env!("CARGO_PKG_VERSION");
    let node =
        args.connection.connect().and_then(|it| it.request::<NodeIdentity>("version", &json!({})));
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
