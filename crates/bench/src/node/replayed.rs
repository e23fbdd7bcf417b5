//! Replay of a trace through a client: the time for copies and for round trips.

use std::time::Duration;

use cascade_client::Client;
use cascade_memory::{HostSlabMut, copy_in};
use cascade_replay::payload;
use cascade_replay::trace::Trace;
use cascade_replay::workload::{PlannedRequest, Workload};
use cascade_store::{BlockStore as _, PutOutcome, Request, ViewOutcome};

use super::echo_process::{EchoProcess, LIMIT_IS};
use super::served::ServedNode;
use super::{CALL_OPTIONS, KIB, MIB, NodeBench, puts, reserve};
use crate::{Figure, MeasureError, Target, timed};

/// Size of a block. Those of real models are larger, so their round trips have a smaller share.
const SIZE: usize = 64 * KIB;
/// Blocks of one call.
const BATCH: usize = 256;
/// DRAM for blocks.
const DRAM_BYTES: usize = 512 * MIB;
/// Slabs that the copies without a call use in turn: so many that they are as cold as slabs that
/// eviction frees.
const SLABS: usize = 2048;
/// Assumed cost of a call over a ring in shared memory when both sides poll.
const RING_CALL: Duration = Duration::from_nanos(500);

/// Times and counts of a replay.
#[derive(Debug, Default)]
struct ReplayTimes {
    lookups: Duration,
    views: Duration,
    copies_out: Duration,
    puts: Duration,
    /// CPU time of the node.
    node: Duration,
    /// Copies of the put blocks into reserved slabs, without a call.
    copies_in: Duration,
    round_trips: u64,
    hits: u64,
    blocks: u64,
}

impl ReplayTimes {
    fn calls(&self) -> Duration {
        self.lookups + self.views + self.copies_out + self.puts
    }

    fn copies(&self) -> Duration {
        self.copies_out + self.copies_in
    }
}

pub(super) fn run(bench: &mut NodeBench<'_, '_>) -> Result<(), MeasureError> {
    let Some(path) = &bench.options.trace else { return Ok(()) };
    let names = ["total", "round-trips", "ring-gain"].map(|name| format!("replay/{name}"));
    if !bench.wants_any(&names) {
        return Ok(());
    }
    let trace = Trace::read(path).map_err(|error| MeasureError::measure("a replay", error))?;
    let mut workload = Workload::new(&trace, SIZE);
    if bench.options.is_short {
        workload.requests.truncate(200);
    }
    let (mut total, mut copies, mut trips, mut gain) =
        (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut text = String::new();
    for _ in 0..bench.rounds().min(5) {
        let served = ServedNode::start(DRAM_BYTES + SLABS * SIZE)?;
        let (client, mut echo) = (served.connect()?, EchoProcess::start()?);
        let mut replay = ClientReplay::new(&client)?;
        let mut bare = Vec::new();
        let before = served.stats()?.cpu_time;
        for request in &workload.requests {
            replay.replay(&client, request)?;
            bare.push(echo.round_trip()?.as_secs_f64());
        }
        let mut times = replay.times;
        times.node = served.stats()?.cpu_time.saturating_sub(before);
        let bare = crate::figure::median(&bare);
        let seconds = times.calls().as_secs_f64();
        let saved_per_call = bare - RING_CALL.as_secs_f64();
        total.push(seconds);
        copies.push(times.copies().as_secs_f64());
        trips.push(times.round_trips as f64 * bare);
        gain.push(times.round_trips as f64 * saved_per_call.max(0.0) / seconds * 100.0);
        text = describe(&times, bare);
    }
    let [total_name, trips_name, gain_name] = names;
    let limit = (copies, "copies of the same bytes, without a call");
    bench.deliver(Figure::cost(total_name, "s", total, limit, Target::None))?;
    bench.deliver(Figure::cost(trips_name, "s", trips, (Vec::new(), &text), Target::None))?;
    let text = format!(
        "none; the share of the total that calls of {} ns would save at most, with both sides \
         polling",
        RING_CALL.as_nanos()
    );
    bench.deliver(Figure::cost(gain_name, "%", gain, (Vec::new(), &text), Target::None))
}

/// Description of the last round.
fn describe(times: &ReplayTimes, bare: f64) -> String {
    format!(
        "none; {} round trips, each counted as a {LIMIT_IS} ({:.1} us); lookups {:.2} s, leases \
         {:.2} s, copies out {:.2} s, puts {:.2} s (including copies {:.2} s); CPU time of the \
         node {:.2} s; {} of {} blocks hit",
        times.round_trips,
        bare * 1e6,
        times.lookups.as_secs_f64(),
        times.views.as_secs_f64(),
        times.copies_out.as_secs_f64(),
        times.puts.as_secs_f64(),
        times.copies_in.as_secs_f64(),
        times.node.as_secs_f64(),
        times.hits,
        times.blocks
    )
}

/// A replay with its buffers and times.
struct ClientReplay {
    times: ReplayTimes,
    source: Vec<u8>,
    buffer: Vec<u8>,
    slabs: Vec<HostSlabMut>,
    next_slab: usize,
}

impl ClientReplay {
    fn new(client: &Client) -> Result<Self, MeasureError> {
        let slabs = (0..SLABS).map(|_| reserve(client, SIZE)).collect::<Result<_, _>>()?;
        let (source, buffer) = (vec![0; BATCH * SIZE], vec![1; BATCH * SIZE]);
        Ok(Self { times: ReplayTimes::default(), source, buffer, slabs, next_slab: 0 })
    }

    /// Does the work of an engine for a request: looks up its chain, loads hits, saves the rest.
    fn replay(&mut self, client: &Client, request: &PlannedRequest) -> Result<(), MeasureError> {
        let mut lookup = Request::new(&request.keys);
        lookup.partial_tail = request.has_partial_tail;
        lookup.at = Some(request.at);
        let mut leading = 0;
        self.times.lookups += timed(|| leading = client.lookup_prefix(&lookup).tiers.len());
        self.times.round_trips += 1;
        self.times.blocks += request.keys.len() as u64;
        let leading = leading.min(request.keys.len());
        for keys in request.keys[..leading].chunks(BATCH) {
            self.load(client, keys)?;
        }
        for keys in request.keys[leading..].chunks(BATCH) {
            self.save(client, keys)?;
        }
        Ok(())
    }

    fn load(
        &mut self,
        client: &Client,
        keys: &[cascade_block::BlockKey],
    ) -> Result<(), MeasureError> {
        let mut views = Vec::new();
        self.times.views += timed(|| views = client.view(keys, CALL_OPTIONS));
        self.times.round_trips += 1;
        for ((view, key), buffer) in views.iter().zip(keys).zip(self.buffer.chunks_mut(SIZE)) {
            let ViewOutcome::Hit { slab, .. } = view else { continue };
            let mut copied = Ok(());
            let copy = || copied = slab.copy_to_in_batch(buffer, keys.len() * SIZE);
            self.times.copies_out += timed(copy);
            copied.map_err(|error| MeasureError::measure("a replay", error))?;
            self.times.hits += 1;
            payload::check(key, buffer, SIZE).map_err(|wrong| {
                MeasureError::measure("a replay", format!("WRONG BYTE of {key}: {wrong:?}"))
            })?;
        }
        self.times.views += timed(|| drop(views));
        Ok(())
    }

    fn save(
        &mut self,
        client: &Client,
        keys: &[cascade_block::BlockKey],
    ) -> Result<(), MeasureError> {
        let pieces = self.source.chunks_exact_mut(SIZE);
        keys.iter().zip(pieces).for_each(|(key, block)| payload::fill(key, block));
        let puts = puts(keys, &self.source, SIZE);
        let mut outcomes = Vec::new();
        self.times.puts += timed(|| outcomes = client.put(&puts, CALL_OPTIONS));
        // A put has two phases: reserve slabs, then seal them.
        self.times.round_trips += 2;
        if let Some(bad) = outcomes.iter().find(|o| matches!(o, PutOutcome::Failed(_))) {
            return Err(MeasureError::measure("a replay", format!("a put returned {bad:?}")));
        }
        let pieces = self.source.chunks_exact(SIZE).take(keys.len());
        let first = self.next_slab;
        self.next_slab = (first + BATCH) % SLABS;
        let slabs = self.slabs[first..].iter_mut();
        self.times.copies_in +=
            timed(|| slabs.zip(pieces).for_each(|(slab, block)| copy_in(slab, block)));
        Ok(())
    }
}
