//! A connection's byte stream, with deadlines: sends and receives all bytes of spans.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use cascade_runtime::{Deadline, SystemClock, now};
use rustix::process::geteuid;

use super::byte_stream::{ByteStream, Refused, TICK};
use super::kernel::KernelSocket;
use super::tls::{ClientTls, TlsStream};
use crate::TransportError;
use crate::peer::RecordLayer;
use crate::region::Span;

/// The lowest rate of a frame, in bytes a second: slower peers are taken for stalled ones.
const RATE_MIN: u64 = 1 << 20;

/// How long a transfer may take, and how far it is.
#[derive(Debug, Clone, Copy)]
pub(super) struct Patience<'a> {
    /// The end of the call, or of the frame.
    deadline: Deadline,
    /// The longest time without progress.
    stall: Duration,
    /// The time of the latest progress.
    since: Duration,
    /// Once this is set, the deadline has come.
    flag: Option<&'a AtomicBool>,
}

impl<'a> Patience<'a> {
    /// Of a call with this deadline.
    pub(super) fn until(deadline: Deadline, stall: Duration) -> Self {
        Self { deadline, stall, since: now(), flag: None }
    }

    /// It ends when this is set, too.
    pub(super) fn or_when(self, flag: Option<&'a AtomicBool>) -> Self {
        Self { flag, ..self }
    }

    /// The time that the rest of a frame may take: the peer makes progress, and not too slowly.
    pub(super) fn of_frame(stall: Duration, bytes: u64) -> Self {
        let time = stall + time_of(bytes);
        Self::until(Deadline::after(&SystemClock, time), stall)
    }

    /// Its end.
    pub(super) fn deadline(&self) -> Deadline {
        self.deadline
    }

    /// The rest of a frame has more bytes than was known.
    pub(super) fn add_bytes(&mut self, bytes: u64) {
        self.deadline = Deadline::at(self.deadline.time().saturating_add(time_of(bytes)));
    }

    /// The time since `paused`, in which no thread received, does not count.
    pub(super) fn resume(&mut self, paused: Duration) {
        let away = now().saturating_sub(paused);
        self.deadline = Deadline::at(self.deadline.time().saturating_add(away));
        self.since = self.since.saturating_add(away);
    }

    fn note(&mut self) {
        self.since = now();
    }

    fn check(&self, peer: &str) -> Result<(), TransportError> {
        let is_given_up = self.flag.is_some_and(|flag| flag.load(Ordering::Acquire));
        if is_given_up || self.deadline.has_passed(&SystemClock) {
            return Err(TransportError::Deadline { what: "moving a batch" });
        }
        if now().saturating_sub(self.since) > self.stall {
            let reason = format!("it made no progress for {} s", self.stall.as_secs_f32());
            return Err(TransportError::lost(peer, reason));
        }
        Ok(())
    }
}

fn time_of(bytes: u64) -> Duration {
    Duration::from_secs(bytes.div_ceil(RATE_MIN))
}

/// When a call that receives pauses in the middle of a frame: it makes one attempt at least.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pause<'a> {
    /// At this time.
    pub(super) at: Deadline,
    /// Once this is set.
    pub(super) flag: Option<&'a AtomicBool>,
}

impl Pause<'_> {
    /// It goes on until the frame has come.
    pub(super) const NEVER: Self = Self { at: Deadline::at(Duration::MAX), flag: None };

    fn is_due(&self) -> bool {
        self.at.has_passed(&SystemClock) || self.flag.is_some_and(|it| it.load(Ordering::Acquire))
    }

    /// How long one call may wait.
    fn time(&self) -> Duration {
        self.at.remaining(&SystemClock).min(TICK)
    }
}

/// A connection's byte stream and the name of its peer.
#[derive(Debug)]
pub(crate) struct Socket {
    stream: Box<dyn ByteStream>,
    peer: String,
    /// The address of the peer's host, and the port of the one of both that listens, if this is a
    /// TCP connection.
    tcp: Option<(IpAddr, u16)>,
    /// Bytes that were received and sent.
    received: AtomicU64,
    sent: AtomicU64,
}

impl Socket {
    /// Connects to a TCP port.
    pub(crate) fn connect_tcp(
        address: SocketAddr,
        tls: Option<ClientTls>,
        deadline: Deadline,
    ) -> Result<Self, TransportError> {
        let peer = address.to_string();
        let connected = KernelSocket::connect_tcp(address, deadline);
        let socket = connected.map_err(|error| refused(&peer, error))?;
        Ok(match tls {
            Some(tls) => Self::over_tcp(TlsStream::of_client(socket, tls), address, address.port()),
            None => Self::over_tcp(socket, address, address.port()),
        })
    }

    /// Connects to a Unix socket of this user, of root, or of any user.
    pub(crate) fn connect_unix(
        path: &Path,
        is_any_user: bool,
        deadline: Deadline,
    ) -> Result<Self, TransportError> {
        let peer = path.display().to_string();
        let connected = KernelSocket::connect_unix(path, deadline).and_then(|socket| {
            let user = socket.user_of_peer()?;
            if is_any_user || [0, geteuid().as_raw()].contains(&user) {
                return Ok(socket);
            }
            let reason = format!("a process of user {user} listens there; configure a token");
            Err(io::Error::new(io::ErrorKind::PermissionDenied, reason))
        });
        connected.map_err(|error| refused(&peer, error)).map(|socket| Self::over(socket, &peer))
    }

    /// Takes a connected stream.
    pub(super) fn over(stream: impl ByteStream + 'static, peer: &str) -> Self {
        let (received, sent) = (AtomicU64::new(0), AtomicU64::new(0));
        let (stream, peer) = (Box::new(stream), peer.to_owned());
        Self { stream, peer, tcp: None, received, sent }
    }

    /// Takes a connected stream over TCP, to a port of this or of the other side.
    pub(super) fn over_tcp(stream: impl ByteStream + 'static, peer: SocketAddr, port: u16) -> Self {
        let tcp = Some((peer.ip().to_canonical(), port));
        Self { tcp, ..Self::over(stream, &peer.to_string()) }
    }

    /// The address of the peer's host, if this is a TCP connection.
    pub(super) fn host(&self) -> Option<IpAddr> {
        self.tcp.map(|(host, _)| host)
    }

    /// The port of a TCP connection over loopback: all users of the host can connect to it, or
    /// listen at it.
    pub(super) fn loopback_port(&self) -> Option<u16> {
        self.tcp.filter(|(host, _)| host.is_loopback()).map(|(_, port)| port)
    }

    /// Bytes that were received so far.
    pub(super) fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    /// Bytes that were sent so far.
    pub(super) fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    /// The peer's address, for errors.
    pub(crate) fn peer(&self) -> &str {
        &self.peer
    }

    /// Makes the handshake of the stream below the protocol.
    pub(super) fn handshake(&self, deadline: Deadline) -> Result<(), TransportError> {
        self.stream.handshake(deadline).map_err(|error| match error.kind() {
            io::ErrorKind::TimedOut => TransportError::Deadline { what: "the TLS handshake" },
            _ => self.failure(error),
        })
    }

    /// What encrypts the connection.
    pub(super) fn record_layer(&self) -> Option<RecordLayer> {
        self.stream.record_layer()
    }

    /// See [`ByteStream::drain`].
    pub(super) fn drain(&self, deadline: Deadline) {
        self.stream.drain(deadline);
    }

    fn failure(&self, error: io::Error) -> TransportError {
        let cause = error.get_ref().and_then(|cause| cause.downcast_ref::<Refused>());
        match cause {
            Some(Refused(reason)) => {
                TransportError::Handshake { peer: self.peer.clone(), reason: reason.clone() }
            }
            None => TransportError::lost(&self.peer, error),
        }
    }

    /// Ends all calls on this socket, here and at the peer.
    pub(crate) fn shutdown(&self) {
        self.stream.shutdown();
    }

    /// Whether the peer has closed the connection. Does not wait.
    pub(crate) fn is_closed(&self) -> bool {
        self.stream.is_closed()
    }

    /// Waits until bytes can be received or the connection has ended. False if neither happens by
    /// the deadline.
    pub(super) fn wait_readable(&self, deadline: Deadline) -> Result<bool, TransportError> {
        let left = deadline.remaining(&SystemClock);
        self.stream.wait_readable(left).map_err(|error| self.failure(error))
    }

    /// Sends all bytes of all spans. What was sent is taken from them, also if there is an error.
    pub(super) fn send(
        &self,
        spans: &mut [Span],
        patience: &mut Patience<'_>,
    ) -> Result<(), TransportError> {
        self.send_and(spans, patience, &mut || false)
    }

    /// As `send`. While the peer takes no bytes, it may wait for bytes of its own to be received:
    /// `receive` does that, and says whether there were any.
    pub(super) fn send_and(
        &self,
        spans: &mut [Span],
        patience: &mut Patience<'_>,
        receive: &mut dyn FnMut() -> bool,
    ) -> Result<(), TransportError> {
        let send = |spans: &[Span]| {
            let count = self.stream.send_some(spans)?;
            self.sent.fetch_add(count as u64, Ordering::Relaxed);
            Ok(count)
        };
        self.move_all(spans, patience, (Pause::NEVER, receive), send).map(drop)
    }

    /// Fills all bytes of all spans. The spans are used up.
    pub(super) fn receive(
        &self,
        spans: &mut [Span],
        patience: &mut Patience<'_>,
    ) -> Result<(), TransportError> {
        self.receive_part(spans, 0, (patience, Pause::NEVER)).map(drop)
    }

    /// Fills all bytes of all spans, unless it pauses: returns how many of the last spans are left.
    /// They are a part of a message that has so many `more` bytes.
    pub(super) fn receive_part(
        &self,
        spans: &mut [Span],
        more: usize,
        (patience, pause): (&mut Patience<'_>, Pause<'_>),
    ) -> Result<usize, TransportError> {
        let receive = |spans: &[Span]| {
            let count = self.stream.receive_some(spans, more, pause.time())?;
            self.received.fetch_add(count as u64, Ordering::Relaxed);
            Ok(count)
        };
        self.move_all(spans, patience, (pause, &mut || false), receive)
    }

    /// Calls `call` with the rest of the spans until all are used up, or it pauses. Returns how
    /// many are left.
    fn move_all(
        &self,
        spans: &mut [Span],
        patience: &mut Patience<'_>,
        (pause, while_blocked): (Pause<'_>, &mut dyn FnMut() -> bool),
        call: impl Fn(&[Span]) -> io::Result<usize>,
    ) -> Result<usize, TransportError> {
        let mut rest = skip(spans, 0);
        while !rest.is_empty() {
            match call(rest) {
                Ok(0) => return Err(TransportError::lost(&self.peer, "it closed the connection")),
                Ok(count) => {
                    rest = skip(rest, count);
                    patience.note();
                    if rest.is_empty() {
                        break;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if while_blocked() {
                        patience.note();
                    }
                }
                Err(error) => return Err(self.failure(error)),
            }
            patience.check(&self.peer)?;
            if pause.is_due() {
                break;
            }
        }
        Ok(rest.len())
    }

    /// Sends bytes together with a descriptor.
    pub(super) fn send_descriptor(
        &self,
        bytes: &[u8],
        descriptor: BorrowedFd<'_>,
        patience: &mut Patience<'_>,
    ) -> Result<(), TransportError> {
        loop {
            match self.stream.send_descriptor(bytes, descriptor) {
                Ok(count) if count == bytes.len() => return Ok(()),
                Ok(_) => return Err(TransportError::lost(&self.peer, "it reads no answers")),
                // Nothing was sent: the peer has not read earlier answers yet.
                Err(error) if is_blocked(&error) => patience.check(&self.peer)?,
                Err(error) => return Err(self.failure(error)),
            }
        }
    }

    /// Fills a buffer from its byte `filled` on, unless it pauses, and takes the descriptor that
    /// came with its bytes.
    pub(super) fn receive_with_descriptor(
        &self,
        into: &mut [u8],
        (filled, descriptor): (&mut usize, &mut Option<OwnedFd>),
        (patience, pause): (&mut Patience<'_>, Pause<'_>),
    ) -> Result<(), TransportError> {
        while *filled < into.len() {
            match self.stream.receive_with_descriptor(&mut into[*filled..], pause.time()) {
                Ok((0, _)) => {
                    return Err(TransportError::lost(&self.peer, "it closed the connection"));
                }
                Ok((count, came)) => {
                    *filled += count;
                    self.received.fetch_add(count as u64, Ordering::Relaxed);
                    patience.note();
                    if came.is_some() {
                        *descriptor = came;
                    }
                }
                Err(error) if is_blocked(&error) => {}
                Err(error) => return Err(self.failure(error)),
            }
            if *filled < into.len() {
                patience.check(&self.peer)?;
                if pause.is_due() {
                    break;
                }
            }
        }
        Ok(())
    }
}

/// Nothing was moved yet.
fn is_blocked(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock)
}

/// No connection could be made.
pub(crate) fn refused(peer: &str, error: io::Error) -> TransportError {
    TransportError::Connect { peer: peer.to_owned(), source: Arc::new(error) }
}

/// Takes the first `count` bytes from the spans. Returns the spans from the first that is not
/// empty.
fn skip(mut spans: &mut [Span], mut count: usize) -> &mut [Span] {
    while let Some(first) = spans.first_mut() {
        let bytes = first.bytes();
        *first = first.after(bytes.min(count));
        if bytes > count {
            break;
        }
        count -= bytes;
        spans = &mut spans[1..];
    }
    spans
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::fd::AsFd as _;
    use std::os::unix::net::UnixStream;

    use cascade_runtime::{sleep, thread};

    use super::*;

    /// What happened: a peer that had not read its answers for 50 ms lost its connection, if the
    /// next answer had a descriptor.
    #[test]
    fn a_descriptor_waits_for_a_peer_that_reads_late() {
        let (ours, mut theirs) = UnixStream::pair().expect("two sockets");
        let mut filling = ours.try_clone().expect("another descriptor");
        filling.set_nonblocking(true).expect("a socket");
        while filling.write(&[0; 4096]).is_ok() {}
        filling.set_nonblocking(false).expect("a socket");
        let file = std::fs::File::open("/dev/null").expect("it is there");
        let reader = thread::spawn(move || {
            sleep(Duration::from_millis(200));
            let mut all = vec![];
            theirs.read_to_end(&mut all).expect("the bytes come");
            all
        });
        let socket = Socket::over(KernelSocket::of_unix(ours.into()).expect("a socket"), "peer");
        drop(filling);
        let mut patience = Patience::of_frame(Duration::from_secs(30), 0);
        socket.send_descriptor(b"last", file.as_fd(), &mut patience).expect("the peer reads again");
        drop(socket);
        assert!(reader.join().expect("it reads").ends_with(b"last"));
    }
}
