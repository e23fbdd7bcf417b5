//! This process and the target, connected in all ways: moves batches and checks them.

use std::sync::Arc;

use cascade_transport::{
    Access, Batch, Connection, Direction, Endpoint, EndpointConfig, Piece, Place, RecordLayer,
    Region, RegionId,
};

use super::blocks::Sequence;
use super::in_step::in_step;
use super::limit::{CopyRates, Limit, LocalCopies};
use super::small::Reads;
use super::system_calls::SystemCalls;
use super::target::{self, Answer, Order};
use super::{REGION_BYTES, Row, TransportOptions, certificates, failed};
use crate::MeasureError;
use crate::backend::{Backend, soon};
use crate::child::{ChildProcess, SocketDirectory, own_cpu_ns};
use crate::plain_stream::{PlainStream, Processing};

/// Samples of a stream that does more than move bytes.
const STREAM_TURNS: usize = 11;

/// This process and the target.
#[derive(Debug)]
pub(super) struct Pair {
    client: Endpoint,
    /// Holds the pattern.
    local: RegionId,
    /// What reads write to.
    for_reads: RegionId,
    connections: Vec<(Backend, Arc<dyn Connection>)>,
    stream: PlainStream,
    copies: LocalCopies,
    child: ChildProcess,
    directory: SocketDirectory,
}

/// What was measured of a row. Each byte was compared.
#[derive(Debug)]
pub(super) struct Measured {
    pub(super) rates: Vec<f64>,
    pub(super) limit: Limit,
    /// Processor time of both processes.
    pub(super) cpu_ns_per_block: f64,
    /// What encrypted, if anything did.
    pub(super) record_layer: Option<&'static str>,
}

/// Samples of the limit of a row.
#[derive(Debug, Default)]
struct LimitSamples {
    stream: Vec<f64>,
    copies: CopyRates,
}

impl Pair {
    /// Connects in the ways without TLS, or over TLS with certificates made on the spot.
    pub(super) fn start(options: TransportOptions, has_tls: bool) -> Result<Self, MeasureError> {
        let directory = SocketDirectory::make()?;
        let mut child = ChildProcess::start("transport-target")?;
        let unix = directory.path().join("t");
        let certificates = has_tls.then(|| directory.path().to_owned());
        certificates.as_deref().map_or(Ok(()), certificates::make)?;
        let tls = certificates.as_deref().map(certificates::config);
        let stream_tls = certificates.as_deref().map(certificates::of_client).transpose()?;
        let order = Order::Listen { bytes: REGION_BYTES, unix, certificates };
        let Answer::Listening { addresses, plain } = child.ask(&order)? else {
            return Err(failed("the target does not listen"));
        };
        let config = EndpointConfig { name: "bench".to_owned(), tls, ..Default::default() };
        let client = Endpoint::new(config).map_err(failed)?;
        let bytes = usize::try_from(REGION_BYTES).map_err(failed)?;
        let register = || {
            let region = Region::shared(bytes, Access::LOCAL).map_err(failed)?;
            client.register(region).map_err(failed)
        };
        let (local, for_reads) = (register()?, register()?);
        target::fill_region(&client, local, REGION_BYTES)?;
        let connect =
            |backend: Backend| Ok((backend, backend.connect(&client, &addresses).map_err(failed)?));
        let backends = if has_tls { &[Backend::Tls][..] } else { &Backend::PLAIN };
        let connections = backends.iter().copied().map(connect).collect::<Result<_, _>>()?;
        Ok(Self {
            connections,
            stream: PlainStream::connect(&plain, options.is_short, stream_tls)?,
            copies: LocalCopies::allocate()?,
            client,
            local,
            for_reads,
            child,
            directory,
        })
    }

    pub(super) fn measure(
        &mut self,
        row: &Row,
        options: TransportOptions,
    ) -> Result<Measured, MeasureError> {
        let (sequence, schedule) = row.sequence(options);
        if row.direction == Direction::Read {
            self.ask_to_fill()?;
        }
        let route = self.route(row)?;
        let worker = |thread| {
            let mut move_batch = route.worker(&sequence, thread);
            let batches = schedule.batches_per_sample;
            move |run| (run * batches..(run + 1) * batches).try_for_each(&mut move_batch)
        };
        let workers: Vec<_> = (0..sequence.threads).map(worker).collect();
        let mut limit = LimitSamples::default();
        let (mut cpu_ns, mut begin) = (0, self.cpu_ns()?);
        // The rates of a machine that others use change within seconds: both are measured in turn.
        let took = in_step(workers, schedule.runs(), |run| {
            if run % schedule.samples_per_turn == 0 {
                cpu_ns += self.cpu_ns()?.saturating_sub(begin);
                let batches = (&sequence, schedule.batches_per_sample);
                self.sample_limit(row, batches, run, &mut limit)?;
                begin = self.cpu_ns()?;
            }
            Ok(())
        })?;
        cpu_ns += self.cpu_ns()?.saturating_sub(begin);
        let limit = match row.backend {
            Backend::Tcp | Backend::Tls => (limit.stream, self.stream.text.clone()),
            Backend::Shm => limit.copies.into_limit(sequence.threads),
        };
        self.verify(row, &sequence)?;
        let blocks = sequence.batch * sequence.threads;
        let bytes = (blocks * schedule.batches_per_sample * sequence.block_bytes) as f64;
        let timed = took.iter().skip(usize::try_from(schedule.warm_up).map_err(failed)?);
        Ok(Measured {
            rates: timed.map(|took| bytes / took.as_secs_f64().max(1e-9) / 1e9).collect(),
            limit,
            record_layer: route.record_layer(),
            cpu_ns_per_block: cpu_ns as f64 / (blocks * sequence.iterations) as f64,
        })
    }

    /// Rates of a stream whose both sides do more, and those of the plain one.
    pub(super) fn stream_with(
        &mut self,
        processing: Processing,
        options: TransportOptions,
    ) -> Result<(Vec<f64>, Limit), MeasureError> {
        let (mut rates, mut plain) = (vec![], vec![]);
        // The first one may make a handshake.
        self.stream.rate(processing)?;
        for _ in 0..if options.is_short { 1 } else { STREAM_TURNS } {
            plain.push(self.stream.rate(Processing::None)?);
            rates.push(self.stream.rate(processing)?);
        }
        Ok((rates, (plain, self.stream.text.clone())))
    }

    fn sample_limit(
        &mut self,
        row: &Row,
        batches: (&Sequence, u64),
        run: u64,
        samples: &mut LimitSamples,
    ) -> Result<(), MeasureError> {
        match row.backend {
            Backend::Tcp | Backend::Tls => samples.stream.push(self.stream.rate(Processing::None)?),
            Backend::Shm => self.copies.sample(batches, run, &mut samples.copies)?,
        }
        Ok(())
    }

    /// System calls of both processes for one batch of each row, by one thread, which is not timed.
    /// The inner error says why they cannot be counted here.
    pub(super) fn count_system_calls(
        &self,
        rows: &[Row],
        options: TransportOptions,
    ) -> Result<Result<Vec<u64>, String>, MeasureError> {
        let log = self.directory.path().join("calls");
        let calls = match SystemCalls::attach(self.child.id(), log) {
            Ok(calls) => calls,
            Err(reason) => return Ok(Err(reason)),
        };
        for row in rows {
            let (sequence, ..) = row.sequence(options);
            let mut move_batch = self.route(row)?.worker(&sequence, 0);
            // The first one maps memory and lets buffers grow.
            move_batch(0)?;
            SystemCalls::mark();
            let moved = move_batch(1);
            SystemCalls::mark();
            moved?;
        }
        let counts = calls.counts()?;
        if counts.len() != rows.len() {
            return Ok(Err("strace did not log all system calls".to_owned()));
        }
        Ok(Ok(counts))
    }

    /// Latency of small reads beside large ones, over the first connection.
    pub(super) fn small_reads(
        &mut self,
        options: TransportOptions,
    ) -> Result<(Vec<f64>, Limit), MeasureError> {
        self.ask_to_fill()?;
        let backend = self.connections.first().map(|(backend, _)| *backend);
        let backend = backend.ok_or_else(|| failed("a backend is not connected"))?;
        let (connection, remote) = self.connection(backend)?;
        let reads = Reads { connection, local: self.for_reads, remote };
        let measured = reads.measure(options)?;
        reads.verify(&self.client)?;
        Ok(measured)
    }

    /// A connection, and the region of the target.
    fn connection(
        &self,
        backend: Backend,
    ) -> Result<(Arc<dyn Connection>, RegionId), MeasureError> {
        let found = self.connections.iter().find(|(of, _)| *of == backend);
        let (_, connection) = found.ok_or_else(|| failed("a backend is not connected"))?;
        let remote = connection.peer().regions.first().map(|region| region.id);
        let remote = remote.ok_or_else(|| failed("the target offers no region"))?;
        Ok((Arc::clone(connection), remote))
    }

    fn route(&self, row: &Row) -> Result<Route, MeasureError> {
        let (connection, remote) = self.connection(row.backend)?;
        let is_read = row.direction == Direction::Read;
        let local = if is_read { self.for_reads } else { self.local };
        Ok(Route { connection, local, remote, direction: row.direction })
    }

    fn ask_to_fill(&mut self) -> Result<(), MeasureError> {
        match self.child.ask(&Order::Fill)? {
            Answer::Filled => Ok(()),
            _ => Err(failed("the target gave another answer")),
        }
    }

    /// Processor time of both processes.
    fn cpu_ns(&mut self) -> Result<u64, MeasureError> {
        match self.child.ask(&Order::CpuTime)? {
            Answer::CpuTime { ns } => Ok(ns + own_cpu_ns()),
            _ => Err(failed("the target gave another answer")),
        }
    }

    /// Compares all blocks that were moved with their sources.
    fn verify(&mut self, row: &Row, sequence: &Sequence) -> Result<(), MeasureError> {
        let compared = if row.direction == Direction::Read {
            target::compare(&self.client, self.for_reads, sequence)?
        } else {
            self.child.ask(&Order::Verify(*sequence))?
        };
        match compared {
            Answer::Compared { blocks: 1.., wrong: 0 } => Ok(()),
            Answer::Compared { blocks, wrong } => {
                let name = row.name();
                Err(failed(format!("{name}: {wrong} of {blocks} blocks have wrong bytes")))
            }
            _ => Err(failed("the target gave another answer")),
        }
    }
}

/// The connection and the regions of a row.
#[derive(Debug)]
struct Route {
    connection: Arc<dyn Connection>,
    local: RegionId,
    remote: RegionId,
    direction: Direction,
}

impl Route {
    fn record_layer(&self) -> Option<&'static str> {
        self.connection.peer().tls.map(|layer| match layer {
            RecordLayer::Kernel => "kernel",
            RecordLayer::Userspace => "userspace",
        })
    }

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

    /// What moves the batches of one thread. Their pieces are listed before anything is timed.
    fn worker(
        &self,
        sequence: &Sequence,
        thread: u64,
    ) -> impl FnMut(u64) -> Result<(), MeasureError> + Send + use<> {
        let lists = (0..sequence.iterations).map(|it| self.pieces(sequence, thread, it));
        let lists: Vec<_> = lists.collect();
        let (connection, direction) = (Arc::clone(&self.connection), self.direction);
        move |iteration| {
            let pieces = &lists[usize::try_from(iteration).expect("an index")];
            let batch = Batch { direction, pieces, notice: None };
            let moved = connection.post(&batch, soon()).and_then(|mut it| it.wait(soon()));
            moved.map_err(failed)
        }
    }
}
