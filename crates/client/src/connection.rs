//! One connection to the node, with one call in flight at a time.

use std::io::{self, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use cascade_runtime::{Clock as _, Deadline, SystemClock};
use cascade_wire::{Answer, Call, Frame, TraceContext, UNREAD_CALL, frame_length};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketAddrUnix,
    SocketFlags, SocketType, connect, recv, recvmsg, socket_with,
};

use crate::trace;

/// Maximum bytes of one read; longer answers take several.
const READ_BYTES: usize = 64 << 10;
/// Maximum bytes of one write; the deadline is checked between two writes.
const WRITE_BYTES: usize = 32 << 10;

/// From this length on, a call takes the node longer than a superfluous wake-up costs. The answer
/// to a shorter call is already there by then.
const LONG_CALL_BYTES: usize = 4 << 10;

/// How long a call looks for its answer before it waits in the kernel. To be woken up there takes
/// the client 20 to 60 us, and the node as long to do that.
const LOOK_TIME: Duration = Duration::from_micros(50);
/// How much longer, for each byte of the call: a block takes at least 32 bytes, and the node up to
/// half a microsecond.
const LOOK_TIME_PER_BYTE: Duration = Duration::from_nanos(16);
/// Most bytes that count. Longer calls wait in the kernel all the same.
const LOOK_BYTES_MAX: usize = 16 << 10;
/// Pauses between two looks.
const PAUSES_PER_LOOK: u32 = 20;
/// After a call that looked in vain, so many calls do not look; twice as many after the next one.
const SKIPPED_MAX: u32 = 64;

/// A connection.
#[derive(Debug)]
pub(crate) struct Connection {
    stream: UnixStream,
    /// The first `read` bytes are the input. The rest is not cleared, so that a short answer does
    /// not pay for clearing a long buffer.
    input: Vec<u8>,
    read: usize,
    output: Vec<u8>,
    timeout: Duration,
    calls: u32,
    looks: Looks,
}

/// Whether calls look for their answers: only while these come soon. On a machine without an idle
/// processor, looking for an answer delays it.
#[derive(Debug, Default)]
struct Looks {
    /// Calls that do not look from now on.
    skipped: u32,
    /// Calls that did not look since the last answer that was found.
    penalty: u32,
}

impl Looks {
    /// Whether the next call looks.
    fn begin(&mut self) -> bool {
        let looks = self.skipped == 0;
        self.skipped = self.skipped.saturating_sub(1);
        looks
    }

    fn end(&mut self, has_found: bool) {
        self.penalty = if has_found { 0 } else { (2 * self.penalty).clamp(1, SKIPPED_MAX) };
        self.skipped = self.penalty;
    }
}

/// Why a call has no answer, by what that means for the connection.
#[derive(Debug)]
pub(crate) enum ConnectionError {
    /// The deadline passed before a byte was sent. The connection can be used again.
    NotSent,
    /// As `NotSent`, because the node does not read the connection.
    SendBlocked,
    /// The call is longer than a message may be; nothing was sent.
    TooLong(String),
    /// The deadline passed after the call was sent. A late answer may still arrive, so the
    /// connection cannot be used again.
    Timeout,
    /// The connection cannot be used again: the node ended, closed it, or sent an invalid message.
    Broken(String),
}

impl From<io::Error> for ConnectionError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Self::Timeout,
            _ => Self::Broken(error.to_string()),
        }
    }
}

impl From<cascade_wire::WireError> for ConnectionError {
    fn from(error: cascade_wire::WireError) -> Self {
        Self::Broken(error.to_string())
    }
}

impl Connection {
    /// Connects by the deadline. Connecting to a stopped node blocks once its queue is full.
    pub(crate) fn connect(path: &Path, deadline: Deadline) -> Result<Self, ConnectionError> {
        let address = SocketAddrUnix::new(path).map_err(io::Error::from)?;
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
        let mut connection = Self::over(UnixStream::from(socket.map_err(io::Error::from)?));
        loop {
            connection.set_timeouts(deadline)?;
            // The kernel limits this wait by the socket's send timeout.
            match connect(&connection.stream, &address) {
                Ok(()) => return Ok(connection),
                // The socket is not connected, so another attempt is possible.
                Err(Errno::INTR | Errno::AGAIN) => {}
                Err(error) => return Err(io::Error::from(error).into()),
            }
        }
    }

    /// A connection without a call.
    pub(crate) fn over(stream: UnixStream) -> Self {
        let (input, output) = (Vec::new(), Vec::new());
        let (timeout, looks) = (Duration::ZERO, Looks::default());
        Self { stream, input, read: 0, output, timeout, calls: 0, looks }
    }

    /// Sends a call and waits for its answer. The calls in `ahead` are sent before it and have no
    /// answers.
    pub(crate) fn call(
        &mut self,
        ahead: &[Call],
        call: &Call,
        deadline: Deadline,
    ) -> Result<Answer, ConnectionError> {
        let sent_bytes = self.begin_call(ahead, call, deadline)?;
        self.end_call(sent_bytes, deadline)
    }

    /// Sends a call as [`Self::call`] does, and returns its length. [`Self::end_call`] waits for
    /// the answer.
    pub(crate) fn begin_call(
        &mut self,
        ahead: &[Call],
        call: &Call,
        deadline: Deadline,
    ) -> Result<usize, ConnectionError> {
        let sent_bytes = self.send_call(ahead, call, deadline)?;
        // One call is in flight at a time, and a connection with a late answer is not used again.
        // So no input is left from an earlier call.
        self.read = 0;
        Ok(sent_bytes)
    }

    /// Waits for the answer to the call of this length that is in flight. An answer that is there
    /// is read also after the deadline: the caller is late then, not the node.
    pub(crate) fn end_call(
        &mut self,
        sent_bytes: usize,
        deadline: Deadline,
    ) -> Result<Answer, ConnectionError> {
        let is_there = self.looks.begin() && self.look_for_answer(sent_bytes, deadline)?;
        if !is_there && sent_bytes >= LONG_CALL_BYTES {
            self.poll_for_answer(deadline)?;
        }
        loop {
            let length = frame_length(&self.input[..self.read])?;
            if length.is_some_and(|length| self.read >= length) {
                return self.read_answer();
            }
            // `frame_length` has checked the limit, so the node cannot make this buffer grow
            // further.
            let needed = length.unwrap_or(0).max(READ_BYTES);
            if self.input.len() < needed {
                self.input.resize(needed, 0);
            }
            self.read += self.receive(deadline)?;
        }
    }

    /// Reads a part of an answer. After the deadline without waiting.
    fn receive(&mut self, deadline: Deadline) -> Result<usize, ConnectionError> {
        loop {
            let flags = match self.set_timeouts(deadline) {
                Ok(()) => RecvFlags::empty(),
                Err(ConnectionError::Timeout) => RecvFlags::DONTWAIT,
                Err(error) => return Err(error),
            };
            match recv(&self.stream, &mut self.input[self.read..], flags) {
                Ok((0, _)) => {
                    let reason = "the node closed the connection".to_owned();
                    return Err(ConnectionError::Broken(reason));
                }
                Ok((count, _)) => return Ok(count),
                Err(Errno::AGAIN) if flags == RecvFlags::DONTWAIT => {
                    return Err(ConnectionError::Timeout);
                }
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(error) => return Err(io::Error::from(error).into()),
            }
        }
    }

    /// The first call. Its answer carries the pool's descriptor, unless the connection joins an
    /// existing session.
    pub(crate) fn handshake(
        &mut self,
        hello: &Call,
        deadline: Deadline,
    ) -> Result<(Answer, Option<OwnedFd>), ConnectionError> {
        match self.send_call(&[], hello, deadline) {
            // The node may have sent the reason before it closed the connection.
            Ok(_) | Err(ConnectionError::Broken(_)) => {}
            Err(error) => return Err(error),
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        self.input.resize(READ_BYTES, 0);
        let count = loop {
            self.set_timeouts(deadline)?;
            let mut parts = [IoSliceMut::new(&mut self.input)];
            match recvmsg(&self.stream, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC) {
                Ok(received) => break received.bytes,
                // Nothing was received. The kernel restarts no call of a socket with a timeout.
                Err(Errno::INTR | Errno::AGAIN) => {}
                Err(error) => return Err(io::Error::from(error).into()),
            }
        };
        self.read = count;
        let descriptor = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
            _ => None,
        });
        if count == 0 {
            let reason =
                "the node closed the connection without an answer; check that its version matches";
            return Err(ConnectionError::Broken(reason.to_owned()));
        }
        if frame_length(&self.input[..count])? != Some(count) {
            return Err(ConnectionError::Broken("the node's first answer is truncated".to_owned()));
        }
        Ok((self.read_answer()?, descriptor))
    }

    /// Sends calls that have no answer.
    pub(crate) fn send(
        &mut self,
        calls: &[Call],
        deadline: Deadline,
    ) -> Result<(), ConnectionError> {
        self.output.clear();
        for call in calls {
            self.encode(call, None)?;
        }
        self.write_output(deadline).map(drop)
    }

    fn encode(&mut self, call: &Call, of: Option<TraceContext>) -> Result<(), ConnectionError> {
        let written = call.write(&mut self.output, self.calls, of);
        written.map_err(|error| ConnectionError::TooLong(error.to_string()))
    }

    /// Returns the number of sent bytes.
    fn send_call(
        &mut self,
        ahead: &[Call],
        call: &Call,
        deadline: Deadline,
    ) -> Result<usize, ConnectionError> {
        // Only consecutive calls have to differ: at most one is in flight.
        self.calls = self.calls.wrapping_add(1);
        self.output.clear();
        // Releases end holds of earlier calls: they belong to no trace.
        for call in ahead {
            self.encode(call, None)?;
        }
        self.encode(call, trace::current())?;
        self.write_output(deadline)
    }

    /// Sends the output and empties it. Returns its length.
    fn write_output(&mut self, deadline: Deadline) -> Result<usize, ConnectionError> {
        let (mut rest, mut is_blocked) = (0, false);
        while rest < self.output.len() {
            let is_unsent = |error| match error {
                ConnectionError::Timeout if rest == 0 && is_blocked => ConnectionError::SendBlocked,
                ConnectionError::Timeout if rest == 0 => ConnectionError::NotSent,
                other => other,
            };
            self.set_timeouts(deadline).map_err(is_unsent)?;
            // The kernel limits each write separately, and only while none of its bytes was sent.
            // Short pieces let the deadline hold for the whole message.
            let piece = &self.output[rest..self.output.len().min(rest + WRITE_BYTES)];
            match (&self.stream).write(piece) {
                Ok(count) => rest += count,
                Err(error) => match error.kind() {
                    io::ErrorKind::Interrupted => {}
                    // Of the socket, whose timeout is shorter than the time that is left.
                    io::ErrorKind::WouldBlock => is_blocked = true,
                    _ => return Err(error.into()),
                },
            }
        }
        // An idle connection keeps no buffer of its longest call. Cleared first, because a buffer
        // never shrinks below its contents.
        self.output.clear();
        self.output.shrink_to(READ_BYTES);
        Ok(rest)
    }

    /// Reads the beginning of the answer if it comes soon. Returns whether it has.
    fn look_for_answer(
        &mut self,
        sent_bytes: usize,
        deadline: Deadline,
    ) -> Result<bool, ConnectionError> {
        let counted = u32::try_from(sent_bytes.min(LOOK_BYTES_MAX)).unwrap_or(0);
        let time = LOOK_TIME + LOOK_TIME_PER_BYTE * counted;
        let time = time.min(deadline.remaining(&SystemClock));
        if self.input.len() < READ_BYTES {
            self.input.resize(READ_BYTES, 0);
        }
        let began = SystemClock.monotonic();
        loop {
            match recv(&self.stream, &mut self.input[..], RecvFlags::DONTWAIT) {
                // The end of the connection is left to the caller, who reads it again.
                Ok((0, _)) => return Ok(false),
                Ok((count, _)) => {
                    self.read = count;
                    self.looks.end(true);
                    return Ok(true);
                }
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(error) => return Err(io::Error::from(error).into()),
            }
            if SystemClock.monotonic().saturating_sub(began) >= time {
                self.looks.end(false);
                return Ok(false);
            }
            for _ in 0..PAUSES_PER_LOOK {
                std::hint::spin_loop();
            }
        }
    }

    /// Waits until an answer can be read. A blocking read is also woken when the node reads the
    /// call, because that frees socket memory; a poll for input is not.
    fn poll_for_answer(&self, deadline: Deadline) -> Result<(), ConnectionError> {
        loop {
            let left = deadline.remaining(&SystemClock);
            // A time too long for the kernel's type means no timeout.
            let time = Timespec::try_from(left).ok();
            match poll(&mut [PollFd::new(&self.stream, PollFlags::IN)], time.as_ref()) {
                Ok(0) if left.is_zero() => return Err(ConnectionError::Timeout),
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) => return Ok(()),
                Err(error) => return Err(io::Error::from(error).into()),
            }
        }
    }

    /// Sets the socket's timeouts for the next system call.
    fn set_timeouts(&mut self, deadline: Deadline) -> Result<(), ConnectionError> {
        let left = deadline.remaining(&SystemClock);
        if left.is_zero() {
            return Err(ConnectionError::Timeout);
        }
        // Setting them is a system call. A timeout up to 1/16 too short is accepted instead: after
        // it the caller waits again. One that is too long would make the call late.
        let is_close = self.timeout <= left && self.timeout >= left / 16 * 15;
        if !is_close {
            // Shorter than needed, so that it still fits later calls with the same timeout and the
            // further system calls of this one.
            self.timeout = left / 32 * 31;
            self.stream.set_read_timeout(Some(self.timeout))?;
            self.stream.set_write_timeout(Some(self.timeout))?;
        }
        Ok(())
    }

    fn read_answer(&mut self) -> Result<Answer, ConnectionError> {
        let frame = Frame::read(&self.input[..self.read])?;
        let answer = Answer::read(&frame)?;
        // The node sends it without having read the call, so it does not know its number.
        let is_refused_unread =
            frame.header.call == UNREAD_CALL && matches!(answer, Answer::Refused { .. });
        if frame.header.call != self.calls && !is_refused_unread {
            return Err(ConnectionError::Broken("the node answered another call".to_owned()));
        }
        // An idle connection keeps no buffer of its longest answer.
        self.input.truncate(READ_BYTES);
        self.input.shrink_to(READ_BYTES);
        Ok(answer)
    }

    /// Whether the node has closed the connection. Polls without waiting.
    pub(crate) fn is_closed(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut all = [PollFd::new(&self.stream, PollFlags::RDHUP)];
        let gone = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
        // A connection that cannot be polled is tried by the next call.
        matches!(poll(&mut all, Some(&now)), Ok(1..)) && all[0].revents().intersects(gone)
    }

    /// Closes the connection for every process that has it. The node then releases what the last
    /// call granted or is about to grant.
    pub(crate) fn shutdown(self) {
        // An error means that the node has closed it already.
        drop(self.stream.shutdown(std::net::Shutdown::Both));
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use cascade_block::BlockKey;
    use cascade_wire::KeyQuestion;

    use super::*;

    /// Such a connection was closed, and the node released what the previous call had granted.
    #[test]
    fn a_connection_stays_usable_after_a_call_that_was_not_sent() {
        let (here, there) = UnixStream::pair().expect("descriptors are left");
        let mut connection = Connection::over(here);
        let past = Deadline::after(&SystemClock, Duration::ZERO);
        let answer = connection.call(&[], &Call::Ping, past);
        assert!(matches!(answer, Err(ConnectionError::NotSent)), "{answer:?}");
        let keys = vec![BlockKey::from_bytes([7; 32]); 200_000];
        let long = Call::Ask { question: KeyQuestion::Contains, keys };
        let soon = Deadline::after(&SystemClock, Duration::from_secs(5));
        let sent = connection.send(&[long], soon);
        assert!(matches!(sent, Err(ConnectionError::TooLong(_))), "{sent:?}");
        there.set_nonblocking(true).expect("it is a socket");
        let read = (&there).read(&mut [0; 64]).expect_err("nothing was sent");
        assert_eq!(read.kind(), io::ErrorKind::WouldBlock);
    }

    /// The buffer of the last long call stayed allocated until the next call.
    #[test]
    fn an_idle_connection_keeps_no_buffer_of_a_long_call() {
        let (here, mut there) = UnixStream::pair().expect("descriptors are left");
        let mut connection = Connection::over(here);
        let reader = std::thread::spawn(move || io::copy(&mut there, &mut io::sink()));
        let keys = vec![BlockKey::from_bytes([7; 32]); 60_000];
        let long = Call::Ask { question: KeyQuestion::Contains, keys };
        let soon = Deadline::after(&SystemClock, Duration::from_secs(30));
        connection.send(&[long], soon).expect("the peer reads it");
        assert!(connection.output.capacity() <= READ_BYTES, "{}", connection.output.capacity());
        connection.shutdown();
        let read = reader.join().expect("the reader ends").expect("the socket is readable");
        assert!(read > 60_000 * 32, "{read}");
    }

    #[test]
    fn fewer_and_fewer_calls_look_for_answers_in_vain() {
        let mut looks = Looks::default();
        let mut skipped = Vec::new();
        for _ in 0..8 {
            skipped.push((0..=SKIPPED_MAX).take_while(|_| !looks.begin()).count());
            looks.end(false);
        }
        assert_eq!(skipped, [0, 1, 2, 4, 8, 16, 32, 64]);
        while !looks.begin() {}
        looks.end(true);
        assert!(looks.begin(), "each call looks again after an answer that was found");
    }

    #[test]
    fn an_answer_is_read_after_other_work() {
        let (here, there) = UnixStream::pair().expect("descriptors are left");
        let mut connection = Connection::over(here);
        let soon = Deadline::after(&SystemClock, Duration::from_secs(30));
        for number in 1..3 {
            let sent = connection.begin_call(&[], &Call::Ping, soon).expect("there is room");
            let mut message = Vec::new();
            Answer::Done.write(&mut message, number);
            // In two pieces, as a long answer may arrive.
            let (head, tail) = message.split_at(5);
            (&there).write_all(head).expect("there is room");
            std::thread::scope(|scope| {
                let ended = scope.spawn(|| connection.end_call(sent, soon));
                (&there).write_all(tail).expect("there is room");
                let answer = ended.join().expect("no panic");
                assert!(matches!(answer, Ok(Answer::Done)), "{answer:?}");
            });
        }
    }

    /// A put that copied until its deadline took the node for stopped, although the answer to its
    /// first seal was there: the outcomes were lost, and all calls failed until the client had
    /// reconnected. So did each call of a process that was stopped while it waited.
    #[test]
    fn an_answer_that_has_arrived_is_read_after_the_deadline() {
        for blocks in [0, LONG_CALL_BYTES / 32] {
            for looks in [true, false] {
                let (here, there) = UnixStream::pair().expect("descriptors are left");
                let mut connection = Connection::over(here);
                connection.looks.skipped = u32::from(!looks);
                let keys = vec![BlockKey::from_bytes([7; 32]); blocks];
                let call = Call::Ask { question: KeyQuestion::Contains, keys };
                let soon = Deadline::after(&SystemClock, Duration::from_secs(30));
                let sent = connection.begin_call(&[], &call, soon).expect("there is room");
                let mut message = Vec::new();
                Answer::Flags(vec![true; blocks]).write(&mut message, 1);
                (&there).write_all(&message).expect("there is room");
                let answer = connection.end_call(sent, Deadline::at(Duration::ZERO));
                assert!(matches!(answer, Ok(Answer::Flags(_))), "{blocks} {looks}: {answer:?}");
            }
        }
    }

    /// Timeouts of the socket could be 1/16 longer than the time that was left: a call of 5 s to a
    /// stopped node took 5.3 s.
    #[test]
    fn no_wait_is_longer_than_the_time_that_is_left() {
        let (here, _there) = UnixStream::pair().expect("descriptors are left");
        let mut connection = Connection::over(here);
        for seconds in [160, 161, 165, 158, 150, 149, 1] {
            let time = Duration::from_secs(seconds);
            connection.set_timeouts(Deadline::after(&SystemClock, time)).expect("a socket");
            for timeout in [connection.stream.read_timeout(), connection.stream.write_timeout()] {
                let timeout = timeout.expect("a socket").expect("a timeout");
                assert!(timeout <= time && timeout >= time * 9 / 10, "{timeout:?} for {time:?}");
            }
        }
    }

    /// Each wait of the socket is shorter than the time that is left: the call goes on after it.
    #[test]
    fn a_call_outlasts_the_timeout_of_its_socket() {
        let (here, there) = UnixStream::pair().expect("descriptors are left");
        let mut connection = Connection::over(here);
        let soon = Deadline::after(&SystemClock, Duration::from_secs(30));
        let sent = connection.begin_call(&[], &Call::Ping, soon).expect("there is room");
        let short = Some(Duration::from_millis(1));
        connection.stream.set_read_timeout(short).expect("a socket");
        std::thread::scope(|scope| {
            let ended = scope.spawn(|| connection.end_call(sent, soon));
            std::thread::park_timeout(Duration::from_millis(20));
            let mut message = Vec::new();
            Answer::Done.write(&mut message, 1);
            (&there).write_all(&message).expect("there is room");
            let answer = ended.join().expect("no panic");
            assert!(matches!(answer, Ok(Answer::Done)), "{answer:?}");
        });
    }

    #[test]
    fn a_connection_detects_that_the_peer_closed_it() {
        let (here, there) = UnixStream::pair().expect("descriptors are left");
        let connection = Connection::over(here);
        assert!(!connection.is_closed());
        drop(there);
        assert!(connection.is_closed());
    }

    #[test]
    fn a_long_call_without_an_answer_times_out() {
        let (here, _there) = UnixStream::pair().expect("descriptors are left");
        let mut connection = Connection::over(here);
        let keys = vec![BlockKey::from_bytes([7; 32]); LONG_CALL_BYTES / 32];
        let long = Call::Ask { question: KeyQuestion::Contains, keys };
        let soon = Deadline::after(&SystemClock, Duration::from_millis(20));
        let answer = connection.call(&[], &long, soon);
        assert!(matches!(answer, Err(ConnectionError::Timeout)), "{answer:?}");
    }
}
