//! What a worker process and its node say to each other: frames and messages. No I/O, no state.
//!
//! `docs/wire-protocol.md` has every byte. All integers are little endian.

mod answer;
mod call;
mod chain;
mod failure;
mod fields;
mod frame;
mod hello;

pub use answer::{Answer, Lease, PreparedBlock, Welcome};
pub use call::{AskedBlock, Call, HoldRange, KeyQuestion, LeasePurpose, SealedBlock};
pub use chain::ChainRequest;
pub use fields::MANIFEST_FIELDS_MAX;
pub use frame::{
    BODY_BYTES_MAX, Frame, HEADER_BYTES, Header, TraceContext, UNREAD, VERSION, VERSION_MIN,
    frame_length,
};

pub use hello::{Access, Hello, SessionId};

use thiserror::Error;

/// Most keys in one message; a longer chain is asked for in pieces.
pub const KEYS_MAX: usize = 64 << 10;
/// Most blocks in one message that answers for each at length (prepare, seal, lease, acquire).
pub const BLOCKS_MAX: usize = 2048;
/// Longest text in a message, in bytes.
pub const TEXT_BYTES_MAX: usize = 1 << 20;

/// Why bytes are no message of this protocol. The connection they came on is closed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum WireError {
    /// It does not start like a frame.
    #[error("{0:02x?} does not begin a frame of Cascade's protocol")]
    Magic([u8; 4]),
    /// A version that this build does not speak.
    #[error("protocol version {0}; this build speaks {VERSION_MIN} to {VERSION}")]
    Version(u16),
    /// Larger than any message is.
    #[error("a frame of {0} bytes; the most is {BODY_BYTES_MAX}")]
    TooLong(u32),
    /// Bytes changed on the way.
    #[error("the frame's checksum is wrong")]
    Checksum,
    /// A kind of message that this build does not know.
    #[error("no message has the kind {0}")]
    Kind(u16),
    /// The body ends early, goes on too long, or holds what makes no sense.
    #[error("the message's {0} is wrong")]
    Field(&'static str),
}
