//! `cascade vllm-config`: the value of vLLM's `--kv-transfer-config` for this machine.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use cascade_block::ByteSize;
use cascade_node::available_bytes;
use clap::Args;
use serde_json::{Map, Value, json};

use crate::connection::ConnectionArgs;
use crate::{EXIT_OK, Failure, Screen, parse_bytes};

/// Of the memory that is available, the share that a store takes without `--dram`.
const SHARE_OF_MEMORY: u64 = 4;
/// How long a running node may take to answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// Where the engine keeps its blocks.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vllm serve MODEL --kv-transfer-config \"$(cascade vllm-config)\"
      Use the node that runs on this host. Without one, give the engine a store of its own with a \
quarter of the available memory.
  cascade vllm-config --dram 32GiB --files /var/lib/cascade/qwen --files-capacity 500GiB
      A store of the engine's own with a file tier, whose blocks survive the engine.
  cascade vllm-config --socket /run/cascade/cascade.sock
      The node at this socket, whether it runs or not.

Only the value is printed to standard output; what was chosen, and why, to standard error.")]
pub(super) struct VllmConfigArgs {
    /// Give the engine a store of its own of this size, even if a node runs.
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, conflicts_with = "socket")]
    dram: Option<u64>,
    /// Directory of a file tier of this engine alone, on a local disk.
    #[arg(long, value_name = "DIR", conflicts_with = "socket", requires = "files_capacity")]
    files: Option<PathBuf>,
    /// Size of the file tier.
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, requires = "files")]
    files_capacity: Option<u64>,
    /// Unix socket of the node that the engine uses.
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
}

/// What the engine uses, and why it was chosen.
struct Choice {
    settings: Map<String, Value>,
    reason: String,
}

pub(super) fn run(args: &VllmConfigArgs, screen: &mut Screen) -> Result<i32, Failure> {
    let Choice { settings, reason } = choose(args)?;
    let value = json!({
        "kv_connector": "CascadeConnector",
        "kv_connector_module_path": "cascadekv.connectors.vllm",
        "kv_role": "kv_both",
        // vLLM's default fails a request if one of its blocks does not arrive.
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": settings,
    });
    screen.notice(reason)?;
    screen.line(value)?;
    Ok(EXIT_OK)
}

fn choose(args: &VllmConfigArgs) -> Result<Choice, Failure> {
    if let Some(socket) = &args.socket {
        let socket = absolute(socket)?;
        return Ok(of_node(&socket, "as given"));
    }
    if args.dram.is_none() && args.files.is_none() {
        let connection = ConnectionArgs::of_process(PATIENCE);
        if connection.connect().and_then(|node| node.ping()).is_ok() {
            return Ok(of_node(&absolute(&connection.socket())?, "which runs"));
        }
    }
    own_store(args)
}

fn of_node(socket: &str, why: &str) -> Choice {
    Choice {
        settings: Map::from_iter([("cascade.node".to_owned(), json!(format!("unix:{socket}")))]),
        reason: format!("the engine uses the node at {socket}, {why}"),
    }
}

fn own_store(args: &VllmConfigArgs) -> Result<Choice, Failure> {
    let (dram, why) = match args.dram {
        Some(dram) => (dram, "as given".to_owned()),
        None => share_of_memory()?,
    };
    let mut settings =
        Map::from_iter([("cascade.dram".to_owned(), json!(ByteSize(dram).to_string()))]);
    let files = match (&args.files, args.files_capacity) {
        (Some(files), Some(capacity)) => {
            let files = absolute(files)?;
            settings
                .insert("cascade.files_capacity".to_owned(), json!(ByteSize(capacity).to_string()));
            let kept = format!("{} of files in {files} outlive it", ByteSize(capacity));
            settings.insert("cascade.files".to_owned(), json!(files));
            kept
        }
        _ => "nothing outlives it: give --files, or run `cascade serve`, which all engines of \
              this host share"
            .to_owned(),
    };
    let dram = ByteSize(dram);
    let reason = format!("the engine has a store of its own with {dram} of DRAM, {why}; {files}");
    Ok(Choice { settings, reason })
}

/// A quarter of what is available, in whole GiB if it is as much.
fn share_of_memory() -> Result<(u64, String), Failure> {
    let available = available_bytes(&|path| fs::read_to_string(path));
    let Some(available) = available else {
        return Err(Failure::Usage {
            what: "the available memory is not known: /proc/meminfo cannot be read".to_owned(),
            advice: "give the size with --dram".to_owned(),
        });
    };
    let share = available / SHARE_OF_MEMORY;
    let unit = if share >= 1 << 30 { 1 << 30 } else { 1 << 20 };
    let available = ByteSize(available - available % unit);
    Ok(((share - share % unit).max(unit), format!("a quarter of the {available} available")))
}

/// vLLM may run in another directory.
fn absolute(path: &PathBuf) -> Result<String, Failure> {
    let usage = |what: String| Failure::Usage {
        what,
        advice: "give a path that is text, as JSON needs".to_owned(),
    };
    let path =
        std::path::absolute(path).map_err(|error| usage(format!("{}: {error}", path.display())))?;
    let text = path.to_str().ok_or_else(|| usage(format!("{} is no UTF-8", path.display())))?;
    Ok(text.to_owned())
}
