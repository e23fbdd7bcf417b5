//! The limit of TCP: one plain stream of large messages on loopback, with the settings that are
//! fastest here. And what is left of it with checksums, or with the TLS connections of rustls.

mod tls;

use std::hint::black_box;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use cascade_block::checksum;
use cascade_memory::{HostSlabMut, HugePages, Pool, PoolConfig};
use cascade_runtime::thread;
use rustix::net::{AddressFamily, SocketType, connect, socket, sockopt};
use rustls::Stream;

pub(crate) use self::tls::{ClientTls, ServerTls};
use crate::figure::median;
use crate::{MeasureError, timed};

/// Bytes of one sample.
const BYTES: usize = 128 << 20;
/// The same of a short run.
const SHORT_BYTES: usize = 8 << 20;
/// Samples until the same memory is used again: as much as a region of the benchmarks, because some
/// processors have caches of 300 MiB.
const PARTS: usize = 4;
/// Samples of a setting before it is chosen.
const TRIALS: usize = 3;
/// Bytes of one system call; 0: all at once.
const CALL_BYTES: [usize; 4] = [256 << 10, 1 << 20, 8 << 20, 0];
/// The same with checksums or TLS, which are computed while the bytes are in a cache.
const PROCESSED_CALL_BYTES: usize = 256 << 10;
/// Length of the socket's buffers; 0: what the kernel chooses, which grows.
const BUFFER_BYTES: [usize; 2] = [0, 4 << 20];
/// The congestion control, which our own connections within a host have, too.
const CONGESTION: &str = "reno";
/// The longest that a call on the stream waits.
const TIMEOUT: Duration = Duration::from_secs(60);

fn failed(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> MeasureError {
    MeasureError::measure("a plain stream", error)
}

/// What both sides do with each byte of a sample, beside moving it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Processing {
    /// Nothing.
    None = 0,
    /// They compute its checksum.
    Checksums = 1,
    /// They encrypt and decrypt it, with a connection of rustls each.
    Tls = 2,
}

impl Processing {
    fn parse(byte: u8) -> Result<Self, MeasureError> {
        let known = [Self::None, Self::Checksums, Self::Tls];
        let found = known.into_iter().find(|processing| *processing as u8 == byte);
        found.ok_or_else(|| failed("an unknown kind of sample"))
    }
}

/// How a stream is used: both sides do the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Setting {
    bytes: usize,
    call_bytes: usize,
    buffer_bytes: usize,
}

impl Setting {
    fn call(self, processing: Processing) -> usize {
        match self.call_bytes {
            _ if processing != Processing::None => PROCESSED_CALL_BYTES.min(self.bytes),
            0 => self.bytes,
            call_bytes => call_bytes.min(self.bytes),
        }
    }

    /// What the client says first.
    fn to_bytes(self) -> [u8; 24] {
        let mut bytes = [0; 24];
        let fields = [self.bytes, self.call_bytes, self.buffer_bytes];
        for (field, into) in fields.iter().zip(bytes.chunks_mut(8)) {
            into.copy_from_slice(&(*field as u64).to_le_bytes());
        }
        bytes
    }

    fn parse(bytes: &[u8; 24]) -> Option<Self> {
        let field = |at: usize| {
            let field = bytes[at * 8..][..8].try_into().expect("eight bytes");
            usize::try_from(u64::from_le_bytes(field)).ok()
        };
        let setting = Self { bytes: field(0)?, call_bytes: field(1)?, buffer_bytes: field(2)? };
        (setting.bytes <= BYTES).then_some(setting)
    }

    fn apply(self, stream: &TcpStream) -> Result<(), MeasureError> {
        stream.set_nodelay(true).map_err(failed)?;
        stream.set_read_timeout(Some(TIMEOUT)).map_err(failed)?;
        stream.set_write_timeout(Some(TIMEOUT)).map_err(failed)?;
        if self.buffer_bytes > 0 {
            sockopt::set_socket_send_buffer_size(stream, self.buffer_bytes).map_err(failed)?;
            sockopt::set_socket_recv_buffer_size(stream, self.buffer_bytes).map_err(failed)?;
        }
        Ok(())
    }
}

/// Memory in huge pages, as regions have, whose bytes were written once.
pub(crate) fn populated<const COUNT: usize>(
    bytes: usize,
) -> Result<[HostSlabMut; COUNT], MeasureError> {
    let config = PoolConfig {
        capacity_bytes: bytes * COUNT + (64 << 20),
        huge_pages: HugePages::Auto,
        populate: true,
    };
    let pool = Pool::new(&config).map_err(failed)?;
    let slab = |_| {
        let mut slab = pool.allocate(bytes)?.into_host().ok()?;
        slab.fill(1);
        Some(slab)
    };
    let slabs: Option<Vec<_>> = (0..COUNT).map(slab).collect();
    slabs.and_then(|it| it.try_into().ok()).ok_or_else(|| failed("the pool is too small"))
}

/// Memory in huge pages, as regions have. Each sample uses the next part of it.
#[derive(Debug)]
struct Parts {
    memory: HostSlabMut,
    next: usize,
}

impl Parts {
    fn allocate(part_bytes: usize) -> Result<Self, MeasureError> {
        let [memory] = populated(part_bytes * PARTS)?;
        Ok(Self { memory, next: 0 })
    }

    /// The first bytes of the next part.
    fn next(&mut self, bytes: usize) -> &mut [u8] {
        let start = self.next * (self.memory.len() / PARTS);
        self.next = (self.next + 1) % PARTS;
        &mut self.memory[start..start + bytes]
    }
}

/// The sending side.
#[derive(Debug)]
pub(crate) struct PlainStream {
    stream: TcpStream,
    setting: Setting,
    source: Parts,
    tls: Option<ClientTls>,
    /// How the limit was measured.
    pub(crate) text: String,
}

impl PlainStream {
    /// Connects to [`serve`], tries all settings, and keeps the fastest. With `tls` it can also
    /// encrypt.
    pub(crate) fn connect(
        address: &str,
        is_short: bool,
        tls: Option<ClientTls>,
    ) -> Result<Self, MeasureError> {
        let bytes = if is_short { SHORT_BYTES } else { BYTES };
        let mut source = Parts::allocate(bytes)?;
        let mut best: Option<(f64, Setting)> = None;
        for call_bytes in CALL_BYTES {
            for buffer_bytes in BUFFER_BYTES {
                let setting = Setting { bytes, call_bytes, buffer_bytes };
                let mut stream = open(address, setting)?;
                let trials = (0..TRIALS).map(|_| {
                    let source = source.next(bytes);
                    send(&mut stream, source, (setting, Processing::None), None)
                });
                let rate = median(&trials.collect::<Result<Vec<_>, _>>()?);
                if best.is_none_or(|(fastest, _)| rate > fastest) {
                    best = Some((rate, setting));
                }
            }
        }
        let (_, setting) = best.expect("there are settings");
        let text = format!(
            "one plain TCP stream on the same loopback, {} MiB a sample in calls of {} KiB, \
             {CONGESTION}, {}: the fastest of {} settings; median of samples taken between the \
             batches",
            setting.bytes >> 20,
            setting.call(Processing::None) >> 10,
            if setting.buffer_bytes == 0 {
                "growing socket buffers"
            } else {
                "fixed ones of 4 MiB"
            },
            CALL_BYTES.len() * BUFFER_BYTES.len(),
        );
        Ok(Self { stream: open(address, setting)?, setting, source, tls, text })
    }

    /// One sample, in 10^9 bytes a second.
    pub(crate) fn rate(&mut self, processing: Processing) -> Result<f64, MeasureError> {
        let Self { stream, setting, source, tls, .. } = self;
        send(stream, source.next(setting.bytes), (*setting, processing), tls.as_mut())
    }
}

fn open(address: &str, setting: Setting) -> Result<TcpStream, MeasureError> {
    let address: SocketAddr = address.parse().map_err(failed)?;
    let socket = socket(AddressFamily::INET, SocketType::STREAM, None).map_err(failed)?;
    // Before it connects: BBR leaves its timers.
    sockopt::set_tcp_congestion(&socket, CONGESTION).map_err(failed)?;
    connect(&socket, &address).map_err(failed)?;
    let mut stream = TcpStream::from(socket);
    setting.apply(&stream)?;
    stream.write_all(&setting.to_bytes()).map_err(failed)?;
    Ok(stream)
}

/// Sends one sample and waits until the other side has it.
fn send(
    stream: &mut TcpStream,
    source: &[u8],
    (setting, processing): (Setting, Processing),
    tls: Option<&mut ClientTls>,
) -> Result<f64, MeasureError> {
    let mut sent = Ok(());
    let took = timed(|| {
        sent = stream.write_all(&[processing as u8]).and_then(|()| match tls {
            Some(tls) if processing == Processing::Tls => {
                send_all(&mut tls.over(stream), source, setting, processing)
            }
            _ if processing == Processing::Tls => {
                Err(io::Error::other("there are no certificates"))
            }
            _ => send_all(stream, source, setting, processing),
        });
    });
    sent.map_err(failed)?;
    Ok(source.len() as f64 / took.as_secs_f64() / 1e9)
}

fn send_all(
    stream: &mut (impl Read + Write),
    source: &[u8],
    setting: Setting,
    processing: Processing,
) -> io::Result<()> {
    for bytes in source.chunks(setting.call(processing)) {
        stream.write_all(bytes)?;
        compute(bytes, processing);
    }
    stream.flush()?;
    stream.read_exact(&mut [0])
}

fn compute(bytes: &[u8], processing: Processing) {
    if processing == Processing::Checksums {
        black_box(checksum(bytes));
    }
}

/// Receives what a [`PlainStream`] sends, in a thread of its own, until the process ends. Returns
/// the address.
pub(crate) fn serve(tls: Option<ServerTls>) -> Result<String, MeasureError> {
    let listener = TcpListener::bind("127.0.0.1:0").map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?.to_string();
    let mut buffer = Parts::allocate(BYTES)?;
    thread::spawn(move || {
        // One connection at a time: a setting is tried after the one before has ended.
        while let Ok((stream, _)) = listener.accept() {
            // The other side sees a failure as the end of its connection.
            drop(receive(stream, &mut buffer, tls.as_ref()));
        }
    });
    Ok(address)
}

fn receive(
    mut stream: TcpStream,
    buffer: &mut Parts,
    tls: Option<&ServerTls>,
) -> Result<(), MeasureError> {
    let mut greeting = [0; 24];
    stream.read_exact(&mut greeting).map_err(failed)?;
    let setting = Setting::parse(&greeting).ok_or_else(|| failed("an unknown setting"))?;
    setting.apply(&stream)?;
    // The measurements between two samples may take minutes.
    stream.set_read_timeout(None).map_err(failed)?;
    let mut connection = None;
    loop {
        let mut processing = [0];
        stream.read_exact(&mut processing).map_err(failed)?;
        let processing = Processing::parse(processing[0])?;
        let into = buffer.next(setting.bytes);
        let received = if processing == Processing::Tls {
            let connection = match &mut connection {
                Some(connection) => connection,
                none => {
                    let tls = tls.ok_or_else(|| failed("there is no certificate"))?;
                    none.insert(tls.accept()?)
                }
            };
            receive_all(&mut Stream::new(connection, &mut stream), into, setting, processing)
        } else {
            receive_all(&mut stream, into, setting, processing)
        };
        received.map_err(failed)?;
    }
}

fn receive_all(
    stream: &mut (impl Read + Write),
    into: &mut [u8],
    setting: Setting,
    processing: Processing,
) -> io::Result<()> {
    for bytes in into.chunks_mut(setting.call(processing)) {
        stream.read_exact(bytes)?;
        compute(bytes, processing);
    }
    stream.write_all(&[1])?;
    stream.flush()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::child::SocketDirectory;
    use crate::transport::certificates;

    #[test]
    fn a_stream_carries_all_bytes_with_each_setting_and_reports_a_rate() {
        let directory = SocketDirectory::make().unwrap();
        certificates::make(directory.path()).unwrap();
        let address = serve(Some(certificates::of_server(directory.path()).unwrap())).unwrap();
        let tls = certificates::of_client(directory.path()).unwrap();
        let mut stream = PlainStream::connect(&address, true, Some(tls)).unwrap();
        for _ in 0..PARTS {
            for processing in [Processing::None, Processing::Checksums, Processing::Tls] {
                assert!(stream.rate(processing).unwrap() > 0.0, "{processing:?}");
            }
        }
        assert!(stream.text.contains("8 MiB"), "{}", stream.text);
    }

    #[test]
    fn a_setting_survives_the_greeting() {
        let setting = Setting { bytes: 7, call_bytes: 0, buffer_bytes: 4 << 20 };
        assert_eq!(Setting::parse(&setting.to_bytes()), Some(setting));
        let too_long = Setting { bytes: BYTES + 1, ..setting };
        assert_eq!(Setting::parse(&too_long.to_bytes()), None);
    }
}
