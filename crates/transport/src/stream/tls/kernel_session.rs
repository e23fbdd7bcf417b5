//! An established connection whose records the kernel encrypts and decrypts.

use std::io::{self, ErrorKind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use rustls::{ConnectionTrafficSecrets, ExtractedSecrets};

use super::alert;
use super::keys::Keys;
use crate::region::Span;
use crate::stream::byte_stream::ByteStream as _;
use crate::stream::kernel::KernelSocket;
use crate::stream::kernel_tls::{RecordKey, TlsDirection};

/// More records than one call makes: a span may begin a record of its own.
const RECORDS_OF_CALL_MAX: u64 = 4096;
/// Content types of records.
const ALERT: u8 = 21;
const HANDSHAKE: u8 = 22;

/// An established connection. The kernel keeps the keys.
///
/// Only Linux 6.14 and later can replace a key, so no key is replaced here: the connection ends
/// before its key has encrypted too much.
#[derive(Debug)]
pub(super) struct KernelSession {
    /// Records after which nothing more is sent.
    key_records_max: u64,
    /// Calls that may send before the kernel is asked how many records it has made.
    unchecked_calls: AtomicU64,
    /// So few records are left that no new batch should start.
    is_nearly_used_up: AtomicBool,
    has_ended: AtomicBool,
    has_failed: AtomicBool,
}

impl KernelSession {
    /// Gives the keys to the kernel. `None` if it does not do TLS with this cipher; the socket is
    /// then as before.
    pub(super) fn start(
        socket: &KernelSocket,
        secrets: &ExtractedSecrets,
        keys: &Keys,
        key_records_max: u64,
    ) -> io::Result<Option<Self>> {
        let (Some(sending), Some(receiving)) = (key_of(&secrets.tx), key_of(&secrets.rx)) else {
            return Ok(None);
        };
        if !socket.attach_tls() || socket.set_tls_key(TlsDirection::Send, &sending).is_err() {
            return Ok(None);
        }
        // There is no way back: what is sent from here is encrypted.
        socket.set_tls_key(TlsDirection::Receive, &receiving)?;
        let limit = key_records_max.min(keys.suite()?.common.confidentiality_limit);
        Ok(Some(Self {
            key_records_max: limit,
            unchecked_calls: AtomicU64::new(0),
            is_nearly_used_up: AtomicBool::new(false),
            has_ended: AtomicBool::new(false),
            has_failed: AtomicBool::new(false),
        }))
    }

    /// Whether no batch should start any more.
    pub(super) fn is_over(&self) -> bool {
        self.has_failed.load(Ordering::Acquire) || self.is_nearly_used_up.load(Ordering::Acquire)
    }

    /// Ends the connection when its key has encrypted as much as it may. Only one thread sends.
    fn check_key(&self, socket: &KernelSocket) -> io::Result<()> {
        let unchecked = self.unchecked_calls.load(Ordering::Relaxed);
        if unchecked > 0 {
            self.unchecked_calls.store(unchecked - 1, Ordering::Relaxed);
            return Ok(());
        }
        let records = socket.tls_records_sent()?;
        let left = self.key_records_max.saturating_sub(records);
        if left <= self.key_records_max / 8 {
            self.is_nearly_used_up.store(true, Ordering::Release);
        }
        if left == 0 {
            let reason = "its key is used up, which the kernel cannot replace: connect again";
            return Err(io::Error::other(reason));
        }
        self.unchecked_calls.store(left / 8 / RECORDS_OF_CALL_MAX, Ordering::Relaxed);
        Ok(())
    }

    pub(super) fn send_some(&self, socket: &KernelSocket, spans: &[Span]) -> io::Result<usize> {
        self.check_key(socket)?;
        socket.send_some(spans)
    }

    pub(super) fn receive_some(
        &self,
        socket: &KernelSocket,
        spans: &[Span],
        time: Duration,
    ) -> io::Result<usize> {
        if self.has_ended.load(Ordering::Acquire) {
            return Ok(0);
        }
        // What the kernel counts are bytes of records, which it decrypts when they are whole.
        match socket.receive_spans(spans, 1, time) {
            Ok(0) => {
                self.has_failed.store(true, Ordering::Release);
                let reason = "the connection was cut: its end is missing";
                Err(io::Error::new(ErrorKind::UnexpectedEof, reason))
            }
            // A record without bytes for the caller is next. It cannot get into the spans.
            Err(error) if error.raw_os_error() == Some(libc::EIO) => self.take_record(socket),
            Err(error) if error.raw_os_error() == Some(libc::EBADMSG) => {
                self.has_failed.store(true, Ordering::Release);
                socket.send_alert(&alert::encode(alert::BAD_RECORD_MAC));
                Err(io::Error::new(ErrorKind::InvalidData, "a record was altered"))
            }
            other => other,
        }
    }

    /// Takes an alert or a message of the handshake.
    fn take_record(&self, socket: &KernelSocket) -> io::Result<usize> {
        let mut record = [0; 512];
        let (content, bytes) = socket.receive_record(&mut record)?;
        match (content, &record[..bytes]) {
            (ALERT, [_, alert::CLOSE_NOTIFY]) => {
                self.has_ended.store(true, Ordering::Release);
                return Ok(0);
            }
            (ALERT, [_, alert]) => {
                self.has_failed.store(true, Ordering::Release);
                return Err(alert::received(*alert));
            }
            _ => {}
        }
        self.has_failed.store(true, Ordering::Release);
        socket.send_alert(&alert::encode(alert::UNEXPECTED_MESSAGE));
        Err(io::Error::other(if content == HANDSHAKE {
            "it replaced its key, which this kernel does not follow: connect again"
        } else {
            "it sent an unknown record"
        }))
    }

    /// Says that nothing more comes.
    pub(super) fn say_goodbye(&self, socket: &KernelSocket) {
        if !self.has_failed.load(Ordering::Acquire) {
            socket.send_alert(&alert::encode(alert::CLOSE_NOTIFY));
        }
    }
}

/// The key in the form that the kernel takes. `None` for ciphers other than AES-128-GCM, which both
/// sides prefer.
fn key_of((sequence, secrets): &(u64, ConnectionTrafficSecrets)) -> Option<RecordKey> {
    let ConnectionTrafficSecrets::Aes128Gcm { key, iv } = secrets else {
        return None;
    };
    let (key, iv) = (key.as_ref().try_into().ok()?, iv.as_ref().try_into().ok()?);
    Some(RecordKey { key, iv, sequence: *sequence })
}
