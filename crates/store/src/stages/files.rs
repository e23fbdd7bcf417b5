//! The file tier as a stage: adapts crate `disk` to the pipeline.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, PoisonError};

use cascade_block::{BlockKey, Manifest, Namespace, NamespaceId};
use cascade_disk::io::FileIo;
use cascade_disk::{
    BlockFiles, DiskError, FileTierConfig, FileTierLayout, ReadOutcome, ReadQueue, ReadRequest,
    RecordMeta, Recovery, StoredManifest, TransferEngineKind,
};
use cascade_memory::Slab;
use cascade_runtime::{Clock, Deadline, Mutex, MutexGuard, RwLock};
use cascade_tier::tier::{
    Address, BlockFacts, Load, LoadOutcome, LoadQueue, MakeRoomOutcome, NotErased, Stage,
    StageEraseReport, StageError, StageStats, load_list,
};
use cascade_tier::{StoreError, TierName};

use super::StageContext;
use crate::{FileLayout, FilesConfig, IoEngine};

/// Stores blocks in files.
#[derive(Debug)]
pub struct FilesStage {
    /// None once it is closed: closing releases the directory's lock.
    files: RwLock<Option<Arc<dyn BlockFiles>>>,
    clock: Arc<dyn Clock>,
    capacity_bytes: u64,
    name: TierName,
    wants_direct: bool,
    wants_uring: bool,
    recovery: Mutex<Recovery>,
    opening_damage: OpeningDamage,
    /// Ordered, because `alias_of_another` tries the aliases of a content in this order.
    alias_locations: Mutex<BTreeMap<BlockKey, AliasLocation>>,
}

/// An alias with its bytes at another address than the content's: a block file has one name.
#[derive(Debug, Clone, Copy)]
struct AliasLocation {
    /// The address that the store has for the content.
    shared: cascade_disk::FileAddress,
    /// The address of this alias's own bytes.
    place: cascade_disk::FileAddress,
}

/// Damage found at opening, for the notes.
#[derive(Debug, Clone, Copy)]
struct OpeningDamage {
    torn_records: u64,
    damaged_structures: u64,
}

impl FilesStage {
    /// Opens the file tier of a store's settings; `layout` overrides theirs.
    pub fn open(
        context: &StageContext<'_>,
        layout: Option<FileLayout>,
    ) -> Result<Arc<dyn Stage>, StoreError> {
        let (config, tier, deadline) = settings(context, layout)?;
        let clock = Arc::clone(context.clock);
        let opened = cascade_disk::open(tier, clock, context.pool, deadline);
        Self::opened(context, config, config.engine != IoEngine::Psync, opened)
    }

    /// [`Self::open`] with the caller's I/O instead of the system's, such as a simulated disk. The
    /// setting of the I/O engine is ignored.
    ///
    /// To run a store on it, replace the stage in its [`super::StageRegistry`]:
    ///
    /// ```text
    /// registry.register("Files", Arc::new(move |context| {
    ///     FilesStage::open_with(context, None, io.clone())
    /// }));
    /// ```
    pub fn open_with(
        context: &StageContext<'_>,
        layout: Option<FileLayout>,
        io: FileIo,
    ) -> Result<Arc<dyn Stage>, StoreError> {
        let (config, tier, deadline) = settings(context, layout)?;
        Self::opened(context, config, false, cascade_disk::open_with(tier, io, deadline))
    }

    fn opened(
        context: &StageContext<'_>,
        config: &FilesConfig,
        wants_uring: bool,
        opened: Result<(Arc<dyn BlockFiles>, Recovery), DiskError>,
    ) -> Result<Arc<dyn Stage>, StoreError> {
        let (files, recovery) = opened.map_err(|error| StoreError::Tier {
            tier: "files",
            operation: "open its directory",
            source: Arc::new(error),
        })?;
        let opening_damage = OpeningDamage {
            torn_records: recovery.torn_records,
            damaged_structures: recovery.damaged_structures,
        };
        Ok(Arc::new(Self {
            files: RwLock::new(Some(files)),
            clock: Arc::clone(context.clock),
            capacity_bytes: config.capacity_bytes,
            name: "files",
            wants_direct: config.direct,
            wants_uring,
            recovery: Mutex::new(recovery),
            opening_damage,
            alias_locations: Mutex::default(),
        }))
    }

    fn files(&self) -> Result<Arc<dyn BlockFiles>, StageError> {
        let files = self.files.read().unwrap_or_else(PoisonError::into_inner);
        files.clone().ok_or(StageError::Closed)
    }

    fn alias_locations(&self) -> MutexGuard<'_, BTreeMap<BlockKey, AliasLocation>> {
        self.alias_locations.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn alias_of_another(
        &self,
        files: &dyn BlockFiles,
        meta: &RecordMeta,
        shared: cascade_disk::FileAddress,
        deadline: Deadline,
    ) -> Result<cascade_disk::FileAddress, DiskError> {
        // Copied, so that no call to the files is made under the lock.
        let others: Vec<_> = self
            .alias_locations()
            .values()
            .filter(|other| other.shared == shared)
            .copied()
            .collect();
        let mut result = Err(DiskError::NoTarget);
        for other in others {
            result = files.alias(&[(*meta, other.place)], deadline).remove(0);
            if !matches!(result, Err(DiskError::NoTarget)) {
                break;
            }
        }
        result
    }

    fn meta(&self, facts: &BlockFacts) -> RecordMeta {
        RecordMeta {
            key: facts.key,
            digest: facts.digest,
            parent: facts.parent,
            namespace: facts.namespace,
            payload_bytes: facts.bytes,
            is_prefix: facts.is_prefix,
            written_unix_ms: self.clock.unix_ms(),
            expires_unix_ms: facts.expires_unix_ms,
        }
    }
}

/// The loads of one call, as reads of the files.
struct FileLoads<'a> {
    stage: &'a FilesStage,
    queue: &'a mut dyn LoadQueue,
}

impl ReadQueue for FileLoads<'_> {
    fn next_request(&mut self) -> Option<(usize, ReadRequest)> {
        let (number, Load { key, address, slab }) = self.queue.next_load()?;
        let address = place_of(&self.stage.alias_locations(), &key, address);
        Some((number, ReadRequest { address, key, slab }))
    }

    fn ended(&mut self, number: usize, outcome: ReadOutcome) {
        let outcome = match outcome {
            ReadOutcome::Hit(slab) => LoadOutcome::Hit(slab),
            ReadOutcome::Damaged(_) => LoadOutcome::Damaged,
            ReadOutcome::Gone => LoadOutcome::Gone,
            ReadOutcome::Failed(error) => LoadOutcome::Failed(stage_error(error)),
        };
        self.queue.ended(number, outcome);
    }

    fn idle(&mut self) -> bool {
        self.queue.idle()
    }
}

/// Time-out of opening, which scans all records; a million take seconds.
const OPENING_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(300);

/// The settings of the file tier of a store, and the deadline of its opening.
fn settings<'a>(
    context: &StageContext<'a>,
    layout: Option<FileLayout>,
) -> Result<(&'a FilesConfig, FileTierConfig, Deadline), StoreError> {
    let config = context.config.files.as_ref().ok_or_else(|| StoreError::Config {
        setting: "files",
        reason: "the pipeline has a file tier: set its directory".to_owned(),
    })?;
    let layout = layout.unwrap_or(config.layout);
    let deadline = Deadline::after(&**context.clock, OPENING_TIMEOUT);
    Ok((config, tier_config(config, layout), deadline))
}

fn tier_config(config: &FilesConfig, layout: FileLayout) -> FileTierConfig {
    FileTierConfig {
        capacity_bytes: config.capacity_bytes,
        segment_bytes: config.segment_bytes,
        direct: config.direct,
        engine: match config.engine {
            IoEngine::Auto => TransferEngineKind::Auto,
            IoEngine::Uring => TransferEngineKind::Uring,
            IoEngine::Psync => TransferEngineKind::Psync,
        },
        durable: config.durable,
        layout: match layout {
            FileLayout::Segments => FileTierLayout::Segments,
            FileLayout::FilePerBlock => FileTierLayout::FilePerBlock,
        },
        ..FileTierConfig::new(&config.directory)
    }
}

fn stage_address(address: cascade_disk::FileAddress) -> Address {
    Address(address.to_u64())
}

fn file_address(address: Address) -> cascade_disk::FileAddress {
    cascade_disk::FileAddress::from_u64(address.0)
}

fn stage_error(error: DiskError) -> StageError {
    match error {
        // Space freed by reclaim is also free on the device.
        DiskError::Full { .. } | DiskError::NoSpace { .. } => StageError::Full,
        DiskError::Timeout { .. } => StageError::Timeout,
        DiskError::ChangedInMemory => StageError::ChangedInMemory,
        DiskError::BadLength { payload_bytes, .. } => {
            StageError::Declined { bytes: u32::try_from(payload_bytes).unwrap_or(u32::MAX) }
        }
        error => StageError::Failed(Arc::new(error)),
    }
}

/// Where the bytes of a key are that the store has at this address. A key that was deleted and
/// added again has two addresses for a while, and only one of them can be an alias.
fn place_of(
    alias_locations: &BTreeMap<BlockKey, AliasLocation>,
    key: &BlockKey,
    address: Address,
) -> cascade_disk::FileAddress {
    let address = file_address(address);
    let other = alias_locations.get(key).filter(|other| other.shared == address);
    other.map_or(address, |other| other.place)
}

impl Stage for FilesStage {
    fn name(&self) -> TierName {
        self.name
    }

    fn keeps_deadlines(&self) -> bool {
        true
    }

    fn checks_slabs(&self) -> bool {
        true
    }

    fn store(
        &self,
        batch: Vec<(BlockFacts, Slab)>,
        deadline: Deadline,
    ) -> Vec<Result<Address, StageError>> {
        let files = match self.files() {
            Ok(files) => files,
            Err(error) => return batch.iter().map(|_| Err(error.clone())).collect(),
        };
        {
            let mut alias_locations = self.alias_locations();
            // A key that is stored again has its bytes at the address that the store gets.
            for (facts, _) in &batch {
                alias_locations.remove(&facts.key);
            }
        }
        let batch = batch.into_iter().map(|(facts, slab)| (self.meta(&facts), slab)).collect();
        let results = files.append(batch, deadline).into_iter();
        results.map(|result| result.map(stage_address).map_err(stage_error)).collect()
    }

    fn load(&self, batch: Vec<Load>, deadline: Deadline) -> Vec<LoadOutcome> {
        load_list(self, batch, deadline)
    }

    fn load_each(&self, queue: &mut dyn LoadQueue, deadline: Deadline) {
        match self.files() {
            Ok(files) => files.read_each(&mut FileLoads { stage: self, queue }, deadline),
            Err(error) => {
                while let Some((number, _)) = queue.next_load() {
                    queue.ended(number, LoadOutcome::Failed(error.clone()));
                }
            }
        }
    }

    fn alias(
        &self,
        batch: Vec<(BlockFacts, Address)>,
        deadline: Deadline,
    ) -> Result<(), StageError> {
        let files = self.files()?;
        let metas: Vec<_> = batch
            .iter()
            .map(|(facts, address)| (self.meta(facts), file_address(*address)))
            .collect();
        let mut failure = Ok(());
        for ((meta, shared), result) in metas.iter().zip(files.alias(&metas, deadline)) {
            let result = match result {
                // The content's first name was removed; an alias may still have the bytes.
                Err(DiskError::NoTarget) => self.alias_of_another(&*files, meta, *shared, deadline),
                result => result,
            };
            match result {
                Ok(place) if place != *shared => {
                    self.alias_locations()
                        .insert(meta.key, AliasLocation { shared: *shared, place });
                }
                // Without bytes there is nothing to name: reads of the key miss.
                Ok(_) | Err(DiskError::NoTarget) => {}
                // The loop continues: one failed alias says nothing about the others.
                Err(error) => failure = Err(stage_error(error)),
            }
        }
        failure
    }

    fn remove(&self, batch: &[(BlockKey, Address)], deadline: Deadline) -> Result<(), StageError> {
        let places: Vec<_> = {
            let alias_locations = self.alias_locations();
            let place = |(key, address): &(BlockKey, Address)| {
                (*key, place_of(&alias_locations, key, *address))
            };
            batch.iter().map(place).collect()
        };
        self.files()?.remove(&places, deadline).map_err(stage_error)?;
        // Only now: a removal that failed is tried again.
        let mut alias_locations = self.alias_locations();
        for (key, place) in &places {
            if alias_locations.get(key).is_some_and(|other| other.place == *place) {
                alias_locations.remove(key);
            }
        }
        Ok(())
    }

    fn make_room(
        &self,
        keep: &mut dyn FnMut(&BlockKey, Address) -> bool,
        deadline: Deadline,
    ) -> Result<MakeRoomOutcome, StageError> {
        let mut keeps = |meta: &RecordMeta, address| keep(&meta.key, stage_address(address));
        let reclaimed = self.files()?.reclaim(&mut keeps, deadline).map_err(stage_error)?;
        let mut alias_locations = self.alias_locations();
        // The store knows only the shared address: the places of aliases are updated here.
        for (key, old, new) in &reclaimed.moved {
            if let Some(other) = alias_locations.get_mut(key).filter(|other| other.place == *old) {
                other.place = *new;
            }
        }
        let dropped = reclaimed.dropped.into_iter().map(|(key, place)| {
            match alias_locations.get(&key).copied() {
                Some(other) if other.place == place => {
                    alias_locations.remove(&key);
                    (key, other.shared)
                }
                _ => (key, place),
            }
        });
        let dropped: Vec<_> = dropped.map(|(key, at)| (key, stage_address(at))).collect();
        let moved = reclaimed.moved.into_iter();
        Ok(MakeRoomOutcome {
            moved: moved
                .map(|(key, old, new)| (key, stage_address(old), stage_address(new)))
                .collect(),
            dropped,
            freed_bytes: reclaimed.bytes_freed,
        })
    }

    fn recover(&self) -> Vec<(BlockFacts, Address)> {
        let mut recovery = self.recovery.lock().unwrap_or_else(PoisonError::into_inner);
        let live = std::mem::take(&mut recovery.live);
        let mut alias_locations = self.alias_locations();
        let mut first_place = HashMap::new();
        let mut enter = |meta: RecordMeta, place: cascade_disk::FileAddress| {
            if let Some(digest) = meta.digest {
                // The store links blocks of one digest to one content, with the address of the
                // first.
                let shared = *first_place.entry(digest).or_insert(place);
                if shared != place {
                    alias_locations.insert(meta.key, AliasLocation { shared, place });
                }
            }
            let facts = BlockFacts {
                key: meta.key,
                digest: meta.digest,
                parent: meta.parent,
                namespace: meta.namespace,
                bytes: meta.payload_bytes,
                is_prefix: meta.is_prefix,
                expires_unix_ms: meta.expires_unix_ms,
            };
            (facts, stage_address(place))
        };
        live.into_iter().map(|(meta, place)| enter(meta, place)).collect()
    }

    fn flush(&self, deadline: Deadline) -> Result<(), StageError> {
        self.files()?.checkpoint(deadline).map_err(stage_error)
    }

    fn register(&self, namespace: &Namespace, deadline: Deadline) -> Result<(), StageError> {
        self.files()?.register_manifest(namespace, deadline).map_err(stage_error)
    }

    fn manifests(&self, deadline: Deadline) -> Result<Vec<(NamespaceId, Manifest)>, StageError> {
        let stored = self.files()?.manifests(deadline).map_err(stage_error)?;
        let good = |stored| match stored {
            StoredManifest::Valid { namespace, manifest } => Some((namespace, manifest)),
            // `cascade inspect` reports damaged ones.
            _ => None,
        };
        Ok(stored.into_iter().filter_map(good).collect())
    }

    fn probe(&self, deadline: Deadline) -> Result<(), StageError> {
        match self.files()?.probe_device(deadline).map_err(stage_error) {
            // A full device responds, and its blocks can be read.
            Err(StageError::Full) => Ok(()),
            result => result,
        }
    }

    fn probe_reads(&self, deadline: Deadline) -> Result<(), StageError> {
        self.files()?.probe_reads(deadline).map_err(stage_error)
    }

    fn stuck_calls(&self) -> u64 {
        self.files().map_or(0, |files| files.stats().stuck_calls)
    }

    fn erase(&self, deadline: Deadline) -> Result<StageEraseReport, StageError> {
        self.alias_locations().clear();
        let erased = self.files()?.erase(deadline).map_err(stage_error)?;
        let left = |file: cascade_disk::RemainingFile| NotErased {
            what: file.path.display().to_string(),
            why: file.reason,
        };
        Ok(StageEraseReport {
            files_removed: erased.files_removed,
            overwritten_bytes: erased.overwritten_bytes,
            left: erased.remaining.into_iter().map(left).collect(),
        })
    }

    fn close(&self) {
        // Calls in flight hold clones: the lock of the directory is released with the last.
        self.files.write().unwrap_or_else(PoisonError::into_inner).take();
    }

    fn stats(&self) -> StageStats {
        let Ok(files) = self.files() else {
            let notes = vec!["closed".to_owned()];
            return StageStats { capacity_bytes: self.capacity_bytes, notes, ..Default::default() };
        };
        let stats = files.stats();
        let mut notes = Vec::new();
        if self.wants_uring && stats.engine != "io_uring" {
            notes.push(format!("the kernel forbids io_uring: the engine is {}", stats.engine));
        }
        if self.wants_direct && !stats.is_direct {
            notes.push("the file system has no O_DIRECT: the page cache is used".to_owned());
        }
        if self.opening_damage.torn_records > 0 {
            notes.push(format!(
                "skipped {} torn records at opening",
                self.opening_damage.torn_records
            ));
        }
        if self.opening_damage.damaged_structures > 0 {
            let damaged = self.opening_damage.damaged_structures;
            notes.push(format!("skipped {damaged} damaged headers or footers at opening"));
        }
        if stats.structures_damaged > 0 {
            let damaged = stats.structures_damaged;
            notes.push(format!("found {damaged} damaged footers since the opening"));
        }
        notes.extend(files.problems());
        StageStats {
            used_bytes: stats.used_bytes,
            capacity_bytes: self.capacity_bytes,
            files: stats.files,
            damaged_blocks: stats.records_damaged,
            damaged_structures: self.opening_damage.damaged_structures + stats.structures_damaged,
            notes,
        }
    }
}
