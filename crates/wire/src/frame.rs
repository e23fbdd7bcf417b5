//! Frames: a checked header of fixed length, then the body of one message.

use std::fmt;

use cascade_block::checksum;

use crate::WireError;

/// The protocol that this build speaks first.
pub const VERSION: u16 = 1;
/// The oldest that it still understands.
pub const VERSION_MIN: u16 = 1;
/// Number of the call that a refusal answers where the node has read none. Clients count from 1.
pub const UNREAD: u32 = 0;
/// Length of a header.
pub const HEADER_BYTES: usize = 24;
/// Most bytes after the header.
pub const BODY_BYTES_MAX: u32 = 4 << 20;

const MAGIC: [u8; 4] = *b"CSCD";
const CHECKSUM_AT: usize = 20;
/// The body begins with a trace context.
const HAS_TRACE: u16 = 1;
/// The caller records that trace.
const IS_SAMPLED: u16 = 2;
const TRACE_BYTES: usize = 24;

/// Whose work a call is part of, as W3C trace context has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceContext {
    /// The whole trace.
    pub trace: [u8; 16],
    /// The span that makes the call.
    pub span: [u8; 8],
    /// Whether the caller records it; if not, nobody else does.
    pub is_sampled: bool,
}

impl TraceContext {
    /// Reads a `traceparent` header; none if it is not one, as the standard asks.
    pub fn parse(traceparent: &str) -> Option<Self> {
        let mut fields = traceparent.trim().split('-');
        let version = hex::<1>(fields.next()?)?[0];
        let trace = hex::<16>(fields.next()?)?;
        let span = hex::<8>(fields.next()?)?;
        let flags = hex::<1>(fields.next()?)?[0];
        let has_more = fields.next().is_some();
        let is_valid =
            version != 0xff && (version != 0 || !has_more) && trace != [0; 16] && span != [0; 8];
        is_valid.then_some(Self { trace, span, is_sampled: flags & 1 == 1 })
    }

    const fn flags(self) -> u16 {
        if self.is_sampled { HAS_TRACE | IS_SAMPLED } else { HAS_TRACE }
    }
}

impl fmt::Display for TraceContext {
    /// Writes a `traceparent` header.
    fn fmt(&self, into: &mut fmt::Formatter<'_>) -> fmt::Result {
        into.write_str("00-")?;
        self.trace.iter().try_for_each(|byte| write!(into, "{byte:02x}"))?;
        into.write_str("-")?;
        self.span.iter().try_for_each(|byte| write!(into, "{byte:02x}"))?;
        write!(into, "-{:02x}", u8::from(self.is_sampled))
    }
}

fn hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let is_hex = |digit: u8| digit.is_ascii_digit() || (b'a'..=b'f').contains(&digit);
    if text.len() != 2 * N || !text.bytes().all(is_hex) {
        return None;
    }
    let mut bytes = [0; N];
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(text.get(2 * at..2 * at + 2)?, 16).ok()?;
    }
    Some(bytes)
}

/// What a frame says before its body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// What kind of message the body is.
    pub kind: u16,
    /// Chosen by the caller; its answer carries the same.
    pub call: u32,
    flags: u16,
    body_bytes: u32,
    checksum: u32,
}

/// One frame, checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frame<'a> {
    /// Its header.
    pub header: Header,
    /// Whose work the call is part of.
    pub trace: Option<TraceContext>,
    /// The message.
    pub body: &'a [u8],
}

/// Length of the frame that `bytes` begin with, header included, once its header is complete.
pub fn frame_length(bytes: &[u8]) -> Result<Option<usize>, WireError> {
    match bytes.first_chunk::<HEADER_BYTES>() {
        Some(header) => Ok(Some(HEADER_BYTES + Header::read(header)?.body_bytes as usize)),
        None => Ok(None),
    }
}

impl Header {
    fn read(bytes: &[u8; HEADER_BYTES]) -> Result<Self, WireError> {
        let u16_at = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let u32_at = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let magic = [bytes[0], bytes[1], bytes[2], bytes[3]];
        if magic != MAGIC {
            return Err(WireError::Magic(magic));
        }
        let version = u16_at(4);
        if !(VERSION_MIN..=VERSION).contains(&version) {
            return Err(WireError::Version(version));
        }
        let (flags, reserved) = (u16_at(16), u16_at(18));
        let is_known = matches!(flags, 0 | HAS_TRACE) || flags == HAS_TRACE | IS_SAMPLED;
        if !is_known || reserved != 0 {
            return Err(WireError::Field("flags"));
        }
        let body_bytes = u32_at(8);
        if body_bytes > BODY_BYTES_MAX {
            return Err(WireError::TooLong(body_bytes));
        }
        Ok(Self {
            kind: u16_at(6),
            call: u32_at(12),
            flags,
            body_bytes,
            checksum: u32_at(CHECKSUM_AT),
        })
    }
}

impl<'a> Frame<'a> {
    /// Appends a frame to `into`; `body` appends the message. Nothing is appended if that is
    /// longer than [`BODY_BYTES_MAX`].
    pub fn write(
        into: &mut Vec<u8>,
        kind: u16,
        call: u32,
        trace: Option<TraceContext>,
        body: impl FnOnce(&mut Vec<u8>),
    ) -> Result<(), WireError> {
        let start = into.len();
        into.extend_from_slice(&MAGIC);
        into.extend_from_slice(&VERSION.to_le_bytes());
        into.extend_from_slice(&kind.to_le_bytes());
        into.extend_from_slice(&[0; 4]);
        into.extend_from_slice(&call.to_le_bytes());
        let flags = trace.map_or(0, TraceContext::flags);
        into.extend_from_slice(&flags.to_le_bytes());
        into.extend_from_slice(&[0; 6]);
        debug_assert_eq!(into.len() - start, HEADER_BYTES);
        if let Some(trace) = trace {
            into.extend_from_slice(&trace.trace);
            into.extend_from_slice(&trace.span);
        }
        body(into);
        let body_bytes = into.len() - start - HEADER_BYTES;
        let length = u32::try_from(body_bytes).unwrap_or(u32::MAX);
        if length > BODY_BYTES_MAX {
            into.truncate(start);
            return Err(WireError::TooLong(length));
        }
        into[start + 8..start + 12].copy_from_slice(&length.to_le_bytes());
        let sum = Self::sum(&into[start..]);
        into[start + CHECKSUM_AT..start + HEADER_BYTES].copy_from_slice(&sum.to_le_bytes());
        Ok(())
    }

    /// Reads the frame that `bytes` hold exactly, as [`frame_length`] measured it.
    pub fn read(bytes: &'a [u8]) -> Result<Self, WireError> {
        let (head, body) = bytes.split_first_chunk().ok_or(WireError::Field("length"))?;
        let header = Header::read(head)?;
        if header.body_bytes as usize != body.len() {
            return Err(WireError::Field("length"));
        }
        if Self::sum(bytes) != header.checksum {
            return Err(WireError::Checksum);
        }
        if header.flags & HAS_TRACE == 0 {
            return Ok(Self { header, trace: None, body });
        }
        let (trace, body) = body.split_at_checked(TRACE_BYTES).ok_or(WireError::Field("trace"))?;
        let (id, parent) = trace.split_at(16);
        let trace = TraceContext {
            trace: id.try_into().map_err(|_| WireError::Field("trace"))?,
            span: parent.try_into().map_err(|_| WireError::Field("trace"))?,
            is_sampled: header.flags & IS_SAMPLED != 0,
        };
        Ok(Self { header, trace: Some(trace), body })
    }

    /// Of the header up to the checksum, and of the body.
    fn sum(frame: &[u8]) -> u32 {
        // Two sums instead of one over both parts: the parts do not lie side by side.
        checksum(&frame[..CHECKSUM_AT]) ^ checksum(&frame[HEADER_BYTES..]).rotate_left(1)
    }
}
