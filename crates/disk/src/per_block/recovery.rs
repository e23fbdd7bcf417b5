//! Opens a directory of block files and recovers the blocks, oldest first.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use cascade_block::BlockKey;
use cascade_runtime::{Deadline, DeadlineMutex, Mutex, random_u64};

use super::block_file::{NO_SEGMENT, address_of, key_of, read_header};
use super::durable_directories::DurableDirectories;
use super::table::{BlockFileTable, DamagedFile};
use super::{BlockFileCounters, PerBlockFiles};
use crate::device_probe::probe_direct;
use crate::format::{FormatError, PAGE_BYTES, RecordEntry, SegmentFrame};
use crate::io::{FileIo, FileOperations, OpenMode, PageBuffer, make_tier_directory};
use crate::lock::DirectoryLock;
use crate::problem_log::ProblemLog;
use crate::shared_sync::SharedSync;
use crate::{DiskError, FilesConfig, Recovery, manifests};

/// Maximum number of problems of an opening that are described.
const PROBLEMS_MAX: usize = 8;

impl PerBlockFiles {
    /// Locks the writer's name and recovers the block files of all writers.
    pub(crate) fn open(
        config: FilesConfig,
        io: FileIo,
        deadline: Deadline,
    ) -> Result<(Self, Recovery), DiskError> {
        let directory = config.directory.clone();
        let lock = DirectoryLock::acquire(&io, &config, deadline)?;
        let is_direct = config.direct && probe_direct(&io, &config, deadline)?;
        let writer = config.writer.to_string();
        let blocks = directory.join("blocks");
        let listed = blocks.clone();
        let top = directory.clone();
        let found = io.call("read", &blocks, deadline, move |files| {
            make_tier_directory(files, &listed)?;
            Ok(find_blocks(files, &top, &writer))
        })??;
        let BlockFileScan { mut recovery, mut entries, damaged, problems } = found;
        let problems = ProblemLog::new(lock.permission_problem().into_iter().chain(problems));
        // The table reclaims files in the order in which they are added.
        entries.sort_by_key(|entry| entry.meta.written_unix_ms);
        let now = io.clock.unix_ms();
        let mut table = BlockFileTable::default();
        for entry in &entries {
            // Expired files are in the table too: a reclaim removes them.
            table.add(entry);
        }
        table.add_damaged(damaged);
        let found = entries.len();
        entries.retain(|entry| !entry.meta.has_expired(now));
        recovery.expired_records = (found - entries.len()) as u64;
        recovery.live = entries.iter().map(|entry| (entry.meta, address_of(entry))).collect();
        recovery.invalid_manifests =
            manifests::report_invalid(&io, &directory, &problems, deadline)?;
        let first_nonce = random_u64()
            .map_err(|source| DiskError::from_io("choose write numbers for", &blocks, source))?;
        let files = Self {
            config,
            io,
            is_direct,
            table: Mutex::new(table),
            reclaim_lock: DeadlineMutex::default(),
            rename_lock: Arc::default(),
            durable_directories: Arc::new(DurableDirectories::new(directory)),
            syncs: SharedSync::default(),
            next_nonce: AtomicU64::new(first_nonce),
            counters: BlockFileCounters::default(),
            problems,
            directory_lock: lock,
        };
        Ok((files, recovery))
    }
}

/// The result of scanning a directory of block files.
#[derive(Debug, Default)]
struct BlockFileScan {
    recovery: Recovery,
    entries: Vec<RecordEntry>,
    damaged: Vec<DamagedFile>,
    problems: Vec<String>,
}

/// Reads the header of every block file and removes temporary files of this writer. Unreadable
/// files are reported and skipped.
fn find_blocks(
    files: &dyn FileOperations,
    directory: &Path,
    writer: &str,
) -> Result<BlockFileScan, DiskError> {
    let mut found = BlockFileScan::default();
    let blocks = directory.join("blocks");
    let mut pending =
        files.list(&blocks).map_err(|error| DiskError::from_io("read", &blocks, error))?;
    while let Some(path) = pending.pop() {
        if let Some(key) = key_of(&path) {
            found.recovery.files += 1;
            match read_header(files, &path, &key) {
                Ok(Some(entry)) => found.entries.push(entry),
                Ok(None) => found.report_damaged(files, &path, key)?,
                Err(error) => found.report_unreadable(&path, error)?,
            }
        } else if is_unfinished(&path, writer) {
            found.recovery.torn_records += 1;
            // If it remains, it uses space but is never read as a block.
            files.remove(&path).or_else(|error| found.report_unreadable(&path, error))?;
        } else if path.extension().is_none() {
            match files.list(&path) {
                Ok(children) => pending.extend(children),
                Err(error) => found.report_unreadable(&path, error)?,
            }
        }
    }
    Ok(found)
}

impl BlockFileScan {
    /// Counts a file with a damaged header. Returns an error for a file of another version.
    fn report_damaged(
        &mut self,
        files: &dyn FileOperations,
        path: &Path,
        key: BlockKey,
    ) -> Result<(), DiskError> {
        // The header is read again, because `read_header` does not tell damage from another
        // version.
        let read = || -> io::Result<(Vec<u8>, u64)> {
            let file = files.open(path, OpenMode::Read, false)?;
            let mut page = PageBuffer::zeroed(PAGE_BYTES);
            let read = files.read(&file, 0, page.bytes_mut())?;
            Ok((page.bytes()[..read].to_vec(), files.length(&file)?))
        };
        let (page, bytes) = match read() {
            Ok(read) => read,
            Err(error) => return self.report_unreadable(path, error),
        };
        if let Err(FormatError::Version { found }) = SegmentFrame::decode(&page, &NO_SEGMENT, 0, 0)
        {
            return Err(DiskError::UnknownVersion { path: path.to_owned(), found });
        }
        self.recovery.damaged_structures += 1;
        self.damaged.push(DamagedFile { key, bytes });
        self.add_problem(format!(
            "{}: its header is damaged or belongs to another block",
            path.display()
        ));
        Ok(())
    }

    /// Counts a path that cannot be read: a directory, or a file on a bad sector of the device.
    fn report_unreadable(&mut self, path: &Path, error: io::Error) -> Result<(), DiskError> {
        if error.kind() == io::ErrorKind::TimedOut {
            return Err(DiskError::from_io("read", path, error));
        }
        self.recovery.misplaced_files += 1;
        self.add_problem(format!("{}: {error}", path.display()));
        Ok(())
    }

    fn add_problem(&mut self, problem: String) {
        if self.problems.len() < PROBLEMS_MAX {
            self.problems.push(problem);
        }
    }
}

fn is_unfinished(path: &Path, writer: &str) -> bool {
    // `<key>.<writer>.<nonce>.tmp`. Those of other writers may still be written.
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let is_temporary = path.extension().is_some_and(|extension| extension == "tmp");
    is_temporary && name.split('.').nth(1) == Some(writer)
}
