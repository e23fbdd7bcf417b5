//! One file a block, named by its key, for file systems that share blocks by name.
//!
//! Invariants: a file appears under its name by a rename, once all of it was written. Each write
//! has a number of its own, in the file's header, which is the block's address: whatever lies
//! under a name, late or by others, is never taken for what an address was given for. Others may
//! add and remove files at any time, so what is in memory is a hint: every call asks the disk.

mod block_file;
mod erase;
mod known;
mod recovery;

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cascade_block::{BlockKey, Deadline, Namespace, checksum};
use cascade_memory::Slab;

use self::block_file::{BlockImage, file_bytes, remove_file};
pub(crate) use self::block_file::{address_of, key_of, read_header};
use self::known::Known;
use crate::format::Entry;
use crate::gate::Gate;
use crate::io::{FileOperations, Io, OpenMode, Transfer};
use crate::lock::DirectoryLock;
use crate::problems::Problems;
use crate::tier::ReadRequest;
use crate::{
    Address, BlockFiles, Damage, DiskError, DiskStats, ErasedFiles, FileTierConfig, ReadOutcome,
    Reclaimed, RecordMeta, StoredManifest, device_probe, manifests,
};

/// The file tier with one file a block.
#[derive(Debug)]
pub struct PerBlockFiles {
    config: FileTierConfig,
    io: Io,
    is_direct: bool,
    known: Mutex<Known>,
    reclaimer: Gate<()>,
    /// Held by whoever changes which file lies under a name, until that is done.
    names: Arc<Gate<()>>,
    /// The next write's number: from a random start, so that no other process has the same.
    next_nonce: AtomicU64,
    counters: Counters,
    problems: Problems,
    lock: Arc<DirectoryLock>,
}

#[derive(Debug, Default)]
struct Counters {
    records_written: AtomicU64,
    bytes_written: AtomicU64,
    records_read: AtomicU64,
    bytes_read: AtomicU64,
    records_damaged: AtomicU64,
}

impl PerBlockFiles {
    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The file of a block; its directory is named by the first digits of its key.
    fn path(&self, key: &BlockKey) -> PathBuf {
        let name = key.to_string();
        let shard = &name[..usize::from(self.config.shard_digits)];
        self.config.directory.join("blocks").join(shard).join(format!("{name}.block"))
    }

    /// A name in the block's own directory that no reader looks for.
    fn temporary_path(&self, key: &BlockKey, address: Address) -> PathBuf {
        let nonce = address.to_u64();
        self.path(key).with_extension(format!("{}.{nonce:016x}.tmp", self.config.writer))
    }

    /// The address of a write that is about to begin.
    fn next_address(&self) -> Address {
        Address::of_write(self.next_nonce.fetch_add(1, Ordering::Relaxed))
    }

    /// Runs a call that changes which file lies under a name: one at a time, and none that has
    /// not begun by its deadline.
    fn change_names<T: Send + 'static>(
        &self,
        operation: &'static str,
        path: &Path,
        deadline: Deadline,
        work: impl FnOnce(&dyn FileOperations) -> io::Result<T> + Send + 'static,
    ) -> Result<T, DiskError> {
        let (names, clock) = (Arc::clone(&self.names), Arc::clone(&self.io.clock));
        self.io.call(operation, path, deadline, move |files| {
            let turn = names.enter(deadline, clock.as_ref());
            let _turn = turn
                .filter(|_| !deadline.has_passed(clock.as_ref()))
                .ok_or(io::ErrorKind::TimedOut)?;
            work(files)
        })
    }

    fn refusal(&self, meta: &RecordMeta, slab: &Slab) -> Option<DiskError> {
        let payload_bytes = u64::from(meta.payload_bytes);
        if slab.len() as u64 != payload_bytes {
            let slab_bytes = slab.len() as u64;
            return Some(DiskError::LengthMismatch { payload_bytes, slab_bytes });
        }
        let limit_bytes = self.config.segment_bytes;
        (payload_bytes == 0 || payload_bytes > limit_bytes)
            .then_some(DiskError::BadLength { payload_bytes, limit_bytes })
    }

    /// Sets bytes aside for a file, or says that there are none.
    fn admit(&self, meta: &RecordMeta, under_way: u64) -> Result<u64, DiskError> {
        let needed_bytes = file_bytes(meta.payload_bytes);
        let used_bytes = self.known().used_bytes() + under_way;
        if used_bytes + needed_bytes > self.config.capacity_bytes {
            let capacity_bytes = self.config.capacity_bytes;
            return Err(DiskError::Full { needed_bytes, used_bytes, capacity_bytes });
        }
        Ok(needed_bytes)
    }

    /// Writes images under temporary names, together, then renames each that is complete.
    fn store(
        &self,
        images: Vec<BlockImage>,
        deadline: Deadline,
    ) -> Vec<Result<Address, DiskError>> {
        let entries: Vec<_> = images.iter().map(BlockImage::entry).collect();
        let created = self.create_all(images, deadline);
        let mut transfers = Vec::with_capacity(created.len());
        let mut places = Vec::with_capacity(created.len());
        for each in created {
            places.push(each.map(|(path, transfer)| {
                transfers.push(transfer);
                path
            }));
        }
        let files: Vec<_> = transfers.iter().map(|each| Arc::clone(&each.file)).collect();
        let mut results: Vec<_> =
            self.io.transfer_all(transfers, deadline).into_iter().map(|(_, r)| r).collect();
        if self.config.durable {
            let syncs = files.into_iter().map(Transfer::sync).collect();
            let synced = self.io.transfer_all(syncs, deadline);
            for (result, (_, sync)) in results.iter_mut().zip(synced) {
                if result.is_ok() {
                    *result = sync;
                }
            }
        }
        let mut results = results.into_iter();
        places
            .into_iter()
            .zip(entries)
            .map(|(place, entry)| {
                let path = place?;
                let written = results.next().expect("one result for each created file");
                self.publish(path, &entry, written, deadline)
            })
            .collect()
    }

    /// Gives a written file its name, or takes it away if it is not complete.
    fn publish(
        &self,
        temporary: PathBuf,
        entry: &Entry,
        written: io::Result<()>,
        deadline: Deadline,
    ) -> Result<Address, DiskError> {
        let path = self.path(&entry.meta.key);
        let (from, to, durable) = (temporary.clone(), path.clone(), self.config.durable);
        let published =
            written.map_err(|source| DiskError::from_io("write", &path, source)).and_then(|()| {
                self.change_names("rename", &path, deadline, move |files| {
                    files.rename(&from, &to)?;
                    match to.parent() {
                        Some(directory) if durable => files.sync_directory(directory),
                        _ => Ok(()),
                    }
                })
            });
        if let Err(error) = published {
            // Best effort: what stays behind is removed at the next opening.
            let removed =
                self.io.call("remove", &path, deadline, move |files| files.remove(&temporary));
            drop(removed);
            return Err(error);
        }
        let mut known = self.known();
        known.add(entry);
        if !self.config.durable {
            known.unsynced.push(entry.meta.key);
        }
        drop(known);
        let payload_bytes = u64::from(entry.meta.payload_bytes);
        self.counters.records_written.fetch_add(1, Ordering::Relaxed);
        self.counters.bytes_written.fetch_add(payload_bytes, Ordering::Relaxed);
        Ok(address_of(entry))
    }

    /// Removes the files of writes, and no others; by how many bytes the known files shrank.
    fn remove_files(
        &self,
        blocks: &[(BlockKey, Address)],
        deadline: Deadline,
    ) -> Result<u64, DiskError> {
        let targets: Vec<_> = {
            let mut known = self.known();
            known.hide(blocks);
            let target = |(key, address): &(BlockKey, Address)| {
                (self.path(key), *key, *address, known.is(key, *address))
            };
            blocks.iter().map(target).collect()
        };
        let durable = self.config.durable;
        let directory = self.config.directory.clone();
        let others = self.change_names("remove files under", &directory, deadline, {
            move |files| {
                let mut others = Vec::new();
                let mut directories = BTreeSet::new();
                for (path, key, address, is_known) in targets {
                    others.extend(remove_file(files, &path, &key, address, is_known)?);
                    directories.extend(path.parent().map(Path::to_owned));
                }
                for directory in directories.iter().filter(|_| durable) {
                    match files.sync_directory(directory) {
                        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                        Ok(()) | Err(_) => {}
                    }
                }
                Ok(others)
            }
        })?;
        let mut known = self.known();
        known.unhide(blocks);
        let freed = blocks.iter().map(|(key, address)| known.forget(key, *address)).sum();
        // Files of other writes under these names are there, whoever made them.
        for entry in &others {
            known.add(entry);
        }
        Ok(freed)
    }

    /// A file to probe the device with: one that is known, if it is still there.
    fn open_any(&self, deadline: Deadline) -> Result<Option<Arc<File>>, DiskError> {
        let Some(key) = self.known().any_key() else { return Ok(None) };
        let (path, direct) = (self.path(&key), self.is_direct);
        let opened = path.clone();
        let opened = self.io.call_reading("open", &path, deadline, move |files| {
            files.open(&opened, OpenMode::Read, direct)
        });
        match opened {
            Err(error) if error.is_misplaced() => Ok(None),
            opened => opened.map(|file| Some(Arc::new(file))),
        }
    }

    fn damaged(&self, damage: Damage) -> ReadOutcome {
        self.counters.records_damaged.fetch_add(1, Ordering::Relaxed);
        ReadOutcome::Damaged(damage)
    }

    fn alias_one(
        &self,
        meta: &RecordMeta,
        target: Address,
        deadline: Deadline,
    ) -> Result<Address, DiskError> {
        let source = {
            let known = self.known();
            let key = known.key_at(target).filter(|key| !known.is_hidden(key, target));
            key.ok_or(DiskError::NoTarget)?
        };
        let image = self.load(&source, target, deadline)?.ok_or(DiskError::NoTarget)?;
        if image.meta.payload_bytes != meta.payload_bytes {
            return Err(DiskError::LengthMismatch {
                payload_bytes: u64::from(meta.payload_bytes),
                slab_bytes: u64::from(image.meta.payload_bytes),
            });
        }
        self.admit(meta, 0)?;
        self.store(vec![image.under(*meta, self.next_address())], deadline).remove(0)
    }
}

impl BlockFiles for PerBlockFiles {
    fn append(
        &self,
        batch: Vec<(RecordMeta, Slab)>,
        deadline: Deadline,
    ) -> Vec<Result<Address, DiskError>> {
        let mut under_way = 0;
        let mut images = Vec::with_capacity(batch.len());
        let mut answers = Vec::with_capacity(batch.len());
        for (meta, slab) in batch {
            let admitted = match self.refusal(&meta, &slab) {
                Some(error) => Err(error),
                None => self.admit(&meta, under_way),
            };
            answers.push(admitted.map(|bytes| {
                under_way += bytes;
                let sum = checksum(&slab);
                images.push(BlockImage::of_slab(meta, self.next_address(), sum, slab));
            }));
        }
        let mut stored = self.store(images, deadline).into_iter();
        let stored = answers.into_iter().map(|answer| {
            answer.and_then(|()| stored.next().expect("one answer for each stored image"))
        });
        stored.collect()
    }

    fn read(&self, batch: Vec<ReadRequest>, deadline: Deadline) -> Vec<ReadOutcome> {
        self.read_files(batch, deadline)
    }

    fn alias(
        &self,
        batch: &[(RecordMeta, Address)],
        deadline: Deadline,
    ) -> Vec<Result<Address, DiskError>> {
        batch.iter().map(|(meta, target)| self.alias_one(meta, *target, deadline)).collect()
    }

    fn remove(&self, keys: &[(BlockKey, Address)], deadline: Deadline) -> Result<(), DiskError> {
        self.remove_files(keys, deadline).map(drop)
    }

    fn reclaim(
        &self,
        keep: &mut dyn FnMut(&RecordMeta, Address) -> bool,
        deadline: Deadline,
    ) -> Result<Reclaimed, DiskError> {
        let _turn = self.reclaimer.enter(deadline, self.io.clock.as_ref()).ok_or_else(|| {
            DiskError::Timeout {
                operation: "waiting for an earlier reclaim",
                path: self.config.directory.clone(),
            }
        })?;
        self.reclaim_oldest(keep, deadline)
    }

    fn probe(
        &self,
        key: &BlockKey,
        deadline: Deadline,
    ) -> Result<Option<(RecordMeta, Address)>, DiskError> {
        let Some(entry) = self.load_entry(key, deadline)? else { return Ok(None) };
        let address = address_of(&entry);
        let mut known = self.known();
        if known.is_hidden(key, address) {
            return Ok(None);
        }
        known.add(&entry);
        Ok(Some((entry.meta, address)))
    }

    fn sync(&self, deadline: Deadline) -> Result<(), DiskError> {
        let unsynced = std::mem::take(&mut self.known().unsynced);
        let paths: Vec<_> = unsynced.iter().map(|key| self.path(key)).collect();
        let synced = self.sync_files(paths, deadline);
        if synced.is_err() {
            self.known().unsynced.extend(unsynced);
        }
        synced
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
        device_probe::probe(&self.io, &self.config, &self.lock, self.is_direct, deadline)
    }

    fn probe_reads(&self, deadline: Deadline) -> Result<(), DiskError> {
        let blocks = self.open_any(deadline)?;
        device_probe::probe_reads(&self.io, &self.config, &self.lock, blocks, deadline)
    }

    fn problems(&self) -> Vec<String> {
        self.problems.all()
    }

    fn erase(&self, deadline: Deadline) -> Result<ErasedFiles, DiskError> {
        self.erase_all(deadline)
    }

    fn used_bytes(&self) -> u64 {
        self.known().used_bytes()
    }

    fn stats(&self) -> DiskStats {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let known = self.known();
        DiskStats {
            engine: self.io.engine.name(),
            is_direct: self.is_direct,
            is_registered: self.io.engine.is_registered(),
            files: known.file_count(),
            used_bytes: known.used_bytes(),
            live_bytes: known.used_bytes(),
            live_records: known.file_count(),
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
