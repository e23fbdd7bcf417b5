//! Encryption at rest: a filter around a lower stage, which then stores only sealed records.
//!
//! The inner stage stores sealed records (`record.rs` has the layout) under the blocks' own keys. A
//! record opens only under the key that it was first written with, or under one that the store
//! named for the same content in this run. So records swapped on disk are misses.

mod keys;
mod loads;
mod names;
mod record;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use cascade_block::{BlockKey, Manifest, Namespace, NamespaceId, TenantSecret, checksum};
use cascade_memory::{HostSlabMut, HugePages, Pool, PoolConfig, Slab, SlabMut, copy_out};
use cascade_runtime::{Clock, Condvar, Deadline, Mutex, MutexGuard};
use cascade_tier::tier::{
    Address, BlockFacts, EraseOutcome, Load, LoadOutcome, LoadQueue, MakeRoomOutcome, Tier,
    TierError, TierStats, load_list,
};
use cascade_tier::{StoreError, TierName};

use self::keys::{KeyRing, refuse_key_beside_blocks};
use self::loads::RecordLoads;
use self::names::{TrustedName, TrustedNames};
use self::record::{OVERHEAD, Trailer};
use super::StageContext;
use crate::EncryptionConfig;

/// Memory for records in flight: a share of DRAM within these bounds.
const BOUNCE_SHARE: u64 = 8;
const BOUNCE_BYTES_MIN: usize = 8 << 20;
const BOUNCE_BYTES_MAX: usize = 64 << 20;
/// A batch's share of that memory, so that readers and the mover do not wait for each other.
const BATCH_SHARE: usize = 4;
/// Poll interval for memory that the inner stage returns without a notification.
const RECHECK: Duration = Duration::from_millis(1);
/// Time-out of opening, which lists the inner stage's blocks.
const OPENING_TIMEOUT: Duration = Duration::from_secs(300);
/// The field of a manifest that marks a tier as encrypted; its value names the cipher.
const MARK: &str = "cascade_encryption";
const MARK_KEY: &str = "key_id";
const MARK_COPY: &str = "copy";

/// Encrypts blocks when they are stored and decrypts them when they are loaded.
#[derive(Debug)]
pub struct EncryptedStage {
    inner: Arc<dyn Tier>,
    keys: KeyRing,
    /// Whether the inner stage has the marks of encryption. Held while they are written.
    is_marked: Mutex<bool>,
    bounce: Pool,
    /// Notifies waiters for a bounce buffer; some buffers are returned without a notification.
    returned: Condvar,
    waiting: Mutex<()>,
    clock: Arc<dyn Clock>,
    recovered: Mutex<Vec<(BlockFacts, Address)>>,
    aliases: Mutex<TrustedNames>,
    counters: EncryptionCounters,
    notes: Vec<String>,
}

#[derive(Debug, Default)]
struct EncryptionCounters {
    damaged: AtomicU64,
    other_key: AtomicU64,
    other_name: AtomicU64,
}

/// Wraps a stage if encryption is configured; otherwise refuses a stage with encrypted blocks.
pub(crate) fn protect(
    stage: Arc<dyn Tier>,
    context: &StageContext<'_>,
) -> Result<Arc<dyn Tier>, StoreError> {
    if stage.keeps_names_only() {
        return Ok(stage);
    }
    match &context.config.encryption {
        Some(encryption) => Ok(Arc::new(EncryptedStage::open(stage, encryption, context)?)),
        None if marks(&*stage, context)?.is_empty() => Ok(stage),
        None => Err(StoreError::Config {
            setting: "encryption",
            reason: format!(
                "tier {} holds encrypted blocks and no key file is configured; configure it, or \
                 empty the directory",
                stage.name()
            ),
        }),
    }
}

impl EncryptedStage {
    /// Wraps a stage.
    ///
    /// # Errors
    /// Other users can read the key file, the key file is in the directory that it encrypts, or the
    /// stage has unencrypted blocks.
    pub fn open(
        inner: Arc<dyn Tier>,
        config: &EncryptionConfig,
        context: &StageContext<'_>,
    ) -> Result<Self, StoreError> {
        refuse_key_beside_blocks(config, context.config)?;
        let keys = KeyRing::open(config, inner.name())?;
        let marks = marks(&*inner, context)?;
        let recovered = inner.recover();
        let bytes = usize::try_from(context.config.dram_bytes / BOUNCE_SHARE).unwrap_or(usize::MAX);
        let bounce = bounce_pool(bytes.clamp(BOUNCE_BYTES_MIN, BOUNCE_BYTES_MAX))
            .map_err(|error| StoreError::Memory(Arc::new(error)))?;
        let mut notes = vec![];
        let unknown_keys: Vec<_> =
            marks.iter().filter(|id| !keys.knows_named(id)).cloned().collect();
        if !unknown_keys.is_empty() {
            notes.push(format!(
                "has blocks of key {}, which {} does not hold: they are misses; add it there as a \
                 further line to read them",
                unknown_keys.join(", "),
                config.key_file.display()
            ));
        }
        // Without any of its keys no block can be read. The blocks stay until their space is
        // needed, in case the key file is the wrong one.
        let is_readable = marks.is_empty() || unknown_keys.len() < marks.len();
        let stage = Self {
            inner,
            keys,
            is_marked: Mutex::new(false),
            bounce,
            returned: Condvar::new(),
            waiting: Mutex::new(()),
            clock: Arc::clone(context.clock),
            recovered: Mutex::default(),
            aliases: Mutex::default(),
            counters: EncryptionCounters::default(),
            notes,
        };
        let deadline = Deadline::after(&**context.clock, OPENING_TIMEOUT);
        let failed = |operation| {
            let tier = stage.name();
            move |error| StoreError::Tier { tier, operation, source: Arc::new(error) }
        };
        if marks.is_empty() {
            let foreign = stage.find_foreign(&recovered, deadline);
            if let Some(key) = foreign.map_err(failed("look for unencrypted blocks"))? {
                return Err(StoreError::Config {
                    setting: "encryption",
                    reason: format!(
                        "tier {} holds blocks that are unencrypted, or whose key {} does not \
                         hold, such as {key}; empty its directory or use another one",
                        stage.name(),
                        config.key_file.display()
                    ),
                });
            }
        }
        stage.mark(deadline).map_err(failed("store the identifier of its encryption key"))?;
        if is_readable {
            *stage.recovered.lock().unwrap_or_else(PoisonError::into_inner) = recovered;
        }
        Ok(stage)
    }

    /// The first of the inner stage's blocks that no key here decrypts. A block that cannot be read
    /// is passed over: it is no block to its readers, either.
    ///
    /// Reads every block, and is only called if there is no mark: all may have been damaged.
    fn find_foreign(
        &self,
        recovered: &[(BlockFacts, Address)],
        deadline: Deadline,
    ) -> Result<Option<BlockKey>, TierError> {
        for (facts, address) in recovered {
            let bytes = usize::try_from(facts.bytes).unwrap_or(usize::MAX);
            let Some(mut record) = self.read_record(facts.key, bytes, *address, deadline)? else {
                continue;
            };
            if self.origin_in(&mut record).is_none() {
                return Ok(Some(facts.key));
            }
        }
        Ok(None)
    }

    /// Stores the identifier of the key in use, once. This happens before any block is stored:
    /// otherwise an opening without the key would accept ciphertext as blocks.
    fn mark(&self, deadline: Deadline) -> Result<(), TierError> {
        let mut is_marked = self.is_marked.lock().unwrap_or_else(PoisonError::into_inner);
        if !*is_marked {
            // In two files: if the only mark were damaged, ciphertext would be accepted as blocks.
            for copy in ["1", "2"] {
                let manifest = Manifest::new()
                    .with(MARK, "aes-256-gcm 1")
                    .with(MARK_KEY, self.keys.writing_id().to_string());
                let manifest = if copy == "1" { manifest } else { manifest.with(MARK_COPY, copy) };
                let mark = Namespace::new(manifest, &TenantSecret::new(""));
                self.inner.register(&mark, deadline)?;
            }
            *is_marked = true;
        }
        Ok(())
    }

    fn aliases(&self) -> MutexGuard<'_, TrustedNames> {
        self.aliases.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The length of a block's record, if it fits 32 bits.
    fn record_bytes(bytes: u32) -> Option<usize> {
        let overhead = u32::try_from(OVERHEAD).ok()?;
        usize::try_from(bytes.checked_add(overhead)?).ok()
    }

    /// A buffer for a record; for the first of a batch, waits until the deadline.
    fn buffer(
        &self,
        bytes: usize,
        may_wait: bool,
        deadline: Deadline,
    ) -> Result<Option<HostSlabMut>, TierError> {
        let in_host_memory = |slab: SlabMut| slab.into_host().map_err(|_| TierError::NotHostMemory);
        if bytes > self.bounce.region().bytes() / BATCH_SHARE {
            // A pool for this record alone. Its block is in DRAM meanwhile, so the size of DRAM
            // limits the number of such pools.
            let pool = bounce_pool(bytes).map_err(|error| TierError::Failed(Arc::new(error)))?;
            return pool.allocate_direct(bytes).map(in_host_memory).transpose();
        }
        loop {
            if let Some(buffer) = self.bounce.allocate_direct(bytes) {
                return in_host_memory(buffer).map(Some);
            }
            if !may_wait {
                return Ok(None);
            }
            let now = self.clock.monotonic();
            if now >= deadline.time() {
                return Err(TierError::Timeout);
            }
            let until = Deadline::at(deadline.time().min(now.saturating_add(RECHECK)));
            let guard = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
            // A notification between the attempt and this wait is missed: the poll interval bounds
            // the delay.
            drop(self.returned.wait_until(guard, until, &*self.clock));
        }
    }

    /// Whether a batch of this size has to be sent before it takes more buffers.
    fn is_full(&self, held_bytes: usize) -> bool {
        held_bytes >= self.bounce.region().bytes() / BATCH_SHARE
    }

    fn seal(
        &self,
        facts: &BlockFacts,
        slab: &Slab,
        mut buffer: HostSlabMut,
    ) -> Result<(BlockFacts, Slab), TierError> {
        let block = slab.host().ok_or(TierError::NotHostMemory)?;
        if !slab.verify_checksum(checksum(block)) {
            return Err(TierError::ChangedInMemory);
        }
        // Not a non-temporal copy: sealing reads the bytes at once.
        buffer[..block.len()].copy_from_slice(block);
        record::seal(&self.keys, &mut buffer, facts.key, facts.digest.as_ref())
            .map_err(|error| TierError::Failed(Arc::new(error)))?;
        Ok((sealed_facts(facts), buffer.into_slab().seal()))
    }

    /// Decrypts a record of the inner stage. Returns another outcome if that fails.
    fn unseal(&self, key: &BlockKey, buffer: SlabMut, mut slab: SlabMut) -> LoadOutcome {
        let (Ok(mut buffer), Some(target)) = (buffer.into_host(), slab.host_mut()) else {
            return LoadOutcome::Failed(TierError::NotHostMemory);
        };
        let Some(trailer) = Trailer::read(&buffer) else { return self.damaged() };
        if !self.keys.knows(trailer.key_id) {
            self.counters.other_key.fetch_add(1, Ordering::Relaxed);
            return LoadOutcome::Gone;
        }
        // The trailer is not authenticated yet. A forged one may pass here, but does not open.
        if trailer.origin != *key {
            let trusted = self.aliases().find(key);
            let Some(trusted) = trusted else {
                self.counters.other_name.fetch_add(1, Ordering::Relaxed);
                return LoadOutcome::Gone;
            };
            if !self.is_trusted(&trailer, &trusted) {
                return self.damaged();
            }
        }
        match record::open(&self.keys, &mut buffer, &trailer) {
            Some(block) if block.len() == target.len() => {
                copy_out(target, block, 0);
                LoadOutcome::Hit(slab)
            }
            _ => self.damaged(),
        }
    }

    fn is_trusted(&self, trailer: &Trailer, trusted: &TrustedName) -> bool {
        match trusted {
            TrustedName::Origin(origin) => trailer.origin == *origin,
            TrustedName::Content(digest) => {
                self.keys.content_tag(trailer.key_id, digest) == Some(trailer.content)
            }
        }
    }

    fn damaged(&self) -> LoadOutcome {
        self.counters.damaged.fetch_add(1, Ordering::Relaxed);
        LoadOutcome::Damaged
    }

    /// The key that the record at an address was first written under, if the record is authentic.
    fn origin(
        &self,
        facts: &BlockFacts,
        address: Address,
        deadline: Deadline,
    ) -> Result<Option<BlockKey>, TierError> {
        let bytes = Self::record_bytes(facts.bytes);
        let bytes = bytes.ok_or(TierError::Declined { bytes: facts.bytes })?;
        let record = self.read_record(facts.key, bytes, address, deadline)?;
        Ok(record.and_then(|mut record| self.origin_in(&mut record)))
    }

    /// Reads a record as it is in the inner stage; nothing if it cannot be read.
    fn read_record(
        &self,
        key: BlockKey,
        bytes: usize,
        address: Address,
        deadline: Deadline,
    ) -> Result<Option<HostSlabMut>, TierError> {
        let Some(slab) = self.buffer(bytes, true, deadline)? else { return Ok(None) };
        let load = Load { key, address, slab: slab.into_slab() };
        let Some(LoadOutcome::Hit(buffer)) = self.inner.load(vec![load], deadline).pop() else {
            return Ok(None);
        };
        buffer.into_host().map(Some).map_err(|_| TierError::NotHostMemory)
    }

    /// The key that a record was first written under, if the record is authentic.
    fn origin_in(&self, record: &mut HostSlabMut) -> Option<BlockKey> {
        let trailer = Trailer::read(record)?;
        let is_open = record::open(&self.keys, record, &trailer).is_some();
        is_open.then_some(trailer.origin)
    }
}

fn sealed_facts(facts: &BlockFacts) -> BlockFacts {
    let overhead = u32::try_from(OVERHEAD).expect("a small number");
    // An unencrypted digest would let anyone verify a guess of the block's bytes.
    BlockFacts { digest: None, bytes: facts.bytes.saturating_add(overhead), ..*facts }
}

fn bounce_pool(bytes: usize) -> Result<Pool, cascade_memory::MemoryError> {
    let capacity_bytes = bytes.next_multiple_of(cascade_memory::DIRECT_ALIGN);
    Pool::new(&PoolConfig { capacity_bytes, huge_pages: HugePages::Never, populate: false })
}

/// Identifiers of all keys that a stage was written with.
fn marks(stage: &dyn Tier, context: &StageContext<'_>) -> Result<Vec<String>, StoreError> {
    let deadline = Deadline::after(&**context.clock, OPENING_TIMEOUT);
    let manifests = stage.manifests(deadline).map_err(|error| StoreError::Tier {
        tier: stage.name(),
        operation: "list its manifests",
        source: Arc::new(error),
    })?;
    let id = |(_, manifest): &(NamespaceId, Manifest)| {
        manifest.get(MARK)?;
        Some(manifest.get(MARK_KEY).unwrap_or("unknown").to_owned())
    };
    let ids: BTreeSet<String> = manifests.iter().filter_map(id).collect();
    Ok(ids.into_iter().collect())
}

impl Tier for EncryptedStage {
    fn name(&self) -> TierName {
        self.inner.name()
    }

    fn checks_slabs(&self) -> bool {
        true
    }

    fn store(
        &self,
        batch: Vec<(BlockFacts, Slab)>,
        deadline: Deadline,
    ) -> Vec<Result<Address, TierError>> {
        // An erase since the opening may have removed the marks.
        if let Err(error) = self.mark(deadline) {
            return vec![Err(error); batch.len()];
        }
        {
            let mut aliases = self.aliases();
            for (facts, _) in &batch {
                aliases.remove_key(&facts.key);
            }
        }
        let mut results = Vec::with_capacity(batch.len());
        let (mut sealed, mut held_bytes) = (Vec::new(), 0);
        let send = |sealed: &mut Vec<_>, results: &mut Vec<_>| {
            if !sealed.is_empty() {
                let count = results.len() + sealed.len();
                results.extend(self.inner.store(std::mem::take(sealed), deadline));
                results.resize_with(count, || Err(TierError::NoResult));
                self.returned.notify_all();
            }
        };
        for (facts, slab) in batch {
            let Some(bytes) = Self::record_bytes(facts.bytes) else {
                // Results have the order of the batch: the records before this block come first.
                send(&mut sealed, &mut results);
                results.push(Err(TierError::Declined { bytes: facts.bytes }));
                continue;
            };
            let mut buffer = self.buffer(bytes, sealed.is_empty(), deadline);
            if matches!(buffer, Ok(None)) {
                // This batch may hold all buffers: send it first.
                send(&mut sealed, &mut results);
                held_bytes = 0;
                buffer = self.buffer(bytes, true, deadline);
            }
            let buffer = buffer.and_then(|buffer| buffer.ok_or(TierError::Timeout));
            match buffer.and_then(|buffer| self.seal(&facts, &slab, buffer)) {
                Ok(record) => sealed.push(record),
                Err(error) => {
                    send(&mut sealed, &mut results);
                    results.push(Err(error));
                }
            }
            held_bytes += bytes;
            if self.is_full(held_bytes) {
                send(&mut sealed, &mut results);
                held_bytes = 0;
            }
        }
        send(&mut sealed, &mut results);
        results
    }

    fn load(&self, batch: Vec<Load>, deadline: Deadline) -> Vec<LoadOutcome> {
        load_list(batch, |queue| self.load_each(queue, deadline))
    }

    fn load_each(&self, queue: &mut dyn LoadQueue, deadline: Deadline) {
        let (next, targets) = (None, Vec::new());
        let mut records =
            RecordLoads { stage: self, queue, deadline, next, targets, held_bytes: 0 };
        self.inner.load_each(&mut records, deadline);
        if let Some((number, _)) = records.next {
            // It found no buffer before the deadline.
            queue.ended(number, LoadOutcome::Failed(TierError::Timeout));
        }
        self.returned.notify_all();
    }

    fn alias(
        &self,
        batch: Vec<(BlockFacts, Address)>,
        deadline: Deadline,
    ) -> Result<(), TierError> {
        // Before the inner stage has the name: a read in between would be a miss.
        for (facts, address) in &batch {
            if let Some(digest) = facts.digest {
                self.aliases().add(facts.key, *address, TrustedName::Content(digest));
            }
        }
        let sealed = batch.iter().map(|(facts, address)| (sealed_facts(facts), *address));
        let result = self.inner.alias(sealed.collect(), deadline);
        // The store gives a digest with every alias; other callers may not.
        for (facts, address) in batch.iter().filter(|(facts, _)| facts.digest.is_none()) {
            if let Some(origin) = self.origin(facts, *address, deadline)? {
                self.aliases().add(facts.key, *address, TrustedName::Origin(origin));
            }
        }
        result
    }

    fn remove(&self, batch: &[(BlockKey, Address)], deadline: Deadline) -> Result<(), TierError> {
        {
            let mut aliases = self.aliases();
            for (key, address) in batch {
                aliases.remove(key, *address);
            }
        }
        self.inner.remove(batch, deadline)
    }

    fn make_room(
        &self,
        keep: &mut dyn FnMut(&BlockKey, Address) -> bool,
        deadline: Deadline,
    ) -> Result<MakeRoomOutcome, TierError> {
        let room = self.inner.make_room(keep, deadline)?;
        let mut aliases = self.aliases();
        for (key, old, new) in &room.moved {
            aliases.set_address(key, *old, *new);
        }
        for (key, address) in &room.dropped {
            aliases.remove(key, *address);
        }
        drop(aliases);
        Ok(room)
    }

    fn resize(&self, capacity_bytes: u64, deadline: Deadline) -> Result<(), TierError> {
        self.inner.resize(capacity_bytes, deadline)
    }

    fn release_pool(&self) {
        self.inner.release_pool();
    }

    fn is_shrinking(&self) -> bool {
        self.inner.is_shrinking()
    }

    fn recover(&self) -> Vec<(BlockFacts, Address)> {
        let overhead = u32::try_from(OVERHEAD).expect("a small number");
        let mut recovered = self.recovered.lock().unwrap_or_else(PoisonError::into_inner);
        let open = |(facts, address): (BlockFacts, Address)| {
            let bytes = facts.bytes.checked_sub(overhead)?;
            Some((BlockFacts { bytes, digest: None, ..facts }, address))
        };
        std::mem::take(&mut *recovered).into_iter().filter_map(open).collect()
    }

    fn flush(&self, deadline: Deadline) -> Result<(), TierError> {
        self.inner.flush(deadline)
    }

    fn register(&self, namespace: &Namespace, deadline: Deadline) -> Result<(), TierError> {
        self.inner.register(namespace, deadline)
    }

    fn manifests(&self, deadline: Deadline) -> Result<Vec<(NamespaceId, Manifest)>, TierError> {
        let mut manifests = self.inner.manifests(deadline)?;
        manifests.retain(|(_, manifest)| manifest.get(MARK).is_none());
        Ok(manifests)
    }

    fn keeps_deadlines(&self) -> bool {
        self.inner.keeps_deadlines()
    }

    fn probe(&self, deadline: Deadline) -> Result<(), TierError> {
        self.inner.probe(deadline)
    }

    fn probe_reads(&self, deadline: Deadline) -> Result<(), TierError> {
        self.inner.probe_reads(deadline)
    }

    fn stuck_calls(&self) -> u64 {
        self.inner.stuck_calls()
    }

    fn erase(&self, deadline: Deadline) -> Result<EraseOutcome, TierError> {
        self.aliases().clear();
        // Even a partial erase may remove the marks; the next store writes them again.
        *self.is_marked.lock().unwrap_or_else(PoisonError::into_inner) = false;
        let erased = self.inner.erase(deadline)?;
        // These buffers contain decrypted blocks.
        self.bounce.begin_wipe();
        self.bounce.wipe(&mut || !deadline.has_passed(&*self.clock));
        Ok(erased)
    }

    fn close(&self) {
        self.inner.close();
    }

    fn stats(&self) -> TierStats {
        let mut stats = self.inner.stats();
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        stats.damaged_blocks += load(&self.counters.damaged);
        stats.encryption = Some(format!("AES-256-GCM, writes with key {}", self.keys.writing_id()));
        stats.notes.extend(self.notes.iter().cloned());
        let (other_key, other_name) =
            (load(&self.counters.other_key), load(&self.counters.other_name));
        if other_key > 0 {
            stats.notes.push(format!("{other_key} reads met a key that is not in the key file"));
        }
        if other_name > 0 {
            stats.notes.push(format!(
                "{other_name} reads by an alias of an earlier run were misses: only a block's \
                 first name survives restarts in an encrypted tier"
            ));
        }
        stats
    }
}
