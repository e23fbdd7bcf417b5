//! The ledger: which blocks lie where in a pool that outlives its process, and which processes hold
//! memory of it.
//!
//! A table in a mapped file. Every change is made under the lock of the state that it describes, in
//! an order that is valid whenever the process is killed: a record is published after its block's
//! bytes are complete, and cleared before their memory can be reused. The kernel keeps what a
//! killed process had stored, so neither bytes nor records are flushed or protected against torn
//! writes; checksums detect damage, and a reboot invalidates all records.

mod leftover;
mod opening;
mod process;
mod record;
mod recovery;

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use cascade_block::{NamespaceId, checksum};
use cascade_memory::{MemoryError, Pool, PoolFiles, Slab, SlabMut};
use cascade_runtime::LeafMutex;
use cascade_tier::tier::{Address, BlockFacts};
use cascade_tier::{StoreError, WarmStats};

use crate::core::catalog::{KeyIndex, LOWER_STAGES_MAX};
use crate::core::eviction::chunks::Chunks;
use crate::shared::hold::KEYS_PER_HOLD;
pub(crate) use leftover::remove_unused;
pub use leftover::{LeftoverPool, leftover_pools};
pub(crate) use opening::{open, remove};
pub use process::Process;
use record::{BLOCK_WORDS, BlockRecord, HELD_WORDS, HeldRecord, Piece};
pub(crate) use recovery::Recovered;

/// `CASCWARM` in the order of the file's bytes.
const MAGIC: u64 = u64::from_le_bytes(*b"CASCWARM");
const VERSION: u64 = 2;
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
/// Places reserved for the node's own loads, into slabs that a stage fills.
const HELD_FOR_LOADS: usize = 1024;

/// Interval of the check whether holders of memory from an earlier run are alive.
const HOLDERS_RECHECK: Duration = Duration::from_secs(1);

const PAGE: usize = 4096;

/// How another process may access a piece of the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum HeldKind {
    /// Read it.
    Lease = 1,
    /// Write it, until it is sealed.
    Reservation = 2,
}

/// Beside the kinds of `HeldKind`: the kernel reads into the piece for this process.
const LOAD: u32 = 3;
/// A `LOAD` of the previous run. The end of its I/O is unknown, so the piece is not used in this
/// whole run.
const EARLIER_LOAD: u32 = 4;

/// A piece of the pool that another process holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeldPiece {
    offset: usize,
    bytes: usize,
    kind: HeldKind,
}

impl HeldPiece {
    /// A block that a process reads.
    pub fn lease(slab: &Slab) -> Self {
        Self { offset: slab.offset(), bytes: slab.reserved_bytes(), kind: HeldKind::Lease }
    }

    /// A slab that a process writes.
    pub fn reservation(slab: &SlabMut) -> Self {
        let (offset, bytes) = (slab.offset(), slab.reserved_bytes());
        Self { offset, bytes, kind: HeldKind::Reservation }
    }
}

/// Identifies the record of a held piece, to release it.
#[derive(Debug, PartialEq, Eq)]
pub struct HeldId(u32);

/// The exceeded limit, as it is named in the error.
const HELD_PLACES: &str = "pieces of a persistent pool (each view and each reserved slab is one)";

/// Identifies a held piece without a record.
const NO_RECORD: u32 = u32::MAX;

/// Memory that a process of an earlier run may still access: not reused until that process ends.
#[derive(Debug)]
struct HeldSlab {
    place: u32,
    /// None: the kernel, for a process that has ended.
    process: Option<Process>,
    slab: Slab,
}

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
        record::clear(self.block(place));
    }

    fn clear_held(&self, place: u32) {
        record::clear(self.held(place));
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
            stored: addresses.map(stored),
            sum: slab.checksum(),
        };
        // The files are marked before the first record: a record in unmarked files would be removed
        // with them.
        if !std::mem::replace(&mut self.is_used, true) {
            self.table.note_used();
        }
        record.write(self.table.block(place));
        self.set_place(key, place);
    }

    /// Clears a key's record. Called before its slab can be freed or reused.
    pub(crate) fn clear(&mut self, key: KeyIndex) {
        let Some(place) = self.place_of.get_mut(key.0 as usize) else { return };
        let place = std::mem::replace(place, NO_PLACE);
        if place != NO_PLACE {
            self.table.clear_block(place);
            self.free.push(place);
        }
    }

    /// Records the address of a key's block in a stage.
    pub(crate) fn note_stored(&self, key: KeyIndex, stage: usize, address: Address) {
        // A key without a place was not recorded: the ledger was full, or the slab is of another
        // pool.
        let place = self.place_of.get(key.0 as usize).filter(|place| **place != NO_PLACE);
        if let Some(place) = place {
            record::note_stored(self.table.block(*place), stage, stored(Some(address)));
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
            record::wipe(self.table.block(*place));
        }
        Some(from + some.len())
    }

    /// Assigns a recovered record to its key.
    pub(crate) fn keep(&mut self, key: KeyIndex, recovered: &Recovered) {
        self.set_place(key, recovered.place);
    }

    /// Clears a recovered record that is not used, for example of an expired block.
    pub(crate) fn discard(&mut self, recovered: &Recovered) {
        self.table.clear_block(recovered.place);
        self.free.push(recovered.place);
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
            self.slab.verify_checksum(sum) && self.slab.verify_checksum(checksum(&self.slab))
        })
    }

    /// Whether a stage had stored these bytes at this address.
    pub(crate) fn is_stored_at(&self, stage: usize, address: Address) -> bool {
        self.record.stored[stage] == stored(Some(address))
    }
}

fn stored(address: Option<Address>) -> u64 {
    // The address `u64::MAX` means none in the catalog. It wraps to zero, which means none here.
    address.map_or(0, |address| address.0.wrapping_add(1))
}

/// Processes that hold memory. It has its own lock, because leases change without the state's lock.
#[derive(Debug)]
pub(crate) struct Holders {
    table: Arc<LedgerTable>,
    state: LeafMutex<HoldersState>,
}

#[derive(Debug)]
struct HoldersState {
    free: Vec<u32>,
    /// Number of places per process, which limits each process's share.
    of_process: HashMap<Process, usize>,
    kept: Vec<HeldSlab>,
    checked_at: Duration,
}

impl HoldersState {
    /// Most places of a process in all: as many as remain free for the others. So the first process
    /// gets at most half of the table, the next one half of the rest, and each new one finds some.
    fn most_of(&self, process: Process) -> usize {
        let has = self.of_process.get(&process).map_or(0, |count| *count);
        // A process with `has` places that takes `more` of `free` ones may keep as many as remain
        // if `has + more <= free - more`. So its total is at most `(has + free) / 2`.
        usize::midpoint(has, self.free.len().saturating_sub(HELD_FOR_LOADS))
    }

    fn is_sweep_due(&self, now: Duration) -> bool {
        !self.kept.is_empty() && now.saturating_sub(self.checked_at) >= HOLDERS_RECHECK
    }

    fn count_down(&mut self, process: Process, pieces: usize) {
        // A process without entry, such as that of a load, is not counted. Empty entries are
        // removed, so that the map does not grow with processes that have ended.
        if let Entry::Occupied(mut count) = self.of_process.entry(process) {
            *count.get_mut() -= pieces;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }
}

/// Keeps the record of a load for as long as a stage may read into its slab.
#[derive(Debug)]
struct LoadRecord {
    holders: Arc<Holders>,
    id: HeldId,
}

impl Drop for LoadRecord {
    fn drop(&mut self) {
        self.holders.release_ids([std::mem::replace(&mut self.id, HeldId::none())]);
    }
}

impl Holders {
    /// Records pieces that a process holds: all, or none if they exceed its share.
    pub(crate) fn record(
        &self,
        pieces: &[HeldPiece],
        process: Process,
        ids: &mut Vec<HeldId>,
    ) -> Result<(), StoreError> {
        // A batch of misses holds nothing, so it succeeds at the limit, too. In `of_process` it
        // would leave an entry of zero, which `count_down` never removes.
        if pieces.is_empty() {
            return Ok(());
        }
        let mut state = self.lock();
        let has = state.of_process.get(&process).map_or(0, |count| *count);
        let most = state.most_of(process);
        if has + pieces.len() > most {
            return Err(StoreError::Limit { limit: HELD_PLACES, most: most as u64 });
        }
        *state.of_process.entry(process).or_default() += pieces.len();
        // Cannot underflow: within `most`, at least as many places stay free as the process has.
        let rest = state.free.len() - pieces.len();
        for (piece, place) in pieces.iter().zip(state.free.drain(rest..)) {
            let held = HeldRecord {
                piece: Piece { offset: piece.offset as u64, bytes: piece.bytes as u64 },
                process,
                kind: piece.kind as u32,
            };
            held.write(self.table.held(place));
            ids.push(HeldId(place));
        }
        Ok(())
    }

    /// Records that a stage reads into a slab, if a place is free. The record is attached to the
    /// slab, so it also covers a stage that returns late, and ends when the slab is sealed or
    /// dropped.
    pub(crate) fn record_load(self: &Arc<Self>, slab: &mut SlabMut) {
        let Some(place) = self.lock().free.pop() else { return };
        // A place that is taken belongs to this call, so its record is written without the lock.
        let HeldPiece { offset, bytes, .. } = HeldPiece::reservation(slab);
        let piece = Piece { offset: offset as u64, bytes: bytes as u64 };
        // The process is irrelevant: the record is read only after this one has ended.
        let process = Process { pid: 0, start_time: 0 };
        HeldRecord { piece, process, kind: LOAD }.write(self.table.held(place));
        slab.attach_guard(Box::new(LoadRecord { holders: Arc::clone(self), id: HeldId(place) }));
    }

    pub(crate) fn release_ids(&self, ids: impl IntoIterator<Item = HeldId>) {
        let mut state = self.lock();
        // The pieces of one call have one process: it is looked up once, not for each of them.
        let mut counted: Option<(Process, usize)> = None;
        for HeldId(place) in ids {
            if place == NO_RECORD {
                continue;
            }
            // Only the record has the process.
            // A load's record names no process, so nothing is counted for it.
            let process = HeldRecord::process_of(self.table.held(place));
            match &mut counted {
                Some((of, pieces)) if *of == process => *pieces += 1,
                other => {
                    if let Some((of, pieces)) = other.replace((process, 1)) {
                        state.count_down(of, pieces);
                    }
                }
            }
            self.table.clear_held(place);
            state.free.push(place);
        }
        if let Some((of, pieces)) = counted {
            state.count_down(of, pieces);
        }
    }

    /// Releases what a process of an earlier run held. Returns the number of pieces.
    pub(crate) fn release_process(&self, pid: u32) -> usize {
        self.release_where(&mut self.lock(), |process| process.is_some_and(|it| it.pid == pid))
    }

    /// Whether a second has passed since the last sweep, and earlier processes hold memory.
    pub(crate) fn is_sweep_due(&self, now: Duration) -> bool {
        self.lock().is_sweep_due(now)
    }

    /// Releases the memory of ended processes; checks at most once a second. Returns whether any
    /// was released.
    pub(crate) fn sweep(&self, now: Duration) -> bool {
        let mut state = self.lock();
        if !state.is_sweep_due(now) {
            return false;
        }
        state.checked_at = now;
        // One look at `/proc` for each process, however many pieces it holds.
        let mut known: Vec<(Process, bool)> = Vec::new();
        for process in state.kept.iter().filter_map(|kept| kept.process) {
            if known.iter().all(|(it, _)| *it != process) {
                known.push((process, process.is_alive()));
            }
        }
        // Memory of an earlier load has no process, so it is never released here.
        let is_gone =
            |process| known.iter().any(|(it, is_alive)| Some(*it) == process && !is_alive);
        self.release_where(&mut state, is_gone) > 0
    }

    /// Bytes that the kernel may still write for an earlier run; the next run can use them again.
    pub(crate) fn kernel_bytes(&self) -> usize {
        let state = self.lock();
        let slabs = state.kept.iter().filter(|kept| kept.process.is_none()).map(|kept| &kept.slab);
        // Several records may lie in one adopted slab, which counts once.
        let pieces: HashSet<_> = slabs.map(|slab| (slab.offset(), slab.reserved_bytes())).collect();
        pieces.iter().map(|(_, bytes)| bytes).sum()
    }

    pub(crate) fn add_to(&self, stats: &mut WarmStats) {
        stats.held_by_earlier = self.lock().kept.len() as u64;
    }

    fn release_where(
        &self,
        state: &mut HoldersState,
        mut is_released: impl FnMut(Option<Process>) -> bool,
    ) -> usize {
        let (released, kept): (Vec<_>, Vec<_>) =
            state.kept.drain(..).partition(|kept| is_released(kept.process));
        state.kept = kept;
        // The records are cleared before `released` is dropped, which returns the slabs to the
        // pool. `of_process` counts only holders of this run, so it does not change.
        for kept in &released {
            self.table.clear_held(kept.place);
            state.free.push(kept.place);
        }
        released.len()
    }

    /// The guarded state is changed in steps that do not panic, so it is valid in a poisoned lock.
    fn lock(&self) -> MutexGuard<'_, HoldersState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
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
    fn new(table: LedgerTable, pool: Pool, is_used: bool) -> Self {
        // Before the free places are collected: recovery clears the places of invalid records.
        let recovered = recovery::recover(&table, &pool);
        let free = |count: u32, is_free: &dyn Fn(u32) -> bool| {
            // The lowest places are used first: their cache lines are warm.
            (0..count).rev().filter(|place| is_free(*place)).collect::<Vec<_>>()
        };
        // Relaxed: no other thread has the table yet.
        let is_zero = |place: &[AtomicU64]| place[0].load(Ordering::Relaxed) == 0;
        let free_blocks = free(table.block_count, &|place| is_zero(table.block(place)));
        let free_held = free(table.held_count, &|place| is_zero(table.held(place)));
        let table = Arc::new(table);
        let state = HoldersState {
            free: free_held,
            of_process: HashMap::new(),
            kept: recovered.kept,
            checked_at: Duration::ZERO,
        };
        let stats = WarmStats { rejected_records: recovered.rejected, ..WarmStats::default() };
        Self {
            ledger: Ledger {
                table: Arc::clone(&table),
                pool: pool.clone(),
                free: free_blocks,
                place_of: Chunks::default(),
                full_drops: 0,
                is_used,
            },
            holders: Arc::new(Holders { table, state: LeafMutex::new(state) }),
            pool,
            recovered: recovered.blocks,
            stats,
            notes: Vec::new(),
        }
    }
}

impl Holders {
    /// Unlinks the files: the next start finds nothing.
    pub(crate) fn remove_files(&self) -> Result<(), MemoryError> {
        self.table.files.remove()
    }
}

impl HeldId {
    /// For a store whose pool ends with its process: nothing is recorded.
    pub(crate) fn none() -> Self {
        Self(NO_RECORD)
    }
}

/// The namespace in the record of a block that was not put in this run.
pub(crate) fn unknown_namespace() -> NamespaceId {
    NamespaceId::default()
}
