//! The benchmark `transport`: batches of blocks between two processes, beside a plain socket and
//! memcpy.

mod blocks;
mod limit;
mod peers;
mod row;
mod target;

use std::error::Error;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use cascade_runtime::thread;
use cascade_transport::{
    Access, Batch, Connection, Direction, Endpoint, EndpointConfig, Piece, Place, Region, RegionId,
};

pub use row::TransportRow;
pub use target::run as run_target;

use self::blocks::Sequence;
use self::limit::Limits;
use self::target::{Answer, Order, soon};
use crate::node::cpu_time_of;
use crate::{Bench, Figure, MeasureError, Target, size_name, timed};

/// Length of each side's region: larger than the caches.
const REGION_BYTES: u64 = 512 << 20;
/// Bytes of one sample of the limit of TCP, and of its buffers.
const STREAM_BYTES: usize = 128 << 20;
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

/// A way to the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Backend {
    Tcp,
    Shm,
}

impl Backend {
    fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Shm => "shm",
        }
    }
}

/// Measures all selected rows, and those of others for the same blocks with a Python that has their
/// packages. Returns which of these could not be measured, and why.
///
/// # Errors
/// If a process or a connection fails, or if a byte was wrong.
pub fn run(
    bench: &mut Bench<'_>,
    options: TransportOptions,
    peers: Option<&Path>,
) -> Result<Vec<String>, MeasureError> {
    let rows = rows(bench, options);
    if rows.is_empty() {
        return Ok(vec![]);
    }
    let mut ours = vec![];
    {
        let mut pair = Pair::start(options)?;
        for row in &rows {
            let figure = pair.measure(row, options)?;
            ours.push(figure.clone());
            bench.deliver(figure)?;
        }
    }
    let Some(python) = peers else {
        return Ok(vec![]);
    };
    let mut lengths: Vec<_> = rows.iter().map(|row| row.block_bytes).collect();
    lengths.sort_unstable();
    lengths.dedup();
    let others = peers::measure(python, &lengths, options)?;
    let ratios = peers::compare(&ours, &others.figures, options.is_short);
    // They belong to the rows that were selected, whatever their names.
    for figure in others.figures.into_iter().chain(ratios) {
        (bench.deliver)(figure)?;
    }
    Ok(others.failures)
}

/// The selected rows.
fn rows(bench: &Bench<'_>, options: TransportOptions) -> Vec<Row> {
    let mut rows = vec![];
    for backend in [Backend::Tcp, Backend::Shm] {
        for (block_bytes, tcp, shm) in LADDER {
            for (direction, threads) in
                [(Direction::Write, 1), (Direction::Write, 4), (Direction::Read, 1)]
            {
                let share = if backend == Backend::Tcp { tcp } else { shm };
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
    fn name(&self) -> String {
        let direction = match self.direction {
            Direction::Write => "write",
            Direction::Read => "read",
        };
        let block = size_name(usize::try_from(self.block_bytes).unwrap_or(usize::MAX));
        format!("{}/{direction}/{block}/{}-thread", self.backend.name(), self.threads)
    }

    fn sequence(&self, options: TransportOptions) -> (Sequence, u64) {
        let region_bytes = REGION_BYTES;
        // Each thread has a part of the target region of its own.
        let batch = BATCH.min(region_bytes / self.block_bytes / self.threads);
        let batch_bytes = batch * self.block_bytes;
        let (warm_up, rounds) = match batch_bytes {
            _ if options.is_short => (1, 5),
            ..0x2000_0000 => (5, 20),
            _ => (2, 5),
        };
        let seed = self.block_bytes ^ self.threads << 50 ^ (self.backend as u64) << 56;
        let (block_bytes, threads) = (self.block_bytes, self.threads);
        let iterations = warm_up + rounds;
        (Sequence { seed, region_bytes, block_bytes, batch, threads, iterations }, warm_up)
    }
}

/// This process and the target, connected in all ways.
struct Pair {
    client: Endpoint,
    /// Holds the pattern.
    local: RegionId,
    /// What reads write to.
    for_reads: RegionId,
    tcp: Arc<dyn Connection>,
    shm: Arc<dyn Connection>,
    limits: Limits,
    child: TargetProcess,
    _directory: Directory,
}

impl Pair {
    fn start(options: TransportOptions) -> Result<Self, MeasureError> {
        let directory = Directory::make()?;
        let mut child = TargetProcess::start()?;
        let unix = directory.0.join("t");
        let order = Order::Listen { bytes: REGION_BYTES, unix: unix.clone() };
        let Answer::Listening { tcp, plain } = child.ask(&order)? else {
            return Err(failed("the target does not listen"));
        };
        let config = EndpointConfig { name: "bench".to_owned(), ..Default::default() };
        let client = Endpoint::new(config).map_err(failed)?;
        let bytes = usize::try_from(REGION_BYTES).map_err(failed)?;
        let region = Region::shared(bytes, Access::LOCAL).map_err(failed)?;
        let local = client.register(region).map_err(failed)?;
        target::fill_region(&client, local, REGION_BYTES)?;
        let region = Region::shared(bytes, Access::LOCAL).map_err(failed)?;
        let for_reads = client.register(region).map_err(failed)?;
        Ok(Self {
            tcp: client.connect_tcp(tcp, soon()).map_err(failed)?,
            shm: client.connect_unix(&unix, soon()).map_err(failed)?,
            limits: Limits::connect(&plain, options.is_short)?,
            client,
            local,
            for_reads,
            child,
            _directory: directory,
        })
    }

    fn measure(&mut self, row: &Row, options: TransportOptions) -> Result<Figure, MeasureError> {
        let (sequence, warm_up) = row.sequence(options);
        if row.direction == Direction::Read {
            self.child.ask(&Order::Fill)?;
        }
        let limit = match row.backend {
            Backend::Tcp => self.limits.stream()?,
            Backend::Shm => self.limits.memcpy(&sequence),
        };
        let connection = match row.backend {
            Backend::Tcp => &self.tcp,
            Backend::Shm => &self.shm,
        };
        let remote = connection.peer().regions.first().map(|region| region.id);
        let remote = remote.ok_or_else(|| failed("the target offers no region"))?;
        let is_read = row.direction == Direction::Read;
        let local = if is_read { self.for_reads } else { self.local };
        let here = Side { local, remote, direction: row.direction };
        let before = self.cpu_time()?;
        let mut samples = vec![];
        for iteration in 0..sequence.iterations {
            let took = here.run(connection, &sequence, iteration)?;
            let bytes = (sequence.batch * sequence.block_bytes * sequence.threads) as f64;
            if iteration >= warm_up {
                samples.push(bytes / took.as_secs_f64() / 1e9);
            }
        }
        let cpu = self.cpu_time()?.saturating_sub(before);
        let blocks = sequence.batch * sequence.threads * sequence.iterations;
        let is_verified = self.verify(row, &sequence)?;
        if !is_verified {
            return Err(failed(format!("{}: a block has wrong bytes", row.name())));
        }
        let value = crate::figure::median(&samples);
        let figure = Figure::rate(row.name(), "GB/s", samples, limit.clone(), row.target);
        Ok(figure.of_transport(TransportRow {
            backend: row.backend.name().to_owned(),
            block_bytes: row.block_bytes,
            batch: sequence.batch,
            threads: row.threads,
            gbps: value,
            limit_gbps: Some(crate::figure::median(&limit.0)),
            peer: "cascade".to_owned(),
            verified: is_verified,
            cpu_ns_per_block: Some(cpu.as_nanos() as f64 / blocks as f64),
        }))
    }

    /// Processor time of both processes.
    fn cpu_time(&self) -> Result<Duration, MeasureError> {
        Ok(cpu_time_of(std::process::id())? + cpu_time_of(self.child.child.id())?)
    }

    /// Compares all blocks that were moved with their sources.
    fn verify(&mut self, row: &Row, sequence: &Sequence) -> Result<bool, MeasureError> {
        let compared = if row.direction == Direction::Read {
            target::compare(&self.client, self.for_reads, sequence)?
        } else {
            self.child.ask(&Order::Verify(*sequence))?
        };
        match compared {
            Answer::Compared { blocks, wrong } => Ok(wrong == 0 && blocks > 0),
            _ => Err(failed("the target gave another answer")),
        }
    }
}

/// The two regions of a batch.
#[derive(Debug, Clone, Copy)]
struct Side {
    local: RegionId,
    remote: RegionId,
    direction: Direction,
}

impl Side {
    fn pieces(&self, sequence: &Sequence, thread: u64, iteration: u64) -> Vec<Piece> {
        let at = |index| index * sequence.block_bytes;
        let piece = |(source, target)| {
            let (here, there) = match self.direction {
                Direction::Write => (source, target),
                Direction::Read => (target, source),
            };
            Piece {
                local: Place { region: self.local, offset: at(here) },
                remote: Place { region: self.remote, offset: at(there) },
                bytes: sequence.block_bytes,
            }
        };
        sequence.blocks(thread, iteration).map(piece).collect()
    }

    /// Moves one batch a thread, and returns how long all took.
    fn run(
        &self,
        connection: &Arc<dyn Connection>,
        sequence: &Sequence,
        iteration: u64,
    ) -> Result<Duration, MeasureError> {
        let lists = (0..sequence.threads).map(|thread| self.pieces(sequence, thread, iteration));
        let lists: Vec<_> = lists.collect();
        let direction = self.direction;
        let move_one = move |connection: &dyn Connection, pieces: &[Piece]| {
            let batch = Batch { direction, pieces, notice: None };
            connection.post(&batch, soon())?.wait(soon())
        };
        let mut results = vec![];
        let took = if let [pieces] = &*lists {
            timed(|| results.push(Ok(move_one(&**connection, pieces))))
        } else {
            timed(|| {
                let start = |pieces: Vec<Piece>| {
                    let connection = Arc::clone(connection);
                    thread::spawn(move || move_one(&*connection, &pieces))
                };
                let threads: Vec<_> = lists.into_iter().map(start).collect();
                results.extend(threads.into_iter().map(thread::JoinHandle::join));
            })
        };
        for result in results {
            result.map_err(|_| failed("a thread panicked"))?.map_err(failed)?;
        }
        Ok(took)
    }
}

/// A directory for a socket; removed on drop.
struct Directory(PathBuf);

impl Directory {
    fn make() -> Result<Self, MeasureError> {
        let name = format!("cascade-transport-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path).map_err(failed)?;
        Ok(Self(path))
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        // If this fails, only the file of a socket remains in the temporary directory.
        drop(std::fs::remove_dir_all(&self.0));
    }
}

/// The other process; killed on drop.
struct TargetProcess {
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl TargetProcess {
    fn start() -> Result<Self, MeasureError> {
        let program = std::env::current_exe().map_err(failed)?;
        let mut command = Command::new(program);
        command.args(["bench", "transport-target"]);
        let spawned = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = spawned.map_err(failed)?;
        let orders = child.stdin.take().expect("stdin is piped");
        let answers = BufReader::new(child.stdout.take().expect("stdout is piped"));
        Ok(Self { child, orders, answers })
    }

    fn ask(&mut self, order: &Order) -> Result<Answer, MeasureError> {
        let text = serde_json::to_string(order).map_err(failed)?;
        writeln!(self.orders, "{text}").map_err(failed)?;
        let mut line = String::new();
        let bytes = self.answers.read_line(&mut line).map_err(failed)?;
        if bytes == 0 {
            return Err(failed("the target process ended"));
        }
        serde_json::from_str(&line).map_err(failed)
    }
}

impl Drop for TargetProcess {
    fn drop(&mut self) {
        // It may have ended already.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}
