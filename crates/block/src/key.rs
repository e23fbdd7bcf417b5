//! Block keys: 32-byte names of blocks by the tokens that they cover, not by their bytes.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// Names a block: stands for all tokens up to its end, in one namespace.
///
/// Keys computed by this crate are outputs of a cryptographic hash. Callers may choose others, so
/// hash tables use the fingerprints of a [`crate::FingerprintSeed`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockKey([u8; 32]);

/// The text was not 64 hexadecimal digits.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("a block key is 64 hexadecimal digits, got {length} characters: {text:?}")]
pub struct KeyParseError {
    length: usize,
    text: String,
}

impl BlockKey {
    /// Wraps the 32 bytes of an existing key.
    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// The 32 bytes.
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// The first eight bytes as an integer. Callers can choose them: not for hash tables.
    pub fn fingerprint(&self) -> u64 {
        let mut first = [0; 8];
        first.copy_from_slice(&self.0[..8]);
        u64::from_le_bytes(first)
    }
}

impl fmt::Display for BlockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for BlockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BlockKey({self})")
    }
}

impl FromStr for BlockKey {
    type Err = KeyParseError;

    fn from_str(text: &str) -> Result<Self, KeyParseError> {
        parse_hex(text).map(Self).ok_or_else(|| KeyParseError {
            length: text.chars().count(),
            text: text.chars().take(80).collect(),
        })
    }
}

fn parse_hex(text: &str) -> Option<[u8; 32]> {
    let digits = text.as_bytes();
    if digits.len() != 64 {
        return None;
    }
    let mut bytes = [0; 32];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        let high = char::from(pair[0]).to_digit(16)?;
        let low = char::from(pair[1]).to_digit(16)?;
        *byte = u8::try_from(high * 16 + low).ok()?;
    }
    Some(bytes)
}
