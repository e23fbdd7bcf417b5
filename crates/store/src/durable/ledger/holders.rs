//! The processes that hold memory of a pool: the next run does not reuse it while they live.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use cascade_memory::{MemoryError, Slab, SlabMut};
use cascade_runtime::LeafMutex;
use cascade_tier::{StoreError, WarmStats};

use super::LedgerTable;
use super::process::Process;
use super::record::{HeldRecord, Piece};

/// Places reserved for the node's own loads, into slabs that a stage fills.
const HELD_FOR_LOADS: usize = 1024;

/// Interval of the check whether holders of memory from an earlier run are alive.
const HOLDERS_RECHECK: Duration = Duration::from_secs(1);

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
pub(super) const LOAD: u32 = 3;
/// A `LOAD` of the previous run. The end of its I/O is unknown, so the piece is not used in this
/// whole run.
pub(super) const EARLIER_LOAD: u32 = 4;

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

impl HeldId {
    /// For a store whose pool ends with its process: nothing is recorded.
    pub(crate) fn none() -> Self {
        Self(NO_RECORD)
    }
}

/// Memory that a process of an earlier run may still access: not reused until that process ends.
#[derive(Debug)]
pub(super) struct HeldSlab {
    pub(super) place: u32,
    /// None: the kernel, for a process that has ended.
    pub(super) process: Option<Process>,
    pub(super) slab: Slab,
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
    /// `kept` is held by processes of an earlier run.
    pub(super) fn new(table: Arc<LedgerTable>, free: Vec<u32>, kept: Vec<HeldSlab>) -> Self {
        let of_process = HashMap::new();
        let state = HoldersState { free, of_process, kept, checked_at: Duration::ZERO };
        Self { table, state: LeafMutex::new(state) }
    }

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

    /// Unlinks the files: the next start finds nothing.
    pub(crate) fn remove_files(&self) -> Result<(), MemoryError> {
        self.table.files.remove()
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
