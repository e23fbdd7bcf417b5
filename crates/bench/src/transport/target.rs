//! The process that batches are written to: orders on stdin, answers on stdout.

use std::collections::HashMap;
use std::io::{BufRead, Write};
use std::path::PathBuf;

use cascade_transport::{Access, Endpoint, EndpointConfig, Listener, Region, RegionId, TlsConfig};
use serde::{Deserialize, Serialize};

use super::blocks::Sequence;
use super::{certificates, failed};
use crate::backend::{Addresses, listen};
use crate::pattern::fill;
use crate::{MeasureError, child, plain_stream};

/// What the measuring process asks for.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Order {
    /// Offer a region of this length on a TCP port of loopback and on this Unix socket. The port
    /// has TLS if there is a directory of certificates.
    Listen { bytes: u64, unix: PathBuf, certificates: Option<PathBuf> },
    /// Fill the region with the pattern, for reads.
    Fill,
    /// Compare the region with what these batches write.
    Verify(Sequence),
    /// The processor time so far.
    CpuTime,
}

/// Its answers.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Answer {
    /// Addresses of the transport, and of a plain stream.
    Listening { addresses: Addresses, plain: String },
    /// The region has the pattern.
    Filled,
    /// Blocks that were compared, and those with other bytes than were written.
    Compared { blocks: u64, wrong: u64 },
    /// Nanoseconds.
    CpuTime { ns: u64 },
}

/// Runs as the target until stdin ends.
///
/// # Errors
/// If an order is invalid or fails.
pub fn run(orders: impl BufRead, answers: impl Write) -> Result<(), MeasureError> {
    let mut target = None;
    child::serve(orders, answers, |order, answer| match order {
        Order::Listen { bytes, unix, certificates } => {
            let tls = certificates.as_deref().map(certificates::config);
            let stream_tls = certificates.as_deref().map(certificates::of_server).transpose()?;
            let listening = target.insert(Target::listen(bytes, unix, tls)?);
            let addresses = listening.addresses.clone();
            let plain = plain_stream::serve(stream_tls)?;
            answer(&Answer::Listening { addresses, plain })
        }
        Order::Fill => {
            let target = listening(target.as_ref())?;
            fill_region(&target.endpoint, target.region, target.bytes)?;
            answer(&Answer::Filled)
        }
        Order::Verify(sequence) => {
            let target = listening(target.as_ref())?;
            answer(&compare(&target.endpoint, target.region, &sequence)?)
        }
        Order::CpuTime => answer(&Answer::CpuTime { ns: child::own_cpu_ns() }),
    })
}

fn listening(target: Option<&Target>) -> Result<&Target, MeasureError> {
    target.ok_or_else(|| failed("the target does not listen yet"))
}

#[derive(Debug)]
struct Target {
    endpoint: Endpoint,
    region: RegionId,
    bytes: u64,
    addresses: Addresses,
    _listeners: Vec<Listener>,
}

impl Target {
    fn listen(bytes: u64, unix: PathBuf, tls: Option<TlsConfig>) -> Result<Self, MeasureError> {
        let config = EndpointConfig { name: "target".to_owned(), tls, ..Default::default() };
        let endpoint = Endpoint::new(config).map_err(failed)?;
        let length = usize::try_from(bytes).map_err(failed)?;
        let region = Region::shared(length, Access::BOTH).map_err(failed)?;
        let region = endpoint.register(region).map_err(failed)?;
        let (listeners, addresses) = listen(&endpoint, unix)?;
        Ok(Self { endpoint, region, bytes, addresses, _listeners: listeners })
    }
}

/// Fills a region with the pattern.
pub(super) fn fill_region(
    endpoint: &Endpoint,
    region: RegionId,
    bytes: u64,
) -> Result<(), MeasureError> {
    let mut buffer = vec![0; 1 << 20];
    for offset in (0..bytes).step_by(buffer.len()) {
        fill(offset, &mut buffer);
        endpoint.fill(region, offset, &buffer).map_err(failed)?;
    }
    Ok(())
}

/// Compares each block that these batches moved into a region with the source of its last move.
pub(super) fn compare(
    endpoint: &Endpoint,
    region: RegionId,
    sequence: &Sequence,
) -> Result<Answer, MeasureError> {
    let mut last = HashMap::new();
    for iteration in 0..sequence.iterations {
        for thread in 0..sequence.threads {
            let blocks = sequence.blocks(thread, iteration);
            last.extend(blocks.map(|(source, target)| (target, source)));
        }
    }
    let bytes = usize::try_from(sequence.block_bytes).map_err(failed)?;
    let (mut expected, mut actual) = (vec![0; bytes], vec![0; bytes]);
    let mut wrong = 0;
    for (target, source) in &last {
        fill(source * sequence.block_bytes, &mut expected);
        endpoint.fetch(region, target * sequence.block_bytes, &mut actual).map_err(failed)?;
        wrong += u64::from(actual != expected);
    }
    Ok(Answer::Compared { blocks: last.len() as u64, wrong })
}
