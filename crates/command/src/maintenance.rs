//! `cascade flush`, `clear`, `drain` and `reload`: maintenance of a running node.

use std::io::{BufRead as _, IsTerminal as _};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::thread;
use std::time::Duration;

use cascade_block::ByteSize;
use cascade_node::admin::{ClearResult, DrainResult, FlushResult, NodeIdentity, ReloadResult};
use cascade_node::status::Status;
use cascade_replay::figures::grouped;
use cascade_runtime::{Deadline, SystemClock};
use clap::Args;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde_json::json;

use crate::connection::ConnectionArgs;
use crate::{EXIT_FAILED, EXIT_OK, Failure, Screen, write_json};

/// Poll interval for the removal of a stopping node's socket.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The tenant to flush.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  cascade flush --timeout 60s
      Wait until all pending blocks are written to the lower tiers. The exit code is 1 if some are
      not.
  cascade flush --tenant alice
      Flush the blocks of one tenant.")]
pub(super) struct FlushArgs {
    /// Tenant to flush [default: all for administrators, else the tenant of the user or token].
    #[arg(long, value_name = "NAME")]
    tenant: Option<String>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    connection: ConnectionArgs,
}

pub(super) fn flush(args: &FlushArgs, screen: &mut Screen) -> Result<i32, Failure> {
    let request = json!({ "tenant": args.tenant });
    let flushed: Vec<FlushResult> = args.connection.connect()?.request("flush", &request)?;
    if args.json {
        write_json(Path::new("-"), &flushed, screen)?;
    } else {
        show_flushed(&flushed, screen)?;
    }
    let is_written = flushed.iter().all(|it| it.error.is_none());
    Ok(if is_written { EXIT_OK } else { EXIT_FAILED })
}

fn show_flushed(flushed: &[FlushResult], screen: &mut Screen) -> Result<(), Failure> {
    for tenant in flushed {
        let name = &tenant.tenant;
        let pending = ByteSize(tenant.pending_bytes).rounded();
        match &tenant.error {
            None if tenant.unkept_blocks > 0 => screen.line(format!(
                "tenant {name}: {} blocks are only in memory: no tier below DRAM is configured",
                grouped(tenant.unkept_blocks),
            ))?,
            None => screen.line(format!("tenant {name}: all blocks are written"))?,
            Some(error) => {
                let text = format!("tenant {name}: NOT written: {error}; {pending} pending");
                let text = screen.verdict(false, &text);
                screen.line(text)?;
            }
        }
    }
    Ok(())
}

/// The tenant to clear.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  cascade clear
      Show what would be removed and ask for confirmation. Without a terminal, --yes is required.
  cascade clear --tenant alice --yes --json
      Remove all blocks of one tenant.

The blocks are removed from every tier. Their bytes stay in files until later blocks overwrite them.
To overwrite them at once and get a receipt, use cascade tenant forget.")]
pub(super) struct ClearArgs {
    /// Tenant to clear [default: `default` for administrators, else the one of the user or token].
    #[arg(long, value_name = "NAME")]
    tenant: Option<String>,
    /// Do not ask for confirmation.
    #[arg(long)]
    yes: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    connection: ConnectionArgs,
}

pub(super) fn clear(args: &ClearArgs, screen: &mut Screen) -> Result<i32, Failure> {
    let connection = args.connection.connect()?;
    if !args.yes {
        let identity: NodeIdentity = connection.request("version", &json!({}))?;
        let tenant = args.tenant.clone().unwrap_or(identity.tenant);
        let status: Status = connection.request("status", &json!({}))?;
        let found = status.tenants.iter().find(|it| it.name == tenant);
        let Some(found) = found else {
            let names: Vec<&str> = status.tenants.iter().map(|it| it.name.as_str()).collect();
            let names = names.join(", ");
            return Err(Failure::Declined(format!(
                "there is no tenant {tenant:?}; tenants: {names}"
            )));
        };
        let tiers = found.tiers.iter().map(|tier| {
            let size = ByteSize(tier.used_bytes).rounded();
            format!("{size} in {}", tier.name)
        });
        let tiers: Vec<String> = tiers.collect();
        let what = format!(
            "this removes every block of tenant {tenant:?} at {}: {}",
            connection.socket().display(),
            tiers.join(", ")
        );
        if !std::io::stdin().is_terminal() {
            return Err(Failure::usage(what, "add --yes to confirm"));
        }
        screen.notice(format!("{what}\nremove them? [y/N]"))?;
        let mut answer = String::new();
        let read = std::io::stdin().lock().read_line(&mut answer);
        read.map_err(|error| Failure::other("read the confirmation", error))?;
        if !["y", "yes"].contains(&answer.trim().to_ascii_lowercase().as_str()) {
            screen.notice("nothing was removed")?;
            return Ok(EXIT_FAILED);
        }
    }
    let request = json!({ "tenant": args.tenant });
    let cleared: ClearResult = connection.request("clear", &request)?;
    if args.json {
        write_json(Path::new("-"), &cleared, screen)?;
    } else {
        screen.line(format!(
            "removed {} blocks ({}) of tenant {}",
            grouped(cleared.blocks),
            ByteSize(cleared.bytes).rounded(),
            cleared.tenant
        ))?;
    }
    Ok(EXIT_OK)
}

/// The options of a drain.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  cascade drain --timeout 60s
      Refuse new clients and new blocks, and write all pending blocks to the lower tiers. Connected
      clients can still read. /readyz answers 503 with `draining`.
  cascade drain --exit --timeout 60s
      Then stop the node, if all blocks were written.
  cascade drain --cancel
      Accept clients and blocks again.

The exit code is 1 if some blocks were not written in time. They stay in DRAM, and the node keeps
running.")]
pub(super) struct DrainArgs {
    /// Stop the node when all blocks are written, and wait for its end.
    #[arg(long, conflicts_with = "cancel")]
    exit: bool,
    /// End the drain: accept new clients and blocks again.
    #[arg(long)]
    cancel: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    connection: ConnectionArgs,
}

pub(super) fn drain(args: &DrainArgs, screen: &mut Screen) -> Result<i32, Failure> {
    let deadline = Deadline::after(&SystemClock, args.connection.timeout);
    let request = json!({ "exit": args.exit, "cancel": args.cancel });
    let connection = args.connection.connect()?;
    // Before the drain: after it, the process may have ended and its id may belong to another one.
    let process = open_process(&connection.request("version", &json!({}))?);
    let drained: DrainResult = connection.request("drain", &request)?;
    let socket = args.connection.socket();
    let has_ended = drained.is_ending && wait_for_end(process.as_ref(), &socket, deadline);
    if args.json {
        write_json(Path::new("-"), &drained, screen)?;
    } else if args.cancel {
        screen.line("the node accepts clients and blocks again")?;
    } else {
        show_flushed(&drained.tenants, screen)?;
        let clients = format!("{} clients connected", grouped(drained.clients as u64));
        let unkept: u64 = drained.tenants.iter().map(|tenant| tenant.unkept_blocks).sum();
        screen.line(match (drained.is_written, drained.is_ending, has_ended) {
            (false, ..) => format!(
                "the node is draining ({clients}), but some blocks are not written, so it keeps \
                 running; try again, or see cascade status"
            ),
            (true, false, _) if unkept > 0 => format!(
                "the node is drained ({clients}): {} blocks are lost when it is stopped",
                grouped(unkept)
            ),
            (true, false, _) => {
                format!("the node is drained ({clients}): it can be stopped without data loss")
            }
            (true, true, false) => {
                format!("process {} is stopping, but still runs; see its log", drained.pid)
            }
            (true, true, true) => format!("process {} has ended", drained.pid),
        })?;
    }
    let is_done = args.cancel || (drained.is_written && has_ended == args.exit);
    Ok(if is_done { EXIT_OK } else { EXIT_FAILED })
}

/// A descriptor that becomes readable when the node's process ends. None if the process is not
/// visible from here, such as in another PID namespace.
pub(super) fn open_process(identity: &NodeIdentity) -> Option<OwnedFd> {
    let process = Pid::from_raw(i32::try_from(identity.pid).ok()?)?;
    pidfd_open(process, PidfdFlags::empty()).ok()
}

/// Whether the node's process ends by the deadline. If the process is not visible, whether its
/// socket is removed.
pub(super) fn wait_for_end(process: Option<&OwnedFd>, socket: &Path, deadline: Deadline) -> bool {
    if let Some(process) = process {
        let time = Timespec::try_from(deadline.remaining(&SystemClock)).ok();
        let polled = poll(&mut [PollFd::new(process, PollFlags::IN)], time.as_ref());
        return polled.is_ok_and(|ready| ready > 0);
    }
    while socket.exists() && !deadline.remaining(&SystemClock).is_zero() {
        thread::park_timeout(POLL_INTERVAL);
    }
    !socket.exists()
}

/// The node and the output format.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  cascade reload
      Reload the configuration file, as SIGHUP does, and print which settings changed and which
      need a restart. If the file is not valid, nothing changes and the exit code is 1.")]
pub(super) struct ReloadArgs {
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    connection: ConnectionArgs,
}

pub(super) fn reload(args: &ReloadArgs, screen: &mut Screen) -> Result<i32, Failure> {
    let reloaded: ReloadResult = args.connection.connect()?.request("reload", &json!({}))?;
    if args.json {
        write_json(Path::new("-"), &reloaded, screen)?;
        return Ok(EXIT_OK);
    }
    let ReloadResult { changed, needs_restart } = reloaded;
    if changed.is_empty() && needs_restart.is_empty() {
        screen.line("nothing changed")?;
    }
    for key in changed {
        screen.line(format!("changed          {key}"))?;
    }
    for key in needs_restart {
        screen.line(format!("needs a restart  {key}"))?;
    }
    Ok(EXIT_OK)
}
