//! The ledger: which blocks lie where in a pool that outlives its process, and who holds memory.
//!
//! A table in a mapped file. Every change is made under the lock of what it describes, and in an
//! order that is right whenever the process dies: a record is published after its block's bytes are
//! complete and cleared before their memory can be given to anybody else. The kernel keeps what a
//! killed process had stored, so neither bytes nor records are flushed or checksummed against
//! tearing; the checksums here find damage, and a machine that was started anew makes every record
//! void.

mod left;
mod opening;
mod process;
mod record;
mod recovery;

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cascade_block::{NamespaceId, checksum};
use cascade_memory::{MemoryError, Pool, PoolFiles, Slab, SlabMut};

use crate::StoreError;
use crate::catalog::{Address, KeyIndex, LOWER_STAGES_MAX};
use crate::stage::BlockFacts;
pub(crate) use left::remove_unused;
pub use left::{LeftPool, left_pools};
pub(crate) use opening::{open, remove};
pub use process::Process;
use record::{BLOCK_WORDS, BlockRecord, HELD_WORDS, HeldRecord, Piece};
pub(crate) use recovery::Recovered;

/// `CASCWARM` in the order of the file's bytes.
const MAGIC: u64 = u64::from_le_bytes(*b"CASCWARM");
const VERSION: u64 = 2;
/// The header takes a page, so that records start at cache lines.
const HEADER_WORDS: usize = 512;
/// Words of the header that its checksum covers; the checksum follows, then the count of runs, then
/// whether the files ever held a block.
const HEADER_FIELDS: usize = 10;
const RUNS_WORD: usize = HEADER_FIELDS + 1;
const USED_WORD: usize = RUNS_WORD + 1;
/// In `USED_WORD` from the first block on. Until then there is nothing in the files to find.
const USED: u64 = 1;

/// One record for so many bytes of the pool: blocks that are smaller may find no place.
const POOL_BYTES_PER_RECORD: usize = 32 << 10;
const RECORDS_MIN: usize = 1024;
/// One place for a piece that a process holds for so many bytes of the pool. Several processes may
/// hold one block, and blocks may be small.
const POOL_BYTES_PER_HELD: usize = 4 << 10;
/// Small pools have more: 2 MiB of ledger, so that one client may hold 16,000 small blocks.
const HELD_MIN: usize = 32 << 10;
/// Large pools have fewer: 128 MiB of ledger at most.
const HELD_MAX: usize = 2 << 20;
/// Places that clients leave to the node itself, for slabs that a stage reads into.
const HELD_FOR_LOADS: usize = 1024;

/// How often it is looked whether holders of memory from an earlier run still live.
const HOLDERS_RECHECK: Duration = Duration::from_secs(1);

const PAGE: usize = 4096;

/// What became of the blocks of an earlier run, and how full the ledger is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub struct WarmStats {
    /// Keys that were in DRAM when the process before this one ended, and are again.
    pub recovered_blocks: u64,
    /// Bytes of their contents, each counted once.
    pub recovered_bytes: u64,
    /// Records that were damaged, contradicted each other or had no memory.
    pub rejected_records: u64,
    /// How long it took to open the pool and take its blocks over.
    pub recover_ms: u64,
    /// How often a store has opened these files, this time included.
    pub runs: u64,
    /// Places for keys in the ledger.
    pub ledger_capacity: u64,
    /// Of these, taken.
    pub ledger_records: u64,
    /// Keys that came to DRAM while the ledger was full: a restart will not find them there.
    pub ledger_full_drops: u64,
    /// Memory that processes of an earlier run may still touch, as pieces.
    pub held_by_earlier: u64,
}

/// What another process may do with a piece of the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum HeldKind {
    /// Read it.
    Lease = 1,
    /// Write it, until it is sealed.
    Reservation = 2,
}

/// As a `HeldKind`: the kernel reads into it for this process.
const LOAD: u32 = 3;
/// The same of the run before: nobody can tell when the kernel is done, but a run is long.
const EARLIER_LOAD: u32 = 4;

/// A piece of the pool that another process holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeldPiece {
    offset: usize,
    bytes: usize,
    kind: HeldKind,
}

impl HeldPiece {
    /// A block that is read.
    pub fn lease(slab: &Slab) -> Self {
        Self { offset: slab.offset(), bytes: slab.reserved_bytes(), kind: HeldKind::Lease }
    }

    /// A slab that is written.
    pub fn reservation(slab: &SlabMut) -> Self {
        let (offset, bytes) = (slab.offset(), slab.reserved_bytes());
        Self { offset, bytes, kind: HeldKind::Reservation }
    }
}

/// Names a note about held memory, to take it back.
#[derive(Debug, PartialEq, Eq)]
pub struct HeldId(u32);

/// What a process is told that it has too much of.
const HELD_PLACES: &str = "pieces of the pool that outlives its node, one for each view and slab";

/// Stands for a note that no ledger keeps.
const NOT_KEPT: u32 = u32::MAX;

/// Memory that a process of an earlier run may still touch: out of circulation until it is gone.
#[derive(Debug)]
struct Kept {
    place: u32,
    /// None: the kernel, for a process that is gone.
    process: Option<Process>,
    slab: Slab,
}

/// The mapped table and its parts.
#[derive(Debug)]
struct Table {
    files: PoolFiles,
    block_count: u32,
    held_count: u32,
}

impl Table {
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

    /// From now on the files hold something, so they outlive this store unless it removes them.
    fn note_used(&self) {
        self.files.keep();
        self.files.words().words()[USED_WORD].store(USED, Ordering::Release);
    }
}

/// Which keys' blocks lie where. Belongs to the node's state and its lock.
#[derive(Debug)]
pub(crate) struct Ledger {
    table: Arc<Table>,
    pool: Pool,
    free: Vec<u32>,
    /// The place of each key's record, by the key's index.
    place_of: Vec<u32>,
    full_drops: u64,
    /// Whether the files are marked as holding blocks.
    is_used: bool,
}

const NO_PLACE: u32 = u32::MAX;

impl Ledger {
    /// Enters that a key's content lies in a slab. `facts` are those it was put with, if it was
    /// put just now. A full ledger counts what it does not take.
    pub(crate) fn record(
        &mut self,
        key: KeyIndex,
        facts: &BlockFacts,
        has_namespace: bool,
        slab: &Slab,
        addresses: [Option<Address>; LOWER_STAGES_MAX],
    ) {
        self.clear(key);
        // A slab of another pool means nothing to whoever opens this one.
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
        if !std::mem::replace(&mut self.is_used, true) {
            self.table.note_used();
        }
        record.write(self.table.block(place));
        self.set_place(key, place);
    }

    /// Takes a key's record out, before its slab can go or mean something else.
    pub(crate) fn clear(&mut self, key: KeyIndex) {
        let Some(place) = self.place_of.get_mut(key.0 as usize) else { return };
        let place = std::mem::replace(place, NO_PLACE);
        if place != NO_PLACE {
            self.table.clear_block(place);
            self.free.push(place);
        }
    }

    /// A stage has a key's block there.
    pub(crate) fn note_stored(&self, key: KeyIndex, stage: usize, address: Address) {
        let place = self.place_of.get(key.0 as usize).filter(|place| **place != NO_PLACE);
        if let Some(place) = place {
            record::note_stored(self.table.block(*place), stage, stored(Some(address)));
        }
    }

    /// The checksum of a key's bytes became known.
    pub(crate) fn note_sum(&self, key: KeyIndex, sum: u32) {
        let place = self.place_of.get(key.0 as usize).filter(|place| **place != NO_PLACE);
        if let Some(place) = place {
            record::note_sum(self.table.block(*place), sum);
        }
    }

    /// Zeroes what cleared records have left: the names and digests of blocks.
    pub(crate) fn wipe_free(&self) {
        for place in &self.free {
            record::wipe(self.table.block(*place));
        }
    }

    /// A recovered key keeps the record that it was found by.
    pub(crate) fn keep(&mut self, key: KeyIndex, recovered: &Recovered) {
        self.set_place(key, recovered.place);
    }

    /// A recovered record is of no use after all, such as an expired block's.
    pub(crate) fn discard(&mut self, recovered: &Recovered) {
        self.table.clear_block(recovered.place);
        self.free.push(recovered.place);
    }

    /// Adds what this part knows to the figures.
    pub(crate) fn add_to(&self, stats: &mut WarmStats) {
        stats.ledger_capacity = u64::from(self.table.block_count);
        stats.ledger_records = stats.ledger_capacity - self.free.len() as u64;
        stats.ledger_full_drops = self.full_drops;
    }

    fn set_place(&mut self, key: KeyIndex, place: u32) {
        let at = key.0 as usize;
        if at >= self.place_of.len() {
            self.place_of.resize(at + 1, NO_PLACE);
        }
        self.place_of[at] = place;
    }
}

impl Recovered {
    /// What the block was put with.
    pub(crate) fn facts(&self) -> &BlockFacts {
        &self.record.facts
    }

    /// Whether `facts` has the namespace, without which it cannot be written down.
    pub(crate) fn has_namespace(&self) -> bool {
        self.record.has_namespace
    }

    pub(crate) fn slab(&self) -> &Slab {
        &self.slab
    }

    /// Whether the bytes are those that the record has the checksum of. Without one they are taken
    /// as they are, and their checksum is taken with the next pass over DRAM.
    pub(crate) fn is_intact(&self) -> bool {
        self.record.sum.is_none_or(|sum| {
            self.slab.agrees_with(sum) && self.slab.agrees_with(checksum(&self.slab))
        })
    }

    /// Whether a stage had taken these very bytes under this address.
    pub(crate) fn is_stored_at(&self, stage: usize, address: Address) -> bool {
        self.record.stored[stage] == stored(Some(address))
    }
}

fn stored(address: Option<Address>) -> u64 {
    address.map_or(0, |address| address.0.wrapping_add(1))
}

/// Who holds memory. Has a lock of its own: leases come and go beside the blocks.
#[derive(Debug)]
pub(crate) struct Holders {
    table: Arc<Table>,
    state: Mutex<HoldersState>,
}

#[derive(Debug)]
struct HoldersState {
    free: Vec<u32>,
    /// How many places each process has, so that none takes those of the others.
    of_process: HashMap<Process, usize>,
    kept: Vec<Kept>,
    checked_at: Duration,
}

impl HoldersState {
    /// How many places a process may have in all: as many as stay free for the others. So one alone
    /// gets half of the table, and the next one half of what that left: whoever comes finds some.
    fn most_of(&self, process: Process) -> usize {
        let has = self.of_process.get(&process).map_or(0, |count| *count);
        usize::midpoint(has, self.free.len().saturating_sub(HELD_FOR_LOADS))
    }

    fn count_down(&mut self, process: Process) {
        if let Entry::Occupied(mut count) = self.of_process.entry(process) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }
}

/// A note that lasts as long as a stage may read into its slab.
#[derive(Debug)]
struct LoadNote {
    holders: Arc<Holders>,
    id: HeldId,
}

impl Drop for LoadNote {
    fn drop(&mut self) {
        self.holders.take_back([std::mem::replace(&mut self.id, HeldId::not_kept())]);
    }
}

impl Holders {
    /// Notes pieces that a process holds; all or none, if they are more than its share.
    pub(crate) fn note(
        &self,
        pieces: &[HeldPiece],
        process: Process,
        ids: &mut Vec<HeldId>,
    ) -> Result<(), StoreError> {
        let mut state = self.lock();
        let has = state.of_process.get(&process).map_or(0, |count| *count);
        let most = state.most_of(process);
        if has + pieces.len() > most {
            return Err(StoreError::Limit { limit: HELD_PLACES, most: most as u64 });
        }
        if pieces.is_empty() {
            return Ok(());
        }
        *state.of_process.entry(process).or_default() += pieces.len();
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

    /// Notes that a stage reads into a slab, if there is a place for it. The note goes with the
    /// slab, also one that a stage gives back late, and ends when that is sealed or dropped.
    pub(crate) fn note_load(self: &Arc<Self>, slab: &mut SlabMut) {
        let Some(place) = self.lock().free.pop() else { return };
        let HeldPiece { offset, bytes, .. } = HeldPiece::reservation(slab);
        let piece = Piece { offset: offset as u64, bytes: bytes as u64 };
        // Whose it is does not matter: it counts when this process is gone.
        let process = Process { pid: 0, start_time: 0 };
        HeldRecord { piece, process, kind: LOAD }.write(self.table.held(place));
        slab.accompany(Box::new(LoadNote { holders: Arc::clone(self), id: HeldId(place) }));
    }

    pub(crate) fn take_back(&self, ids: impl IntoIterator<Item = HeldId>) {
        let mut state = self.lock();
        for HeldId(place) in ids {
            if place != NOT_KEPT {
                // Whose it was stands in the record alone.
                state.count_down(HeldRecord::process_of(self.table.held(place)));
                self.table.clear_held(place);
                state.free.push(place);
            }
        }
    }

    /// Gives back what a process of an earlier run held. Returns how many pieces.
    pub(crate) fn release(&self, pid: u32) -> usize {
        self.release_where(&mut self.lock(), |process| process.is_some_and(|it| it.pid == pid))
    }

    /// Gives back what processes held that are gone; looks no more than once a second. True if
    /// there was any.
    pub(crate) fn sweep(&self, now: Duration) -> bool {
        let mut state = self.lock();
        if state.kept.is_empty() || now.saturating_sub(state.checked_at) < HOLDERS_RECHECK {
            return false;
        }
        state.checked_at = now;
        let mut known: Vec<(Process, bool)> = Vec::new();
        for process in state.kept.iter().filter_map(|kept| kept.process) {
            if known.iter().all(|(it, _)| *it != process) {
                known.push((process, process.is_alive()));
            }
        }
        let is_gone =
            |process| known.iter().any(|(it, is_alive)| Some(*it) == process && !is_alive);
        self.release_where(&mut state, is_gone) > 0
    }

    /// Bytes that the kernel may still write for an earlier run: they come back with the next one.
    pub(crate) fn kernel_bytes(&self) -> usize {
        let state = self.lock();
        let slabs = state.kept.iter().filter(|kept| kept.process.is_none()).map(|kept| &kept.slab);
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
        for kept in &released {
            self.table.clear_held(kept.place);
            state.free.push(kept.place);
        }
        released.len()
    }

    /// Changed in steps that do not panic, so a poisoned lock still guards a sound list.
    fn lock(&self) -> MutexGuard<'_, HoldersState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A pool with a name, and what an earlier run left in it.
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
    fn new(table: Table, pool: Pool, is_used: bool) -> Self {
        let harvest = recovery::harvest(&table, &pool);
        let free = |count: u32, is_free: &dyn Fn(u32) -> bool| {
            // The lowest are taken first: they are the ones whose cache lines are warm.
            (0..count).rev().filter(|place| is_free(*place)).collect::<Vec<_>>()
        };
        let is_zero = |place: &[AtomicU64]| place[0].load(Ordering::Relaxed) == 0;
        let free_blocks = free(table.block_count, &|place| is_zero(table.block(place)));
        let free_held = free(table.held_count, &|place| is_zero(table.held(place)));
        let table = Arc::new(table);
        let state = HoldersState {
            free: free_held,
            of_process: HashMap::new(),
            kept: harvest.kept,
            checked_at: Duration::ZERO,
        };
        let stats = WarmStats { rejected_records: harvest.rejected, ..WarmStats::default() };
        Self {
            ledger: Ledger {
                table: Arc::clone(&table),
                pool: pool.clone(),
                free: free_blocks,
                place_of: Vec::new(),
                full_drops: 0,
                is_used,
            },
            holders: Arc::new(Holders { table, state: Mutex::new(state) }),
            pool,
            recovered: harvest.blocks,
            stats,
            notes: Vec::new(),
        }
    }
}

impl Holders {
    /// Takes the files' names away: the next start finds nothing.
    pub(crate) fn remove_files(&self) -> Result<(), MemoryError> {
        self.table.files.remove()
    }
}

impl HeldId {
    /// For a store whose pool ends with it: there is nothing to note.
    pub(crate) fn not_kept() -> Self {
        Self(NOT_KEPT)
    }
}

/// What a record has for the namespace of a block whose put is not at hand.
pub(crate) fn unknown_namespace() -> NamespaceId {
    NamespaceId::default()
}
