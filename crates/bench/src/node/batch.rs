//! Batches of 256 blocks through one client: the cost of a block without its copy.

use cascade_block::BlockKey;
use cascade_client::Client;
use cascade_memory::{HostSlabMut, copy_in};
use cascade_replay::payload;
use cascade_store::{BlockStore as _, ViewOutcome};

use super::echo_process::{EchoProcess, LIMIT_IS};
use super::process::Placement;
use super::served::ServedNode;
use super::{CALL_OPTIONS, KIB, MIB, NodeBench, all_stored, puts, reserve};
use crate::{Figure, MeasureError, Target, keys, size_name, timed};

/// Blocks of a batch.
const BLOCKS: usize = 256;
/// Batches of one sample.
const BATCHES: usize = 48;
/// Target of the control cost, in microseconds per block.
const CONTROL_US_MAX: f64 = 1.0;

pub(super) fn run(bench: &mut NodeBench<'_, '_>) -> Result<(), MeasureError> {
    for size in [64, 4 * KIB, 16 * KIB] {
        let names = names(size);
        if bench.wants_any(&names) {
            measure(bench, size, names)?;
        }
    }
    Ok(())
}

/// The names of the figures: the whole put, the put without its copy, and the lease.
fn names(size: usize) -> [String; 3] {
    let size = size_name(size);
    ["put", "put-control", "lease"].map(|what| format!("batch-256/{what}/{size}"))
}

/// Microseconds per block, one sample per round.
#[derive(Debug, Default)]
struct Samples {
    put: Vec<f64>,
    copy: Vec<f64>,
    control: Vec<f64>,
    lease: Vec<f64>,
    bare: Vec<f64>,
}

fn measure(
    bench: &mut NodeBench<'_, '_>,
    size: usize,
    names: [String; 3],
) -> Result<(), MeasureError> {
    let placement = Placement::on_two_processors()?;
    let served = placement.on_the_other(|| ServedNode::start(128 * MIB))?;
    let mut echo = placement.on_the_other(EchoProcess::start)?;
    let client = served.connect()?;
    let mut fixture = BatchFixture::new(&client, size)?;
    let batches = bench.scaled(BATCHES);
    let mut samples = Samples::default();
    for round in 0..=bench.rounds() {
        let (mut copy, mut put, mut lease, mut bare) = (0.0, 0.0, 0.0, 0.0);
        for _ in 0..batches {
            copy += fixture.copy()?;
            put += fixture.put(&client)?;
            lease += fixture.lease(&client)?;
            for _ in 0..4 {
                bare += echo.round_trip()?.as_secs_f64() / 4.0;
            }
            client.clear();
        }
        if round > 0 {
            let us = |seconds: f64| seconds * 1e6 / (batches * BLOCKS) as f64;
            samples.put.push(us(put));
            samples.copy.push(us(copy));
            samples.control.push(us(put - copy));
            samples.lease.push(us(lease));
            samples.bare.push(us(bare));
        }
    }
    let Samples { put, copy, control, lease, bare } = samples;
    let [put_name, control_name, lease_name] = names;
    let twice = |bare: &[f64]| bare.iter().map(|us| us * 2.0).collect::<Vec<_>>();
    let most = Target::AtMost(CONTROL_US_MAX);
    let both = copy.iter().zip(twice(&bare)).map(|(copy, bare)| copy + bare).collect();
    let text = format!("copies of the blocks into slabs of the pool, and two of: {LIMIT_IS}");
    bench.deliver(Figure::cost(put_name, "us/blk", put, (both, &text), Target::None))?;
    let text = format!("two per batch of: {LIMIT_IS}");
    let limit = (twice(&bare), text.as_str());
    bench.deliver(Figure::cost(control_name, "us/blk", control, limit, most))?;
    let text = format!("one per batch of: {LIMIT_IS}");
    bench.deliver(Figure::cost(lease_name, "us/blk", lease, (bare, &text), most))
}

/// Blocks of one size and slabs to copy them into.
struct BatchFixture {
    size: usize,
    keys: Vec<BlockKey>,
    source: Vec<u8>,
    slabs: Vec<HostSlabMut>,
}

impl BatchFixture {
    fn new(client: &Client, size: usize) -> Result<Self, MeasureError> {
        let keys = keys("batch", BLOCKS);
        let mut source = vec![0; BLOCKS * size];
        let pieces = source.chunks_exact_mut(size);
        keys.iter().zip(pieces).for_each(|(key, block)| payload::fill(key, block));
        let slabs: Result<Vec<HostSlabMut>, MeasureError> =
            keys.iter().map(|_| reserve(client, size)).collect();
        Ok(Self { size, keys, source, slabs: slabs? })
    }

    /// Copies into slabs in the same state as those of a put: the bytes of the last round were read
    /// since. Writing to memory that is in a cache takes longer than to other memory.
    fn copy(&mut self) -> Result<f64, MeasureError> {
        let pieces = self.source.chunks_exact(self.size);
        let took =
            timed(|| self.slabs.iter_mut().zip(pieces).for_each(|(slab, one)| copy_in(slab, one)));
        for (slab, key) in self.slabs.iter().zip(&self.keys) {
            payload::check(key, slab, self.size)
                .map_err(|_| MeasureError::measure("batches", "a copy has wrong bytes"))?;
        }
        Ok(took.as_secs_f64())
    }

    fn put(&self, client: &Client) -> Result<f64, MeasureError> {
        let puts = puts(&self.keys, &self.source, self.size);
        let mut outcomes = Vec::new();
        let took = timed(|| outcomes = client.put(&puts, CALL_OPTIONS));
        all_stored(&outcomes).map_err(|why| MeasureError::measure("batches", why))?;
        Ok(took.as_secs_f64())
    }

    /// Views of all blocks and their release, the mean of two batches.
    fn lease(&self, client: &Client) -> Result<f64, MeasureError> {
        let mut seconds = 0.0;
        for _ in 0..2 {
            let mut views = Vec::new();
            seconds += timed(|| views = client.view(&self.keys, CALL_OPTIONS)).as_secs_f64();
            for (view, key) in views.iter().zip(&self.keys) {
                let is_right = matches!(view, ViewOutcome::Hit { slab, .. }
                    if slab.host().is_some_and(|at| payload::check(key, at, self.size).is_ok()));
                if !is_right {
                    let what = format!("a view of {key} returned {view:?} or wrong bytes");
                    return Err(MeasureError::measure("batches", what));
                }
            }
            seconds += timed(|| drop(views)).as_secs_f64();
        }
        Ok(seconds / 2.0)
    }
}
