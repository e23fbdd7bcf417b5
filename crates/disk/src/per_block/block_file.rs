//! A block's own file: one page that describes it, then its payload.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cascade_block::{BlockKey, Checksum, Deadline, checksum};
use cascade_memory::Slab;

use super::PerBlockFiles;
use crate::format::{Entry, EntryKind, Frame, PAGE_BYTES, RandomId, page_aligned, pages_of};
use crate::io::{Buffer, FileOperations, OpenMode, PageBuffer, Transfer, TransferKind};
use crate::placement::{received_slab, receiving_buffers, sending_buffers};
use crate::tier::ReadRequest;
use crate::{Address, Damage, DiskError, ReadOutcome, Reclaimed, RecordMeta};

/// A block file's page is the frame at the start of a segment without id and number.
const NO_SEGMENT: RandomId = [0; 16];

/// A block on its way into a file.
#[derive(Debug)]
pub(super) struct BlockImage {
    pub(super) meta: RecordMeta,
    checksum: Checksum,
    buffers: Vec<Buffer>,
}

impl BlockImage {
    pub(super) fn of_slab(meta: RecordMeta, checksum: Checksum, slab: Slab) -> Self {
        Self { meta, checksum, buffers: sending_buffers(slab) }
    }

    /// The same bytes, described otherwise.
    pub(super) fn under(self, meta: RecordMeta) -> Self {
        Self { meta, ..self }
    }

    /// Everything that is written: the page, then the payload.
    fn into_buffers(self) -> Vec<Buffer> {
        let mut header = PageBuffer::zeroed(PAGE_BYTES);
        let entry = Entry {
            kind: EntryKind::Block,
            meta: self.meta,
            address: Address::in_segment(0, 1),
            payload_checksum: self.checksum,
            sequence: 0,
        };
        let page_count = 1 + pages_of(u64::from(self.meta.payload_bytes));
        let frame = Frame { segment_id: NO_SEGMENT, page: 0, page_count, entries: vec![entry] };
        frame.encode(header.bytes_mut());
        let mut buffers = vec![Buffer::Pages(header)];
        buffers.extend(self.buffers);
        buffers
    }
}

/// Bytes of the file of a block of that length.
pub(super) fn file_bytes(payload_bytes: u32) -> u64 {
    page_aligned(u64::from(payload_bytes)) + PAGE_BYTES as u64
}

/// What a block file's first page says, if it is right and the key's.
pub(super) fn decode_header(page: &[u8], key: &BlockKey) -> Option<Entry> {
    let frame = Frame::decode(page, &NO_SEGMENT, 0, 0).ok()?;
    let [entry] = frame.entries.as_slice() else { return None };
    (entry.kind == EntryKind::Block && entry.meta.key == *key).then_some(*entry)
}

impl PerBlockFiles {
    /// Creates a temporary file for each image; what to write to it comes back.
    pub(super) fn create_all(
        &self,
        images: Vec<BlockImage>,
        deadline: Deadline,
    ) -> Vec<Result<(PathBuf, Transfer), DiskError>> {
        let paths: Vec<_> = images.iter().map(|each| self.temporary_path(&each.meta.key)).collect();
        let (targets, direct) = (paths.clone(), self.is_direct);
        let created = self.io.call("create", &self.config.directory, deadline, move |files| {
            Ok(targets.iter().map(|path| create(files, path, direct)).collect::<Vec<_>>())
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

    pub(super) fn read_files(
        &self,
        batch: Vec<ReadRequest>,
        deadline: Deadline,
    ) -> Vec<ReadOutcome> {
        let paths: Vec<_> = batch.iter().map(|request| self.path(&request.key)).collect();
        let (sources, direct) = (paths.clone(), self.is_direct);
        let opened = self.io.call("open", &self.config.directory, deadline, move |files| {
            let open = |path: &PathBuf| files.open(path, OpenMode::Read, direct);
            Ok(sources.iter().map(open).collect::<Vec<_>>())
        });
        let opened = match opened {
            Ok(opened) => opened,
            Err(error) => {
                return paths.iter().map(|_| ReadOutcome::Failed(error.clone())).collect();
            }
        };
        let mut transfers = Vec::with_capacity(batch.len());
        let mut outcomes = Vec::with_capacity(batch.len());
        for ((request, path), file) in batch.into_iter().zip(&paths).zip(opened) {
            outcomes.push(match file {
                _ if request.address != Address::of_file(&request.key) => Err(ReadOutcome::Gone),
                Err(error) if error.kind() == io::ErrorKind::NotFound => Err(ReadOutcome::Gone),
                Err(error) => Err(ReadOutcome::Failed(DiskError::from_io("open", path, error))),
                Ok(file) => {
                    let (key, slab_bytes) = (request.key, request.slab.len());
                    let mut buffers = vec![Buffer::Pages(PageBuffer::zeroed(PAGE_BYTES))];
                    buffers.extend(receiving_buffers(request.slab));
                    let file = Arc::new(file);
                    transfers.push(Transfer::new(TransferKind::Read, file, 0, buffers));
                    Ok((key, slab_bytes))
                }
            });
        }
        let mut answers = self.io.transfer_all(transfers, deadline).into_iter();
        let concluded = outcomes.into_iter().zip(&paths).map(|(outcome, path)| match outcome {
            Err(outcome) => outcome,
            Ok((key, slab_bytes)) => {
                let answer = answers.next().expect("one answer for each transfer");
                self.conclude(&key, slab_bytes, path, answer)
            }
        });
        concluded.collect()
    }

    fn conclude(
        &self,
        key: &BlockKey,
        slab_bytes: usize,
        path: &Path,
        (transfer, result): (Option<Transfer>, io::Result<()>),
    ) -> ReadOutcome {
        let is_short = match &result {
            Ok(()) => false,
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => true,
            Err(_) => {
                let error = result.expect_err("matched above");
                return ReadOutcome::Failed(DiskError::from_io("read", path, error));
            }
        };
        let mut transfer = transfer.expect("a finished transfer comes back");
        let header = transfer.buffers.remove(0);
        let Some(entry) = decode_header(header.bytes(), key) else {
            return self.damaged(Damage::Header);
        };
        if entry.meta.payload_bytes as usize != slab_bytes {
            return ReadOutcome::Failed(DiskError::LengthMismatch {
                payload_bytes: u64::from(entry.meta.payload_bytes),
                slab_bytes: slab_bytes as u64,
            });
        }
        if is_short {
            return self.damaged(Damage::Truncated);
        }
        let slab = received_slab(transfer, slab_bytes);
        if checksum(&slab) != entry.payload_checksum {
            return self.damaged(Damage::Checksum);
        }
        self.count_read(slab_bytes as u64);
        ReadOutcome::Hit(slab)
    }

    /// The description in a block's file; nothing if there is no file or it is not right.
    pub(super) fn load_meta(
        &self,
        key: &BlockKey,
        deadline: Deadline,
    ) -> Result<Option<RecordMeta>, DiskError> {
        let (path, own) = (self.path(key), *key);
        let source = path.clone();
        self.io.call("read", &path, deadline, move |files| {
            Ok(read_header(files, &source, &own)?.map(|entry| entry.meta))
        })
    }

    /// A block's file as an image of its own, checked.
    pub(super) fn load(
        &self,
        key: &BlockKey,
        deadline: Deadline,
    ) -> Result<Option<BlockImage>, DiskError> {
        let (path, own) = (self.path(key), *key);
        let source = path.clone();
        self.io.call("read", &path, deadline, move |files| {
            let Some(entry) = read_header(files, &source, &own)? else { return Ok(None) };
            let file = files.open(&source, OpenMode::Read, false)?;
            let bytes = entry.meta.payload_bytes as usize;
            let mut pages = PageBuffer::zeroed(bytes);
            let read = files.read(&file, PAGE_BYTES as u64, pages.bytes_mut())?;
            let is_right =
                read >= bytes && checksum(&pages.bytes()[..bytes]) == entry.payload_checksum;
            Ok(is_right.then(|| BlockImage {
                meta: entry.meta,
                checksum: entry.payload_checksum,
                buffers: vec![Buffer::Pages(pages)],
            }))
        })
    }

    /// The key whose file an address names: the address is the start of the key.
    pub(super) fn find_by_address(
        &self,
        address: Address,
        deadline: Deadline,
    ) -> Result<Option<BlockKey>, DiskError> {
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&address.to_u64().to_le_bytes());
        let path = self.path(&BlockKey::from_bytes(bytes));
        let directory = path.parent().map(Path::to_owned).unwrap_or_default();
        let listed = directory.clone();
        let names =
            self.io.call("list", &directory, deadline, move |files| match files.list(&listed) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
                other => other,
            })?;
        let keys = names.iter().filter_map(|path| key_of(path));
        Ok(keys.into_iter().find(|key| Address::of_file(key) == address))
    }

    /// Asks for the oldest files, about a segment's worth, whether they stay.
    pub(super) fn reclaim_oldest(
        &self,
        keep: &mut dyn FnMut(&RecordMeta, Address) -> bool,
        deadline: Deadline,
    ) -> Result<Reclaimed, DiskError> {
        let now = self.io.clock.unix_ms();
        let mut reclaimed = Reclaimed::default();
        let mut seen_bytes = 0;
        let mut kept = Vec::new();
        let mut gone = Vec::new();
        while seen_bytes < self.config.segment_bytes {
            let next = self.known().order.pop_front();
            let Some(key) = next else { break };
            let bytes = self.known().files.get(&key).copied();
            let Some(bytes) = bytes else { continue };
            seen_bytes += bytes;
            let address = Address::of_file(&key);
            match self.load_meta(&key, deadline)? {
                Some(meta) if !meta.has_expired(now) && keep(&meta, address) => kept.push(key),
                _ => gone.push(key),
            }
        }
        reclaimed.dropped = gone.iter().map(|key| (*key, Address::of_file(key))).collect();
        self.known().order.extend(kept);
        reclaimed.bytes_freed = self.remove_files(&gone, deadline)?;
        Ok(reclaimed)
    }

    pub(super) fn sync_files(
        &self,
        paths: Vec<PathBuf>,
        deadline: Deadline,
    ) -> Result<(), DiskError> {
        let directory = self.config.directory.clone();
        self.io.call("sync files under", &directory, deadline, move |files| {
            let mut directories: Vec<_> =
                paths.iter().filter_map(|path| path.parent().map(Path::to_owned)).collect();
            for path in &paths {
                match files.open(path, OpenMode::Read, false) {
                    Ok(file) => file.sync_data()?,
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    Err(error) => return Err(error),
                }
            }
            directories.sort_unstable();
            directories.dedup();
            directories.iter().try_for_each(|path| files.sync_directory(path))
        })
    }

    fn count_read(&self, bytes: u64) {
        use std::sync::atomic::Ordering::Relaxed;
        self.counters.records_read.fetch_add(1, Relaxed);
        self.counters.bytes_read.fetch_add(bytes, Relaxed);
    }
}

/// The key in the name of a block file.
pub(crate) fn key_of(path: &Path) -> Option<BlockKey> {
    if path.extension()? != "block" {
        return None;
    }
    path.file_stem()?.to_str()?.parse().ok()
}

/// The first page of a block's file, if the file is there and the page right.
pub(crate) fn read_header(
    files: &dyn FileOperations,
    path: &Path,
    key: &BlockKey,
) -> io::Result<Option<Entry>> {
    let file = match files.open(path, OpenMode::Read, false) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other?,
    };
    let mut page = PageBuffer::zeroed(PAGE_BYTES);
    let read = files.read(&file, 0, page.bytes_mut())?;
    Ok(decode_header(&page.bytes()[..read], key))
}

/// Creates a file, and the directory that it lies in if that is the first.
fn create(files: &dyn FileOperations, path: &Path, direct: bool) -> io::Result<File> {
    let mode = OpenMode::Create { allocate_bytes: 0 };
    match files.open(path, mode, direct) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        other => return other,
    }
    if let Some(directory) = path.parent() {
        files.make_directory(directory)?;
    }
    files.open(path, mode, direct)
}
