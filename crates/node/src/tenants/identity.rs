//! Tokens: read from files, stored as keyed tags, compared in constant time.

use std::fmt;
use std::path::Path;

use cascade_store::{SecretError, SecretReaders, read_secret};
use ring::hmac;
use ring::rand::SystemRandom;

/// Minimum length of a token: a shorter one could be guessed.
pub(super) const TOKEN_BYTES_MIN: usize = 16;
/// Maximum length of a token file.
const FILE_BYTES_MAX: u64 = 4096;

/// A token as in its file, without trailing white space.
pub(super) struct Token(Vec<u8>);

impl Token {
    pub(super) fn read(path: &Path) -> Result<Self, SecretError> {
        let mut bytes = read_secret(path, FILE_BYTES_MAX, SecretReaders::Group)?;
        bytes.truncate(bytes.trim_ascii_end().len());
        if bytes.len() < TOKEN_BYTES_MIN {
            return Err(SecretError::Content {
                path: path.to_owned(),
                reason: format!(
                    "the token has {} bytes, the minimum is {TOKEN_BYTES_MIN}; create one with \
                     `openssl rand -hex 32`",
                    bytes.len()
                ),
            });
        }
        Ok(Self(bytes))
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// The tokens of all tenants, as HMAC tags under a random key of this run. The tokens themselves
/// are not kept in memory.
pub(super) struct Tokens {
    key: Option<hmac::Key>,
    tags: Vec<(hmac::Tag, usize)>,
}

impl Tokens {
    pub(super) fn new() -> Self {
        // Without random bytes there is no key, and `add` panics for the first token.
        Self {
            key: hmac::Key::generate(hmac::HMAC_SHA256, &SystemRandom::new()).ok(),
            tags: vec![],
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.tags.is_empty()
    }

    pub(super) fn add(&mut self, token: &Token, place: usize) {
        let key = self.key.as_ref().expect("the kernel provides random bytes");
        self.tags.push((hmac::sign(key, token.bytes()), place));
    }

    /// The place of the tenant with this token. Compares with every tag, so that the duration does
    /// not depend on which one matches.
    pub(super) fn find(&self, token: &[u8]) -> Option<usize> {
        let key = self.key.as_ref()?;
        let mut found = None;
        for (tag, place) in &self.tags {
            // No `break` after a match. White space at the end is ignored, as in a token file.
            if hmac::verify(key, token.trim_ascii_end(), tag.as_ref()).is_ok() {
                found = Some(*place);
            }
        }
        found
    }
}

impl fmt::Debug for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tokens({})", self.tags.len())
    }
}
