//! One file per block, named by its key, for file systems on which hosts share blocks by name.
//!
//! Invariants: a file appears under its name by a rename, after it was written completely. Each
//! write has its own number, stored in the file's header, which is the block's address. A file that
//! another process or a late rename put under the name is thus never mistaken for the addressed
//! one. Other processes may add and remove files at any time, so the table in memory is a hint and
//! every call checks the disk.

mod block_file;
mod durable_directories;
mod erase;
mod read;
mod recovery;
mod table;
mod unsynced;

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};

use cascade_block::{BlockKey, Namespace, checksum};
use cascade_memory::{HostSlab, Slab};
use cascade_runtime::{Deadline, DeadlineMutex, Mutex, MutexGuard};

use self::block_file::{BlockImage, file_bytes, remove_file};
pub(crate) use self::block_file::{address_of, key_of, read_header};
use self::durable_directories::DurableDirectories;
use self::table::BlockFileTable;
use crate::format::RecordEntry;
use crate::io::{FileHandle, FileIo, FileOperations, OpenMode, Transfer};
use crate::lock::DirectoryLock;
use crate::place::Place as _;
use crate::problem_log::ProblemLog;
use crate::shared_sync::SharedSync;
use crate::{
    Address, BlockFacts, BlockFiles, DiskError, DiskStats, EraseOutcome, FilesConfig, LoadOutcome,
    MakeRoomOutcome, StoredManifest, device_probe, manifests,
};
use cascade_tier::tier::LoadQueue;

/// The file tier with one file per block.
#[derive(Debug)]
pub struct PerBlockFiles {
    config: FilesConfig,
    io: FileIo,
    is_direct: bool,
    /// Not locked during I/O.
    table: Mutex<BlockFileTable>,
    /// Locked before `rename_lock` where both are locked.
    reclaim_lock: DeadlineMutex<()>,
    /// Locked while the file under a name is changed.
    rename_lock: Arc<DeadlineMutex<()>>,
    durable_directories: Arc<DurableDirectories>,
    syncs: SharedSync,
    /// The number of the next write. It starts at random, so that processes do not use the same
    /// numbers.
    next_nonce: AtomicU64,
    counters: BlockFileCounters,
    problems: ProblemLog,
    directory_lock: Arc<DirectoryLock>,
}

#[derive(Debug, Default)]
struct BlockFileCounters {
    records_written: AtomicU64,
    bytes_written: AtomicU64,
    records_read: AtomicU64,
    bytes_read: AtomicU64,
    records_damaged: AtomicU64,
}

impl PerBlockFiles {
    fn table(&self) -> MutexGuard<'_, BlockFileTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The path of a block's file. Its directory is named by the first digits of the key.
    fn path(&self, key: &BlockKey) -> PathBuf {
        let name = key.to_string();
        let shard = &name[..usize::from(self.config.shard_digits)];
        self.config.directory.join("blocks").join(shard).join(format!("{name}.block"))
    }

    /// A name in the block's directory that readers ignore.
    fn temporary_path(&self, key: &BlockKey, address: Address) -> PathBuf {
        let nonce = address.0;
        self.path(key).with_extension(format!("{}.{nonce:016x}.tmp", self.config.writer))
    }

    /// A new address for a write.
    fn next_address(&self) -> Address {
        // Relaxed: the addition alone makes the numbers unique.
        Address::of_write(self.next_nonce.fetch_add(1, Ordering::Relaxed))
    }

    /// Runs a call that changes the file under a name. Such calls run one at a time, and none
    /// starts after its deadline.
    fn with_rename_lock<T: Send + 'static>(
        &self,
        operation: &'static str,
        path: &Path,
        deadline: Deadline,
        work: impl FnOnce(&dyn FileOperations) -> io::Result<T> + Send + 'static,
    ) -> Result<T, DiskError> {
        let (rename_lock, clock) = (Arc::clone(&self.rename_lock), Arc::clone(&self.io.clock));
        self.io.call(operation, path, deadline, move |files| {
            let renames = rename_lock.lock(deadline, clock.as_ref());
            // After the deadline the caller has reported a failure, and a later call may have put
            // another file under the name.
            let _renames = renames
                .filter(|_| !deadline.has_passed(clock.as_ref()))
                .ok_or(io::ErrorKind::TimedOut)?;
            work(files)
        })
    }

    fn check_block(&self, meta: &BlockFacts, slab: Slab) -> Result<HostSlab, DiskError> {
        let payload_bytes = u64::from(meta.bytes);
        if slab.len() as u64 != payload_bytes {
            let slab_bytes = slab.len() as u64;
            return Err(DiskError::LengthMismatch { payload_bytes, slab_bytes });
        }
        let limit_bytes = self.config.segment_bytes;
        if payload_bytes == 0 || payload_bytes > limit_bytes {
            return Err(DiskError::BadLength { payload_bytes, limit_bytes });
        }
        slab.into_host().map_err(|_| DiskError::NotHostMemory)
    }

    /// Checks that the file of a block fits into the capacity beside `in_flight_bytes`. Returns its
    /// size.
    fn check_capacity(&self, meta: &BlockFacts, in_flight_bytes: u64) -> Result<u64, DiskError> {
        let needed_bytes = file_bytes(meta.bytes);
        // Earlier blocks of the batch are not in the table yet.
        let used_bytes = self.table().used_bytes() + in_flight_bytes;
        if used_bytes + needed_bytes > self.config.capacity_bytes {
            let capacity_bytes = self.config.capacity_bytes;
            return Err(DiskError::Full { needed_bytes, used_bytes, capacity_bytes });
        }
        Ok(needed_bytes)
    }

    /// Writes images to temporary files in one batch, then renames each that is complete.
    fn store(
        &self,
        images: Vec<BlockImage>,
        deadline: Deadline,
    ) -> Vec<Result<Address, DiskError>> {
        let entries: Vec<_> = images.iter().map(BlockImage::entry).collect();
        let created = self.create_all(images, deadline);
        let mut transfers = Vec::with_capacity(created.len());
        let mut paths = Vec::with_capacity(created.len());
        // Each file that could be created has one transfer, in the same order.
        for each in created {
            paths.push(each.map(|(path, transfer)| {
                transfers.push(transfer);
                path
            }));
        }
        let files: Vec<_> = transfers.iter().map(|each| Arc::clone(&each.file)).collect();
        let mut results: Vec<_> =
            self.io.transfer_all(transfers, deadline).into_iter().map(|(_, r)| r).collect();
        if self.config.durable {
            // Before the renames: after a crash each file under its name must be complete.
            let syncs = files.into_iter().map(Transfer::sync).collect();
            let synced = self.io.transfer_all(syncs, deadline);
            for (result, (_, sync)) in results.iter_mut().zip(synced) {
                if result.is_ok() {
                    *result = sync;
                }
            }
        }
        let mut results = results.into_iter();
        paths
            .into_iter()
            .zip(entries)
            .map(|(path, entry)| {
                let path = path?;
                let written = results.next().expect("one result for each created file");
                self.publish(path, &entry, written, deadline)
            })
            .collect()
    }

    /// Renames a complete file to its name; removes an incomplete one.
    fn publish(
        &self,
        temporary: PathBuf,
        entry: &RecordEntry,
        written: io::Result<()>,
        deadline: Deadline,
    ) -> Result<Address, DiskError> {
        let path = self.path(&entry.meta.key);
        let (from, to, durable) = (temporary.clone(), path.clone(), self.config.durable);
        let directories = Arc::clone(&self.durable_directories);
        let published =
            written.map_err(|source| DiskError::from_io("write", &path, source)).and_then(|()| {
                self.with_rename_lock("rename", &path, deadline, move |files| {
                    // The rename publishes the block: before it no reader finds the file.
                    files.rename(&from, &to)?;
                    match to.parent() {
                        Some(directory) if durable => directories.sync(files, directory),
                        _ => Ok(()),
                    }
                })
            });
        if let Err(error) = published {
            // Best effort: the next opening removes a remaining file.
            let removed =
                self.io.call("remove", &path, deadline, move |files| files.remove(&temporary));
            drop(removed);
            return Err(error);
        }
        let mut table = self.table();
        // After the rename, because only a file under its name can be read and reclaimed.
        table.add(entry);
        if !self.config.durable {
            table.unsynced.wrote(entry.meta.key);
        }
        drop(table);
        let payload_bytes = u64::from(entry.meta.bytes);
        self.counters.records_written.fetch_add(1, Ordering::Relaxed);
        self.counters.bytes_written.fetch_add(payload_bytes, Ordering::Relaxed);
        Ok(address_of(entry))
    }

    /// Removes the files of these writes and of no others. Returns the bytes freed.
    fn remove_files(
        &self,
        blocks: &[(BlockKey, Address)],
        deadline: Deadline,
    ) -> Result<u64, DiskError> {
        let targets: Vec<_> = {
            let mut table = self.table();
            // Before the files are removed: reads return `Gone` from now on, also if the removal
            // fails. The blocks stay hidden until a removal succeeds.
            table.hide(blocks);
            // A file that cannot be read is removed only if the table has this write under its
            // name.
            let target = |(key, address): &(BlockKey, Address)| {
                (self.path(key), *key, *address, table.contains(key, *address))
            };
            blocks.iter().map(target).collect()
        };
        let durable = self.config.durable;
        let directory = self.config.directory.clone();
        let others = self.with_rename_lock("remove files under", &directory, deadline, {
            move |files| {
                let mut others = Vec::new();
                let mut directories = BTreeSet::new();
                for (path, key, address, is_known) in targets {
                    others.extend(remove_file(files, &path, &key, address, is_known)?);
                    directories.extend(path.parent().map(Path::to_owned));
                }
                for directory in directories.iter().filter(|_| durable) {
                    // Another process may have removed the directory with everything in it.
                    match files.sync_directory(directory) {
                        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                        Ok(()) | Err(_) => {}
                    }
                }
                Ok(others)
            }
        })?;
        let mut table = self.table();
        table.unhide(blocks);
        let freed = blocks.iter().map(|(key, address)| table.remove(key, *address)).sum();
        for (key, _) in blocks {
            let path = self.path(key);
            if let Some(directory) = path.parent().filter(|_| !durable && !table.has(key)) {
                table.unsynced.removed(key, directory);
            }
        }
        // Files of other writes under these names exist, so the table must count them.
        for entry in &others {
            table.add(entry);
        }
        Ok(freed)
    }

    /// Opens any file of the table to probe the device with, if it still exists.
    fn open_any_file(&self, deadline: Deadline) -> Result<Option<Arc<FileHandle>>, DiskError> {
        let Some(key) = self.table().any_key() else { return Ok(None) };
        let (path, direct) = (self.path(&key), self.is_direct);
        let opened = path.clone();
        let opened = self.io.call_reading("open", &path, deadline, move |files| {
            files.open(&opened, OpenMode::Read, direct)
        });
        match opened {
            // The table is a hint: another process may have removed the file.
            Err(error) if error.is_misplaced() => Ok(None),
            opened => opened.map(|file| Some(Arc::new(file))),
        }
    }

    fn damaged(&self) -> LoadOutcome {
        self.counters.records_damaged.fetch_add(1, Ordering::Relaxed);
        LoadOutcome::Damaged
    }

    fn alias_one(
        &self,
        meta: &BlockFacts,
        target: Address,
        deadline: Deadline,
    ) -> Result<Address, DiskError> {
        let source = {
            let table = self.table();
            let key = table.key_at(target).filter(|key| !table.is_hidden(key, target));
            key.ok_or(DiskError::NoTarget)?
        };
        // A file is found under one key only, so an alias is a second file with the same bytes.
        let image = self.load(&source, target, deadline)?.ok_or(DiskError::NoTarget)?;
        if image.meta.bytes != meta.bytes {
            return Err(DiskError::LengthMismatch {
                payload_bytes: u64::from(meta.bytes),
                slab_bytes: u64::from(image.meta.bytes),
            });
        }
        self.check_capacity(meta, 0)?;
        self.store(vec![image.with_meta(*meta, self.next_address())], deadline).remove(0)
    }
}

impl BlockFiles for PerBlockFiles {
    fn append(
        &self,
        batch: Vec<(BlockFacts, Slab)>,
        deadline: Deadline,
    ) -> Vec<Result<Address, DiskError>> {
        let mut in_flight_bytes = 0;
        let mut images = Vec::with_capacity(batch.len());
        let mut results = Vec::with_capacity(batch.len());
        for (meta, slab) in batch {
            let admitted = self.check_block(&meta, slab).and_then(|slab| {
                self.check_capacity(&meta, in_flight_bytes).map(|bytes| (slab, bytes))
            });
            results.push(admitted.and_then(|(slab, bytes)| {
                let sum = checksum(&slab);
                if !slab.slab().verify_checksum(sum) {
                    return Err(DiskError::ChangedInMemory);
                }
                in_flight_bytes += bytes;
                images.push(BlockImage::from_slab(meta, self.next_address(), sum, slab));
                Ok(())
            }));
        }
        let mut stored = self.store(images, deadline).into_iter();
        let stored = results.into_iter().map(|result| {
            result.and_then(|()| stored.next().expect("one result for each stored image"))
        });
        stored.collect()
    }

    fn read_each(&self, queue: &mut dyn LoadQueue, deadline: Deadline) {
        self.read_files(queue, deadline);
    }

    fn alias(
        &self,
        batch: &[(BlockFacts, Address)],
        deadline: Deadline,
    ) -> Vec<Result<Address, DiskError>> {
        batch.iter().map(|(meta, target)| self.alias_one(meta, *target, deadline)).collect()
    }

    fn remove(&self, keys: &[(BlockKey, Address)], deadline: Deadline) -> Result<(), DiskError> {
        self.remove_files(keys, deadline).map(drop)
    }

    fn reclaim(
        &self,
        keep: &mut dyn FnMut(&BlockFacts, Address) -> bool,
        deadline: Deadline,
    ) -> Result<MakeRoomOutcome, DiskError> {
        let _reclaims =
            self.reclaim_lock.lock(deadline, self.io.clock.as_ref()).ok_or_else(|| {
                DiskError::Timeout {
                    operation: "waiting for an earlier reclaim",
                    path: self.config.directory.clone(),
                }
            })?;
        self.reclaim_oldest(keep, deadline)
    }

    fn lookup(
        &self,
        key: &BlockKey,
        deadline: Deadline,
    ) -> Result<Option<(BlockFacts, Address)>, DiskError> {
        let Some(entry) = self.load_entry(key, deadline)? else { return Ok(None) };
        let address = address_of(&entry);
        let mut table = self.table();
        if table.is_hidden(key, address) {
            // The removal of this file failed, so it still exists.
            return Ok(None);
        }
        table.add(&entry);
        Ok(Some((entry.meta, address)))
    }

    fn sync(&self, deadline: Deadline) -> Result<(), DiskError> {
        let late = || DiskError::Timeout {
            operation: "waiting for an earlier flush",
            path: self.config.directory.clone(),
        };
        self.syncs.run(deadline, self.io.clock.as_ref(), late, || {
            // Taken out first: blocks that are stored during this sync are left to the next one.
            let mut unsynced = std::mem::take(&mut self.table().unsynced);
            while let Some(names) = unsynced.take_some() {
                if let Err(error) = self.sync_names(&names, deadline) {
                    let mut table = self.table();
                    let mut newer = std::mem::take(&mut table.unsynced);
                    newer.put_back(names, unsynced, |key| table.has(key));
                    table.unsynced = newer;
                    return Err(error);
                }
            }
            Ok(())
        })
    }

    fn checkpoint(&self, deadline: Deadline) -> Result<(), DiskError> {
        self.sync(deadline)
    }

    fn register_manifest(
        &self,
        namespace: &Namespace,
        deadline: Deadline,
    ) -> Result<(), DiskError> {
        manifests::register(&self.io, &self.config.directory, namespace, deadline)
    }

    fn manifests(&self, deadline: Deadline) -> Result<Vec<StoredManifest>, DiskError> {
        manifests::load_all(&self.io, &self.config.directory, deadline)
    }

    fn probe_device(&self, deadline: Deadline) -> Result<(), DiskError> {
        device_probe::probe(&self.io, &self.config, &self.directory_lock, self.is_direct, deadline)
    }

    fn probe_reads(&self, deadline: Deadline) -> Result<(), DiskError> {
        let blocks = self.open_any_file(deadline)?;
        device_probe::probe_reads(&self.io, &self.config, &self.directory_lock, blocks, deadline)
    }

    fn problems(&self) -> Vec<String> {
        self.problems.all()
    }

    fn erase(&self, deadline: Deadline) -> Result<EraseOutcome, DiskError> {
        self.erase_all(deadline)
    }

    fn used_bytes(&self) -> u64 {
        self.table().used_bytes()
    }

    fn stats(&self) -> DiskStats {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let table = self.table();
        DiskStats {
            engine: self.io.engine.name(),
            is_direct: self.is_direct,
            is_registered: self.io.engine.is_registered(),
            files: table.file_count(),
            used_bytes: table.used_bytes(),
            live_bytes: table.used_bytes(),
            live_records: table.file_count(),
            records_written: load(&self.counters.records_written),
            bytes_written: load(&self.counters.bytes_written),
            records_read: load(&self.counters.records_read),
            bytes_read: load(&self.counters.bytes_read),
            records_damaged: load(&self.counters.records_damaged),
            stuck_calls: self.io.stuck_calls(),
            ..DiskStats::default()
        }
    }
}
