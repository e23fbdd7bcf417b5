//! The benchmark `transfer`: the KV of a prompt from a prefill process to a decode process, layer
//! by layer, beside a plain socket and memcpy.

mod local;
mod overlap;
mod pages;
mod pair;
mod peer;
mod prompt;
mod row;

use std::error::Error;

use cascade_transport::Direction;

pub use peer::run as run_peer;
pub use row::{TRANSFER_COLUMNS, TransferRow};

use self::overlap::{Compute, LAYER_MS};
use self::pair::{Moved, Pair};
use self::prompt::{BLOCK_TOKENS, Geometry};
use crate::backend::Backend;
use crate::figure::median;
use crate::{Bench, Figure, MeasureError, Target};

/// Models, their layers, and whether the overlap with compute is measured. Both have eight KV heads
/// of 128 elements of two bytes.
const MODELS: [(&str, u64, bool); 2] = [("llama-3.1-8b", 32, true), ("llama-3.1-70b", 80, false)];
/// Keys of one block in one layer.
const PAGE_BYTES: u64 = BLOCK_TOKENS * 8 * 128 * 2;
/// Tokens of the prompt.
const TOKENS: u64 = 8192;
/// Tokens of the prompt beside simulated compute: one step of chunked prefill.
const OVERLAP_TOKENS: u64 = 2048;
/// Layers and tokens of a short run.
const SHORT: (u64, u64) = (4, 256);
/// The most that reading a prompt from another process may take, in times of a local copy.
const TIMES_LOCAL_MAX: f64 = 1.5;
/// The least share of the limit over TCP, for pages of this length.
const TCP_SHARE_MIN: f64 = 0.9;
/// The least share of a transfer's time that compute hides.
const OVERLAP_MIN: f64 = 0.8;

/// What to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TransferOptions {
    /// Few layers and tokens: its figures mean nothing.
    pub is_short: bool,
}

fn failed(error: impl Into<Box<dyn Error + Send + Sync>>) -> MeasureError {
    MeasureError::measure("a transfer", error)
}

/// Measures all selected rows.
///
/// # Errors
/// If a process or a connection fails, or if a byte was wrong.
pub fn run(bench: &mut Bench<'_>, options: TransferOptions) -> Result<(), MeasureError> {
    for (model, layers, has_overlap) in MODELS {
        let (layers, tokens) = if options.is_short { SHORT } else { (layers, TOKENS) };
        let blocks = tokens / BLOCK_TOKENS;
        let geometry = Geometry { layers, blocks, page_bytes: PAGE_BYTES };
        let is_short = options.is_short;
        Model { name: model, geometry, has_overlap, is_short }.measure(bench)?;
    }
    Ok(())
}

/// A model, and what is measured with its pages.
#[derive(Debug, Clone, Copy)]
struct Model {
    name: &'static str,
    geometry: Geometry,
    has_overlap: bool,
    is_short: bool,
}

/// Samples of one cell.
#[derive(Debug, Default)]
struct Samples {
    rates: Vec<f64>,
    limit_rates: Vec<f64>,
    /// Rates of local copies of the same pages, one after each round.
    local_rates: Vec<f64>,
    first_ms: Vec<f64>,
    last_ms: Vec<f64>,
    cpu_ns: Vec<f64>,
}

impl Samples {
    fn add(&mut self, moved: &Moved) {
        self.rates.push(moved.bytes as f64 / moved.last_ns as f64);
        self.first_ms.push(moved.first_ns as f64 / 1e6);
        self.last_ms.push(moved.last_ns as f64 / 1e6);
        self.cpu_ns.push(moved.cpu_ns as f64);
    }
}

impl Model {
    fn rounds(&self) -> usize {
        if self.is_short { 2 } else { 5 }
    }

    fn row_name(&self, backend: Backend, kind: &str) -> String {
        format!("{}/{kind}/{}", backend.name(), self.name)
    }

    fn overlap_name(&self, backend: Backend, compute: Compute) -> String {
        format!("{}/{}", self.row_name(backend, "overlap"), compute.name())
    }

    fn measure(&self, bench: &mut Bench<'_>) -> Result<(), MeasureError> {
        let kinds = ["push", "pull", "remote-local"];
        let mut names = vec![];
        for backend in Backend::PLAIN {
            names.extend(kinds.map(|kind| self.row_name(backend, kind)));
            if self.has_overlap {
                names.extend(Compute::ALL.map(|compute| self.overlap_name(backend, compute)));
            }
        }
        if !names.iter().any(|name| bench.wants(name)) {
            return Ok(());
        }
        let mut pair = Pair::start(self.geometry, self.is_short)?;
        for backend in Backend::PLAIN {
            if bench.wants(&self.row_name(backend, "push")) {
                let samples = self.samples(&mut pair, backend, Direction::Write)?;
                bench.deliver(self.rate(&pair, backend, Direction::Write, &samples))?;
            }
        }
        for backend in Backend::PLAIN {
            for compute in Compute::ALL {
                if self.has_overlap && bench.wants(&self.overlap_name(backend, compute)) {
                    bench.deliver(self.overlap(&mut pair, backend, compute)?)?;
                }
            }
        }
        for backend in Backend::PLAIN {
            let names = ["pull", "remote-local"].map(|kind| self.row_name(backend, kind));
            if names.iter().any(|name| bench.wants(name)) {
                let samples = self.samples(&mut pair, backend, Direction::Read)?;
                bench.deliver(self.rate(&pair, backend, Direction::Read, &samples))?;
                bench.deliver(self.remote_over_local(&pair, backend, &samples))?;
            }
        }
        Ok(())
    }

    /// Moves the prompt several times, the first time not counted.
    fn samples(
        &self,
        pair: &mut Pair,
        backend: Backend,
        direction: Direction,
    ) -> Result<Samples, MeasureError> {
        let blocks = self.geometry.blocks;
        let mut samples = Samples::default();
        pair.take_roles(direction)?;
        for round in 0..=self.rounds() {
            let moved = match direction {
                Direction::Write => pair.push(backend, blocks, None)?,
                Direction::Read => pair.pull(backend, blocks)?,
            };
            if round > 0 {
                samples.add(&moved);
                samples.local_rates.push(pair.local_rate());
                samples.limit_rates.push(pair.limit_rate(backend)?);
            }
        }
        Ok(samples)
    }

    fn row(
        &self,
        backend: Backend,
        direction: Direction,
        blocks: u64,
        samples: &Samples,
    ) -> TransferRow {
        TransferRow {
            backend: backend.name().to_owned(),
            model: self.name.to_owned(),
            direction: match direction {
                Direction::Write => "push".to_owned(),
                Direction::Read => "pull".to_owned(),
            },
            layers: self.geometry.layers,
            tokens: blocks * BLOCK_TOKENS,
            blocks,
            block_bytes: self.geometry.layer_bytes(1),
            bytes: self.geometry.layers * self.geometry.layer_bytes(blocks),
            gbps: median(&samples.rates),
            limit_gbps: median(&samples.limit_rates),
            first_layer_ms: median(&samples.first_ms),
            last_layer_ms: median(&samples.last_ms),
            overlap: None,
            simulated_compute: None,
            compute_ms_per_layer: None,
            times_local: None,
            limit_times_local: None,
            // A wrong byte ends the run with an error.
            verified: true,
            cpu_ns_per_block: median(&samples.cpu_ns) / (self.geometry.layers * blocks) as f64,
        }
    }

    fn rate(
        &self,
        pair: &Pair,
        backend: Backend,
        direction: Direction,
        samples: &Samples,
    ) -> Figure {
        let kind = if direction == Direction::Write { "push" } else { "pull" };
        let target = match backend {
            Backend::Tcp if !self.is_short => Target::ShareAtLeast(TCP_SHARE_MIN),
            // That of memcpy is for pages of 64 KiB and longer.
            _ => Target::None,
        };
        let limit = (samples.limit_rates.clone(), pair.limit_text(backend));
        let rates = samples.rates.clone();
        Figure::rate(self.row_name(backend, kind), "GB/s", rates, limit, target)
            .of_transfer(self.row(backend, direction, self.geometry.blocks, samples))
    }

    /// How many times longer reading from the other process takes than a copy within this one.
    fn remote_over_local(&self, pair: &Pair, backend: Backend, samples: &Samples) -> Figure {
        let limit_rate = median(&samples.limit_rates);
        let rounds = samples.local_rates.iter().zip(&samples.rates);
        let times: Vec<_> = rounds.map(|(local, remote)| local / remote).collect();
        let limits: Vec<_> = samples.local_rates.iter().map(|local| local / limit_rate).collect();
        let limit = median(&limits);
        let is_possible = limit <= TIMES_LOCAL_MAX && !self.is_short;
        let target = if is_possible { Target::AtMost(TIMES_LOCAL_MAX) } else { Target::None };
        let text = format!("the time at the rate of: {}", pair.limit_text(backend));
        let row = TransferRow {
            times_local: Some(median(&times)),
            limit_times_local: Some(limit),
            ..self.row(backend, Direction::Read, self.geometry.blocks, samples)
        };
        let name = self.row_name(backend, "remote-local");
        Figure::cost(name, "x", times, (limits, &text), target).of_transfer(row)
    }

    /// The share of a transfer's time that is hidden while later layers are computed.
    fn overlap(
        &self,
        pair: &mut Pair,
        backend: Backend,
        compute: Compute,
    ) -> Result<Figure, MeasureError> {
        let layers = self.geometry.layers;
        let blocks = self.geometry.blocks.min(OVERLAP_TOKENS / BLOCK_TOKENS);
        let mut samples = Samples::default();
        pair.take_roles(Direction::Write)?;
        let (mut hidden, mut alone_ms) = (vec![], vec![]);
        for round in 0..=self.rounds() {
            let computed = compute.alone_ns(layers);
            let alone = pair.push(backend, blocks, None)?;
            let both = pair.push(backend, blocks, Some(compute))?;
            if round > 0 {
                let alone_ns = alone.last_ns as f64;
                hidden.push((computed as f64 + alone_ns - both.last_ns as f64) / alone_ns);
                alone_ms.push(alone_ns / layers as f64 / 1e6);
                samples.add(&both);
                samples.limit_rates.push(pair.limit_rate(backend)?);
            }
        }
        let row = TransferRow {
            overlap: Some(median(&hidden)),
            simulated_compute: Some(compute.name()),
            compute_ms_per_layer: Some(LAYER_MS),
            ..self.row(backend, Direction::Write, blocks, &samples)
        };
        // Beside a computation that occupies a processor, two processes need three of them.
        let has_target = compute == Compute::Sleep && !self.is_short;
        let target = if has_target { Target::AtLeast(OVERLAP_MIN) } else { Target::None };
        let possible = (layers - 1) as f64 / layers as f64;
        let limit = (vec![possible], "the last layer is sent after all are computed");
        let detail = format!(
            "simulated compute ({}) {} ms a layer; moving a layer alone takes {:.2} ms",
            compute.name(),
            LAYER_MS,
            median(&alone_ms)
        );
        let name = self.overlap_name(backend, compute);
        let figure = Figure::rate(name, "hidden", hidden, limit, target);
        Ok(figure.of_transfer(row).with_detail(detail))
    }
}
