//! Opening: finds segments, takes in footers and checkpoint, scans what was not sealed.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, RwLock};

use cascade_block::{BlockKey, Deadline, checksum};

use super::replay::{Replay, replay};
use super::run::tombstone;
use super::segment::{Index, Segment, SegmentState, Slot};
use super::write::{Space, WriterState};
use super::{Alias, Aliases, Counters, SegmentFiles};
use crate::format::{
    Checkpoint, CoveredSegment, ENTRY_BYTES, Entry, EntryKind, FormatError, RandomId,
};
use crate::gate::Gate;
use crate::io::{Io, OpenMode};
use crate::lock::{DirectoryLock, probe_direct};
use crate::random::random_bytes;
use crate::scan::{FileSource, ScanError, ScanOptions, SegmentContent, read_segment, segment_name};
use crate::{Address, DiskError, FileTierConfig, Recovery, StoredManifest, manifests};

/// A segment that was found, and what it says.
#[derive(Debug)]
struct Found {
    number: u32,
    path: PathBuf,
    file: Arc<File>,
    content: SegmentContent,
    index: Index,
}

impl SegmentFiles {
    /// Locks the directory, finds what is stored there and makes it ready to be written.
    pub(crate) fn open(
        config: FileTierConfig,
        io: Io,
        deadline: Deadline,
    ) -> Result<(Self, Recovery), DiskError> {
        let directory = config.directory.clone();
        let lock = DirectoryLock::make(&io, &config, deadline)?;
        let is_direct = config.direct && probe_direct(&io, &config, deadline)?;
        let mut recovery = Recovery::default();
        let checkpoint = load_checkpoint(&io, &config, &mut recovery, deadline)?;
        let covering = checkpoint.as_ref();
        let mut found = find_segments(&io, &config, is_direct, covering, &mut recovery, deadline)?;
        let replay = take_in(&mut found, checkpoint.as_ref(), io.clock.unix_ms());
        recovery.expired_records = replay.expired;
        let state = next_state(&found, checkpoint.as_ref(), &replay)
            .map_err(|source| DiskError::from_io("name", &directory, source))?;
        let (segments, aliases) = build(found, &replay);
        recovery.live = replay.live.iter().map(|entry| (entry.meta, entry.address)).collect();
        recovery.bad_manifests = manifests::load_all(&io, &directory, deadline)?
            .into_iter()
            .filter(|each| matches!(each, StoredManifest::Bad { .. }))
            .collect();
        let files = Self {
            config,
            io,
            is_direct,
            segments: RwLock::new(segments),
            aliases: Mutex::new(aliases),
            forwards: RwLock::default(),
            writer: Gate::new(state),
            reclaimer: Gate::new(()),
            counters: Counters::default(),
            lock,
        };
        files.tidy(&replay.superseded, deadline)?;
        Ok((files, recovery))
    }

    /// Seals what a crash left open, removes what is empty, settles keys that are there twice.
    fn tidy(
        &self,
        superseded: &[(BlockKey, Address)],
        deadline: Deadline,
    ) -> Result<(), DiskError> {
        for segment in self.all_segments() {
            let is_open = matches!(segment.state().index, Index::Memory(_));
            if is_open {
                // Failing that it stays readable, and the next opening scans it again.
                drop(self.try_seal(&segment, deadline));
            }
        }
        if !superseded.is_empty() {
            let mut writer = self.enter(&self.writer, deadline)?;
            let pending = superseded.iter().map(|(key, at)| tombstone(key, *at)).collect();
            // Not written, they are found again at the next opening.
            let written = self.write(&mut writer, pending, Space::Reserve, deadline);
            drop(written);
        }
        Ok(())
    }

    /// Syncs and writes the checkpoint file.
    pub(super) fn write_checkpoint(&self, deadline: Deadline) -> Result<(), DiskError> {
        let _turn = self.enter(&self.reclaimer, deadline)?;
        let (store_id, next_sequence, next_number, segments) = {
            let mut writer = self.enter(&self.writer, deadline)?;
            self.sync_active(&mut writer, deadline)?;
            (writer.store_id, writer.next_sequence, writer.next_number, self.covered())
        };
        let mut entries = Vec::new();
        for (covered, segment) in &segments {
            let all = segment.entries(&self.io, deadline)?;
            let before = |entry: &Entry| match entry.kind {
                EntryKind::Block => entry.address.page() < covered.covered_page,
                EntryKind::Alias | EntryKind::Tombstone => true,
            };
            for entry in all.into_iter().filter(before) {
                self.checkpoint_entry(entry, &mut entries);
            }
        }
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

    /// Adds what a statement still says. A block that only aliases name is followed by the
    /// removal of its first key.
    fn checkpoint_entry(&self, entry: Entry, entries: &mut Vec<Entry>) {
        let Some(segment) = self.segment(entry.address.segment()) else { return };
        match entry.kind {
            EntryKind::Tombstone => {}
            EntryKind::Block => {
                let slot = segment.state().slot(entry.address.page());
                let Some(slot) = slot.filter(Slot::is_live) else { return };
                entries.push(entry);
                if !slot.is_named(&entry.meta.key) {
                    entries.push(Entry { kind: EntryKind::Tombstone, ..entry });
                }
            }
            EntryKind::Alias => {
                let aliases = self.aliases();
                let mut others = aliases.get(&entry.address).into_iter().flatten();
                if others.any(|alias| alias.sequence == entry.sequence) {
                    entries.push(entry);
                }
            }
        }
    }
}

fn checkpoint_path(config: &FileTierConfig) -> PathBuf {
    config.directory.join(format!("{}.checkpoint", config.writer))
}

/// Opens and reads every segment of this writer, in the order of their numbers.
fn find_segments(
    io: &Io,
    config: &FileTierConfig,
    is_direct: bool,
    checkpoint: Option<&Checkpoint>,
    recovery: &mut Recovery,
    deadline: Deadline,
) -> Result<Vec<Found>, DiskError> {
    let directory = config.directory.clone();
    let paths =
        io.call("list", &config.directory, deadline, move |files| files.list(&directory))?;
    let mut numbered: Vec<_> = paths
        .into_iter()
        .filter_map(|path| {
            let (writer, number) = segment_name(&path)?;
            (writer == config.writer.as_str()).then_some((number, path.clone()))
        })
        .collect();
    numbered.sort_unstable_by_key(|(number, _)| *number);
    let covered: HashMap<u32, CoveredSegment> = checkpoint
        .into_iter()
        .flat_map(|checkpoint| &checkpoint.segments)
        .map(|covered| (covered.number, *covered))
        .collect();
    let mut found = Vec::with_capacity(numbered.len());
    for (number, path) in numbered {
        let (opened, covered) = (path.clone(), covered.get(&number).copied());
        let (file, content) = io.call("read", &path, deadline, move |files| {
            let file = files.open(&opened, OpenMode::Write, is_direct)?;
            let options = ScanOptions { number, covered: covered.as_ref(), verify_scanned: true };
            let content = read_segment(&FileSource { files, file: &file }, options);
            Ok((Arc::new(file), content))
        })?;
        let content = content.map_err(|error| match error {
            ScanError::Io(source) => DiskError::from_io("read", &path, source),
            ScanError::Version(found) => DiskError::UnknownVersion { path: path.clone(), found },
        })?;
        recovery.files += 1;
        recovery.scanned_files += u64::from(content.was_scanned);
        recovery.torn_records += content.torn_records;
        recovery.damaged_structures += content.damaged_structures;
        let index = index_of(&content);
        found.push(Found { number, path, file, content, index });
    }
    Ok(found)
}

/// The checkpoint, if there is one and it is right.
fn load_checkpoint(
    io: &Io,
    config: &FileTierConfig,
    recovery: &mut Recovery,
    deadline: Deadline,
) -> Result<Option<Checkpoint>, DiskError> {
    let path = checkpoint_path(config);
    let source = path.clone();
    let bytes = io.call("read", &path, deadline, move |files| {
        let file = match files.open(&source, OpenMode::Read, false) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let length = usize::try_from(files.length(&file)?).map_err(io::Error::other)?;
        let mut bytes = vec![0; length];
        let read = files.read(&file, 0, &mut bytes)?;
        bytes.truncate(read);
        Ok(Some(bytes))
    })?;
    match bytes.as_deref().map(Checkpoint::decode) {
        None => Ok(None),
        Some(Ok(checkpoint)) => {
            recovery.used_checkpoint = true;
            Ok(Some(checkpoint))
        }
        Some(Err(FormatError::Version { found })) => Err(DiskError::UnknownVersion { path, found }),
        Some(Err(_damaged)) => {
            recovery.damaged_structures += 1;
            Ok(None)
        }
    }
}

/// Replays every statement in the order of writing.
///
/// What is older than the checkpoint is in it, or was dead when it was written.
fn take_in(found: &mut [Found], checkpoint: Option<&Checkpoint>, now_unix_ms: u64) -> Replay {
    let ids: HashMap<u32, RandomId> =
        found.iter().filter_map(|each| Some((each.number, each.content.segment_id()?))).collect();
    let covers = |entry: &Entry, covered: &HashMap<u32, RandomId>| {
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

/// Where the entries of a segment that was found stand from now on.
fn index_of(content: &SegmentContent) -> Index {
    match (&content.trailer, content.was_scanned) {
        (Some(trailer), _) => Index::Footer {
            page: trailer.entries_page,
            count: trailer.entry_count,
            checksum: trailer.entries_checksum,
        },
        (None, true) => {
            let mut encoded = vec![0; content.entries.len() * ENTRY_BYTES];
            for (slot, entry) in encoded.chunks_mut(ENTRY_BYTES).zip(&content.entries) {
                entry.encode(slot);
            }
            Index::Memory(encoded)
        }
        // Nothing names the file; it holds nothing, and a reclaim removes it.
        (None, false) => Index::Footer { page: 1, count: 0, checksum: checksum(&[]) },
    }
}

/// The writer's state behind everything that was found.
fn next_state(
    found: &[Found],
    checkpoint: Option<&Checkpoint>,
    replay: &Replay,
) -> io::Result<WriterState> {
    let of_files = found.iter().map(|each| each.number + 1).max().unwrap_or(0);
    let of_checkpoint = checkpoint.map_or(0, |checkpoint| checkpoint.next_number);
    let known_id = found.iter().find_map(|each| Some(each.content.header.as_ref()?.store_id));
    Ok(WriterState {
        store_id: known_id.map_or_else(random_bytes, Ok)?,
        active: None,
        unsynced: Vec::new(),
        next_number: of_files.max(of_checkpoint).max(replay.number_end),
        next_sequence: replay.sequence_end.max(checkpoint.map_or(0, |each| each.next_sequence)),
    })
}

/// Puts segments and aliases into memory. Only what is live gets a slot.
fn build(found: Vec<Found>, replay: &Replay) -> (BTreeMap<u32, Arc<Segment>>, Aliases) {
    let mut aliases = Aliases::new();
    let mut slots: BTreeMap<Address, (Entry, bool)> = BTreeMap::new();
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
    for body in &replay.bodies {
        slots.entry(body.address).or_insert((*body, false));
    }
    let segments = found
        .into_iter()
        .map(|each| {
            let mut state = SegmentState::empty(each.content.file_bytes);
            state.index = each.index;
            state.end_page = each.content.end_page;
            let first = Address::in_segment(each.number, 0);
            let last = Address::in_segment(each.number, u32::MAX);
            for (address, (entry, is_named)) in slots.range(first..=last) {
                state.add_slot(entry);
                if !is_named {
                    state.unname(address.page(), true);
                }
            }
            let id = each.content.segment_id().unwrap_or_default();
            let segment = Segment::new(each.number, id, each.path, each.file, state);
            (each.number, Arc::new(segment))
        })
        .collect();
    (segments, aliases)
}
