//! The file tier as a store uses it.

use std::mem;
use std::sync::PoisonError;

use cascade_block::{BlockKey, ByteSize, Manifest, Namespace, NamespaceId};
use cascade_memory::Slab;
use cascade_runtime::Deadline;
use cascade_tier::TierName;
use cascade_tier::tier::{LoadQueue, Tier, TierStats, load_list};

use super::capacity::resize;
use super::{DiskStats, SegmentFiles};
use crate::{
    Address, BlockFacts, DiskError, EraseOutcome, Load, LoadOutcome, MakeRoomOutcome,
    StoredManifest, TierError, device_probe, manifests,
};

/// The name of the file tier in results and statistics.
pub const TIER_NAME: TierName = "files";

impl Tier for SegmentFiles {
    fn name(&self) -> TierName {
        TIER_NAME
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
        let _held = match self.held_lock() {
            Ok(held) => held,
            Err(error) => return vec![Err(error.into()); batch.len()],
        };
        let batch = batch.into_iter().map(|(facts, slab)| (written(self, &facts), slab)).collect();
        let results = self.append(batch, deadline).into_iter();
        results.map(|result| result.map_err(TierError::from)).collect()
    }

    fn load(&self, batch: Vec<Load>, deadline: Deadline) -> Vec<LoadOutcome> {
        load_list(batch, |queue| self.load_each(queue, deadline))
    }

    fn load_each(&self, queue: &mut dyn LoadQueue, deadline: Deadline) {
        match self.held_lock() {
            Ok(_held) => self.read_blocks(queue, deadline),
            Err(error) => {
                while let Some((number, _)) = queue.next_load() {
                    queue.ended(number, LoadOutcome::Failed(error.clone().into()));
                }
            }
        }
    }

    fn alias(
        &self,
        batch: Vec<(BlockFacts, Address)>,
        deadline: Deadline,
    ) -> Result<(), TierError> {
        let _held = self.held_lock()?;
        let batch: Vec<_> =
            batch.iter().map(|(facts, address)| (written(self, facts), *address)).collect();
        let mut failure = Ok(());
        for result in self.alias_blocks(&batch, deadline) {
            match result {
                // Without bytes there is nothing to name: reads of the key miss.
                Ok(_) | Err(DiskError::NoTarget) => {}
                // The loop continues: one failed alias says nothing about the others.
                Err(error) => failure = Err(error.into()),
            }
        }
        failure
    }

    fn remove(&self, batch: &[(BlockKey, Address)], deadline: Deadline) -> Result<(), TierError> {
        let _held = self.held_lock()?;
        Ok(self.remove_keys(batch, deadline)?)
    }

    fn make_room(
        &self,
        keep: &mut dyn FnMut(&BlockKey, Address) -> bool,
        deadline: Deadline,
    ) -> Result<MakeRoomOutcome, TierError> {
        let _held = self.held_lock()?;
        Ok(self.reclaim(&mut |facts, address| keep(&facts.key, address), deadline)?)
    }

    fn resize(&self, capacity_bytes: u64, deadline: Deadline) -> Result<(), TierError> {
        let _held = self.held_lock()?;
        Ok(resize(self, capacity_bytes, deadline)?)
    }

    fn release_pool(&self) {
        self.io.engine.release_pool();
    }

    fn is_shrinking(&self) -> bool {
        self.capacity.is_exceeded()
    }

    fn recover(&self) -> Vec<(BlockFacts, Address)> {
        self.recovery().live
    }

    fn flush(&self, deadline: Deadline) -> Result<(), TierError> {
        let _held = self.held_lock()?;
        Ok(self.checkpoint(deadline)?)
    }

    fn register(&self, namespace: &Namespace, deadline: Deadline) -> Result<(), TierError> {
        let _held = self.held_lock()?;
        Ok(manifests::register(&self.io, &self.config.directory, namespace, deadline)?)
    }

    fn manifests(&self, deadline: Deadline) -> Result<Vec<(NamespaceId, Manifest)>, TierError> {
        let _held = self.held_lock()?;
        let stored = manifests::load_all(&self.io, &self.config.directory, deadline)?;
        let valid = |stored| match stored {
            StoredManifest::Valid { namespace, manifest } => Some((namespace, manifest)),
            // `cascade inspect` reports invalid ones.
            StoredManifest::Invalid { .. } => None,
        };
        Ok(stored.into_iter().filter_map(valid).collect())
    }

    fn probe(&self, deadline: Deadline) -> Result<(), TierError> {
        match self.probe_device(deadline) {
            // A full device responds, and its blocks can be read.
            Err(DiskError::NoSpace { .. }) => Ok(()),
            result => Ok(result?),
        }
    }

    fn probe_reads(&self, deadline: Deadline) -> Result<(), TierError> {
        let lock = self.held_lock()?;
        let newest = self.all_segments().pop().map(|segment| segment.file.clone());
        Ok(device_probe::probe_reads(&self.io, &self.config, &lock, newest, deadline)?)
    }

    fn stuck_calls(&self) -> u64 {
        self.io.stuck_calls()
    }

    fn erase(&self, deadline: Deadline) -> Result<EraseOutcome, TierError> {
        let _held = self.held_lock()?;
        Ok(self.erase_all(deadline)?)
    }

    fn close(&self) {
        let lock =
            mem::take(&mut *self.directory_lock.write().unwrap_or_else(PoisonError::into_inner));
        // Before the directory's lock is released.
        self.end_seal();
        drop(lock);
    }

    fn stats(&self) -> TierStats {
        let capacity_bytes = self.capacity.bytes();
        if self.held_lock().is_err() {
            let notes = vec!["closed".to_owned()];
            return TierStats { capacity_bytes, notes, ..TierStats::default() };
        }
        let stats = self.disk_stats();
        let damaged_at_opening =
            self.recovery.lock().unwrap_or_else(PoisonError::into_inner).damaged_structures;
        TierStats {
            used_bytes: stats.used_bytes,
            capacity_bytes,
            files: stats.files,
            damaged_blocks: stats.records_damaged,
            damaged_structures: damaged_at_opening + stats.structures_damaged,
            encryption: None,
            notes: notes(self, &stats),
        }
    }
}

/// The facts of a block that is written now.
fn written(files: &SegmentFiles, facts: &BlockFacts) -> BlockFacts {
    BlockFacts { written_unix_ms: files.io.clock.unix_ms(), ..*facts }
}

/// What operators should know, with the latest problems found at opening and since.
fn notes(files: &SegmentFiles, stats: &DiskStats) -> Vec<String> {
    let recovery = files.recovery.lock().unwrap_or_else(PoisonError::into_inner);
    let mut notes = Vec::new();
    if let Some(refusal) = files.io.ring_refusal {
        notes.push(format!("{refusal}: the engine is {}; {}", stats.engine, refusal.remedy()));
    }
    if files.config.direct && !stats.is_direct {
        notes.push("the file system has no O_DIRECT: the page cache is used".to_owned());
    }
    if files.capacity.is_exceeded() {
        let excess = ByteSize(stats.used_bytes.saturating_sub(files.capacity.bytes())).rounded();
        notes.push(format!(
            "the files are {excess} above the capacity, which was reduced; they shrink in the \
             background"
        ));
    }
    if recovery.torn_records > 0 {
        notes.push(format!("skipped {} torn records at opening", recovery.torn_records));
    }
    if recovery.damaged_structures > 0 {
        let damaged = recovery.damaged_structures;
        notes.push(format!("skipped {damaged} damaged headers or footers at opening"));
    }
    if stats.structures_damaged > 0 {
        let damaged = stats.structures_damaged;
        notes.push(format!("found {damaged} damaged footers since the opening"));
    }
    notes.extend(files.problems.all());
    notes
}
