//! Encrypts records and sends them: one direction of a connection.

use std::collections::VecDeque;
use std::fmt;
use std::io;

use rustls::crypto::cipher::{MessageEncrypter, OutboundChunks, OutboundPlainMessage};
use rustls::{ContentType, ProtocolVersion};

use super::alert;
use crate::region::Span;
use crate::stream::byte_stream::{ByteStream as _, SPANS_MAX};
use crate::stream::kernel::KernelSocket;

/// The most plaintext of a record.
const RECORD_BYTES: usize = 16 << 10;
/// Plaintext that is encrypted before it is sent: its records stay in a core's cache.
const BATCH_BYTES: usize = 128 << 10;
/// The message that precedes the first record with a new key. It does not ask for one of the peer.
const KEY_UPDATE: [u8; 5] = [24, 0, 0, 1, 0];

/// Encrypts records and sends them.
pub(super) struct Sealer {
    encrypter: Box<dyn MessageEncrypter>,
    /// Records of this key so far.
    sequence: u64,
    /// Encrypted records that were not sent whole.
    pending: VecDeque<Record>,
    /// Bytes of the first of them that were sent.
    sent: usize,
}

struct Record {
    bytes: Vec<u8>,
    /// Bytes of the caller's that it stands for.
    plain: usize,
}

impl fmt::Debug for Sealer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pending = self.pending.len();
        write!(f, "Sealer({} records, {pending} of them pending)", self.sequence)
    }
}

impl Sealer {
    pub(super) fn new(encrypter: Box<dyn MessageEncrypter>, sequence: u64) -> Self {
        Self { encrypter, sequence, pending: VecDeque::new(), sent: 0 }
    }

    /// Whether records wait for being sent.
    pub(super) fn is_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Records of this key so far.
    pub(super) fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Encrypts the first bytes of the spans.
    pub(super) fn seal(&mut self, spans: &[Span]) -> io::Result<()> {
        let (mut parts, mut filled, mut left) = (vec![], 0, BATCH_BYTES);
        for span in &spans[..spans.len().min(SPANS_MAX)] {
            let mut rest = span.as_slice();
            while !rest.is_empty() && left > 0 {
                let (part, more) = rest.split_at(rest.len().min(RECORD_BYTES - filled).min(left));
                parts.push(part);
                (filled, left, rest) = (filled + part.len(), left - part.len(), more);
                if filled == RECORD_BYTES {
                    self.push(ContentType::ApplicationData, &parts, filled)?;
                    parts.clear();
                    filled = 0;
                }
            }
        }
        if filled > 0 {
            self.push(ContentType::ApplicationData, &parts, filled)?;
        }
        Ok(())
    }

    /// Announces a new key and uses it from then on.
    pub(super) fn update_key(&mut self, next: Box<dyn MessageEncrypter>) -> io::Result<()> {
        self.push(ContentType::Handshake, &[&KEY_UPDATE], 0)?;
        self.encrypter = next;
        self.sequence = 0;
        Ok(())
    }

    /// The bytes of an alert. The caller sends them at once or never.
    pub(super) fn alert(&mut self, alert: u8) -> io::Result<Vec<u8>> {
        self.encrypt(ContentType::Alert, &[&alert::encode(alert)])
    }

    fn push(&mut self, typ: ContentType, parts: &[&[u8]], plain: usize) -> io::Result<()> {
        let bytes = self.encrypt(typ, parts)?;
        self.pending.push_back(Record { bytes, plain });
        Ok(())
    }

    fn encrypt(&mut self, typ: ContentType, parts: &[&[u8]]) -> io::Result<Vec<u8>> {
        let payload = OutboundChunks::new(parts);
        let plain = OutboundPlainMessage { typ, version: ProtocolVersion::TLSv1_3, payload };
        let sealed = self.encrypter.encrypt(plain, self.sequence).map_err(io::Error::other)?;
        // A number that is used twice would give away the key: `update_key` comes long before.
        self.sequence = self.sequence.checked_add(1).expect("a key is replaced before");
        Ok(sealed.encode())
    }

    /// Sends pending records. Returns the caller's bytes in those that were sent whole.
    pub(super) fn send(&mut self, socket: &KernelSocket) -> io::Result<usize> {
        let mut spans: Vec<_> = self.pending.iter().map(|it| Span::of_bytes(&it.bytes)).collect();
        if let Some(first) = spans.first_mut() {
            *first = first.after(self.sent);
        }
        self.sent += socket.send_some(&spans)?;
        let mut plain = 0;
        while let Some(first) = self.pending.front()
            && first.bytes.len() <= self.sent
        {
            self.sent -= first.bytes.len();
            plain += first.plain;
            self.pending.pop_front();
        }
        Ok(plain)
    }
}
