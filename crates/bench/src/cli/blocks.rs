//! `cascade get`, `put` and `delete`: single blocks of a running node, for a look.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cascade_block::{BlockKey, ByteSize, Digest, DigestAlgorithm};
use cascade_client::Access;
use cascade_node::admin::{Deleted, Found};
use cascade_store::{BlockStore as _, CallOptions, Put, PutOutcome, ViewOutcome};
use clap::Args;
use serde_json::json;

use crate::cli::reach::Reach;
use crate::cli::{EXIT_FAILED, EXIT_OK, Failure, Screen, write_file, write_json};

/// Largest file that becomes a block: the node's own limit is the size of its pool.
const BLOCK_BYTES_MAX: u64 = 1 << 30;

/// Which block, and where its bytes go.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  cascade get 4bf5122f344554c5
      Length, tier and SHA-256 of the block whose key begins so. Nothing binary on the terminal.
  cascade get 4bf5122f344554c5 --output block.bin
      Its bytes in a file; - is standard output.

Counts as a read: the block may come up to DRAM. Exit code 1 if it is not here.")]
pub(super) struct GetArgs {
    /// The block's key: 64 hexadecimal digits, or the first 8 or more.
    #[arg(value_name = "KEY")]
    key: String,
    /// Write the bytes to this file; - is standard output.
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    reach: Reach,
}

pub(super) fn get(args: &GetArgs, screen: &mut Screen) -> Result<i32, Failure> {
    let to_screen = args.output.as_deref() == Some(Path::new("-"));
    if to_screen && args.json {
        return Err(Failure::usage("--json and --output - would both be printed", "choose one"));
    }
    let key = full_key(&args.key, &args.reach)?;
    let client = args.reach.connect_as_worker(Access::Read)?;
    let options = CallOptions { timeout: Some(args.reach.timeout), ..CallOptions::default() };
    let viewed = client.view(&[key], options).pop();
    let (slab, tier) = match viewed {
        Some(ViewOutcome::Hit { slab, tier }) => (slab, tier),
        Some(ViewOutcome::Failed(error)) => {
            return Err(Failure::Store { doing: "reading the block", source: error });
        }
        Some(ViewOutcome::Miss) | None => return missing(&key, args.json, screen),
    };
    if to_screen {
        screen.bytes(&slab)?;
        return Ok(EXIT_OK);
    }
    if let Some(path) = &args.output {
        write_file(path, &slab)?;
    }
    let sha256 = Digest::of(DigestAlgorithm::Sha256, &slab).to_string();
    let bytes = slab.len() as u64;
    if args.json {
        let answer = json!({
            "key": key.to_string(), "is_here": true, "bytes": bytes, "tier": tier,
            "sha256": sha256,
        });
        write_json(Path::new("-"), &answer, screen)?;
        return Ok(EXIT_OK);
    }
    screen.line(format!("{key}"))?;
    screen.line(format!("  length  {bytes} bytes ({})", ByteSize(bytes).rounded()))?;
    screen.line(format!("  tier    {tier}"))?;
    screen.line(format!("  sha256  {sha256}"))?;
    if let Some(path) = &args.output {
        screen.line(format!("  written to {}", path.display()))?;
    }
    Ok(EXIT_OK)
}

fn missing(key: &BlockKey, as_json: bool, screen: &mut Screen) -> Result<i32, Failure> {
    if as_json {
        let answer = json!({ "key": key.to_string(), "is_here": false });
        write_json(Path::new("-"), &answer, screen)?;
    } else {
        screen.line(format!("{key} is not here; cascade explain {key} says why"))?;
    }
    Ok(EXIT_FAILED)
}

/// The key that some digits stand for, asked of the node if they are not all.
fn full_key(text: &str, reach: &Reach) -> Result<BlockKey, Failure> {
    if let Ok(key) = text.parse() {
        return Ok(key);
    }
    let found: Found = reach.connect()?.ask("find", &json!({ "digits": text }))?;
    match found.keys.as_slice() {
        [key] => key.parse().map_err(|error| Failure::measure("the node's answer", error)),
        [] => Err(Failure::Declined(format!("no block here has a key that begins with {text}"))),
        several => Err(Failure::usage(
            format!("{text} begins the keys of several blocks"),
            format!("give more digits: {}", several.join(", ")),
        )),
    }
}

/// Which block, and where its bytes come from.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  cascade put 4bf5122f344554c53bde2ebb8cd2b7e3d1600ad631c385a5d7cce23c7785459a block.bin
      A block never changes: other bytes under a key that is here are refused.
  head -c 1MiB /dev/urandom | cascade put $(openssl rand -hex 32) -
      Does a put work? From standard input, under a key of chance.

Exit code 0 if the block is here now, 1 if not.")]
pub(super) struct PutArgs {
    /// The block's key: 64 hexadecimal digits.
    #[arg(value_name = "KEY")]
    key: BlockKey,
    /// A file with its bytes; - is standard input.
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    reach: Reach,
}

pub(super) fn put(args: &PutArgs, screen: &mut Screen) -> Result<i32, Failure> {
    let bytes = read_block(&args.file)?;
    let client = args.reach.connect_as_worker(Access::Write)?;
    let options = CallOptions { timeout: Some(args.reach.timeout), ..CallOptions::default() };
    let outcome = client.put(&[Put::new(args.key, &bytes)], options).pop();
    let (word, is_here, reason) = match outcome {
        Some(PutOutcome::Stored) => ("stored", true, None),
        Some(PutOutcome::Deduplicated) => ("deduplicated", true, None),
        Some(PutOutcome::Present) => ("present", true, None),
        Some(PutOutcome::Conflict) => {
            ("conflict", false, Some("this key is here with other bytes, which stay".to_owned()))
        }
        Some(PutOutcome::Declined(reason)) => ("declined", false, Some(format!("{reason:?}"))),
        Some(PutOutcome::Failed(error)) => {
            ("failed", false, Some(cascade_block::with_causes(&error)))
        }
        None => ("failed", false, None),
    };
    let key = args.key.to_string();
    if args.json {
        let answer = json!({
            "key": key, "bytes": bytes.len(), "outcome": word, "reason": reason,
        });
        write_json(Path::new("-"), &answer, screen)?;
    } else {
        let size = ByteSize(bytes.len() as u64).rounded();
        let reason = reason.map_or_else(String::new, |reason| format!(": {reason}"));
        screen.line(format!("{key} {word} ({size}){reason}"))?;
    }
    Ok(if is_here { EXIT_OK } else { EXIT_FAILED })
}

fn read_block(path: &Path) -> Result<Arc<[u8]>, Failure> {
    let mut bytes = Vec::new();
    let read = if path.as_os_str() == "-" {
        std::io::stdin().take(BLOCK_BYTES_MAX + 1).read_to_end(&mut bytes)
    } else {
        let file = std::fs::File::open(path);
        file.and_then(|file| file.take(BLOCK_BYTES_MAX + 1).read_to_end(&mut bytes))
    };
    read.map_err(|source| Failure::Read {
        path: path.to_owned(),
        advice: "give a file with the block's bytes, or - for standard input".to_owned(),
        source: Box::new(source),
    })?;
    if bytes.is_empty() || bytes.len() as u64 > BLOCK_BYTES_MAX {
        return Err(Failure::usage(
            format!("{} holds {} bytes", path.display(), bytes.len()),
            format!("a block has 1 byte to {}", ByteSize(BLOCK_BYTES_MAX)),
        ));
    }
    Ok(bytes.into())
}

/// Which blocks.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  cascade delete 4bf5122f344554c5
      Says whether the block was here. Its bytes stay readable to those who hold them.
  cascade delete --tenant alice KEY KEY --json
      Blocks of another tenant, as the node's own user or root.")]
pub(super) struct DeleteArgs {
    /// Keys of blocks: 64 hexadecimal digits, or the first 8 or more.
    #[arg(value_name = "KEY", required = true)]
    keys: Vec<String>,
    /// Whose blocks [default: those of the tenant that you are].
    #[arg(long, value_name = "NAME")]
    tenant: Option<String>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    reach: Reach,
}

pub(super) fn delete(args: &DeleteArgs, screen: &mut Screen) -> Result<i32, Failure> {
    let question = json!({ "tenant": args.tenant, "keys": args.keys });
    let deleted: Deleted = args.reach.connect()?.ask("delete", &question)?;
    if args.json {
        write_json(Path::new("-"), &deleted, screen)?;
        return Ok(EXIT_OK);
    }
    for (key, was_here) in deleted.keys.iter().zip(&deleted.was_here) {
        screen.line(format!("{key} {}", if *was_here { "deleted" } else { "was not here" }))?;
    }
    Ok(EXIT_OK)
}
