//! The benchmarks `core`, `node` and `gpu`: figures of this build, each beside a limit of the same
//! run.
#![expect(clippy::cast_precision_loss, reason = "53 bits are enough for printed figures")]

mod backend;
mod both_tiers;
mod child;
mod cold;
mod disk;
mod disk_limit;
mod durable;
mod error;
mod figure;
pub mod gpu;
mod hashing;
mod hold;
mod index;
mod memory;
pub mod node;
mod pattern;
mod plain_stream;
mod restart;
pub mod transfer;
pub mod transport;

use std::path::PathBuf;
use std::time::Duration;

use cascade_block::{BlockKey, Manifest, Namespace, TenantSecret};
use cascade_runtime::{Clock, SystemClock};
use cascade_store::{CallOptions, Store, StoreConfig, StoreError};

pub use error::MeasureError;
pub use figure::{Figure, Target, table_header};

/// The options of a benchmark, and where its figures go.
pub struct Bench<'a> {
    /// Measure with larger sizes and counts.
    pub is_full: bool,
    /// Directory on the disk to measure. Figures of the file tier create a directory in it.
    pub directory: PathBuf,
    /// Measure only figures whose name contains this.
    pub only: Option<String>,
    /// Called with each figure when it is measured.
    pub deliver: &'a mut dyn FnMut(Figure) -> Result<(), MeasureError>,
}

impl std::fmt::Debug for Bench<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bench").field("is_full", &self.is_full).finish_non_exhaustive()
    }
}

impl Bench<'_> {
    /// Measures all selected figures of an embedded store.
    pub fn run(&mut self) -> Result<(), MeasureError> {
        // Resident memory first: memory that the allocator keeps after other figures would count.
        restart::resident(self)?;
        index::run(self)?;
        memory::run(self)?;
        hashing::run(self)?;
        hold::run(self)?;
        disk::run(self)?;
        durable::run(self)?;
        both_tiers::run(self)?;
        restart::run(self)
    }

    fn rounds(&self) -> usize {
        if self.is_full { 9 } else { 5 }
    }

    fn wants(&self, name: &str) -> bool {
        self.only.as_ref().is_none_or(|only| name.contains(only.as_str()))
    }

    fn wants_any(&self, names: &[&str]) -> bool {
        names.iter().any(|name| self.wants(name))
    }

    fn deliver(&mut self, figure: Figure) -> Result<(), MeasureError> {
        if self.wants(&figure.name) { (self.deliver)(figure) } else { Ok(()) }
    }
}

/// For flushes, which wait until gigabytes are written.
const FLUSH_OPTIONS: CallOptions =
    CallOptions { timeout: Some(Duration::from_secs(600)), writer: None };

/// Opens a store for a measurement.
fn open(what: &str, config: StoreConfig) -> Result<Store, MeasureError> {
    Store::open(config).map_err(|error| MeasureError::measure(what, error))
}

/// A failure of the store during a measurement.
fn failed(what: &'static str) -> impl Fn(StoreError) -> MeasureError {
    move |error| MeasureError::measure(what, error)
}

/// Keys `0..count` of the namespace `label`.
fn keys(label: &str, count: usize) -> Vec<BlockKey> {
    let manifest = Manifest::new().with("workload", "cascade bench").with("label", label);
    let namespace = Namespace::new(manifest, &TenantSecret::new(""));
    (0..count as u64).map(|id| namespace.key_of_id(&id.to_le_bytes())).collect()
}

/// The duration of `work`.
fn timed(work: impl FnOnce()) -> Duration {
    let began = SystemClock.monotonic();
    work();
    SystemClock.monotonic().saturating_sub(began)
}

/// Bytes in a GiB.
const GIB: f64 = 1_073_741_824.0;

/// Bytes over time in GiB/s.
fn gib_per_second(bytes: usize, took: Duration) -> f64 {
    bytes as f64 / took.as_secs_f64().max(1e-9) / GIB
}

/// A size as in names of figures: `128KiB`.
fn size_name(bytes: usize) -> String {
    cascade_block::ByteSize(bytes as u64).to_string()
}
