//! `cascade hbm`: the memory of a GPU that a node has taken.

use std::path::Path;
use std::time::Duration;

use cascade_block::ByteSize;
use cascade_node::GpuStatus;
use cascade_node::admin::DrainResult;
use cascade_node::status::{ClientStatus, Status};
use cascade_replay::figures::grouped;
use cascade_runtime::{Deadline, SystemClock};
use clap::{Args, Subcommand};
use serde::Serialize;
use serde_json::json;

use crate::connection::{AdminConnection, ConnectionArgs};
use crate::maintenance::{open_process, wait_for_end};
use crate::{EXIT_FAILED, EXIT_OK, Failure, Screen, write_json};

/// `cascade hbm`.
#[derive(Debug, Subcommand)]
pub(super) enum HbmVerb {
    /// Show the GPU, the memory that the node has taken, and the processes that use it.
    #[command(after_help = "\
Examples:
  cascade hbm status --socket /run/cascade/hbm.sock
      Show how much of the GPU the node has, how much is free, and which processes use it.")]
    Status(HbmArgs),
    /// Stop the node and give the memory back to the GPU.
    #[command(after_help = "\
Examples:
  cascade hbm release --socket /run/cascade/hbm.sock
      Use it before an engine is started on that GPU.

The node ends, after it has written its blocks to files if it has a file tier. The processes that
use its memory unmap it when they notice, within 0.1 s and their copies in flight. Their next reads
come from DRAM or are computed. The command waits 2 s for the end of the node, and names the
processes that used the memory: it is free once they have unmapped it. The exit code is 1 if the
node still runs.")]
    Release(HbmArgs),
}

/// The node and the output format.
#[derive(Debug, Args)]
pub(super) struct HbmArgs {
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    connection: ConnectionArgs,
}

/// What the node of a GPU has.
#[derive(Debug, Serialize)]
struct Hbm {
    gpu: GpuStatus,
    used_bytes: u64,
    clients: Vec<ClientStatus>,
    /// Whether the node has ended; none if it was not asked to.
    has_ended: Option<bool>,
}

/// How long to wait for the end of the node.
const END_MAX: Duration = Duration::from_secs(2);

pub(super) fn run(verb: &HbmVerb, screen: &mut Screen) -> Result<i32, Failure> {
    match verb {
        HbmVerb::Status(args) => {
            let hbm = ask(&args.connection.connect()?)?;
            show(args, &hbm, screen)?;
            Ok(EXIT_OK)
        }
        HbmVerb::Release(args) => {
            let mut hbm = ask(&args.connection.connect()?)?;
            let has_ended = release(&args.connection)?;
            hbm.has_ended = Some(has_ended);
            show(args, &hbm, screen)?;
            Ok(if has_ended { EXIT_OK } else { EXIT_FAILED })
        }
    }
}

fn ask(connection: &AdminConnection) -> Result<Hbm, Failure> {
    let status: Status = connection.request("status", &json!({}))?;
    let Some(gpu) = status.node.gpu else {
        return Err(Failure::Declined(format!(
            "the node at {} keeps its blocks in DRAM; give --socket of a node with the setting gpu",
            connection.socket().display()
        )));
    };
    let of_gpu = status.tenants.iter().flat_map(|tenant| &tenant.tiers);
    let used_bytes = of_gpu.filter(|tier| tier.name == "hbm").map(|tier| tier.used_bytes).sum();
    let mut clients = status.clients.list;
    // Not this command.
    clients.retain(|client| client.pid != std::process::id());
    Ok(Hbm { gpu, used_bytes, clients, has_ended: None })
}

/// Stops the node. Whether it has ended.
fn release(args: &ConnectionArgs) -> Result<bool, Failure> {
    let connection = args.connect()?;
    // Before the drain: after it, the process may have ended and its id may belong to another one.
    let process = open_process(&connection.request("version", &json!({}))?);
    let request = json!({ "exit": true, "cancel": false });
    let drained: DrainResult = connection.request("drain", &request)?;
    let deadline = Deadline::after(&SystemClock, END_MAX);
    Ok(drained.is_ending && wait_for_end(process.as_ref(), &args.socket(), deadline))
}

fn show(args: &HbmArgs, hbm: &Hbm, screen: &mut Screen) -> Result<(), Failure> {
    if args.json {
        return write_json(Path::new("-"), hbm, screen);
    }
    let GpuStatus { uuid, name, is_fake, bytes, free_bytes } = &hbm.gpu;
    let fake = if *is_fake { " (FAKE, for tests only)" } else { "" };
    let size = |bytes: u64| ByteSize(bytes).rounded();
    match hbm.has_ended {
        None => {
            screen.line(format!("{name}{fake}, {uuid}"))?;
            let free = free_bytes.map_or_else(
                || "GPU lost".to_owned(),
                |it| format!("{} free for others", size(it)),
            );
            let used = size(hbm.used_bytes);
            screen.line(format!("{} taken, {used} of it used; {free}", size(*bytes)))?;
        }
        Some(true) => {
            screen.line(format!("the node gave {} of {uuid}{fake} back", size(*bytes)))?;
        }
        Some(false) => screen.line(screen.verdict(
            false,
            &format!("the node still has {} of {uuid}{fake}; see its log", size(*bytes)),
        ))?,
    }
    let verb = if hbm.has_ended.is_some() { "used it" } else { "uses it" };
    for client in &hbm.clients {
        let (pid, name) = (client.pid, &client.name);
        let leases = grouped(client.leases);
        screen.line(format!("process {pid} ({name}) {verb}: {leases} blocks under lease"))?;
    }
    Ok(())
}
