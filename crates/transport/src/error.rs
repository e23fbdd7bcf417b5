//! What can go wrong with a batch or a connection, by what the caller can do.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use thiserror::Error;

use crate::piece::RegionId;

/// Why an endpoint refused a batch. The connection stays usable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// No region with this ID is registered, or it was unregistered.
    UnknownRegion,
    /// A piece reaches beyond the end of its region.
    OutOfBounds,
    /// The region was not registered for this access.
    NotAllowed,
    /// A checksum does not match: the bytes at the target are undefined.
    Damaged,
    /// Too many notices wait at the peer.
    Busy,
    /// The region is memory of a GPU, and the bytes would move through a socket.
    GpuMemory,
}

impl Refusal {
    /// The place of a refusal in this list is its code on the wire, plus one.
    const ALL: [Self; 6] = [
        Self::UnknownRegion,
        Self::OutOfBounds,
        Self::NotAllowed,
        Self::Damaged,
        Self::Busy,
        Self::GpuMemory,
    ];

    /// Its code on the wire; 0 is success.
    pub(crate) fn code(self) -> u8 {
        self as u8 + 1
    }

    pub(crate) fn of_code(code: u8) -> Option<Self> {
        Self::ALL.get(usize::from(code).checked_sub(1)?).copied()
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::UnknownRegion => "the region is not registered",
            Self::OutOfBounds => "it reaches beyond the end of the region",
            Self::NotAllowed => "the region was not registered for this access",
            Self::Damaged => "the checksum does not match",
            Self::Busy => "too many notices wait there",
            Self::GpuMemory => {
                "the region is memory of a GPU, which only RDMA reaches: this connection has none"
            }
        })
    }
}

/// Why a call failed.
#[derive(Debug, Clone, Error)]
#[non_exhaustive]
pub enum TransportError {
    /// The address of a peer has no port.
    #[error("address: {address:?} is not HOST:PORT")]
    Address {
        /// What was given.
        address: String,
    },
    /// No connection could be made. Try again later, or correct the address.
    #[error("cannot connect to {peer}: {source}")]
    Connect {
        /// Its address.
        peer: String,
        /// What the system said.
        source: Arc<io::Error>,
    },
    /// The listener could not be opened.
    #[error("cannot listen on {address}: {reason}")]
    Listen {
        /// The address.
        address: String,
        /// What to change.
        reason: String,
    },
    /// The peer does not accept this endpoint: versions, token or geometry differ.
    #[error("{peer} refused the connection: {reason}")]
    Handshake {
        /// Its address.
        peer: String,
        /// What differs.
        reason: String,
    },
    /// The connection ended. Connect again; what was not confirmed may or may not have arrived.
    #[error("the connection to {peer} was lost: {reason}")]
    Lost {
        /// Its address.
        peer: String,
        /// Why.
        reason: String,
    },
    /// The deadline passed. A batch that was posted may still arrive.
    #[error("{what} took longer than its deadline")]
    Deadline {
        /// What was waited for.
        what: &'static str,
    },
    /// The peer refused the batch.
    #[error("{peer} refused piece {piece} of the batch: {refusal}")]
    Refused {
        /// Its address.
        peer: String,
        /// Index of the piece in its frame, after merging and splitting.
        piece: u32,
        /// Why.
        refusal: Refusal,
    },
    /// A piece of the caller does not fit a region of this endpoint.
    #[error("piece {piece} of the batch, in local region {}: {refusal}", .region.0)]
    Local {
        /// Index of the piece, after merging and splitting.
        piece: usize,
        /// The region that it names.
        region: RegionId,
        /// What is wrong.
        refusal: Refusal,
    },
    /// An argument is beyond a limit of the protocol.
    #[error("{what} is {value}, the limit is {limit}")]
    TooLarge {
        /// What is too large.
        what: &'static str,
        /// Its value.
        value: usize,
        /// The limit.
        limit: usize,
    },
    /// The region is still used by a batch that runs.
    #[error("region {} is still used by a batch", .0.0)]
    InUse(RegionId),
    /// Memory could not be allocated or mapped.
    #[error("cannot map {bytes} bytes: {source}")]
    Memory {
        /// How many.
        bytes: usize,
        /// What the system said.
        source: Arc<io::Error>,
    },
    /// A file with a certificate or a key cannot be used.
    #[error("{}: {reason}", .path.display())]
    Certificate {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: &'static str,
        /// What the system or the parser said.
        source: Option<Arc<dyn std::error::Error + Send + Sync>>,
    },
    /// A setting of TLS is missing or invalid.
    #[error("TLS: {0}")]
    Tls(String),
    /// This transport is not available on this machine.
    #[error("{0}")]
    Unavailable(String),
}

impl TransportError {
    pub(crate) fn lost(peer: &str, reason: impl fmt::Display) -> Self {
        Self::Lost { peer: peer.to_owned(), reason: reason.to_string() }
    }

    pub(crate) fn memory(bytes: usize, source: impl Into<io::Error>) -> Self {
        Self::Memory { bytes, source: Arc::new(source.into()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_refusal_has_a_code_of_its_own() {
        for refusal in Refusal::ALL {
            assert_eq!(Refusal::of_code(refusal.code()), Some(refusal));
        }
        assert_eq!(Refusal::of_code(0), None);
        assert_eq!(Refusal::of_code(7), None);
    }
}
