//! A source over another store: one in the same process, or that of a node through its client.

use std::fmt;
use std::sync::Arc;

use cascade_block::{BlockKey, NamespaceId, checksum};
use cascade_memory::{DeviceError, Slab, SlabMut};
use cascade_runtime::{Clock, SystemClock};

use crate::source::{LocatedBlock, Source, SourceLimit};
use crate::tier::{Address, BlockFacts, Load, LoadOutcome, LoadQueue, TierError};
use crate::{BlockStore, CallOptions, StoreError, TierName, ViewOutcome};

/// Blocks that one call views at once. Views hold memory of the other store.
const VIEWS_PER_CALL: usize = 8;

/// Locates and fetches blocks of another store.
///
/// It asks only for blocks of the catalog of that store, never for those of its sources: two stores
/// may be sources of each other. Locating a block reads it there, to state its length and checksum.
/// Its chain, expiration time and protection stay unknown.
pub struct StoreSource {
    name: TierName,
    store: Arc<dyn BlockStore>,
    clock: Arc<dyn Clock>,
}

impl StoreSource {
    /// A source with this name over a store.
    pub fn new(name: TierName, store: Arc<dyn BlockStore>) -> Self {
        Self::with_clock(name, store, Arc::new(SystemClock))
    }

    /// As [`Self::new`], with the clock of the store that asks.
    pub fn with_clock(name: TierName, store: Arc<dyn BlockStore>, clock: Arc<dyn Clock>) -> Self {
        Self { name, store, clock }
    }

    /// Views of blocks that the store has.
    fn view(
        &self,
        keys: &[BlockKey],
        limit: &SourceLimit<'_>,
    ) -> Result<Vec<Option<Slab>>, TierError> {
        let timeout = limit.deadline.remaining(&*self.clock);
        if timeout.is_zero() || limit.cancel.is_set() {
            return Err(TierError::Timeout);
        }
        let options = CallOptions { timeout: Some(timeout), ..CallOptions::default() };
        let contained = self.store.contains(keys).into_iter();
        let known: Vec<BlockKey> =
            keys.iter().zip(contained).filter(|(_, has)| *has).map(|(key, _)| *key).collect();
        let mut views = known.iter().zip(self.store.view(&known, options)).peekable();
        let mut found = Vec::with_capacity(keys.len());
        for key in keys {
            let view = views.next_if(|(known, _)| *known == key).map(|(_, view)| view);
            found.push(match view {
                Some(ViewOutcome::Hit { slab, .. }) => Some(slab),
                Some(ViewOutcome::Miss) | None => None,
                Some(ViewOutcome::Failed(error)) => return Err(stage_error(error)),
            });
        }
        Ok(found)
    }

    fn fetch_some(&self, batch: Vec<Load>, limit: &SourceLimit<'_>) -> Vec<LoadOutcome> {
        let keys: Vec<BlockKey> = batch.iter().map(|load| load.key).collect();
        let views = match self.view(&keys, limit) {
            Ok(views) => views,
            Err(error) => {
                return batch.iter().map(|_| LoadOutcome::Failed(error.clone())).collect();
            }
        };
        batch.into_iter().zip(views).map(|(load, view)| copy_block(load, view)).collect()
    }
}

impl Source for StoreSource {
    fn name(&self) -> TierName {
        self.name
    }

    fn locate(
        &self,
        keys: &[BlockKey],
        limit: &SourceLimit<'_>,
    ) -> Result<Vec<Option<LocatedBlock>>, TierError> {
        let mut located = Vec::with_capacity(keys.len());
        for keys in keys.chunks(VIEWS_PER_CALL) {
            let views = self.view(keys, limit)?;
            let locate = |(key, view): (&BlockKey, Option<Slab>)| {
                view.map_or(Ok(None), |view| locate_block(*key, &view))
            };
            for block in keys.iter().zip(views).map(locate) {
                located.push(block.map_err(TierError::Device)?);
            }
        }
        Ok(located)
    }

    fn fetch(&self, batch: Vec<Load>, limit: &SourceLimit<'_>) -> Vec<LoadOutcome> {
        let mut outcomes = Vec::with_capacity(batch.len());
        let mut batch = batch.into_iter().peekable();
        while batch.peek().is_some() {
            let some = batch.by_ref().take(VIEWS_PER_CALL).collect();
            outcomes.extend(self.fetch_some(some, limit));
        }
        outcomes
    }

    fn fetch_each(&self, queue: &mut dyn LoadQueue, limit: &SourceLimit<'_>) {
        while !limit.cancel.is_set() && !limit.deadline.has_passed(&*self.clock) {
            let next = std::iter::from_fn(|| queue.next_load());
            let (numbers, batch): (Vec<usize>, Vec<Load>) = next.take(VIEWS_PER_CALL).unzip();
            if batch.is_empty() {
                return;
            }
            for (number, outcome) in numbers.into_iter().zip(self.fetch_some(batch, limit)) {
                queue.ended(number, outcome);
            }
        }
    }

    fn probe(&self, deadline: cascade_runtime::Deadline) -> Result<(), TierError> {
        let timeout = Some(deadline.remaining(&*self.clock));
        let options = CallOptions { timeout, ..CallOptions::default() };
        self.store.manifests(options).map(drop).map_err(stage_error)
    }
}

impl fmt::Debug for StoreSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreSource").field("name", &self.name).finish_non_exhaustive()
    }
}

/// What the source says about a block. The address is the identity of its bytes, because the key
/// may stand for other bytes when the block is fetched.
fn locate_block(key: BlockKey, block: &Slab) -> Result<Option<LocatedBlock>, DeviceError> {
    let Ok(bytes) = u32::try_from(block.len()) else { return Ok(None) };
    let facts = BlockFacts {
        key,
        digest: None,
        parent: None,
        namespace: NamespaceId::default(),
        bytes,
        is_prefix: false,
        written_unix_ms: 0,
        expires_unix_ms: None,
    };
    let checksum = checksum(&block.bytes_or_copy()?);
    Ok(Some(LocatedBlock { facts, checksum, address: address(bytes, checksum) }))
}

fn address(bytes: u32, checksum: u32) -> Address {
    Address(u64::from(bytes) << u32::BITS | u64::from(checksum))
}

fn copy_block(load: Load, view: Option<Slab>) -> LoadOutcome {
    let Load { address: expected, slab, .. } = load;
    let Some(block) = view.filter(|block| block.len() == slab.len()) else {
        return LoadOutcome::Gone;
    };
    match copied_block(slab, &block, expected) {
        Ok(Some(slab)) => LoadOutcome::Hit(slab),
        Ok(None) => LoadOutcome::Gone,
        Err(error) => LoadOutcome::Failed(TierError::Device(error)),
    }
}

/// The slab with a copy of the block, if that has the expected identity. In host memory the copy is
/// checked. A copy in device memory is checked before it is written there.
fn copied_block(
    mut slab: SlabMut,
    block: &Slab,
    expected: Address,
) -> Result<Option<SlabMut>, DeviceError> {
    let bytes = u32::try_from(slab.len()).unwrap_or(u32::MAX);
    let sum = if let Some(host) = slab.host_mut() {
        block.copy_to(host)?;
        checksum(host)
    } else {
        let copy = block.bytes_or_copy()?;
        slab.fill_from(&copy)?;
        checksum(&copy)
    };
    Ok((address(bytes, sum) == expected).then_some(slab))
}

fn stage_error(error: StoreError) -> TierError {
    match error {
        StoreError::Timeout { .. } => TierError::Timeout,
        error => TierError::Failed(Arc::new(error)),
    }
}
