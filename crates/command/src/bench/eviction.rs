//! `cascade bench eviction`: every policy over traces and capacities, compared with the optimum.

use std::path::{Path, PathBuf};

use cascade_replay::study::{bundled_traces, study_table};
use cascade_replay::trace::Trace;
use clap::Args;

use crate::{EXIT_OK, Failure, Screen, write_json};

/// Directory of the traces in the source tree.
const BUNDLED: &str = "data/traces";

/// The traces and capacities.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  cascade bench eviction
      Compare all policies on the traces below data/traces and on a generated one.
  cascade bench eviction trace.jsonl sessions/ --sizes 1,10 --json study.json
      Use two other traces; the second one consists of all files of a directory.

Only keys are replayed, without payload. A block counts as a hit only if all blocks before it in its
request are hits. Every policy evicts leaves first and declines a request's last partial block.")]
pub(crate) struct EvictionArgs {
    /// Trace files, or directories whose files form one trace [default: those in data/traces].
    #[arg(value_name = "TRACE")]
    traces: Vec<PathBuf>,
    /// Capacities in percent of the unique blocks of a trace.
    #[arg(
        long,
        value_name = "PERCENT,...",
        value_delimiter = ',',
        default_value = "1,2,5,10,25,50"
    )]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=100))]
    sizes: Vec<u64>,
    /// Write the results as JSON to FILE; - is standard output.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

impl EvictionArgs {
    pub(super) fn json(&self) -> Option<&Path> {
        self.json.as_deref()
    }
}

pub(super) fn run(args: &EvictionArgs, screen: &mut Screen) -> Result<i32, Failure> {
    let traces = traces(&args.traces)?;
    let table = study_table(&traces, &args.sizes);
    match &args.json {
        Some(path) if path.as_os_str() == "-" => (),
        _ => screen.line(table.markdown().trim_end())?,
    }
    if let Some(path) = &args.json {
        write_json(path, &table, screen)?;
    }
    Ok(EXIT_OK)
}

/// The traces at `paths`, or the bundled ones if there are none.
pub(super) fn traces(paths: &[PathBuf]) -> Result<Vec<Trace>, Failure> {
    let read = |path: &PathBuf| {
        Trace::read(path).map_err(|error| Failure::Read {
            path: path.clone(),
            advice: "give a trace in Mooncake's JSONL format or recorded agent sessions".to_owned(),
            source: Box::new(error),
        })
    };
    if paths.is_empty() {
        bundled_traces(Path::new(BUNDLED)).map_err(|error| Failure::Read {
            path: BUNDLED.into(),
            advice: "run this in Cascade's source directory, or give trace files".to_owned(),
            source: Box::new(error),
        })
    } else {
        paths.iter().map(read).collect()
    }
}
