//! `cascade get`, `put` and `delete`: single blocks of a running node.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cascade_block::{BlockKey, ByteSize, Digest, DigestAlgorithm};
use cascade_client::Access;
use cascade_node::admin::{DeleteResult, FoundKeys};
use cascade_store::{
    BlockStore as _, CallOptions, DeclineReason, Put, PutOutcome, StoreError, ViewOutcome,
};
use clap::Args;
use serde_json::json;

use crate::connection::ConnectionArgs;
use crate::{EXIT_FAILED, EXIT_OK, Failure, Screen, keys, write_file, write_json};

/// Limit of the size of a file that is put. The node's limit is the size of its pool.
const BLOCK_BYTES_MAX: u64 = 1 << 30;

/// The block to read and the output.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  cascade get 4bf5122f344554c5
      Print length, tier and SHA-256 of the block whose key starts with these digits.
  cascade get 4bf5122f344554c5 --output block.bin
      Also write its bytes to a file.
  cascade get --text greeting --output -
      Print the bytes of the block of a text key.

This counts as a read, so the block may be promoted to DRAM. The exit code is 1 if the node does not
have the block, and 2 if KEY is not the digits of a key, as with every command.")]
pub(super) struct GetArgs {
    /// Key of the block: 64 hexadecimal digits, or at least the first 8.
    #[arg(value_name = "KEY", required_unless_present = "text")]
    key: Option<String>,
    /// Text key of the block, as in store.put("greeting", ...) of Python.
    #[arg(long, value_name = "TEXT", value_parser = keys::of_text(), conflicts_with = "key")]
    text: Option<String>,
    /// Write the bytes of the block to FILE; - is standard output.
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    connection: ConnectionArgs,
}

pub(super) fn get(args: &GetArgs, screen: &mut Screen) -> Result<i32, Failure> {
    let to_screen = args.output.as_deref() == Some(Path::new("-"));
    if to_screen && args.json {
        return Err(Failure::usage(
            "--json and --output - both write to standard output",
            "use one of them, or give --output a file",
        ));
    }
    // One of them is given: clap has checked it.
    let key = args.key.as_ref().or(args.text.as_ref()).map_or("", String::as_str);
    let key = full_key(key, &args.connection)?;
    let client = args.connection.connect_as_worker(Access::Read)?;
    let options = CallOptions { timeout: Some(args.connection.timeout), ..CallOptions::default() };
    let viewed = client.view(&[key], options).pop();
    let (slab, tier) = match viewed {
        Some(ViewOutcome::Hit { slab, tier }) => (slab, tier),
        Some(ViewOutcome::Failed(error)) => {
            return Err(Failure::Store { doing: "reading the block", source: error });
        }
        Some(ViewOutcome::Miss) | None => return missing(&key, args.json, screen),
    };
    let failed =
        |error| Failure::Store { doing: "reading the block", source: StoreError::Device(error) };
    let block = slab.bytes_or_copy().map_err(failed)?;
    if to_screen {
        screen.bytes(&block)?;
        return Ok(EXIT_OK);
    }
    if let Some(path) = &args.output {
        write_file(path, &block)?;
    }
    let sha256 = Digest::of(DigestAlgorithm::Sha256, &block).to_string();
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
        screen.line(format!("{key} is not stored; to see why: cascade explain {key}"))?;
    }
    Ok(EXIT_FAILED)
}

/// The key that starts with the given digits. Queries the node unless all 64 are given.
fn full_key(text: &str, connection: &ConnectionArgs) -> Result<BlockKey, Failure> {
    if let Ok(key) = text.parse() {
        return Ok(key);
    }
    keys::check(&[text.to_owned()])?;
    let found: FoundKeys = connection.connect()?.request("find", &json!({ "digits": text }))?;
    match found.keys.as_slice() {
        [key] => key.parse().map_err(|error| Failure::other("read the node's answer", error)),
        [] => Err(Failure::Declined(format!("no stored block has a key that starts with {text}"))),
        several => Err(Failure::usage(
            format!("the keys of several blocks start with {text}"),
            format!("give more digits of one of them: {}", several.join(", ")),
        )),
    }
}

/// The block to put and the input.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  cascade put 4bf5122f344554c53bde2ebb8cd2b7e3d1600ad631c385a5d7cce23c7785459a block.bin
      Put a file. A block never changes: other bytes under a stored key are a conflict.
  head -c 1MiB /dev/urandom | cascade put $(openssl rand -hex 32) -
      Put random bytes from standard input under a random key, to test that puts work.

The exit code is 0 if the block is stored afterwards, else 1.")]
pub(super) struct PutArgs {
    /// Key of the block: 64 hexadecimal digits.
    #[arg(value_name = "KEY")]
    key: BlockKey,
    /// File with the bytes of the block; - is standard input.
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    connection: ConnectionArgs,
}

pub(super) fn put(args: &PutArgs, screen: &mut Screen) -> Result<i32, Failure> {
    let bytes = read_block(&args.file)?;
    let client = args.connection.connect_as_worker(Access::Write)?;
    let options = CallOptions { timeout: Some(args.connection.timeout), ..CallOptions::default() };
    let outcome = client.put(&[Put::new(args.key, &bytes)], options).pop();
    let (word, is_here, reason) = match outcome {
        Some(PutOutcome::Stored) => ("stored", true, None),
        Some(PutOutcome::Deduplicated) => ("deduplicated", true, None),
        Some(PutOutcome::Present) => ("present", true, None),
        Some(PutOutcome::Conflict) => {
            ("conflict", false, Some("this key is stored with other bytes; they stay".to_owned()))
        }
        Some(PutOutcome::Declined(reason)) => ("declined", false, Some(decline_text(reason))),
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

fn decline_text(reason: DeclineReason) -> String {
    let text = match reason {
        DeclineReason::Partial => "the node does not store partial blocks",
        DeclineReason::TooLarge => "it is larger than a tier can hold",
        DeclineReason::Full => "every stored block is pinned or held by a view",
        DeclineReason::WorthLess => "the eviction policy values every stored block more",
        DeclineReason::Empty => "the pipeline has no tier that keeps blocks",
    };
    text.to_owned()
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
        advice: "give a file with the bytes of the block, or - for standard input".to_owned(),
        source: Box::new(source),
    })?;
    if bytes.is_empty() || bytes.len() as u64 > BLOCK_BYTES_MAX {
        return Err(Failure::usage(
            match bytes.len() {
                0 => format!("{} is empty", path.display()),
                _ => format!("{} has more than {}", path.display(), ByteSize(BLOCK_BYTES_MAX)),
            },
            format!("give a block of 1 byte to {}", ByteSize(BLOCK_BYTES_MAX)),
        ));
    }
    Ok(bytes.into())
}

/// The blocks to delete.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  cascade delete 4bf5122f344554c5
      Delete a block and print whether it was stored. Views and leases on it stay valid.
  cascade delete --tenant alice KEY KEY --json
      Delete blocks of another tenant. Requires root, the node's user or a member of admin_group.")]
pub(super) struct DeleteArgs {
    /// Keys of blocks: 64 hexadecimal digits, or at least the first 8.
    #[arg(value_name = "KEY", required_unless_present = "texts")]
    keys: Vec<String>,
    /// Text key of a block, as in store.put("greeting", ...) of Python.
    #[arg(long = "text", value_name = "TEXT", value_parser = keys::of_text())]
    texts: Vec<String>,
    /// Tenant of the blocks [default: the tenant of the user or token].
    #[arg(long, value_name = "NAME")]
    tenant: Option<String>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    connection: ConnectionArgs,
}

pub(super) fn delete(args: &DeleteArgs, screen: &mut Screen) -> Result<i32, Failure> {
    keys::check(&args.keys)?;
    let keys: Vec<&String> = args.keys.iter().chain(&args.texts).collect();
    let request = json!({ "tenant": args.tenant, "keys": keys });
    let deleted: DeleteResult = args.connection.connect()?.request("delete", &request)?;
    if args.json {
        write_json(Path::new("-"), &deleted, screen)?;
        return Ok(EXIT_OK);
    }
    for (key, was_here) in deleted.keys.iter().zip(&deleted.was_here) {
        screen.line(format!("{key} {}", if *was_here { "deleted" } else { "was not stored" }))?;
    }
    Ok(EXIT_OK)
}
