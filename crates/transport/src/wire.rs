//! The bytes of messages: a header of fixed length with checksums, and the bodies. No I/O.
//!
//! `docs/transport-format.md` describes each field.

mod fields;
mod handshake;
mod question;

use cascade_block::checksum;
use thiserror::Error;

pub use handshake::{ANSWERS_QUESTIONS, Challenge, Hello, OfferedRegion, Welcome};
pub(crate) use question::pieces_of;
pub use question::{read_numbered, write_numbered};

use crate::limits::{
    CONNECTIONS_MAX, FRAME_BYTES_MAX, FRAME_PIECES_MAX, GEOMETRY_BYTES_MAX, NOTICE_BYTES_MAX,
};
use crate::piece::{Place, RegionId};

/// The protocol version of this build.
pub const VERSION: u16 = 1;
/// The oldest protocol version that this build supports.
pub const VERSION_MIN: u16 = 1;
/// Length of a header.
pub const HEADER_BYTES: usize = 48;
/// Bytes of one entry of the vector of a frame.
pub const ENTRY_BYTES: usize = 16;
/// Bytes of one checksum after a payload.
pub const CHECKSUM_BYTES: usize = 4;
/// Maximum length of a body.
pub const BODY_BYTES_MAX: usize = FRAME_PIECES_MAX * ENTRY_BYTES + NOTICE_BYTES_MAX;
/// Maximum length of a body that names regions: 65,536 fit.
pub const HANDSHAKE_BYTES_MAX: usize = 2 << 20;
/// Maximum length of a hello, which comes before its sender has shown that it knows the token. Its
/// geometry, its name and the numbers of its connections fit; the rest is for later versions.
const HELLO_BYTES_MAX: usize = GEOMETRY_BYTES_MAX + CONNECTIONS_MAX * 8 + (4 << 10);
/// Maximum length of a challenge, a proof or the reason for a refusal.
const SMALL_BYTES_MAX: usize = 4 << 10;

/// The first bytes of each message.
pub(crate) const MAGIC: [u8; 4] = *b"CSTP";
const CHECKSUM_AT: usize = HEADER_BYTES - CHECKSUM_BYTES;

/// Bytes from a peer that are no message of this protocol. The connection cannot go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum WireError {
    /// The bytes are not those of this protocol.
    #[error("these are not bytes of Cascade's transport")]
    Magic,
    /// A checksum does not match.
    #[error("the checksum of a {0} does not match")]
    Checksum(&'static str),
    /// A field is missing, out of range or unknown.
    #[error("the field {0} of a message is invalid")]
    Field(&'static str),
}

/// What a message is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Client, first: who it is. Body: [`Hello`].
    Hello = 1,
    /// Server: who it is, and a nonce. Body: [`Challenge`].
    Challenge = 2,
    /// Client: shows that it knows the token. Body: a tag of 32 bytes.
    Proof = 3,
    /// Server: the connection stands. Body: [`Welcome`].
    Welcome = 4,
    /// Server: the connection is refused. Body: the reason, a text.
    Refusal = 5,
    /// Client: entries, notice, payload and its checksums follow.
    Write = 16,
    /// Client: entries and notice follow; the server answers with [`Kind::Data`].
    Read = 17,
    /// Client: asks for the descriptor of a region, named by its one entry.
    Map = 18,
    /// Client: asks for queue pairs. Body: the address of its own.
    Link = 19,
    /// Client: asks a question. Body: the lengths of its targets, and a text.
    Ask = 20,
    /// Server: the frame succeeded, or `status` says why not.
    Done = 32,
    /// Server: payload of a read and its checksums follow.
    Data = 33,
    /// Server: the descriptor of a region comes with the header.
    Descriptor = 34,
    /// Server: its queue pairs are connected. Body: their address and its regions; if `status` is
    /// not 0, the reason why there are none.
    Linked = 35,
    /// Server: answers a question. Body: the targets of its blocks, and a text. Payload: those
    /// blocks.
    Answer = 36,
}

impl Kind {
    const ALL: [Self; 15] = [
        Self::Hello,
        Self::Challenge,
        Self::Proof,
        Self::Welcome,
        Self::Refusal,
        Self::Write,
        Self::Read,
        Self::Map,
        Self::Link,
        Self::Ask,
        Self::Done,
        Self::Data,
        Self::Descriptor,
        Self::Linked,
        Self::Answer,
    ];

    fn of(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u8 == code)
    }

    fn body_bytes_max(self) -> usize {
        match self {
            Self::Write | Self::Read | Self::Map => BODY_BYTES_MAX,
            Self::Ask | Self::Answer => question::BODY_BYTES_MAX,
            Self::Done | Self::Data | Self::Descriptor => 0,
            Self::Challenge | Self::Proof | Self::Refusal => SMALL_BYTES_MAX,
            Self::Hello => HELLO_BYTES_MAX,
            Self::Welcome | Self::Link | Self::Linked => HANDSHAKE_BYTES_MAX,
        }
    }
}

/// The header of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// What follows.
    pub kind: Kind,
    /// Of a frame: 1 if more frames of its batch follow. A write is answered with its last frame,
    /// of a read each frame is. Of an answer: 0, or the code of a refusal.
    pub status: u8,
    /// Counts the frames of a connection from 1. An answer has the number of its frame.
    pub frame: u64,
    /// Entries, of 16 bytes each, at the start of the body.
    pub pieces: u32,
    /// Bytes of the body: the entries and the notice.
    pub body_bytes: u32,
    /// Bytes of the payload that follows the body. Its checksums, four bytes a piece, follow it.
    pub payload_bytes: u64,
    /// Of a refusal: the piece that was refused.
    pub piece: u32,
    /// CRC-32C of the body.
    pub body_checksum: u32,
}

impl Header {
    /// A header without body or payload.
    pub fn new(kind: Kind, frame: u64) -> Self {
        Self {
            kind,
            status: 0,
            frame,
            pieces: 0,
            body_bytes: 0,
            payload_bytes: 0,
            piece: 0,
            body_checksum: checksum(&[]),
        }
    }

    /// The header of a message with this body.
    ///
    /// # Panics
    /// If the body is longer than 4 GiB.
    pub fn with_body(mut self, body: &[u8]) -> Self {
        self.body_bytes = u32::try_from(body.len()).expect("bodies keep to their limit");
        self.body_checksum = checksum(body);
        self
    }

    /// The bytes of the header.
    pub fn to_bytes(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4] = self.kind as u8;
        bytes[5] = self.status;
        bytes[8..16].copy_from_slice(&self.frame.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.pieces.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.body_bytes.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.payload_bytes.to_le_bytes());
        bytes[32..36].copy_from_slice(&self.piece.to_le_bytes());
        bytes[40..44].copy_from_slice(&self.body_checksum.to_le_bytes());
        let sum = checksum(&bytes[..CHECKSUM_AT]);
        bytes[CHECKSUM_AT..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Reads a header and checks its limits, so that no length of it needs another check.
    pub fn parse(bytes: &[u8; HEADER_BYTES]) -> Result<Self, WireError> {
        if bytes[..4] != MAGIC {
            return Err(WireError::Magic);
        }
        if checksum(&bytes[..CHECKSUM_AT]) != u32_at(bytes, CHECKSUM_AT) {
            return Err(WireError::Checksum("header"));
        }
        let header = Self {
            kind: Kind::of(bytes[4]).ok_or(WireError::Field("kind"))?,
            status: bytes[5],
            frame: u64_at(bytes, 8),
            pieces: u32_at(bytes, 16),
            body_bytes: u32_at(bytes, 20),
            payload_bytes: u64_at(bytes, 24),
            piece: u32_at(bytes, 32),
            body_checksum: u32_at(bytes, 40),
        };
        header.check()?;
        Ok(header)
    }

    fn check(&self) -> Result<(), WireError> {
        let has_entries = matches!(self.kind, Kind::Write | Kind::Read | Kind::Map);
        let has_pieces = has_entries || matches!(self.kind, Kind::Data | Kind::Answer);
        let has_payload = matches!(self.kind, Kind::Write | Kind::Data | Kind::Answer);
        let pieces = self.pieces as usize;
        let body_bytes = self.body_bytes as usize;
        let entries_bytes = if has_entries { pieces * ENTRY_BYTES } else { 0 };
        if pieces > FRAME_PIECES_MAX || (pieces > 0 && !has_pieces) {
            return Err(WireError::Field("pieces"));
        }
        if body_bytes > self.kind.body_bytes_max() || body_bytes < entries_bytes {
            return Err(WireError::Field("body_bytes"));
        }
        if has_entries && body_bytes - entries_bytes > NOTICE_BYTES_MAX {
            return Err(WireError::Field("body_bytes"));
        }
        if self.payload_bytes > FRAME_BYTES_MAX || (self.payload_bytes > 0 && !has_payload) {
            return Err(WireError::Field("payload_bytes"));
        }
        Ok(())
    }

    /// Bytes of the notice in the body of a frame.
    pub fn notice_bytes(&self) -> usize {
        self.body_bytes as usize - self.pieces as usize * ENTRY_BYTES
    }
}

/// Appends the entry of a piece: where its bytes are at the peer that receives the frame.
pub(crate) fn write_entry(place: Place, bytes: u64, body: &mut Vec<u8>) {
    let bytes = u32::try_from(bytes).expect("the plan splits pieces");
    body.extend_from_slice(&place.region.0.to_le_bytes());
    body.extend_from_slice(&bytes.to_le_bytes());
    body.extend_from_slice(&place.offset.to_le_bytes());
}

/// The places and lengths of the entries at the start of a body.
pub fn entries(body: &[u8], pieces: u32) -> impl Iterator<Item = (Place, u64)> {
    let (entries, _) = body.as_chunks::<ENTRY_BYTES>();
    entries.iter().take(pieces as usize).map(|entry| {
        let place = Place { region: RegionId(u32_at(entry, 0)), offset: u64_at(entry, 8) };
        (place, u64::from(u32_at(entry, 4)))
    })
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn frame() -> Header {
        let header = Header {
            status: 1,
            pieces: 2,
            payload_bytes: 4096,
            piece: 7,
            ..Header::new(Kind::Write, 0x0102_0304_0506_0708)
        };
        header.with_body(&[5; 40])
    }

    #[test]
    fn a_notice_beyond_its_limit_is_refused() {
        for (pieces, longer) in [(0_u32, 0), (3, 0), (0, 1), (3, 1)] {
            let bytes = pieces as usize * ENTRY_BYTES + NOTICE_BYTES_MAX + longer;
            let header = Header { pieces, ..Header::new(Kind::Write, 1) };
            let parsed = Header::parse(&header.with_body(&vec![0; bytes]).to_bytes());
            assert_eq!(parsed.is_ok(), longer == 0, "{pieces} pieces, {longer} more");
        }
    }

    #[test]
    fn a_header_comes_back() {
        assert_eq!(Header::parse(&frame().to_bytes()), Ok(frame()));
        assert_eq!(frame().notice_bytes(), 8);
    }

    #[test]
    fn a_header_has_the_documented_bytes() {
        let stored = include_str!("../../../testdata/transport/write-header.hex").trim();
        let bytes = stored.as_bytes().chunks(2).map(|two| {
            let digits = std::str::from_utf8(two).unwrap();
            u8::from_str_radix(digits, 16).unwrap()
        });
        let bytes: Vec<_> = bytes.collect();
        assert_eq!(
            frame().to_bytes()[..],
            bytes,
            "docs/transport-format.md describes the bytes; a change needs a new version"
        );
    }

    #[test]
    fn any_flipped_bit_of_a_header_is_found() {
        for bit in 0..HEADER_BYTES * 8 {
            let mut bytes = frame().to_bytes();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(Header::parse(&bytes).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn lengths_beyond_the_limits_are_refused() {
        let refused = |header: Header, field| {
            assert_eq!(Header::parse(&header.to_bytes()), Err(WireError::Field(field)));
        };
        refused(Header { pieces: 8193, ..frame() }, "pieces");
        refused(Header { pieces: 3, ..frame() }, "body_bytes");
        refused(Header { body_bytes: u32::MAX, ..frame() }, "body_bytes");
        refused(Header { payload_bytes: FRAME_BYTES_MAX + 1, ..frame() }, "payload_bytes");
        refused(Header { kind: Kind::Read, ..frame() }, "payload_bytes");
        refused(Header { kind: Kind::Done, ..frame() }, "pieces");
    }

    proptest! {
        #[test]
        fn noise_is_refused_without_a_panic(bytes in prop::array::uniform32(any::<u8>())) {
            let mut header = [0; HEADER_BYTES];
            header[..32].copy_from_slice(&bytes);
            prop_assert!(Header::parse(&header).is_err());
        }
    }
}
