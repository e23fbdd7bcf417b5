//! The file tier of a store, over both layouts of files.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, PoisonError};

use cascade_block::{BlockKey, Manifest, Namespace, NamespaceId};
use cascade_memory::{Pool, Slab};
use cascade_runtime::{Clock, Deadline, Mutex, MutexGuard, RwLock};
use cascade_tier::TierName;
use cascade_tier::tier::{LoadQueue, Tier, TierStats, load_list};

use crate::io::FileIo;
use crate::per_block::PerBlockFiles;
use crate::segments::SegmentFiles;
use crate::{
    Address, BlockFacts, BlockFiles, DiskError, EraseOutcome, FileLayout, FilesConfig, IoEngine,
    Load, LoadOutcome, MakeRoomOutcome, Recovery, StoredManifest, TierError,
};

/// Stores blocks in files.
#[derive(Debug)]
pub struct FilesTier {
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
    shared: Address,
    /// The address of this alias's own bytes.
    place: Address,
}

/// Damage found at opening, for the notes.
#[derive(Debug, Clone, Copy)]
struct OpeningDamage {
    torn_records: u64,
    damaged_structures: u64,
}

impl FilesTier {
    /// Opens the files on the file systems of this machine and recovers what they hold. `name` is
    /// the tier's in results and statistics.
    ///
    /// `pool` is where slabs come from; `io_uring` may register its memory.
    ///
    /// # Errors
    /// The directory cannot be used.
    pub fn open(
        config: FilesConfig,
        name: TierName,
        clock: Arc<dyn Clock>,
        pool: &Pool,
        deadline: Deadline,
    ) -> Result<Self, DiskError> {
        let wanted = config.clone();
        let opened = open(config, Arc::clone(&clock), pool, deadline)?;
        let wants_uring = wanted.engine != IoEngine::Psync;
        Ok(Self::opened(&wanted, name, clock, wants_uring, opened))
    }

    /// [`Self::open`] with the caller's I/O instead of the system's, such as a simulated disk. The
    /// setting of the I/O engine is ignored.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_with(
        config: FilesConfig,
        name: TierName,
        clock: Arc<dyn Clock>,
        io: FileIo,
        deadline: Deadline,
    ) -> Result<Self, DiskError> {
        let wanted = config.clone();
        let opened = open_with(config, io, deadline)?;
        Ok(Self::opened(&wanted, name, clock, false, opened))
    }

    fn opened(
        config: &FilesConfig,
        name: TierName,
        clock: Arc<dyn Clock>,
        wants_uring: bool,
        (files, recovery): (Arc<dyn BlockFiles>, Recovery),
    ) -> Self {
        let opening_damage = OpeningDamage {
            torn_records: recovery.torn_records,
            damaged_structures: recovery.damaged_structures,
        };
        Self {
            files: RwLock::new(Some(files)),
            clock,
            capacity_bytes: config.capacity_bytes,
            name,
            wants_direct: config.direct,
            wants_uring,
            recovery: Mutex::new(recovery),
            opening_damage,
            alias_locations: Mutex::default(),
        }
    }

    fn files(&self) -> Result<Arc<dyn BlockFiles>, TierError> {
        let files = self.files.read().unwrap_or_else(PoisonError::into_inner);
        files.clone().ok_or(TierError::Closed)
    }

    fn alias_locations(&self) -> MutexGuard<'_, BTreeMap<BlockKey, AliasLocation>> {
        self.alias_locations.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn alias_of_another(
        &self,
        files: &dyn BlockFiles,
        meta: &BlockFacts,
        shared: Address,
        deadline: Deadline,
    ) -> Result<Address, DiskError> {
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

    /// The facts of a block that is written now.
    fn written(&self, facts: &BlockFacts) -> BlockFacts {
        BlockFacts { written_unix_ms: self.clock.unix_ms(), ..*facts }
    }
}

/// The loads of one call, as reads of the files.
struct FileLoads<'a> {
    stage: &'a FilesTier,
    queue: &'a mut dyn LoadQueue,
}

impl LoadQueue for FileLoads<'_> {
    fn next_load(&mut self) -> Option<(usize, Load)> {
        let (number, Load { key, address, slab }) = self.queue.next_load()?;
        let address = place_of(&self.stage.alias_locations(), &key, address);
        Some((number, Load { key, address, slab }))
    }

    fn ended(&mut self, number: usize, outcome: LoadOutcome) {
        self.queue.ended(number, outcome);
    }

    fn idle(&mut self) -> bool {
        self.queue.idle()
    }
}

/// Where the bytes of a key are that the store has at this address. A key that was deleted and
/// added again has two addresses for a while, and only one of them can be an alias.
fn place_of(
    alias_locations: &BTreeMap<BlockKey, AliasLocation>,
    key: &BlockKey,
    address: Address,
) -> Address {
    let other = alias_locations.get(key).filter(|other| other.shared == address);
    other.map_or(address, |other| other.place)
}

impl Tier for FilesTier {
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
    ) -> Vec<Result<Address, TierError>> {
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
        let batch = batch.into_iter().map(|(facts, slab)| (self.written(&facts), slab)).collect();
        let results = files.append(batch, deadline).into_iter();
        results.map(|result| result.map_err(TierError::from)).collect()
    }

    fn load(&self, batch: Vec<Load>, deadline: Deadline) -> Vec<LoadOutcome> {
        load_list(batch, |queue| self.load_each(queue, deadline))
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
    ) -> Result<(), TierError> {
        let files = self.files()?;
        let metas: Vec<_> =
            batch.iter().map(|(facts, address)| (self.written(facts), *address)).collect();
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
                Err(error) => failure = Err(error.into()),
            }
        }
        failure
    }

    fn remove(&self, batch: &[(BlockKey, Address)], deadline: Deadline) -> Result<(), TierError> {
        let places: Vec<_> = {
            let alias_locations = self.alias_locations();
            let place = |(key, address): &(BlockKey, Address)| {
                (*key, place_of(&alias_locations, key, *address))
            };
            batch.iter().map(place).collect()
        };
        self.files()?.remove(&places, deadline).map_err(TierError::from)?;
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
    ) -> Result<MakeRoomOutcome, TierError> {
        let mut keeps = |meta: &BlockFacts, address| keep(&meta.key, address);
        let mut reclaimed = self.files()?.reclaim(&mut keeps, deadline).map_err(TierError::from)?;
        let mut alias_locations = self.alias_locations();
        // An alias has the address of its content and that of its own bytes. Either may have moved.
        let moved: HashMap<_, _> =
            reclaimed.moved.iter().map(|(_, old, new)| (*old, *new)).collect();
        if !moved.is_empty() {
            for other in alias_locations.values_mut() {
                let AliasLocation { shared, place } = *other;
                let after = |address| moved.get(&address).copied().unwrap_or(address);
                *other = AliasLocation { shared: after(shared), place: after(place) };
            }
        }
        for (key, place) in &mut reclaimed.dropped {
            if let Some(other) = alias_locations.get(key).copied()
                && other.place == *place
            {
                alias_locations.remove(key);
                *place = other.shared;
            }
        }
        Ok(reclaimed)
    }

    fn recover(&self) -> Vec<(BlockFacts, Address)> {
        let mut recovery = self.recovery.lock().unwrap_or_else(PoisonError::into_inner);
        let mut live = std::mem::take(&mut recovery.live);
        let mut alias_locations = self.alias_locations();
        let mut first_place = HashMap::new();
        for (facts, address) in &mut live {
            let Some(digest) = facts.digest else { continue };
            let (shared, place) = (*first_place.entry(digest).or_insert(*address), *address);
            if shared != place {
                alias_locations.insert(facts.key, AliasLocation { shared, place });
                *address = shared;
            }
        }
        live
    }

    fn flush(&self, deadline: Deadline) -> Result<(), TierError> {
        self.files()?.checkpoint(deadline).map_err(TierError::from)
    }

    fn register(&self, namespace: &Namespace, deadline: Deadline) -> Result<(), TierError> {
        self.files()?.register_manifest(namespace, deadline).map_err(TierError::from)
    }

    fn manifests(&self, deadline: Deadline) -> Result<Vec<(NamespaceId, Manifest)>, TierError> {
        let stored = self.files()?.manifests(deadline).map_err(TierError::from)?;
        let good = |stored| match stored {
            StoredManifest::Valid { namespace, manifest } => Some((namespace, manifest)),
            // `cascade inspect` reports damaged ones.
            _ => None,
        };
        Ok(stored.into_iter().filter_map(good).collect())
    }

    fn probe(&self, deadline: Deadline) -> Result<(), TierError> {
        match self.files()?.probe_device(deadline).map_err(TierError::from) {
            // A full device responds, and its blocks can be read.
            Err(TierError::Full) => Ok(()),
            result => result,
        }
    }

    fn probe_reads(&self, deadline: Deadline) -> Result<(), TierError> {
        self.files()?.probe_reads(deadline).map_err(TierError::from)
    }

    fn stuck_calls(&self) -> u64 {
        self.files().map_or(0, |files| files.stats().stuck_calls)
    }

    fn erase(&self, deadline: Deadline) -> Result<EraseOutcome, TierError> {
        self.alias_locations().clear();
        self.files()?.erase(deadline).map_err(TierError::from)
    }

    fn close(&self) {
        // Calls in flight hold clones: the lock of the directory is released with the last.
        self.files.write().unwrap_or_else(PoisonError::into_inner).take();
    }

    fn stats(&self) -> TierStats {
        let Ok(files) = self.files() else {
            let notes = vec!["closed".to_owned()];
            return TierStats { capacity_bytes: self.capacity_bytes, notes, ..Default::default() };
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
        TierStats {
            used_bytes: stats.used_bytes,
            capacity_bytes: self.capacity_bytes,
            files: stats.files,
            damaged_blocks: stats.records_damaged,
            damaged_structures: self.opening_damage.damaged_structures + stats.structures_damaged,
            notes,
        }
    }
}

/// Opens a file tier on the file systems of this machine and recovers what it holds.
///
/// `pool` is where slabs come from; `io_uring` may register its memory.
pub fn open(
    config: FilesConfig,
    clock: Arc<dyn Clock>,
    pool: &Pool,
    deadline: Deadline,
) -> Result<(Arc<dyn BlockFiles>, Recovery), DiskError> {
    let io = FileIo::system(config.engine, config.direct, config.queue_depth, Some(pool), clock)?;
    open_with(config, io, deadline)
}

/// Opens a file tier with the caller's I/O, such as one that injects faults.
pub fn open_with(
    config: FilesConfig,
    io: FileIo,
    deadline: Deadline,
) -> Result<(Arc<dyn BlockFiles>, Recovery), DiskError> {
    let config = config.checked()?;
    match config.layout {
        FileLayout::Segments => {
            let (files, recovery) = SegmentFiles::open(config, io, deadline)?;
            Ok((Arc::new(files), recovery))
        }
        FileLayout::FilePerBlock => {
            let (files, recovery) = PerBlockFiles::open(config, io, deadline)?;
            Ok((Arc::new(files), recovery))
        }
    }
}
