//! A connected socket that sends and receives spans of memory, with deadlines.
#![expect(unsafe_code, reason = "passes addresses of regions to the kernel")]

use std::io;
use std::mem::MaybeUninit;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use cascade_runtime::{Deadline, SystemClock, now, sleep};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{self, Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, connect,
    socket_with,
};

use crate::TransportError;
use crate::region::Span;

/// How long one system call waits: deadlines are kept to within this time.
const TICK: Duration = Duration::from_millis(50);
/// Pause before another attempt to connect to a Unix socket whose queue is full.
const CONNECT_PAUSE: Duration = Duration::from_millis(5);
/// An idle connection to a host that does not answer ends after 10 s and three questions of 5 s.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(10);
const KEEPALIVE_PAUSE: Duration = Duration::from_secs(5);
const KEEPALIVE_COUNT: u32 = 3;
/// The lowest rate of a frame, in bytes a second: slower peers are taken for stalled ones.
const RATE_MIN: u64 = 1 << 20;
/// The most spans of one system call (`IOV_MAX`).
pub(super) const SPANS_MAX: usize = 1024;

/// How long a transfer may take.
#[derive(Debug, Clone, Copy)]
pub(super) struct Patience {
    /// The end of the call.
    pub(super) deadline: Option<Deadline>,
    /// The longest time without progress.
    pub(super) stall: Duration,
}

impl Patience {
    /// The time that the rest of a frame may take: the peer makes progress, and not too slowly.
    pub(super) fn of_frame(stall: Duration, bytes: u64) -> Self {
        let time = stall + Duration::from_secs(bytes.div_ceil(RATE_MIN));
        Self { deadline: Some(Deadline::after(&SystemClock, time)), stall }
    }

    fn check(self, since: Duration, peer: &str) -> Result<(), TransportError> {
        if self.deadline.is_some_and(|deadline| deadline.has_passed(&SystemClock)) {
            return Err(TransportError::Deadline { what: "moving a batch" });
        }
        if now().saturating_sub(since) > self.stall {
            let reason = format!("it made no progress for {} s", self.stall.as_secs_f32());
            return Err(TransportError::lost(peer, reason));
        }
        Ok(())
    }
}

/// A connected stream socket.
#[derive(Debug)]
pub(crate) struct Socket {
    socket: OwnedFd,
    peer: String,
}

impl Socket {
    /// Connects to a TCP port.
    pub(crate) fn connect_tcp(
        address: SocketAddr,
        deadline: Deadline,
    ) -> Result<Self, TransportError> {
        let peer = address.to_string();
        // A timeout of zero is an error of the standard library.
        let left = deadline.remaining(&SystemClock).max(Duration::from_millis(1));
        let refused = |error| refused(&peer, error);
        let stream = TcpStream::connect_timeout(&address, left).map_err(refused)?;
        set_up_tcp(&stream).map_err(refused)?;
        Self::of(stream.into(), peer.clone()).map_err(refused)
    }

    /// Connects to a Unix socket.
    pub(crate) fn connect_unix(path: &Path, deadline: Deadline) -> Result<Self, TransportError> {
        let peer = path.display().to_string();
        let refused = |error: Errno| refused(&peer, error.into());
        let address = SocketAddrUnix::new(path).map_err(refused)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
        let socket = socket.map_err(refused)?;
        loop {
            match connect(&socket, &address) {
                Ok(()) => break,
                // The peer has not accepted earlier connections yet.
                Err(Errno::AGAIN) if !deadline.has_passed(&SystemClock) => sleep(CONNECT_PAUSE),
                Err(Errno::INTR) => {}
                Err(error) => return Err(refused(error)),
            }
        }
        rustix::io::ioctl_fionbio(&socket, false).map_err(refused)?;
        Self::of(socket, peer.clone()).map_err(|error| self::refused(&peer, error))
    }

    /// Takes a connected socket.
    pub(crate) fn of(socket: OwnedFd, peer: String) -> io::Result<Self> {
        set_socket_timeout(&socket, Timeout::Recv, Some(TICK))?;
        set_socket_timeout(&socket, Timeout::Send, Some(TICK))?;
        Ok(Self { socket, peer })
    }

    /// The peer's address, for errors.
    pub(crate) fn peer(&self) -> &str {
        &self.peer
    }

    /// Ends all calls on this socket, here and at the peer.
    pub(crate) fn shutdown(&self) {
        end(&self.socket);
    }

    /// Whether the peer has closed the connection. Does not wait.
    pub(crate) fn is_closed(&self) -> bool {
        let mut polled = [PollFd::new(&self.socket, PollFlags::RDHUP)];
        let ended = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
        match poll(&mut polled, Some(&Timespec::default())) {
            Ok(_) => polled[0].revents().intersects(ended),
            Err(error) => error != Errno::INTR,
        }
    }

    /// Waits until bytes can be received or the connection has ended. False if neither happens by
    /// the deadline.
    pub(super) fn wait_readable(&self, deadline: Deadline) -> Result<bool, TransportError> {
        let left = deadline.remaining(&SystemClock);
        let left = Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(left.subsec_nanos()),
        };
        match poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], Some(&left)) {
            Ok(count) => Ok(count > 0),
            Err(Errno::INTR) => Ok(false),
            Err(error) => Err(TransportError::lost(&self.peer, error)),
        }
    }

    /// Sends all bytes of all spans. The spans are used up.
    pub(super) fn send(
        &self,
        spans: &mut [Span],
        patience: Patience,
    ) -> Result<(), TransportError> {
        self.send_and(spans, patience, &mut || false)
    }

    /// As `send`. While the peer takes no bytes, it may wait for bytes of its own to be received:
    /// `receive` does that, and says whether there were any.
    pub(super) fn send_and(
        &self,
        spans: &mut [Span],
        patience: Patience,
        receive: &mut dyn FnMut() -> bool,
    ) -> Result<(), TransportError> {
        self.move_all(spans, patience, receive, |message| {
            // SAFETY: `message` points to spans whose bytes their holders keep mapped during this
            // call; the kernel only reads them.
            unsafe { libc::sendmsg(self.socket.as_raw_fd(), message, libc::MSG_NOSIGNAL) }
        })
    }

    /// Fills all bytes of all spans. The spans are used up.
    pub(super) fn receive(
        &self,
        spans: &mut [Span],
        patience: Patience,
    ) -> Result<(), TransportError> {
        self.move_all(spans, patience, &mut || false, |message| {
            let message = std::ptr::from_ref(message).cast_mut();
            // SAFETY: `message` lives on `move_all`'s stack and only its `msg_flags` are written.
            // The holders keep the bytes mapped during this call, and by the contract of
            // `Region::of_memory` no reference to them exists while a batch writes them.
            unsafe { libc::recvmsg(self.socket.as_raw_fd(), message, libc::MSG_WAITALL) }
        })
    }

    /// Calls `call` with the rest of the spans until all are used up.
    fn move_all(
        &self,
        spans: &mut [Span],
        patience: Patience,
        while_blocked: &mut dyn FnMut() -> bool,
        call: impl Fn(&libc::msghdr) -> isize,
    ) -> Result<(), TransportError> {
        let mut rest = skip(spans, 0);
        let mut since = now();
        while !rest.is_empty() {
            let moved = call(&message_of(rest));
            match usize::try_from(moved) {
                Ok(0) => return Err(TransportError::lost(&self.peer, "it closed the connection")),
                Ok(count) => {
                    rest = skip(rest, count);
                    if rest.is_empty() {
                        break;
                    }
                    since = now();
                }
                Err(_) => match io::Error::last_os_error() {
                    error if error.kind() == io::ErrorKind::Interrupted => {}
                    error if error.kind() == io::ErrorKind::WouldBlock => {
                        if while_blocked() {
                            since = now();
                        }
                    }
                    error => return Err(TransportError::lost(&self.peer, error)),
                },
            }
            patience.check(since, &self.peer)?;
        }
        Ok(())
    }

    /// Sends bytes together with a descriptor.
    pub(super) fn send_descriptor(
        &self,
        bytes: &[u8],
        descriptor: BorrowedFd<'_>,
    ) -> Result<(), TransportError> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let descriptors = [descriptor];
        let fits = control.push(SendAncillaryMessage::ScmRights(&descriptors));
        debug_assert!(fits, "the space is that of one descriptor");
        let parts = [io::IoSlice::new(bytes)];
        let sent = rustix::net::sendmsg(&self.socket, &parts, &mut control, SendFlags::NOSIGNAL);
        match sent {
            Ok(count) if count == bytes.len() => Ok(()),
            Ok(_) => Err(TransportError::lost(&self.peer, "it reads no answers")),
            Err(error) => Err(TransportError::lost(&self.peer, error)),
        }
    }

    /// Fills a buffer, and takes the descriptor that came with its bytes.
    pub(super) fn receive_with_descriptor(
        &self,
        into: &mut [u8],
        patience: Patience,
    ) -> Result<Option<OwnedFd>, TransportError> {
        let (mut filled, mut descriptor, since) = (0, None, now());
        while filled < into.len() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut parts = [io::IoSliceMut::new(&mut into[filled..])];
            let flags = rustix::net::RecvFlags::CMSG_CLOEXEC;
            match rustix::net::recvmsg(&self.socket, &mut parts, &mut control, flags) {
                Ok(received) if received.bytes == 0 => {
                    return Err(TransportError::lost(&self.peer, "it closed the connection"));
                }
                Ok(received) => filled += received.bytes,
                Err(Errno::INTR | Errno::AGAIN) => {}
                Err(error) => return Err(TransportError::lost(&self.peer, error)),
            }
            let came = control.drain().find_map(|message| match message {
                RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
                _ => None,
            });
            descriptor = came.or(descriptor);
            if filled < into.len() {
                patience.check(since, &self.peer)?;
            }
        }
        Ok(descriptor)
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Sends small messages at once, and finds out that a host is gone although nothing is sent.
pub(super) fn set_up_tcp(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(stream, KEEPALIVE_PAUSE)?;
    sockopt::set_tcp_keepcnt(stream, KEEPALIVE_COUNT)?;
    Ok(())
}

fn refused(peer: &str, error: io::Error) -> TransportError {
    TransportError::Connect { peer: peer.to_owned(), source: Arc::new(error) }
}

/// The header of a system call over at most `SPANS_MAX` of these spans.
fn message_of(spans: &[Span]) -> libc::msghdr {
    // SAFETY: a message header of zeroes is one without address, spans and control data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    // `Span` is a transparent `iovec`.
    message.msg_iov = spans.as_ptr().cast_mut().cast();
    message.msg_iovlen = spans.len().min(SPANS_MAX);
    message
}

/// What is left of the spans after their first `count` bytes. Leaves out empty spans at the start.
fn skip(mut spans: &mut [Span], mut count: usize) -> &mut [Span] {
    while let Some(first) = spans.first_mut() {
        let bytes = first.bytes();
        if bytes > count {
            *first = first.after(count);
            break;
        }
        count -= bytes;
        spans = &mut spans[1..];
    }
    spans
}

/// Ends both directions of a socket. A thread that accepts, sends or receives on it returns.
pub(super) fn end(socket: impl AsFd) {
    match rustix::net::shutdown(socket, Shutdown::Both) {
        // It fails where the connection has ended already.
        Ok(()) | Err(_) => {}
    }
}
