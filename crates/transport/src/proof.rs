//! Shows that both sides know the same token, without sending it.

use ring::hmac;

/// Which side shows that it knows the token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Client,
    Server,
}

impl Side {
    /// Keeps the proof of one side from being sent back as that of the other.
    fn label(self) -> &'static [u8] {
        match self {
            Self::Client => b"cascade transport 1 client",
            Self::Server => b"cascade transport 1 server",
        }
    }
}

/// The tag of one side over the bodies of hello and challenge, which hold a nonce of each side.
pub(crate) fn prove(token: &[u8], side: Side, hello: &[u8], challenge: &[u8]) -> [u8; 32] {
    let tag = hmac::sign(&key(token), &message(side, hello, challenge));
    tag.as_ref().try_into().expect("a tag of SHA-256 has 32 bytes")
}

/// Whether the tag is right. Takes the same time for each wrong one.
pub(crate) fn is_proven(
    token: &[u8],
    side: Side,
    hello: &[u8],
    challenge: &[u8],
    tag: &[u8],
) -> bool {
    hmac::verify(&key(token), &message(side, hello, challenge), tag).is_ok()
}

fn key(token: &[u8]) -> hmac::Key {
    hmac::Key::new(hmac::HMAC_SHA256, token)
}

fn message(side: Side, hello: &[u8], challenge: &[u8]) -> Vec<u8> {
    let hello_bytes = (hello.len() as u64).to_le_bytes();
    [side.label(), &hello_bytes, hello, challenge].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_holds_for_one_token_side_and_handshake() {
        let tag = prove(b"token", Side::Client, b"hello", b"challenge");
        assert!(is_proven(b"token", Side::Client, b"hello", b"challenge", &tag));
        assert!(!is_proven(b"Token", Side::Client, b"hello", b"challenge", &tag));
        assert!(!is_proven(b"token", Side::Server, b"hello", b"challenge", &tag));
        assert!(!is_proven(b"token", Side::Client, b"hell", b"ochallenge", &tag));
        assert!(!is_proven(b"token", Side::Client, b"hello", b"other", &tag));
    }
}
