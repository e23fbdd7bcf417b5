//! Opens a tier: finds segments, applies checkpoint and footers, scans unsealed segments.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cascade_block::{Checksum, checksum, with_causes};
use cascade_memory::Pool;
use cascade_runtime::{Clock, Deadline, DeadlineMutex, Mutex, RwLock, fill_random};

use super::capacity::Capacity;
use super::flush::{forget_removed, sync_for_flush};
use super::replay::{ReplayResult, replay};
use super::seal::seal_segment;
use super::segment::{BlockSlot, EntryLocation, Segment, SegmentState};
use super::write::{SpaceClass, WriterState};
use super::write_run::tombstone;
use super::{Alias, Aliases, SegmentCounters, SegmentFiles};
use crate::device_probe::probe_direct;
use crate::format::{
    Checkpoint, CoveredSegment, EntryKind, FormatError, PAGE_BYTES, RandomId, RecordEntry,
    encode_entries,
};
use crate::io::{FileHandle, FileIo, OpenMode, read_whole};
use crate::lock::DirectoryLock;
use crate::place::Place as _;
use crate::problem_log::ProblemLog;
use crate::scan::{FileSource, ScanError, ScanOptions, SegmentContent, read_segment, segment_name};
use crate::shared_sync::SharedSync;
use crate::{
    Address, BlockFacts, DiskError, FilesConfig, IoEngine, StoredManifest, manifests, old_layout,
};

/// What an opening found.
#[derive(Debug, Clone, Default)]
pub struct Recovery {
    /// All live blocks and aliases, oldest first. Keys of the same bytes have one address.
    pub live: Vec<(BlockFacts, Address)>,
    /// Blocks that were not written completely.
    pub torn_records: u64,
    /// Headers and footers that do not match their checksum.
    pub damaged_structures: u64,
    /// Blocks omitted because they had expired.
    pub expired_records: u64,
    /// Number of files.
    pub files: u64,
    /// Number of files that were scanned frame by frame.
    pub scanned_files: u64,
    /// Whether a checkpoint was used.
    pub used_checkpoint: bool,
    /// Manifest files that are invalid.
    pub invalid_manifests: Vec<StoredManifest>,
    /// Paths that cannot be used, such as a directory with the name of a file. They are not
    /// touched.
    pub misplaced_files: u64,
}

/// A segment found at opening, with its content.
#[derive(Debug)]
struct RecoveredSegment {
    number: u32,
    path: PathBuf,
    file: Arc<FileHandle>,
    content: SegmentContent,
    entry_location: EntryLocation,
}

impl SegmentFiles {
    /// Opens a file tier on the file systems of this machine and recovers what it holds.
    ///
    /// `pool` is where slabs come from; `io_uring` may register its memory.
    ///
    /// # Errors
    /// The directory cannot be used.
    pub fn open(
        config: FilesConfig,
        clock: Arc<dyn Clock>,
        pool: &Pool,
        deadline: Deadline,
    ) -> Result<Self, DiskError> {
        let io =
            FileIo::system(config.engine, config.direct, config.queue_depth, Some(pool), clock)?;
        config.check()?;
        Self::recover_from(config, io, deadline)
    }

    /// [`Self::open`] with the caller's I/O instead of the system's, such as a simulated disk. The
    /// setting of the I/O engine is ignored.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_with(
        config: FilesConfig,
        io: FileIo,
        deadline: Deadline,
    ) -> Result<Self, DiskError> {
        // No other engine is wanted, so that no note says that it is missing.
        let config = FilesConfig { engine: IoEngine::Psync, ..config };
        config.check()?;
        Self::recover_from(config, io, deadline)
    }

    /// Locks the directory, recovers what is stored there and prepares it for writes.
    fn recover_from(
        config: FilesConfig,
        io: FileIo,
        deadline: Deadline,
    ) -> Result<Self, DiskError> {
        let directory = config.directory.clone();
        // First, because another process with this writer's name would change the same files.
        let lock = DirectoryLock::acquire(&io, &config, deadline)?;
        old_layout::refuse(&io, &directory, deadline)?;
        let is_direct = config.direct && probe_direct(&io, &config, deadline)?;
        let mut recovery = Recovery::default();
        let problems = ProblemLog::new(lock.permission_problem());
        // Before the segments: footers that it covers are not read.
        let checkpoint = load_checkpoint(&io, &config, deadline)?.unwrap_or_else(|why| {
            recovery.damaged_structures += 1;
            let path = checkpoint_path(&config);
            problems.add(format!("{}: {why}; the segments were read instead", path.display()));
            None
        });
        recovery.used_checkpoint = checkpoint.is_some();
        let context =
            OpenContext { io: &io, config: &config, is_direct, problems: &problems, deadline };
        let (mut found, number_end) = context.find_segments(checkpoint.as_ref(), &mut recovery)?;
        let mut replay = replay_recovered(&mut found, checkpoint.as_ref(), io.clock.unix_ms());
        recovery.expired_records = replay.expired;
        let state = next_state(&found, number_end, checkpoint.as_ref(), &replay)
            .map_err(|source| DiskError::from_io("choose a store ID for", &directory, source))?;
        let unreadable: Vec<u32> = found
            .iter()
            .filter(|each| each.content.unreadable_pages > 0)
            .map(|each| each.number)
            .collect();
        let (segments, aliases) = build_segments(found, &replay);
        recovery.invalid_manifests =
            manifests::report_invalid(&io, &directory, &problems, deadline)?;
        let used_bytes = segments.values().map(|segment| segment.state().file_bytes).sum();
        let mut files = Self {
            capacity: Capacity::new(&config, used_bytes),
            config,
            io,
            is_direct,
            segments: RwLock::new(segments),
            aliases: Mutex::new(aliases),
            moved_addresses: RwLock::default(),
            writer: DeadlineMutex::new(state),
            reclaim_lock: DeadlineMutex::default(),
            syncs: SharedSync::default(),
            checkpoints: SharedSync::default(),
            counters: SegmentCounters::default(),
            problems,
            recovery: Mutex::default(),
            directory_lock: RwLock::new(Some(lock)),
        };
        files.finish_recovery(&mut replay, &unreadable, deadline)?;
        recovery.live = replay.live.iter().map(|entry| (entry.meta, entry.address)).collect();
        files.recovery = Mutex::new(recovery);
        Ok(files)
    }

    /// Seals segments that a crash left open, merges blocks with the same bytes, and writes
    /// tombstones for superseded blocks.
    fn finish_recovery(
        &self,
        replay: &mut ReplayResult,
        unreadable: &[u32],
        deadline: Deadline,
    ) -> Result<(), DiskError> {
        for segment in self.all_segments() {
            let is_open = matches!(segment.state().entry_location, EntryLocation::Memory(_));
            // The footer would overwrite frames that the device may be able to read later.
            if is_open && !unreadable.contains(&segment.number) {
                // If sealing fails, the segment stays readable and the next opening scans it.
                drop(seal_segment(&self.io, &segment, true, deadline));
            }
        }
        let mut writer = self.lock(&self.writer, deadline)?;
        self.merge_equal(&mut writer, replay, deadline);
        // The older block of a key would be live again once the segment of the newer one is
        // reclaimed. A tombstone prevents that.
        if !replay.superseded.is_empty() {
            let pending = replay.superseded.iter().map(|(key, at)| tombstone(key, *at)).collect();
            // If this fails, the next opening finds them again.
            let written = self.write(&mut writer, pending, SpaceClass::Reserve, deadline);
            drop(written);
        }
        Ok(())
    }

    /// Syncs the writer's segments and writes the checkpoint file.
    pub(super) fn write_checkpoint(&self, deadline: Deadline) -> Result<(), DiskError> {
        // A reclaim would move blocks while their entries are collected.
        let _reclaims = self.lock(&self.reclaim_lock, deadline)?;
        // The writer is locked only for this snapshot: later entries have sequence numbers from
        // `next_sequence` on and pages from `covered_page` on, so recovery reads them from the
        // segments.
        let (store_id, next_sequence, next_number, segments) = {
            let mut writer = self.lock(&self.writer, deadline)?;
            forget_removed(self, &mut writer, deadline)?;
            // Before the checkpoint covers these pages: recovery does not verify covered payloads.
            sync_for_flush(self, &mut writer, deadline)?;
            (writer.store_id, writer.next_sequence, writer.next_number, self.covered())
        };
        let mut entries = Vec::new();
        for (covered, segment) in &segments {
            let all = self.entries_of(segment, deadline)?;
            let is_covered = |entry: &RecordEntry| {
                entry.kind == EntryKind::Block && entry.address.page() < covered.covered_page
            };
            for entry in all.into_iter().filter(is_covered) {
                self.checkpoint_entry(entry, &mut entries);
            }
        }
        self.checkpoint_aliases(next_sequence, &mut entries);
        let checkpoint = Checkpoint {
            store_id,
            next_sequence,
            next_number,
            segments: segments.iter().map(|(covered, _)| *covered).collect(),
            entries,
        };
        let path = checkpoint_path(&self.config);
        let target = path.clone();
        let bytes = checkpoint.encode();
        self.io.call("write", &path, deadline, move |files| files.replace(&target, &bytes))
    }

    fn covered(&self) -> Vec<(CoveredSegment, Arc<Segment>)> {
        let cover = |segment: Arc<Segment>| {
            let covered = CoveredSegment {
                number: segment.number,
                covered_page: segment.state().end_page,
                segment_id: segment.id,
            };
            (covered, segment)
        };
        self.all_segments().into_iter().map(cover).collect()
    }

    /// Adds a live block. A block with aliases only is followed by a tombstone of its first key.
    fn checkpoint_entry(&self, entry: RecordEntry, entries: &mut Vec<RecordEntry>) {
        let Some(segment) = self.segment(entry.address.segment()) else { return };
        let slot = segment.state().slot(entry.address.page());
        // A block that was removed after the snapshot is left out. Its tombstone has a later number
        // and then removes nothing.
        let Some(slot) = slot.filter(BlockSlot::is_live) else { return };
        entries.push(entry);
        if !slot.is_first_key(&entry.meta.key) {
            // It has the number of its block. Recovery sorts with a stable sort, so it stays behind
            // the block.
            entries.push(RecordEntry { kind: EntryKind::Tombstone, ..entry });
        }
    }

    /// Adds the aliases. They are completely in memory, so a damaged frame loses none.
    fn checkpoint_aliases(&self, next_sequence: u64, entries: &mut Vec<RecordEntry>) {
        let first = entries.len();
        let blocks: HashMap<Address, Checksum> = entries
            .iter()
            .filter(|entry| entry.kind == EntryKind::Block)
            .map(|entry| (entry.address, entry.payload_checksum))
            .collect();
        for (address, aliases) in &*self.aliases() {
            // Without its block in the checkpoint, replay would reject the alias.
            let Some(sum) = blocks.get(address) else { continue };
            // Later aliases are read from the segments.
            for alias in aliases.iter().filter(|alias| alias.sequence < next_sequence) {
                entries.push(RecordEntry {
                    kind: EntryKind::Alias,
                    meta: alias.meta,
                    address: *address,
                    payload_checksum: *sum,
                    sequence: alias.sequence,
                });
            }
        }
        // The order of a hash table differs from run to run; the file must not.
        entries[first..].sort_unstable_by_key(|alias| alias.sequence);
    }
}

pub(super) fn checkpoint_path(config: &FilesConfig) -> PathBuf {
    config.directory.join(format!("{}.checkpoint", config.writer))
}

/// The parameters of all steps of an opening.
struct OpenContext<'a> {
    io: &'a FileIo,
    config: &'a FilesConfig,
    is_direct: bool,
    problems: &'a ProblemLog,
    deadline: Deadline,
}

impl OpenContext<'_> {
    /// Opens and reads all segments of this writer in the order of their numbers. Also returns the
    /// number after the highest one.
    fn find_segments(
        &self,
        checkpoint: Option<&Checkpoint>,
        recovery: &mut Recovery,
    ) -> Result<(Vec<RecoveredSegment>, u32), DiskError> {
        let directory = self.config.directory.clone();
        let listed = directory.clone();
        let paths =
            self.io.call("list", &directory, self.deadline, move |files| files.list(&listed))?;
        self.remove_temporary(&paths)?;
        let mut numbered: Vec<_> = paths
            .into_iter()
            .filter_map(|path| {
                let (writer, number) = segment_name(&path)?;
                (writer == self.config.writer.as_str()).then_some((number, path.clone()))
            })
            .collect();
        numbered.sort_unstable_by_key(|(number, _)| *number);
        // Includes files that cannot be opened: their numbers stay in use.
        let number_end = numbered.last().map_or(0, |(number, _)| number.saturating_add(1));
        let covered: HashMap<u32, CoveredSegment> = checkpoint
            .into_iter()
            .flat_map(|checkpoint| &checkpoint.segments)
            .map(|covered| (covered.number, *covered))
            .collect();
        let mut found = Vec::with_capacity(numbered.len());
        for (number, path) in numbered {
            let covered = covered.get(&number).copied();
            let Some((file, mut content)) = self.open_segment(number, &path, covered, recovery)?
            else {
                continue;
            };
            recovery.files += 1;
            recovery.scanned_files += u64::from(content.was_scanned);
            recovery.torn_records += content.torn_records;
            recovery.damaged_structures += content.damaged_structures;
            if content.damaged_structures > 0 || content.unreadable_pages > 0 {
                let (damaged, unread) = (content.damaged_structures, content.unreadable_pages);
                let path = path.display();
                let lost = if content.segment_id().is_some() {
                    ""
                } else {
                    "; no page has its segment ID, so none of its blocks can be read"
                };
                self.problems.add(format!(
                    "{path}: {damaged} damaged headers, frames or footers, {unread} unreadable \
                     pages{lost}"
                ));
            }
            if let (Some(checkpoint), Some(covered)) = (checkpoint, covered) {
                add_checkpoint_entries(&mut content, checkpoint, covered);
            }
            let entry_location = entry_location_of(&content);
            found.push(RecoveredSegment { number, path, file, content, entry_location });
        }
        Ok((found, number_end))
    }

    /// Removes the temporary files that a crash left of this writer's checkpoint.
    fn remove_temporary(&self, paths: &[PathBuf]) -> Result<(), DiskError> {
        let prefix = format!("{}.checkpoint.", self.config.writer);
        for path in paths {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            if !name.starts_with(&prefix) || path.extension().is_none_or(|it| it != "tmp") {
                continue;
            }
            let removed = path.clone();
            self.io.call("remove", path, self.deadline, move |files| files.remove(&removed))?;
        }
        Ok(())
    }

    /// Opens and reads one segment. Returns `None` if the file no longer exists or something else
    /// has its name.
    fn open_segment(
        &self,
        number: u32,
        path: &Path,
        covered: Option<CoveredSegment>,
        recovery: &mut Recovery,
    ) -> Result<Option<(Arc<FileHandle>, SegmentContent)>, DiskError> {
        let (opened, is_direct) = (path.to_owned(), self.is_direct);
        let read = self.io.call("read", path, self.deadline, move |files| {
            let file = files.open(&opened, OpenMode::Write, is_direct)?;
            let options = ScanOptions { number, covered: covered.as_ref(), verify_scanned: true };
            let content = read_segment(&FileSource { files, file: &file }, options);
            Ok((Arc::new(file), content))
        });
        match read {
            Ok((file, Ok(content))) => Ok(Some((file, content))),
            Ok((_, Err(ScanError::Io(source)))) => Err(DiskError::from_io("read", path, source)),
            Ok((_, Err(ScanError::Version(found)))) => {
                Err(DiskError::UnknownVersion { path: path.to_owned(), found })
            }
            Err(error) if error.is_misplaced() => {
                recovery.misplaced_files += 1;
                self.problems.add(format!("{}; it is not touched", with_causes(&error)));
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
}

/// Adds the checkpoint's blocks to a scanned segment. Blocks whose frames are damaged thus stay
/// readable, and no footer is written over them.
fn add_checkpoint_entries(
    content: &mut SegmentContent,
    checkpoint: &Checkpoint,
    covered: CoveredSegment,
) {
    // After an erase another file may have the number; the ID tells them apart.
    if !content.was_scanned || content.segment_id() != Some(covered.segment_id) {
        return;
    }
    let known: HashSet<Address> = content
        .entries
        .iter()
        .filter(|entry| entry.kind == EntryKind::Block)
        .map(|entry| entry.address)
        .collect();
    let is_missing = |entry: &&RecordEntry| {
        entry.kind == EntryKind::Block
            && entry.address.segment() == covered.number
            && !known.contains(&entry.address)
    };
    content.entries.extend(checkpoint.entries.iter().filter(is_missing));
    content.entries.sort_by_key(|entry| entry.sequence);
    let file_pages = content.file_bytes / PAGE_BYTES as u64;
    let covered_page = u64::from(covered.covered_page).min(file_pages);
    let covered_page = u32::try_from(covered_page).unwrap_or(u32::MAX);
    // The covered part may extend beyond the last intact frame. A new footer must be behind it.
    if content.trailer.is_none() {
        content.end_page = content.end_page.max(covered_page);
    }
}

/// Loads the checkpoint, if there is one. The inner error is why it cannot be used.
pub(super) fn load_checkpoint(
    io: &FileIo,
    config: &FilesConfig,
    deadline: Deadline,
) -> Result<Result<Option<Checkpoint>, String>, DiskError> {
    let path = checkpoint_path(config);
    let source = path.clone();
    let bytes_max = checkpoint_bytes_max(config.capacity_bytes);
    let bytes =
        io.call("read", &path, deadline, move |files| read_whole(files, &source, bytes_max));
    let bytes = match bytes {
        Ok(bytes) => bytes,
        // Without a checkpoint the segments are read, which contain the same entries.
        Err(DiskError::Io { source, .. }) => return Ok(Err(source.to_string())),
        Err(error) => return Err(error),
    };
    match bytes.as_deref().map(Checkpoint::decode) {
        None => Ok(Ok(None)),
        Some(Ok(checkpoint)) => Ok(Ok(Some(checkpoint))),
        // Another version is not damage, so the directory is refused.
        Some(Err(FormatError::Version { found })) => Err(DiskError::UnknownVersion { path, found }),
        Some(Err(damaged)) => Ok(Err(damaged.to_string())),
    }
}

/// Maximum length of a checkpoint of segments of this total size.
pub(crate) fn checkpoint_bytes_max(segments_bytes: u64) -> u64 {
    // An entry is shorter than its block's pages. Aliases have no pages of their own.
    const MIN: u64 = 1 << 30;
    segments_bytes.max(MIN)
}

/// Replays all entries in the order of writing.
///
/// Entries of segments older than the checkpoint's next sequence number are skipped: the checkpoint
/// contains them if they were live.
fn replay_recovered(
    found: &mut [RecoveredSegment],
    checkpoint: Option<&Checkpoint>,
    now_unix_ms: u64,
) -> ReplayResult {
    let ids: HashMap<u32, RandomId> =
        found.iter().filter_map(|each| Some((each.number, each.content.segment_id()?))).collect();
    // An entry of the checkpoint is valid only if its segment is still the same file: after a
    // reclaim or an erase another file may have the number.
    let covers = |entry: &RecordEntry, covered: &HashMap<u32, RandomId>| {
        let number = entry.address.segment();
        ids.get(&number).is_some_and(|id| covered.get(&number) == Some(id))
    };
    let mut entries = Vec::new();
    if let Some(checkpoint) = checkpoint {
        let covered: HashMap<u32, RandomId> =
            checkpoint.segments.iter().map(|each| (each.number, each.segment_id)).collect();
        entries.extend(checkpoint.entries.iter().filter(|each| covers(each, &covered)));
    }
    let from = checkpoint.map_or(0, |checkpoint| checkpoint.next_sequence);
    for each in found {
        let own = std::mem::take(&mut each.content.entries);
        entries.extend(own.into_iter().filter(|entry| entry.sequence >= from));
    }
    entries.sort_by_key(|entry| entry.sequence);
    replay(&entries, now_unix_ms)
}

/// The location of a recovered segment's entries.
fn entry_location_of(content: &SegmentContent) -> EntryLocation {
    match (&content.trailer, content.was_scanned) {
        (Some(trailer), _) => EntryLocation::Footer {
            page: trailer.entries_page,
            count: trailer.entry_count,
            checksum: trailer.entries_checksum,
        },
        (None, true) => EntryLocation::Memory(encode_entries(&content.entries)),
        // The segment has no ID and thus no readable block. A reclaim removes it.
        (None, false) => EntryLocation::Footer { page: 1, count: 0, checksum: checksum(&[]) },
    }
}

/// The writer's state after everything that was recovered.
fn next_state(
    found: &[RecoveredSegment],
    number_end: u32,
    checkpoint: Option<&Checkpoint>,
    replay: &ReplayResult,
) -> io::Result<WriterState> {
    let of_checkpoint = checkpoint.map_or(0, |checkpoint| checkpoint.next_number);
    let known_id = found.iter().find_map(|each| Some(each.content.header.as_ref()?.store_id));
    let new_id = || {
        let mut id = RandomId::default();
        fill_random(&mut id).map(|()| id)
    };
    Ok(WriterState {
        store_id: known_id.map_or_else(new_id, Ok)?,
        active: None,
        sealing: Vec::new(),
        next: None,
        unsynced: Vec::new(),
        failed_sync: None,
        other_copies: HashMap::new(),
        // After every number that a file, the checkpoint or an entry contains: an address in an
        // old alias or tombstone must not refer to a new block.
        next_number: number_end.max(of_checkpoint).max(replay.number_end),
        next_sequence: replay.sequence_end.max(checkpoint.map_or(0, |each| each.next_sequence)),
    })
}

/// Builds segments and aliases in memory. Only live blocks get a slot.
fn build_segments(
    found: Vec<RecoveredSegment>,
    replay: &ReplayResult,
) -> (BTreeMap<u32, Arc<Segment>>, Aliases) {
    let mut aliases = Aliases::new();
    // Sorted by address, because slots are added in the order of their pages.
    let mut slots: BTreeMap<Address, (RecordEntry, bool)> = BTreeMap::new();
    for entry in &replay.live {
        match entry.kind {
            EntryKind::Alias => {
                let alias = Alias { meta: entry.meta, sequence: entry.sequence };
                aliases.entry(entry.address).or_default().push(alias);
            }
            EntryKind::Block | EntryKind::Tombstone => {
                slots.insert(entry.address, (*entry, true));
            }
        }
    }
    // A block without its first key still needs a slot for its aliases.
    for body in &replay.bodies {
        slots.entry(body.address).or_insert((*body, false));
    }
    let segments = found
        .into_iter()
        .map(|each| {
            let mut state = SegmentState::empty(each.content.file_bytes);
            state.entry_location = each.entry_location;
            state.end_page = each.content.end_page;
            let first = Address::in_segment(each.number, 0);
            let last = Address::in_segment(each.number, u32::MAX);
            for (address, (entry, has_first_key)) in slots.range(first..=last) {
                state.add_slot(entry);
                if !has_first_key {
                    state.remove_first_key(address.page(), true);
                }
            }
            let id = each.content.segment_id().unwrap_or_default();
            let segment = Segment::new(each.number, id, each.path, each.file, state);
            (each.number, Arc::new(segment))
        })
        .collect();
    (segments, aliases)
}
