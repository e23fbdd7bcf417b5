//! Copies of blocks between device memory and a tier: tiers read and write host memory.
//!
//! A filter around a tier of a store whose own memory is that of a device. Blocks are copied to
//! buffers in host memory before they are stored, and back after they were loaded. So a tier never
//! gets a slab without bytes.

use std::sync::Arc;

use cascade_block::{BlockKey, Manifest, Namespace, NamespaceId, checksum};
use cascade_memory::{RegionKind, Slab, SlabMut};
use cascade_runtime::Deadline;
use cascade_tier::tier::{
    Address, BlockFacts, EraseOutcome, Load, LoadOutcome, LoadQueue, MakeRoomOutcome, Tier,
    TierError, TierStats, load_list,
};
use cascade_tier::{StoreError, TierName};

use super::StageContext;
use super::host_buffers::HostBuffers;

/// Bytes of the buffers of one call. A longer block has the buffers of its call alone.
const CALL_BYTES_MAX: usize = 16 << 20;

/// Copies blocks between device memory and a tier.
#[derive(Debug)]
pub(crate) struct StagedTier {
    inner: Arc<dyn Tier>,
    buffers: HostBuffers,
}

/// Puts the filter around a tier if the memory of the store is that of a device.
pub(crate) fn stage(
    tier: Arc<dyn Tier>,
    context: &StageContext<'_>,
) -> Result<Arc<dyn Tier>, StoreError> {
    // A tier that keeps names only looks at no bytes.
    if context.pool.kind() == RegionKind::Host || tier.keeps_names_only() {
        return Ok(tier);
    }
    let buffers = HostBuffers::new(context.config.dram_bytes)?;
    Ok(Arc::new(StagedTier { inner: tier, buffers }))
}

impl StagedTier {
    /// A copy in host memory of a block to store, compared with its recorded checksum.
    fn copied(&self, slab: &Slab) -> Result<Slab, TierError> {
        let mut buffer = self.buffers.take(slab.len())?;
        slab.copy_to(&mut buffer).map_err(TierError::Device)?;
        if slab.verify_checksum(checksum(&buffer)) {
            Ok(buffer.seal().into_slab())
        } else {
            Err(TierError::ChangedInMemory)
        }
    }

    /// The slab of the caller with a block that was loaded.
    fn filled(mut slab: SlabMut, loaded: &SlabMut) -> LoadOutcome {
        let Some(bytes) = loaded.host() else {
            return LoadOutcome::Failed(TierError::NotHostMemory);
        };
        if bytes.len() != slab.len() {
            return LoadOutcome::Failed(TierError::NoResult);
        }
        match slab.fill_from(bytes) {
            Ok(()) => LoadOutcome::Hit(slab),
            Err(error) => LoadOutcome::Failed(TierError::Device(error)),
        }
    }
}

/// The loads of one call, as loads into buffers.
struct StagedLoads<'a> {
    buffers: &'a HostBuffers,
    queue: &'a mut dyn LoadQueue,
    /// The slabs of the caller, by the number of the block.
    targets: Vec<Option<SlabMut>>,
    held_bytes: usize,
}

impl LoadQueue for StagedLoads<'_> {
    fn next_load(&mut self) -> Option<(usize, Load)> {
        while self.held_bytes < CALL_BYTES_MAX {
            let (number, Load { key, address, slab }) = self.queue.next_load()?;
            let bytes = slab.len();
            match self.buffers.take(bytes) {
                Ok(buffer) => {
                    if number >= self.targets.len() {
                        self.targets.resize_with(number + 1, || None);
                    }
                    self.targets[number] = Some(slab);
                    self.held_bytes += bytes;
                    return Some((number, Load { key, address, slab: buffer.into_slab() }));
                }
                Err(error) => self.queue.ended(number, LoadOutcome::Failed(error)),
            }
        }
        None
    }

    fn ended(&mut self, number: usize, outcome: LoadOutcome) {
        let target = self.targets.get_mut(number).and_then(Option::take);
        let Some(slab) = target else { return };
        self.held_bytes -= slab.len();
        let outcome = match outcome {
            LoadOutcome::Hit(loaded) => StagedTier::filled(slab, &loaded),
            outcome => outcome,
        };
        self.queue.ended(number, outcome);
    }

    fn idle(&mut self) -> bool {
        self.queue.idle()
    }
}

impl Tier for StagedTier {
    fn name(&self) -> TierName {
        self.inner.name()
    }

    fn keeps_names_only(&self) -> bool {
        self.inner.keeps_names_only()
    }

    /// Never: the driver of a device may hang in a copy.
    fn keeps_deadlines(&self) -> bool {
        false
    }

    fn checks_slabs(&self) -> bool {
        true
    }

    fn store(
        &self,
        batch: Vec<(BlockFacts, Slab)>,
        deadline: Deadline,
    ) -> Vec<Result<Address, TierError>> {
        let mut results = Vec::with_capacity(batch.len());
        let (mut copied, mut held_bytes) = (Vec::new(), 0);
        let send = |copied: &mut Vec<_>, results: &mut Vec<_>| {
            if !copied.is_empty() {
                let count = results.len() + copied.len();
                results.extend(self.inner.store(std::mem::take(copied), deadline));
                results.resize_with(count, || Err(TierError::NoResult));
            }
        };
        for (facts, slab) in batch {
            if held_bytes >= CALL_BYTES_MAX {
                send(&mut copied, &mut results);
                held_bytes = 0;
            }
            match self.copied(&slab) {
                Ok(copy) => copied.push((facts, copy)),
                Err(error) => {
                    // Results have the order of the batch: the blocks before this one come first.
                    send(&mut copied, &mut results);
                    results.push(Err(error));
                }
            }
            held_bytes += slab.len();
        }
        send(&mut copied, &mut results);
        results
    }

    fn load(&self, batch: Vec<Load>, deadline: Deadline) -> Vec<LoadOutcome> {
        load_list(batch, |queue| self.load_each(queue, deadline))
    }

    fn load_each(&self, queue: &mut dyn LoadQueue, deadline: Deadline) {
        let (buffers, targets) = (&self.buffers, Vec::new());
        let mut loads = StagedLoads { buffers, queue, targets, held_bytes: 0 };
        self.inner.load_each(&mut loads, deadline);
    }

    fn alias(
        &self,
        batch: Vec<(BlockFacts, Address)>,
        deadline: Deadline,
    ) -> Result<(), TierError> {
        self.inner.alias(batch, deadline)
    }

    fn remove(&self, batch: &[(BlockKey, Address)], deadline: Deadline) -> Result<(), TierError> {
        self.inner.remove(batch, deadline)
    }

    fn make_room(
        &self,
        keep: &mut dyn FnMut(&BlockKey, Address) -> bool,
        deadline: Deadline,
    ) -> Result<MakeRoomOutcome, TierError> {
        self.inner.make_room(keep, deadline)
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
        self.inner.recover()
    }

    fn flush(&self, deadline: Deadline) -> Result<(), TierError> {
        self.inner.flush(deadline)
    }

    fn register(&self, namespace: &Namespace, deadline: Deadline) -> Result<(), TierError> {
        self.inner.register(namespace, deadline)
    }

    fn manifests(&self, deadline: Deadline) -> Result<Vec<(NamespaceId, Manifest)>, TierError> {
        self.inner.manifests(deadline)
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
        self.inner.erase(deadline)
    }

    fn close(&self) {
        self.inner.close();
    }

    fn stats(&self) -> TierStats {
        self.inner.stats()
    }
}
