//! Opening a directory of block files: what is there, oldest first.

use std::io;
use std::path::Path;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};

use cascade_block::Deadline;

use super::block_file::{address_of, key_of, read_header};
use super::known::Known;
use super::{Counters, PerBlockFiles};
use crate::format::{Entry, FormatError, Frame, PAGE_BYTES};
use crate::gate::Gate;
use crate::io::{FileOperations, Io, OpenMode, PageBuffer};
use crate::lock::{DirectoryLock, probe_direct};
use crate::random::random_bytes;
use crate::{DiskError, FileTierConfig, Recovery, StoredManifest, manifests};

impl PerBlockFiles {
    /// Locks the writer's name and finds the block files that are there, whoever wrote them.
    pub(crate) fn open(
        config: FileTierConfig,
        io: Io,
        deadline: Deadline,
    ) -> Result<(Self, Recovery), DiskError> {
        let directory = config.directory.clone();
        let lock = DirectoryLock::make(&io, &config, deadline)?;
        let is_direct = config.direct && probe_direct(&io, &config, deadline)?;
        let writer = config.writer.to_string();
        let blocks = directory.join("blocks");
        let listed = blocks.clone();
        let (mut recovery, mut entries) = io.call("read", &blocks, deadline, move |files| {
            files.make_directory(&listed)?;
            Ok(find_blocks(files, &listed, &writer))
        })??;
        entries.sort_by_key(|entry| entry.meta.written_unix_ms);
        let now = io.clock.unix_ms();
        let mut known = Known::default();
        for entry in &entries {
            // Expired files are known too: a reclaim takes them away.
            known.add(entry);
        }
        let found = entries.len();
        entries.retain(|entry| !entry.meta.has_expired(now));
        recovery.expired_records = (found - entries.len()) as u64;
        recovery.live = entries.iter().map(|entry| (entry.meta, address_of(entry))).collect();
        recovery.bad_manifests = manifests::load_all(&io, &directory, deadline)?
            .into_iter()
            .filter(|each| matches!(each, StoredManifest::Bad { .. }))
            .collect();
        let first_nonce = random_bytes()
            .map_err(|source| DiskError::from_io("number the writes under", &blocks, source))?;
        let files = Self {
            config,
            io,
            is_direct,
            known: Mutex::new(known),
            reclaimer: Gate::new(()),
            names: Arc::new(Gate::new(())),
            next_nonce: AtomicU64::new(u64::from_le_bytes(first_nonce)),
            counters: Counters::default(),
            lock,
        };
        Ok((files, recovery))
    }
}

/// Reads the first page of every block file, and removes what this writer left unfinished.
fn find_blocks(
    files: &dyn FileOperations,
    blocks: &Path,
    writer: &str,
) -> Result<(Recovery, Vec<Entry>), DiskError> {
    let mut recovery = Recovery::default();
    let mut entries = Vec::new();
    let failed = |path: &Path, source| DiskError::from_io("read", path, source);
    let mut pending = files.list(blocks).map_err(|error| failed(blocks, error))?;
    while let Some(path) = pending.pop() {
        if let Some(key) = key_of(&path) {
            recovery.files += 1;
            match read_header(files, &path, &key) {
                Ok(Some(entry)) => entries.push(entry),
                Ok(None) => note_damage(files, &path, &mut recovery)?,
                Err(error) => return Err(failed(&path, error)),
            }
        } else if is_unfinished(&path, writer) {
            recovery.torn_records += 1;
            files.remove(&path).map_err(|error| failed(&path, error))?;
        } else if path.extension().is_none() {
            match files.list(&path) {
                Ok(children) => pending.extend(children),
                Err(error) if error.kind() == io::ErrorKind::NotADirectory => {}
                Err(error) => return Err(failed(&path, error)),
            }
        }
    }
    Ok((recovery, entries))
}

/// Counts a file that is no block, or refuses one of another version.
fn note_damage(
    files: &dyn FileOperations,
    path: &Path,
    recovery: &mut Recovery,
) -> Result<(), DiskError> {
    recovery.damaged_structures += 1;
    let read = || -> io::Result<Vec<u8>> {
        let file = files.open(path, OpenMode::Read, false)?;
        let mut page = PageBuffer::zeroed(PAGE_BYTES);
        let read = files.read(&file, 0, page.bytes_mut())?;
        Ok(page.bytes()[..read].to_vec())
    };
    let Ok(page) = read() else { return Ok(()) };
    match Frame::decode(&page, &[0; 16], 0, 0) {
        Err(FormatError::Version { found }) => {
            Err(DiskError::UnknownVersion { path: path.to_owned(), found })
        }
        _ => Ok(()),
    }
}

fn is_unfinished(path: &Path, writer: &str) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let is_temporary = path.extension().is_some_and(|extension| extension == "tmp");
    is_temporary && name.split('.').nth(1) == Some(writer)
}
