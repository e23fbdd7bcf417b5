//! The ledger: which blocks lie where in a pool that outlives its process, and which processes hold
//! memory of it.
//!
//! A table in a mapped file. Every change is made under the lock of the state that it describes, in
//! an order that is valid whenever the process is killed: a record is published after its block's
//! bytes are complete, and cleared before their memory can be reused. The kernel keeps what a
//! killed process had stored, so neither bytes nor records are flushed or protected against torn
//! writes; checksums detect damage, and a reboot invalidates all records.

mod holders;
#[cfg(test)]
mod kills;
mod leftover;
mod opening;
mod place;
mod process;
mod record;
mod recovery;
mod residence;
mod tiers;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cascade_block::{NamespaceId, checksum};
use cascade_memory::{Pool, PoolFiles, Slab};
use cascade_tier::WarmStats;
use cascade_tier::tier::{Address, BlockFacts};

use crate::core::bound::KEYS_PER_HOLD;
use crate::core::catalog::{KeyIndex, LOWER_STAGES_MAX};
use crate::core::eviction::chunks::Chunks;
pub(crate) use holders::Holders;
pub use holders::{HeldId, HeldKind, HeldPiece};
pub(crate) use leftover::remove_unused;
pub use leftover::{LeftoverPool, leftover_pools};
pub use opening::ledger_bytes;
pub(crate) use opening::{open, remove};
pub use process::Process;
use record::{BLOCK_WORDS, BlockRecord, HELD_WORDS, Piece};
pub(crate) use recovery::Recovered;
use residence::{INLINE_TIERS, Stored};
use tiers::LedgerTiers;

/// `CASCWARM` in the order of the file's bytes.
const MAGIC: u64 = u64::from_le_bytes(*b"CASCWARM");
const VERSION: u64 = 3;
/// Word of the header with the version.
const VERSION_WORD: usize = 1;
/// The header takes a page, so that records start at cache lines.
const HEADER_WORDS: usize = 512;
/// Words of the header under its checksum. The checksum follows, then the number of runs, then
/// whether the files have ever held a block.
const HEADER_FIELDS: usize = 10;
const RUNS_WORD: usize = HEADER_FIELDS + 1;
const USED_WORD: usize = RUNS_WORD + 1;
/// Value of `USED_WORD` from the first block on. Until then the files hold nothing to recover.
const USED: u64 = 1;

/// Bytes of the pool per record: smaller blocks may fill the ledger before the pool.
const POOL_BYTES_PER_RECORD: usize = 32 << 10;
const RECORDS_MIN: usize = 1024;
/// Bytes of the pool per place for a held piece. Several processes may hold one block, and blocks
/// may be small.
const POOL_BYTES_PER_HELD: usize = 4 << 10;
/// Minimum for small pools: 2 MiB of ledger, so that one client may hold 16,000 small blocks.
const HELD_MIN: usize = 32 << 10;
/// Maximum for large pools: 128 MiB of ledger.
const HELD_MAX: usize = 2 << 20;
const PAGE: usize = 4096;

/// The mapped table and its parts.
#[derive(Debug)]
struct LedgerTable {
    files: PoolFiles,
    block_count: u32,
    held_count: u32,
}

impl LedgerTable {
    fn block(&self, place: u32) -> &[AtomicU64] {
        let start = HEADER_WORDS + place as usize * BLOCK_WORDS;
        &self.files.words().words()[start..start + BLOCK_WORDS]
    }

    fn held(&self, place: u32) -> &[AtomicU64] {
        let blocks = self.block_count as usize * BLOCK_WORDS;
        let start = HEADER_WORDS + blocks + place as usize * HELD_WORDS;
        &self.files.words().words()[start..start + HELD_WORDS]
    }

    fn clear_block(&self, place: u32) {
        place::clear(self.block(place));
    }

    fn clear_held(&self, place: u32) {
        place::clear(self.held(place));
    }

    /// Marks the files as holding blocks: from now on they outlive this store unless it removes
    /// them.
    fn note_used(&self) {
        // Otherwise dropping new files would remove them.
        self.files.persist();
        self.files.words().words()[USED_WORD].store(USED, Ordering::Release);
    }
}

/// Records of the blocks in DRAM. Part of the store's state and under its lock.
#[derive(Debug)]
pub(crate) struct Ledger {
    table: Arc<LedgerTable>,
    pool: Pool,
    /// Places without a record; taken from the end.
    free: Vec<u32>,
    /// The place of each key's record, by the key's index.
    place_of: Chunks<u32>,
    tiers: LedgerTiers,
    /// The place of each record's continuation, by the record's place. Empty if no record of this
    /// run can have one.
    continuation_of: Vec<u32>,
    full_drops: u64,
    /// Whether the files are marked as holding blocks.
    is_used: bool,
}

const NO_PLACE: u32 = u32::MAX;

impl Ledger {
    /// Records that a key's content lies in a slab. `has_namespace` says whether `facts` has the
    /// namespace. A full ledger counts the keys that it cannot record.
    pub(crate) fn record(
        &mut self,
        key: KeyIndex,
        facts: &BlockFacts,
        has_namespace: bool,
        slab: &Slab,
        addresses: [Option<Address>; LOWER_STAGES_MAX],
    ) {
        // A key has at most one record: recovery rejects both of two.
        self.clear(key);
        // A slab of another pool cannot be found by the process that opens this one.
        // Recovery takes the slab's length from `facts`, so the two must agree.
        if !slab.is_of(&self.pool) || slab.len() != facts.bytes as usize {
            return;
        }
        let Some(place) = self.free.pop() else {
            self.full_drops += 1;
            return;
        };
        let record = BlockRecord {
            piece: Piece { offset: slab.offset() as u64, bytes: slab.reserved_bytes() as u64 },
            facts: *facts,
            has_namespace,
            stored: self.by_tier(addresses),
            sum: slab.checksum(),
        };
        // The files are marked before the first record: a record in unmarked files would be removed
        // with them.
        if !std::mem::replace(&mut self.is_used, true) {
            self.table.note_used();
        }
        record.write(self.table.block(place));
        self.set_place(key, place);
        if record.stored[INLINE_TIERS..].iter().any(|stored| *stored != 0) {
            self.write_continuation(place, &record.stored);
        }
    }

    /// The addresses in the tiers of the ledger.
    fn by_tier(&self, addresses: [Option<Address>; LOWER_STAGES_MAX]) -> Stored {
        let mut by_tier = Stored::default();
        for (stage, address) in addresses.into_iter().enumerate() {
            if address.is_some() {
                by_tier[self.tiers.of(stage)] = stored(address);
            }
        }
        by_tier
    }

    /// Adds a continuation to a record. Without a free place, these addresses are not recorded: the
    /// next run treats the block as missing in those tiers.
    fn write_continuation(&mut self, place: u32, stored: &Stored) {
        let Some(continuation) = self.free.pop() else { return };
        let record = self.table.block(place);
        let owner = (place, record[0].load(Ordering::Relaxed));
        residence::write_outside(self.table.block(continuation), owner, stored);
        residence::link(record, continuation);
        self.set_continuation(place, continuation);
    }

    fn continuation(&self, place: u32) -> Option<u32> {
        let at = self.continuation_of.get(place as usize);
        at.copied().filter(|at| *at != NO_PLACE)
    }

    fn set_continuation(&mut self, place: u32, continuation: u32) {
        // Only at the start: a recovered record may have a continuation although no stage of this
        // pipeline needs one.
        if self.continuation_of.is_empty() {
            self.continuation_of.resize(self.table.block_count as usize, NO_PLACE);
        }
        self.continuation_of[place as usize] = continuation;
    }

    /// Clears a key's record. Called before its slab can be freed or reused.
    pub(crate) fn clear(&mut self, key: KeyIndex) {
        let Some(place) = self.place_of.get_mut(key.0 as usize) else { return };
        let place = std::mem::replace(place, NO_PLACE);
        if place != NO_PLACE {
            let continuation = self.continuation(place);
            self.free_places(place, continuation);
        }
    }

    /// Clears a record, then its continuation.
    fn free_places(&mut self, place: u32, continuation: Option<u32>) {
        self.table.clear_block(place);
        self.free.push(place);
        if let Some(continuation) = continuation {
            self.table.clear_block(continuation);
            self.free.push(continuation);
            self.set_continuation(place, NO_PLACE);
        }
    }

    /// Records the address of a key's block in a stage.
    pub(crate) fn note_stored(&mut self, key: KeyIndex, stage: usize, address: Address) {
        // A key without a place was not recorded: the ledger was full, or the slab is of another
        // pool.
        let place = self.place_of.get(key.0 as usize).filter(|place| **place != NO_PLACE);
        let Some(place) = place.copied() else { return };
        let (tier, stored) = (self.tiers.of(stage), stored(Some(address)));
        match self.continuation(place) {
            _ if tier < INLINE_TIERS => {
                residence::note_inline(self.table.block(place), tier, stored);
            }
            Some(at) => residence::note_outside(self.table.block(at), tier, stored),
            None => {
                let mut first = Stored::default();
                first[tier] = stored;
                self.write_continuation(place, &first);
            }
        }
    }

    /// Records the checksum of a key's bytes.
    pub(crate) fn note_sum(&self, key: KeyIndex, sum: u32) {
        let place = self.place_of.get(key.0 as usize).filter(|place| **place != NO_PLACE);
        if let Some(place) = place {
            record::note_sum(self.table.block(*place), sum);
        }
    }

    /// Overwrites cleared records with zeroes: names and digests of blocks. Wipes some, from the
    /// `from`th free one on, and returns where to continue.
    pub(crate) fn wipe_free(&self, from: usize) -> Option<usize> {
        // Clearing a record zeroes only its first word; an erase must leave no names.
        let rest = self.free.get(from..).filter(|rest| !rest.is_empty())?;
        let some = &rest[..rest.len().min(KEYS_PER_HOLD)];
        for place in some {
            place::wipe(self.table.block(*place));
        }
        Some(from + some.len())
    }

    /// Assigns a recovered record to its key.
    pub(crate) fn keep(&mut self, key: KeyIndex, recovered: &Recovered) {
        self.set_place(key, recovered.place);
        if let Some(continuation) = recovered.continuation {
            self.set_continuation(recovered.place, continuation);
        }
    }

    /// Clears a recovered record that is not used, for example of an expired block.
    pub(crate) fn discard(&mut self, recovered: &Recovered) {
        self.free_places(recovered.place, recovered.continuation);
    }

    /// Adds the ledger's counts to the statistics.
    pub(crate) fn add_to(&self, stats: &mut WarmStats) {
        stats.ledger_capacity = u64::from(self.table.block_count);
        stats.ledger_records = stats.ledger_capacity - self.free.len() as u64;
        stats.ledger_full_drops = self.full_drops;
    }

    fn set_place(&mut self, key: KeyIndex, place: u32) {
        let at = key.0 as usize;
        while self.place_of.len() <= at {
            self.place_of.push(NO_PLACE);
        }
        self.place_of[at] = place;
    }
}

impl Recovered {
    /// The facts that the block was put with.
    pub(crate) fn facts(&self) -> &BlockFacts {
        &self.record.facts
    }

    /// Whether `facts` has the namespace, without which it cannot be written to a lower tier.
    pub(crate) fn has_namespace(&self) -> bool {
        self.record.has_namespace
    }

    pub(crate) fn slab(&self) -> &Slab {
        &self.slab
    }

    /// Whether the bytes match the record's checksum. Without one they are accepted as they are,
    /// and the next scrub of DRAM computes their checksum.
    pub(crate) fn is_intact(&self) -> bool {
        // The first comparison records the ledger's sum in the slab, the second compares the bytes
        // with it. Records of one piece with different sums fail in the first.
        self.record.sum.is_none_or(|sum| {
            let is_its = |bytes: &[u8]| self.slab.verify_checksum(checksum(bytes));
            self.slab.verify_checksum(sum) && self.slab.host().is_some_and(is_its)
        })
    }

    /// Whether a stage had stored these bytes at this address.
    pub(crate) fn is_stored_at(&self, stage: usize, address: Address) -> bool {
        self.stored[stage] == stored(Some(address))
    }
}

fn stored(address: Option<Address>) -> u64 {
    // The address `u64::MAX` means none in the catalog. It wraps to zero, which means none here.
    address.map_or(0, |address| address.0.wrapping_add(1))
}

/// A named pool with its ledger and the recovered blocks of an earlier run.
#[derive(Debug)]
pub(crate) struct WarmPool {
    pub(crate) pool: Pool,
    pub(crate) ledger: Ledger,
    pub(crate) holders: Arc<Holders>,
    pub(crate) recovered: Vec<Recovered>,
    pub(crate) stats: WarmStats,
    pub(crate) notes: Vec<String>,
}

impl WarmPool {
    fn new(table: LedgerTable, pool: Pool, is_used: bool, stages: &[String]) -> Self {
        // Before the free places are collected: recovery clears the places of invalid records.
        let mut recovered = recovery::recover(&table, &pool);
        let tiers = LedgerTiers::settle(&table, stages, &mut recovered.blocks);
        let free = |count: u32, is_free: &dyn Fn(u32) -> bool| {
            // The lowest places are used first: their cache lines are warm.
            (0..count).rev().filter(|place| is_free(*place)).collect::<Vec<_>>()
        };
        // Relaxed: no other thread has the table yet.
        let is_zero = |place: &[AtomicU64]| place[0].load(Ordering::Relaxed) == 0;
        let free_blocks = free(table.block_count, &|place| is_zero(table.block(place)));
        let free_held = free(table.held_count, &|place| is_zero(table.held(place)));
        // Now: later it would grow in one hold of the store's lock.
        let has_continuations = (0..stages.len()).any(|stage| tiers.of(stage) >= INLINE_TIERS);
        let places = if has_continuations { table.block_count as usize } else { 0 };
        let continuation_of = vec![NO_PLACE; places];
        let table = Arc::new(table);
        let holders = Holders::new(Arc::clone(&table), free_held, recovered.kept);
        let stats = WarmStats { rejected_records: recovered.rejected, ..WarmStats::default() };
        Self {
            ledger: Ledger {
                table,
                pool: pool.clone(),
                free: free_blocks,
                place_of: Chunks::default(),
                tiers,
                continuation_of,
                full_drops: 0,
                is_used,
            },
            holders: Arc::new(holders),
            pool,
            recovered: recovered.blocks,
            stats,
            notes: Vec::new(),
        }
    }
}

/// The namespace in the record of a block that was not put in this run.
pub(crate) fn unknown_namespace() -> NamespaceId {
    NamespaceId::default()
}

#[cfg(test)]
mod tests;
