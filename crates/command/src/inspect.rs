//! `cascade inspect`: what the directory of a file tier contains, and whether it is intact.

use std::path::{Path, PathBuf};

use cascade_block::ByteSize;
use cascade_disk::{InspectReport, StoredManifest, inspect};
use cascade_replay::figures::grouped;
use clap::Args;
use serde_json::{Value, json};

use crate::{EXIT_FAILED, EXIT_OK, Failure, Screen, write_json};

/// Limit of the files that are listed. The sums cover all files.
const FILES_SHOWN_MAX: usize = 40;
const ADVICE: &str = "give the directory of a file tier: the value of `files` or --files";

/// The directory to inspect.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  cascade inspect /var/tmp/cache
      List the segments with their live and dead blocks. It changes nothing, and a store may use
      the directory at the same time.
  cascade inspect /var/tmp/cache --verify
      Read every live block and check its checksum. The exit code is 1 if anything is damaged.")]
pub(super) struct InspectArgs {
    /// Directory of a file tier.
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// Read every live block and check its checksum.
    #[arg(long)]
    verify: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &InspectArgs, screen: &mut Screen) -> Result<i32, Failure> {
    let report = inspect(&args.directory, args.verify, &mut |_| ());
    let report = report.map_err(|error| Failure::Read {
        path: args.directory.clone(),
        advice: ADVICE.to_owned(),
        source: Box::new(error),
    })?;
    if report.files.is_empty() && report.manifests.is_empty() && report.problems.is_empty() {
        return Err(Failure::usage(
            format!("{} contains no segment", args.directory.display()),
            ADVICE,
        ));
    }
    if args.json {
        write_json(Path::new("-"), &as_json(args, &report), screen)?;
    } else {
        show(args, &report, screen)?;
    }
    Ok(if report.is_clean() { EXIT_OK } else { EXIT_FAILED })
}

/// Sums over all files.
#[derive(Debug, Default)]
struct Sums {
    file_bytes: u64,
    live: (u64, u64),
    dead: (u64, u64),
    damaged: (u64, u64),
}

fn sums(report: &InspectReport) -> Sums {
    let mut sums = Sums::default();
    for file in &report.files {
        sums.file_bytes += file.file_bytes;
        for (sum, records, bytes) in [
            (&mut sums.live, file.live_records, file.live_bytes),
            (&mut sums.dead, file.dead_records, file.dead_bytes),
            (&mut sums.damaged, file.damaged_records, file.damaged_bytes),
        ] {
            sum.0 += records;
            sum.1 += bytes;
        }
    }
    sums
}

fn problems(report: &InspectReport) -> Vec<String> {
    let of_files = report.files.iter().flat_map(|file| {
        file.problems.iter().map(|problem| format!("{}: {problem}", file.path.display()))
    });
    let of_manifests = report.manifests.iter().filter_map(|manifest| match manifest {
        StoredManifest::Invalid { .. } => Some(format!("a manifest cannot be read: {manifest:?}")),
        _ => None,
    });
    of_files.chain(of_manifests).chain(report.problems.iter().cloned()).collect()
}

fn show(args: &InspectArgs, report: &InspectReport, screen: &mut Screen) -> Result<(), Failure> {
    let head = format!(
        "{:<42}{:>8}{:>12}{:>9}{:>9}{:>9}",
        "file", "state", "bytes", "live", "dead", "damaged"
    );
    let head = screen.bold(&head);
    screen.line(head)?;
    for file in report.files.iter().take(FILES_SHOWN_MAX) {
        let name = file.path.file_name().unwrap_or(file.path.as_os_str()).to_string_lossy();
        screen.line(format!(
            "{name:<42}{:>8}{:>12}{:>9}{:>9}{:>9}",
            if file.is_sealed { "sealed" } else { "open" },
            ByteSize(file.file_bytes).rounded(),
            grouped(file.live_records),
            grouped(file.dead_records),
            grouped(file.damaged_records),
        ))?;
    }
    if report.files.len() > FILES_SHOWN_MAX {
        screen.line(format!("... and {} more", report.files.len() - FILES_SHOWN_MAX))?;
    }
    let sums = sums(report);
    screen.line("")?;
    for (name, (records, bytes)) in
        [("live", sums.live), ("dead", sums.dead), ("damaged", sums.damaged)]
    {
        let size = ByteSize(bytes).rounded();
        screen.line(format!("  {name:<10}{:>12} blocks{size:>14}", grouped(records)))?;
    }
    screen.line(format!("  on disk   {:>33}", ByteSize(sums.file_bytes).rounded()))?;
    for problem in problems(report) {
        let problem = screen.verdict(false, &format!("  {problem}"));
        screen.line(problem)?;
    }
    let checked = if args.verify {
        "every live block was read and checked"
    } else {
        "block bytes were not read; --verify checks them"
    };
    let verdict = if report.is_clean() {
        "intact"
    } else {
        "DAMAGED: damaged blocks are misses, the others are served"
    };
    let verdict = screen.verdict(report.is_clean(), &format!("  {verdict} ({checked})"));
    screen.line(verdict)
}

fn as_json(args: &InspectArgs, report: &InspectReport) -> Value {
    let files = report.files.iter().map(|file| {
        json!({
            "path": file.path.display().to_string(),
            "file_bytes": file.file_bytes,
            "is_sealed": file.is_sealed,
            "live_blocks": file.live_records,
            "live_bytes": file.live_bytes,
            "dead_blocks": file.dead_records,
            "dead_bytes": file.dead_bytes,
            "damaged_blocks": file.damaged_records,
            "damaged_bytes": file.damaged_bytes,
            "problems": file.problems,
        })
    });
    let sums = sums(report);
    json!({
        "directory": args.directory.display().to_string(),
        "is_verified": args.verify,
        "is_clean": report.is_clean(),
        "file_bytes": sums.file_bytes,
        "live_blocks": sums.live.0,
        "live_bytes": sums.live.1,
        "dead_blocks": sums.dead.0,
        "dead_bytes": sums.dead.1,
        "damaged_blocks": sums.damaged.0,
        "damaged_bytes": sums.damaged.1,
        "manifests": report.manifests.len(),
        "problems": problems(report),
        "files": files.collect::<Vec<_>>(),
    })
}
