//! `cascade flush`, `clear`, `drain` and `reload`: orders to a running node.

use std::io::{BufRead as _, IsTerminal as _};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::thread;
use std::time::Duration;

use cascade_block::{ByteSize, Deadline, SystemClock};
use cascade_node::admin::{Cleared, Drained, Flushed, Identity, Reloaded};
use cascade_node::status::Status;
use clap::Args;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde_json::json;

use crate::cli::reach::Reach;
use crate::cli::{EXIT_FAILED, EXIT_OK, Failure, Screen, write_json};
use crate::replay::summary::grouped;

/// How often a node that ends is looked for.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// Whose blocks to write down.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  cascade flush --timeout 60s
      Returns when all that waited has been written to the lower tiers. Exit code 1 if not all was.
  cascade flush --tenant alice")]
pub(super) struct FlushArgs {
    /// Whose blocks [default: everybody's, or those of the tenant that you are].
    #[arg(long, value_name = "NAME")]
    tenant: Option<String>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    reach: Reach,
}

pub(super) fn flush(args: &FlushArgs, screen: &mut Screen) -> Result<i32, Failure> {
    let question = json!({ "tenant": args.tenant });
    let flushed: Vec<Flushed> = args.reach.connect()?.ask("flush", &question)?;
    if args.json {
        write_json(Path::new("-"), &flushed, screen)?;
    } else {
        show_flushed(&flushed, screen)?;
    }
    let is_written = flushed.iter().all(|it| it.error.is_none());
    Ok(if is_written { EXIT_OK } else { EXIT_FAILED })
}

fn show_flushed(flushed: &[Flushed], screen: &mut Screen) -> Result<(), Failure> {
    for tenant in flushed {
        let name = &tenant.tenant;
        let pending = ByteSize(tenant.pending_bytes).rounded();
        match &tenant.error {
            None => screen.line(format!("tenant {name}: everything is written"))?,
            Some(error) => {
                let text = format!("tenant {name}: NOT written: {error}; {pending} wait");
                let text = screen.verdict(false, &text);
                screen.line(text)?;
            }
        }
    }
    Ok(())
}

/// Whose blocks to remove.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  cascade clear
      Says what would be removed, and asks. Without a terminal it takes --yes.
  cascade clear --tenant alice --yes --json

The blocks are gone from every tier; their bytes in files are overwritten by later ones. To
overwrite them at once, and to get a receipt: cascade tenant forget.")]
pub(super) struct ClearArgs {
    /// Whose blocks [default: those of the tenant that you are; `default` for who administers].
    #[arg(long, value_name = "NAME")]
    tenant: Option<String>,
    /// Do not ask.
    #[arg(long)]
    yes: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    reach: Reach,
}

pub(super) fn clear(args: &ClearArgs, screen: &mut Screen) -> Result<i32, Failure> {
    let asker = args.reach.connect()?;
    if !args.yes {
        let identity: Identity = asker.ask("version", &json!({}))?;
        let tenant = args.tenant.clone().unwrap_or(identity.tenant);
        let status: Status = asker.ask("status", &json!({}))?;
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
            asker.socket().display(),
            tiers.join(", ")
        );
        if !std::io::stdin().is_terminal() {
            return Err(Failure::usage(what, "add --yes to do it"));
        }
        screen.remark(format!("{what}\nremove them? [y/N]"))?;
        let mut answer = String::new();
        let read = std::io::stdin().lock().read_line(&mut answer);
        read.map_err(|error| Failure::measure("the answer", error))?;
        if !["y", "yes"].contains(&answer.trim().to_ascii_lowercase().as_str()) {
            screen.remark("nothing was removed")?;
            return Ok(EXIT_FAILED);
        }
    }
    let cleared: Cleared = asker.ask("clear", &json!({ "tenant": args.tenant }))?;
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

/// How to drain.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  cascade drain --timeout 60s
      From now on no new client and no new block is taken; all that waits is written. Clients that
      are connected read on, /readyz says `draining`.
  cascade drain --exit --timeout 60s
      And then the node ends, if all was written.
  cascade drain --cancel
      Serve again.

Exit code 1 if not all was written in time: what waits is in DRAM, and the node goes on.")]
pub(super) struct DrainArgs {
    /// End the node once all is written, and wait until it has ended.
    #[arg(long, conflicts_with = "cancel")]
    exit: bool,
    /// Take new clients and blocks again.
    #[arg(long)]
    cancel: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    reach: Reach,
}

pub(super) fn drain(args: &DrainArgs, screen: &mut Screen) -> Result<i32, Failure> {
    let deadline = Deadline::after(&SystemClock, args.reach.timeout);
    let order = json!({ "exit": args.exit, "cancel": args.cancel });
    let asker = args.reach.connect()?;
    // Before the order: afterwards the number may be that of another process.
    let process = process(&asker.ask("version", &json!({}))?);
    let drained: Drained = asker.ask("drain", &order)?;
    let socket = args.reach.socket();
    let has_ended = drained.is_ending && wait_for_end(process.as_ref(), &socket, deadline);
    if args.json {
        write_json(Path::new("-"), &drained, screen)?;
    } else if args.cancel {
        screen.line("the node serves again")?;
    } else {
        show_flushed(&drained.tenants, screen)?;
        let clients = format!("{} clients connected", grouped(drained.clients as u64));
        screen.line(match (drained.is_written, drained.is_ending, has_ended) {
            (false, ..) => format!(
                "the node drains ({clients}), but not all is written: it does not end; try again, \
                 or look at cascade status"
            ),
            (true, false, _) => {
                format!("the node is drained ({clients}): it may be stopped without a loss")
            }
            (true, true, false) => {
                format!("process {} is told to end, and still runs", drained.pid)
            }
            (true, true, true) => format!("process {} has ended", drained.pid),
        })?;
    }
    let is_done = args.cancel || (drained.is_written && has_ended == args.exit);
    Ok(if is_done { EXIT_OK } else { EXIT_FAILED })
}

/// Something that tells when the node's process has ended; nothing for one that cannot be seen from
/// here.
fn process(identity: &Identity) -> Option<OwnedFd> {
    let process = Pid::from_raw(i32::try_from(identity.pid).ok()?)?;
    pidfd_open(process, PidfdFlags::empty()).ok()
}

/// Whether the node's process ends in time; where it cannot be seen, whether its socket goes.
fn wait_for_end(process: Option<&OwnedFd>, socket: &Path, deadline: Deadline) -> bool {
    if let Some(process) = process {
        let time = Timespec::try_from(deadline.remaining(&SystemClock)).ok();
        let polled = poll(&mut [PollFd::new(process, PollFlags::IN)], time.as_ref());
        return polled.is_ok_and(|ready| ready > 0);
    }
    while socket.exists() && !deadline.remaining(&SystemClock).is_zero() {
        thread::park_timeout(LOOK_INTERVAL);
    }
    !socket.exists()
}

/// Which node.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  cascade reload
      The node reads its configuration file again, as on SIGHUP; prints what changed and what needs
      a restart. A file that is refused changes nothing: exit code 1, and the reason.")]
pub(super) struct ReloadArgs {
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    reach: Reach,
}

pub(super) fn reload(args: &ReloadArgs, screen: &mut Screen) -> Result<i32, Failure> {
    let reloaded: Reloaded = args.reach.connect()?.ask("reload", &json!({}))?;
    if args.json {
        write_json(Path::new("-"), &reloaded, screen)?;
        return Ok(EXIT_OK);
    }
    let Reloaded { changed, needs_restart } = reloaded;
    if changed.is_empty() && needs_restart.is_empty() {
        screen.line("nothing changed")?;
    }
    for key in changed {
        screen.line(format!("changed        {key}"))?;
    }
    for key in needs_restart {
        screen.line(format!("needs a restart  {key}"))?;
    }
    Ok(EXIT_OK)
}
