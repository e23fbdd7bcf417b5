//! Encoding of the ledger's records. `docs/warm-restart.md` has the layout.

use std::sync::atomic::{AtomicU64, Ordering};

use cascade_block::{BlockKey, Digest, NamespaceId};
use cascade_tier::tier::BlockFacts;

use super::place::{FIELDS_MAX, LIVE, PlaceContent, publish, publish_as, read_fields, seal, set};
use super::process::Process;
use super::residence::{self, Stored};

/// Words of a block's record: three cache lines.
pub(super) const BLOCK_WORDS: usize = 24;
/// Words under the checksum: all between the state and the addresses.
const BLOCK_FIELDS: usize = FIELDS_MAX;
/// Word with the checksum of the block's bytes: `LIVE` in the upper half, CRC-32C in the lower;
/// zero while it is not known.
const SUM_WORD: usize = 22;
/// Words of a record of held memory: one cache line.
pub(super) const HELD_WORDS: usize = 8;
const HELD_FIELDS: usize = 4;

const IS_PREFIX: u64 = 1 << 32;
const HAS_PARENT: u64 = 1 << 33;
const HAS_DIGEST: u64 = 1 << 34;
const HAS_NAMESPACE: u64 = 1 << 35;

/// A piece of the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Piece {
    pub(super) offset: u64,
    pub(super) bytes: u64,
}

/// A key with its content in DRAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BlockRecord {
    pub(super) piece: Piece,
    pub(super) facts: BlockFacts,
    /// Whether `facts` has the namespace: it is unknown for a block promoted from a stage.
    pub(super) has_namespace: bool,
    /// Addresses in the tiers of the ledger. Only those of the first ones are in this record.
    pub(super) stored: Stored,
    /// Checksum of the block's bytes, once it is known.
    pub(super) sum: Option<u32>,
}

/// Memory that another process may access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct HeldRecord {
    pub(super) piece: Piece,
    pub(super) process: Process,
    pub(super) kind: u32,
}

impl BlockRecord {
    pub(super) fn write(&self, place: &[AtomicU64]) {
        let facts = &self.facts;
        let flag = |is_set: bool, flag: u64| if is_set { flag } else { 0 };
        let flags = flag(facts.is_prefix, IS_PREFIX)
            | flag(facts.parent.is_some(), HAS_PARENT)
            | flag(facts.digest.is_some(), HAS_DIGEST)
            | flag(self.has_namespace, HAS_NAMESPACE);
        let mut fields = [0; BLOCK_FIELDS];
        fields[0] = self.piece.offset;
        fields[1] = self.piece.bytes;
        fields[2] = u64::from(facts.bytes) | flags;
        put(&mut fields[3..7], facts.key.as_bytes());
        facts.parent.inspect(|parent| put(&mut fields[7..11], parent.as_bytes()));
        facts.digest.inspect(|digest| put(&mut fields[11..15], digest.as_bytes()));
        put(&mut fields[15..17], facts.namespace.as_bytes());
        fields[17] = facts.expires_unix_ms.unwrap_or(0);
        // Addresses and the sum change while a record is live, so they are outside its checksum.
        // They are stored before it is published: clearing a record leaves them behind, and those
        // of an earlier block must not count for this one.
        let state = seal(&fields);
        residence::write_inline(place, state, &self.stored);
        set(&place[SUM_WORD], marked(self.sum), Ordering::Relaxed);
        publish_as(place, &fields, state);
    }

    pub(super) fn read(place: &[AtomicU64]) -> PlaceContent<Self> {
        let sum = place[SUM_WORD].load(Ordering::Relaxed);
        let fields = match read_fields::<BLOCK_FIELDS>(place, 0) {
            PlaceContent::Free => return PlaceContent::Free,
            PlaceContent::Damaged => return PlaceContent::Damaged,
            PlaceContent::Record(fields) => fields,
        };
        // Absent fields are zero and could be valid values, so flags show which are present.
        let has = |flag: u64| fields[2] & flag != 0;
        let facts = BlockFacts {
            key: BlockKey::from_bytes(get(&fields[3..7])),
            digest: has(HAS_DIGEST).then(|| Digest::from_bytes(get(&fields[11..15]))),
            parent: has(HAS_PARENT).then(|| BlockKey::from_bytes(get(&fields[7..11]))),
            namespace: NamespaceId::from_bytes(get(&fields[15..17])),
            bytes: low(fields[2]),
            is_prefix: has(IS_PREFIX),
            written_unix_ms: 0,
            expires_unix_ms: (fields[17] != 0).then_some(fields[17]),
        };
        PlaceContent::Record(Self {
            piece: Piece { offset: fields[0], bytes: fields[1] },
            facts,
            has_namespace: has(HAS_NAMESPACE),
            stored: residence::read_inline(place),
            sum: (sum & LIVE != 0).then(|| low(sum)),
        })
    }
}

fn marked(sum: Option<u32>) -> u64 {
    // `LIVE` distinguishes a checksum of zero from an unknown one.
    sum.map_or(0, |sum| LIVE | u64::from(sum))
}

/// Records the checksum of the block's bytes.
pub(super) fn note_sum(place: &[AtomicU64], sum: u32) {
    set(&place[SUM_WORD], marked(Some(sum)), Ordering::Release);
}

impl HeldRecord {
    /// The process in a record of this run. Its checksum needs no check.
    pub(super) fn process_of(place: &[AtomicU64]) -> Process {
        // The words that `write` publishes third and fourth, after the state word.
        let [who, start_time] = [3, 4].map(|at: usize| place[at].load(Ordering::Relaxed));
        Process { pid: low(who), start_time }
    }

    pub(super) fn write(&self, place: &[AtomicU64]) {
        let who = u64::from(self.process.pid) | u64::from(self.kind) << 32;
        let fields = [self.piece.offset, self.piece.bytes, who, self.process.start_time];
        publish(place, &fields, 0);
    }

    pub(super) fn read(place: &[AtomicU64]) -> PlaceContent<Self> {
        match read_fields::<HELD_FIELDS>(place, 0) {
            PlaceContent::Free => PlaceContent::Free,
            PlaceContent::Damaged => PlaceContent::Damaged,
            PlaceContent::Record([offset, bytes, who, start_time]) => PlaceContent::Record(Self {
                piece: Piece { offset, bytes },
                process: Process { pid: low(who), start_time },
                kind: low(who >> 32),
            }),
        }
    }
}

fn low(word: u64) -> u32 {
    u32::try_from(word & u64::from(u32::MAX)).expect("the upper half is masked")
}

fn put(fields: &mut [u64], bytes: &[u8]) {
    for (field, piece) in fields.iter_mut().zip(bytes.chunks_exact(8)) {
        let mut word = [0; 8];
        word.copy_from_slice(piece);
        *field = u64::from_le_bytes(word);
    }
}

fn get<const BYTES: usize>(fields: &[u64]) -> [u8; BYTES] {
    let mut bytes = [0; BYTES];
    for (piece, field) in bytes.chunks_exact_mut(8).zip(fields) {
        piece.copy_from_slice(&field.to_le_bytes());
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::durable::ledger::place::clear;

    fn place(words: usize) -> Vec<AtomicU64> {
        (0..words).map(|_| AtomicU64::new(0)).collect()
    }

    fn record() -> BlockRecord {
        let facts = BlockFacts {
            key: BlockKey::from_bytes([1; 32]),
            digest: Some(Digest::from_bytes([2; 32])),
            parent: Some(BlockKey::from_bytes([3; 32])),
            namespace: NamespaceId::from_bytes([4; 16]),
            bytes: u32::MAX,
            is_prefix: true,
            written_unix_ms: 0,
            expires_unix_ms: Some(5),
        };
        let piece = Piece { offset: 64, bytes: 1 << 32 };
        let stored = [7, 0, 0, 0, 0, 0, 0];
        BlockRecord { piece, facts, has_namespace: true, stored, sum: Some(0) }
    }

    #[test]
    fn a_record_reads_back_as_written() {
        let place = place(BLOCK_WORDS);
        assert_eq!(BlockRecord::read(&place), PlaceContent::Free);
        record().write(&place);
        assert_eq!(BlockRecord::read(&place), PlaceContent::Record(record()));
        let mut bare = record();
        bare.facts.digest = None;
        bare.sum = None;
        bare.facts.parent = None;
        bare.facts.expires_unix_ms = None;
        clear(&place);
        bare.write(&place);
        assert_eq!(BlockRecord::read(&place), PlaceContent::Record(bare));
        clear(&place);
        assert_eq!(BlockRecord::read(&place), PlaceContent::Free);
    }

    #[test]
    fn a_flipped_bit_is_detected_in_every_position() {
        let place = place(BLOCK_WORDS);
        record().write(&place);
        for (at, word) in place.iter().enumerate().take(1 + BLOCK_FIELDS) {
            for bit in 0..64 {
                word.fetch_xor(1 << bit, Ordering::Relaxed);
                assert_eq!(
                    BlockRecord::read(&place),
                    PlaceContent::Damaged,
                    "bit {bit} of word {at}"
                );
                word.fetch_xor(1 << bit, Ordering::Relaxed);
            }
        }
    }

    #[test]
    fn a_held_record_reads_back_as_written() {
        let place = place(HELD_WORDS);
        let process = Process { pid: u32::MAX, start_time: u64::MAX };
        let held = HeldRecord { piece: Piece { offset: 1, bytes: 2 }, process, kind: 1 };
        held.write(&place);
        assert_eq!(HeldRecord::read(&place), PlaceContent::Record(held));
    }
}
