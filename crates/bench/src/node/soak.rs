//! A long mixed load while workers are killed: memory must not grow, and no byte may be wrong.

use std::time::Duration;

use cascade_client::Client;
use cascade_store::{BlockStore as _, PutOutcome};

use super::process::ProcessStats;
use super::protocol::Work;
use super::served::ServedNode;
use super::worker_group::{WorkerGroup, WorkerProcess};
use super::{CALL_OPTIONS, MIB, NodeBench, machine_ns, puts, sleep};
use crate::{Figure, MeasureError, Target, keys};

/// Capacity of DRAM: much less than the put bytes, so that blocks are evicted all the time.
const DRAM_BYTES: usize = 128 * MIB;
/// Workers that run as long as the load.
const STEADY_WORKERS: usize = 2;
/// Mean time until a worker is killed.
const WORKER_LIFETIME: Duration = Duration::from_millis(400);
/// Target for the growth of memory after the first tenth of the time, in MiB.
const GROWTH_MIB_MAX: f64 = 8.0;
/// Target for lost capacity: one block in this many. Threads of the node keep that much in free
/// slabs of other sizes. Memory that killed workers leak would grow with time and exceed it.
const LOST_CAPACITY_SHARE: f64 = 100.0;
/// Samples of the node's memory in the whole time.
const MEMORY_SAMPLES: u32 = 100;

pub(super) fn run(bench: &mut NodeBench<'_, '_>) -> Result<(), MeasureError> {
    let Some(duration) = bench.options.soak else { return Ok(()) };
    let name = |what: &str| format!("soak/{}s/{what}", duration.as_secs());
    let served = ServedNode::start(DRAM_BYTES)?;
    let client = served.connect()?;
    let capacity_before = measure_capacity(&client)?;
    let idle = served.stats()?;
    let result = churn(&served, duration)?;
    client.clear();
    sleep(Duration::from_millis(500));
    // Memory that was split for other sizes is merged only as it is used: the largest of three
    // measurements counts.
    let repeated: Result<Vec<usize>, MeasureError> =
        (0..3).map(|_| measure_capacity(&client)).collect();
    let (repeated, ended) = (repeated?, served.stats()?);
    let capacity_after = repeated.iter().copied().max().unwrap_or(0);
    let SoakResult { own_mib, blocks, hits, kills } = result;
    let text = format!(
        "none; {blocks} blocks requested or put, {hits} hits, with every byte checked; {kills} \
         workers were killed"
    );
    let settled = &own_mib[own_mib.len() / 10..];
    let Some(first) = settled.first() else {
        return Err(MeasureError::measure(
            "the soak",
            "it was too short for a sample; use more seconds",
        ));
    };
    let most = settled.iter().copied().fold(0.0, f64::max);
    let growth = vec![(most - first).max(0.0)];
    let target = Target::AtMost(GROWTH_MIB_MAX);
    bench.deliver(Figure::cost(name("growth"), "MiB", growth, (Vec::new(), &text), target))?;
    let more = ended.descriptors as f64 - idle.descriptors as f64;
    let text = format!("none; {} at the start, {} at the end", idle.descriptors, ended.descriptors);
    let none = Target::AtMost(0.0);
    let leaked = vec![more.max(0.0)];
    bench.deliver(Figure::cost(name("descriptors"), "more", leaked, (Vec::new(), &text), none))?;
    let text = format!("none; {capacity_before} blocks of 64 KiB fit before, {repeated:?} after");
    let lost = vec![capacity_before.saturating_sub(capacity_after) as f64];
    let most = Target::AtMost(capacity_before as f64 / LOST_CAPACITY_SHARE);
    bench.deliver(Figure::cost(name("lost-room"), "blocks", lost, (Vec::new(), &text), most))
}

/// The measurements of a load.
#[derive(Debug)]
struct SoakResult {
    /// Samples of the node's memory.
    own_mib: Vec<f64>,
    blocks: u64,
    hits: u64,
    kills: u64,
}

fn churn(served: &ServedNode, duration: Duration) -> Result<SoakResult, MeasureError> {
    let stop_ns = machine_ns() + u64::try_from(duration.as_nanos()).unwrap_or(0);
    let mut steady = WorkerGroup::start(STEADY_WORKERS, served)?;
    for (seed, worker) in steady.workers().iter_mut().enumerate() {
        worker.begin(Work::Churn(seed as u64), stop_ns)?;
    }
    let mut result = SoakResult { own_mib: Vec::new(), blocks: 0, hits: 0, kills: 0 };
    let sample_interval_ns = u64::try_from((duration / MEMORY_SAMPLES).as_nanos()).unwrap_or(0);
    let mut next_sample_ns = machine_ns();
    while machine_ns() < stop_ns {
        run_and_kill_worker(served, 1000 + result.kills, stop_ns)?;
        result.kills += 1;
        if machine_ns() < stop_ns {
            steady.workers().iter_mut().try_for_each(WorkerProcess::expect_busy)?;
        }
        if machine_ns() >= next_sample_ns {
            let ProcessStats { own_bytes, .. } = served.stats()?;
            result.own_mib.push(own_bytes as f64 / MIB as f64);
            next_sample_ns = machine_ns() + sample_interval_ns;
        }
    }
    for worker in steady.workers() {
        let (blocks, hits) = worker.finish(stop_ns)?;
        result.blocks += blocks;
        result.hits += hits;
    }
    Ok(result)
}

/// Starts a worker and kills it, by drop, in the middle of its work.
fn run_and_kill_worker(served: &ServedNode, seed: u64, stop_ns: u64) -> Result<(), MeasureError> {
    let mut group = WorkerGroup::start(1, served)?;
    let worker: &mut WorkerProcess = &mut group.workers()[0];
    worker.begin(Work::Churn(seed), stop_ns + 1_000_000_000)?;
    // From half to one and a half lifetimes, so that it is killed at different points of its work.
    sleep(WORKER_LIFETIME / 2 + WORKER_LIFETIME * u32::try_from(seed % 17).unwrap_or(0) / 17);
    worker.expect_busy()
}

/// The number of blocks that fit into the node. Memory that killed workers leaked is missing.
fn measure_capacity(client: &Client) -> Result<usize, MeasureError> {
    const SIZE: usize = 64 << 10;
    let keys = keys("room", 2 * DRAM_BYTES / SIZE);
    let bytes = vec![9; 64 * SIZE];
    for keys in keys.chunks(64) {
        let outcomes = client.put(&puts(keys, &bytes, SIZE), CALL_OPTIONS);
        if let Some(bad) = outcomes.iter().find(|o| matches!(o, PutOutcome::Failed(_))) {
            return Err(MeasureError::measure("the soak", format!("a put returned {bad:?}")));
        }
    }
    let stored = client.contains(&keys).into_iter().filter(|is_stored| *is_stored).count();
    client.clear();
    Ok(stored)
}
