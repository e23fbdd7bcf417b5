//! A connection whose bytes move by RDMA. Notices and regions of a later date use its socket.

use std::sync::Arc;
use std::time::Duration;

use cascade_block::with_causes;
use cascade_runtime::{Deadline, SystemClock};

use super::chain::Move;
use super::error::VerbsError;
use super::flush::flush_places;
use super::link::{Link, OpenLink, Posted};
use super::memory::{RegisteredMemory, RemoteMemory};
use super::rdma::{LocalPlace, Loopback, Rdma, Table, parse_answer};
use super::settings::Flush;
use crate::connection::{Batch, Completion, Connection, Ticket, TransportKind};
use crate::limits::NOTICE_BYTES_MAX;
use crate::peer::Peer;
use crate::piece::{Direction, Piece, plan};
use crate::question::{Answer, AskLimit};
use crate::stream::StreamConnection;
use crate::{Refusal, TransportError};

/// How often a wait looks whether the peer's process has ended: its socket says so at once, and its
/// device only after many retries.
const LOOK_WAIT: Duration = Duration::from_millis(100);

/// A connection over a socket and queue pairs.
#[derive(Debug)]
pub(crate) struct RdmaConnection {
    shared: Arc<Shared>,
    rdma: Arc<Rdma>,
    /// The peer's regions when the connection was made, by ID.
    remote: Vec<Option<RemoteMemory>>,
    /// Whether one of them is memory of a GPU.
    has_gpu: bool,
}

/// Why there are no queue pairs, and the stream that they were asked for over.
#[derive(Debug)]
pub(crate) struct NotOpened {
    pub(crate) error: TransportError,
    pub(crate) stream: StreamConnection,
}

/// What a connection shares with its tickets.
#[derive(Debug)]
struct Shared {
    stream: StreamConnection,
    link: Link,
}

impl RdmaConnection {
    /// Registers this side's regions, and connects queue pairs to those that the peer makes.
    ///
    /// # Errors
    /// [`TransportError::Unavailable`] if one of both sides cannot use RDMA; the stream is usable
    /// then, and comes back.
    pub(crate) fn open(
        stream: StreamConnection,
        rdma: &Arc<Rdma>,
        deadline: Deadline,
    ) -> Result<Self, Box<NotOpened>> {
        match Self::link(&stream, rdma, deadline) {
            Ok((link, remote)) => {
                let shared = Arc::new(Shared { stream, link });
                let has_gpu = remote.iter().flatten().any(|memory| memory.gpu.is_some());
                Ok(Self { shared, rdma: Arc::clone(rdma), remote, has_gpu })
            }
            Err(error) => Err(Box::new(NotOpened { error, stream })),
        }
    }

    fn link(
        stream: &StreamConnection,
        rdma: &Arc<Rdma>,
        deadline: Deadline,
    ) -> Result<(Link, Vec<Option<RemoteMemory>>), TransportError> {
        // Nothing was posted yet, so that any other transport can take over.
        let unusable = |error: VerbsError| {
            TransportError::Unavailable(format!("RDMA cannot be used: {}", with_causes(&error)))
        };
        rdma.register_all(&stream.regions()).map_err(unusable)?;
        let open = OpenLink::open(&rdma.device).map_err(unusable)?;
        let answer = stream.exchange(&open.address().to_bytes(), deadline)?;
        let (address, remote) = parse_answer(&answer).map_err(unusable)?;
        Ok((open.connect(&address).map_err(unusable)?, remote))
    }

    /// The registered regions of this process, those of the pieces among them.
    fn register(&self, pieces: &[Piece]) -> Result<Table<Arc<RegisteredMemory>>, TransportError> {
        let mut table = self.rdma.table();
        for (piece, index) in pieces.iter().zip(0..) {
            let region = piece.local.region;
            if table.get(region.0 as usize).is_some_and(Option::is_some) {
                continue;
            }
            let found = self.shared.stream.regions().shared(region);
            let refused = |refusal| TransportError::Local { piece: index, region, refusal };
            let registered = self.rdma.register(region, found.map_err(refused)?);
            registered.map_err(|error| self.failed(error))?;
            table = self.rdma.table();
        }
        Ok(table)
    }

    /// What the device is asked to move, in order.
    fn moves(
        &self,
        batch: &Batch<'_>,
        table: &Table<Arc<RegisteredMemory>>,
    ) -> Result<Vec<Move>, TransportError> {
        let mut planned = Vec::with_capacity(batch.pieces.len());
        plan(batch.pieces, self.shared.link.message_bytes_max().into(), &mut planned);
        let mut moves = Vec::with_capacity(planned.len());
        for (piece, index) in planned.iter().zip(0_u32..) {
            let region = piece.local.region;
            let local = |refusal| TransportError::Local { piece: index as usize, region, refusal };
            let memory = table.get(region.0 as usize).and_then(Option::as_ref);
            let memory = memory.ok_or_else(|| local(Refusal::UnknownRegion))?;
            let here = memory.at(piece.local.offset, piece.bytes);
            let here = here.map_err(|_| local(Refusal::OutOfBounds))?;
            let remote = self.remote.get(piece.remote.region.0 as usize).and_then(Option::as_ref);
            let remote = remote.ok_or(Refusal::UnknownRegion);
            // The plan splits what is longer.
            let bytes = u32::try_from(piece.bytes).map_err(|_| local(Refusal::OutOfBounds))?;
            let item = remote.and_then(|remote| {
                let there = remote.at(piece.remote.offset, piece.bytes, batch.direction);
                let there = there.map_err(|error| refusal(&error))?;
                Ok(Move::between((memory, here), (remote, there), bytes))
            });
            moves.push(item.map_err(|refusal| {
                let peer = self.peer().address.clone();
                TransportError::Refused { peer, piece: index, refusal }
            })?);
        }
        Ok(moves)
    }

    fn failed(&self, error: VerbsError) -> TransportError {
        failed(&self.peer().address, error)
    }
}

/// An error of a link, as the callers of a transport know it.
fn failed(peer: &str, error: VerbsError) -> TransportError {
    match error {
        VerbsError::Unavailable(reason) => TransportError::Unavailable(reason.to_string()),
        VerbsError::Deadline { what } => TransportError::Deadline { what },
        other => TransportError::lost(peer, other),
    }
}

fn refusal(error: &VerbsError) -> Refusal {
    match error {
        VerbsError::NotAllowed(_) => Refusal::NotAllowed,
        _ => Refusal::OutOfBounds,
    }
}

impl Connection for RdmaConnection {
    fn peer(&self) -> &Peer {
        self.shared.stream.peer()
    }

    fn transport(&self) -> TransportKind {
        TransportKind::Rdma
    }

    fn post(&self, batch: &Batch<'_>, deadline: Deadline) -> Result<Ticket, TransportError> {
        let notice_bytes = batch.notice.unwrap_or_default().len();
        if notice_bytes > NOTICE_BYTES_MAX {
            let (what, value) = ("a notice", notice_bytes);
            return Err(TransportError::TooLarge { what, value, limit: NOTICE_BYTES_MAX });
        }
        let knows = |piece: &Piece| {
            let remote = self.remote.get(piece.remote.region.0 as usize);
            piece.local.region.is_first() && remote.is_some_and(Option::is_some)
        };
        if batch.pieces.iter().all(|piece| piece.bytes == 0) || !batch.pieces.iter().all(knows) {
            return self.shared.stream.post(batch, deadline);
        }
        if !self.is_open() {
            return Err(TransportError::lost(&self.peer().address, "the connection has ended"));
        }
        let table = self.register(batch.pieces)?;
        let moves = self.moves(batch, &table)?;
        let flush = self.rdma.device.settings.flush;
        let flushes = match batch.direction {
            Direction::Write if self.has_gpu || flush == Flush::Always => {
                flush_places(flush, &moves)
            }
            _ => Vec::new(),
        };
        let settle = match batch.direction {
            Direction::Read if flush != Flush::Never => local_gpus(batch.pieces, &table),
            _ => Vec::new(),
        };
        let posted = self
            .shared
            .link
            .post(batch.direction, moves.into_iter(), &flushes, deadline)
            .map_err(|error| self.failed(error))?;
        let (shared, rdma) = (Arc::clone(&self.shared), Arc::clone(&self.rdma));
        let ticket = RdmaTicket { shared, rdma, posted, settle, settling: None, _memory: table };
        if batch.notice.is_none() {
            return Ok(Ticket::pending(ticket));
        }
        // The notice follows the bytes, so this waits for them. A ticket that is dropped ends them.
        Ticket::pending(ticket).wait(deadline)?;
        self.shared.stream.post(&Batch { pieces: &[], ..*batch }, deadline)
    }

    /// Over the socket.
    fn ask(
        &self,
        question: &[u8],
        targets: &mut [&mut [u8]],
        limit: AskLimit<'_>,
    ) -> Result<Answer, TransportError> {
        self.shared.stream.ask(question, targets, limit)
    }

    fn is_open(&self) -> bool {
        self.shared.link.is_open() && self.shared.stream.is_open()
    }

    fn close(&self) {
        self.shared.close();
    }
}

impl Drop for RdmaConnection {
    fn drop(&mut self) {
        self.shared.close();
    }
}

impl Shared {
    fn close(&self) {
        self.link.close();
        self.stream.close();
    }
}

/// The places that are read after a batch that reads into memory of this process: one in each GPU.
fn local_gpus(pieces: &[Piece], table: &Table<Arc<RegisteredMemory>>) -> Vec<LocalPlace> {
    let mut places: Vec<LocalPlace> = Vec::new();
    if table.iter().flatten().all(|memory| memory.gpu.is_none()) {
        return places;
    }
    for piece in pieces.iter().filter(|piece| piece.bytes > 0) {
        let memory = table.get(piece.local.region.0 as usize).and_then(Option::as_ref);
        let Some(memory) = memory.filter(|memory| memory.gpu.is_some()) else { continue };
        if places.iter().all(|(other, _)| other.gpu != memory.gpu) {
            places.push((Arc::clone(memory), piece.local.offset));
        }
    }
    places
}

/// A batch of a connection.
#[derive(Debug)]
struct RdmaTicket {
    shared: Arc<Shared>,
    rdma: Arc<Rdma>,
    posted: Posted,
    /// Places in memory of GPUs that are read once all bytes have arrived.
    settle: Vec<LocalPlace>,
    /// Those reads.
    settling: Option<(Arc<Loopback>, Posted)>,
    /// Keeps the local memory registered.
    _memory: Table<Arc<RegisteredMemory>>,
}

impl RdmaTicket {
    /// Waits until the peer's device, or this side's, has moved all bytes.
    fn wait_for_bytes(&self, deadline: Deadline) -> Result<(), TransportError> {
        let Shared { stream, link } = &*self.shared;
        let peer = &stream.peer().address;
        loop {
            let look = Deadline::after(&SystemClock, LOOK_WAIT).min(deadline);
            match link.wait(&self.posted, look) {
                Err(VerbsError::Deadline { .. }) if !deadline.has_passed(&SystemClock) => {}
                other => return other.map_err(|error| failed(peer, error)),
            }
            if stream.is_closed_by_peer() {
                self.shared.close();
                return Err(TransportError::lost(peer, "its process closed the connection"));
            }
        }
    }

    /// Makes the memory of this side's GPUs have the bytes that were read.
    fn settle(&mut self, deadline: Deadline) -> Result<(), VerbsError> {
        if self.settling.is_none() {
            let loopback = self.rdma.loopback()?;
            let posted = loopback.post(&self.settle, deadline)?;
            self.settling = Some((loopback, posted));
        }
        if let Some((loopback, posted)) = &self.settling {
            loopback.link.wait(posted, deadline)?;
        }
        self.settle.clear();
        Ok(())
    }
}

impl Completion for RdmaTicket {
    fn wait(&mut self, deadline: Deadline) -> Result<(), TransportError> {
        self.wait_for_bytes(deadline)?;
        if self.settle.is_empty() {
            return Ok(());
        }
        self.settle(deadline).map_err(|error| {
            let error = failed(&self.shared.stream.peer().address, error);
            if !matches!(error, TransportError::Deadline { .. }) {
                self.shared.close();
            }
            error
        })
    }

    fn cancel(&mut self, deadline: Deadline) {
        // What a queue pair has is not taken back: it ends, or the queue pair does.
        if self.wait(deadline).is_err() {
            self.shared.close();
            if let Some((loopback, _)) = &self.settling {
                loopback.link.close();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::Ordering;

    use super::super::device::Device;
    use super::super::fake;
    use super::super::settings::{Flush, VerbsSettings};
    use crate::conformance::{self, Subject, soon};
    use crate::{Access, Batch, Direction, Piece, Place, Region, RegionId, TransportError};

    /// Both endpoints use devices of the stand-in, which copies within this process.
    fn subject(settings: &VerbsSettings) -> Subject {
        subject_over(&fake::device(settings))
    }

    /// The client uses this device.
    fn subject_over(device: &Arc<Device>) -> Subject {
        let region = |bytes, access| Region::shared(bytes, access).unwrap();
        let (client, server, local, remote) = conformance::endpoints(region);
        client.use_device(Arc::clone(device)).unwrap();
        server.use_device(fake::device(&VerbsSettings::default())).unwrap();
        let listener = server.listen_tcp("127.0.0.1:0".parse().unwrap()).unwrap();
        let connection = client.connect_rdma(listener.tcp_address().unwrap(), soon()).unwrap();
        // Its device refuses, and the connection is lost; the stand-in checks no keys.
        let sees_unregistered = false;
        Subject { client, server, listener, connection, local, remote, sees_unregistered }
    }

    #[test]
    fn it_conforms_over_the_stand_in() {
        conformance::all(&mut || subject(&VerbsSettings::default()));
    }

    #[test]
    fn it_conforms_with_flushed_writes_and_one_short_queue() {
        let settings = VerbsSettings {
            queue_pairs: 1,
            chain: 4,
            depth: 16,
            flush: Flush::Always,
            ..Default::default()
        };
        conformance::all(&mut || subject(&settings));
    }

    fn write(subject: &Subject) -> Result<(), TransportError> {
        let place = |region: RegionId| Place { region, offset: 0 };
        let (local, remote) = (place(subject.local[0]), place(subject.remote[0]));
        let pieces = [Piece { local, remote, bytes: 100 }];
        let batch = Batch { direction: Direction::Write, pieces: &pieces, notice: None };
        subject.connection.post(&batch, soon())?.wait(soon())
    }

    #[test]
    fn a_failed_request_loses_the_connection() {
        let device = fake::device(&VerbsSettings::default());
        let subject = subject_over(&device);
        write(&subject).unwrap();
        let state = fake::state(&device);
        state.status.store(12, Ordering::Relaxed);
        state.fail_at.store(2, Ordering::Relaxed);
        let error = write(&subject).unwrap_err();
        assert!(error.to_string().contains("retries exhausted"), "{error}");
        assert!(matches!(error, TransportError::Lost { .. }), "{error}");
        assert!(!subject.connection.is_open());
    }

    #[test]
    fn a_peer_that_ends_is_seen_before_its_device_is_given_up() {
        let device = fake::device(&VerbsSettings::default());
        let subject = subject_over(&device);
        write(&subject).unwrap();
        fake::state(&device).is_held.store(true, Ordering::Relaxed);
        let place = |region: RegionId| Place { region, offset: 0 };
        let (local, remote) = (place(subject.local[0]), place(subject.remote[0]));
        let pieces = [Piece { local, remote, bytes: 100 }];
        let batch = Batch { direction: Direction::Write, pieces: &pieces, notice: None };
        let mut ticket = subject.connection.post(&batch, soon()).unwrap();
        subject.listener.stop();
        let error = ticket.wait(soon()).unwrap_err();
        assert!(matches!(error, TransportError::Lost { .. }), "{error}");
    }

    #[test]
    fn an_endpoint_without_a_device_says_so() {
        let region = |bytes, access: Access| Region::shared(bytes, access).unwrap();
        let (client, server, _, _) = conformance::endpoints(region);
        let listener = server.listen_tcp("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = listener.tcp_address().unwrap();
        let error = client.connect_rdma(address, soon()).unwrap_err();
        assert!(error.to_string().contains("this endpoint uses no RDMA device"), "{error}");
        client.use_device(fake::device(&VerbsSettings::default())).unwrap();
        let error = client.connect_rdma(address, soon()).unwrap_err();
        assert!(error.to_string().contains("this endpoint uses no device"), "{error}");
    }
}
