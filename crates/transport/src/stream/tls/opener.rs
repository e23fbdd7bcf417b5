//! Receives records and decrypts them: the other direction of a connection.

use std::fmt;
use std::io;
use std::ops::Range;
use std::time::Duration;

use rustls::ContentType;
use rustls::ProtocolVersion;
use rustls::crypto::cipher::{InboundOpaqueMessage, MessageDecrypter};

use super::alert;
use crate::region::Span;
use crate::stream::kernel::KernelSocket;

/// Bytes of the header of a record.
pub(super) const HEADER_BYTES: usize = 5;
/// The most bytes of a record after its header (RFC 8446, 5.2).
pub(super) const PAYLOAD_BYTES_MAX: usize = (16 << 10) + 256;
/// Bytes that are received at a time.
const BUFFER_BYTES: usize = 256 << 10;

/// Receives records and decrypts them.
pub(super) struct Opener {
    decrypter: Box<dyn MessageDecrypter>,
    /// Records of this key so far.
    sequence: u64,
    buffer: Vec<u8>,
    /// Bytes that were received and not decrypted yet.
    received: Range<usize>,
    /// Bytes that were decrypted and not given to the caller yet.
    plain: Range<usize>,
}

/// What a record was.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Opened {
    /// Bytes for the caller, perhaps none.
    Data,
    /// An alert.
    Alert(u8),
    /// The messages of a handshake record.
    Handshake(Vec<u8>),
    /// There is no whole record.
    Incomplete,
}

/// A record that ends the connection: the alert for the peer, and the reason.
pub(super) type Invalid = (u8, &'static str);

impl fmt::Debug for Opener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (received, plain) = (self.received.len(), self.plain.len());
        write!(f, "Opener({} records, {received} bytes, {plain} of plaintext)", self.sequence)
    }
}

impl Opener {
    pub(super) fn new(decrypter: Box<dyn MessageDecrypter>, sequence: u64) -> Self {
        let buffer = vec![0; BUFFER_BYTES];
        Self { decrypter, sequence, buffer, received: 0..0, plain: 0..0 }
    }

    /// Whether decrypted bytes wait for the caller.
    pub(super) fn has_plain(&self) -> bool {
        !self.plain.is_empty()
    }

    /// Whether a part of a record was received.
    pub(super) fn has_part(&self) -> bool {
        !self.received.is_empty()
    }

    /// Moves decrypted bytes to the spans from their byte `at` on. Returns how many.
    pub(super) fn deliver(&mut self, spans: &[Span], mut at: usize) -> usize {
        let before = self.plain.start;
        for span in spans {
            if at >= span.bytes() {
                at -= span.bytes();
                continue;
            }
            let free = span.after(at);
            let count = free.bytes().min(self.plain.len());
            free.fill_start(&self.buffer[self.plain.start..][..count]);
            self.plain.start += count;
            if self.plain.is_empty() {
                break;
            }
            at = 0;
        }
        self.plain.start - before
    }

    /// Decrypts the next record, if all of it is there. That of the last one was delivered.
    pub(super) fn open(&mut self) -> Result<Opened, Invalid> {
        let Some(&[typ, major, _, high, low]) = self.buffer[self.received.clone()].first_chunk()
        else {
            return Ok(Opened::Incomplete);
        };
        // What is not encrypted is not part of the connection.
        if ContentType::from(typ) != ContentType::ApplicationData || major != 3 {
            return Err((alert::UNEXPECTED_MESSAGE, "it sent a record that is not encrypted"));
        }
        let bytes = usize::from(u16::from_le_bytes([low, high]));
        if bytes > PAYLOAD_BYTES_MAX {
            return Err((alert::RECORD_OVERFLOW, "it sent a record that is too long"));
        }
        let start = self.received.start + HEADER_BYTES;
        if start + bytes > self.received.end {
            return Ok(Opened::Incomplete);
        }
        let sealed = &mut self.buffer[start..start + bytes];
        let (typ, version) = (ContentType::ApplicationData, ProtocolVersion::TLSv1_2);
        let sealed = InboundOpaqueMessage::new(typ, version, sealed);
        let opened = self.decrypter.decrypt(sealed, self.sequence);
        let opened = opened.map_err(|_| (alert::BAD_RECORD_MAC, "a record was altered"))?;
        self.sequence += 1;
        let record = match opened.typ {
            ContentType::ApplicationData => {
                // It was decrypted in place.
                self.plain = start..start + opened.payload.len();
                Opened::Data
            }
            ContentType::Alert => match opened.payload {
                [_, alert] => Opened::Alert(*alert),
                _ => return Err((alert::UNEXPECTED_MESSAGE, "it sent an invalid alert")),
            },
            ContentType::Handshake => Opened::Handshake(opened.payload.to_vec()),
            _ => return Err((alert::UNEXPECTED_MESSAGE, "it sent an unknown record")),
        };
        self.received.start = start + bytes;
        Ok(record)
    }

    /// Decrypts the following records with another key.
    pub(super) fn update_key(&mut self, next: Box<dyn MessageDecrypter>) {
        self.decrypter = next;
        self.sequence = 0;
    }

    /// Receives what has come. Returns how many bytes, 0 at the end of the socket's bytes. May wait
    /// until all of so many bytes of plaintext have come, which must come.
    pub(super) fn receive(
        &mut self,
        socket: &KernelSocket,
        plain: usize,
        time: Duration,
    ) -> io::Result<usize> {
        debug_assert!(self.plain.is_empty(), "all plaintext was delivered");
        self.buffer.copy_within(self.received.clone(), 0);
        self.received = 0..self.received.len();
        // A record is longer than its plaintext.
        let expected = plain.saturating_sub(self.received.len());
        let into = &mut self.buffer[self.received.end..];
        let count = socket.receive_available(into, expected, time)?;
        self.received.end += count;
        Ok(count)
    }
}
