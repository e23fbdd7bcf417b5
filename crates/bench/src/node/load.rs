//! The CPU time of a node per block, and the latency of calls under load.

use std::time::Duration;

use cascade_block::BlockKey;
use cascade_client::Client;
use cascade_replay::latency::Latencies;
use cascade_replay::payload;
use cascade_store::{BlockStore as _, GetOutcome, Request};

use super::control::PERCENTILES;
use super::echo_process::{EchoProcess, LIMIT_IS};
use super::protocol::{Work, WorkerBlocks, WorkerCommand};
use super::served::ServedNode;
use super::worker_group::WorkerGroup;
use super::{CALL_OPTIONS, KIB, MIB, NodeBench, machine_ns, sleep};
use crate::{Figure, MeasureError, Target, keys, timed};

/// Workers that make the load.
const WORKERS: usize = 2;
/// Size of their blocks.
const SIZE: usize = 128 * KIB;
/// Blocks of each worker.
const COUNT: usize = 256;
/// Duration of one sample. The kernel counts CPU time in hundredths of a second.
const SAMPLE_DURATION: Duration = Duration::from_millis(1500);

pub(super) fn run(bench: &mut NodeBench<'_, '_>) -> Result<(), MeasureError> {
    let get = |p: &str| format!("loaded/get-128KiB/{p}");
    let lookup = |p: &str| format!("loaded/lookup/{p}");
    for batch in [1, 32] {
        let name = format!("node-cpu/get-128KiB/batch-{batch}");
        if bench.wants_any(std::slice::from_ref(&name)) {
            cpu_time(bench, name, batch)?;
        }
    }
    let names = PERCENTILES.iter().flat_map(|(p, _)| [get(p), lookup(p)]);
    if !bench.wants_any(&names.collect::<Vec<_>>()) {
        return Ok(());
    }
    let samples = latencies(bench)?;
    let [lookups, gets, bare, copies] = samples;
    for (at, (percentile, _)) in PERCENTILES.iter().enumerate() {
        let text = format!("{LIMIT_IS}, under the same load, same percentile");
        let limit = (bare[at].clone(), text.as_str());
        let figure =
            Figure::cost(lookup(percentile), "us", lookups[at].clone(), limit, Target::None);
        bench.deliver(figure)?;
        let both = bare[at].iter().zip(&copies[at]).map(|(bare, copy)| bare + copy).collect();
        let text =
            format!("memcpy of the same number of bytes, and a {LIMIT_IS}, under the same load");
        let figure =
            Figure::cost(get(percentile), "us", gets[at].clone(), (both, &text), Target::None);
        bench.deliver(figure)?;
    }
    Ok(())
}

/// Starts workers and puts the blocks of each.
fn start_load(served: &ServedNode, batch: usize) -> Result<WorkerGroup, MeasureError> {
    let mut group = WorkerGroup::start(WORKERS, served)?;
    group.run_each(|at| {
        let (label, first) = ("load".to_owned(), at * COUNT);
        WorkerCommand::Blocks(WorkerBlocks { label, first, count: COUNT, size: SIZE, batch })
    })?;
    group.work(Work::Put, None)?;
    Ok(group)
}

fn cpu_time(bench: &mut NodeBench<'_, '_>, name: String, batch: usize) -> Result<(), MeasureError> {
    let served = ServedNode::start(2 * WORKERS * COUNT * SIZE)?;
    let (mut group, mut echo) = (start_load(&served, batch)?, EchoProcess::start()?);
    let duration = SAMPLE_DURATION / if bench.options.is_short { 6 } else { 1 };
    let (mut value, mut limit) = (Vec::new(), Vec::new());
    for round in 0..=bench.rounds() {
        let before = served.stats()?.cpu_time;
        let done = group.work(Work::Get, Some(duration))?;
        let spent = served.stats()?.cpu_time.saturating_sub(before);
        let before = echo.stats()?.cpu_time;
        let (mut trips, until) = (0_u32, machine_ns() + 500_000_000);
        while machine_ns() < until {
            echo.round_trip()?;
            trips += 1;
        }
        let bare = echo.stats()?.cpu_time.saturating_sub(before);
        if round > 0 {
            value.push(spent.as_secs_f64() * 1e9 / done.blocks as f64);
            limit.push(bare.as_secs_f64() * 1e9 / f64::from(trips) / batch as f64);
        }
    }
    group.run_each(|_| WorkerCommand::Check)?;
    let text = format!("CPU time of the other process in a {LIMIT_IS}, one per call");
    bench.deliver(Figure::cost(name, "ns/blk", value, (limit, &text), Target::None))
}

/// Latencies of lookups, gets, bare round trips and copies: by percentile, one sample per round.
fn latencies(bench: &NodeBench<'_, '_>) -> Result<[[Vec<f64>; 3]; 4], MeasureError> {
    let served = ServedNode::start(4 * WORKERS * COUNT * SIZE + 64 * MIB)?;
    let (mut group, mut echo) = (start_load(&served, 8)?, EchoProcess::start()?);
    let client = served.connect()?;
    let keys = keys("load", WORKERS * COUNT);
    let mut samples: [[Vec<f64>; 3]; 4] = Default::default();
    let duration = SAMPLE_DURATION / if bench.options.is_short { 6 } else { 1 };
    for round in 0..=bench.rounds() {
        let stop_ns = machine_ns() + u64::try_from(duration.as_nanos()).unwrap_or(0);
        for worker in group.workers() {
            worker.begin(Work::Get, stop_ns)?;
        }
        sleep(Duration::from_millis(20));
        let latencies = under_load(&client, &mut echo, &keys, stop_ns)?;
        for worker in group.workers() {
            worker.finish(stop_ns)?;
        }
        if round > 0 {
            for (samples, latencies) in samples.iter_mut().zip(&latencies) {
                for (samples, (_, quantile)) in samples.iter_mut().zip(PERCENTILES) {
                    samples.push(latencies.us_at(quantile));
                }
            }
        }
    }
    group.run_each(|_| WorkerCommand::Check)?;
    Ok(samples)
}

fn under_load(
    client: &Client,
    echo: &mut EchoProcess,
    keys: &[BlockKey],
    stop_ns: u64,
) -> Result<[Latencies; 4], MeasureError> {
    let mut latencies: [Latencies; 4] = Default::default();
    let (mut buffer, source) = (vec![0; SIZE], vec![7; SIZE]);
    let missing = || MeasureError::measure("calls under load", "a block that was put is missing");
    for key in keys.iter().cycle() {
        if machine_ns() >= stop_ns {
            break;
        }
        let key = std::slice::from_ref(key);
        let mut found = 0;
        latencies[0].record(timed(|| found = client.lookup_prefix(&Request::new(key)).tiers.len()));
        let mut got = Vec::new();
        latencies[1].record(timed(|| got = client.get(key, &mut [&mut buffer], CALL_OPTIONS)));
        let is_hit = matches!(got.as_slice(), [GetOutcome::Hit { bytes: SIZE, .. }]);
        if found != 1 || !is_hit {
            return Err(missing());
        }
        payload::check(&key[0], &buffer, SIZE).map_err(|wrong| {
            MeasureError::measure("calls under load", format!("WRONG BYTE: {wrong:?}"))
        })?;
        latencies[2].record(echo.round_trip()?);
        latencies[3].record(timed(|| std::hint::black_box(&mut buffer).copy_from_slice(&source)));
    }
    Ok(latencies)
}
