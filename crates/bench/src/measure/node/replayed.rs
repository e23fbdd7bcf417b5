//! A recorded trace through a client: how much of the time is copying, and how much round trips.

use std::time::Duration;

use cascade_client::Client;
use cascade_memory::{SlabMut, copy_in, copy_out};
use cascade_store::{BlockStore as _, PutOutcome, Request, StoreError, ViewOutcome};

use super::echo::{Echo, LIMIT_IS};
use super::served::Served;
use super::{KIB, MIB, NodeBench, PATIENT, puts};
use crate::cli::Failure;
use crate::measure::{Figure, Target, timed};
use crate::payload;
use crate::replay::workload::{PlannedRequest, Workload};
use crate::trace::Trace;

/// Size of a block; a real model's are larger, so round trips weigh less there.
const SIZE: usize = 64 * KIB;
/// Blocks of one call.
const BATCH: usize = 256;
/// The DRAM tier that blocks have.
const DRAM_BYTES: usize = 512 * MIB;
/// Slabs that copies alone go to in turn: as cold as what eviction gives back.
const SLABS: usize = 2048;
/// What a call would cost over a ring in shared memory with both sides awake.
const RING_CALL: Duration = Duration::from_nanos(500);

/// Where the time went.
#[derive(Debug, Default)]
struct Spent {
    lookups: Duration,
    views: Duration,
    copies_out: Duration,
    puts: Duration,
    node: Duration,
    /// As `puts`, only the copies, into slabs that are there.
    copies_in: Duration,
    round_trips: u64,
    hits: u64,
    blocks: u64,
}

impl Spent {
    fn calls(&self) -> Duration {
        self.lookups + self.views + self.copies_out + self.puts
    }

    fn copies(&self) -> Duration {
        self.copies_out + self.copies_in
    }
}

pub(super) fn run(bench: &mut NodeBench<'_, '_>) -> Result<(), Failure> {
    let Some(path) = &bench.options.trace else { return Ok(()) };
    let names = ["total", "round-trips", "ring-gain"].map(|name| format!("replay/{name}"));
    if !bench.wants_any(&names) {
        return Ok(());
    }
    let trace = Trace::read(path).map_err(|error| Failure::measure("a replay", error))?;
    let mut workload = Workload::new(&trace, SIZE);
    if bench.options.is_short {
        workload.requests.truncate(200);
    }
    let (mut total, mut copies, mut trips, mut gain) =
        (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut text = String::new();
    for _ in 0..bench.rounds().min(5) {
        let served = Served::start(DRAM_BYTES + SLABS * SIZE)?;
        let (client, mut echo) = (served.connect()?, Echo::start()?);
        let mut replay = Replay::new(&client)?;
        let mut bare = Vec::new();
        let before = served.facts()?.processor;
        for request in &workload.requests {
            replay.serve(&client, request)?;
            bare.push(echo.round_trip()?.as_secs_f64());
        }
        let mut spent = replay.spent;
        spent.node = served.facts()?.processor.saturating_sub(before);
        let bare = crate::measure::figure::median(&bare);
        let seconds = spent.calls().as_secs_f64();
        let ring = bare - RING_CALL.as_secs_f64();
        total.push(seconds);
        copies.push(spent.copies().as_secs_f64());
        trips.push(spent.round_trips as f64 * bare);
        gain.push(spent.round_trips as f64 * ring.max(0.0) / seconds * 100.0);
        text = describe(&spent, bare);
    }
    let [total_name, trips_name, gain_name] = names;
    let limit = (copies, "the same bytes copied, without a call");
    bench.deliver(Figure::cost(total_name, "s", total, limit, Target::None))?;
    bench.deliver(Figure::cost(trips_name, "s", trips, (Vec::new(), &text), Target::None))?;
    let text = format!(
        "none; what calls of {} ns would save of the total at most, both sides always awake",
        RING_CALL.as_nanos()
    );
    bench.deliver(Figure::cost(gain_name, "%", gain, (Vec::new(), &text), Target::None))
}

/// The last round in words.
fn describe(spent: &Spent, bare: f64) -> String {
    format!(
        "none; {} round trips, each priced as a {LIMIT_IS} ({:.1} us); lookups {:.2} s, leases \
         {:.2} s, copies out {:.2} s, puts {:.2} s (of which copies {:.2} s); the node was on a \
         processor for {:.2} s; {} of {} blocks hit",
        spent.round_trips,
        bare * 1e6,
        spent.lookups.as_secs_f64(),
        spent.views.as_secs_f64(),
        spent.copies_out.as_secs_f64(),
        spent.puts.as_secs_f64(),
        spent.copies_in.as_secs_f64(),
        spent.node.as_secs_f64(),
        spent.hits,
        spent.blocks
    )
}

/// A replay under way.
struct Replay {
    spent: Spent,
    source: Vec<u8>,
    buffer: Vec<u8>,
    slabs: Vec<SlabMut>,
    next_slab: usize,
}

impl Replay {
    fn new(client: &Client) -> Result<Self, Failure> {
        let slabs: Result<Vec<SlabMut>, StoreError> =
            (0..SLABS).map(|_| client.reserve(SIZE, PATIENT)).collect();
        let slabs = slabs.map_err(|error| Failure::measure("a replay", error))?;
        let (source, buffer) = (vec![0; BATCH * SIZE], vec![1; BATCH * SIZE]);
        Ok(Self { spent: Spent::default(), source, buffer, slabs, next_slab: 0 })
    }

    /// What an engine does for a request: look its chain up, load what is there, save the rest.
    fn serve(&mut self, client: &Client, request: &PlannedRequest) -> Result<(), Failure> {
        let mut asked = Request::new(&request.keys);
        asked.partial_tail = request.has_partial_tail;
        asked.at = Some(request.at);
        let mut leading = 0;
        self.spent.lookups += timed(|| leading = client.lookup_prefix(&asked).tiers.len());
        self.spent.round_trips += 1;
        self.spent.blocks += request.keys.len() as u64;
        let leading = leading.min(request.keys.len());
        for keys in request.keys[..leading].chunks(BATCH) {
            self.load(client, keys)?;
        }
        for keys in request.keys[leading..].chunks(BATCH) {
            self.save(client, keys)?;
        }
        Ok(())
    }

    fn load(&mut self, client: &Client, keys: &[cascade_block::BlockKey]) -> Result<(), Failure> {
        let mut views = Vec::new();
        self.spent.views += timed(|| views = client.view(keys, PATIENT));
        self.spent.round_trips += 1;
        for ((view, key), buffer) in views.iter().zip(keys).zip(self.buffer.chunks_mut(SIZE)) {
            let ViewOutcome::Hit { slab, .. } = view else { continue };
            self.spent.copies_out += timed(|| copy_out(buffer, slab, keys.len() * SIZE));
            self.spent.hits += 1;
            payload::check(key, buffer, SIZE)
                .map_err(|wrong| Failure::measure("a replay", format!("{key}: {wrong:?}")))?;
        }
        self.spent.views += timed(|| drop(views));
        Ok(())
    }

    fn save(&mut self, client: &Client, keys: &[cascade_block::BlockKey]) -> Result<(), Failure> {
        let pieces = self.source.chunks_exact_mut(SIZE);
        keys.iter().zip(pieces).for_each(|(key, block)| payload::fill(key, block));
        let puts = puts(keys, &self.source, SIZE);
        let mut outcomes = Vec::new();
        self.spent.puts += timed(|| outcomes = client.put(&puts, PATIENT));
        self.spent.round_trips += 2;
        if let Some(bad) = outcomes.iter().find(|o| matches!(o, PutOutcome::Failed(_))) {
            return Err(Failure::measure("a replay", format!("a put gave {bad:?}")));
        }
        let pieces = self.source.chunks_exact(SIZE).take(keys.len());
        let first = self.next_slab;
        self.next_slab = (first + BATCH) % SLABS;
        let slabs = self.slabs[first..].iter_mut();
        self.spent.copies_in +=
            timed(|| slabs.zip(pieces).for_each(|(slab, block)| copy_in(slab, block)));
        Ok(())
    }
}
