//! A sealed record: the block's ciphertext, then a trailer with everything needed to open it.
//!
//! | bytes | what |
//! |---|---|
//! | n | ciphertext, as long as the block |
//! | 16 | tag of AES-256-GCM |
//! | 8 | magic `CASCENC\x01`; the last byte is the version |
//! | 8 | identifier of the key |
//! | 16 | session, drawn at random |
//! | 12 | nonce: a counter of the session, little endian |
//! | 4 | length of the block, little endian |
//! | 32 | key of the block that it was first written under |
//! | 32 | tag of its content: HMAC-SHA-256 of its digest; zeroes without one |
//!
//! Everything after the tag is authenticated, not secret.

use cascade_block::BlockKey;
use ring::aead::{Aad, NONCE_LEN, Nonce};

use super::keys::{KeyId, KeyRing, NoRandomness, RecordSeal, SessionId};

/// Bytes of a record in addition to its block.
pub(super) const OVERHEAD: usize = TAG + FIELDS;

const TAG: usize = 16;
const FIELDS: usize = 112;
const MAGIC: [u8; 8] = *b"CASCENC\x01";

/// The fields of a trailer. Trusted only once the record was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Trailer {
    pub(super) key_id: KeyId,
    session: SessionId,
    nonce: [u8; NONCE_LEN],
    bytes: u32,
    pub(super) origin: BlockKey,
    pub(super) content: [u8; 32],
}

impl Trailer {
    /// The trailer of a record, if it is one and the lengths agree.
    pub(super) fn read(record: &[u8]) -> Option<Self> {
        let bytes = record.len().checked_sub(OVERHEAD)?;
        let fields = record.last_chunk::<FIELDS>()?;
        let (magic, fields) = fields.split_first_chunk::<8>()?;
        let (key_id, fields) = fields.split_first_chunk::<8>()?;
        let (session, fields) = fields.split_first_chunk::<16>()?;
        let (nonce, fields) = fields.split_first_chunk::<NONCE_LEN>()?;
        let (length, fields) = fields.split_first_chunk::<4>()?;
        let (origin, fields) = fields.split_first_chunk::<32>()?;
        let content = *fields.first_chunk::<32>()?;
        let length = u32::from_le_bytes(*length);
        (*magic == MAGIC && length as usize == bytes).then(|| Self {
            key_id: KeyId(*key_id),
            session: *session,
            nonce: *nonce,
            bytes: length,
            origin: BlockKey::from_bytes(*origin),
            content,
        })
    }

    fn encode(&self) -> [u8; FIELDS] {
        let mut fields = [0; FIELDS];
        let parts: [&[u8]; 7] = [
            &MAGIC,
            &self.key_id.0,
            &self.session,
            &self.nonce,
            &self.bytes.to_le_bytes(),
            self.origin.as_bytes(),
            &self.content,
        ];
        let mut at = 0;
        for part in parts {
            fields[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        }
        fields
    }
}

/// Seals a block that lies at the start of `record`, which is [`OVERHEAD`] longer.
pub(super) fn seal(
    keys: &KeyRing,
    record: &mut [u8],
    origin: BlockKey,
    content: Option<&cascade_block::Digest>,
) -> Result<(), NoRandomness> {
    let bytes = record.len() - OVERHEAD;
    let RecordSeal { key_id, session, nonce, key } = keys.next_seal(bytes as u64)?;
    let trailer = Trailer {
        key_id,
        session,
        nonce,
        bytes: u32::try_from(bytes).expect("the length of a block is 32 bits"),
        origin,
        content: content.and_then(|it| keys.content_tag(key_id, it)).unwrap_or_default(),
    };
    let fields = trailer.encode();
    let (block, rest) = record.split_at_mut(bytes);
    let nonce = Nonce::assume_unique_for_key(nonce);
    let tag = key
        .seal_in_place_separate_tag(nonce, Aad::from(fields), block)
        .expect("a block is shorter than the 64 GiB that AES-GCM takes");
    rest[..TAG].copy_from_slice(tag.as_ref());
    rest[TAG..].copy_from_slice(&fields);
    Ok(())
}

/// Decrypts a record in place. Returns the block, or none if any bit of the record has changed.
pub(super) fn open<'a>(
    keys: &KeyRing,
    record: &'a mut [u8],
    trailer: &Trailer,
) -> Option<&'a mut [u8]> {
    let key = keys.session(trailer.key_id, trailer.session)?;
    // Ciphertext and tag together, as `open_in_place` takes them.
    let (sealed, _) = record.split_at_mut(record.len() - FIELDS);
    let nonce = Nonce::assume_unique_for_key(trailer.nonce);
    key.open_in_place(nonce, Aad::from(trailer.encode()), sealed).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::EncryptionConfig;
    use std::collections::HashSet;
    use std::os::unix::fs::PermissionsExt as _;

    fn keys(key: &[u8], scope: &str) -> KeyRing {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("key");
        std::fs::write(&path, key).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        let config = EncryptionConfig { scope: scope.to_owned(), ..EncryptionConfig::new(path) };
        KeyRing::open(&config, "files").unwrap()
    }

    fn sealed(keys: &KeyRing, block: &[u8]) -> Vec<u8> {
        let mut record = block.to_vec();
        record.resize(block.len() + OVERHEAD, 0);
        seal(keys, &mut record, BlockKey::from_bytes([1; 32]), None).unwrap();
        record
    }

    fn opened(keys: &KeyRing, record: &[u8]) -> Option<Vec<u8>> {
        let trailer = Trailer::read(record)?;
        open(keys, &mut record.to_vec(), &trailer).map(|block| block.to_vec())
    }

    #[test]
    fn a_record_contains_no_plaintext_and_opens_to_its_block() {
        let keys = keys(&[7; 32], "a");
        for length in [0, 1, 16, 4096, 70_001] {
            let block: Vec<u8> = (0..=250).cycle().take(length).collect();
            let record = sealed(&keys, &block);
            let plaintext: HashSet<&[u8]> = block.windows(16).collect();
            assert!(!record.windows(16).any(|window| plaintext.contains(window)));
            assert_eq!(opened(&keys, &record).unwrap(), block);
        }
    }

    #[test]
    fn a_record_with_a_flipped_bit_does_not_open() {
        let keys = keys(&[7; 32], "a");
        let record = sealed(&keys, b"keys and values of a block");
        for bit in 0..record.len() * 8 {
            let mut changed = record.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(opened(&keys, &changed), None, "bit {bit}");
        }
        for length in 0..record.len() {
            assert_eq!(opened(&keys, &record[..length]), None, "cut to {length}");
        }
    }

    #[test]
    fn equal_blocks_have_different_ciphertexts() {
        let keys = keys(&[7; 32], "a");
        let (one, two) = (sealed(&keys, &[9; 64]), sealed(&keys, &[9; 64]));
        assert_ne!(one[..64], two[..64]);
    }

    #[test]
    fn a_record_does_not_open_with_another_key_or_tenant() {
        let record = sealed(&keys(&[7; 32], "a"), b"a block");
        assert_eq!(opened(&keys(&[8; 32], "a"), &record), None);
        assert_eq!(opened(&keys(&[7; 32], "b"), &record), None);
        let both = format!("{}\n{}\n", "08".repeat(32), "07".repeat(32));
        assert_eq!(opened(&keys(both.as_bytes(), "a"), &record).unwrap(), b"a block");
    }

    /// A record of version 1 as first released: a change of the layout needs a new version.
    #[test]
    fn a_stored_record_of_version_1_still_opens() {
        let record = include_bytes!("../../../../../testdata/encrypted-1.record");
        let expected: Vec<u8> = (0..100).collect();
        assert_eq!(opened(&keys(&[7; 32], "fixture"), record).unwrap(), expected);
        assert_eq!(Trailer::read(record).unwrap().origin, BlockKey::from_bytes([1; 32]));
    }
}
