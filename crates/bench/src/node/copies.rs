//! Put and get of several processes through one node, compared with memcpy by these processes
//! between their memory and slabs of the same pool.

use cascade_store::BlockStore as _;

use super::protocol::{Work, WorkerBlocks, WorkerCommand};
use super::served::ServedNode;
use super::worker_group::WorkerGroup;
use super::{KIB, MIB, NodeBench};
use crate::figure::median;
use crate::{Figure, MeasureError, Target, gib_per_second, size_name};

/// Bytes of all workers together: much more than the CPU caches.
const BYTES: usize = 192 * MIB;
/// Bytes of one call.
const BATCH_BYTES: usize = 8 * MIB;
/// The target, as a share of memcpy.
const SHARE_MIN: f64 = 0.9;

const PUT_LIMIT: &str = "memcpy by the same processes into slabs of the same pool, same order";
const GET_LIMIT: &str = "memcpy by the same processes from slabs of the same pool, same order";

/// The work of one round, in order.
const TURNS: [Work; 6] =
    [Work::CopyIn, Work::StreamIn, Work::Put, Work::CopyOut, Work::StreamOut, Work::Get];

pub(super) fn run(bench: &mut NodeBench<'_, '_>) -> Result<(), MeasureError> {
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
) -> Result<(), MeasureError> {
    let count = (bench.scaled(BYTES) / size / workers).max(1);
    let bytes = count * size * workers;
    let served = ServedNode::start(bytes * 5 / 2 + 64 * MIB)?;
    let mut group = WorkerGroup::start(workers, &served)?;
    let client = served.connect()?;
    let batch = (BATCH_BYTES / size).clamp(1, count);
    group.run_each(|at| {
        let (label, first) = ("copies".to_owned(), at * count);
        WorkerCommand::Blocks(WorkerBlocks { label, first, count, size, batch })
    })?;
    let label = "warm".to_owned();
    group.run_in_turn(&WorkerCommand::Warm { label, count: bytes * 2 / size, size })?;
    group.run_in_turn(&WorkerCommand::Reserve)?;
    let mut samples: [Vec<f64>; 6] = Default::default();
    for round in 0..=bench.rounds() {
        client.clear();
        for (samples, work) in samples.iter_mut().zip(TURNS) {
            let done = group.work(work, None)?;
            if round > 0 {
                samples.push(gib_per_second(bytes, done.took));
            }
        }
        group.run_each(|_| WorkerCommand::Check)?;
    }
    let [memcpy_in, streamed_in, put, memcpy_out, streamed_out, get] = samples;
    let target = Target::ShareAtLeast(SHARE_MIN);
    let text = limit_text(PUT_LIMIT, &streamed_in);
    let limit = (memcpy_in, text.as_str());
    bench.deliver(Figure::rate(format!("put{tail}"), "GiB/s", put, limit, target))?;
    let text = limit_text(GET_LIMIT, &streamed_out);
    let limit = (memcpy_out, text.as_str());
    bench.deliver(Figure::rate(format!("get{tail}"), "GiB/s", get, limit, target))
}

/// Describes the limit, with the rate of the store's non-temporal copies, which explains a share
/// above 1.
fn limit_text(limit: &str, streamed: &[f64]) -> String {
    format!("{limit}; the store's non-temporal copies alone reach {:.2} GiB/s", median(streamed))
}
