//! Serves one connected peer: writes into regions, reads from them, answers.

mod ask;

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use cascade_block::checksum;
use cascade_runtime::{Deadline, Plant, SystemClock, is_planted};
use rustix::fs::{Mode, OFlags};

use super::incoming::{Incoming, receive_header};
use super::outgoing::Outgoing;
use super::socket::{Patience, Pause, Socket};
use crate::limits::{FRAME_BYTES_MAX, LARGE_FRAME_BYTES};
use crate::notice::NoticePlace;
use crate::peer::EndpointId;
use crate::piece::Direction;
use crate::region::{Region, Span};
use crate::regions::Snapshot;
use crate::state::EndpointState;
use crate::turns::Turn;
use crate::verbs::Link;
use crate::wire::{ENTRY_BYTES, Header, Kind, entries};
use crate::{Refusal, TransportError};

/// How long one wait for a frame lasts: an idle connection may last for ever.
const IDLE_WAIT: Duration = Duration::from_secs(3600);

/// A piece that was refused, and why.
type Refused = (Refusal, u32);

/// The connection of one peer. Its frames are served one after the other.
pub(super) struct Served<'a> {
    socket: &'a Socket,
    state: &'a EndpointState,
    peer: EndpointId,
    patience: Patience<'static>,
    incoming: Incoming,
    outgoing: Outgoing,
    body: Vec<u8>,
    spans: Vec<Span>,
    /// The queue pairs that are connected to those of the peer.
    link: Option<Link>,
    /// The first refusal of a batch whose last frame has not come yet.
    refused: Option<Refused>,
}

impl<'a> Served<'a> {
    pub(super) fn new(socket: &'a Socket, state: &'a Arc<EndpointState>, peer: EndpointId) -> Self {
        let stall = state.config.limits.stall_timeout;
        Self {
            socket,
            state,
            peer,
            patience: Patience::of_frame(stall, 0),
            incoming: Incoming::default(),
            outgoing: Outgoing::default(),
            body: vec![],
            spans: vec![],
            link: None,
            refused: None,
        }
    }

    /// Serves frames until the connection ends.
    pub(super) fn run(&mut self) -> TransportError {
        loop {
            if let Err(error) = self.frame() {
                return error;
            }
        }
    }

    fn frame(&mut self) -> Result<(), TransportError> {
        if !self.socket.wait_readable(Deadline::after(&SystemClock, IDLE_WAIT))? {
            return Ok(());
        }
        let stall = self.state.config.limits.stall_timeout;
        self.patience = Patience::of_frame(stall, 0);
        let header = receive_header(self.socket, &mut self.patience)?;
        // Its payload, or that of the answer.
        self.patience = Patience::of_frame(stall, FRAME_BYTES_MAX);
        self.body.resize(header.body_bytes as usize, 0);
        self.socket.receive(&mut [Span::of_buffer(&mut self.body)], &mut self.patience)?;
        if checksum(&self.body) != header.body_checksum {
            return Err(self.malformed("the checksum of a body does not match"));
        }
        let large = self.payload_bytes(&header) >= LARGE_FRAME_BYTES;
        let turn = large.then(|| self.wait_for_turn()).transpose()?;
        // Keeps the regions of this frame until it is answered.
        let regions = self.state.regions.snapshot();
        let served = match header.kind {
            Kind::Write => self.write(&header, &regions),
            Kind::Read => self.read(&header, &regions),
            Kind::Map => self.map(&header, &regions),
            Kind::Ask => self.ask(&header),
            Kind::Link => self.connect_queue_pairs(&header, &regions),
            _ => Err(self.malformed("a client does not send this kind of message")),
        };
        drop(turn);
        served
    }

    /// Bytes that a frame moves, or may move.
    fn payload_bytes(&self, header: &Header) -> u64 {
        match header.kind {
            Kind::Write => header.payload_bytes,
            Kind::Read => self.entry_bytes(header),
            Kind::Ask => self.offered_bytes(),
            _ => 0,
        }
    }

    /// Waits until a large frame may be served. It holds nothing meanwhile, and the peer is not
    /// taken for a stalled one.
    fn wait_for_turn(&mut self) -> Result<Turn<'a>, TransportError> {
        let turn = self.state.turns.take(self.peer, || self.socket.is_closed());
        let closed = || TransportError::lost(self.socket.peer(), "it closed the connection");
        let turn = turn.ok_or_else(closed)?;
        let stall = self.state.config.limits.stall_timeout;
        self.patience = Patience::of_frame(stall, FRAME_BYTES_MAX);
        Ok(turn)
    }

    fn malformed(&self, reason: &str) -> TransportError {
        TransportError::lost(self.socket.peer(), reason)
    }

    /// Looks up the pieces of a frame, into `spans`.
    fn look_up(
        &mut self,
        header: &Header,
        regions: &Snapshot,
        direction: Direction,
    ) -> Result<(), Refused> {
        self.spans.clear();
        for ((place, bytes), piece) in entries(&self.body, header.pieces).zip(0..) {
            let span = regions.for_peer(place, bytes, direction);
            self.spans.push(span.map_err(|refusal| (refusal, piece))?);
        }
        Ok(())
    }

    /// Bytes that the entries of a frame name.
    fn entry_bytes(&self, header: &Header) -> u64 {
        entries(&self.body, header.pieces).map(|(_, bytes)| bytes).sum()
    }

    fn write(&mut self, header: &Header, regions: &Snapshot) -> Result<(), TransportError> {
        if self.entry_bytes(header) != header.payload_bytes {
            return Err(self.malformed("the pieces of a frame are not as long as its payload"));
        }
        let is_early = header.status == 0 && is_planted(Plant::EarlyNotice);
        let early = if is_early { self.give_notice(header).err() } else { None };
        self.incoming.begin(header);
        let refused = match self.look_up(header, regions, Direction::Write) {
            // Nothing of a batch is written after a refusal.
            Ok(()) if self.refused.is_none() => {
                let waits = (&mut self.patience, Pause::NEVER);
                let whole = self.incoming.payload(self.socket, &self.spans, waits)?;
                let damaged = whole.and_then(|whole| whole.damaged);
                damaged.map(|piece| (Refusal::Damaged, piece))
            }
            looked_up => {
                self.incoming.discard(self.socket, (&mut self.patience, Pause::NEVER))?;
                looked_up.err()
            }
        };
        self.refused = self.refused.or(refused);
        if header.status != 0 {
            return Ok(());
        }
        let refused = self
            .refused
            .take()
            .or_else(|| if is_early { early } else { self.give_notice(header).err() });
        self.answer(header, refused)
    }

    fn read(&mut self, header: &Header, regions: &Snapshot) -> Result<(), TransportError> {
        let bytes = self.entry_bytes(header);
        if bytes > FRAME_BYTES_MAX {
            return Err(self.malformed("a frame reads more than the limit"));
        }
        let refused = self.look_up(header, regions, Direction::Read).err();
        if let Some(refused) = self.refused.or(refused) {
            // Nor is the notice given, which comes with the last frame of the batch.
            self.refused = (header.status != 0).then_some(refused);
            return self.answer(header, Some(refused));
        }
        let place = match self.reserve(header) {
            Ok(place) => place,
            Err(refused) => return self.answer(header, Some(refused)),
        };
        let answer = Header {
            pieces: header.pieces,
            payload_bytes: bytes,
            ..Header::new(Kind::Data, header.frame)
        };
        // The client receives without a question from here.
        let mut receive = || false;
        let sending: (_, &mut dyn FnMut() -> bool) = (&mut self.patience, &mut receive);
        self.outgoing.send(self.socket, &answer, &[], &self.spans, sending)?;
        self.deliver(place, header);
        Ok(())
    }

    /// A place for the notice of a frame, if it has one. A refusal if too many wait.
    fn reserve(&self, header: &Header) -> Result<Option<NoticePlace<'a>>, Refused> {
        if header.notice_bytes() == 0 {
            return Ok(None);
        }
        self.state.notices.reserve(self.peer).map(Some).ok_or((Refusal::Busy, 0))
    }

    /// Hands over the notice of a frame whose bytes have arrived, if there is room for it.
    fn give_notice(&self, header: &Header) -> Result<(), Refused> {
        self.reserve(header).map(|place| self.deliver(place, header))
    }

    /// Hands over the notice of a frame whose bytes have arrived or left.
    fn deliver(&self, place: Option<NoticePlace<'a>>, header: &Header) {
        if let Some(place) = place {
            let notice = &self.body[header.pieces as usize * ENTRY_BYTES..];
            place.fill(notice.into());
        }
    }

    fn answer(&mut self, header: &Header, refused: Option<Refused>) -> Result<(), TransportError> {
        let (status, piece) = refused.map_or((0, 0), |(refusal, piece)| (refusal.code(), piece));
        let answer = Header { status, piece, ..Header::new(Kind::Done, header.frame) }.to_bytes();
        self.socket.send(&mut [Span::of_bytes(&answer)], &mut self.patience)
    }

    /// Makes queue pairs for those of the peer. They are destroyed with this connection.
    fn connect_queue_pairs(
        &mut self,
        header: &Header,
        regions: &Snapshot,
    ) -> Result<(), TransportError> {
        let served = match self.state.rdma.get() {
            Some(rdma) => rdma.serve(&self.body, regions).map_err(|error| error.to_string()),
            None => Err("this endpoint uses no device".to_owned()),
        };
        let (status, body) = match served {
            Ok((link, body)) => {
                self.link = Some(link);
                (0, body)
            }
            Err(reason) => (1, reason.into_bytes()),
        };
        let answer = Header { status, ..Header::new(Kind::Linked, header.frame) };
        let answer = answer.with_body(&body).to_bytes();
        let mut spans = [Span::of_bytes(&answer), Span::of_bytes(&body)];
        self.socket.send(&mut spans, &mut self.patience)
    }

    /// Sends the descriptor of a region, so that a process of this host can map it.
    fn map(&mut self, header: &Header, regions: &Snapshot) -> Result<(), TransportError> {
        let Some((place, _)) = entries(&self.body, header.pieces).next() else {
            return Err(self.malformed("a request for a region names none"));
        };
        let exported = regions.region(place.region).and_then(export);
        match exported {
            Ok(descriptor) => {
                let answer = Header::new(Kind::Descriptor, header.frame).to_bytes();
                self.socket.send_descriptor(&answer, descriptor.as_fd(), &mut self.patience)
            }
            Err(refusal) => self.answer(header, Some((refusal, 0))),
        }
    }
}

/// A descriptor of a region that allows what its access allows.
fn export(region: &Region) -> Result<OwnedFd, Refusal> {
    let access = region.access();
    let file = region.file().filter(|_| access.read || access.write);
    let file = file.ok_or(Refusal::NotAllowed)?;
    let opened = if access.write {
        file.as_fd().try_clone_to_owned()
    } else {
        // A duplicate would be writable. Opening the file again gives a read-only descriptor.
        let name = format!("/proc/self/fd/{}", file.as_raw_fd());
        rustix::fs::open(name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).map_err(Into::into)
    };
    opened.map_err(|_| Refusal::NotAllowed)
}
