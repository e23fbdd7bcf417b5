//! An entry: 160 bytes about one block, identical in frames, footers and checkpoints.

use cascade_block::{BlockKey, Checksum, Digest, NamespaceId};

use super::FormatError;
use super::fields::{FieldReader, FieldWriter};
use crate::{Address, BlockFacts};

/// Length of an encoded entry.
pub const ENTRY_BYTES: usize = 160;

const HAS_DIGEST: u8 = 1;
const HAS_PARENT: u8 = 2;
const IS_PREFIX: u8 = 4;
const EXPIRES: u8 = 8;

/// The kind of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EntryKind {
    /// The block is stored at the entry's address.
    Block,
    /// The key is another name for the block at the entry's address.
    Alias,
    /// The key no longer refers to the block at the entry's address.
    Tombstone,
}

/// An entry about one key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordEntry {
    /// Its kind.
    pub kind: EntryKind,
    /// The metadata of the block.
    pub meta: BlockFacts,
    /// The address of the block.
    pub address: Address,
    /// CRC-32C of the payload; zero in a tombstone.
    pub payload_checksum: Checksum,
    /// The order of a writer's entries: of two about the same key the higher number is valid.
    pub sequence: u64,
}

impl RecordEntry {
    /// Encodes the entry into the first 160 bytes of `target`.
    pub fn encode(&self, target: &mut [u8]) {
        let meta = &self.meta;
        let flag = |set: bool, bit: u8| if set { bit } else { 0 };
        let flags = flag(meta.digest.is_some(), HAS_DIGEST)
            | flag(meta.parent.is_some(), HAS_PARENT)
            | flag(meta.is_prefix, IS_PREFIX)
            | flag(meta.expires_unix_ms.is_some(), EXPIRES);
        let kind = match self.kind {
            EntryKind::Block => 1,
            EntryKind::Alias => 2,
            EntryKind::Tombstone => 3,
        };
        FieldWriter::new(&mut target[..ENTRY_BYTES])
            .bytes(meta.key.as_bytes())
            .bytes(meta.digest.map_or([0; 32], |digest| *digest.as_bytes()).as_slice())
            .bytes(meta.parent.map_or([0; 32], |parent| *parent.as_bytes()).as_slice())
            .bytes(meta.namespace.as_bytes())
            .u64(self.sequence)
            .u64(meta.written_unix_ms)
            .u64(meta.expires_unix_ms.unwrap_or(0))
            .u64(self.address.0)
            .u32(meta.bytes)
            .u32(self.payload_checksum)
            .u8(kind)
            .u8(flags)
            .bytes(&[0; 6]);
    }

    /// Decodes an entry. The caller has verified the checksum of the bytes.
    pub fn decode(source: &[u8]) -> Result<Self, FormatError> {
        let source = source.get(..ENTRY_BYTES).ok_or(FormatError::Truncated)?;
        let mut reader = FieldReader::new(source);
        let key = BlockKey::from_bytes(reader.array());
        let digest = Digest::from_bytes(reader.array());
        let parent = BlockKey::from_bytes(reader.array());
        let namespace = NamespaceId::from_bytes(reader.array());
        let sequence = reader.u64();
        let written_unix_ms = reader.u64();
        let expires_unix_ms = reader.u64();
        let address = Address(reader.u64());
        let payload_bytes = reader.u32();
        let payload_checksum = reader.u32();
        let kind = match reader.u8() {
            1 => EntryKind::Block,
            2 => EntryKind::Alias,
            3 => EntryKind::Tombstone,
            _ => return Err(FormatError::Invalid("an entry of unknown kind")),
        };
        let flags = reader.u8();
        if flags & !(HAS_DIGEST | HAS_PARENT | IS_PREFIX | EXPIRES) != 0 {
            return Err(FormatError::Invalid("an entry with unknown flags"));
        }
        if payload_bytes == 0 && kind != EntryKind::Tombstone {
            return Err(FormatError::Invalid("an entry without payload"));
        }
        let has = |bit: u8| flags & bit != 0;
        let meta = BlockFacts {
            key,
            digest: has(HAS_DIGEST).then_some(digest),
            parent: has(HAS_PARENT).then_some(parent),
            namespace,
            bytes: payload_bytes,
            is_prefix: has(IS_PREFIX),
            written_unix_ms,
            expires_unix_ms: has(EXPIRES).then_some(expires_unix_ms),
        };
        Ok(Self { kind, meta, address, payload_checksum, sequence })
    }
}
