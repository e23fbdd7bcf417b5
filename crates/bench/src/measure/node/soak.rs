//! A long mixed load with workers that are killed: nothing may grow, and no byte may be wrong.

use std::time::Duration;

use cascade_client::Client;
use cascade_store::{BlockStore as _, PutOutcome};

use super::crew::{Crew, Worker};
use super::order::Work;
use super::process::ProcessFacts;
use super::served::Served;
use super::{MIB, NodeBench, PATIENT, machine_ns, puts, rest};
use crate::cli::Failure;
use crate::measure::{Figure, Target, keys};

/// The DRAM tier: far less than what is put, so that eviction never rests.
const DRAM_BYTES: usize = 128 * MIB;
/// Workers that live as long as the load.
const STEADY: usize = 2;
/// How long a worker lives that is killed.
const LIFE: Duration = Duration::from_millis(400);
/// What memory may grow by, in MiB, after the first tenth of the time.
const GROWTH_MIB_MAX: f64 = 8.0;
/// One block in as many may be missing: slabs of other sizes that threads keep for their next use.
/// What dead workers keep would grow with time.
const LOST_ROOM_SHARE: f64 = 100.0;
/// Looks at the node in the whole time.
const LOOKS: u32 = 100;

pub(super) fn run(bench: &mut NodeBench<'_, '_>) -> Result<(), Failure> {
    let Some(lasting) = bench.options.soak else { return Ok(()) };
    let name = |what: &str| format!("soak/{}s/{what}", lasting.as_secs());
    let served = Served::start(DRAM_BYTES)?;
    let client = served.connect()?;
    let room_before = room(&client)?;
    let idle = served.facts()?;
    let seen = churn(&served, lasting)?;
    client.clear();
    rest(Duration::from_millis(500));
    // Memory that was cut in other sizes becomes whole as it is used.
    let again: Result<Vec<usize>, Failure> = (0..3).map(|_| room(&client)).collect();
    let (again, ended) = (again?, served.facts()?);
    let room_after = again.iter().copied().max().unwrap_or(0);
    let Seen { own_mib, blocks, hits, kills } = seen;
    let text = format!(
        "none; {blocks} blocks asked for or put, {hits} hits, each byte of them checked: a wrong \
         one ends the run; {kills} workers were killed"
    );
    let warm = own_mib.len() / 10;
    let most = own_mib[warm..].iter().copied().fold(0.0, f64::max);
    let growth = vec![(most - own_mib[warm]).max(0.0)];
    let target = Target::AtMost(GROWTH_MIB_MAX);
    bench.deliver(Figure::cost(name("growth"), "MiB", growth, (Vec::new(), &text), target))?;
    let more = ended.descriptors as f64 - idle.descriptors as f64;
    let text = format!("none; {} at the start, {} at the end", idle.descriptors, ended.descriptors);
    let none = Target::AtMost(0.0);
    let leaked = vec![more.max(0.0)];
    bench.deliver(Figure::cost(name("descriptors"), "more", leaked, (Vec::new(), &text), none))?;
    let text = format!("none; room for {room_before} blocks of 64 KiB before, {again:?} after");
    let lost = vec![room_before.saturating_sub(room_after) as f64];
    let most = Target::AtMost(room_before as f64 / LOST_ROOM_SHARE);
    bench.deliver(Figure::cost(name("lost-room"), "blocks", lost, (Vec::new(), &text), most))
}

/// What a load showed.
#[derive(Debug)]
struct Seen {
    own_mib: Vec<f64>,
    blocks: u64,
    hits: u64,
    kills: u64,
}

fn churn(served: &Served, lasting: Duration) -> Result<Seen, Failure> {
    let stop_ns = machine_ns() + u64::try_from(lasting.as_nanos()).unwrap_or(0);
    let mut steady = Crew::start(STEADY, served)?;
    for (seed, worker) in steady.workers().iter_mut().enumerate() {
        worker.begin(Work::Churn(seed as u64), stop_ns)?;
    }
    let mut seen = Seen { own_mib: Vec::new(), blocks: 0, hits: 0, kills: 0 };
    let mut look_ns = machine_ns();
    while machine_ns() < stop_ns {
        killed(served, 1000 + seen.kills, stop_ns)?;
        seen.kills += 1;
        if machine_ns() < stop_ns {
            steady.workers().iter_mut().try_for_each(Worker::expect_busy)?;
        }
        if machine_ns() >= look_ns {
            let ProcessFacts { own_bytes, .. } = served.facts()?;
            seen.own_mib.push(own_bytes as f64 / MIB as f64);
            look_ns = machine_ns() + u64::try_from((lasting / LOOKS).as_nanos()).unwrap_or(0);
        }
    }
    for worker in steady.workers() {
        let (blocks, hits) = worker.finish(stop_ns)?;
        seen.blocks += blocks;
        seen.hits += hits;
    }
    Ok(seen)
}

/// A worker that dies in the middle of what it does.
fn killed(served: &Served, seed: u64, stop_ns: u64) -> Result<(), Failure> {
    let mut crew = Crew::start(1, served)?;
    let worker: &mut Worker = &mut crew.workers()[0];
    worker.begin(Work::Churn(seed), stop_ns + 1_000_000_000)?;
    // Not always at the same point of its work.
    rest(LIFE / 2 + LIFE * u32::try_from(seed % 17).unwrap_or(0) / 17);
    worker.expect_busy()
}

/// How many blocks the node has room for: what is lost to dead workers is missing here.
fn room(client: &Client) -> Result<usize, Failure> {
    const SIZE: usize = 64 << 10;
    let keys = keys("room", 2 * DRAM_BYTES / SIZE);
    let bytes = vec![9; 64 * SIZE];
    for keys in keys.chunks(64) {
        let outcomes = client.put(&puts(keys, &bytes, SIZE), PATIENT);
        if let Some(bad) = outcomes.iter().find(|o| matches!(o, PutOutcome::Failed(_))) {
            return Err(Failure::measure("the soak", format!("a put gave {bad:?}")));
        }
    }
    let there = client.contains(&keys).into_iter().filter(|is_there| *is_there).count();
    client.clear();
    Ok(there)
}
