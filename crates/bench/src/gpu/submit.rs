//! What submitting copies costs the calling thread.

use cascade_device::{Copier, Direction, Way as DeviceWay};
use cascade_runtime::thread_cpu_time;

use super::memory::{Fragments, Pinned, Plain};
use super::work::Form;
use super::{Gpu, Notes, failed, soon};
use crate::{Bench, Figure, MeasureError, Target};

/// Length of a fragment: its bytes do not matter here.
const FRAGMENT: usize = 4 << 10;
/// Submissions of a sample.
const REPEATS: u32 = 50;

/// A row for each copy of a submission, beside the first.
struct Row {
    name: &'static str,
    form: Form,
    /// The copier, or why there is none.
    copier: Result<Copier, String>,
    target: Target,
    samples: Vec<f64>,
}

const SUBMIT: &str = "cpu/submit";
const COPIES: [&str; 5] =
    ["cpu/copy/batch", "cpu/copy/single", "cpu/copy/direct", "cpu/copy/staged", "cpu/copy/mapped"];

pub(super) fn run(gpu: &Gpu, bench: &mut Bench<'_>, notes: &mut Notes) -> Result<(), MeasureError> {
    if !bench.wants(SUBMIT) && !bench.wants_any(&COPIES) {
        return Ok(());
    }
    let count = if gpu.is_fake() { 256 } else { 4096 };
    let bytes = count * FRAGMENT;
    let mut plain = Plain::new(&gpu.context, bytes)?;
    let pinned = Pinned::new(&gpu.context, 2 * bytes + (4 << 20))?;
    let fragments = |count| Fragments::new(&pinned, Direction::ToDevice, (FRAGMENT, count), 0);
    let (mut one, mut many) = (fragments(1)?, fragments(count)?);
    let batched = pinned.copier(&gpu.context)?;
    let mut rows = rows(gpu, &pinned, notes)?;
    let mut submit = Vec::new();
    for round in 0..=bench.rounds() {
        let alone = cpu_us(&batched, Form::Copies, &mut one, &mut plain)?;
        if round > 0 {
            submit.push(alone);
        }
        for row in &mut rows {
            if let (true, Ok(copier)) = (bench.wants(row.name), &row.copier) {
                let first = cpu_us(copier, row.form, &mut one, &mut plain)?;
                let all = cpu_us(copier, row.form, &mut many, &mut plain)?;
                if round > 0 {
                    row.samples.push((all - first).max(0.0) / (count - 1) as f64);
                }
            }
        }
    }
    let cost = |name: &str, samples, target| {
        Figure::cost(name.to_owned(), "us", samples, (Vec::new(), ""), gpu.target(target))
    };
    gpu.deliver(bench, cost(SUBMIT, submit, Target::AtMost(20.0)))?;
    for row in rows {
        match row.copier {
            _ if !bench.wants(row.name) => {}
            Ok(_) => gpu.deliver(bench, cost(row.name, row.samples, row.target))?,
            Err(reason) => notes.leave_out(row.name, &reason),
        }
    }
    Ok(())
}

fn rows(gpu: &Gpu, pinned: &Pinned, notes: &Notes) -> Result<Vec<Row>, MeasureError> {
    let by = |way| match pinned.copier_by(&gpu.context, way, None) {
        Ok(copier) => Ok(Ok(copier)),
        Err(error) => gpu.reason(error).map(Err),
    };
    let by_kernel = |way| match notes.no_kernel {
        Some(reason) => Ok(Err(reason.to_owned())),
        None => by(way),
    };
    let batched = pinned.copier(&gpu.context)?;
    let has_batches = batched.batch_form().is_some();
    let batched = if has_batches { Ok(batched) } else { Err("the driver has no batched copy") };
    let copiers = [
        batched.map_err(str::to_owned),
        Ok(pinned.copier(&gpu.unbatched)?),
        by(DeviceWay::Direct)?,
        by_kernel(DeviceWay::Staged)?,
        by_kernel(DeviceWay::Mapped)?,
    ];
    let row = |(name, copier): (&'static str, _)| {
        let is_planned = !matches!(name, "cpu/copy/batch" | "cpu/copy/single");
        let form = if is_planned { Form::Transfer } else { Form::Copies };
        let is_single = name == "cpu/copy/single";
        let target = if is_single { Target::None } else { Target::AtMost(0.1) };
        Row { name, form, copier, target, samples: Vec::new() }
    };
    Ok(COPIES.into_iter().zip(copiers).map(row).collect())
}

/// Processor time of the calling thread for one submission, in microseconds. The bytes of the last
/// one are compared.
fn cpu_us(
    copier: &Copier,
    form: Form,
    fragments: &mut Fragments,
    plain: &mut Plain,
) -> Result<f64, MeasureError> {
    plain.fill_device(plain.bytes)?;
    let mut spent = 0.0;
    for _ in 0..REPEATS {
        let work = fragments.work(form, plain)?;
        let before = thread_cpu_time();
        let started = work.submit(copier).map_err(failed)?;
        spent += thread_cpu_time().saturating_sub(before).as_secs_f64();
        fragments.put_back(started.wait(soon())?);
    }
    plain.forget(plain.bytes);
    plain.read_device(plain.bytes)?;
    fragments.check("the cost of submissions", plain)?;
    Ok(spent * 1e6 / f64::from(REPEATS))
}
