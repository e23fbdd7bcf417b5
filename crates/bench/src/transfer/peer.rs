//! The other process of a transfer: its pages are written and read by the measuring process.

use std::io::{BufRead, Write};
use std::path::PathBuf;

use cascade_transport::Listener;
use serde::{Deserialize, Serialize};

use super::failed;
use super::pages::{Compared, Pages};
use super::prompt::Geometry;
use crate::backend::{Addresses, listen, soon};
use crate::node::machine_ns;
use crate::{MeasureError, child, plain_stream};

/// What the measuring process asks for.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Order {
    /// Allocate pages of this geometry and listen, also on this Unix socket.
    Listen { geometry: Geometry, unix: PathBuf },
    /// Write the bytes that are read from here.
    FillToSend,
    /// Write bytes of no page that is sent.
    FillToReceive,
    /// Note when each layer of a round arrives. Answered twice.
    Receive { round: u64 },
    /// Compare all pages after a round of so many blocks.
    Compare { round: u64, blocks: u64 },
    /// The processor time so far.
    CpuTime,
}

/// Its answers.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Answer {
    /// Addresses of the transport, and of a plain stream.
    Listening { addresses: Addresses, plain: String },
    /// The pages have the bytes.
    Filled,
    /// It waits for the layers.
    Ready,
    /// When each layer had arrived, by the monotonic clock of the machine.
    Arrived { at_ns: Vec<u64> },
    /// Pages that were compared, and those with other bytes than they should have.
    Compared { pages: u64, wrong: u64 },
    /// Nanoseconds.
    CpuTime { ns: u64 },
}

/// Runs as the other process until stdin ends.
///
/// # Errors
/// If an order is invalid or fails.
pub fn run(orders: impl BufRead, answers: impl Write) -> Result<(), MeasureError> {
    let mut peer: Option<Peer> = None;
    child::serve(orders, answers, |order, answer| {
        if let Order::Listen { geometry, unix } = order {
            let listening = peer.insert(Peer::listen(geometry, unix)?);
            let (addresses, plain) = (listening.addresses.clone(), plain_stream::serve(None)?);
            return answer(&Answer::Listening { addresses, plain });
        }
        let peer = peer.as_mut().ok_or_else(|| failed("the other process does not listen yet"))?;
        if let Order::Receive { round } = order {
            answer(&Answer::Ready)?;
            return answer(&Answer::Arrived { at_ns: peer.receive(round)? });
        }
        answer(&peer.carry_out(&order)?)
    })
}

#[derive(Debug)]
struct Peer {
    pages: Pages,
    addresses: Addresses,
    _listeners: Vec<Listener>,
}

impl Peer {
    fn listen(geometry: Geometry, unix: PathBuf) -> Result<Self, MeasureError> {
        let pages = Pages::allocate("peer", geometry)?;
        let (listeners, addresses) = listen(&pages.endpoint, unix)?;
        Ok(Self { pages, addresses, _listeners: listeners })
    }

    fn carry_out(&mut self, order: &Order) -> Result<Answer, MeasureError> {
        match *order {
            Order::FillToSend => {
                self.pages.fill_to_send()?;
                Ok(Answer::Filled)
            }
            Order::FillToReceive => {
                self.pages.fill_to_receive()?;
                Ok(Answer::Filled)
            }
            Order::Compare { round, blocks } => {
                let mapping = self.pages.geometry.mapping(round, blocks);
                let Compared { pages, wrong } = self.pages.compare(&mapping)?;
                Ok(Answer::Compared { pages, wrong })
            }
            Order::CpuTime => Ok(Answer::CpuTime { ns: child::own_cpu_ns() }),
            Order::Listen { .. } | Order::Receive { .. } => Err(failed("answered elsewhere")),
        }
    }

    /// Waits for the notice of each layer.
    fn receive(&self, round: u64) -> Result<Vec<u64>, MeasureError> {
        let layers = self.pages.geometry.layers;
        let mut at_ns = vec![0; usize::try_from(layers).map_err(failed)?];
        for _ in 0..layers {
            let notice = self.pages.endpoint.next_notice(soon());
            let now = machine_ns();
            let notice = notice.ok_or_else(|| failed("a layer did not arrive"))?;
            let named = parse_notice(&notice.bytes).filter(|(of, _)| *of == round);
            let layer = named.and_then(|(_, layer)| at_ns.get_mut(usize::try_from(layer).ok()?));
            match layer {
                Some(at) if *at == 0 => *at = now,
                _ => return Err(failed("a notice names a wrong layer")),
            }
        }
        Ok(at_ns)
    }
}

/// The notice of a layer.
pub(super) fn notice(round: u64, layer: u64) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&round.to_le_bytes());
    bytes[8..].copy_from_slice(&layer.to_le_bytes());
    bytes
}

fn parse_notice(bytes: &[u8]) -> Option<(u64, u64)> {
    let (round, layer) = bytes.split_first_chunk::<8>()?;
    Some((u64::from_le_bytes(*round), u64::from_le_bytes(layer.try_into().ok()?)))
}
