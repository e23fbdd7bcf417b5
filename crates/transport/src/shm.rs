//! A connection to a process of the same host: maps its shared regions and copies.

use std::sync::{Arc, PoisonError};

use cascade_memory::PeerRegion;
use cascade_runtime::{Deadline, RwLock};

use crate::connection::{Batch, Connection, Ticket, TransportKind};
use crate::peer::Peer;
use crate::piece::{Direction, Piece, Place, RegionId};
use crate::question::{Answer, AskLimit};
use crate::region::{Span, span_of};
use crate::regions::Snapshot;
use crate::stream::StreamConnection;
use crate::wire::OfferedRegion;
use crate::{Refusal, TransportError};

/// How far ahead of the copies pieces are brought into the cache.
const PIECES_AHEAD: usize = 4;

/// A connection over a Unix socket. Batches whose regions are all mapped are copied by the caller;
/// the socket carries notices, and batches of memory that cannot be mapped.
#[derive(Debug)]
pub(crate) struct ShmConnection {
    stream: StreamConnection,
    mapped: RwLock<Arc<Mapped>>,
}

/// The regions of the peer that are mapped here, by their IDs.
type Mapped = Vec<Option<Arc<MappedRegion>>>;

#[derive(Debug)]
struct MappedRegion {
    memory: PeerRegion,
    offer: OfferedRegion,
}

impl MappedRegion {
    fn span(&self, place: Place, bytes: u64, direction: Direction) -> Result<Span, Refusal> {
        let is_allowed = match direction {
            Direction::Read => self.offer.access.read,
            Direction::Write => self.offer.access.write,
        };
        if !is_allowed {
            return Err(Refusal::NotAllowed);
        }
        span_of(self.memory.base(), self.memory.bytes(), place.offset, bytes)
    }
}

impl ShmConnection {
    pub(crate) fn new(stream: StreamConnection) -> Self {
        Self { stream, mapped: RwLock::default() }
    }

    fn mapped(&self) -> Arc<Mapped> {
        Arc::clone(&self.mapped.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// The peer's regions with those of these pieces mapped. `None` if one of them cannot be.
    fn map_all(
        &self,
        pieces: &[Piece],
        deadline: Deadline,
    ) -> Result<Option<Arc<Mapped>>, TransportError> {
        let mut mapped = self.mapped();
        let mut last = None;
        for piece in pieces {
            let region = piece.remote.region;
            if last == Some(region) {
                continue;
            }
            if mapped.get(region.0 as usize).is_none_or(Option::is_none) {
                let offers = &self.peer().regions;
                let can = |offer: &&OfferedRegion| offer.is_mappable && offer.id.is_first();
                let offer = offers.iter().filter(can).find(|offer| offer.id == region);
                let Some(offer) = offer else {
                    return Ok(None);
                };
                mapped = self.map(*offer, deadline)?;
            }
            last = Some(region);
        }
        Ok(Some(mapped))
    }

    fn map(&self, offer: OfferedRegion, deadline: Deadline) -> Result<Arc<Mapped>, TransportError> {
        let bytes = usize::try_from(offer.bytes).unwrap_or(usize::MAX);
        let descriptor = self.stream.descriptor(offer.id, deadline)?;
        let memory = PeerRegion::map_sealed(descriptor, bytes, offer.access.write)
            .map_err(|error| TransportError::memory(bytes, std::io::Error::other(error)))?;
        let mut current = self.mapped.write().unwrap_or_else(PoisonError::into_inner);
        let mut all = (**current).clone();
        let index = offer.id.0 as usize;
        if all.len() <= index {
            all.resize(index + 1, None);
        }
        all[index] = Some(Arc::new(MappedRegion { memory, offer }));
        *current = Arc::new(all);
        Ok(Arc::clone(&current))
    }

    /// Target and source of each piece. Fails if any is refused.
    fn look_up(
        &self,
        batch: &Batch<'_>,
        local: &Snapshot,
        mapped: &Mapped,
    ) -> Result<Vec<(Span, Span)>, TransportError> {
        let look_up = |(piece, index)| {
            let (here, there) = self.spans(piece, index, batch.direction, (local, mapped))?;
            Ok(match batch.direction {
                Direction::Write => (there, here),
                Direction::Read => (here, there),
            })
        };
        batch.pieces.iter().zip(0_u32..).map(look_up).collect()
    }

    fn spans(
        &self,
        piece: &Piece,
        index: u32,
        direction: Direction,
        (local, mapped): (&Snapshot, &Mapped),
    ) -> Result<(Span, Span), TransportError> {
        let RegionId(id) = piece.remote.region;
        let region = mapped.get(id as usize).and_then(Option::as_ref);
        let there = region
            .ok_or(Refusal::UnknownRegion)
            .and_then(|region| region.span(piece.remote, piece.bytes, direction))
            .map_err(|refusal| {
                let peer = self.peer().address.clone();
                TransportError::Refused { peer, piece: index, refusal }
            })?;
        let here = local.local(piece.local, piece.bytes).map_err(|refusal| {
            let region = piece.local.region;
            TransportError::Local { piece: index as usize, region, refusal }
        })?;
        Ok((here, there))
    }
}

/// Copies each pair of target and source.
fn copy(pairs: &[(Span, Span)]) {
    let mut ahead = pairs.iter().skip(PIECES_AHEAD);
    for (target, source) in pairs {
        // Blocks lie anywhere, so that the processor does not guess which one is next.
        if let Some((target, source)) = ahead.next() {
            source.prefetch();
            target.prefetch();
        }
        target.copy_from(*source);
    }
}

impl Connection for ShmConnection {
    fn peer(&self) -> &Peer {
        self.stream.peer()
    }

    fn transport(&self) -> TransportKind {
        let is_mappable = self.peer().regions.iter().any(|offer| offer.is_mappable);
        if is_mappable { TransportKind::Shm } else { TransportKind::Unix }
    }

    fn post(&self, batch: &Batch<'_>, deadline: Deadline) -> Result<Ticket, TransportError> {
        let Some(mapped) = self.map_all(batch.pieces, deadline)? else {
            return self.stream.post(batch, deadline);
        };
        let local = self.stream.regions();
        // Nothing is copied of a batch with a piece that is refused.
        copy(&self.look_up(batch, &local, &mapped)?);
        if batch.notice.is_some() {
            return self.stream.post(&Batch { pieces: &[], ..*batch }, deadline);
        }
        // The memory of a process that has ended can still be mapped, but nobody uses it.
        if self.stream.is_closed_by_peer() {
            let address = &self.peer().address;
            return Err(TransportError::lost(address, "its process closed the connection"));
        }
        Ok(Ticket::done())
    }

    fn ask(
        &self,
        question: &[u8],
        targets: &mut [&mut [u8]],
        limit: AskLimit<'_>,
    ) -> Result<Answer, TransportError> {
        self.stream.ask(question, targets, limit)
    }

    fn is_open(&self) -> bool {
        self.stream.is_open()
    }

    fn close(&self) {
        self.stream.close();
    }
}
