//! The trait of a connection's byte stream: TCP, a Unix socket, TLS.

use std::fmt;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

use cascade_runtime::Deadline;

use crate::peer::RecordLayer;
use crate::region::Span;

/// How long one call of a byte stream waits: deadlines of sending are kept to within this time.
pub(super) const TICK: Duration = Duration::from_millis(50);
/// The most spans of one call (`IOV_MAX`).
pub(super) const SPANS_MAX: usize = 1024;

/// A connected, ordered stream of bytes in both directions. One thread may send while another one
/// receives.
pub(super) trait ByteStream: fmt::Debug + Send + Sync {
    /// Makes the handshake of the stream itself, before anything is sent or received. Fails with
    /// `TimedOut` at the deadline, and with [`Refused`] where the sides do not accept each other.
    fn handshake(&self, _until: Deadline) -> io::Result<()> {
        Ok(())
    }

    /// What encrypts the stream, after its handshake.
    fn record_layer(&self) -> Option<RecordLayer> {
        None
    }

    /// Sends bytes of the first [`SPANS_MAX`] spans, of which the first is not empty, and returns
    /// how many. Waits for at most [`TICK`], then fails with `WouldBlock`. The next call has the
    /// bytes that were not sent, unchanged: they may be encrypted already.
    fn send_some(&self, spans: &[Span]) -> io::Result<usize>;

    /// Receives into the first [`SPANS_MAX`] spans, of which the first is not empty, and returns
    /// how many bytes: 0 at the end of the stream. Waits for at most `time`, then fails with
    /// `WouldBlock`. It may wait until all bytes of the spans have come, and `more` bytes after
    /// them, which the peer sends in any case.
    fn receive_some(&self, spans: &[Span], more: usize, time: Duration) -> io::Result<usize>;

    /// Waits until bytes can be received or the stream has ended; false if neither happens in time.
    /// May return false early.
    fn wait_readable(&self, left: Duration) -> io::Result<bool>;

    /// Whether the peer has closed the stream. Does not wait.
    fn is_closed(&self) -> bool;

    /// Ends all calls on this stream, here and at the peer.
    fn shutdown(&self);

    /// Sends no more, and throws away what the peer sends until it ends the stream or the deadline
    /// passes. A stream that is closed earlier is reset, and the peer may lose what was sent last.
    fn drain(&self, _until: Deadline) {}

    /// Sends bytes together with a descriptor. Returns how many were sent.
    fn send_descriptor(&self, _bytes: &[u8], _descriptor: BorrowedFd<'_>) -> io::Result<usize> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Receives bytes as `receive_some` does, and the descriptor that came with them.
    fn receive_with_descriptor(
        &self,
        into: &mut [u8],
        time: Duration,
    ) -> io::Result<(usize, Option<OwnedFd>)> {
        self.receive_some(&[Span::of_buffer(into)], 0, time).map(|count| (count, None))
    }
}

/// Why the two sides of a stream do not accept each other: the cause in an [`io::Error`].
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Refused(pub(super) String);
