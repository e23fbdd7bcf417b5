//! Figures of a served node: a process of its own, worker processes, real sockets, one pool.

mod batch;
mod control;
mod copies;
mod crew;
mod echo;
mod hot;
mod idle;
mod load;
mod order;
mod process;
mod replayed;
mod served;
mod soak;
mod worker;

use std::path::PathBuf;
use std::time::Duration;

use cascade_store::{CallOptions, Put, PutOutcome};

use crate::cli::Failure;
use crate::measure::{Bench, Figure};

pub use worker::run as run_worker;

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// How calls wait in measurements: a busy machine is slow, a hang is still an error.
const PATIENT: CallOptions = CallOptions { timeout: Some(Duration::from_secs(60)), writer: None };

/// What is measured of a node, beside names and rounds.
#[derive(Debug, Clone, Default)]
pub struct NodeOptions {
    /// Few repetitions: whether everything works, not how well.
    pub is_short: bool,
    /// A trace to replay through a client.
    pub trace: Option<PathBuf>,
    /// How long a mixed load with dying workers lasts; nothing for none.
    pub soak: Option<Duration>,
}

/// One measurement of a node under way.
struct NodeBench<'b, 'a> {
    bench: &'b mut Bench<'a>,
    options: &'b NodeOptions,
}

/// Measures a served node.
pub fn run(bench: &mut Bench<'_>, options: &NodeOptions) -> Result<(), Failure> {
    process::raise_descriptors()?;
    let mut bench = NodeBench { bench, options };
    control::run(&mut bench)?;
    batch::run(&mut bench)?;
    copies::run(&mut bench)?;
    hot::run(&mut bench)?;
    load::run(&mut bench)?;
    idle::run(&mut bench)?;
    replayed::run(&mut bench)?;
    soak::run(&mut bench)
}

impl NodeBench<'_, '_> {
    fn rounds(&self) -> usize {
        if self.options.is_short { 2 } else { self.bench.rounds() }
    }

    /// A count or size, less where figures are not wanted for their values.
    fn scaled(&self, usual: usize) -> usize {
        if self.options.is_short { (usual / 16).max(1) } else { usual }
    }

    fn wants_any(&self, names: &[String]) -> bool {
        names.iter().any(|name| self.bench.wants(name))
    }

    fn deliver(&mut self, figure: Figure) -> Result<(), Failure> {
        self.bench.deliver(figure)
    }
}

/// Nanoseconds on the clock that all processes of this machine share.
fn machine_ns() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let time = Duration::try_from(time).unwrap_or_default();
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Sleeps for at least that long.
fn rest(time: Duration) {
    let until = machine_ns().saturating_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    rest_until(until);
}

fn rest_until(until_ns: u64) {
    loop {
        let left = until_ns.saturating_sub(machine_ns());
        if left == 0 {
            return;
        }
        std::thread::park_timeout(Duration::from_nanos(left));
    }
}

/// Every block of a batch was stored, or the first that was not.
fn all_stored(outcomes: &[PutOutcome]) -> Result<(), String> {
    match outcomes.iter().find(|outcome| !matches!(outcome, PutOutcome::Stored)) {
        Some(bad) => Err(format!("a put gave {bad:?}")),
        None => Ok(()),
    }
}

/// Blocks of equal length, as they are put.
fn puts<'a>(keys: &[cascade_block::BlockKey], bytes: &'a [u8], size: usize) -> Vec<Put<'a>> {
    keys.iter().zip(bytes.chunks_exact(size)).map(|(key, bytes)| Put::new(*key, bytes)).collect()
}
