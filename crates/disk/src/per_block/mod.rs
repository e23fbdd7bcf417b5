//! One file a block, named by its key, for file systems that share blocks by name.
//!
//! Invariant: a file appears under its name by a rename, once all of it was written. Others may
//! add and remove files at any time, so what is in memory is a hint: every call asks the disk.

mod block_file;
mod recovery;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cascade_block::{BlockKey, Deadline, Namespace, checksum};
use cascade_memory::Slab;

use self::block_file::{BlockImage, file_bytes};
pub(crate) use self::block_file::{key_of, read_header};
use crate::gate::Gate;
use crate::io::{Io, Transfer};
use crate::lock::DirectoryLock;
use crate::tier::ReadRequest;
use crate::{
    Address, BlockFiles, Damage, DiskError, DiskStats, FileTierConfig, ReadOutcome, Reclaimed,
    RecordMeta, StoredManifest, manifests,
};

/// The file tier with one file a block.
#[derive(Debug)]
pub struct PerBlockFiles {
    config: FileTierConfig,
    io: Io,
    is_direct: bool,
    known: Mutex<Known>,
    reclaimer: Gate<()>,
    next_temporary: AtomicU64,
    counters: Counters,
    _lock: DirectoryLock,
}

/// The files that this writer knows of.
#[derive(Debug, Default)]
struct Known {
    /// Bytes of each file.
    files: HashMap<BlockKey, u64>,
    /// The order in which they are reclaimed; may name files that are gone.
    order: VecDeque<BlockKey>,
    used_bytes: u64,
    unsynced: Vec<BlockKey>,
}

#[derive(Debug, Default)]
struct Counters {
    records_written: AtomicU64,
    bytes_written: AtomicU64,
    records_read: AtomicU64,
    bytes_read: AtomicU64,
    records_damaged: AtomicU64,
}

impl Known {
    fn add(&mut self, key: BlockKey, bytes: u64) {
        match self.files.insert(key, bytes) {
            Some(before) => self.used_bytes -= before,
            None => self.order.push_back(key),
        }
        self.used_bytes += bytes;
    }

    fn forget(&mut self, key: &BlockKey) -> u64 {
        let bytes = self.files.remove(key).unwrap_or(0);
        self.used_bytes -= bytes;
        bytes
    }
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
    fn temporary_path(&self, key: &BlockKey) -> PathBuf {
        let number = self.next_temporary.fetch_add(1, Ordering::Relaxed);
        self.path(key).with_extension(format!("{}.{number}.tmp", self.config.writer))
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
        let used_bytes = self.known().used_bytes + under_way;
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
        let metas: Vec<_> = images.iter().map(|image| image.meta).collect();
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
            .zip(metas)
            .map(|(place, meta)| {
                let path = place?;
                let written = results.next().expect("one result for each created file");
                self.publish(&path, &meta, written, deadline)
            })
            .collect()
    }

    /// Gives a written file its name, or takes it away if it is not complete.
    fn publish(
        &self,
        temporary: &std::path::Path,
        meta: &RecordMeta,
        written: io::Result<()>,
        deadline: Deadline,
    ) -> Result<Address, DiskError> {
        let path = self.path(&meta.key);
        let (from, to, durable) = (temporary.to_owned(), path.clone(), self.config.durable);
        self.io.call("write", &path, deadline, move |files| {
            let renamed = written.and_then(|()| files.rename(&from, &to));
            if renamed.is_err() {
                // Best effort: what stays behind is removed at the next opening.
                drop(files.remove(&from));
            }
            renamed?;
            match to.parent() {
                Some(directory) if durable => files.sync_directory(directory),
                _ => Ok(()),
            }
        })?;
        let mut known = self.known();
        known.add(meta.key, file_bytes(meta.payload_bytes));
        if !self.config.durable {
            known.unsynced.push(meta.key);
        }
        drop(known);
        self.counters.records_written.fetch_add(1, Ordering::Relaxed);
        self.counters.bytes_written.fetch_add(u64::from(meta.payload_bytes), Ordering::Relaxed);
        Ok(Address::of_file(&meta.key))
    }

    fn remove_files(&self, keys: &[BlockKey], deadline: Deadline) -> Result<u64, DiskError> {
        let paths: Vec<_> = keys.iter().map(|key| self.path(key)).collect();
        let durable = self.config.durable;
        let directory = self.config.directory.clone();
        self.io.call("remove files under", &directory, deadline, move |files| {
            for path in paths {
                match files.remove(&path) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                    Ok(()) | Err(_) => {}
                }
                if let Some(directory) = path.parent().filter(|_| durable) {
                    files.sync_directory(directory)?;
                }
            }
            Ok(())
        })?;
        let mut known = self.known();
        Ok(keys.iter().map(|key| known.forget(key)).sum())
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
        let source = self.find_by_address(target, deadline)?.ok_or(DiskError::NoTarget)?;
        let image = self.load(&source, deadline)?.ok_or(DiskError::NoTarget)?;
        if image.meta.payload_bytes != meta.payload_bytes {
            return Err(DiskError::LengthMismatch {
                payload_bytes: u64::from(meta.payload_bytes),
                slab_bytes: u64::from(image.meta.payload_bytes),
            });
        }
        self.admit(meta, 0)?;
        self.store(vec![image.under(*meta)], deadline).remove(0)
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
                images.push(BlockImage::of_slab(meta, sum, slab));
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
        let own = |(key, address): &(BlockKey, Address)| {
            (Address::of_file(key) == *address).then_some(*key)
        };
        let keys: Vec<_> = keys.iter().filter_map(own).collect();
        self.remove_files(&keys, deadline).map(drop)
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
        let Some(meta) = self.load_meta(key, deadline)? else { return Ok(None) };
        self.known().add(*key, file_bytes(meta.payload_bytes));
        Ok(Some((meta, Address::of_file(key))))
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

    fn used_bytes(&self) -> u64 {
        self.known().used_bytes
    }

    fn stats(&self) -> DiskStats {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let known = self.known();
        DiskStats {
            engine: self.io.engine.name(),
            is_direct: self.is_direct,
            files: known.files.len() as u64,
            used_bytes: known.used_bytes,
            live_bytes: known.used_bytes,
            live_records: known.files.len() as u64,
            records_written: load(&self.counters.records_written),
            bytes_written: load(&self.counters.bytes_written),
            records_read: load(&self.counters.records_read),
            bytes_read: load(&self.counters.bytes_read),
            records_damaged: load(&self.counters.records_damaged),
            ..DiskStats::default()
        }
    }
}
