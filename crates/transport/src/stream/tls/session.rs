//! An established connection whose records this process encrypts and decrypts.

use std::io;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cascade_runtime::{Mutex, MutexGuard, now};
use rustls::ExtractedSecrets;

use super::alert;
use super::keys::{Keys, decrypter, encrypter};
use super::opener::{Invalid, Opened, Opener};
use super::sealer::Sealer;
use crate::region::Span;
use crate::stream::byte_stream::{ByteStream as _, SPANS_MAX};
use crate::stream::kernel::KernelSocket;

/// A message of the handshake that may come later: it is of no use without resumption.
const NEW_SESSION_TICKET: u8 = 4;
const KEY_UPDATE: u8 = 24;
/// Records that one call encrypts at most, with their alert and key update.
const RECORDS_OF_CALL_MAX: u64 = 64;

/// An established connection.
#[derive(Debug)]
pub(super) struct Session {
    /// Held by the thread that sends.
    sealer: Mutex<Sealer>,
    /// Held by the thread that receives.
    incoming: Mutex<Incoming>,
    keys: Mutex<Keys>,
    /// Records after which this side replaces its key.
    key_records_max: u64,
    /// The peer asked for a new key of this side.
    owes_key_update: AtomicBool,
    /// An error has ended the connection.
    has_failed: AtomicBool,
}

#[derive(Debug)]
struct Incoming {
    opener: Opener,
    /// The peer has said that it sends no more.
    has_ended: bool,
    /// The socket has no more bytes.
    is_cut: bool,
}

impl Session {
    pub(super) fn new(
        secrets: ExtractedSecrets,
        keys: Keys,
        key_records_max: u64,
    ) -> io::Result<Self> {
        let suite = keys.suite()?;
        let (sent, encrypting) = secrets.tx;
        let (received, decrypting) = secrets.rx;
        let sealer = Sealer::new(encrypter(suite, encrypting)?, sent);
        let opener = Opener::new(decrypter(suite, decrypting)?, received);
        let limit = key_records_max.min(suite.common.confidentiality_limit);
        Ok(Self {
            sealer: Mutex::new(sealer),
            incoming: Mutex::new(Incoming { opener, has_ended: false, is_cut: false }),
            keys: Mutex::new(keys),
            key_records_max: limit.saturating_sub(RECORDS_OF_CALL_MAX),
            owes_key_update: AtomicBool::new(false),
            has_failed: AtomicBool::new(false),
        })
    }

    pub(super) fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Acquire)
    }

    fn check(&self) -> io::Result<()> {
        if self.has_failed() {
            return Err(io::Error::other("TLS failed before"));
        }
        Ok(())
    }

    /// See [`ByteStream::send_some`](crate::stream::byte_stream::ByteStream::send_some).
    pub(super) fn send_some(&self, socket: &KernelSocket, spans: &[Span]) -> io::Result<usize> {
        self.check()?;
        let mut sealer = self.sealer.lock().unwrap_or_else(PoisonError::into_inner);
        if !sealer.is_pending() {
            let is_owed = self.owes_key_update.swap(false, Ordering::AcqRel);
            if is_owed || sealer.sequence() >= self.key_records_max {
                let next = self.keys().next_encrypter()?;
                sealer.update_key(next)?;
            }
            sealer.seal(spans)?;
        }
        // The bytes of these spans are in the pending records, in whichever call these were sealed.
        match sealer.send(socket)? {
            0 => Err(io::ErrorKind::WouldBlock.into()),
            plain => Ok(plain),
        }
    }

    /// See [`ByteStream::receive_some`](crate::stream::byte_stream::ByteStream::receive_some).
    pub(super) fn receive_some(
        &self,
        socket: &KernelSocket,
        spans: &[Span],
        more: usize,
        time: Duration,
    ) -> io::Result<usize> {
        self.check()?;
        let mut incoming = self.incoming();
        let spans = &spans[..spans.len().min(SPANS_MAX)];
        let wanted: usize = spans.iter().map(|span| span.bytes()).sum();
        let (since, mut has_looked) = (now(), false);
        loop {
            let mut count = 0;
            while count < wanted && self.advance(&mut incoming, socket)? {
                count += incoming.opener.deliver(spans, count);
            }
            if count > 0 || incoming.has_ended {
                return Ok(count);
            }
            if incoming.is_cut {
                let reason = "the connection was cut: its end is missing";
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, reason));
            }
            // Records without content may come without end.
            let left = time.saturating_sub(now().saturating_sub(since));
            if left.is_zero() && has_looked {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            has_looked = true;
            let expected = wanted.saturating_add(more);
            incoming.is_cut = incoming.opener.receive(socket, expected, left)? == 0;
        }
    }

    /// See [`ByteStream::wait_readable`](crate::stream::byte_stream::ByteStream::wait_readable).
    ///
    /// A record that carries nothing for the caller does not count.
    pub(super) fn wait_readable(&self, socket: &KernelSocket, left: Duration) -> io::Result<bool> {
        self.check()?;
        let mut incoming = self.incoming();
        let (since, mut has_looked) = (now(), false);
        loop {
            if self.advance(&mut incoming, socket)?
                || incoming.has_ended
                || incoming.is_cut
                || incoming.opener.has_part()
            {
                return Ok(true);
            }
            let left = left.saturating_sub(now().saturating_sub(since));
            // Records without content may come without end.
            let is_late = left.is_zero() && has_looked;
            if is_late || !socket.wait_readable(left)? {
                return Ok(false);
            }
            has_looked = true;
            incoming.is_cut = incoming.opener.receive(socket, 1, Duration::ZERO)? == 0;
        }
    }

    /// Says that nothing more comes, if no thread sends now. The peer takes the end for a cut
    /// otherwise, which it is.
    pub(super) fn say_goodbye(&self, socket: &KernelSocket) {
        if !self.has_failed() {
            self.tell(socket, alert::CLOSE_NOTIFY);
        }
    }

    fn tell(&self, socket: &KernelSocket, alert: u8) {
        if let Ok(mut sealer) = self.sealer.try_lock()
            && !sealer.is_pending()
            && let Ok(record) = sealer.alert(alert)
            && !socket.send_at_once(&record)
        {
            // The peer has at most a part of a record, which it takes for a cut connection.
            self.has_failed.store(true, Ordering::Release);
        }
    }

    /// Decrypts records until there is plaintext. False if there is no whole record.
    fn advance(&self, incoming: &mut Incoming, socket: &KernelSocket) -> io::Result<bool> {
        while !incoming.opener.has_plain() && !incoming.has_ended {
            let opened = incoming.opener.open();
            let opened = opened.map_err(|invalid| self.fail(socket, invalid))?;
            match opened {
                Opened::Data => {}
                Opened::Incomplete => return Ok(false),
                Opened::Alert(alert::CLOSE_NOTIFY) => incoming.has_ended = true,
                Opened::Alert(alert) => {
                    self.has_failed.store(true, Ordering::Release);
                    return Err(alert::received(alert));
                }
                Opened::Handshake(messages) => {
                    self.take_messages(&mut incoming.opener, &messages)
                        .map_err(|invalid| self.fail(socket, invalid))?;
                }
            }
        }
        Ok(incoming.opener.has_plain())
    }

    /// Takes the messages of a record of the handshake that came after it.
    fn take_messages(&self, opener: &mut Opener, mut messages: &[u8]) -> Result<(), Invalid> {
        let unexpected = (alert::UNEXPECTED_MESSAGE, "it sent an unexpected handshake message");
        while let Some((&[typ, 0, high, low], rest)) = messages.split_first_chunk() {
            let bytes = usize::from(u16::from_le_bytes([low, high]));
            let (body, rest) = rest.split_at_checked(bytes).ok_or(unexpected)?;
            messages = rest;
            match (typ, body) {
                // The next record has the new key, so that nothing follows in this one.
                (KEY_UPDATE, [is_asked @ (0 | 1)]) if rest.is_empty() => {
                    let next = self.keys().next_decrypter();
                    let failed = |_| (alert::INTERNAL_ERROR, "its next key cannot be derived");
                    opener.update_key(next.map_err(failed)?);
                    if *is_asked == 1 {
                        self.owes_key_update.store(true, Ordering::Release);
                    }
                }
                (NEW_SESSION_TICKET, _) => {}
                _ => return Err(unexpected),
            }
        }
        if messages.is_empty() { Ok(()) } else { Err(unexpected) }
    }

    /// Ends the connection after a record that is not valid.
    fn fail(&self, socket: &KernelSocket, (alert, reason): Invalid) -> io::Error {
        self.has_failed.store(true, Ordering::Release);
        self.tell(socket, alert);
        io::Error::new(io::ErrorKind::InvalidData, reason)
    }

    fn incoming(&self) -> MutexGuard<'_, Incoming> {
        self.incoming.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn keys(&self) -> MutexGuard<'_, Keys> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
