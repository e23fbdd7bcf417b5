//! What submitting copies costs the calling thread.

use cascade_device::Copier;
use cascade_runtime::thread_cpu_time;

use super::memory::{Direction, Fragments, Pinned, Plain};
use super::{Gpu, failed, soon};
use crate::{Bench, Figure, MeasureError, Target};

/// Length of a fragment: its bytes do not matter here.
const FRAGMENT: usize = 4 << 10;
/// Submissions of a sample.
const REPEATS: u32 = 50;

pub(super) fn run(
    gpu: &Gpu,
    bench: &mut Bench<'_>,
    not_measured: &mut Vec<String>,
) -> Result<(), MeasureError> {
    let names = ["cpu/submit", "cpu/copy/batch", "cpu/copy/single"];
    if !bench.wants_any(&names) {
        return Ok(());
    }
    let count = if gpu.is_fake() { 256 } else { 4096 };
    let bytes = count * FRAGMENT;
    let mut plain = Plain::new(&gpu.context, bytes)?;
    let pinned = Pinned::new(&gpu.context, 2 * bytes + (4 << 20))?;
    let shape = |count| (FRAGMENT, count);
    let mut one = Fragments::new(&pinned, &plain, Direction::ToDevice, shape(1), 0)?;
    let mut many = Fragments::new(&pinned, &plain, Direction::ToDevice, shape(count), 0)?;
    let batched = pinned.copier(&gpu.context)?;
    let single = pinned.copier(&gpu.unbatched)?;
    let (mut submit, mut by_batch, mut by_single) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..=bench.rounds() {
        let alone = cpu_us(&batched, &mut one, &mut plain)?;
        let per_copy = |all: f64| (all - alone).max(0.0) / (count - 1) as f64;
        let batch = cpu_us(&batched, &mut many, &mut plain)?;
        let calls = cpu_us(&single, &mut many, &mut plain)?;
        if round > 0 {
            submit.push(alone);
            by_batch.push(per_copy(batch));
            by_single.push(per_copy(calls));
        }
    }
    let [submit_name, batch_name, single_name] = names.map(str::to_owned);
    let cost = |name, samples, target| {
        Figure::cost(name, "us", samples, (Vec::new(), ""), gpu.target(target))
    };
    gpu.deliver(bench, cost(submit_name, submit, Target::AtMost(20.0)))?;
    if batched.batch_form().is_some() {
        gpu.deliver(bench, cost(batch_name, by_batch, Target::AtMost(0.1)))?;
    } else {
        not_measured.push(format!("{batch_name}: the driver has no batched copy"));
    }
    gpu.deliver(bench, cost(single_name, by_single, Target::None))
}

/// Processor time of the calling thread for one submission, in microseconds. The bytes of the last
/// one are compared.
fn cpu_us(
    copier: &Copier,
    fragments: &mut Fragments,
    plain: &mut Plain,
) -> Result<f64, MeasureError> {
    plain.fill_device()?;
    let mut spent = 0.0;
    for _ in 0..REPEATS {
        let copies = std::mem::take(&mut fragments.copies);
        let before = thread_cpu_time();
        let mut pending = copier.submit(copies, None).map_err(failed)?;
        spent += thread_cpu_time().saturating_sub(before).as_secs_f64();
        fragments.copies = pending.wait(soon()).map_err(failed)?.unwrap_or_default();
    }
    plain.read_device()?;
    fragments.check("the cost of submissions", plain)?;
    Ok(spent * 1e6 / f64::from(REPEATS))
}
