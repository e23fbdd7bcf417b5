//! `cascade bench gpu`: the options, the header that names the GPU, and what was not measured.

use std::path::{Path, PathBuf};

use cascade_bench::gpu::{Gpu, GpuOptions, Notes};
use cascade_bench::{Bench, MeasureError};
use clap::Args;

use crate::bench::Output;
use crate::{Failure, Screen};

/// The measurements of a GPU.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  cascade bench gpu
      All figures of the first GPU. Takes 3 GiB of host memory and 2 GiB of the GPU's.
  cascade bench gpu --device 1 --only /64KiB/ --json gpu.json
      Copies of 64 KiB on the second GPU.
  cascade bench gpu --only kernel-check
      Whether our kernel copies the right bytes on this GPU: about 20 s, by others' figures.
  cascade bench gpu --fake
      Check that the benchmark works, without a GPU, over a fake driver: small sizes, no meaning.

Names of copies: to-device, to-host or both (at once), length of a fragment, fragments of a
submission, way: batch (many copies by a call of the driver) or single (a call for each copy), both
without a plan; direct (the driver), staged (the driver and our kernel) or mapped (our kernel), by a
plan of this way alone; chosen (by the plan that a table of this machine's costs makes). Fragments
follow each other in pinned host memory and are scattered on the GPU. The limit is one plain copy of
1 GiB in the same direction, measured in each round; plain/ has it as a row. The limit of
registration/ is the first touch of the same memory. cpu/ is processor time of the calling thread.
Every byte that was copied is compared, outside of the measured time.

hbm/ copies blocks between pages and a pool that is exported and mapped, as those of a node, in the
memory of this GPU; hbm-peer/ in that of another one that it can access. Ways: direct (the driver,
in batches), single (a call of it for each block), mapped (our kernel). A byte counts once, though
it is read and written. The limit is one plain copy of 1 GiB between both memories:
plain/on-device, plain/to-peer, plain/from-peer. x1 is the time of one block, from the submission
until it is done.

kernel-check/ copies fragments of all lengths to 4 KiB and some longer ones, at all alignments, and
compares each byte. After a wrong one, nothing else is measured with the kernel.

Without a GPU nothing is measured: the reason is printed, and the exit code is 1. In JSON, each row
has `device` and `fake`. A row of a plan has `ways`, and in one direction `predicted` and
`time_error`.

Exit codes: 0 measured; 1 there is no GPU, or it failed, or a byte was wrong: figures that were
measured before are kept; 2 no such device or no fake driver.")]
pub(crate) struct GpuArgs {
    /// Write the figures as JSON to FILE; - is standard output.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Index of the GPU; `cascade doctor` lists them.
    #[arg(long, value_name = "N", default_value_t = 0)]
    device: usize,
    /// Measure only figures whose name contains TEXT.
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Use the fake driver: what `CASCADE_CUDA_LIBRARY` names, else the library beside cascade.
    #[arg(long)]
    fake: bool,
    /// Leave out what needs our kernel, on a GPU where `--only kernel-check` failed.
    #[arg(long)]
    without_kernel: bool,
    /// Leave out the rows hbm/ and hbm-peer/.
    #[arg(long)]
    without_hbm: bool,
}

impl GpuArgs {
    pub(super) fn json(&self) -> Option<&Path> {
        self.json.as_deref()
    }
}

pub(super) fn run(args: &GpuArgs, screen: &mut Screen) -> Result<i32, Failure> {
    screen.notice("loading the CUDA driver, which may take seconds")?;
    let (device, is_fake, without_kernel) = (args.device, args.fake, args.without_kernel);
    let without_hbm = args.without_hbm;
    let gpu = Gpu::open(GpuOptions { device, is_fake, without_kernel, without_hbm })?;
    let subject = gpu.headline();
    let output = Output {
        subject: Some(&subject),
        ..Output::new(args.json.as_deref(), args.only.as_deref())
    };
    let mut notes = Notes::default();
    let code = output.measure(None, screen, |deliver| {
        let (directory, only) = (PathBuf::from("."), args.only.clone());
        let mut count = 0;
        let deliver = &mut |figure| {
            count += 1;
            deliver(figure)
        };
        notes = gpu.measure(&mut Bench { is_full: false, directory, only, deliver })?;
        match notes.failures.first().or(notes.not_measured.first()) {
            Some(row) if count == 0 => Err(MeasureError::measure("any of these rows", &**row)),
            _ => Ok(()),
        }
    })?;
    let is_json_on_screen = args.json.as_deref() == Some(Path::new("-"));
    let mut tell =
        |line: String| if is_json_on_screen { screen.notice(line) } else { screen.line(line) };
    for row in notes.not_measured {
        tell(format!("not measured: {row}"))?;
    }
    for finding in notes.findings {
        tell(finding)?;
    }
    if notes.failures.is_empty() {
        return Ok(code);
    }
    Err(Failure::from(MeasureError::measure(
        "everything: the figures above and in the file are complete, the rest is missing",
        notes.failures.join("; "),
    )))
}
