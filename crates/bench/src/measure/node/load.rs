//! What a node costs a block, and how long calls take while others keep it busy.

use std::time::Duration;

use cascade_block::BlockKey;
use cascade_client::Client;
use cascade_store::{BlockStore as _, GetOutcome, Request};

use super::control::PERCENTILES;
use super::crew::Crew;
use super::echo::{Echo, LIMIT_IS};
use super::order::{Blocks, Order, Work};
use super::served::Served;
use super::{KIB, MIB, NodeBench, PATIENT, machine_ns, rest};
use crate::cli::Failure;
use crate::latency::Latencies;
use crate::measure::{Figure, Target, keys, timed};
use crate::payload;

/// Workers that keep the node busy.
const WORKERS: usize = 2;
/// Size of their blocks.
const SIZE: usize = 128 * KIB;
/// Blocks that each of them has.
const COUNT: usize = 256;
/// How long one sample lasts: processor time is counted in hundredths of a second.
const LASTING: Duration = Duration::from_millis(1500);

pub(super) fn run(bench: &mut NodeBench<'_, '_>) -> Result<(), Failure> {
    let get = |p: &str| format!("loaded/get-128KiB/{p}");
    let lookup = |p: &str| format!("loaded/lookup/{p}");
    for batch in [1, 32] {
        let name = format!("node-cpu/get-128KiB/batch-{batch}");
        if bench.wants_any(std::slice::from_ref(&name)) {
            processor(bench, name, batch)?;
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
        let text = format!("memcpy of as many bytes, and a {LIMIT_IS}, each under the same load");
        let figure =
            Figure::cost(get(percentile), "us", gets[at].clone(), (both, &text), Target::None);
        bench.deliver(figure)?;
    }
    Ok(())
}

/// Workers with blocks of their own that the node has.
fn busy(served: &Served, batch: usize) -> Result<Crew, Failure> {
    let mut crew = Crew::start(WORKERS, served)?;
    crew.tell(|at| {
        let (label, first) = ("load".to_owned(), at * COUNT);
        Order::Blocks(Blocks { label, first, count: COUNT, size: SIZE, batch })
    })?;
    crew.work(Work::Put, None)?;
    Ok(crew)
}

fn processor(bench: &mut NodeBench<'_, '_>, name: String, batch: usize) -> Result<(), Failure> {
    let served = Served::start(2 * WORKERS * COUNT * SIZE)?;
    let (mut crew, mut echo) = (busy(&served, batch)?, Echo::start()?);
    let lasting = LASTING / if bench.options.is_short { 6 } else { 1 };
    let (mut value, mut limit) = (Vec::new(), Vec::new());
    for round in 0..=bench.rounds() {
        let before = served.facts()?.processor;
        let done = crew.work(Work::Get, Some(lasting))?;
        let spent = served.facts()?.processor.saturating_sub(before);
        let before = echo.facts()?.processor;
        let (mut trips, until) = (0_u32, machine_ns() + 500_000_000);
        while machine_ns() < until {
            echo.round_trip()?;
            trips += 1;
        }
        let bare = echo.facts()?.processor.saturating_sub(before);
        if round > 0 {
            value.push(spent.as_secs_f64() * 1e9 / done.blocks as f64);
            limit.push(bare.as_secs_f64() * 1e9 / f64::from(trips) / batch as f64);
        }
    }
    crew.tell(|_| Order::Check)?;
    let text = format!("processor time of the other side of a {LIMIT_IS}, one a call");
    bench.deliver(Figure::cost(name, "ns/blk", value, (limit, &text), Target::None))
}

/// By percentile, one a round: lookups, gets, bare round trips and copies.
fn latencies(bench: &NodeBench<'_, '_>) -> Result<[[Vec<f64>; 3]; 4], Failure> {
    let served = Served::start(4 * WORKERS * COUNT * SIZE + 64 * MIB)?;
    let (mut crew, mut echo) = (busy(&served, 8)?, Echo::start()?);
    let client = served.connect()?;
    let keys = keys("load", WORKERS * COUNT);
    let mut samples: [[Vec<f64>; 3]; 4] = Default::default();
    let lasting = LASTING / if bench.options.is_short { 6 } else { 1 };
    for round in 0..=bench.rounds() {
        let stop_ns = machine_ns() + u64::try_from(lasting.as_nanos()).unwrap_or(0);
        for worker in crew.workers() {
            worker.begin(Work::Get, stop_ns)?;
        }
        rest(Duration::from_millis(20));
        let seen = under_load(&client, &mut echo, &keys, stop_ns)?;
        for worker in crew.workers() {
            worker.finish(stop_ns)?;
        }
        if round > 0 {
            for (samples, seen) in samples.iter_mut().zip(&seen) {
                for (samples, (_, quantile)) in samples.iter_mut().zip(PERCENTILES) {
                    samples.push(seen.us_at(quantile));
                }
            }
        }
    }
    crew.tell(|_| Order::Check)?;
    Ok(samples)
}

fn under_load(
    client: &Client,
    echo: &mut Echo,
    keys: &[BlockKey],
    stop_ns: u64,
) -> Result<[Latencies; 4], Failure> {
    let mut seen: [Latencies; 4] = Default::default();
    let (mut buffer, source) = (vec![0; SIZE], vec![7; SIZE]);
    let lost = || Failure::measure("calls under load", "a block that was put is not there");
    for key in keys.iter().cycle() {
        if machine_ns() >= stop_ns {
            break;
        }
        let key = std::slice::from_ref(key);
        let mut found = 0;
        seen[0].record(timed(|| found = client.lookup_prefix(&Request::new(key)).tiers.len()));
        let mut got = Vec::new();
        seen[1].record(timed(|| got = client.get(key, &mut [&mut buffer], PATIENT)));
        let is_hit = matches!(got.as_slice(), [GetOutcome::Hit { bytes: SIZE, .. }]);
        if found != 1 || !is_hit {
            return Err(lost());
        }
        payload::check(&key[0], &buffer, SIZE)
            .map_err(|wrong| Failure::measure("calls under load", format!("{wrong:?}")))?;
        seen[2].record(echo.round_trip()?);
        seen[3].record(timed(|| std::hint::black_box(&mut buffer).copy_from_slice(&source)));
    }
    Ok(seen)
}
