//! A block file: one header page, then the payload.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cascade_block::{BlockKey, Checksum, checksum};
use cascade_memory::HostSlab;
use cascade_runtime::Deadline;

use super::PerBlockFiles;
use super::durable_directories::DurableDirectories;
use super::unsynced::Names;
use crate::alignment::write_buffers;
use crate::error::is_misplaced;
use crate::format::{
    EntryKind, PAGE_BYTES, RandomId, RecordEntry, SegmentFrame, page_aligned, pages_of,
};
use crate::io::{
    Buffer, FileHandle, FileOperations, OpenMode, PageBuffer, Transfer, TransferKind,
    make_tier_directory,
};
use crate::place::Place as _;
use crate::{Address, BlockFacts, DiskError, MakeRoomOutcome};

/// The header page is encoded as the first frame of a segment without ID and number.
pub(super) const NO_SEGMENT: RandomId = [0; 16];

/// A block to write to a file.
#[derive(Debug)]
pub(super) struct BlockImage {
    pub(super) meta: BlockFacts,
    /// The number of its write.
    address: Address,
    checksum: Checksum,
    buffers: Vec<Buffer>,
}

impl BlockImage {
    pub(super) fn from_slab(
        meta: BlockFacts,
        address: Address,
        checksum: Checksum,
        slab: HostSlab,
    ) -> Self {
        Self { meta, address, checksum, buffers: write_buffers(slab) }
    }

    /// The same bytes with other metadata, for another write.
    pub(super) fn with_meta(self, meta: BlockFacts, address: Address) -> Self {
        Self { meta, address, ..self }
    }

    /// The entry in the file's header page.
    pub(super) fn entry(&self) -> RecordEntry {
        RecordEntry {
            kind: EntryKind::Block,
            meta: self.meta,
            // The payload follows the header page, as in a frame at page 0 of segment 0.
            address: Address::in_segment(0, 1),
            payload_checksum: self.checksum,
            sequence: self.address.0,
        }
    }

    /// The content of the file: header page, then payload.
    fn into_buffers(self) -> Vec<Buffer> {
        let mut header = PageBuffer::zeroed(PAGE_BYTES);
        let entry = self.entry();
        let page_count = 1 + pages_of(u64::from(self.meta.bytes));
        let frame =
            SegmentFrame { segment_id: NO_SEGMENT, page: 0, page_count, entries: vec![entry] };
        frame.encode(header.bytes_mut());
        let mut buffers = vec![Buffer::Pages(header)];
        buffers.extend(self.buffers);
        buffers
    }
}

/// Size of the file of a block with this length.
pub(super) fn file_bytes(payload_bytes: u32) -> u64 {
    page_aligned(u64::from(payload_bytes)) + PAGE_BYTES as u64
}

/// The entry in a block file's header page, if the page is intact and has this key.
pub(super) fn decode_header(page: &[u8], key: &BlockKey) -> Option<RecordEntry> {
    let frame = SegmentFrame::decode(page, &NO_SEGMENT, 0, 0).ok()?;
    let [entry] = frame.entries.as_slice() else { return None };
    // The sequence number is the nonce of the write, which has 63 bits.
    let is_block = entry.kind == EntryKind::Block && Address(entry.sequence).is_write();
    (is_block && entry.meta.key == *key).then_some(*entry)
}

/// A block's address: the number of its write, stored as the sequence number.
pub(crate) fn address_of(entry: &RecordEntry) -> Address {
    Address(entry.sequence)
}

impl PerBlockFiles {
    /// Creates a temporary file for each image. Returns the transfers that write them.
    pub(super) fn create_all(
        &self,
        images: Vec<BlockImage>,
        deadline: Deadline,
    ) -> Vec<Result<(PathBuf, Transfer), DiskError>> {
        let paths: Vec<_> =
            images.iter().map(|each| self.temporary_path(&each.meta.key, each.address)).collect();
        let (targets, direct) = (paths.clone(), self.is_direct);
        let directories = Arc::clone(&self.durable_directories);
        let created = self.io.call("create", &self.config.directory, deadline, move |files| {
            let create = |path: &PathBuf| create(files, path, direct, &directories);
            Ok(targets.iter().map(create).collect::<Vec<_>>())
        });
        let created = match created {
            Ok(created) => created,
            Err(error) => return paths.iter().map(|_| Err(error.clone())).collect(),
        };
        let opened = created.into_iter().zip(paths).zip(images);
        opened
            .map(|((file, path), image)| {
                let file = file.map_err(|source| DiskError::from_io("create", &path, source))?;
                let buffers = image.into_buffers();
                Ok((path, Transfer::new(TransferKind::Write, Arc::new(file), 0, buffers)))
            })
            .collect()
    }

    /// The entry in a block's file, or `None` if there is no file or its header is damaged.
    pub(super) fn load_entry(
        &self,
        key: &BlockKey,
        deadline: Deadline,
    ) -> Result<Option<RecordEntry>, DiskError> {
        let (path, key) = (self.path(key), *key);
        let source = path.clone();
        // A lookup only reads, so hung writes must not block it.
        self.io
            .call_reading("read", &path, deadline, move |files| read_header(files, &source, &key))
    }

    /// Reads and verifies the file of one write. Returns `None` if it is damaged or belongs to
    /// another write.
    pub(super) fn load(
        &self,
        key: &BlockKey,
        address: Address,
        deadline: Deadline,
    ) -> Result<Option<BlockImage>, DiskError> {
        let (path, key) = (self.path(key), *key);
        let source = path.clone();
        self.io.call("read", &path, deadline, move |files| {
            let Some((file, entry)) = open_block(files, &source, &key)? else { return Ok(None) };
            if address_of(&entry) != address {
                return Ok(None);
            }
            let bytes = entry.meta.bytes as usize;
            let mut pages = PageBuffer::zeroed(bytes);
            let read = files.read(&file, PAGE_BYTES as u64, pages.bytes_mut())?;
            // Files are padded to whole pages, so a complete read may be longer than the payload.
            let is_intact =
                read >= bytes && checksum(&pages.bytes()[..bytes]) == entry.payload_checksum;
            Ok(is_intact.then(|| BlockImage {
                meta: entry.meta,
                address,
                checksum: entry.payload_checksum,
                buffers: vec![Buffer::Pages(pages)],
            }))
        })
    }

    /// Reclaims the oldest files, about one segment's worth.
    pub(super) fn reclaim_oldest(
        &self,
        keep: &mut dyn FnMut(&BlockFacts, Address) -> bool,
        deadline: Deadline,
    ) -> Result<MakeRoomOutcome, DiskError> {
        let damaged_bytes = self.remove_damaged(deadline)?;
        let (mut kept, mut dropped) = (Vec::new(), Vec::new());
        let chosen = self.select_victims(keep, &mut kept, &mut dropped, deadline);
        let freed = chosen.and_then(|()| self.remove_files(&dropped, deadline));
        let mut table = self.table();
        // `select_victims` took all of them out of the order, so the kept ones go to its end.
        table.requeue(kept);
        match freed {
            Ok(freed) => {
                let freed_bytes = freed + damaged_bytes;
                Ok(MakeRoomOutcome { moved: Vec::new(), dropped, freed_bytes })
            }
            Err(error) => {
                // They are in the table, so a later reclaim must find them again.
                table.requeue(dropped.into_iter().map(|(_, address)| address));
                Err(error)
            }
        }
    }

    /// Removes files found damaged at opening, unless a block was stored in their place since.
    /// Returns the bytes freed.
    fn remove_damaged(&self, deadline: Deadline) -> Result<u64, DiskError> {
        let damaged = self.table().take_damaged();
        if damaged.is_empty() {
            return Ok(0);
        }
        let bytes = damaged.iter().map(|file| file.bytes).sum();
        let targets: Vec<_> = damaged.iter().map(|file| (self.path(&file.key), file.key)).collect();
        let directory = self.config.directory.clone();
        let removed =
            self.with_rename_lock("remove files under", &directory, deadline, move |files| {
                // The lock keeps this process from storing a block between check and removal.
                for (path, key) in &targets {
                    // An intact header means that a block was stored under the name since.
                    if read_header(files, path, key)?.is_none() {
                        match files.remove(path) {
                            Err(error) if !is_misplaced(&error) => return Err(error),
                            Ok(()) | Err(_) => {}
                        }
                    }
                }
                Ok(())
            });
        if removed.is_err() {
            self.table().add_damaged(damaged);
        }
        removed.map(|()| bytes)
    }

    /// Takes the oldest writes out of the reclaim order and divides them into kept and dropped
    /// ones.
    fn select_victims(
        &self,
        keep: &mut dyn FnMut(&BlockFacts, Address) -> bool,
        kept: &mut Vec<Address>,
        dropped: &mut Vec<(BlockKey, Address)>,
        deadline: Deadline,
    ) -> Result<(), DiskError> {
        let now = self.io.clock.unix_ms();
        let mut seen_bytes = 0;
        while seen_bytes < self.config.segment_bytes {
            let next = self.table().pop_oldest();
            let Some((key, address, bytes)) = next else { break };
            // Kept files count too, which bounds the files that one reclaim reads.
            seen_bytes += bytes;
            let entry = match self.load_entry(&key, deadline) {
                // A file that cannot be read is reclaimed like a damaged one.
                Err(DiskError::Io { .. }) => None,
                // After a time-out the file counts as kept, so that it returns to the reclaim
                // order.
                entry => entry.inspect_err(|_| kept.push(address))?,
            };
            let current = entry.filter(|entry| address_of(entry) == address);
            match current {
                Some(entry) if !entry.meta.has_expired(now) && keep(&entry.meta, address) => {
                    kept.push(address);
                }
                // `remove_files` removes the file only if it is still that of this write.
                _ => dropped.push((key, address)),
            }
        }
        Ok(())
    }

    /// Syncs files and the directories with their names, or directories.
    pub(super) fn sync_names(&self, names: &Names, deadline: Deadline) -> Result<(), DiskError> {
        let (paths, mut directories): (Vec<_>, Vec<_>) = match names {
            Names::Files(keys) => (keys.iter().map(|key| self.path(key)).collect(), Vec::new()),
            Names::Directories(directories) => (Vec::new(), directories.clone()),
        };
        directories.extend(paths.iter().filter_map(|path| path.parent().map(Path::to_owned)));
        let directory = self.config.directory.clone();
        let durable = Arc::clone(&self.durable_directories);
        self.io.call("sync files under", &directory, deadline, move |files| {
            for path in &paths {
                match files.open(path, OpenMode::Read, false) {
                    Ok(file) => files.sync(&file)?,
                    // Another process removed it: there is nothing to sync.
                    Err(error) if is_misplaced(&error) => {}
                    Err(error) => return Err(error),
                }
            }
            directories.sort_unstable();
            directories.dedup();
            directories.iter().try_for_each(|path| match durable.sync(files, path) {
                Err(error) if !is_misplaced(&error) => Err(error),
                Ok(()) | Err(_) => Ok(()),
            })
        })
    }

    pub(super) fn count_read(&self, bytes: u64) {
        use std::sync::atomic::Ordering::Relaxed;
        self.counters.records_read.fetch_add(1, Relaxed);
        self.counters.bytes_read.fetch_add(bytes, Relaxed);
    }
}

/// The key from the name of a block file.
pub(crate) fn key_of(path: &Path) -> Option<BlockKey> {
    if path.extension()? != "block" {
        return None;
    }
    path.file_stem()?.to_str()?.parse().ok()
}

/// The entry in a block's file, if the file exists and its header is intact.
pub(crate) fn read_header(
    files: &dyn FileOperations,
    path: &Path,
    key: &BlockKey,
) -> io::Result<Option<RecordEntry>> {
    Ok(open_block(files, path, key)?.map(|(_file, entry)| entry))
}

/// Opens a block's file and reads its entry, if the file exists and its header is intact.
fn open_block(
    files: &dyn FileOperations,
    path: &Path,
    key: &BlockKey,
) -> io::Result<Option<(FileHandle, RecordEntry)>> {
    let file = match files.open(path, OpenMode::Read, false) {
        Err(error) if is_misplaced(&error) => return Ok(None),
        other => other?,
    };
    let mut page = PageBuffer::zeroed(PAGE_BYTES);
    let read = files.read(&file, 0, page.bytes_mut())?;
    Ok(decode_header(&page.bytes()[..read], key).map(|entry| (file, entry)))
}

/// Removes the file of one write. A file of another write is kept and its entry returned.
///
/// An unreadable file is removed if it is known to be that of this write.
pub(super) fn remove_file(
    files: &dyn FileOperations,
    path: &Path,
    key: &BlockKey,
    address: Address,
    is_known: bool,
) -> io::Result<Option<RecordEntry>> {
    match read_header(files, path, key) {
        Ok(Some(entry)) if address_of(&entry) != address => return Ok(Some(entry)),
        Ok(Some(_)) => {}
        Ok(None) | Err(_) if is_known => {}
        Ok(None) => return Ok(None),
        Err(error) => return Err(error),
    }
    match files.remove(path) {
        // The file of this write no longer exists.
        Err(error) if !is_misplaced(&error) => Err(error),
        Ok(()) | Err(_) => Ok(None),
    }
}

/// Creates a file, and its directory if that is missing.
fn create(
    files: &dyn FileOperations,
    path: &Path,
    direct: bool,
    directories: &DurableDirectories,
) -> io::Result<FileHandle> {
    let mode = OpenMode::Create { allocate_bytes: 0 };
    match files.open(path, mode, direct) {
        Err(error) if is_misplaced(&error) => {}
        other => return other,
    }
    // Directories are created only after a first attempt failed, because almost always they exist.
    if let Some(directory) = path.parent() {
        if let Some(blocks) = directory.parent().filter(|it| it.ends_with("blocks")) {
            make_tier_directory(files, blocks)?;
        }
        make_tier_directory(files, directory)?;
        directories.created(directory);
    }
    files.open(path, mode, direct)
}
