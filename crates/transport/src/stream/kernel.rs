//! A connected stream socket of the kernel: TCP, or a Unix socket, which also carries descriptors.
#![expect(unsafe_code, reason = "passes addresses of regions to the kernel")]

use std::io::{self, ErrorKind};
use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use cascade_runtime::{Deadline, SystemClock, sleep};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{self, Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, connect,
    socket_with,
};

use super::byte_stream::{ByteStream, SPANS_MAX, TICK};
use crate::region::Span;

/// Pause before another attempt to connect to a Unix socket whose queue is full.
const CONNECT_PAUSE: Duration = Duration::from_millis(5);
/// An idle connection to a host that does not answer ends after 10 s and three questions of 5 s.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(10);
const KEEPALIVE_PAUSE: Duration = Duration::from_secs(5);
const KEEPALIVE_COUNT: u32 = 3;

/// The congestion control of connections within a host: each kernel has it, and all may use it.
const WITHIN_HOST: &str = "reno";
/// A thread that waits for a long message from another host is woken when so many of its bytes have
/// come, and not for each segment.
const WAKE_BYTES: usize = 256 << 10;

/// A connected stream socket of the kernel.
#[derive(Debug)]
pub(super) struct KernelSocket {
    descriptor: OwnedFd,
    /// How many bytes have to come until a waiting thread is woken (`SO_RCVLOWAT`). `None` within a
    /// host, where it is woken by the first one, and takes the bytes while the peer sends more.
    wakes_at: Option<AtomicUsize>,
}

impl KernelSocket {
    /// Connects to a TCP port.
    pub(super) fn connect_tcp(address: SocketAddr, deadline: Deadline) -> io::Result<Self> {
        let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(family, SocketType::STREAM, flags, None)?;
        if address.ip().is_loopback() {
            set_within_host(&socket);
        }
        match connect(&socket, &address) {
            // A signal interrupts the wait, and not the connection.
            Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        while poll_for(&socket, PollFlags::OUT, deadline.remaining(&SystemClock))?.is_empty() {
            if deadline.has_passed(&SystemClock) {
                return Err(ErrorKind::TimedOut.into());
            }
        }
        sockopt::socket_error(&socket)??;
        rustix::io::ioctl_fionbio(&socket, false)?;
        let stream = TcpStream::from(socket);
        let peer = stream.peer_addr()?.ip();
        Self::of_tcp(stream, peer)
    }

    /// Connects to a Unix socket.
    pub(super) fn connect_unix(path: &Path, deadline: Deadline) -> io::Result<Self> {
        let address = SocketAddrUnix::new(path)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        loop {
            match connect(&socket, &address) {
                Ok(()) => break,
                // The peer has not accepted earlier connections yet.
                Err(Errno::AGAIN) if !deadline.has_passed(&SystemClock) => sleep(CONNECT_PAUSE),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        rustix::io::ioctl_fionbio(&socket, false)?;
        Self::of_unix(socket)
    }

    /// The user of the process that made a Unix socket.
    pub(super) fn user_of_peer(&self) -> io::Result<u32> {
        Ok(sockopt::socket_peercred(&self.descriptor)?.uid.as_raw())
    }

    /// Takes a connection, and lets it send small messages at once, and find out that a host is
    /// gone although nothing is sent.
    pub(super) fn of_tcp(stream: TcpStream, peer: IpAddr) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        sockopt::set_socket_keepalive(&stream, true)?;
        sockopt::set_tcp_keepidle(&stream, KEEPALIVE_IDLE)?;
        sockopt::set_tcp_keepintvl(&stream, KEEPALIVE_PAUSE)?;
        sockopt::set_tcp_keepcnt(&stream, KEEPALIVE_COUNT)?;
        // The caller gives the peer's address: a connection that was reset has none.
        let is_within_host = stream.local_addr()?.ip() == peer;
        Self::of_host(stream, is_within_host)
    }

    fn of_host(stream: TcpStream, is_within_host: bool) -> io::Result<Self> {
        // What a new socket has.
        let wakes_at = (!is_within_host).then(|| AtomicUsize::new(1));
        Self::of(stream.into(), wakes_at)
    }

    /// Takes a connected Unix socket.
    pub(super) fn of_unix(socket: OwnedFd) -> io::Result<Self> {
        Self::of(socket, None)
    }

    fn of(descriptor: OwnedFd, wakes_at: Option<AtomicUsize>) -> io::Result<Self> {
        set_socket_timeout(&descriptor, Timeout::Recv, Some(TICK))?;
        set_socket_timeout(&descriptor, Timeout::Send, Some(TICK))?;
        Ok(Self { descriptor, wakes_at })
    }

    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }

    /// Receives the bytes that have come, at most what the buffer holds; 0 at the end. Waits for at
    /// most `time` until `expected` bytes have come, which must come if no error does.
    pub(super) fn receive_available(
        &self,
        into: &mut [u8],
        expected: usize,
        time: Duration,
    ) -> io::Result<usize> {
        let receive = |flags| {
            let received = rustix::net::recv(&self.descriptor, &mut *into, flags);
            received.map(|(bytes, _)| bytes).map_err(Into::into)
        };
        self.waiting_for(expected, time, receive)
    }

    /// As `receive_available`, into the first `SPANS_MAX` spans.
    pub(super) fn receive_spans(
        &self,
        spans: &[Span],
        expected: usize,
        time: Duration,
    ) -> io::Result<usize> {
        let mut message = message_of(spans);
        self.waiting_for(expected, time, |flags: RecvFlags| {
            let flags = flags.bits().cast_signed();
            // SAFETY: `message` lives on this stack and only its `msg_flags` are written. The
            // holders keep the bytes mapped during this call, and by the contract of
            // `Region::of_memory` no reference to them exists while a batch writes them.
            let received =
                unsafe { libc::recvmsg(self.descriptor.as_raw_fd(), &raw mut message, flags) };
            usize::try_from(received).map_err(|_| io::Error::last_os_error())
        })
    }

    /// Calls what receives without waiting, and if nothing has come, again after `expected` bytes
    /// have, or after this time.
    fn waiting_for<T>(
        &self,
        expected: usize,
        time: Duration,
        mut receive: impl FnMut(RecvFlags) -> io::Result<T>,
    ) -> io::Result<T> {
        match receive(RecvFlags::DONTWAIT) {
            Err(error) if error.kind() == ErrorKind::WouldBlock && !time.is_zero() => {}
            other => return other,
        }
        self.wake_at(expected)?;
        poll_for(&self.descriptor, PollFlags::IN, time)?;
        receive(RecvFlags::DONTWAIT)
    }

    /// Has threads that wait for bytes woken when so many have come, or [`WAKE_BYTES`].
    fn wake_at(&self, bytes: usize) -> io::Result<()> {
        let bytes = bytes.clamp(1, WAKE_BYTES);
        if let Some(wakes_at) = &self.wakes_at
            && wakes_at.load(Ordering::Relaxed) != bytes
        {
            set_receive_low_water(&self.descriptor, bytes)?;
            wakes_at.store(bytes, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Sends bytes without waiting. False if not all were taken.
    pub(super) fn send_at_once(&self, bytes: &[u8]) -> bool {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        rustix::net::send(&self.descriptor, bytes, flags) == Ok(bytes.len())
    }
}

impl ByteStream for KernelSocket {
    fn send_some(&self, spans: &[Span]) -> io::Result<usize> {
        let message = message_of(spans);
        // SAFETY: `message` points to spans whose bytes their holders keep mapped during this
        // call; the kernel only reads them.
        let sent = unsafe {
            libc::sendmsg(self.descriptor.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL)
        };
        usize::try_from(sent).map_err(|_| io::Error::last_os_error())
    }

    fn receive_some(&self, spans: &[Span], more: usize, time: Duration) -> io::Result<usize> {
        let bytes: usize = spans.iter().map(|span| span.bytes()).sum();
        self.receive_spans(spans, bytes.saturating_add(more), time)
    }

    fn wait_readable(&self, left: Duration) -> io::Result<bool> {
        self.wake_at(1)?;
        poll_for(&self.descriptor, PollFlags::IN, left).map(|events| !events.is_empty())
    }

    fn is_closed(&self) -> bool {
        let ended = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
        let polled = poll_for(&self.descriptor, PollFlags::RDHUP, Duration::ZERO);
        polled.map_or(true, |events| events.intersects(ended))
    }

    fn shutdown(&self) {
        end(&self.descriptor);
    }

    fn drain(&self, until: Deadline) {
        if rustix::net::shutdown(&self.descriptor, Shutdown::Write).is_err() {
            return;
        }
        let mut thrown_away = [0; 4096];
        while !until.has_passed(&SystemClock) {
            match self.receive_available(&mut thrown_away, 1, TICK) {
                Ok(1..) => {}
                Err(error)
                    if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => {}
                Ok(0) | Err(_) => return,
            }
        }
    }

    fn send_descriptor(&self, bytes: &[u8], descriptor: BorrowedFd<'_>) -> io::Result<usize> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let descriptors = [descriptor];
        let fits = control.push(SendAncillaryMessage::ScmRights(&descriptors));
        debug_assert!(fits, "the space is that of one descriptor");
        let parts = [io::IoSlice::new(bytes)];
        let sent =
            rustix::net::sendmsg(&self.descriptor, &parts, &mut control, SendFlags::NOSIGNAL);
        sent.map_err(Into::into)
    }

    fn receive_with_descriptor(
        &self,
        into: &mut [u8],
        time: Duration,
    ) -> io::Result<(usize, Option<OwnedFd>)> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let expected = into.len();
        let mut parts = [io::IoSliceMut::new(into)];
        self.waiting_for(expected, time, |flags| {
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let flags = flags | RecvFlags::CMSG_CLOEXEC;
            let received = rustix::net::recvmsg(&self.descriptor, &mut parts, &mut control, flags)?;
            let descriptor = control.drain().find_map(|message| match message {
                RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
                _ => None,
            });
            Ok((received.bytes, descriptor))
        })
    }
}

/// Waits for events of a socket. None may be returned early.
fn poll_for(socket: &OwnedFd, events: PollFlags, left: Duration) -> io::Result<PollFlags> {
    let left = Timespec {
        tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(left.subsec_nanos()),
    };
    let mut polled = [PollFd::new(socket, events)];
    match poll(&mut polled, Some(&left)) {
        Ok(_) => Ok(polled[0].revents()),
        Err(Errno::INTR) => Ok(PollFlags::empty()),
        Err(error) => Err(error.into()),
    }
}

/// Within a host nothing is lost. What others do to find the rate of a network costs time there:
/// BBR sets a timer for each 64 KiB, and keeps it if it is replaced after the connection was made.
pub(super) fn set_within_host(socket: impl AsFd) {
    match sockopt::set_tcp_congestion(socket, WITHIN_HOST) {
        // Where it may not be chosen, the system's stays.
        Ok(()) | Err(_) => {}
    }
}

fn set_receive_low_water(socket: &OwnedFd, bytes: usize) -> io::Result<()> {
    let bytes = libc::c_int::try_from(bytes).map_err(io::Error::other)?;
    let length = libc::socklen_t::try_from(size_of_val(&bytes)).map_err(io::Error::other)?;
    // SAFETY: the kernel reads an integer that lives on this stack.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_RCVLOWAT,
            (&raw const bytes).cast(),
            length,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
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

/// Ends both directions of a socket. A thread that accepts, sends or receives on it returns.
pub(super) fn end(socket: impl AsFd) {
    match rustix::net::shutdown(socket, Shutdown::Both) {
        // It fails where the connection has ended already.
        Ok(()) | Err(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::net::TcpListener;

    use cascade_runtime::thread;
    use proptest::prelude::*;

    use super::*;

    /// A connection over loopback, of which the second side waits as for another host.
    fn pair() -> (TcpStream, KernelSocket) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        sender.set_nodelay(true).unwrap();
        let (receiver, _) = listener.accept().unwrap();
        (sender, KernelSocket::of_host(receiver, false).unwrap())
    }

    /// Receives a message in parts, as `Socket` does.
    fn receive(socket: &KernelSocket, message: &mut [u8], part: usize) {
        let (mut at, until) = (0, Deadline::after(&SystemClock, Duration::from_secs(30)));
        while at < message.len() {
            assert!(!until.has_passed(&SystemClock), "it waits for bytes that do not come");
            let end = message.len().min((at / part + 1) * part);
            let more = message.len() - end;
            match socket.receive_some(&[Span::of_buffer(&mut message[at..end])], more, TICK) {
                Ok(count) => at += count,
                Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
            }
        }
    }

    fn wakes_at(socket: &KernelSocket) -> usize {
        let set = socket.wakes_at.as_ref().unwrap().load(Ordering::Relaxed);
        // SAFETY: the kernel writes an integer that lives on this stack.
        let actual = unsafe {
            let (mut value, mut length) = (0_i32, 4);
            let (level, name) = (libc::SOL_SOCKET, libc::SO_RCVLOWAT);
            let into = (&raw mut value).cast();
            libc::getsockopt(socket.descriptor.as_raw_fd(), level, name, into, &raw mut length);
            value
        };
        assert_eq!(usize::try_from(actual).unwrap(), set);
        set
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        /// Nobody waits for more than was promised, whatever the lengths of messages and parts.
        #[test]
        fn messages_of_any_length_arrive(
            messages in prop::collection::vec(1..700_000_usize, 1..5),
            sent_at_once in 1..300_000_usize,
            part in 1_000..300_000_usize,
        ) {
            let (mut sender, socket) = pair();
            let bytes = |length: usize| (0..=250).cycle().take(length).collect::<Vec<u8>>();
            let lengths = messages.clone();
            let sending = thread::spawn(move || {
                for length in lengths {
                    for some in bytes(length).chunks(sent_at_once) {
                        sender.write_all(some).unwrap();
                    }
                }
                sender
            });
            for length in messages {
                let long = Duration::from_secs(30);
                prop_assert!(socket.wait_readable(long).unwrap(), "the message comes");
                let mut message = vec![0; length];
                receive(&socket, &mut message, part);
                prop_assert!(message == bytes(length));
            }
            drop(sending.join());
        }
    }

    #[test]
    fn a_thread_is_woken_when_what_it_expects_has_come() {
        let (mut sender, socket) = pair();
        let mut message = vec![0; 4 * WAKE_BYTES];
        let spans = [Span::of_buffer(&mut message)];
        assert_eq!(wakes_at(&socket), 1);
        for (expected, woken_at) in [(10, 10), (WAKE_BYTES - 1, WAKE_BYTES - 1)] {
            let waited = socket.receive_spans(&spans, expected, TICK);
            assert_eq!(waited.unwrap_err().kind(), ErrorKind::WouldBlock);
            assert_eq!(wakes_at(&socket), woken_at);
        }
        let waited = socket.receive_some(&spans, usize::MAX, TICK);
        assert_eq!(waited.unwrap_err().kind(), ErrorKind::WouldBlock);
        assert_eq!(wakes_at(&socket), WAKE_BYTES);
        // A few bytes do not wake it, and are not kept from it: a slow peer makes progress.
        sender.write_all(b"slow").unwrap();
        assert_eq!(socket.receive_some(&spans, 0, TICK).unwrap(), 4);
        // The first byte of the next message does.
        sender.write_all(b"n").unwrap();
        assert!(socket.wait_readable(Duration::from_secs(30)).unwrap());
        assert_eq!(wakes_at(&socket), 1);
    }

    #[test]
    fn the_end_of_a_connection_wakes_a_thread_that_expects_more() {
        let (mut sender, socket) = pair();
        let mut message = vec![0; WAKE_BYTES];
        let spans = [Span::of_buffer(&mut message)];
        sender.write_all(b"half").unwrap();
        drop(sender);
        let mut received = vec![];
        while received.last() != Some(&0) {
            match socket.receive_some(&spans, 0, TICK) {
                Ok(count) => received.push(count),
                Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
            }
        }
        assert_eq!(received, [4, 0]);
    }

    #[test]
    fn connections_within_a_host_have_their_own_congestion_control() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        set_within_host(&listener);
        let soon = Deadline::after(&SystemClock, Duration::from_secs(30));
        let client = KernelSocket::connect_tcp(listener.local_addr().unwrap(), soon).unwrap();
        let (stream, peer) = listener.accept().unwrap();
        let server = KernelSocket::of_tcp(stream, peer.ip()).unwrap();
        for side in [client, server] {
            assert_eq!(sockopt::tcp_congestion(&side.descriptor).unwrap(), WITHIN_HOST);
            assert!(side.wakes_at.is_none(), "it is woken by the first byte");
        }
    }
}
