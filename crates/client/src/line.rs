//! A line: one connection to the node, one call at a time on it.

use std::io::{self, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use cascade_block::{Deadline, SystemClock};
use cascade_wire::{Answer, Call, Frame, TraceContext, UNREAD, frame_length};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketAddrUnix,
    SocketFlags, SocketType, connect, recvmsg, socket_with,
};

use crate::trace;

/// What one read takes at most; longer answers take several.
const READ_BYTES: usize = 64 << 10;
/// What one write takes at most; between two of them the deadline is looked at.
const WRITE_BYTES: usize = 32 << 10;

/// From here on the node takes longer for a call than a needless wake-up costs; short ones it has
/// answered by then.
const LONG_CALL_BYTES: usize = 4 << 10;

/// A connection.
#[derive(Debug)]
pub(crate) struct Line {
    stream: UnixStream,
    /// What was read lies at its start; the rest keeps whatever was there, so that a short answer
    /// does not cost clearing it.
    input: Vec<u8>,
    read: usize,
    output: Vec<u8>,
    timeout: Duration,
    calls: u32,
}

/// Why a call has no answer.
#[derive(Debug)]
pub(crate) enum LineError {
    /// The deadline passed before a byte was sent: the line is in step, and the node knows nothing.
    NoTime,
    /// The same, because the node takes nothing from the line.
    Stuck,
    /// The call fits no message; nothing was sent.
    TooLong(String),
    /// The deadline passed; the answer may still come, so the line is out of step.
    Late,
    /// The node closed it, or is gone, or speaks another language.
    Broken(String),
}

impl From<io::Error> for LineError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Self::Late,
            _ => Self::Broken(error.to_string()),
        }
    }
}

impl From<cascade_wire::WireError> for LineError {
    fn from(error: cascade_wire::WireError) -> Self {
        Self::Broken(error.to_string())
    }
}

impl Line {
    /// Connects, by the deadline: connecting to a stopped node waits once its queue is full.
    pub(crate) fn connect(path: &Path, deadline: Deadline) -> Result<Self, LineError> {
        let address = SocketAddrUnix::new(path).map_err(io::Error::from)?;
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
        let mut line = Self {
            stream: UnixStream::from(socket.map_err(io::Error::from)?),
            input: Vec::new(),
            read: 0,
            output: Vec::new(),
            timeout: Duration::ZERO,
            calls: 0,
        };
        line.await_bytes(deadline)?;
        // The kernel bounds the wait by the socket's timeout for writing.
        connect(&line.stream, &address).map_err(io::Error::from)?;
        Ok(line)
    }

    /// One call and its answer. `ahead` is sent before it; those calls have no answers.
    pub(crate) fn ask(
        &mut self,
        ahead: &[Call],
        call: &Call,
        deadline: Deadline,
    ) -> Result<Answer, LineError> {
        self.send(ahead, call, deadline)?;
        self.read = 0;
        if self.output.len() >= LONG_CALL_BYTES {
            self.await_answer(deadline)?;
        }
        loop {
            let length = frame_length(&self.input[..self.read])?;
            if length.is_some_and(|length| self.read >= length) {
                return self.read_answer();
            }
            self.await_bytes(deadline)?;
            let needed = length.unwrap_or(0).max(READ_BYTES);
            if self.input.len() < needed {
                self.input.resize(needed, 0);
            }
            match (&self.stream).read(&mut self.input[self.read..]) {
                Ok(0) => {
                    return Err(LineError::Broken("the node closed the connection".to_owned()));
                }
                Ok(count) => self.read += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// The first call, whose answer brings the pool's descriptor unless the line joins a session.
    pub(crate) fn greet(
        &mut self,
        hello: &Call,
        deadline: Deadline,
    ) -> Result<(Answer, Option<OwnedFd>), LineError> {
        match self.send(&[], hello, deadline) {
            // The node may have said why before it closed the connection.
            Ok(()) | Err(LineError::Broken(_)) => {}
            Err(error) => return Err(error),
        }
        self.await_bytes(deadline)?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        self.input.resize(READ_BYTES, 0);
        let mut parts = [IoSliceMut::new(&mut self.input)];
        let received = recvmsg(&self.stream, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC);
        let count = received.map_err(io::Error::from)?.bytes;
        self.read = count;
        let descriptor = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
            _ => None,
        });
        if count == 0 {
            let reason = "it closed the connection without an answer; is it of another version?";
            return Err(LineError::Broken(reason.to_owned()));
        }
        if frame_length(&self.input[..count])? != Some(count) {
            return Err(LineError::Broken("the node's welcome is cut".to_owned()));
        }
        Ok((self.read_answer()?, descriptor))
    }

    /// Calls that have no answer.
    pub(crate) fn tell(&mut self, calls: &[Call], deadline: Deadline) -> Result<(), LineError> {
        self.output.clear();
        for call in calls {
            self.put_together(call, None)?;
        }
        self.write_output(deadline)
    }

    fn put_together(&mut self, call: &Call, of: Option<TraceContext>) -> Result<(), LineError> {
        let written = call.write(&mut self.output, self.calls, of);
        written.map_err(|error| LineError::TooLong(error.to_string()))
    }

    fn send(&mut self, ahead: &[Call], call: &Call, deadline: Deadline) -> Result<(), LineError> {
        self.calls = self.calls.wrapping_add(1);
        self.output.clear();
        // What goes ahead ends what others began.
        for call in ahead {
            self.put_together(call, None)?;
        }
        self.put_together(call, trace::current())?;
        self.write_output(deadline)
    }

    fn write_output(&mut self, deadline: Deadline) -> Result<(), LineError> {
        let mut rest = 0;
        while rest < self.output.len() {
            let is_unsent = |error| match error {
                LineError::Late if rest == 0 => LineError::NoTime,
                other => other,
            };
            self.await_bytes(deadline).map_err(is_unsent)?;
            // The kernel bounds the wait for each write alone, and only while nothing of it went.
            let piece = &self.output[rest..self.output.len().min(rest + WRITE_BYTES)];
            match (&self.stream).write(piece) {
                Ok(count) => rest += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    return Err(match LineError::from(error) {
                        LineError::Late if rest == 0 => LineError::Stuck,
                        other => other,
                    });
                }
            }
        }
        // A line that rests keeps no memory of its longest call.
        self.output.shrink_to(READ_BYTES);
        Ok(())
    }

    /// Waits until there is something to read. A read that blocks is woken by the kernel also when
    /// the node takes the call, whose memory is then free for another one; polling for bytes is
    /// not.
    fn await_answer(&self, deadline: Deadline) -> Result<(), LineError> {
        loop {
            let left = deadline.remaining(&SystemClock);
            if left.is_zero() {
                return Err(LineError::Late);
            }
            // What is too long for the kernel to count is for ever.
            let left = Timespec::try_from(left).ok();
            match poll(&mut [PollFd::new(&self.stream, PollFlags::IN)], left.as_ref()) {
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) => return Ok(()),
                Err(error) => return Err(io::Error::from(error).into()),
            }
        }
    }

    /// Sets what the next system call may take.
    fn await_bytes(&mut self, deadline: Deadline) -> Result<(), LineError> {
        let left = deadline.remaining(&SystemClock);
        if left.is_zero() {
            return Err(LineError::Late);
        }
        // A setting per call is a system call; one that is a little too long does no harm.
        let is_close = self.timeout >= left && self.timeout <= left + left / 16;
        if !is_close {
            self.timeout = left + left / 32;
            self.stream.set_read_timeout(Some(self.timeout))?;
            self.stream.set_write_timeout(Some(self.timeout))?;
        }
        Ok(())
    }

    fn read_answer(&mut self) -> Result<Answer, LineError> {
        let frame = Frame::read(&self.input[..self.read])?;
        let answer = Answer::read(&frame)?;
        let is_refused_unread =
            frame.header.call == UNREAD && matches!(answer, Answer::Refused { .. });
        if frame.header.call != self.calls && !is_refused_unread {
            return Err(LineError::Broken("the node answers another call".to_owned()));
        }
        // A line that rests keeps no memory of its longest answer.
        self.input.truncate(READ_BYTES);
        self.input.shrink_to(READ_BYTES);
        Ok(answer)
    }

    /// Whether the node has closed the connection. Asks the kernel, and does not wait.
    pub(crate) fn is_closed(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut all = [PollFd::new(&self.stream, PollFlags::RDHUP)];
        let gone = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
        // A line that cannot be asked is tried by the next call.
        matches!(poll(&mut all, Some(&now)), Ok(1..)) && all[0].revents().intersects(gone)
    }

    /// Closes the connection for every process that has it. The node then takes back what the last
    /// call granted, or would have.
    pub(crate) fn shut(self) {
        // At the other end it may be closed already; then that has happened.
        drop(self.stream.shutdown(std::net::Shutdown::Both));
    }
}

#[cfg(test)]
mod tests {
    use cascade_block::BlockKey;
    use cascade_wire::KeyQuestion;

    use super::*;

    /// Such a line was closed, and the node took back what the call before it had granted.
    #[test]
    fn a_call_that_was_never_sent_leaves_the_line_in_step() {
        let (here, there) = UnixStream::pair().expect("descriptors are left");
        let (input, output) = (Vec::new(), Vec::new());
        let timeout = Duration::ZERO;
        let mut line = Line { stream: here, input, read: 0, output, timeout, calls: 0 };
        let past = Deadline::after(&SystemClock, Duration::ZERO);
        let asked = line.ask(&[], &Call::Ping, past);
        assert!(matches!(asked, Err(LineError::NoTime)), "{asked:?}");
        let keys = vec![BlockKey::from_bytes([7; 32]); 200_000];
        let long = Call::Ask { question: KeyQuestion::Contains, keys };
        let soon = Deadline::after(&SystemClock, Duration::from_secs(5));
        let told = line.tell(&[long], soon);
        assert!(matches!(told, Err(LineError::TooLong(_))), "{told:?}");
        there.set_nonblocking(true).expect("it is a socket");
        let read = (&there).read(&mut [0; 64]).expect_err("nothing was sent");
        assert_eq!(read.kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn a_line_knows_when_the_other_end_is_closed() {
        let (here, there) = UnixStream::pair().expect("descriptors are left");
        let (input, output) = (Vec::new(), Vec::new());
        let line = Line { stream: here, input, read: 0, output, timeout: Duration::ZERO, calls: 0 };
        assert!(!line.is_closed());
        drop(there);
        assert!(line.is_closed());
    }

    #[test]
    fn a_long_call_that_nobody_answers_is_late() {
        let (here, _there) = UnixStream::pair().expect("descriptors are left");
        let (input, output) = (Vec::new(), Vec::new());
        let timeout = Duration::ZERO;
        let mut line = Line { stream: here, input, read: 0, output, timeout, calls: 0 };
        let keys = vec![BlockKey::from_bytes([7; 32]); LONG_CALL_BYTES / 32];
        let long = Call::Ask { question: KeyQuestion::Contains, keys };
        let soon = Deadline::after(&SystemClock, Duration::from_millis(20));
        let asked = line.ask(&[], &long, soon);
        assert!(matches!(asked, Err(LineError::Late)), "{asked:?}");
    }
}
