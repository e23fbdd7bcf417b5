//! Digests: 32-byte content hashes, used to store equal bytes once.

use std::fmt;

use sha2::Digest as _;

/// A hash of a block's bytes. Equal digests mean equal bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest([u8; 32]);

/// Which cryptographic hash makes a digest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DigestAlgorithm {
    /// BLAKE3: faster from a few KiB on.
    #[default]
    Blake3,
    /// SHA-256.
    Sha256,
}

/// Whether contents are deduplicated, and with which hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DigestMode {
    /// Chain keys only: no content hashing, no deduplication across keys.
    #[default]
    Off,
    /// Each put hashes its bytes. Equal bytes under different keys are stored once.
    On(DigestAlgorithm),
}

impl Digest {
    /// Wraps the 32 bytes of an existing digest.
    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// The 32 bytes.
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// Hashes a block's bytes.
    pub fn of(algorithm: DigestAlgorithm, bytes: &[u8]) -> Self {
        match algorithm {
            DigestAlgorithm::Blake3 => Self(*blake3::hash(bytes).as_bytes()),
            DigestAlgorithm::Sha256 => Self(sha2::Sha256::digest(bytes).into()),
        }
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digest({self})")
    }
}
