//! Holds of calls that make room, and of a store that grows.

use std::sync::atomic::Ordering;

use cascade_block::BlockKey;
use cascade_store::eviction::{Priority, StopReason};
use cascade_store::{CallOptions, Hints, Put, Request, Store, StoreConfig};

use super::{BLOCK, Fixture, Measured, PINNED, PUT_BATCH, RESIDENT, check, group, plain};
use crate::{Bench, MeasureError, keys, open};

/// Blocks that one measured call puts into a full store.
const PUT: usize = 16_384;
/// Blocks that a store has before: almost as many as it has room for.
const FILLED: usize = PINNED - 1024;
/// A block for which that many small ones are evicted.
const LARGE: usize = PUT * BLOCK;

pub(super) fn run(bench: &mut Bench<'_>) -> Result<(), MeasureError> {
    group(bench, &ONE_CHAIN, Fixture::one_chain)?;
    group(bench, &MANY_CELLS, Fixture::many_cells)?;
    group(bench, &GROWING, Fixture::growing)
}

/// A full store with one chain of 262,144 blocks.
const ONE_CHAIN: [Measured; 2] =
    [plain("evict-one-chain", Fixture::put_others), plain("evict-for-1MiB", Fixture::put_large)];

/// A full store with blocks of many kinds of requests, each in a cell of its own.
const MANY_CELLS: [Measured; 1] = [plain("evict-many-cells", Fixture::put_others)];

/// A store that is opened empty in each round.
const GROWING: [Measured; 1] = [plain("grow", |it| {
    let config =
        StoreConfig { dram_bytes: 192 << 20, holds: Some(it.holds.clone()), ..Default::default() };
    let store = open("holds", config)?;
    put_all(&store, &it.keys)
})];

impl Fixture {
    fn with_room_for(blocks: usize) -> Result<Self, MeasureError> {
        let dram_bytes = (blocks * BLOCK) as u64;
        Self::open(StoreConfig { dram_bytes, ..StoreConfig::default() }, 0, None)
    }

    fn one_chain(_: &Bench<'_>) -> Result<Self, MeasureError> {
        let mut fixture = Self::with_room_for(PINNED)?;
        fixture.chain = keys("chain", FILLED);
        fixture.put_chain()?;
        Ok(fixture)
    }

    fn many_cells(_: &Bench<'_>) -> Result<Self, MeasureError> {
        let mut fixture = Self::with_room_for(PINNED)?;
        let all = keys("cells", FILLED);
        let mut rest = &all[..];
        let stops = [None, Some(StopReason::ToolUse), Some(StopReason::EndTurn)];
        let priorities = [Priority::Low, Priority::Normal, Priority::High];
        for workload in 0..16 {
            for (stop, priority) in
                stops.iter().flat_map(|stop| priorities.map(|priority| (*stop, priority)))
            {
                // Lengths of each octave make cells of their own.
                for blocks in (0..10).map(|octave| 1 << octave) {
                    let (chain, later) = rest.split_at(blocks);
                    rest = later;
                    let hints =
                        Hints { workload: Some(workload), stop, priority, ..Hints::default() };
                    fixture.store.lookup_prefix(&Request { hints, ..Request::new(chain) });
                    fixture.chain = chain.to_vec();
                    fixture.put_chain()?;
                }
            }
        }
        fixture.put(rest, PUT_BATCH)?;
        Ok(fixture)
    }

    fn growing(_: &Bench<'_>) -> Result<Self, MeasureError> {
        let mut fixture = Self::with_room_for(1 << 16)?;
        fixture.keys = keys("resident", RESIDENT);
        Ok(fixture)
    }

    /// Puts blocks that no earlier round has put.
    fn put_others(&self) -> Result<(), MeasureError> {
        let round = self.round.fetch_add(1, Ordering::Relaxed) % (self.other.len() / PUT);
        let keys = &self.other[round * PUT..][..PUT];
        keys.chunks(PUT_BATCH).try_for_each(|keys| self.put_unchecked(keys))
    }

    /// Looks up half of the blocks, and puts all. The policy may decline some.
    fn put_unchecked(&self, keys: &[BlockKey]) -> Result<(), MeasureError> {
        self.store.lookup_prefix(&Request::new(&keys[..PUT_BATCH / 2]));
        let bytes = [1; BLOCK];
        let puts: Vec<Put<'_>> = keys.iter().map(|key| Put::new(*key, &bytes)).collect();
        let outcomes = self.store.put(&puts, CallOptions::default());
        super::all("puts", outcomes.len() == keys.len())
    }

    fn put_large(&self) -> Result<(), MeasureError> {
        let round = self.round.fetch_add(1, Ordering::Relaxed);
        let bytes = vec![1; LARGE];
        let put = Put::new(self.other[self.other.len() - 1 - round], &bytes);
        check(&self.store.put(&[put], CallOptions::default()))
    }
}

fn put_all(store: &Store, keys: &[BlockKey]) -> Result<(), MeasureError> {
    let bytes = [1; BLOCK];
    keys.chunks(PUT_BATCH).try_for_each(|keys| {
        let puts: Vec<Put<'_>> = keys.iter().map(|key| Put::new(*key, &bytes)).collect();
        check(&store.put(&puts, CallOptions::default()))
    })
}
