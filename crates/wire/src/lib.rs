//! The protocol between a worker process and its node: frames, messages, and where the
//! socket is. No I/O, no state.
//!
//! `docs/wire-protocol.md` has every byte. All integers are little endian.

mod answer;
mod call;
mod chain;
mod failure;
mod fields;
mod frame;
mod hello;
mod socket;

pub use answer::{Answer, Lease, PreparedBlock, Welcome};
pub use call::{BlockToPrepare, Call, HoldRange, KeyQuestion, LeasePurpose, SealedBlock};
pub use chain::ChainRequest;
pub use fields::MANIFEST_FIELDS_MAX;
pub use frame::{
    BODY_BYTES_MAX, Frame, FrameHeader, HEADER_BYTES, TraceContext, UNREAD_CALL, VERSION,
    VERSION_MIN, frame_length,
};

pub use hello::{Access, Hello, SessionId};
pub use socket::{SOCKET_PATH_BYTES_MAX, client_socket, default_socket};

use thiserror::Error;

/// Maximum number of keys in one message; clients split longer chains.
pub const KEYS_MAX: usize = 64 << 10;
/// Maximum number of blocks in one prepare, seal, lease or acquire, which have an answer per block.
pub const BLOCKS_MAX: usize = 2048;
/// Maximum length of a text in a message, in bytes.
pub const TEXT_BYTES_MAX: usize = 1 << 20;

/// Why bytes are not a valid message. The receiver closes the connection.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum WireError {
    /// The magic number is wrong.
    #[error("{0:02x?} is not the start of a frame of Cascade's protocol")]
    Magic([u8; 4]),
    /// A protocol version that this build does not support.
    #[error("unsupported protocol version {0}; this build supports {VERSION_MIN} to {VERSION}")]
    Version(u16),
    /// The body is longer than allowed.
    #[error("a message of {0} bytes; the maximum is {BODY_BYTES_MAX}")]
    TooLong(u32),
    /// The frame was corrupted.
    #[error("the frame's checksum is wrong")]
    Checksum,
    /// An unknown kind of message.
    #[error("unknown message kind {0}")]
    Kind(u16),
    /// The body is too short or too long, or a field is invalid.
    #[error("the message's {0} is invalid")]
    Field(&'static str),
}
