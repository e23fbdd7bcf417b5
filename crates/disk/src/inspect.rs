//! What lies in a directory, read without a lock and without changing anything.

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use cascade_block::{BlockKey, Clock as _, Deadline, SystemClock};

use crate::format::{Checkpoint, EntryKind, PAGE_BYTES, RecordEntry, page_aligned};
use crate::io::{FileIo, FileOperations as _, OpenMode, SystemFiles};
use crate::per_block::{address_of, key_of, read_header};
use crate::scan::{
    FileSource, ScanError, ScanOptions, SegmentContent, SegmentSource, payload_is_intact,
    read_frames, read_segment, segment_name,
};
use crate::segments::replay;
use crate::{Address, DiskError, EngineKind, RecordMeta, StoredManifest, manifests};

/// How a record stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecordState {
    /// Its key finds it.
    Live,
    /// Removed, replaced or expired; its space comes back with its segment.
    Dead,
    /// Its payload is not what was written.
    Damaged,
}

/// A record that an inspection came across.
#[derive(Debug, Clone, Copy)]
pub struct InspectedRecord<'a> {
    /// The file that it stands in.
    pub path: &'a Path,
    /// What it says about its block.
    pub meta: &'a RecordMeta,
    /// Where the block lies.
    pub address: Address,
    /// Whether it gives stored bytes another key.
    pub is_alias: bool,
    /// How it stands.
    pub state: RecordState,
}

/// One segment, or all files of a file-per-block directory together.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FileReport {
    /// The segment, or the directory of the block files.
    pub path: PathBuf,
    /// Bytes that it takes.
    pub file_bytes: u64,
    /// Whether it ends with a good footer.
    pub is_sealed: bool,
    /// Blocks by how they stand; bytes are padded to pages.
    pub live_records: u64,
    /// Bytes of live payloads.
    pub live_bytes: u64,
    /// Blocks that nothing names.
    pub dead_records: u64,
    /// Their bytes.
    pub dead_bytes: u64,
    /// Blocks whose payload does not match its checksum or is cut short.
    pub damaged_records: u64,
    /// Their bytes, where known.
    pub damaged_bytes: u64,
    /// What is wrong, in words.
    pub problems: Vec<String>,
}

/// What lies in a directory.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct InspectReport {
    /// Every segment, by name; then the block files, if there are any.
    pub files: Vec<FileReport>,
    /// The manifests.
    pub manifests: Vec<StoredManifest>,
    /// What is wrong with other files.
    pub problems: Vec<String>,
}

impl InspectReport {
    /// Whether everything is as it was written.
    pub fn is_clean(&self) -> bool {
        let is_bad = |manifest: &StoredManifest| matches!(manifest, StoredManifest::Bad { .. });
        self.problems.is_empty()
            && self.files.iter().all(|file| file.problems.is_empty() && file.damaged_records == 0)
            && !self.manifests.iter().any(is_bad)
    }
}

/// Looks through a directory that may be in use or damaged, and tells `visitor` of each record.
///
/// With `verify_payload` every payload of a live block is read and checked. Files that cannot be
/// read are problems in the report; an error is only a directory that cannot be listed.
pub fn inspect(
    directory: &Path,
    verify_payload: bool,
    visitor: &mut dyn FnMut(InspectedRecord<'_>),
) -> Result<InspectReport, DiskError> {
    let failed = |source| DiskError::from_io("list", directory, source);
    let mut report = InspectReport::default();
    let mut writers: BTreeMap<String, Vec<(u32, PathBuf)>> = BTreeMap::new();
    for path in SystemFiles.list(directory).map_err(failed)? {
        if let Some((writer, number)) = segment_name(&path) {
            writers.entry(writer.to_owned()).or_default().push((number, path));
        } else if path.extension().is_some_and(|extension| extension == "checkpoint") {
            report.problems.extend(checkpoint_problem(&path));
        }
    }
    for segments in writers.values_mut() {
        segments.sort_unstable();
        inspect_writer(segments, verify_payload, visitor, &mut report);
    }
    let blocks = directory.join("blocks");
    if blocks.is_dir() {
        report.files.push(inspect_block_files(&blocks, verify_payload, visitor));
    }
    let clock = std::sync::Arc::new(SystemClock);
    let deadline = Deadline::after(clock.as_ref(), std::time::Duration::from_secs(60));
    let io = FileIo::system(EngineKind::Psync, false, 2, None, clock)?;
    report.manifests = manifests::load_all(&io, directory, deadline)?;
    Ok(report)
}

fn checkpoint_problem(path: &Path) -> Option<String> {
    let problem = |what: String| Some(format!("{}: {what}", path.display()));
    let read = || -> io::Result<Vec<u8>> {
        let file = SystemFiles.open(path, OpenMode::Read, false)?;
        let length = usize::try_from(SystemFiles.length(&file)?).map_err(io::Error::other)?;
        let mut bytes = vec![0; length];
        let read = SystemFiles.read(&file, 0, &mut bytes)?;
        bytes.truncate(read);
        Ok(bytes)
    };
    match read() {
        Ok(bytes) => problem(Checkpoint::decode(&bytes).err()?.to_string()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => problem(error.to_string()),
    }
}

/// All segments of one writer: what is live follows from all of them together.
fn inspect_writer(
    segments: &[(u32, PathBuf)],
    verify_payload: bool,
    visitor: &mut dyn FnMut(InspectedRecord<'_>),
    report: &mut InspectReport,
) {
    let mut all = Vec::new();
    let mut found = Vec::with_capacity(segments.len());
    for (number, path) in segments {
        let mut file_report = FileReport { path: path.clone(), ..FileReport::default() };
        match read_file(path, *number, verify_payload) {
            Ok((file, content)) => {
                file_report.file_bytes = content.file_bytes;
                file_report.is_sealed = content.trailer.is_some();
                file_report.damaged_records = content.torn_records;
                if content.damaged_structures > 0 {
                    let count = content.damaged_structures;
                    file_report
                        .problems
                        .push(format!("{count} headers, frames or footers are damaged"));
                }
                all.extend_from_slice(&content.entries);
                found.push((file_report, Some((file, content.entries))));
            }
            Err(problem) => {
                file_report.problems.push(problem);
                found.push((file_report, None));
            }
        }
    }
    all.sort_by_key(|entry| entry.sequence);
    let replayed = replay(&all, SystemClock.unix_ms());
    let live: HashSet<(BlockKey, Address)> =
        replayed.live.iter().map(|entry| (entry.meta.key, entry.address)).collect();
    let held: HashSet<Address> = replayed.live.iter().map(|entry| entry.address).collect();
    for (mut file_report, content) in found {
        if let Some((file, entries)) = content {
            let source = FileSource { files: &SystemFiles, file: &file };
            for entry in entries.iter().filter(|entry| entry.kind != EntryKind::Tombstone) {
                let is_named = live.contains(&(entry.meta.key, entry.address));
                let is_held = held.contains(&entry.address);
                let is_right = !verify_payload
                    || !is_held
                    || entry.kind == EntryKind::Alias
                    || payload_is_intact(&source, entry, file_report.file_bytes, true)
                        .unwrap_or(false);
                let state = file_report.add(entry, is_named, is_held, is_right);
                visitor(InspectedRecord {
                    path: &file_report.path,
                    meta: &entry.meta,
                    address: entry.address,
                    is_alias: entry.kind == EntryKind::Alias,
                    state,
                });
            }
        }
        report.files.push(file_report);
    }
}

impl FileReport {
    /// Counts a block or alias, and says how it stands.
    fn add(&mut self, entry: &RecordEntry, named: bool, held: bool, right: bool) -> RecordState {
        let bytes = page_aligned(u64::from(entry.meta.payload_bytes));
        if entry.kind == EntryKind::Block {
            let (records, size) = match (held, right) {
                (_, false) => (&mut self.damaged_records, &mut self.damaged_bytes),
                (true, true) => (&mut self.live_records, &mut self.live_bytes),
                (false, true) => (&mut self.dead_records, &mut self.dead_bytes),
            };
            *records += 1;
            *size += bytes;
        }
        match (named, right) {
            (_, false) => RecordState::Damaged,
            (true, true) => RecordState::Live,
            (false, true) => RecordState::Dead,
        }
    }
}

fn read_file(
    path: &Path,
    number: u32,
    verify_frames: bool,
) -> Result<(File, SegmentContent), String> {
    let file = SystemFiles.open(path, OpenMode::Read, false).map_err(|error| error.to_string())?;
    let options = ScanOptions { number, covered: None, verify_scanned: true };
    let source = FileSource { files: &SystemFiles, file: &file };
    match read_segment(&source, options) {
        Ok(mut content) => {
            if let Some(trailer) = content.trailer.filter(|_| verify_frames) {
                // The footer repeats what frames say; report a damaged frame before it is needed.
                let (id, end_page) = (trailer.segment_id, trailer.entries_page);
                let frames = read_frames(&source, number, id, end_page);
                let frames = frames.map_err(|error| error.to_string())?;
                let is_short = frames.entries.len() < content.entries.len();
                content.damaged_structures += frames.damaged_structures.max(u64::from(is_short));
            }
            Ok((file, content))
        }
        Err(ScanError::Io(error)) => Err(error.to_string()),
        Err(ScanError::Version(found)) => Err(format!(
            "format version {found}, this program reads {}",
            crate::format::FORMAT_VERSION
        )),
    }
}

fn inspect_block_files(
    blocks: &Path,
    verify_payload: bool,
    visitor: &mut dyn FnMut(InspectedRecord<'_>),
) -> FileReport {
    let mut report = FileReport { path: blocks.to_owned(), ..FileReport::default() };
    let mut pending = vec![blocks.to_owned()];
    while let Some(path) = pending.pop() {
        let Some(key) = key_of(&path) else {
            if path.is_dir() {
                match SystemFiles.list(&path) {
                    Ok(children) => pending.extend(children),
                    Err(error) => report.problems.push(format!("{}: {error}", path.display())),
                }
            }
            continue;
        };
        if let Err(problem) = inspect_block_file(&path, &key, verify_payload, visitor, &mut report)
        {
            report.damaged_records += 1;
            report.problems.push(format!("{}: {problem}", path.display()));
        }
    }
    report
}

fn inspect_block_file(
    path: &Path,
    key: &BlockKey,
    verify_payload: bool,
    visitor: &mut dyn FnMut(InspectedRecord<'_>),
    report: &mut FileReport,
) -> Result<(), String> {
    let text = |error: io::Error| error.to_string();
    let entry = read_header(&SystemFiles, path, key)
        .map_err(text)?
        .ok_or_else(|| "its header is damaged or another block's".to_owned())?;
    let file = SystemFiles.open(path, OpenMode::Read, false).map_err(text)?;
    let source = FileSource { files: &SystemFiles, file: &file };
    let file_bytes = source.length().map_err(text)?;
    report.file_bytes += file_bytes;
    debug_assert_eq!(entry.address.byte_offset(), PAGE_BYTES as u64);
    let is_right = payload_is_intact(&source, &entry, file_bytes, verify_payload).map_err(text)?;
    let is_valid = !entry.meta.has_expired(SystemClock.unix_ms());
    let state = report.add(&entry, is_valid, is_valid, is_right);
    let address = address_of(&entry);
    visitor(InspectedRecord { path, meta: &entry.meta, address, is_alias: false, state });
    Ok(())
}
