//! `cascade bench eviction`: every policy over traces and sizes, beside the optimum.

use std::path::{Path, PathBuf};

use clap::Args;

use crate::cli::{EXIT_OK, Failure, Screen, write_json};
use crate::study::{bundled_traces, study_table};
use crate::trace::Trace;

/// Where the traces lie that come with the source.
const BUNDLED: &str = "data/traces";

/// Which traces and sizes.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  cascade bench eviction
      The tables of the documentation: the traces below data/traces and a generated one.
  cascade bench eviction trace.jsonl sessions/ --sizes 1,10 --json study.json
      Two traces of your own, the second from all files of a directory.

Names only, no payload: a hit counts while the hits are unbroken from the start of its request.
Every policy evicts leaves first and refuses a request's last partial block.")]
pub(super) struct EvictionArgs {
    /// Trace files, or directories whose files are one trace [default: the bundled ones].
    #[arg(value_name = "TRACE")]
    traces: Vec<PathBuf>,
    /// Capacities in percent of a trace's different blocks.
    #[arg(
        long,
        value_name = "PERCENT,...",
        value_delimiter = ',',
        default_value = "1,2,5,10,25,50"
    )]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=100))]
    sizes: Vec<u64>,
    /// Write the figures as JSON; - is standard output.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
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

/// The traces that were named, or the bundled ones.
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
            advice: "run it in Cascade's source directory, or name traces of your own".to_owned(),
            source: Box::new(error),
        })
    } else {
        paths.iter().map(read).collect()
    }
}
