//! Block keys: 32-byte names of blocks by what they stand for, not by their bytes.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// Names a block by what it stands for: all tokens up to its end, in one namespace.
///
/// Keys that this crate makes are outputs of a cryptographic hash. Callers may bring others, so
/// hash tables take the fingerprints that a [`crate::Seed`] gives.
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
    /// Wraps 32 bytes that some hash of this crate produced.
    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// The 32 bytes.
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// The first eight bytes as an integer. A caller chooses them: not for hash tables.
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
