//! The process that batches are written to: commands on stdin, answers on stdout.

use std::collections::HashMap;
use std::io::{BufRead, Read as _, Write};
use std::net::TcpListener;
use std::path::PathBuf;
use std::time::Duration;

use cascade_runtime::{Deadline, SystemClock, thread};
use cascade_transport::{Access, Endpoint, EndpointConfig, Listener, Region, RegionId};
use serde::{Deserialize, Serialize};

use super::blocks::{Sequence, fill};
use super::{STREAM_BYTES, failed};
use crate::MeasureError;

/// What the measuring process asks for.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Order {
    /// Offer a region of this length on a TCP port of loopback and on this Unix socket.
    Listen { bytes: u64, unix: PathBuf },
    /// Fill the region with the pattern, for reads.
    Fill,
    /// Compare the region with what these batches write.
    Verify(Sequence),
}

/// Its answers.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Answer {
    /// Addresses: of the transport, and of a socket that reads and drops.
    Listening { tcp: String, plain: String },
    /// The region has the pattern.
    Filled,
    /// Blocks that were compared, and those with other bytes than were written.
    Compared { blocks: u64, wrong: u64 },
}

/// Runs as the target until stdin ends.
///
/// # Errors
/// If a command is invalid or fails.
pub fn run(commands: impl BufRead, mut answers: impl Write) -> Result<(), MeasureError> {
    let mut target = None;
    for line in commands.lines() {
        let line = line.map_err(failed)?;
        let answer = match serde_json::from_str(&line).map_err(failed)? {
            Order::Listen { bytes, unix } => {
                target.insert(Target::listen(bytes, &unix)?).addresses()
            }
            Order::Fill => {
                let target = listening(target.as_ref())?;
                fill_region(&target.endpoint, target.region, target.bytes)?;
                Answer::Filled
            }
            Order::Verify(sequence) => {
                let target = listening(target.as_ref())?;
                compare(&target.endpoint, target.region, &sequence)?
            }
        };
        let text = serde_json::to_string(&answer).map_err(failed)?;
        writeln!(answers, "{text}").and_then(|()| answers.flush()).map_err(failed)?;
    }
    Ok(())
}

fn listening(target: Option<&Target>) -> Result<&Target, MeasureError> {
    target.ok_or_else(|| failed("the target does not listen yet"))
}

struct Target {
    endpoint: Endpoint,
    region: RegionId,
    bytes: u64,
    tcp: Listener,
    _unix: Listener,
    plain: String,
}

impl Target {
    fn listen(bytes: u64, unix: &std::path::Path) -> Result<Self, MeasureError> {
        let config = EndpointConfig { name: "target".to_owned(), ..Default::default() };
        let endpoint = Endpoint::new(config).map_err(failed)?;
        let length = usize::try_from(bytes).map_err(failed)?;
        let region = Region::shared(length, Access::BOTH).map_err(failed)?;
        let region = endpoint.register(region).map_err(failed)?;
        let loopback = "127.0.0.1:0".parse().map_err(failed)?;
        let tcp = endpoint.listen_tcp(loopback).map_err(failed)?;
        let unix = endpoint.listen_unix(unix).map_err(failed)?;
        let plain = drop_everything()?;
        Ok(Self { endpoint, region, bytes, tcp, _unix: unix, plain })
    }

    fn addresses(&self) -> Answer {
        let tcp = self.tcp.tcp_address().expect("it listens on TCP").to_string();
        Answer::Listening { tcp, plain: self.plain.clone() }
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

/// A socket that reads what it gets, for the limit: large messages into a buffer that is larger
/// than the caches. It answers one byte for each `STREAM_BYTES`.
fn drop_everything() -> Result<String, MeasureError> {
    let listener = TcpListener::bind("127.0.0.1:0").map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?.to_string();
    thread::spawn(move || {
        while let Ok((mut stream, _)) = listener.accept() {
            let mut buffer = vec![0; STREAM_BYTES];
            let limited = stream.set_read_timeout(Some(Duration::from_secs(600)));
            while limited.is_ok() && stream.read_exact(&mut buffer).is_ok() {
                if stream.write_all(&[1]).is_err() {
                    break;
                }
            }
        }
    });
    Ok(address)
}

/// A deadline for what is expected to succeed.
pub(super) fn soon() -> Deadline {
    Deadline::after(&SystemClock, Duration::from_secs(120))
}
