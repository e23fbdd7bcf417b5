//! Frames: a header of fixed length with a checksum, then the body of one message.

use std::fmt;

use cascade_block::checksum;

use crate::WireError;

/// The protocol version of this build.
pub const VERSION: u16 = 1;
/// The oldest protocol version that this build supports.
pub const VERSION_MIN: u16 = 1;
/// Call number of a refusal that the node sends before it has read a call. Clients count from 1.
pub const UNREAD_CALL: u32 = 0;
/// Length of a header.
pub const HEADER_BYTES: usize = 24;
/// Maximum length of a body.
pub const BODY_BYTES_MAX: u32 = 4 << 20;

const MAGIC: [u8; 4] = *b"CSCD";
const CHECKSUM_AT: usize = 20;
/// The body begins with a trace context.
const HAS_TRACE: u16 = 1;
/// The caller records that trace.
const IS_SAMPLED: u16 = 2;
const TRACE_BYTES: usize = 24;

/// A W3C trace context: the trace that a call belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceContext {
    /// The trace id.
    pub trace: [u8; 16],
    /// The caller's span id.
    pub span: [u8; 8],
    /// Whether the trace is recorded, by the caller and the node.
    pub is_sampled: bool,
}

impl TraceContext {
    /// Parses a `traceparent` header; `None` if it is invalid, as the standard requires.
    pub fn parse(traceparent: &str) -> Option<Self> {
        let mut fields = traceparent.trim().split('-');
        let version = hex::<1>(fields.next()?)?[0];
        let trace = hex::<16>(fields.next()?)?;
        let span = hex::<8>(fields.next()?)?;
        let flags = hex::<1>(fields.next()?)?[0];
        let has_more = fields.next().is_some();
        let is_valid =
            // Version 0 has exactly these fields; a later version may append some. Version 255 and
            // ids of zeroes are invalid.
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
    // Lower case only, as the standard requires. `from_str_radix` alone would also accept a sign.
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

/// The fields before a frame's body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameHeader {
    /// The kind of message.
    pub kind: u16,
    /// Call number, chosen by the caller and repeated in the answer.
    pub call: u32,
    flags: u16,
    body_bytes: u32,
    checksum: u32,
}

/// One frame with a valid checksum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frame<'a> {
    /// Its header.
    pub header: FrameHeader,
    /// The trace that the call belongs to.
    pub trace: Option<TraceContext>,
    /// The message.
    pub body: &'a [u8],
}

/// Length of the frame at the start of `bytes`, header included; `None` until its header is
/// complete.
pub fn frame_length(bytes: &[u8]) -> Result<Option<usize>, WireError> {
    match bytes.first_chunk::<HEADER_BYTES>() {
        // The header is checked before the body arrives, so a receiver never waits for more than
        // the maximum. Its checksum is checked with the whole frame.
        Some(header) => Ok(Some(HEADER_BYTES + FrameHeader::read(header)?.body_bytes as usize)),
        None => Ok(None),
    }
}

impl FrameHeader {
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
        let are_flags_valid = matches!(flags, 0 | HAS_TRACE) || flags == HAS_TRACE | IS_SAMPLED;
        if !are_flags_valid || reserved != 0 {
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
    /// Appends a frame to `into`; `body` appends the message. Appends nothing if the message is
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
        // The length, which is known only after the body.
        into.extend_from_slice(&[0; 4]);
        into.extend_from_slice(&call.to_le_bytes());
        let flags = trace.map_or(0, TraceContext::flags);
        into.extend_from_slice(&flags.to_le_bytes());
        // Two reserved bytes, and the checksum, which comes last.
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
        // Before the checksum, which covers it.
        into[start + 8..start + 12].copy_from_slice(&length.to_le_bytes());
        let sum = Self::checksum_of(&into[start..]);
        into[start + CHECKSUM_AT..start + HEADER_BYTES].copy_from_slice(&sum.to_le_bytes());
        Ok(())
    }

    /// Reads the frame in `bytes`, which has the length that [`frame_length`] returned.
    pub fn read(bytes: &'a [u8]) -> Result<Self, WireError> {
        let (head, body) = bytes.split_first_chunk().ok_or(WireError::Field("length"))?;
        let header = FrameHeader::read(head)?;
        if header.body_bytes as usize != body.len() {
            return Err(WireError::Field("length"));
        }
        if Self::checksum_of(bytes) != header.checksum {
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

    /// The checksum of the header before its checksum field, and of the body.
    fn checksum_of(frame: &[u8]) -> u32 {
        // Two sums, because the parts are not contiguous. The rotation makes their order matter.
        checksum(&frame[..CHECKSUM_AT]) ^ checksum(&frame[HEADER_BYTES..]).rotate_left(1)
    }
}
