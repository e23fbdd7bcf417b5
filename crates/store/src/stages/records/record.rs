//! The format of a record: a header, then the payload.
//!
//! Version 1, little endian, 160 bytes: magic 8, version 2, kind 1, flags 1, length of the payload
//! 4, own address 8, address of its block 8, expiry 8, key 32, digest 32, parent 32,
//! namespace 16, CRC-32C of the payload 4, CRC-32C of all before 4. `docs/python.md` has the table.

use cascade_block::{BlockKey, Digest, Manifest, NamespaceId, checksum};
use cascade_tier::tier::BlockFacts;

/// Length of a header.
pub(super) const HEADER_BYTES: usize = 160;
/// Prefix of all names of records, which distinguishes them from others' names.
const NAME_PREFIX: &str = "cascade-";

const MAGIC: [u8; 8] = *b"CSCDRECD";
const VERSION: u16 = 1;
const IS_PREFIX: u8 = 1;
const HAS_DIGEST: u8 = 2;
const HAS_PARENT: u8 = 4;
const EXPIRES: u8 = 8;

/// The kind of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RecordKind {
    /// A block under its first name.
    Block = 1,
    /// An alias for the block at an address.
    Alias = 2,
    /// Revokes the first name of the block at an address.
    Revocation = 3,
    /// A namespace's manifest.
    Manifest = 4,
    /// Written by a probe.
    Probe = 5,
}

/// The header of a record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RecordHeader {
    pub(super) kind: RecordKind,
    /// Its address, which its name also contains.
    pub(super) address: u64,
    /// The address that an alias or a revocation is about.
    pub(super) target: u64,
    /// The facts of a block or an alias; `bytes` is the length of the block.
    pub(super) facts: BlockFacts,
    pub(super) payload_bytes: u32,
    payload_checksum: u32,
}

/// The name of the record at an address.
pub(super) fn name_of(address: u64) -> String {
    format!("{NAME_PREFIX}{address:016x}")
}

/// The address of the record with a name, if it is a record's.
pub(super) fn address_of(name: &str) -> Option<u64> {
    let digits = name.strip_prefix(NAME_PREFIX)?;
    let address = u64::from_str_radix(digits, 16).ok()?;
    // Parsing also accepts capitals, for example: such a name is not a record's.
    (name_of(address) == name).then_some(address)
}

impl RecordHeader {
    pub(super) fn new(
        kind: RecordKind,
        address: u64,
        target: u64,
        facts: BlockFacts,
        payload: &[u8],
    ) -> Self {
        let payload_bytes = u32::try_from(payload.len()).expect("a block's length is 32 bits");
        let payload_checksum = checksum(payload);
        Self { kind, address, target, facts, payload_bytes, payload_checksum }
    }

    /// Writes the header and the payload over `record`, which has their length.
    pub(super) fn write(&self, payload: &[u8], record: &mut [u8]) {
        let (head, rest) = record.split_at_mut(HEADER_BYTES);
        head.copy_from_slice(&self.encode());
        rest.copy_from_slice(payload);
    }

    fn encode(&self) -> [u8; HEADER_BYTES] {
        let facts = &self.facts;
        let flags = [
            (facts.is_prefix, IS_PREFIX),
            (facts.digest.is_some(), HAS_DIGEST),
            (facts.parent.is_some(), HAS_PARENT),
            (facts.expires_unix_ms.is_some(), EXPIRES),
        ];
        let flags: u8 = flags.iter().filter(|(is_so, _)| *is_so).map(|(_, flag)| flag).sum();
        // An alias has no payload: the field holds its block's length instead.
        let bytes = if self.kind == RecordKind::Alias { facts.bytes } else { self.payload_bytes };
        let parts: [&[u8]; 12] = [
            &MAGIC,
            &VERSION.to_le_bytes(),
            &[self.kind as u8, flags],
            &bytes.to_le_bytes(),
            &self.address.to_le_bytes(),
            &self.target.to_le_bytes(),
            &facts.expires_unix_ms.unwrap_or(0).to_le_bytes(),
            facts.key.as_bytes(),
            facts.digest.as_ref().map_or(&[0; 32], Digest::as_bytes).as_slice(),
            facts.parent.as_ref().map_or(&[0; 32], BlockKey::as_bytes).as_slice(),
            facts.namespace.as_bytes(),
            &self.payload_checksum.to_le_bytes(),
        ];
        let mut head = [0; HEADER_BYTES];
        let mut at = 0;
        for part in parts {
            head[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        }
        let sum = checksum(&head[..at]);
        head[at..].copy_from_slice(&sum.to_le_bytes());
        head
    }

    /// The header at the start of a record, if its checksum is right.
    pub(super) fn read(record: &[u8]) -> Option<Self> {
        let head = record.first_chunk::<HEADER_BYTES>()?;
        let (covered, sum) = head.split_last_chunk::<4>()?;
        if checksum(covered) != u32::from_le_bytes(*sum) {
            return None;
        }
        let (magic, rest) = covered.split_first_chunk::<8>()?;
        let (version, rest) = rest.split_first_chunk::<2>()?;
        let ([kind, flags], rest) = rest.split_first_chunk::<2>()?;
        let (bytes, rest) = rest.split_first_chunk::<4>()?;
        let (address, rest) = rest.split_first_chunk::<8>()?;
        let (target, rest) = rest.split_first_chunk::<8>()?;
        let (expires, rest) = rest.split_first_chunk::<8>()?;
        let (key, rest) = rest.split_first_chunk::<32>()?;
        let (digest, rest) = rest.split_first_chunk::<32>()?;
        let (parent, rest) = rest.split_first_chunk::<32>()?;
        let (namespace, rest) = rest.split_first_chunk::<16>()?;
        if *magic != MAGIC || u16::from_le_bytes(*version) != VERSION {
            return None;
        }
        let kind = RecordKind::of(*kind)?;
        let has = |flag: u8| flags & flag != 0;
        let bytes = u32::from_le_bytes(*bytes);
        let facts = BlockFacts {
            key: BlockKey::from_bytes(*key),
            digest: has(HAS_DIGEST).then(|| Digest::from_bytes(*digest)),
            parent: has(HAS_PARENT).then(|| BlockKey::from_bytes(*parent)),
            namespace: NamespaceId::from_bytes(*namespace),
            bytes,
            is_prefix: has(IS_PREFIX),
            written_unix_ms: 0,
            expires_unix_ms: has(EXPIRES).then(|| u64::from_le_bytes(*expires)),
        };
        Some(Self {
            kind,
            address: u64::from_le_bytes(*address),
            target: u64::from_le_bytes(*target),
            facts,
            payload_bytes: if kind == RecordKind::Alias { 0 } else { bytes },
            payload_checksum: u32::from_le_bytes(*rest.first_chunk::<4>()?),
        })
    }

    /// Whether the payload matches the header's length and checksum.
    pub(super) fn fits(&self, payload: &[u8]) -> bool {
        payload.len() == self.payload_bytes as usize && checksum(payload) == self.payload_checksum
    }

    /// Length of the whole record.
    pub(super) fn record_bytes(&self) -> u64 {
        HEADER_BYTES as u64 + u64::from(self.payload_bytes)
    }
}

impl RecordKind {
    fn of(byte: u8) -> Option<Self> {
        let all = [Self::Block, Self::Alias, Self::Revocation, Self::Manifest, Self::Probe];
        all.into_iter().find(|kind| *kind as u8 == byte)
    }
}

/// Parses a manifest from its [`Manifest::canonical_bytes`].
pub(super) fn manifest_of(mut bytes: &[u8]) -> Option<Manifest> {
    let mut texts = Vec::new();
    while let Some((length, rest)) = bytes.split_first_chunk::<8>() {
        let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
        let text = rest.get(..length)?;
        texts.push(std::str::from_utf8(text).ok()?);
        bytes = &rest[length..];
    }
    let pairs = texts.chunks(2).map(|pair| Some((*pair.first()?, *pair.get(1)?)));
    let whole = bytes.is_empty().then_some(Manifest::new());
    pairs.fold(whole, |manifest, pair| {
        pair.and_then(|(name, value)| Some(manifest?.with(name, value)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(kind: RecordKind, payload: &[u8]) -> RecordHeader {
        let facts = BlockFacts {
            key: BlockKey::from_bytes([1; 32]),
            digest: Some(Digest::from_bytes([2; 32])),
            parent: Some(BlockKey::from_bytes([3; 32])),
            namespace: NamespaceId::from_bytes([4; 16]),
            bytes: 5,
            is_prefix: true,
            written_unix_ms: 0,
            expires_unix_ms: Some(6),
        };
        RecordHeader::new(kind, 7, 8, facts, payload)
    }

    fn record(payload: &[u8]) -> Vec<u8> {
        let mut record = vec![0; HEADER_BYTES + payload.len()];
        header(RecordKind::Block, payload).write(payload, &mut record);
        record
    }

    #[test]
    fn a_record_of_version_1_reads_as_it_was_written() {
        // The layout in docs/python.md. Later versions must still read these bytes.
        let mut stored = b"CSCDRECD\x01\x00\x01\x0f\x05\x00\x00\x00".to_vec();
        for number in [7_u64, 8, 6] {
            stored.extend(number.to_le_bytes());
        }
        stored.extend([[1; 32], [2; 32], [3; 32]].concat());
        stored.extend([4; 16]);
        stored.extend(checksum(b"bytes").to_le_bytes());
        stored.extend(checksum(&stored).to_le_bytes());
        stored.extend(b"bytes");
        assert_eq!(record(b"bytes"), stored);
        assert_eq!(RecordHeader::read(&stored), Some(header(RecordKind::Block, b"bytes")));
    }

    #[test]
    fn a_flipped_bit_is_detected_in_every_position() {
        let whole = record(b"some bytes of a block");
        for bit in 0..whole.len() * 8 {
            let mut flipped = whole.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            let header = RecordHeader::read(&flipped);
            let is_whole = header.is_some_and(|header| header.fits(&flipped[HEADER_BYTES..]));
            assert!(!is_whole, "bit {bit}");
        }
        for bytes in 0..whole.len() {
            let cut = &whole[..bytes];
            let header = RecordHeader::read(cut);
            assert!(!header.is_some_and(|header| header.fits(&cut[HEADER_BYTES..])), "{bytes}");
        }
    }

    #[test]
    fn an_alias_record_has_the_length_of_its_block() {
        let name = header(RecordKind::Alias, b"");
        let mut bytes = vec![0; HEADER_BYTES];
        name.write(b"", &mut bytes);
        let read = RecordHeader::read(&bytes).unwrap();
        assert_eq!((read.facts.bytes, read.record_bytes()), (5, HEADER_BYTES as u64));
        assert_eq!(read, name);
    }

    #[test]
    fn only_names_of_records_have_an_address() {
        assert_eq!(address_of(&name_of(0xabc)), Some(0xabc));
        for name in ["cascade-1", "cascade-0000000000000ABC", "other", "cascade-000000000000000g"] {
            assert_eq!(address_of(name), None, "{name}");
        }
    }

    #[test]
    fn a_manifest_reads_back_as_written() {
        let manifest = Manifest::new().with("weights", "sha256:9f86").with("empty", "");
        assert_eq!(manifest_of(&manifest.canonical_bytes()), Some(manifest.clone()));
        assert_eq!(manifest_of(&manifest.canonical_bytes()[1..]), None);
    }
}
