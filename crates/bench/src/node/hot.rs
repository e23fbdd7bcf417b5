//! Many processes read the same blocks: the rate of each, compared with that of a single reader.

use std::time::Duration;

use cascade_replay::payload;
use cascade_store::BlockStore as _;

use super::protocol::{Work, WorkerBlocks, WorkerCommand};
use super::served::ServedNode;
use super::worker_group::WorkerGroup;
use super::{CALL_OPTIONS, KIB, MIB, NodeBench, all_stored, puts};
use crate::{Figure, MeasureError, Target, keys, size_name};

/// Readers of the group.
const READERS: usize = 8;
/// Duration of one sample.
const SAMPLE_DURATION: Duration = Duration::from_millis(400);
/// The target for a reader of the group, as a share of a single reader, after the loss that memcpy
/// also has.
const SHARE_MIN: f64 = 0.9;

pub(super) fn run(bench: &mut NodeBench<'_, '_>) -> Result<(), MeasureError> {
    for (size, count) in [(MIB, 1), (128 * KIB, 64)] {
        let name = format!("hot/{count}x{}/{READERS}-readers", size_name(size));
        if bench.wants_any(std::slice::from_ref(&name)) {
            measure(bench, name, size, count)?;
        }
    }
    Ok(())
}

fn measure(
    bench: &mut NodeBench<'_, '_>,
    name: String,
    size: usize,
    count: usize,
) -> Result<(), MeasureError> {
    let served = ServedNode::start(256 * MIB)?;
    let client = served.connect()?;
    let keys = keys("hot", count);
    let mut bytes = vec![0; count * size];
    let pieces = bytes.chunks_exact_mut(size);
    keys.iter().zip(pieces).for_each(|(key, block)| payload::fill(key, block));
    all_stored(&client.put(&puts(&keys, &bytes, size), CALL_OPTIONS))
        .map_err(|why| MeasureError::measure("hot reads", why))?;
    let mut single = Readers::start(1, &served, size, count)?;
    let mut group = Readers::start(READERS, &served, size, count)?;
    let duration = SAMPLE_DURATION / if bench.options.is_short { 8 } else { 1 };
    let (mut value, mut limit) = (Vec::new(), Vec::new());
    for round in 0..=bench.rounds() {
        let copy_single = single.rate(Work::StreamOut, duration)?;
        let copy_group = group.rate(Work::StreamOut, duration)?;
        let get_single = single.rate(Work::Get, duration)?;
        let get_group = group.rate(Work::Get, duration)?;
        if round > 0 {
            value.push(get_group);
            // Readers share processors and memory bandwidth: copies without a node show this loss.
            limit.push(get_single * copy_group / copy_single);
        }
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let text = format!(
        "the rate of a single reader through the node, times the rate per process of {READERS} \
         processes over that of one process that only copies, on these {cores} processors"
    );
    let target = Target::ShareAtLeast(SHARE_MIN);
    bench.deliver(Figure::rate(name, "GiB/s", value, (limit, &text), target))
}

/// Processes that read the same blocks.
struct Readers {
    group: WorkerGroup,
    count: usize,
    size: usize,
}

impl Readers {
    fn start(
        readers: usize,
        served: &ServedNode,
        size: usize,
        blocks: usize,
    ) -> Result<Self, MeasureError> {
        let mut group = WorkerGroup::start(readers, served)?;
        let label = "hot".to_owned();
        let blocks = WorkerBlocks { label, first: 0, count: blocks, size, batch: blocks };
        group.run_each(|_| WorkerCommand::Blocks(blocks.clone()))?;
        group.run_each(|_| WorkerCommand::Hold)?;
        Ok(Self { group, count: readers, size })
    }

    /// GiB/s per reader.
    fn rate(&mut self, work: Work, duration: Duration) -> Result<f64, MeasureError> {
        let done = self.group.work(work, Some(duration))?;
        self.group.run_each(|_| WorkerCommand::Check)?;
        let bytes = done.blocks as f64 * self.size as f64;
        Ok(bytes / done.took.as_secs_f64() / self.count as f64 / crate::GIB)
    }
}
