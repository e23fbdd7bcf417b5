//! Many processes that read the same blocks: what each gets, against what one alone gets.

use std::time::Duration;

use cascade_store::BlockStore as _;

use super::crew::Crew;
use super::order::{Blocks, Order, Work};
use super::served::Served;
use super::{KIB, MIB, NodeBench, PATIENT, all_stored, puts};
use crate::cli::Failure;
use crate::measure::{Figure, Target, keys, size_name};
use crate::payload;

/// Readers of the crowd.
const READERS: usize = 8;
/// How long one sample reads.
const LASTING: Duration = Duration::from_millis(400);
/// What a reader in a crowd has to keep, beyond what memcpy loses there.
const SHARE_MIN: f64 = 0.9;

pub(super) fn run(bench: &mut NodeBench<'_, '_>) -> Result<(), Failure> {
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
) -> Result<(), Failure> {
    let served = Served::start(256 * MIB)?;
    let client = served.connect()?;
    let keys = keys("hot", count);
    let mut bytes = vec![0; count * size];
    let pieces = bytes.chunks_exact_mut(size);
    keys.iter().zip(pieces).for_each(|(key, block)| payload::fill(key, block));
    all_stored(&client.put(&puts(&keys, &bytes, size), PATIENT))
        .map_err(|why| Failure::measure("hot reads", why))?;
    let mut alone = Readers::start(1, &served, size, count)?;
    let mut crowd = Readers::start(READERS, &served, size, count)?;
    let lasting = LASTING / if bench.options.is_short { 8 } else { 1 };
    let (mut value, mut limit) = (Vec::new(), Vec::new());
    for round in 0..=bench.rounds() {
        let copy_alone = alone.rate(Work::StreamOut, lasting)?;
        let copy_crowd = crowd.rate(Work::StreamOut, lasting)?;
        let get_alone = alone.rate(Work::Get, lasting)?;
        let get_crowd = crowd.rate(Work::Get, lasting)?;
        if round > 0 {
            value.push(get_crowd);
            limit.push(get_alone * copy_crowd / copy_alone);
        }
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let text = format!(
        "what one reader alone gets through the node, times what {READERS} processes that only \
         copy the same bytes keep of one's rate on these {cores} processors"
    );
    let target = Target::ShareAtLeast(SHARE_MIN);
    bench.deliver(Figure::rate(name, "GiB/s", value, (limit, &text), target))
}

/// Processes that read the same blocks.
struct Readers {
    crew: Crew,
    count: usize,
    size: usize,
}

impl Readers {
    fn start(readers: usize, served: &Served, size: usize, blocks: usize) -> Result<Self, Failure> {
        let mut crew = Crew::start(readers, served)?;
        let label = "hot".to_owned();
        let blocks = Blocks { label, first: 0, count: blocks, size, batch: blocks };
        crew.tell(|_| Order::Blocks(blocks.clone()))?;
        crew.tell(|_| Order::Hold)?;
        Ok(Self { crew, count: readers, size })
    }

    /// GiB/s of one reader.
    fn rate(&mut self, work: Work, lasting: Duration) -> Result<f64, Failure> {
        let done = self.crew.work(work, Some(lasting))?;
        self.crew.tell(|_| Order::Check)?;
        let bytes = done.blocks as f64 * self.size as f64;
        Ok(bytes / done.took.as_secs_f64() / self.count as f64 / crate::measure::GIB)
    }
}
