//! Tokens: read from files, kept as tags, compared in the same time right or wrong.

use std::fmt;
use std::path::Path;

use cascade_store::{Readers, SecretError, read_secret};
use ring::hmac;
use ring::rand::SystemRandom;

/// A token shorter than this could be guessed.
pub(super) const TOKEN_BYTES_MIN: usize = 16;
/// Longest file with a token.
const FILE_BYTES_MAX: u64 = 4096;

/// A token as it stands in its file, without the line's end.
pub(super) struct Token(Vec<u8>);

impl Token {
    pub(super) fn read(path: &Path) -> Result<Self, SecretError> {
        let mut bytes = read_secret(path, FILE_BYTES_MAX, Readers::Group)?;
        bytes.truncate(bytes.trim_ascii_end().len());
        if bytes.len() < TOKEN_BYTES_MIN {
            return Err(SecretError::Content {
                path: path.to_owned(),
                reason: format!(
                    "a token of {} bytes; the least is {TOKEN_BYTES_MIN}: make one with \
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

/// Whose token is which. Holds tags under a key of this run, never a token.
pub(super) struct Tokens {
    key: Option<hmac::Key>,
    tags: Vec<(hmac::Tag, usize)>,
}

impl Tokens {
    pub(super) fn new() -> Self {
        // Without random bytes no token is taken, and the first one that is added says so.
        Self {
            key: hmac::Key::generate(hmac::HMAC_SHA256, &SystemRandom::new()).ok(),
            tags: vec![],
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.tags.is_empty()
    }

    pub(super) fn add(&mut self, token: &Token, place: usize) {
        let key =
            self.key.as_ref().expect("the kernel gives random bytes to a process that starts");
        self.tags.push((hmac::sign(key, token.bytes()), place));
    }

    /// Whose token this is. Looks at every one, so that the time tells nothing.
    pub(super) fn find(&self, token: &[u8]) -> Option<usize> {
        let key = self.key.as_ref()?;
        let mut found = None;
        for (tag, place) in &self.tags {
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
