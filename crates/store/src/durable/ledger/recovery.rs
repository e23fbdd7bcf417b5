//! Recovery of a dead process's ledger: which blocks are valid, and which memory other processes
//! may still access. Only the checksum of a record is trusted; everything else is checked.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::Ordering;

use cascade_block::BlockKey;
use cascade_memory::{Pool, Slab};

use super::LedgerTable;
use super::holders::{EARLIER_LOAD, HeldSlab, LOAD};
use super::place::PlaceContent;
use super::process::Process;
use super::record::{BlockRecord, HeldRecord, Piece};
use super::residence::{self, Stored};

/// A recovered block.
#[derive(Debug)]
pub(crate) struct Recovered {
    pub(super) place: u32,
    /// The place of the continuation of its record.
    pub(super) continuation: Option<u32>,
    pub(super) record: BlockRecord,
    /// As in the record, by stage of the present pipeline.
    pub(super) stored: Stored,
    pub(super) slab: Slab,
}

/// Everything recovered from a ledger.
#[derive(Debug, Default)]
pub(super) struct RecoveredLedger {
    pub(super) blocks: Vec<Recovered>,
    pub(super) kept: Vec<HeldSlab>,
    pub(super) rejected: u64,
}

/// Records of one piece of the pool: keys of one content.
#[derive(Debug)]
struct PieceGroup {
    piece: Piece,
    members: Vec<(u32, BlockRecord)>,
    is_rejected: bool,
}

/// Reads the tables and reserves the memory in the pool, before any allocation. Clears the places
/// of invalid records.
pub(super) fn recover(table: &LedgerTable, pool: &Pool) -> RecoveredLedger {
    let mut recovered = RecoveredLedger::default();
    // Held memory decides which blocks are valid. Valid blocks and strays do not overlap
    // afterwards, so the pool can adopt each of them whole.
    let held = read_held(table, pool, &mut recovered);
    let mut groups = read_groups(table, pool, &mut recovered);
    let strays = reject_touched(&mut groups, &held);
    let mut slabs = HashMap::new();
    for group in groups {
        adopt_group(table, pool, group, &mut slabs, &mut recovered);
    }
    attach_continuations(table, &mut recovered);
    for stray in merged(strays) {
        if let Some(slab) = adopt(pool, stray, stray.bytes) {
            slabs.insert(stray, slab);
        }
    }
    let mut by_offset: Vec<_> = slabs.into_iter().collect();
    by_offset.sort_unstable_by_key(|(piece, _)| *piece);
    // A stray that the pool does not adopt, such as one that is not aligned, has no slab. Its
    // record is then rejected here. Each kept record holds a reference to its slab, so the memory
    // is free only after the last of them is released.
    for (place, record) in held {
        // A held piece lies in an adopted slab: it is a block's piece, or part of a stray one.
        let at = by_offset.partition_point(|(piece, _)| piece.offset <= record.piece.offset);
        let around = at.checked_sub(1).map(|at| &by_offset[at]);
        if let Some((_, slab)) = around.filter(|(piece, _)| end(*piece) >= end(record.piece)) {
            let process = (record.kind != EARLIER_LOAD).then_some(record.process);
            recovered.kept.push(HeldSlab { place, process, slab: slab.clone() });
        } else {
            table.clear_held(place);
            recovered.rejected += 1;
        }
    }
    recovered
}

/// Held records whose processes are alive, with their places.
fn read_held(
    table: &LedgerTable,
    pool: &Pool,
    recovered: &mut RecoveredLedger,
) -> Vec<(u32, HeldRecord)> {
    let mut alive: HashMap<Process, bool> = HashMap::new();
    let mut held = Vec::new();
    for place in 0..table.held_count {
        match HeldRecord::read(table.held(place)) {
            PlaceContent::Free => continue,
            // Its memory stayed unused for one whole run, which is enough: the record is cleared
            // below.
            PlaceContent::Record(record) if record.kind == EARLIER_LOAD => {}
            PlaceContent::Record(record) if !is_inside(pool, record.piece) => {
                recovered.rejected += 1;
            }
            PlaceContent::Record(record) if record.kind == LOAD => {
                table.clear_held(place);
                // Another kind from now on, so that the next run frees the memory.
                let record = HeldRecord { kind: EARLIER_LOAD, ..record };
                record.write(table.held(place));
                held.push((place, record));
                continue;
            }
            PlaceContent::Record(record) => {
                let is_alive = alive.entry(record.process);
                if *is_alive.or_insert_with(|| record.process.is_alive()) {
                    held.push((place, record));
                    continue;
                }
            }
            PlaceContent::Damaged => recovered.rejected += 1,
        }
        table.clear_held(place);
    }
    held
}

/// Blocks by piece, in the order of offsets. Overlapping pieces are all rejected, because it is
/// unknown which is right.
fn read_groups(
    table: &LedgerTable,
    pool: &Pool,
    recovered: &mut RecoveredLedger,
) -> Vec<PieceGroup> {
    let mut found: Vec<(u32, BlockRecord)> = Vec::new();
    for place in 0..table.block_count {
        let words = table.block(place);
        // Read with the record that links it.
        if residence::is_continuation(words) {
            continue;
        }
        match BlockRecord::read(words) {
            PlaceContent::Free => {}
            PlaceContent::Record(record)
                if is_inside(pool, record.piece)
                    && u64::from(record.facts.bytes) <= record.piece.bytes =>
            {
                found.push((place, record));
            }
            PlaceContent::Record(_) | PlaceContent::Damaged => {
                table.clear_block(place);
                recovered.rejected += 1;
            }
        }
    }
    // Two records of one key contradict each other: it is unknown which is right.
    let mut names: HashMap<BlockKey, u32> = HashMap::with_capacity(found.len());
    for (_, record) in &found {
        *names.entry(record.facts.key).or_default() += 1;
    }
    found.sort_unstable_by_key(|(_, record)| record.piece);
    let mut groups: Vec<PieceGroup> = Vec::with_capacity(found.len());
    // The group with the largest end so far: one long piece may overlap several later ones.
    let mut furthest = 0;
    for (place, record) in found {
        let is_named_twice = names[&record.facts.key] > 1;
        match groups.last_mut() {
            // Equal pieces are adjacent after the sort. They are keys of one content, so lengths
            // and digests must agree.
            Some(last) if last.piece == record.piece => {
                let first = &last.members[0].1.facts;
                let is_same =
                    (first.bytes, first.digest) == (record.facts.bytes, record.facts.digest);
                last.is_rejected |= is_named_twice || !is_same;
                last.members.push((place, record));
                continue;
            }
            _ => {}
        }
        // Any other earlier group that reaches into this piece overlaps the furthest one, too, and
        // was rejected for that.
        let overlaps = groups
            .get(furthest)
            .is_some_and(|group: &PieceGroup| end(group.piece) > record.piece.offset);
        if overlaps {
            groups[furthest].is_rejected = true;
        }
        let is_rejected = is_named_twice || overlaps;
        let piece = record.piece;
        groups.push(PieceGroup { piece, members: vec![(place, record)], is_rejected });
        if end(piece) > end(groups[furthest].piece) {
            furthest = groups.len() - 1;
        }
    }
    groups
}

/// Rejects blocks that overlap held memory, and returns the held memory that is no block's.
///
/// A held piece that is exactly a block's piece is a lease: the block is valid. Any other held
/// memory may be written by its holder, so the blocks that it overlaps are rejected. A rejected
/// block's lease then counts as such memory, too: repeats until nothing changes.
fn reject_touched(groups: &mut [PieceGroup], held: &[(u32, HeldRecord)]) -> Vec<Piece> {
    let mut strays: Vec<Piece> = Vec::new();
    let mut left: Vec<Piece> = held.iter().map(|(_, record)| record.piece).collect();
    // Each round takes at least one piece from `left`, so the loop ends.
    loop {
        let is_block = |piece: &Piece| {
            let at = groups.binary_search_by_key(piece, |group| group.piece);
            at.is_ok_and(|at| !groups[at].is_rejected)
        };
        let (blocks, new): (Vec<_>, Vec<_>) = left.into_iter().partition(is_block);
        if new.is_empty() {
            return strays;
        }
        left = blocks;
        for piece in &new {
            // Overlapping groups are rejected already, so the ends of the others ascend, too.
            let from = groups.partition_point(|group| group.piece.offset < piece.offset);
            let before = groups[..from].iter_mut().rev().find(|group| !group.is_rejected);
            if let Some(group) = before.filter(|group| end(group.piece) > piece.offset) {
                group.is_rejected = true;
            }
            for group in &mut groups[from..] {
                if group.piece.offset >= end(*piece) {
                    break;
                }
                group.is_rejected = true;
            }
        }
        strays.extend(new);
    }
}

fn adopt_group(
    table: &LedgerTable,
    pool: &Pool,
    group: PieceGroup,
    slabs: &mut HashMap<Piece, Slab>,
    recovered: &mut RecoveredLedger,
) {
    let length = u64::from(group.members[0].1.facts.bytes);
    let slab = if group.is_rejected { None } else { adopt(pool, group.piece, length) };
    let Some(slab) = slab else {
        for (place, _) in &group.members {
            table.clear_block(*place);
        }
        recovered.rejected += group.members.len() as u64;
        return;
    };
    for (place, record) in group.members {
        let (continuation, stored, slab) = (None, Stored::default(), slab.clone());
        recovered.blocks.push(Recovered { place, continuation, record, stored, slab });
    }
    slabs.insert(group.piece, slab);
}

/// Reads the continuations of the recovered blocks, and clears all others.
fn attach_continuations(table: &LedgerTable, recovered: &mut RecoveredLedger) {
    let mut linked = HashSet::new();
    for block in &mut recovered.blocks {
        let words = table.block(block.place);
        let Some(place) = residence::link_of(words) else { continue };
        let owner = (block.place, words[0].load(Ordering::Relaxed));
        let is_valid = place < table.block_count
            && residence::read_outside(table.block(place), owner, &mut block.record.stored);
        if is_valid {
            block.continuation = Some(place);
            linked.insert(place);
        } else {
            residence::unlink(words);
        }
    }
    for place in 0..table.block_count {
        let words = table.block(place);
        if residence::is_continuation(words) && !linked.contains(&place) {
            // One that is whole was left by a kill, or by a block that was rejected.
            recovered.rejected += u64::from(residence::free_continuation(words));
        }
    }
}

fn adopt(pool: &Pool, piece: Piece, length: u64) -> Option<Slab> {
    let whole = |number: u64| usize::try_from(number).ok();
    let slab = pool.adopt(whole(piece.offset)?, whole(piece.bytes)?, whole(length)?)?;
    Some(slab.seal())
}

/// The union of the pieces, as pieces that do not overlap.
fn merged(mut pieces: Vec<Piece>) -> Vec<Piece> {
    // Several processes may hold the same memory, and the pool adopts it only once.
    pieces.sort_unstable();
    let mut merged: Vec<Piece> = Vec::new();
    for piece in pieces {
        match merged.last_mut() {
            Some(last) if piece.offset <= end(*last) => {
                last.bytes = end(*last).max(end(piece)) - last.offset;
            }
            _ => merged.push(piece),
        }
    }
    merged
}

fn is_inside(pool: &Pool, piece: Piece) -> bool {
    // A sum of two numbers from a file may overflow.
    let end = piece.offset.checked_add(piece.bytes);
    piece.bytes > 0 && end.is_some_and(|end| end <= pool.region().bytes() as u64)
}

/// End of a piece inside the pool, so it cannot overflow.
fn end(piece: Piece) -> u64 {
    piece.offset + piece.bytes
}

#[cfg(test)]
mod tests {
    use cascade_block::{Digest, NamespaceId};
    use cascade_memory::{HugePages, PoolConfig};
    use cascade_runtime::SystemClock;

    use super::super::{HeldKind, WarmPool, open};
    use super::*;
    use cascade_tier::WarmStats;
    use cascade_tier::tier::BlockFacts;

    const UNIT: u64 = 4096;

    fn piece(from: u64, to: u64) -> Piece {
        Piece { offset: from * UNIT, bytes: (to - from) * UNIT }
    }

    fn block(name: u8, piece: Piece) -> BlockRecord {
        let facts = BlockFacts {
            key: BlockKey::from_bytes([name; 32]),
            digest: None,
            parent: None,
            namespace: NamespaceId::default(),
            bytes: 4000,
            is_prefix: false,
            written_unix_ms: 0,
            expires_unix_ms: None,
        };
        BlockRecord { piece, facts, has_namespace: true, stored: Stored::default(), sum: None }
    }

    fn held(piece: Piece) -> HeldRecord {
        let process = Process::of(std::process::id()).expect("this process is there");
        HeldRecord { piece, process, kind: HeldKind::Lease as u32 }
    }

    /// Opens a pool with these records in its ledger. Returns the names of the recovered blocks,
    /// the number of rejected records, the free units, and the pool.
    fn reopen_with(
        blocks: &[BlockRecord],
        holders: &[HeldRecord],
    ) -> (Vec<u8>, u64, u64, WarmPool) {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("pool");
        let capacity_bytes = 1 << 20;
        let config = PoolConfig { capacity_bytes, huge_pages: HugePages::Never, populate: false };
        let first = open(&path, &config, &[], &SystemClock).expect("a small pool");
        let table = &first.ledger.table;
        for (place, record) in blocks.iter().enumerate() {
            record.write(table.block(u32::try_from(place).expect("a few")));
        }
        for (place, record) in holders.iter().enumerate() {
            record.write(table.held(u32::try_from(place).expect("a few")));
        }
        table.note_used();
        drop(first);
        let second = open(&path, &config, &[], &SystemClock).expect("the same pool");
        let name = |one: &Recovered| one.record.facts.key.as_bytes()[0];
        let mut names: Vec<u8> = second.recovered.iter().map(name).collect();
        names.sort_unstable();
        let stats = second.pool.stats();
        let free = (stats.capacity_bytes - stats.reserved_bytes) as u64 / UNIT;
        (names, second.stats.rejected_records, free, second)
    }

    #[test]
    fn overlapping_pieces_are_all_rejected() {
        let blocks = [
            block(1, piece(0, 2)),
            block(2, piece(2, 12)),
            block(3, piece(3, 5)),
            block(4, piece(6, 8)),
            block(5, piece(11, 13)),
            block(6, piece(13, 14)),
        ];
        let (names, rejected, free, opened) = reopen_with(&blocks, &[]);
        assert_eq!((names, rejected, free), (vec![1, 6], 4, 256 - 3));
        assert_eq!(opened.ledger.free.len(), 1024 - 2, "their places are free again");
    }

    #[test]
    fn contradictory_records_are_all_rejected() {
        let mut other_digest = block(3, piece(2, 3));
        other_digest.facts.digest = Some(Digest::from_bytes([9; 32]));
        let mut other_length = block(5, piece(4, 5));
        other_length.facts.bytes = 1;
        let mut too_long = block(8, piece(9, 10));
        too_long.facts.bytes = 4097;
        let blocks = [
            block(1, piece(0, 1)),
            block(1, piece(1, 2)),
            block(2, piece(2, 3)),
            other_digest,
            block(4, piece(4, 5)),
            other_length,
            block(6, piece(6, 7)),
            block(7, piece(6, 7)),
            too_long,
            block(9, piece(256, 257)),
            block(10, Piece { offset: u64::MAX - 63, bytes: UNIT }),
            block(11, Piece { offset: 20 * UNIT + 1, bytes: UNIT }),
        ];
        let (names, rejected, free, _) = reopen_with(&blocks, &[]);
        assert_eq!((names, rejected, free), (vec![6, 7], 10, 255), "two keys may share a piece");
    }

    #[test]
    fn held_memory_is_never_free_and_blocks_overlapping_it_are_rejected() {
        let blocks = [
            block(1, piece(0, 2)),
            block(2, piece(2, 4)),
            block(3, piece(4, 6)),
            block(4, piece(6, 8)),
        ];
        // One holds a block; two hold memory across blocks 2 and 3; one holds free memory.
        let holders =
            [held(piece(0, 2)), held(piece(3, 5)), held(piece(4, 6)), held(piece(20, 21))];
        let (names, rejected, free, opened) = reopen_with(&blocks, &holders);
        assert_eq!((names, rejected), (vec![1, 4], 2));
        assert_eq!(free, 256 - 2 - 2 - 3 - 1);
        let mut stats = WarmStats::default();
        opened.holders.add_to(&mut stats);
        assert_eq!(stats.held_by_earlier, 4);
        let pid = std::process::id();
        assert_eq!(opened.holders.release_process(pid), 4);
        let stats = opened.pool.stats();
        assert_eq!((stats.capacity_bytes - stats.reserved_bytes) as u64 / UNIT, 256 - 4);
    }
}
