//! Reports the contents of a directory. It takes no lock and changes nothing.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};

use cascade_block::BlockKey;
use cascade_runtime::{Clock as _, Deadline, SystemClock};

use crate::format::{Checkpoint, EntryKind, RecordEntry, page_aligned};
use crate::io::{FileHandle, FileIo, FileOperations as _, OpenMode, SystemFiles, read_whole};
use crate::scan::{
    FileSource, ScanError, ScanOptions, SegmentContent, payload_is_intact, read_frames,
    read_segment, segment_name,
};
use crate::segments::{checkpoint_bytes_max, replay};
use crate::{Address, BlockFacts, DiskError, IoEngine, StoredManifest, manifests};

/// The state of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecordState {
    /// A lookup of its key finds it.
    Live,
    /// Removed, replaced or expired. Its space is freed when its segment is reclaimed.
    Dead,
    /// Its payload does not match its checksum or is truncated.
    Damaged,
}

/// A record that an inspection found.
#[derive(Debug, Clone, Copy)]
pub struct InspectedRecord<'a> {
    /// The file that contains it.
    pub path: &'a Path,
    /// The metadata of its block.
    pub meta: &'a BlockFacts,
    /// The address of the block.
    pub address: Address,
    /// Whether it is an alias: another key for stored bytes.
    pub is_alias: bool,
    /// Its state.
    pub state: RecordState,
}

/// The report on one segment.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FileReport {
    /// The segment.
    pub path: PathBuf,
    /// Size in bytes.
    pub file_bytes: u64,
    /// Whether it ends with an intact footer.
    pub is_sealed: bool,
    /// Live blocks. Bytes here and below are padded to pages.
    pub live_records: u64,
    /// Bytes of live payloads.
    pub live_bytes: u64,
    /// Blocks without a live key.
    pub dead_records: u64,
    /// Bytes of dead payloads.
    pub dead_bytes: u64,
    /// Blocks whose payload does not match its checksum or is truncated.
    pub damaged_records: u64,
    /// Bytes of damaged payloads, if known.
    pub damaged_bytes: u64,
    /// Descriptions of what is wrong.
    pub problems: Vec<String>,
}

/// The report on a directory.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct InspectReport {
    /// Every segment in the order of names.
    pub files: Vec<FileReport>,
    /// The manifests.
    pub manifests: Vec<StoredManifest>,
    /// Problems of other files.
    pub problems: Vec<String>,
}

impl InspectReport {
    /// Whether no damage was found.
    pub fn is_clean(&self) -> bool {
        let is_bad = |manifest: &StoredManifest| matches!(manifest, StoredManifest::Invalid { .. });
        self.problems.is_empty()
            && self.files.iter().all(|file| file.problems.is_empty() && file.damaged_records == 0)
            && !self.manifests.iter().any(is_bad)
    }
}

/// Inspects a directory, which may be in use or damaged, and calls `visitor` for each record.
///
/// With `verify_payload` the payload of every live block is read and checked. Files that cannot be
/// read are problems in the report.
///
/// # Errors
/// If the directory cannot be listed.
pub fn inspect(
    directory: &Path,
    verify_payload: bool,
    visitor: &mut dyn FnMut(InspectedRecord<'_>),
) -> Result<InspectReport, DiskError> {
    let failed = |source| DiskError::from_io("list", directory, source);
    let mut report = InspectReport::default();
    let mut checkpoints = Vec::new();
    let mut writers: BTreeMap<String, Vec<(u32, PathBuf)>> = BTreeMap::new();
    for path in SystemFiles.list(directory).map_err(failed)? {
        if let Some((writer, number)) = segment_name(&path) {
            writers.entry(writer.to_owned()).or_default().push((number, path));
        } else if path.extension().is_some_and(|extension| extension == "checkpoint") {
            checkpoints.push(path);
        }
    }
    for segments in writers.values_mut() {
        segments.sort_unstable();
        inspect_writer(segments, verify_payload, visitor, &mut report);
    }
    let bytes_max = checkpoint_bytes_max(report.files.iter().map(|file| file.file_bytes).sum());
    report
        .problems
        .extend(checkpoints.iter().filter_map(|path| checkpoint_problem(path, bytes_max)));
    let clock = std::sync::Arc::new(SystemClock);
    let deadline = Deadline::after(clock.as_ref(), std::time::Duration::from_secs(60));
    let io = FileIo::system(IoEngine::Psync, false, 2, None, clock)?;
    report.manifests = manifests::load_all(&io, directory, deadline)?;
    Ok(report)
}

fn checkpoint_problem(path: &Path, bytes_max: u64) -> Option<String> {
    let problem = match read_whole(&SystemFiles, path, bytes_max) {
        Ok(Some(bytes)) => Checkpoint::decode(&bytes).err()?.to_string(),
        // The directory may be in use: the file was removed after it was listed.
        Ok(None) => return None,
        Err(error) => error.to_string(),
    };
    Some(format!("{}: {problem}", path.display()))
}

/// Inspects all segments of one writer together: an entry in one segment may replace or remove a
/// block in another.
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
                        .push(format!("{count} damaged headers, frames or footers"));
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
    // A block without its first key may still have an alias.
    let held: HashSet<Address> = replayed.live.iter().map(|entry| entry.address).collect();
    for (mut file_report, content) in found {
        if let Some((file, entries)) = content {
            let source = FileSource { files: &SystemFiles, file: &file };
            for entry in entries.iter().filter(|entry| entry.kind != EntryKind::Tombstone) {
                let is_named = live.contains(&(entry.meta.key, entry.address));
                let is_held = held.contains(&entry.address);
                // Payloads that no key refers to are not read: nothing can return them.
                let is_intact = !verify_payload
                    || !is_held
                    || entry.kind == EntryKind::Alias
                    || payload_is_intact(&source, entry, file_report.file_bytes, true)
                        .unwrap_or(false);
                let state = file_report.add(entry, is_named, is_held, is_intact);
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
    /// Counts a block or alias and returns its state.
    fn add(&mut self, entry: &RecordEntry, named: bool, held: bool, intact: bool) -> RecordState {
        let bytes = page_aligned(u64::from(entry.meta.bytes));
        if entry.kind == EntryKind::Block {
            let (records, size) = match (held, intact) {
                (_, false) => (&mut self.damaged_records, &mut self.damaged_bytes),
                (true, true) => (&mut self.live_records, &mut self.live_bytes),
                (false, true) => (&mut self.dead_records, &mut self.dead_bytes),
            };
            *records += 1;
            *size += bytes;
        }
        match (named, intact) {
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
) -> Result<(FileHandle, SegmentContent), String> {
    let file = SystemFiles.open(path, OpenMode::Read, false).map_err(|error| error.to_string())?;
    let options = ScanOptions { number, covered: None, verify_scanned: true };
    let source = FileSource { files: &SystemFiles, file: &file };
    match read_segment(&source, options) {
        Ok(mut content) => {
            if let Some(trailer) = content.trailer.filter(|_| verify_frames) {
                // The footer repeats the entries of the frames. Recovery needs the frames only if
                // the footer is damaged, so report a damaged frame now.
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
            "it has format version {found}, this program reads {}",
            crate::format::FORMAT_VERSION
        )),
    }
}
