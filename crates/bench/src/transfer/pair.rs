//! The measuring process and the other one, with their pages and all connections: moves prompts and
//! checks them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc;

use cascade_runtime::{Deadline, now};
use cascade_transport::{Connection, Direction, Piece, RegionId, Ticket, TransportError};

use super::failed;
use super::local::LocalPages;
use super::overlap::Compute;
use super::pages::{Compared, Pages, post};
use super::peer::{Answer, Order, notice};
use super::prompt::{Geometry, Mapping};
use crate::MeasureError;
use crate::backend::{Backend, soon};
use crate::child::{ChildProcess, SocketDirectory, own_cpu_ns};
use crate::node::machine_ns;
use crate::plain_stream::{PlainStream, Processing};

/// Layers whose reads are in flight at the same time.
const LAYERS_AHEAD: usize = 2;

/// This process and the other one.
#[derive(Debug)]
pub(super) struct Pair {
    pages: Pages,
    connections: Vec<(Backend, Arc<dyn Connection>)>,
    stream: PlainStream,
    local: LocalPages,
    /// The round that was moved last. No two have the same pages.
    round: u64,
    /// Which way the pages of both processes were filled for.
    roles: Option<Direction>,
    child: ChildProcess,
    _directory: SocketDirectory,
}

/// What a round moves.
#[derive(Debug)]
struct Round {
    connection: Arc<dyn Connection>,
    mapping: Mapping,
    /// The pieces of each layer.
    layers: Vec<Vec<Piece>>,
}

/// What moving a prompt took.
#[derive(Debug, Clone, Copy)]
pub(super) struct Moved {
    pub(super) bytes: u64,
    /// From the first call, or the start of the computation, until the first layer arrived.
    pub(super) first_ns: u64,
    /// The same of the last layer.
    pub(super) last_ns: u64,
    /// Processor time of both processes.
    pub(super) cpu_ns: u64,
}

impl Pair {
    pub(super) fn start(geometry: Geometry, is_short: bool) -> Result<Self, MeasureError> {
        let directory = SocketDirectory::make()?;
        let mut child = ChildProcess::start("transfer-peer")?;
        let unix = directory.path().join("t");
        let Answer::Listening { addresses, plain } =
            child.ask(&Order::Listen { geometry, unix })?
        else {
            return Err(failed("the other process does not listen"));
        };
        let pages = Pages::allocate("bench", geometry)?;
        let connect = |backend: Backend| {
            let connection = backend.connect(&pages.endpoint, &addresses).map_err(failed)?;
            Ok((backend, connection))
        };
        let connections = Backend::PLAIN.into_iter().map(connect).collect::<Result<_, _>>()?;
        Ok(Self {
            connections,
            stream: PlainStream::connect(&plain, is_short, None)?,
            local: LocalPages::allocate(&geometry)?,
            pages,
            round: 0,
            roles: None,
            child,
            _directory: directory,
        })
    }

    /// A rate that the way allows.
    pub(super) fn limit_rate(&mut self, backend: Backend) -> Result<f64, MeasureError> {
        match backend {
            Backend::Tcp | Backend::Tls => self.stream.rate(Processing::None),
            Backend::Shm => Ok(self.local_rate()),
        }
    }

    /// How they were measured.
    pub(super) fn limit_text(&self, backend: Backend) -> &str {
        match backend {
            Backend::Tcp | Backend::Tls => &self.stream.text,
            Backend::Shm => &self.local.text,
        }
    }

    /// The rate of a local copy of the last round's pages.
    pub(super) fn local_rate(&mut self) -> f64 {
        let blocks = self.pages.geometry.blocks;
        self.local.rate(&self.pages.geometry.mapping(self.round, blocks))
    }

    /// Fills the pages of both processes, unless they were filled for this direction already.
    pub(super) fn take_roles(&mut self, direction: Direction) -> Result<(), MeasureError> {
        if self.roles == Some(direction) {
            return Ok(());
        }
        let order = match direction {
            Direction::Write => {
                self.pages.fill_to_send()?;
                Order::FillToReceive
            }
            Direction::Read => {
                self.pages.fill_to_receive()?;
                Order::FillToSend
            }
        };
        self.roles = Some(direction);
        match self.child.ask(&order)? {
            Answer::Filled => Ok(()),
            _ => Err(failed("the other process gave another answer")),
        }
    }

    /// Writes a prompt, each layer when it is computed, or at once.
    pub(super) fn push(
        &mut self,
        backend: Backend,
        blocks: u64,
        compute: Option<Compute>,
    ) -> Result<Moved, MeasureError> {
        let Round { connection, mapping, layers } =
            self.next_round(backend, blocks, Direction::Write)?;
        let round = self.round;
        let before = self.cpu_ns()?;
        let Answer::Ready = self.child.ask(&Order::Receive { round })? else {
            return Err(failed("the other process does not wait for layers"));
        };
        let start = machine_ns();
        match compute {
            None => push_all(&*connection, &layers, round)?,
            Some(compute) => push_computed(&*connection, &layers, round, compute)?,
        }
        let Answer::Arrived { at_ns } = self.child.answer()? else {
            return Err(failed("the other process does not say when layers arrived"));
        };
        let cpu_ns = self.cpu_ns()?.saturating_sub(before);
        let order = Order::Compare { round, blocks };
        match self.child.ask(&order)? {
            Answer::Compared { pages, wrong } => check(Compared { pages, wrong })?,
            _ => return Err(failed("the other process compared nothing")),
        }
        self.moved(&mapping, start, &at_ns, cpu_ns)
    }

    /// Reads a prompt.
    pub(super) fn pull(&mut self, backend: Backend, blocks: u64) -> Result<Moved, MeasureError> {
        let Round { connection, mapping, layers } =
            self.next_round(backend, blocks, Direction::Read)?;
        let before = self.cpu_ns()?;
        let mut at_ns = vec![];
        let mut asked = VecDeque::new();
        let start = machine_ns();
        for pieces in &layers {
            asked.push_back(post(&*connection, Direction::Read, pieces, None)?);
            take_arrived(&mut asked, LAYERS_AHEAD, &mut at_ns)?;
        }
        take_arrived(&mut asked, 0, &mut at_ns)?;
        let cpu_ns = self.cpu_ns()?.saturating_sub(before);
        check(self.pages.compare(&mapping)?)?;
        self.moved(&mapping, start, &at_ns, cpu_ns)
    }

    /// The connection, the pages and the pieces of another round.
    fn next_round(
        &mut self,
        backend: Backend,
        blocks: u64,
        direction: Direction,
    ) -> Result<Round, MeasureError> {
        self.round += 1;
        let mapping = self.pages.geometry.mapping(self.round, blocks);
        let found = self.connections.iter().find(|(of, _)| *of == backend);
        let (_, connection) = found.ok_or_else(|| failed("a backend is not connected"))?;
        let remote: Vec<RegionId> = connection.peer().regions.iter().map(|it| it.id).collect();
        if remote.len() as u64 != self.pages.geometry.regions() {
            return Err(failed("the other process has other regions"));
        }
        let layers = self.pages.layers(&remote, &mapping, direction);
        Ok(Round { connection: Arc::clone(connection), mapping, layers })
    }

    fn cpu_ns(&mut self) -> Result<u64, MeasureError> {
        match self.child.ask(&Order::CpuTime)? {
            Answer::CpuTime { ns } => Ok(ns + own_cpu_ns()),
            _ => Err(failed("the other process does not know its processor time")),
        }
    }

    fn moved(
        &self,
        mapping: &Mapping,
        start: u64,
        at_ns: &[u64],
        cpu_ns: u64,
    ) -> Result<Moved, MeasureError> {
        let (Some(first), Some(last)) = (at_ns.first(), at_ns.iter().max()) else {
            return Err(failed("no layer arrived"));
        };
        let geometry = self.pages.geometry;
        let bytes = geometry.layers * geometry.layer_bytes(mapping.source.len() as u64);
        Ok(Moved { bytes, first_ns: first - start, last_ns: last - start, cpu_ns })
    }
}

fn check(compared: Compared) -> Result<(), MeasureError> {
    match compared {
        Compared { pages: 1.., wrong: 0 } => Ok(()),
        Compared { pages, wrong } => {
            Err(failed(format!("{wrong} of {pages} pages have wrong bytes")))
        }
    }
}

/// Notes when the layers that have arrived did, and waits until at most `ahead` have not.
fn take_arrived(
    asked: &mut VecDeque<Ticket>,
    ahead: usize,
    at_ns: &mut Vec<u64>,
) -> Result<(), MeasureError> {
    loop {
        let deadline = if asked.len() > ahead { soon() } else { Deadline::at(now()) };
        let Some(oldest) = asked.front_mut() else { return Ok(()) };
        match oldest.wait(deadline) {
            Ok(()) => at_ns.push(machine_ns()),
            Err(TransportError::Deadline { .. }) if asked.len() <= ahead => return Ok(()),
            Err(error) => return Err(failed(error)),
        }
        asked.pop_front();
    }
}

/// Writes all layers, one after the other.
fn push_all(
    connection: &dyn Connection,
    layers: &[Vec<Piece>],
    round: u64,
) -> Result<(), MeasureError> {
    let mut tickets = vec![];
    for (pieces, layer) in layers.iter().zip(0..) {
        let notice = notice(round, layer);
        tickets.push(post(connection, Direction::Write, pieces, Some(&notice))?);
    }
    tickets.into_iter().try_for_each(|mut ticket| ticket.wait(soon()).map_err(failed))
}

/// Writes each layer from a second thread when this one has computed it.
fn push_computed(
    connection: &dyn Connection,
    layers: &[Vec<Piece>],
    round: u64,
    compute: Compute,
) -> Result<(), MeasureError> {
    let (computed, to_send) = mpsc::channel::<(u64, &Vec<Piece>)>();
    std::thread::scope(|threads| {
        let sender = threads.spawn(move || {
            let mut tickets = vec![];
            for (layer, pieces) in to_send {
                let notice = notice(round, layer);
                tickets.push(post(connection, Direction::Write, pieces, Some(&notice))?);
            }
            tickets.into_iter().try_for_each(|mut ticket| ticket.wait(soon()).map_err(failed))
        });
        for (pieces, layer) in layers.iter().zip(0..) {
            compute.layer();
            if computed.send((layer, pieces)).is_err() {
                // The sender has failed, and says why below.
                break;
            }
        }
        drop(computed);
        sender.join().map_err(|_| failed("the thread that sends panicked"))?
    })
}
