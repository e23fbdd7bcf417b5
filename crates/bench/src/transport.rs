//! The benchmark `transport`: batches of blocks between two processes, beside a plain socket and
//! memcpy.

mod blocks;
pub(crate) mod certificates;
mod in_step;
mod limit;
mod pair;
mod peers;
mod row;
mod small;
mod summary;
mod system_calls;
mod target;

use std::error::Error;
use std::path::Path;

use cascade_transport::Direction;

pub use row::{TRANSPORT_COLUMNS, TransportRow};
pub use target::run as run_target;

use self::blocks::Sequence;
use self::pair::{Measured, Pair};
use crate::backend::Backend;
use crate::plain_stream::Processing;
use crate::{Bench, Figure, MeasureError, Target, size_name};

/// Length of each side's region: larger than the caches.
const REGION_BYTES: u64 = 512 << 20;
/// Blocks of a batch, as in the table that `KVTransferManager` publishes.
const BATCH: u64 = 1538;
/// Block lengths, with the least share of the limit over TCP and over shared memory.
const LADDER: [(u64, f64, f64); 11] = [
    (1 << 10, 0.6, 0.0),
    (2 << 10, 0.0, 0.0),
    (4 << 10, 0.0, 0.0),
    (8 << 10, 0.0, 0.0),
    (16 << 10, 0.9, 0.0),
    (32 << 10, 0.9, 0.0),
    (64 << 10, 0.9, 0.9),
    (128 << 10, 0.9, 0.9),
    (256 << 10, 0.9, 0.9),
    (1 << 20, 0.9, 0.9),
    (16 << 20, 0.9, 0.9),
];
/// The least bytes of a sample: as many batches as that takes follow each other without a pause, as
/// the messages of the plain stream do.
const SAMPLE_BYTES: u64 = 32 << 20;
/// The most system calls of both processes for a batch of blocks of the shortest length.
const CALLS_MAX: f64 = 50.0;
const CALLS_BLOCK_BYTES: u64 = 1 << 10;
/// What is left of the plain stream when both of its sides do more with each byte: they compute
/// checksums, as ours do, or connections of rustls encrypt.
const STREAMS: [(Backend, &str, Processing); 2] = [
    (Backend::Tcp, "tcp/checksummed-stream", Processing::Checksums),
    (Backend::Tls, "tls/rustls-stream", Processing::Tls),
];
/// Reads of 4 KiB beside reads of 64 MiB on one connection: the 99th percentile.
const SMALL_READS: [(Backend, &str); 2] =
    [(Backend::Tcp, "tcp/small-read-beside-large"), (Backend::Tls, "tls/small-read-beside-large")];
/// It is at most three times that of small reads alone.
const SMALL_TARGET: Target = Target::ShareAtLeast(1.0 / 3.0);
/// The least share of the plain stream over TLS, for blocks from this length on.
const TLS_SHARE: (u64, f64) = (16 << 10, 0.5);
/// Block lengths of a short run.
const SHORT: [u64; 2] = [1 << 10, 64 << 10];

/// What to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TransportOptions {
    /// Two block lengths and few batches: its figures mean nothing.
    pub is_short: bool,
}

fn failed(error: impl Into<Box<dyn Error + Send + Sync>>) -> MeasureError {
    MeasureError::measure("a transport", error)
}

/// What is known beside the figures.
#[derive(Debug, Default)]
pub struct Notes {
    /// What could not be measured, and why.
    pub failures: Vec<String>,
    /// Lines of a table that compares transports, if others were measured.
    pub summary: Vec<String>,
}

/// Measures all selected rows, and those of others for the same blocks with a Python that has their
/// packages.
///
/// # Errors
/// If a process or a connection fails, or if a byte was wrong.
pub fn run(
    bench: &mut Bench<'_>,
    options: TransportOptions,
    peers: Option<&Path>,
) -> Result<Notes, MeasureError> {
    let rows = rows(bench, options);
    let mut notes = Notes::default();
    let mut ours = measure_ours(bench, options, &rows, &mut notes)?;
    let Some(python) = peers.filter(|_| !rows.is_empty()) else {
        return Ok(notes);
    };
    let mut lengths: Vec<_> = rows.iter().map(|row| row.block_bytes).collect();
    lengths.sort_unstable();
    lengths.dedup();
    let others = peers::measure(python, &lengths, options)?;
    let ratios = peers::compare(&ours, &others.figures, options.is_short);
    notes.failures.extend(others.failures);
    ours.extend(others.figures.iter().cloned());
    notes.summary = summary::lines(&ours);
    // They belong to the rows that were selected, whatever their names.
    for figure in others.figures.into_iter().chain(ratios) {
        (bench.deliver)(figure)?;
    }
    Ok(notes)
}

/// Measures the rows without TLS, then those with TLS, each with a pair of processes.
fn measure_ours(
    bench: &mut Bench<'_>,
    options: TransportOptions,
    rows: &[Row],
    notes: &mut Notes,
) -> Result<Vec<Figure>, MeasureError> {
    let mut figures = vec![];
    for has_tls in [false, true] {
        let is_of_pair = |backend| (backend == Backend::Tls) == has_tls;
        let rows = rows.iter().filter(|row| is_of_pair(row.backend));
        let rows: Vec<_> = rows.copied().collect();
        let streams = STREAMS.iter().filter(|(of, name, _)| is_of_pair(*of) && bench.wants(name));
        let streams: Vec<_> = streams.collect();
        let small_reads =
            SMALL_READS.iter().filter(|(of, name)| is_of_pair(*of) && bench.wants(name));
        let small_reads: Vec<_> = small_reads.map(|(_, name)| *name).collect();
        if !rows.is_empty() || !streams.is_empty() || !small_reads.is_empty() {
            let mut pair = Pair::start(options, has_tls)?;
            for (_, name, processing) in streams {
                let (rates, (plain, text)) = pair.stream_with(*processing, options)?;
                let (name, limit) = ((*name).to_owned(), (plain, &*text));
                (bench.deliver)(Figure::rate(name, "GB/s", rates, limit, Target::None))?;
            }
            for name in small_reads {
                let (beside, (alone, text)) = pair.small_reads(options)?;
                let target = if options.is_short { Target::None } else { SMALL_TARGET };
                let limit = (alone, &*text);
                (bench.deliver)(Figure::cost(name.to_owned(), "us", beside, limit, target))?;
            }
            figures.extend(measure_pair(bench, options, (&mut pair, &rows), notes)?);
        }
    }
    Ok(figures)
}

fn measure_pair(
    bench: &mut Bench<'_>,
    options: TransportOptions,
    (pair, rows): (&mut Pair, &[Row]),
    notes: &mut Notes,
) -> Result<Vec<Figure>, MeasureError> {
    let of_one_thread: Vec<_> = rows.iter().filter(|row| row.threads == 1).copied().collect();
    let counts = pair.count_system_calls(&of_one_thread, options)?.unwrap_or_else(|reason| {
        notes.failures.push(format!("system calls: {reason}"));
        vec![]
    });
    let mut counts = counts.into_iter();
    let mut figures = vec![];
    for row in rows {
        let calls = if row.threads == 1 { counts.next() } else { None };
        let measured = pair.measure(row, options)?;
        let figure = row.figure(measured, calls, options);
        figures.push(figure.clone());
        bench.deliver(figure)?;
        if let Some(calls) = calls.filter(|_| row.block_bytes == CALLS_BLOCK_BYTES) {
            bench.deliver(row.calls_figure(calls))?;
        }
    }
    Ok(figures)
}

/// The selected rows.
fn rows(bench: &Bench<'_>, options: TransportOptions) -> Vec<Row> {
    let mut rows = vec![];
    for backend in Backend::ALL {
        for (block_bytes, tcp, shm) in LADDER {
            for (direction, threads) in
                [(Direction::Write, 1), (Direction::Write, 4), (Direction::Read, 1)]
            {
                let tls = if block_bytes >= TLS_SHARE.0 { TLS_SHARE.1 } else { 0.0 };
                let share = match backend {
                    Backend::Tcp => tcp,
                    Backend::Tls => tls,
                    Backend::Shm => shm,
                };
                // The target is that of one thread; more share the same processors.
                let has_target = share > 0.0 && threads == 1 && !options.is_short;
                let target = if has_target { Target::ShareAtLeast(share) } else { Target::None };
                let row = Row { backend, block_bytes, direction, threads, target };
                if !options.is_short || SHORT.contains(&block_bytes) {
                    rows.push(row);
                }
            }
        }
    }
    rows.retain(|row| bench.wants(&row.name()));
    rows
}

/// One row of the table.
#[derive(Debug, Clone, Copy)]
struct Row {
    backend: Backend,
    block_bytes: u64,
    direction: Direction,
    threads: u64,
    target: Target,
}

impl Row {
    /// What is moved how, without the number of threads.
    fn kind(&self) -> String {
        let direction = match self.direction {
            Direction::Write => "write",
            Direction::Read => "read",
        };
        let block = size_name(usize::try_from(self.block_bytes).unwrap_or(usize::MAX));
        format!("{}/{direction}/{block}", self.backend.name())
    }

    fn name(&self) -> String {
        format!("{}/{}-thread", self.kind(), self.threads)
    }

    fn figure(&self, measured: Measured, calls: Option<u64>, options: TransportOptions) -> Figure {
        let Measured { rates, limit: (limit, text), cpu_ns_per_block, record_layer } = measured;
        let row = TransportRow {
            backend: self.backend.name().to_owned(),
            block_bytes: self.block_bytes,
            batch: self.sequence(options).0.batch,
            threads: self.threads,
            gbps: crate::figure::median(&rates),
            limit_gbps: Some(crate::figure::median(&limit)),
            peer: "cascade".to_owned(),
            // A wrong byte ends the run with an error.
            verified: true,
            cpu_ns_per_block: Some(cpu_ns_per_block),
            system_calls_per_batch: calls.map(|calls| calls as f64),
            copies_per_byte: Some(match record_layer {
                // The kernel encrypts in place what it has copied.
                Some("kernel") => Backend::Tcp.copies(),
                _ => self.backend.copies(),
            }),
            record_layer,
        };
        let figure = Figure::rate(self.name(), "GB/s", rates, (limit, &text), self.target);
        figure.of_transport(row)
    }

    /// The system calls of a batch as a figure of its own, which has a target.
    fn calls_figure(&self, calls: u64) -> Figure {
        let name = format!("calls/{}", self.kind());
        let target = Target::AtMost(CALLS_MAX);
        Figure::cost(name, "a batch", vec![calls as f64], (vec![], ""), target)
    }

    /// Its batches, and how they are timed.
    fn sequence(&self, options: TransportOptions) -> (Sequence, Schedule) {
        let region_bytes = REGION_BYTES;
        // Each thread has a part of the target region of its own.
        let batch = BATCH.min(region_bytes / self.block_bytes / self.threads);
        let batch_bytes = batch * self.block_bytes;
        let (samples, samples_per_turn) = match batch_bytes {
            _ if options.is_short => (5, 3),
            ..0x2000_0000 => (18, 2),
            _ => (8, 1),
        };
        let batches_per_sample = SAMPLE_BYTES.div_ceil(batch_bytes * self.threads);
        let schedule = Schedule {
            warm_up: 1,
            samples,
            samples_per_turn,
            batches_per_sample: if options.is_short { 1 } else { batches_per_sample },
        };
        let seed = self.block_bytes ^ self.threads << 50 ^ (self.backend as u64) << 56;
        let (block_bytes, threads) = (self.block_bytes, self.threads);
        let iterations = schedule.runs() * schedule.batches_per_sample;
        let sequence = Sequence { seed, region_bytes, block_bytes, batch, threads, iterations };
        (sequence, schedule)
    }
}

/// How the batches of a row are timed.
#[derive(Debug, Clone, Copy)]
struct Schedule {
    /// Samples that are not used.
    warm_up: u64,
    /// Samples that are.
    samples: u64,
    /// The limit is measured before every so many samples.
    samples_per_turn: u64,
    /// Batches of each thread that follow each other in a sample.
    batches_per_sample: u64,
}

impl Schedule {
    fn runs(&self) -> u64 {
        self.warm_up + self.samples
    }
}
