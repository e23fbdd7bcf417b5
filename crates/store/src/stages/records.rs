//! A stage over any store of named records, such as an object store or a table.
//!
//! [`Records`] is the interface to that store. Whatever its faults, a block is a hit only if every
//! bit of its record is as it was written, under the name and key that it was written with.

mod index;
mod opening;
mod record;

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};

use cascade_block::{BlockKey, Manifest, Namespace, NamespaceId};
use cascade_memory::{HostSlab, HostSlabMut, Slab, copy_in};
use cascade_runtime::{Deadline, Mutex, MutexGuard};
use cascade_tier::tier::{
    Address, BlockFacts, EraseOutcome, Load, LoadOutcome, MakeRoomOutcome, Tier, TierError,
    TierStats,
};
use cascade_tier::{StoreError, TierName};

use self::index::RecordIndex;
use self::record::{HEADER_BYTES, RecordHeader, RecordKind, name_of};
use super::StageContext;
use super::host_buffers::HostBuffers;

/// Making room frees at least this share of the capacity, so that it is rare.
const ROOM_SHARE: u64 = 64;
/// Blocks examined per lock of the index.
const SCAN_BLOCKS: usize = 64;

/// A store of records: opaque bytes under names of 24 letters, digits and dashes.
///
/// Calls come from several threads. Each finishes by its deadline, or fails with
/// [`TierError::Timeout`] by then. A put that succeeds later is undone by a delete.
pub trait Records: Send + Sync + fmt::Debug {
    /// Performs the calls in any order; one result for each, in the order of the calls.
    fn perform(
        &self,
        calls: Vec<RecordCall>,
        deadline: Deadline,
    ) -> Vec<Result<RecordAnswer, TierError>>;

    /// Releases all resources. Later calls fail.
    fn close(&self) {}

    /// Number of calls still running after their deadline.
    fn stuck_calls(&self) -> u64 {
        0
    }
}

/// One call to [`Records`].
#[derive(Debug)]
pub enum RecordCall {
    /// Store a record under a new name. [`RecordAnswer::Done`], or [`TierError::Full`].
    Put {
        /// The name.
        name: String,
        /// The record.
        record: UnsealedRecord,
    },
    /// Read the first bytes of a record. [`RecordAnswer::Got`], or `Missing`.
    Get {
        /// The name.
        name: String,
        /// The target buffer.
        into: RecordBuffer,
    },
    /// Delete records; missing ones are no error. [`RecordAnswer::Done`].
    Delete {
        /// The names.
        names: Vec<String>,
    },
    /// List the names and lengths of all records. [`RecordAnswer::Names`].
    Names,
    /// Return once all records are durable. [`RecordAnswer::Done`].
    Flush,
    /// Check that the store works. [`RecordAnswer::Done`]; `Missing` if it has no such check, and a
    /// put, a get and a delete of a small record serve as the probe.
    Probe,
}

/// The result of a call.
#[derive(Debug)]
pub enum RecordAnswer {
    /// The call succeeded.
    Done,
    /// There is no such record, or the call is not supported.
    Missing,
    /// The beginning of a record.
    Got {
        /// The buffer of the call.
        buffer: HostSlabMut,
        /// How much of it was filled.
        bytes: usize,
    },
    /// Names and lengths.
    Names(Vec<(String, u64)>),
}

/// A record without memory until it is sealed.
#[derive(Debug)]
pub struct UnsealedRecord {
    header: PendingHeader,
    payload: Payload,
    buffers: Arc<HostBuffers>,
}

/// The fields of a header that are known before the payload is read.
#[derive(Debug)]
struct PendingHeader {
    kind: RecordKind,
    address: u64,
    target: u64,
    facts: BlockFacts,
}

#[derive(Debug)]
enum Payload {
    Block(Slab),
    Bytes(Vec<u8>),
}

/// A buffer for a read, allocated when it begins.
#[derive(Debug)]
pub struct RecordBuffer {
    bytes: usize,
    buffers: Arc<HostBuffers>,
}

impl UnsealedRecord {
    /// The record's bytes: a copy of the block behind its header.
    ///
    /// # Errors
    /// If there is no memory for it, or the block is in device memory.
    pub fn seal(self) -> Result<HostSlab, TierError> {
        let payload: &[u8] = match &self.payload {
            Payload::Block(slab) => slab.host().ok_or(TierError::NotHostMemory)?,
            Payload::Bytes(bytes) => bytes,
        };
        let PendingHeader { kind, address, target, facts } = self.header;
        let mut record = self.buffers.take(HEADER_BYTES + payload.len())?;
        RecordHeader::new(kind, address, target, facts, payload).write(payload, &mut record);
        Ok(record.seal())
    }
}

impl RecordBuffer {
    /// Allocates the buffer; its content is undefined.
    pub fn take(self) -> Result<HostSlabMut, TierError> {
        self.buffers.take(self.bytes)
    }
}

/// Stores blocks as records.
#[derive(Debug)]
pub struct RecordStage {
    name: TierName,
    records: Arc<dyn Records>,
    buffers: Arc<HostBuffers>,
    capacity_bytes: u64,
    index: Mutex<RecordIndex>,
    next_address: AtomicU64,
    /// Bytes that did not fit since room was last made.
    wanted_bytes: AtomicU64,
    damaged: AtomicU64,
    recovered: Mutex<Vec<(BlockFacts, Address)>>,
    manifests: Mutex<Vec<(NamespaceId, Manifest)>>,
    notes: Vec<String>,
}

impl RecordStage {
    /// Opens a stage over `records` with at most `capacity_bytes`, and recovers its blocks.
    pub fn open(
        name: TierName,
        records: Arc<dyn Records>,
        capacity_bytes: Option<u64>,
        context: &StageContext<'_>,
    ) -> Result<Arc<dyn Tier>, StoreError> {
        let buffers = Arc::new(HostBuffers::new(context.config.dram_bytes)?);
        let timeout = context.config.timeout;
        let found = opening::read_all(&*records, &buffers, &**context.clock, timeout);
        let found = found.map_err(|error| StoreError::Tier {
            tier: name,
            operation: "read the headers of its records",
            source: Arc::new(error),
        })?;
        Ok(Arc::new(Self {
            name,
            records,
            buffers,
            capacity_bytes: capacity_bytes.unwrap_or(u64::MAX),
            index: Mutex::new(found.index),
            next_address: AtomicU64::new(found.next_address),
            wanted_bytes: AtomicU64::new(0),
            damaged: AtomicU64::new(found.damaged),
            recovered: Mutex::new(found.blocks),
            manifests: Mutex::new(found.manifests),
            notes: found.notes,
        }))
    }

    fn index(&self) -> MutexGuard<'_, RecordIndex> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn manifests(&self) -> MutexGuard<'_, Vec<(NamespaceId, Manifest)>> {
        self.manifests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the put of a new record, and its address.
    fn put(
        &self,
        kind: RecordKind,
        target: u64,
        facts: BlockFacts,
        payload: Payload,
    ) -> (u64, RecordCall) {
        // Relaxed: only uniqueness matters.
        let address = self.next_address.fetch_add(1, Ordering::Relaxed);
        let header = PendingHeader { kind, address, target, facts };
        let record = UnsealedRecord { header, payload, buffers: Arc::clone(&self.buffers) };
        (address, RecordCall::Put { name: name_of(address), record })
    }

    fn get(&self, address: u64, bytes: usize) -> RecordCall {
        let into = RecordBuffer { bytes, buffers: Arc::clone(&self.buffers) };
        RecordCall::Get { name: name_of(address), into }
    }

    fn perform_one(&self, call: RecordCall, deadline: Deadline) -> Result<RecordAnswer, TierError> {
        self.records.perform(vec![call], deadline).pop().unwrap_or(Err(TierError::NoResult))
    }

    /// Deletes records; makes no call if there are none.
    fn delete(&self, names: Vec<String>, deadline: Deadline) -> Result<(), TierError> {
        if names.is_empty() {
            return Ok(());
        }
        self.perform_one(RecordCall::Delete { names }, deadline).map(drop)
    }

    /// Checks a record that was read against the block expected.
    fn check_loaded(
        &self,
        load: Load,
        origin: &BlockKey,
        answer: Result<RecordAnswer, TierError>,
    ) -> LoadOutcome {
        let Load { address: Address(address), mut slab, .. } = load;
        let (buffer, bytes) = match answer {
            Ok(RecordAnswer::Got { buffer, bytes }) => (buffer, bytes),
            Ok(RecordAnswer::Missing) => {
                // The record is gone, and its room is free.
                self.index().drop_block(address);
                return LoadOutcome::Gone;
            }
            Ok(RecordAnswer::Done | RecordAnswer::Names(_)) => {
                return LoadOutcome::Failed(TierError::NoResult);
            }
            Err(error) => return LoadOutcome::Failed(error),
        };
        let header = RecordHeader::read(&buffer).filter(|header| {
            header.kind == RecordKind::Block
                && header.address == address
                && header.facts.key == *origin
                && header.payload_bytes as usize == slab.len()
        });
        if let Some(header) = header
            && bytes == buffer.len()
        {
            let Some(copy) = slab.host_mut() else {
                return LoadOutcome::Failed(TierError::NotHostMemory);
            };
            copy_in(copy, &buffer[HEADER_BYTES..]);
            // The copy is checked, because the implementation may still write to the buffer.
            if header.fits(copy) {
                return LoadOutcome::Hit(slab);
            }
        }
        self.damaged.fetch_add(1, Ordering::Relaxed);
        LoadOutcome::Damaged
    }

    /// Writes a small record, reads it and deletes it.
    fn probe_with_record(&self, deadline: Deadline) -> Result<(), TierError> {
        let (address, put) = self.put(RecordKind::Probe, 0, no_facts(), Payload::Bytes(Vec::new()));
        match self.perform_one(put, deadline) {
            Ok(_) => {}
            Err(TierError::Full) => return Ok(()),
            Err(error) => return Err(error),
        }
        let read = self.perform_one(self.get(address, HEADER_BYTES), deadline);
        // Before the reply is judged, so that a failed read leaves no record.
        self.delete(vec![name_of(address)], deadline)?;
        let is_right = matches!(
            read?,
            RecordAnswer::Got { buffer, bytes: HEADER_BYTES }
                if RecordHeader::read(&buffer).is_some_and(|header| header.address == address)
        );
        let reason = "the probe's record was read back with different content";
        if is_right {
            Ok(())
        } else {
            Err(TierError::Failed(Arc::new(std::io::Error::other(reason))))
        }
    }
}

/// Facts for a record that is no block.
fn no_facts() -> BlockFacts {
    BlockFacts {
        key: BlockKey::from_bytes([0; 32]),
        digest: None,
        parent: None,
        namespace: NamespaceId::default(),
        bytes: 0,
        is_prefix: false,
        written_unix_ms: 0,
        expires_unix_ms: None,
    }
}

impl Tier for RecordStage {
    fn name(&self) -> TierName {
        self.name
    }

    fn store(
        &self,
        batch: Vec<(BlockFacts, Slab)>,
        deadline: Deadline,
    ) -> Vec<Result<Address, TierError>> {
        let mut results = Vec::with_capacity(batch.len());
        let (mut calls, mut sent, mut wanted_bytes) = (Vec::new(), Vec::new(), 0);
        for (facts, slab) in batch {
            let room = (HEADER_BYTES + slab.len()) as u64;
            results.push(if room > self.capacity_bytes {
                Err(TierError::Declined { bytes: facts.bytes })
            } else if self.index().reserve(room, self.capacity_bytes) {
                let (address, call) = self.put(RecordKind::Block, 0, facts, Payload::Block(slab));
                calls.push(call);
                // The length before the push is the index of this block.
                sent.push((results.len(), facts, room));
                Ok(Address(address))
            } else {
                wanted_bytes += room;
                Err(TierError::Full)
            });
        }
        let mut answers = self.records.perform(calls, deadline).into_iter();
        for (at, facts, room) in sent {
            let answer = answers.next().unwrap_or(Err(TierError::NoResult));
            match (answer, &results[at]) {
                // A block enters the index only once its record is complete; its room was reserved
                // before.
                (Ok(_), Ok(address)) => self.index().insert(address.0, &facts),
                (answer, _) => {
                    let error = answer.err().unwrap_or(TierError::NoResult);
                    wanted_bytes += if matches!(error, TierError::Full) { room } else { 0 };
                    self.index().release(room);
                    results[at] = Err(error);
                }
            }
        }
        // Relaxed: a hint for `make_room`, which works with any value.
        self.wanted_bytes.fetch_max(wanted_bytes, Ordering::Relaxed);
        results
    }

    fn load(&self, batch: Vec<Load>, deadline: Deadline) -> Vec<LoadOutcome> {
        let mut results: Vec<LoadOutcome> = batch.iter().map(|_| LoadOutcome::Gone).collect();
        let (mut calls, mut sent) = (Vec::new(), Vec::new());
        for (at, load) in batch.into_iter().enumerate() {
            let index = self.index();
            let Some(entry) = index.get(load.address.0) else { continue };
            if entry.has(&load.key) {
                calls.push(self.get(load.address.0, HEADER_BYTES + load.slab.len()));
                sent.push((at, entry.origin, load));
            }
        }
        let mut answers = self.records.perform(calls, deadline).into_iter();
        for (at, origin, load) in sent {
            let answer = answers.next().unwrap_or(Err(TierError::NoResult));
            results[at] = self.check_loaded(load, &origin, answer);
        }
        results
    }

    fn alias(
        &self,
        batch: Vec<(BlockFacts, Address)>,
        deadline: Deadline,
    ) -> Result<(), TierError> {
        for (facts, Address(target)) in batch {
            let mut index = self.index();
            let Some(entry) = index.get(target).filter(|entry| !entry.has(&facts.key)) else {
                continue;
            };
            if entry.origin == facts.key {
                let record = entry.revocation();
                drop(index);
                // The record first: if the deletion fails, the name stays revoked in the index as
                // well.
                self.delete(record.map(name_of).into_iter().collect(), deadline)?;
                self.index().restore_origin(target);
                continue;
            }
            let facts = BlockFacts { bytes: entry.bytes(), ..facts };
            // Beyond the capacity if necessary: `make_room` also frees the excess.
            index.reserve(HEADER_BYTES as u64, u64::MAX);
            drop(index);
            self.put_name_record(RecordKind::Alias, target, facts, deadline)?;
        }
        Ok(())
    }

    fn remove(&self, batch: &[(BlockKey, Address)], deadline: Deadline) -> Result<(), TierError> {
        let batch: Vec<_> = batch.iter().map(|(key, address)| (*key, address.0)).collect();
        let removal = self.index().plan_removal(&batch);
        for (target, key) in removal.revoked {
            // Without a limit: if there were no room, a removed name would return after a restart.
            self.index().reserve(HEADER_BYTES as u64, u64::MAX);
            self.put_name_record(
                RecordKind::Revocation,
                target,
                BlockFacts { key, ..no_facts() },
                deadline,
            )?;
        }
        // The index last: after a failure the names are still known, and the call can be repeated.
        self.delete(removal.records, deadline)?;
        self.index().forget(&batch);
        Ok(())
    }

    fn make_room(
        &self,
        keep: &mut dyn FnMut(&BlockKey, Address) -> bool,
        deadline: Deadline,
    ) -> Result<MakeRoomOutcome, TierError> {
        let is_bounded = self.capacity_bytes < u64::MAX;
        let share = if is_bounded { self.capacity_bytes / ROOM_SHARE } else { 1 };
        // The capacity may have been reduced below what is stored.
        let excess_bytes = self.index().used_bytes().saturating_sub(self.capacity_bytes);
        let wanted_bytes = self.wanted_bytes.swap(0, Ordering::Relaxed).max(share) + excess_bytes;
        let (mut last, mut found_bytes, mut chosen) = (None, 0, Vec::new());
        while found_bytes < wanted_bytes {
            let some = |(address, entry): (u64, &index::IndexedBlock)| {
                (address, entry.room(), entry.keys().collect::<Vec<_>>())
            };
            // `keep` is called without the lock of the index.
            let blocks: Vec<_> = self.index().after(last, SCAN_BLOCKS).map(some).collect();
            let Some((youngest, ..)) = blocks.last() else { break };
            last = Some(*youngest);
            for (address, room, keys) in blocks {
                let is_enough = found_bytes >= wanted_bytes;
                if !is_enough && !keys.iter().any(|key| keep(key, Address(address))) {
                    found_bytes += room;
                    chosen.push(address);
                }
            }
        }
        // The index last: after a failure the blocks keep their room and can be chosen again.
        let records = chosen.iter().flat_map(|address| self.index().records(*address)).collect();
        self.delete(records, deadline)?;
        let mut room = MakeRoomOutcome::default();
        for address in chosen {
            if let Some(entry) = self.index().drop_block(address) {
                room.freed_bytes += entry.room();
                room.dropped.extend(entry.keys().map(|key| (key, Address(address))));
            }
        }
        Ok(room)
    }

    fn recover(&self) -> Vec<(BlockFacts, Address)> {
        std::mem::take(&mut self.recovered.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn flush(&self, deadline: Deadline) -> Result<(), TierError> {
        self.perform_one(RecordCall::Flush, deadline).map(drop)
    }

    fn register(&self, namespace: &Namespace, deadline: Deadline) -> Result<(), TierError> {
        let id = namespace.id();
        if self.manifests().iter().any(|(known, _)| *known == id) {
            return Ok(());
        }
        let facts = BlockFacts { namespace: id, ..no_facts() };
        let payload = Payload::Bytes(namespace.manifest().canonical_bytes());
        self.perform_one(self.put(RecordKind::Manifest, 0, facts, payload).1, deadline)?;
        self.manifests().push((id, namespace.manifest().clone()));
        Ok(())
    }

    fn manifests(&self, _deadline: Deadline) -> Result<Vec<(NamespaceId, Manifest)>, TierError> {
        Ok(self.manifests().clone())
    }

    fn probe(&self, deadline: Deadline) -> Result<(), TierError> {
        match self.perform_one(RecordCall::Probe, deadline)? {
            RecordAnswer::Missing => self.probe_with_record(deadline),
            _ => Ok(()),
        }
    }

    fn probe_reads(&self, deadline: Deadline) -> Result<(), TierError> {
        // No record has this name: a reply that it is missing shows that the store responds.
        self.perform_one(self.get(u64::MAX, HEADER_BYTES), deadline).map(drop)
    }

    fn stuck_calls(&self) -> u64 {
        self.records.stuck_calls()
    }

    fn erase(&self, deadline: Deadline) -> Result<EraseOutcome, TierError> {
        let names = match self.perform_one(RecordCall::Names, deadline)? {
            RecordAnswer::Names(names) => names.into_iter().map(|(name, _)| name),
            _ => return Err(TierError::NoResult),
        };
        let ours: Vec<_> = names.filter(|name| record::address_of(name).is_some()).collect();
        let files_removed = ours.len() as u64;
        self.delete(ours, deadline)?;
        self.flush(deadline)?;
        *self.index() = RecordIndex::default();
        self.manifests().clear();
        Ok(EraseOutcome { files_removed, ..EraseOutcome::default() })
    }

    fn close(&self) {
        self.records.close();
    }

    fn stats(&self) -> TierStats {
        let index = self.index();
        TierStats {
            used_bytes: index.used_bytes(),
            capacity_bytes: self.capacity_bytes,
            files: index.len() as u64,
            damaged_blocks: self.damaged.load(Ordering::Relaxed),
            damaged_structures: 0,
            encryption: None,
            notes: self.notes.clone(),
        }
    }
}

impl RecordStage {
    /// Writes a record about a block's name and applies it. The room for it is already reserved.
    fn put_name_record(
        &self,
        kind: RecordKind,
        target: u64,
        facts: BlockFacts,
        deadline: Deadline,
    ) -> Result<(), TierError> {
        let (address, put) = self.put(kind, target, facts, Payload::Bytes(Vec::new()));
        if let Err(error) = self.perform_one(put, deadline) {
            self.index().release(HEADER_BYTES as u64);
            return Err(error);
        }
        let has_effect = self.index().apply(&RecordHeader::new(kind, address, target, facts, &[]));
        if has_effect { Ok(()) } else { self.delete(vec![name_of(address)], deadline) }
    }
}
