//! What it takes to register host memory with the driver, beside the first touch of that memory.

use std::sync::Arc;

use cascade_device::RegisteredPool;
use cascade_memory::{HugePages, Pool, PoolConfig};

use super::{Gpu, Notes, failed};
use crate::{Bench, Figure, GIB, MeasureError, Target, timed};

const LIMIT: &str = "mapping the same memory and touching it for the first time";

pub(super) fn run(gpu: &Gpu, bench: &mut Bench<'_>, notes: &mut Notes) -> Result<(), MeasureError> {
    let cases = [
        ("registration/4KiB-pages", HugePages::Never, 0.1),
        ("registration/2MiB-pages", HugePages::Auto, 0.04),
    ];
    for (name, huge_pages, most) in cases {
        if !bench.wants(name) {
            continue;
        }
        match measure(gpu, bench.rounds(), name, huge_pages)? {
            Ok((samples, limits)) => {
                let target = gpu.target(Target::AtMost(most));
                let limit = (limits, LIMIT);
                let figure = Figure::cost(name.to_owned(), "s/GiB", samples, limit, target);
                gpu.deliver(bench, figure)?;
            }
            Err(reason) => notes.leave_out(name, &reason),
        }
    }
    Ok(())
}

/// Samples and those of the limit.
type Samples = (Vec<f64>, Vec<f64>);

/// The samples, or why there are none.
fn measure(
    gpu: &Gpu,
    rounds: usize,
    name: &str,
    huge_pages: HugePages,
) -> Result<Result<Samples, String>, MeasureError> {
    let bytes: usize = if gpu.is_fake() { 8 << 20 } else { 1 << 30 };
    let gib = bytes as f64 / GIB;
    let (mut samples, mut limits) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let config = PoolConfig { capacity_bytes: bytes, huge_pages, populate: true };
        let mut pool = None;
        let touched = timed(|| pool = Some(Pool::new(&config)));
        let pool = pool.expect("it was just made");
        let pool = pool.map_err(|error| MeasureError::measure(name, error))?;
        let pages = pool.region().host().expect("`Pool::new` maps host memory").pages();
        let wanted = if huge_pages == HugePages::Never { 0 } else { bytes };
        if pages.huge_bytes != wanted {
            let (huge, all) = (pages.huge_bytes >> 20, bytes >> 20);
            return Ok(Err(format!("{huge} of {all} MiB are in pages of 2 MiB")));
        }
        let registered = RegisteredPool::new(&gpu.context, Arc::new(pool.clone()), usize::MAX);
        let registered = registered.map_err(failed)?;
        if let Some(refusal) = registered.report().refusal.clone() {
            return Err(MeasureError::measure(name, refusal));
        }
        samples.push(registered.report().took.as_secs_f64() / gib);
        limits.push(touched.as_secs_f64() / gib);
    }
    Ok(Ok((samples, limits)))
}
