//! The benchmark `node`: a node process and worker processes with real sockets and one pool.

mod batch;
mod control;
mod copies;
mod echo_process;
mod hot;
mod idle;
mod load;
mod process;
mod protocol;
mod replayed;
mod served;
mod soak;
mod worker;
mod worker_group;

use std::path::PathBuf;
use std::time::Duration;

use cascade_client::Client;
use cascade_memory::HostSlabMut;
use cascade_store::{BlockStore as _, CallOptions, Put, PutOutcome};

use crate::{Bench, Figure, MeasureError};
pub use worker::run as run_worker;

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// The options of all calls: long enough for a busy machine, but a hang is an error.
const CALL_OPTIONS: CallOptions =
    CallOptions { timeout: Some(Duration::from_secs(60)), writer: None };

/// The options of the benchmark `node`.
#[derive(Debug, Clone, Default)]
pub struct NodeOptions {
    /// Few repetitions, which only show that everything works.
    pub is_short: bool,
    /// A trace to replay through a client.
    pub trace: Option<PathBuf>,
    /// Duration of a mixed load while workers are killed; none to skip it.
    pub soak: Option<Duration>,
}

/// The benchmark with its options.
struct NodeBench<'b, 'a> {
    bench: &'b mut Bench<'a>,
    options: &'b NodeOptions,
}

/// Measures a served node.
pub fn run(bench: &mut Bench<'_>, options: &NodeOptions) -> Result<(), MeasureError> {
    process::raise_descriptor_limit()?;
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

    /// A count or size; a sixteenth of it in a short run.
    fn scaled(&self, usual: usize) -> usize {
        if self.options.is_short { (usual / 16).max(1) } else { usual }
    }

    fn wants_any(&self, names: &[String]) -> bool {
        names.iter().any(|name| self.bench.wants(name))
    }

    fn deliver(&mut self, figure: Figure) -> Result<(), MeasureError> {
        self.bench.deliver(figure)
    }
}

/// Nanoseconds of `CLOCK_MONOTONIC`, which all processes of this machine share.
pub(crate) fn machine_ns() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let time = Duration::try_from(time).unwrap_or_default();
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Sleeps for at least `time`.
fn sleep(time: Duration) {
    let until = machine_ns().saturating_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    sleep_until(until);
}

fn sleep_until(until_ns: u64) {
    loop {
        let left = until_ns.saturating_sub(machine_ns());
        if left == 0 {
            return;
        }
        std::thread::park_timeout(Duration::from_nanos(left));
    }
}

/// An error with the first outcome other than stored, if any.
fn all_stored(outcomes: &[PutOutcome]) -> Result<(), String> {
    match outcomes.iter().find(|outcome| !matches!(outcome, PutOutcome::Stored)) {
        Some(bad) => Err(format!("a put returned {bad:?}")),
        None => Ok(()),
    }
}

/// A slab of the node's pool.
fn reserve(client: &Client, size: usize) -> Result<HostSlabMut, MeasureError> {
    let failed = |error| MeasureError::other("reserve a slab", error);
    let slab = client.reserve(size, CALL_OPTIONS).map_err(failed)?;
    slab.into_host().map_err(|_| MeasureError::other("map device memory", "nodes lend host memory"))
}

/// The puts of blocks of equal size that lie one after the other in `bytes`.
fn puts<'a>(keys: &[cascade_block::BlockKey], bytes: &'a [u8], size: usize) -> Vec<Put<'a>> {
    keys.iter().zip(bytes.chunks_exact(size)).map(|(key, bytes)| Put::new(*key, bytes)).collect()
}
