//! What clients and servers that a test writes by hand show of the token.

use ring::hmac;

pub(crate) const TOKEN: &[u8] = b"0123456789abcdef";

/// The proof of one side, `client` or `server`, for these bodies of hello and challenge.
pub(crate) fn proof(side: &str, hello: &[u8], challenge: &[u8]) -> [u8; 32] {
    let label = format!("cascade transport 1 {side}");
    let hello_bytes = (hello.len() as u64).to_le_bytes();
    let message = [label.as_bytes(), &hello_bytes, hello, challenge].concat();
    let tag = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, TOKEN), &message);
    tag.as_ref().try_into().expect("a tag of SHA-256 has 32 bytes")
}
