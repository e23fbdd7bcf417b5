//! Prints the eviction study of `docs/eviction.md`: all policies over the bundled traces.
//! Arguments replace the bundled traces.

#![expect(clippy::print_stdout, reason = "an example prints its result")]

use std::path::{Path, PathBuf};

use cascade_replay::study::{SIZES_PERCENT, bundled_traces, study_table};
use cascade_replay::trace::{Trace, TraceError};

fn main() -> Result<(), TraceError> {
    let paths: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let traces = if paths.is_empty() {
        bundled_traces(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/traces"))?
    } else {
        paths.iter().map(|path| Trace::read(path)).collect::<Result<_, _>>()?
    };
    println!("{}", study_table(&traces, &SIZES_PERCENT).markdown());
    Ok(())
}
