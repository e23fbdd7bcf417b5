//! Writes frames to the end of the active segment, seals it and creates the next.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use cascade_block::{BlockKey, checksum};
use cascade_memory::{HostSlab, Slab};
use cascade_runtime::Deadline;

use super::background::Sealing;
use super::segment::Segment;
use super::write_run::{
    FIRST_WRITE_BYTES_MAX, PendingEntry, PendingPayload, WRITE_BYTES_MAX, WriteRun, payload_pages,
    tombstone,
};
use super::{SegmentFiles, count};
use crate::format::{EntryKind, PAGE_BYTES, RandomId, SegmentFrame, footer_bytes};
use crate::io::{Transfer, TransferKind, TransferOutcome, TransferQueue};
use crate::place::Place as _;
use crate::{Address, BlockFacts, DiskError};

/// The next segment is created when the active one has this part of a segment left, or less.
const CREATE_AHEAD_SHARE: u64 = 8;
/// Pages of a segment that cannot hold payload: header, one frame, the smallest footer.
const OVERHEAD_PAGES: u32 = 4;

/// The writer's state, changed by one thread at a time.
#[derive(Debug)]
pub(super) struct WriterState {
    pub(super) store_id: RandomId,
    pub(super) active: Option<Arc<Segment>>,
    /// The segments before it that other threads seal: one, or more if seals take long.
    pub(super) sealing: Vec<Sealing>,
    /// The segment to write after the active one, if it exists. Nothing is written to it yet.
    pub(super) next: Option<Arc<Segment>>,
    /// Segments with data that is not synced yet: the next one, and those that an error closed.
    pub(super) unsynced: Vec<Arc<Segment>>,
    /// The error of a sync that no flush has reported.
    pub(super) failed_sync: Option<DiskError>,
    /// Further blocks of a key that are or may be on the device: those of failed writes, and those
    /// that the opening merged with others. When the key is removed, they get tombstones too:
    /// otherwise a restart could bring the key back.
    pub(super) other_copies: HashMap<BlockKey, Vec<Address>>,
    pub(super) next_number: u32,
    pub(super) next_sequence: u64,
}

/// The operation in the error of a failed sync.
pub(super) const SYNC: &str = "sync";

impl WriterState {
    /// Tombstones for the further blocks of a key, which is now removed.
    pub(super) fn tombstones_of_other_copies(&mut self, key: &BlockKey) -> Vec<PendingEntry> {
        let copies = self.other_copies.remove(key).unwrap_or_default();
        copies.into_iter().map(|at| tombstone(key, at)).collect()
    }
}

/// The space that a write may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SpaceClass {
    Ordinary,
    Reserve,
    /// As `Reserve`, and above the capacity if the reserve is used up. What is written replaces a
    /// segment that is removed right after.
    Overcommit,
}

/// The writes of entries to one segment; some are in flight while others are prepared.
struct WriteQueue<'a> {
    segment: &'a Arc<Segment>,
    /// The size of the file. Frames and the later footer must fit.
    limit_bytes: u64,
    next_page: u32,
    /// Entries of the segment, which determine the size of its footer.
    entries: usize,
    pending: &'a mut VecDeque<PendingEntry>,
    next_sequence: &'a mut u64,
    runs: Vec<FinishedRun>,
    /// Entries taken from `pending`.
    taken: usize,
    /// Those of them that were left out because their bytes changed in memory.
    changed: Vec<usize>,
}

/// The frames of a run and the result of its write.
type FinishedRun = (Vec<SegmentFrame>, Result<(), DiskError>);

impl WriteQueue<'_> {
    /// Takes as many entries as fit into one write and into the segment.
    fn next_run(&mut self) -> Option<WriteRun> {
        let mut run = WriteRun::default();
        // A short first run: the disk starts with it while the checksums of the next one are
        // computed.
        let bytes_max = if self.runs.is_empty() { FIRST_WRITE_BYTES_MAX } else { WRITE_BYTES_MAX };
        while let Some(next) = self.pending.front() {
            let pages = payload_pages(next) + u32::from(run.needs_frame());
            let end_page = self.next_page + run.pages + pages;
            let fits = fits(self.limit_bytes, end_page, self.entries + run.entries + 1);
            // A block may be longer than the limit of one write. So the first entry of a run is
            // taken whatever its length.
            if !fits || (run.entries > 0 && run.is_full(pages, bytes_max)) {
                break;
            }
            let mut next = self.pending.pop_front().expect("`front` returned it above");
            self.taken += 1;
            if let Some(PendingPayload::Slab(slab)) = &next.payload {
                // Here, because earlier runs are in flight.
                next.checksum = checksum(slab);
                if !slab.slab().verify_checksum(next.checksum) {
                    self.changed.push(self.taken - 1);
                    continue;
                }
            }
            run.add(self.segment, self.next_page, next, self.next_sequence);
        }
        run.finish();
        (run.entries > 0).then_some(run)
    }
}

impl TransferQueue for WriteQueue<'_> {
    fn next_transfer(&mut self) -> Option<(usize, Transfer)> {
        // After a failed run no other starts on this segment; those in flight are completed.
        if self.runs.iter().any(|(_, result)| matches!(result, Err(error) if !is_in_flight(error)))
        {
            return None;
        }
        let run = self.next_run()?;
        let offset = u64::from(self.next_page) * PAGE_BYTES as u64;
        let file = Arc::clone(&self.segment.file);
        let transfer = Transfer::new(TransferKind::Write, file, offset, run.buffers);
        // Pages are assigned when a run starts, because the next run is prepared while this one is
        // in flight. `runs` is thus in the order of the file.
        self.next_page += run.pages;
        self.entries += run.entries;
        let path = self.segment.path.clone();
        let preliminary = Err(DiskError::Timeout { operation: IN_FLIGHT, path });
        self.runs.push((run.frames, preliminary));
        Some((self.runs.len() - 1, transfer))
    }

    fn complete(&mut self, number: usize, outcome: TransferOutcome) {
        let failed = |source| DiskError::from_io("write", &self.segment.path, source);
        self.runs[number].1 = outcome.result.map(drop).map_err(failed);
    }
}

/// The preliminary result of a run. It becomes the final one if the run is never completed.
const IN_FLIGHT: &str = "writing";

fn is_in_flight(error: &DiskError) -> bool {
    matches!(error, DiskError::Timeout { operation: IN_FLIGHT, .. })
}

impl SegmentFiles {
    /// Writes blocks and returns one result for each: the address once the whole block is written
    /// (in a durable tier: is on stable storage). On `Full` the caller should reclaim.
    ///
    /// Compares each slab with its recorded checksum, or records it. A slab that does not match
    /// fails with `ChangedInMemory`: otherwise its bytes would get a new, valid checksum.
    ///
    /// If the key already has a block at another address, that block stays until it is removed.
    #[expect(clippy::missing_panics_doc, reason = "each pending block has a result")]
    pub fn append(
        &self,
        batch: Vec<(BlockFacts, Slab)>,
        deadline: Deadline,
    ) -> Vec<Result<Address, DiskError>> {
        let mut pending = Vec::with_capacity(batch.len());
        let mut results = Vec::with_capacity(batch.len());
        for (meta, slab) in batch {
            // An invalid block must not fail the others of its batch.
            results.push(self.check_block(&meta, slab).map(|slab| {
                pending.push(PendingEntry {
                    kind: EntryKind::Block,
                    meta,
                    target: Address(0),
                    // Computed when the block is taken, while earlier runs are in flight.
                    checksum: 0,
                    sequence: None,
                    payload: Some(PendingPayload::Slab(slab)),
                });
            }));
        }
        let written = match self.lock(&self.writer, deadline) {
            Ok(mut writer) => self.write(&mut writer, pending, SpaceClass::Ordinary, deadline),
            Err(error) => pending.iter().map(|_| Err(error.clone())).collect(),
        };
        let mut written = written.into_iter();
        results
            .into_iter()
            .map(|result| {
                result.and_then(|()| written.next().expect("one result for each pending block"))
            })
            .collect()
    }

    fn check_block(&self, meta: &BlockFacts, slab: Slab) -> Result<HostSlab, DiskError> {
        let payload_bytes = u64::from(meta.bytes);
        let limit_bytes =
            self.capacity.segment_bytes() - u64::from(OVERHEAD_PAGES) * PAGE_BYTES as u64;
        if payload_bytes == 0 || payload_bytes > limit_bytes {
            return Err(DiskError::BadLength { payload_bytes, limit_bytes });
        }
        let slab_bytes = slab.len() as u64;
        if slab_bytes != payload_bytes {
            return Err(DiskError::LengthMismatch { payload_bytes, slab_bytes });
        }
        slab.into_host().map_err(|_| DiskError::NotHostMemory)
    }

    /// Removes keys from addresses; the removal lasts across restarts. Unknown pairs are skipped.
    ///
    /// Reads return `Gone` from now on, even if the removal could not be written. In that case an
    /// error is returned, and a restart may bring the key back. The exception is a `Timeout` while
    /// waiting for earlier writes: then nothing was removed.
    pub(super) fn remove_keys(
        &self,
        keys: &[(BlockKey, Address)],
        deadline: Deadline,
    ) -> Result<(), DiskError> {
        let mut writer = self.lock(&self.writer, deadline)?;
        let mut tombstones = Vec::with_capacity(keys.len());
        for (key, address) in keys {
            // First in memory, so that reads return `Gone` even if the tombstone is not written.
            let has_key = |at| self.remove_from_memory(key, at).then_some(at);
            if let Some(at) = self.find_moved(*address, has_key) {
                tombstones.push(tombstone(key, at));
                tombstones.extend(writer.tombstones_of_other_copies(key));
            }
        }
        // A removal may use the reserve, because it must work in a full tier.
        self.write_all(&mut writer, tombstones, SpaceClass::Reserve, deadline)
    }

    /// Removes a key from its block in memory. Returns whether the block had it.
    pub(super) fn remove_from_memory(&self, key: &BlockKey, address: Address) -> bool {
        let Some(segment) = self.segment(address.segment()) else { return false };
        // Lock order: aliases, then the state of a segment.
        let mut aliases = self.aliases();
        let mut state = segment.state_mut();
        let Some(slot) = state.slot(address.page()) else { return false };
        if slot.is_first_key(key) {
            state.remove_first_key(address.page(), aliases.contains_key(&address));
            return true;
        }
        let Some(others) = aliases.get_mut(&address) else { return false };
        let before = others.len();
        others.retain(|alias| alias.meta.key != *key);
        let was_there = others.len() < before;
        if others.is_empty() {
            aliases.remove(&address);
            state.mark_dead_if_unkeyed(address.page());
        }
        was_there
    }

    /// Writes entries in order, to as many segments as needed. Returns one result each. May leave a
    /// segment that is being sealed, and one that is empty.
    pub(super) fn write(
        &self,
        writer: &mut WriterState,
        pending: Vec<PendingEntry>,
        space: SpaceClass,
        deadline: Deadline,
    ) -> Vec<Result<Address, DiskError>> {
        let total = pending.len();
        let mut pending = VecDeque::from(pending);
        let mut results = Vec::with_capacity(total);
        let mut failure = None;
        while let Some(first) = pending.front() {
            // Room for a frame with the first entry is enough: the entries that do not fit are
            // written in the next round.
            let pages = 1 + payload_pages(first);
            let segment = match self.segment_with_room(writer, pages, space, deadline) {
                Ok(segment) => segment,
                Err(error) => {
                    failure = Some(error);
                    break;
                }
            };
            let creation = if space == SpaceClass::Ordinary && self.is_next_due(writer, &pending) {
                self.begin_create(writer, deadline)
            } else {
                None
            };
            let (runs, changed) = self.write_runs(writer, &segment, &mut pending, deadline);
            if let Some(creation) = creation {
                self.finish_create(writer, creation, deadline);
            }
            if runs.is_empty() && changed.is_empty() {
                // No transfer begins after the deadline.
                let path = segment.path.clone();
                failure = Some(DiskError::Timeout { operation: "write", path });
                break;
            }
            let failed = runs.iter().find_map(|(_, result)| result.clone().err());
            for (key, address) in failed_blocks(&runs) {
                writer.other_copies.entry(key).or_default().push(address);
            }
            let first = results.len();
            results.extend(self.commit(&segment, runs));
            for at in changed {
                results.insert(first + at, Err(DiskError::ChangedInMemory));
            }
            if failed.is_some() {
                // After a write error the content of the device is unknown, so nothing more is
                // written to this segment. Entries not written yet fail with the same error.
                self.close_failed(writer, &segment);
                failure = failed;
                break;
            }
        }
        if let Some(error) = failure {
            results.resize_with(total, || Err(error.clone()));
        }
        results
    }

    /// As [`Self::write`], but returns the first error instead of one result for each entry.
    pub(super) fn write_all(
        &self,
        writer: &mut WriterState,
        pending: Vec<PendingEntry>,
        space: SpaceClass,
        deadline: Deadline,
    ) -> Result<(), DiskError> {
        self.write(writer, pending, space, deadline).into_iter().try_for_each(|each| each.map(drop))
    }

    /// Writes as many runs as fit into the segment, several at once. Also returns the positions of
    /// the entries that were left out because their bytes changed in memory.
    fn write_runs(
        &self,
        writer: &mut WriterState,
        segment: &Arc<Segment>,
        pending: &mut VecDeque<PendingEntry>,
        deadline: Deadline,
    ) -> (Vec<FinishedRun>, Vec<usize>) {
        // One guard: a thread that locks a state twice for reading can deadlock with a writer.
        let (limit_bytes, next_page, entries) = {
            let state = segment.state();
            (state.file_bytes, state.end_page, state.entry_count())
        };
        let mut queue = WriteQueue {
            segment,
            limit_bytes,
            next_page,
            entries,
            pending,
            next_sequence: &mut writer.next_sequence,
            runs: Vec::new(),
            taken: 0,
            changed: Vec::new(),
        };
        self.io.run(&mut queue, deadline);
        let WriteQueue { mut runs, changed, .. } = queue;
        if self.config.durable && !runs.is_empty() {
            // If one run failed, the others are not synced either and fail with it.
            let failed = runs.iter().find_map(|(_, result)| result.clone().err());
            let error = failed.or_else(|| {
                // One sync covers all runs.
                let sync =
                    self.io.transfer_one(Transfer::sync(Arc::clone(&segment.file)), deadline);
                sync.err().map(|source| DiskError::from_io("sync", &segment.path, source))
            });
            for (_, result) in &mut runs {
                *result = error.clone().map_or(Ok(()), Err);
            }
        }
        (runs, changed)
    }

    /// Records written entries in memory, in the order of the segment.
    fn commit(&self, segment: &Segment, runs: Vec<FinishedRun>) -> Vec<Result<Address, DiskError>> {
        let mut state = segment.state_mut();
        let mut results = Vec::new();
        for (frames, result) in runs {
            for entry in frames.iter().flat_map(|frame| &frame.entries) {
                if result.is_ok() {
                    state.add_entry(entry);
                    count(&self.counters.records_written, 1);
                    if entry.kind == EntryKind::Block {
                        let bytes = u64::from(entry.meta.bytes);
                        count(&self.counters.bytes_written, bytes);
                    }
                }
                results.push(result.clone().map(|()| entry.address));
            }
            let last = frames.last().expect("a run has a frame");
            // Also after a failed run: the device may hold a part of it, and its pages are never
            // written again. A scan skips them.
            state.end_page = last.page + last.page_count;
        }
        results
    }

    /// The active segment if it has room for this many pages, otherwise a new one.
    ///
    /// Ordinary writes stop when less than one segment is free: removals and reclaims need that
    /// reserve. Writes to the reserve use what is left of it.
    fn segment_with_room(
        &self,
        writer: &mut WriterState,
        pages: u32,
        space: SpaceClass,
        deadline: Deadline,
    ) -> Result<Arc<Segment>, DiskError> {
        let found = self.find_segment(writer, pages, space, deadline);
        let is_full = matches!(found, Err(DiskError::Full { .. } | DiskError::NoSpace { .. }));
        if is_full && !writer.sealing.is_empty() {
            // The end of the seal makes the file shorter.
            self.finish_seals(writer, deadline);
            return self.find_segment(writer, pages, space, deadline);
        }
        found
    }

    /// Whether to create the next segment beside the writes of these entries: the active one has no
    /// room for them and for as much again as is created ahead. A creation that begins with the
    /// last writes of a segment lasts longer than they do.
    fn is_next_due(&self, writer: &WriterState, pending: &VecDeque<PendingEntry>) -> bool {
        if writer.next.is_some() {
            return false;
        }
        let Some(active) = &writer.active else { return false };
        let state = active.state();
        let room = state.file_bytes.saturating_sub(u64::from(state.end_page) * PAGE_BYTES as u64);
        let pages: u64 = pending.iter().map(|entry| u64::from(payload_pages(entry))).sum();
        pages * PAGE_BYTES as u64 + self.capacity.segment_bytes() / CREATE_AHEAD_SHARE > room
    }

    /// As [`Self::segment_with_room`], whether or not a segment is being sealed.
    fn find_segment(
        &self,
        writer: &mut WriterState,
        pages: u32,
        space: SpaceClass,
        deadline: Deadline,
    ) -> Result<Arc<Segment>, DiskError> {
        let kept_free =
            if space == SpaceClass::Ordinary { self.capacity.segment_bytes() } else { 0 };
        if let Some(active) = &writer.active {
            let state = active.state();
            let (end_page, entries) = (state.end_page + pages, state.entry_count() + 1);
            let fits = fits(state.file_bytes, end_page, entries);
            drop(state);
            if fits {
                // The file is preallocated and counted in full, so the write adds nothing. Only the
                // reserve is checked.
                if space != SpaceClass::Overcommit {
                    self.check_capacity(0, kept_free, pages)?;
                }
                return Ok(Arc::clone(active));
            }
        }
        if let Some(next) = writer.next.take() {
            self.begin_seal(writer, deadline);
            writer.unsynced.retain(|segment| !Arc::ptr_eq(segment, &next));
            writer.active = Some(Arc::clone(&next));
            return Ok(next);
        }
        if space != SpaceClass::Ordinary {
            // What the reserve has left is computed from the lengths of sealed files.
            self.finish_seals(writer, deadline);
        }
        // The active segment is sealed only after the capacity check: an append that fails with
        // `Full` leaves it open for smaller entries.
        let sealed = bytes_freed_by_sealing(writer);
        let allocate_bytes = match space {
            SpaceClass::Ordinary => {
                let segment_bytes = self.capacity.segment_bytes();
                self.check_capacity(sealed, segment_bytes + kept_free, pages)?;
                segment_bytes
            }
            SpaceClass::Reserve | SpaceClass::Overcommit => {
                self.reserve_segment_bytes(sealed, pages, space)?
            }
        };
        if space == SpaceClass::Ordinary {
            self.begin_seal(writer, deadline);
        } else {
            self.seal(writer, deadline);
        }
        let segment = self.create_segment(writer, allocate_bytes, deadline)?;
        writer.active = Some(Arc::clone(&segment));
        Ok(segment)
    }

    /// The size of a new segment in the reserve. Less than a whole segment is left if a process was
    /// killed while it wrote there.
    fn reserve_segment_bytes(
        &self,
        freed_bytes: u64,
        pages: u32,
        space: SpaceClass,
    ) -> Result<u64, DiskError> {
        let used_bytes = self.used_bytes() - freed_bytes;
        let left_bytes = self.capacity.limit_bytes().saturating_sub(used_bytes);
        let page_bytes = PAGE_BYTES as u64;
        let allocate_bytes =
            left_bytes.min(self.capacity.segment_bytes()) / page_bytes * page_bytes;
        // `pages` includes the page of the frame, which is part of `OVERHEAD_PAGES` too.
        let min_bytes = u64::from(OVERHEAD_PAGES - 1 + pages) * page_bytes;
        if allocate_bytes >= min_bytes {
            Ok(allocate_bytes)
        } else if space == SpaceClass::Overcommit {
            Ok(min_bytes)
        } else {
            let needed_bytes = u64::from(pages) * page_bytes;
            let capacity_bytes = self.capacity.limit_bytes();
            Err(DiskError::Full { needed_bytes, used_bytes, capacity_bytes })
        }
    }

    /// Checks that this many bytes may be added to the files after `freed_bytes` were freed.
    pub(super) fn check_capacity(
        &self,
        freed_bytes: u64,
        added_bytes: u64,
        pages: u32,
    ) -> Result<(), DiskError> {
        let used_bytes = self.used_bytes() - freed_bytes;
        let capacity_bytes = self.capacity.limit_bytes();
        if used_bytes + added_bytes > capacity_bytes {
            let needed_bytes = u64::from(pages) * PAGE_BYTES as u64;
            return Err(DiskError::Full { needed_bytes, used_bytes, capacity_bytes });
        }
        Ok(())
    }

    /// Closes a segment after a failed write. Its blocks stay readable.
    pub(super) fn close_failed(&self, writer: &mut WriterState, segment: &Arc<Segment>) {
        count(&self.counters.segments_failed, 1);
        writer.active = None;
        writer.unsynced.push(Arc::clone(segment));
    }

    /// Syncs everything written so far. Sealed segments were synced when they were sealed, in a
    /// durable tier when they were written.
    pub(super) fn sync_active(
        &self,
        writer: &mut WriterState,
        deadline: Deadline,
    ) -> Result<(), DiskError> {
        // First: a seal that fails leaves a segment to sync.
        self.wait_for_seals(writer, deadline)?;
        let mut segments = std::mem::take(&mut writer.unsynced);
        segments.extend(writer.active.clone());
        let mut outcome = Ok(());
        for segment in segments {
            // The other segments are synced even if one fails; the last error is returned.
            if let Err(source) =
                self.io.transfer_one(Transfer::sync(Arc::clone(&segment.file)), deadline)
            {
                outcome = Err(DiskError::from_io(SYNC, &segment.path, source));
                // A failed sync is treated as a failed write: nothing more is written to the
                // segment.
                for to_write in [&mut writer.active, &mut writer.next] {
                    if to_write.take_if(|its| Arc::ptr_eq(its, &segment)).is_some() {
                        count(&self.counters.segments_failed, 1);
                    }
                }
                // Until a sync of it succeeds, no caller may be told that all is synced: its blocks
                // may be those of another caller than this one.
                writer.unsynced.push(segment);
            }
        }
        outcome?;
        // The names of new segments. `create_segment` syncs them only in a durable tier.
        self.io.sync_directory(&self.config.directory, deadline)
    }
}

/// The blocks of failed runs.
fn failed_blocks(runs: &[FinishedRun]) -> impl Iterator<Item = (BlockKey, Address)> {
    let failed = runs.iter().filter(|(_, result)| result.is_err());
    failed
        .flat_map(|(frames, _)| frames.iter().flat_map(|frame| &frame.entries))
        .filter(|entry| entry.kind == EntryKind::Block)
        .map(|entry| (entry.meta.key, entry.address))
}

/// Whether a segment of `limit_bytes` has room for the pages and for a footer with the entries.
fn fits(limit_bytes: u64, end_page: u32, entry_count: usize) -> bool {
    u64::from(end_page) * PAGE_BYTES as u64 + footer_bytes(entry_count) <= limit_bytes
}

/// Bytes by which sealing the active segment would shrink its file.
fn bytes_freed_by_sealing(writer: &WriterState) -> u64 {
    writer.active.as_ref().map_or(0, |active| {
        let state = active.state();
        let sealed =
            u64::from(state.end_page) * PAGE_BYTES as u64 + footer_bytes(state.entry_count());
        state.file_bytes.saturating_sub(sealed)
    })
}
