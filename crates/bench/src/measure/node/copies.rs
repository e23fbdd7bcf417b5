//! Put and get of several processes through one node, against the same processes' memcpy between
//! their memory and slabs of the same pool.

use cascade_store::BlockStore as _;

use super::crew::Crew;
use super::order::{Blocks, Order, Work};
use super::served::Served;
use super::{KIB, MIB, NodeBench};
use crate::cli::Failure;
use crate::measure::figure::median;
use crate::measure::{Figure, Target, gib_per_second, size_name};

/// Bytes of all workers together: far beyond the caches.
const BYTES: usize = 192 * MIB;
/// Bytes of one call.
const BATCH_BYTES: usize = 8 * MIB;
/// What has to be reached of memcpy.
const SHARE_MIN: f64 = 0.9;

const PUT_LIMIT: &str = "memcpy by the same processes into slabs of the same pool, same order";
const GET_LIMIT: &str = "memcpy by the same processes from slabs of the same pool, same order";

/// In the order in which they take turns in a round.
const TURNS: [Work; 6] =
    [Work::CopyIn, Work::StreamIn, Work::Put, Work::CopyOut, Work::StreamOut, Work::Get];

pub(super) fn run(bench: &mut NodeBench<'_, '_>) -> Result<(), Failure> {
    for size in [128 * KIB, MIB] {
        for workers in [1, 2, 4] {
            let tail = format!("/{}/{workers}-workers", size_name(size));
            if bench.wants_any(&[format!("put{tail}"), format!("get{tail}")]) {
                measure(bench, size, workers, &tail)?;
            }
        }
    }
    Ok(())
}

fn measure(
    bench: &mut NodeBench<'_, '_>,
    size: usize,
    workers: usize,
    tail: &str,
) -> Result<(), Failure> {
    let count = (bench.scaled(BYTES) / size / workers).max(1);
    let bytes = count * size * workers;
    let served = Served::start(bytes * 5 / 2 + 64 * MIB)?;
    let mut crew = Crew::start(workers, &served)?;
    let client = served.connect()?;
    let batch = (BATCH_BYTES / size).clamp(1, count);
    crew.tell(|at| {
        let first = at * count;
        Order::Blocks(Blocks { label: "copies".to_owned(), first, count, size, batch })
    })?;
    let label = "warm".to_owned();
    crew.tell_in_turn(&Order::Warm { label, count: bytes * 2 / size, size })?;
    crew.tell_in_turn(&Order::Reserve)?;
    let mut samples: [Vec<f64>; 6] = Default::default();
    for round in 0..=bench.rounds() {
        client.clear();
        for (samples, work) in samples.iter_mut().zip(TURNS) {
            let done = crew.work(work, None)?;
            if round > 0 {
                samples.push(gib_per_second(bytes, done.took));
            }
        }
        crew.tell(|_| Order::Check)?;
    }
    let [memcpy_in, streamed_in, put, memcpy_out, streamed_out, get] = samples;
    let target = Target::ShareAtLeast(SHARE_MIN);
    let text = told(PUT_LIMIT, &streamed_in);
    let limit = (memcpy_in, text.as_str());
    bench.deliver(Figure::rate(format!("put{tail}"), "GiB/s", put, limit, target))?;
    let text = told(GET_LIMIT, &streamed_out);
    let limit = (memcpy_out, text.as_str());
    bench.deliver(Figure::rate(format!("get{tail}"), "GiB/s", get, limit, target))
}

/// A share above 1 has a reason, and the reason has a figure.
fn told(limit: &str, streamed: &[f64]) -> String {
    format!(
        "{limit}; the store's own copies, past the caches, alone: {:.2} GiB/s",
        median(streamed)
    )
}
