//! `cascade explain`: which blocks of a chain hit, and why the next one misses.

use std::path::{Path, PathBuf};

use cascade_block::ByteSize;
use cascade_node::explain::{BlockReport, ChainReport, ExplainRequest};
use clap::Args;

use crate::connection::ConnectionArgs;
use crate::{EXIT_OK, Failure, Screen, keys, write_json};

/// Limit of the blocks that are listed. A longer chain shows those around its first missing block.
const BLOCKS_SHOWN_MAX: usize = 24;

/// The blocks to explain.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  cascade explain 4bf5122f344554c53bde2ebb8cd2b7e3d1600ad631c385a5d7cce23c7785459a
      Show the tiers that have this block, or why no tier has it.
  cascade explain 4bf5122f344554c5
      The same with the first digits of the key, which status pages show, for a stored block.
  cascade explain --text greeting
      The same for the block of a text key.
  cascade explain --request keys.txt
      Show how many leading blocks of a chain hit, and why the next one misses. One key per line,
      root first.
  cascade explain --request keys.txt --manifest manifest.json
      If the node knows no block of the chain, also show in which fields its namespaces differ.
  cascade explain --request keys.txt --json | jq '.first_missing'")]
pub(super) struct ExplainArgs {
    /// Keys of blocks, root first: 64 hexadecimal digits, or at least the first 8.
    #[arg(value_name = "KEY")]
    keys: Vec<String>,
    /// Text key of a block, as in store.put("greeting", ...) of Python.
    #[arg(long = "text", value_name = "TEXT", value_parser = keys::of_text())]
    texts: Vec<String>,
    /// File with one key per line; - is standard input.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["keys", "texts"])]
    request: Option<PathBuf>,
    /// File with the manifest of the engine: a JSON object of field names and values.
    #[arg(long, value_name = "FILE")]
    manifest: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    connection: ConnectionArgs,
}

pub(super) fn run(args: &ExplainArgs, screen: &mut Screen) -> Result<i32, Failure> {
    let request = ExplainRequest { keys: keys_of(args)?, manifest: manifest(args)? };
    let request = serde_json::to_value(&request)
        .map_err(|error| Failure::other("write the request as JSON", error))?;
    let explanation: ChainReport = args.connection.connect()?.request("explain", &request)?;
    if args.json {
        write_json(Path::new("-"), &explanation, screen)?;
    } else {
        show(&explanation, screen)?;
    }
    Ok(EXIT_OK)
}

fn keys_of(args: &ExplainArgs) -> Result<Vec<String>, Failure> {
    let keys: Vec<String> = match &args.request {
        None => args.keys.iter().chain(&args.texts).cloned().collect(),
        Some(path) => {
            let text = if path.as_os_str() == "-" {
                std::io::read_to_string(std::io::stdin())
            } else {
                std::fs::read_to_string(path)
            };
            let text = text.map_err(|error| Failure::Read {
                path: path.clone(),
                advice: "give a file with one key of 64 hexadecimal digits per line".to_owned(),
                source: error.into(),
            })?;
            let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
            lines.map(str::to_owned).collect()
        }
    };
    keys::check(&keys)?;
    if keys.is_empty() {
        return Err(Failure::usage(
            "no key is given",
            "give keys, --text TEXT, or --request FILE with one key per line",
        ));
    }
    Ok(keys)
}

fn manifest(
    args: &ExplainArgs,
) -> Result<Option<std::collections::BTreeMap<String, String>>, Failure> {
    let Some(path) = &args.manifest else { return Ok(None) };
    let unreadable = |source: Box<dyn std::error::Error + Send + Sync>| Failure::Read {
        path: path.clone(),
        advice: "give a JSON object whose names and values are strings".to_owned(),
        source,
    };
    let text = std::fs::read_to_string(path).map_err(|error| unreadable(error.into()))?;
    serde_json::from_str(&text).map(Some).map_err(|error| unreadable(error.into()))
}

fn show(explanation: &ChainReport, screen: &mut Screen) -> Result<(), Failure> {
    let total = explanation.blocks.len();
    screen.line(screen.bold(&format!("{} of {total} leading blocks hit", explanation.leading)))?;
    if let Some(missing) = &explanation.first_missing {
        screen.line(format!("block {} is missing: {}", explanation.leading + 1, missing))?;
    }
    if explanation.behind_gap > 0 {
        screen.line(format!(
            "{} later blocks are stored, but an engine cannot use them without it",
            explanation.behind_gap
        ))?;
    }
    for namespace in &explanation.namespaces {
        screen.line(format!("namespace {} differs: {}", namespace.id, namespace.difference))?;
    }
    let first = explanation.leading.saturating_sub(BLOCKS_SHOWN_MAX / 2);
    let first = first.min(total.saturating_sub(BLOCKS_SHOWN_MAX));
    for (at, block) in explanation.blocks.iter().enumerate().skip(first).take(BLOCKS_SHOWN_MAX) {
        let key = block.key.get(..16).unwrap_or(&block.key);
        screen.line(format!("{:>6}  {key}  {}", at + 1, line(block)))?;
    }
    if total > BLOCKS_SHOWN_MAX {
        screen
            .line(screen.dim(&format!("({BLOCKS_SHOWN_MAX} of {total} blocks; --json has all)")))?;
    }
    Ok(())
}

fn line(block: &BlockReport) -> String {
    let Some(here) = &block.here else { return block.missing.clone().unwrap_or_default() };
    let mut parts =
        vec![format!("{} in {}", ByteSize(u64::from(here.bytes)).rounded(), here.tiers.join("+"))];
    if !here.queued_for.is_empty() {
        parts.push(format!("pending write to {}", here.queued_for.join("+")));
    }
    if let Some(age) = here.age_s {
        parts.push(format!("put {age} s ago"));
    }
    match here.idle_s {
        Some(idle) => parts.push(format!("read {} times, last {idle} s ago", here.uses)),
        None => parts.push("never read".to_owned()),
    }
    if let Some(writer) = here.writer {
        parts.push(format!("by client {writer}"));
    }
    if here.pins > 0 {
        parts.push(format!("{} pins", here.pins));
    }
    if here.holders > 0 {
        parts.push(format!("{} holders", here.holders));
    }
    if here.is_prefix {
        parts.push("protected".to_owned());
    }
    parts.join(", ")
}
