//! `cascade hbm`: the memory of a GPU that a node has taken.

use std::path::Path;
use std::time::Duration;

use cascade_block::ByteSize;
use cascade_node::admin::DrainResult;
use cascade_node::status::{ClientStatus, ClientsStatus, Status, TenantStatus};
use cascade_node::{GpuNodeState, GpuNodeStatus, GpuStatus};
use cascade_replay::figures::grouped;
use cascade_runtime::{Deadline, SystemClock};
use clap::{Args, Subcommand};
use serde::Serialize;
use serde_json::json;

use crate::connection::ConnectionArgs;
use crate::maintenance::{open_process, wait_for_end};
use crate::{EXIT_FAILED, EXIT_OK, Failure, Screen, write_json};

/// `cascade hbm`.
#[derive(Debug, Subcommand)]
pub(super) enum HbmVerb {
    /// Show the GPU, the memory that the node has taken, and the processes that use it.
    #[command(after_help = "\
Examples:
  cascade hbm status
      Show how much of the GPU the node has, how much is free, and which processes use it.")]
    Status(HbmArgs),
    /// Stop the node of the GPU and give the memory back.
    #[command(after_help = "\
Examples:
  cascade hbm release
      Use it before an engine is started on that GPU. `cascade hbm start` undoes it.

The node of the GPU ends, after it has written its blocks to files if it has a file tier; a node in
DRAM that started it goes on. The processes that use its memory unmap it when they notice, within
0.1 s and their copies in flight. Their next reads come from DRAM or are computed. The command waits
2 s for the end of the node, and names the processes that used the memory: it is free once they have
unmapped it. The exit code is 1 if the node of the GPU still runs.")]
    Release(HbmArgs),
    /// Start the node of the GPU again, after a release or a failure.
    #[command(after_help = "\
Examples:
  cascade hbm start
      Take the memory of the GPU that the configuration names. Blocks are put into it again when
      engines save and load them.

A node gave the memory back because of `cascade hbm release`, or because less than hbm_reserve was
free. It does not start again by itself: an engine that starts takes its memory in steps, and the
node must not take what is free between two of them. The command waits until the node serves, at
most --timeout. The exit code is 1 if it does not.")]
    Start(HbmArgs),
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

/// A node that has memory of a GPU, or the one in DRAM whose node of the GPU does not serve.
enum Found {
    Serves(Box<Hbm>, ConnectionArgs),
    Down(GpuNodeStatus),
}

/// How long to wait for the end of the node.
const END_MAX: Duration = Duration::from_secs(2);
/// Poll interval of `start`.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

pub(super) fn run(verb: &HbmVerb, screen: &mut Screen) -> Result<i32, Failure> {
    match verb {
        HbmVerb::Status(args) => match find(&args.connection)? {
            Found::Serves(hbm, _) => show(args, &hbm, screen)?,
            Found::Down(node) => show_down(args, &node, screen)?,
        },
        HbmVerb::Release(args) => match find(&args.connection)? {
            Found::Serves(mut hbm, connection) => {
                let has_ended = release(&connection)?;
                hbm.has_ended = Some(has_ended);
                show(args, &hbm, screen)?;
                return Ok(if has_ended { EXIT_OK } else { EXIT_FAILED });
            }
            Found::Down(node) => show_down(args, &node, screen)?,
        },
        HbmVerb::Start(args) => return start(args, screen),
    }
    Ok(EXIT_OK)
}

/// Asks the node at the socket, or the node of the GPU that it started.
fn find(args: &ConnectionArgs) -> Result<Found, Failure> {
    let connection = args.connect()?;
    let status: Status = connection.request("status", &json!({}))?;
    if let Some(gpu) = status.node.gpu {
        return Ok(Found::Serves(
            Box::new(hbm_of(gpu, &status.tenants, status.clients)),
            args.clone(),
        ));
    }
    let Some(node) = status.node.gpu_node else {
        return Err(Failure::Declined(format!(
            "the node at {} uses no GPU; set gpu and hbm in its configuration and restart it, or \
             give --socket of another node",
            connection.socket().display()
        )));
    };
    if node.state != GpuNodeState::Serving {
        return Ok(Found::Down(node));
    }
    let args = args.at(&node.socket);
    let status: Status = args.connect()?.request("status", &json!({}))?;
    let Some(gpu) = status.node.gpu else { return Ok(Found::Down(node)) };
    Ok(Found::Serves(Box::new(hbm_of(gpu, &status.tenants, status.clients)), args))
}

fn hbm_of(gpu: GpuStatus, tenants: &[TenantStatus], clients: ClientsStatus) -> Hbm {
    let of_gpu = tenants.iter().flat_map(|tenant| &tenant.tiers);
    let used_bytes = of_gpu.filter(|tier| tier.name == "hbm").map(|tier| tier.used_bytes).sum();
    let mut clients = clients.list;
    // Not this command.
    clients.retain(|client| client.pid != std::process::id());
    Hbm { gpu, used_bytes, clients, has_ended: None }
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

/// Starts the node of the GPU and waits until it serves.
fn start(args: &HbmArgs, screen: &mut Screen) -> Result<i32, Failure> {
    let connection = args.connection.connect()?;
    let before: GpuNodeStatus = connection.request("hbm-start", &json!({}))?;
    let deadline = Deadline::after(&SystemClock, args.connection.timeout);
    // What the node says is older than the order until it starts.
    let is_old = |node: &GpuNodeStatus| node.pid.is_none() && node.state == before.state;
    loop {
        let status: Status = connection.request("status", &json!({}))?;
        let Some(node) = status.node.gpu_node else { return Ok(EXIT_FAILED) };
        let has_time = !deadline.remaining(&SystemClock).is_zero();
        if has_time && (node.state == GpuNodeState::Starting || is_old(&node)) {
            std::thread::park_timeout(POLL_INTERVAL);
            continue;
        }
        show_down(args, &node, screen)?;
        return Ok(if node.state == GpuNodeState::Serving { EXIT_OK } else { EXIT_FAILED });
    }
}

/// Shows what a node in DRAM knows of its node of the GPU.
fn show_down(args: &HbmArgs, node: &GpuNodeStatus, screen: &mut Screen) -> Result<(), Failure> {
    if args.json {
        return write_json(Path::new("-"), &json!({ "gpu_node": node }), screen);
    }
    let what = match (&node.state, &node.reason) {
        (GpuNodeState::Serving, _) => format!("serves at {}", node.socket),
        (GpuNodeState::Starting, _) => "starts".to_owned(),
        (GpuNodeState::Released, _) => {
            "gave the memory back; `cascade hbm start` takes it again".to_owned()
        }
        (GpuNodeState::Failed, reason) => format!(
            "does not run, and is started again after a pause: {}",
            reason.as_deref().unwrap_or("see the log")
        ),
    };
    screen.line(format!("the node of {} {what}", node.uuid))
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
