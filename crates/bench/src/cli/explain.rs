//! `cascade explain`: why a chain of blocks hits as far as it does.

use std::path::{Path, PathBuf};

use cascade_block::ByteSize;
use cascade_node::explain::{BlockStory, ChainStory, Question};
use clap::Args;

use crate::cli::reach::Reach;
use crate::cli::{EXIT_OK, Failure, Screen, write_json};

/// Blocks that are told one by one; of longer chains, those around the first that is missing.
const BLOCKS_SHOWN_MAX: usize = 24;

/// Which blocks.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  cascade explain 4bf5122f344554c53bde2ebb8cd2b7e3d1600ad631c385a5d7cce23c7785459a
      Where is this block, or what became of it?
  cascade explain 4bf5122f344554c5
      The same by the digits that status pages show, for a block that is here.
  cascade explain --request keys.txt
      How far does this chain hit, and why does it stop there? One key a line, root first.
  cascade explain --request keys.txt --manifest manifest.json
      And if nothing of it is known: in which fields do the namespaces that are here differ?
  cascade explain --request keys.txt --json | jq '.first_missing'")]
pub(super) struct ExplainArgs {
    /// Keys of blocks, root first: 64 hexadecimal digits, or the first 8 or more, as pages show.
    #[arg(value_name = "KEY")]
    keys: Vec<String>,
    /// A file with one key a line; - is standard input.
    #[arg(long, value_name = "FILE", conflicts_with = "keys")]
    request: Option<PathBuf>,
    /// The caller's manifest: a JSON object of field names and values.
    #[arg(long, value_name = "FILE")]
    manifest: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    reach: Reach,
}

pub(super) fn run(args: &ExplainArgs, screen: &mut Screen) -> Result<i32, Failure> {
    let question = Question { keys: keys(args)?, manifest: manifest(args)? };
    let question =
        serde_json::to_value(&question).map_err(|error| Failure::measure("the request", error))?;
    let story: ChainStory = args.reach.connect()?.ask("explain", &question)?;
    if args.json {
        write_json(Path::new("-"), &story, screen)?;
    } else {
        show(&story, screen)?;
    }
    Ok(EXIT_OK)
}

fn keys(args: &ExplainArgs) -> Result<Vec<String>, Failure> {
    let keys: Vec<String> = match &args.request {
        None => args.keys.clone(),
        Some(path) => {
            let text = if path.as_os_str() == "-" {
                std::io::read_to_string(std::io::stdin())
            } else {
                std::fs::read_to_string(path)
            };
            let text = text.map_err(|error| Failure::Read {
                path: path.clone(),
                advice: "give a file with one key a line, 64 hexadecimal digits each".to_owned(),
                source: error.into(),
            })?;
            let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
            lines.map(str::to_owned).collect()
        }
    };
    let is_key = |key: &&String| {
        key.bytes().all(|digit| digit.is_ascii_hexdigit()) && (8..=64).contains(&key.len())
    };
    if let Some(wrong) = keys.iter().find(|key| !is_key(key)) {
        return Err(Failure::usage(
            format!("{:?} is no key", wrong.chars().take(80).collect::<String>()),
            "give the 64 hexadecimal digits of a block's key, or the first 8 or more",
        ));
    }
    if keys.is_empty() {
        return Err(Failure::usage(
            "no block is named",
            "give keys, or --request FILE with one key a line",
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
        advice: "give a JSON object of field names and values, all text".to_owned(),
        source,
    };
    let text = std::fs::read_to_string(path).map_err(|error| unreadable(error.into()))?;
    serde_json::from_str(&text).map(Some).map_err(|error| unreadable(error.into()))
}

fn show(story: &ChainStory, screen: &mut Screen) -> Result<(), Failure> {
    let total = story.blocks.len();
    screen.line(screen.bold(&format!("{} of {total} leading blocks are here", story.leading)))?;
    if let Some(missing) = &story.first_missing {
        screen.line(format!("block {} is missing: {}", story.leading + 1, missing))?;
    }
    if story.behind_gap > 0 {
        screen.line(format!(
            "{} blocks behind it are here, but nobody can use them without it",
            story.behind_gap
        ))?;
    }
    for namespace in &story.namespaces {
        screen.line(format!("namespace {} differs: {}", namespace.id, namespace.difference))?;
    }
    let first = story.leading.saturating_sub(BLOCKS_SHOWN_MAX / 2);
    let first = first.min(total.saturating_sub(BLOCKS_SHOWN_MAX));
    for (at, block) in story.blocks.iter().enumerate().skip(first).take(BLOCKS_SHOWN_MAX) {
        screen.line(format!("{:>6}  {}  {}", at + 1, &block.key[..16], line(block)))?;
    }
    if total > BLOCKS_SHOWN_MAX {
        screen.line(screen.dim(&format!("(of {total} blocks; --json has all)")))?;
    }
    Ok(())
}

fn line(block: &BlockStory) -> String {
    let Some(here) = &block.here else { return block.missing.clone().unwrap_or_default() };
    let mut parts =
        vec![format!("{} in {}", ByteSize(u64::from(here.bytes)).rounded(), here.tiers.join("+"))];
    if !here.queued_for.is_empty() {
        parts.push(format!("waits to be written to {}", here.queued_for.join("+")));
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
        parts.push(format!("held by {}", here.holders));
    }
    if here.is_prefix {
        parts.push("protected".to_owned());
    }
    parts.join(", ")
}
