//! The waterfall of `MLPerf`'s storage benchmark: new data enters the fastest tier, the least
//! recently used is demoted to the next one, and nothing is promoted.

use std::time::Duration;

use super::{
    BlockTable, ChainPart, ChainProgress, Lru, Policy, RemovalReason, Search, Slot, Visits,
};

/// The policy: LRU without promotion on hits.
#[derive(Debug, Default)]
pub struct Waterfall {
    order: Lru,
}

impl Policy for Waterfall {
    fn name(&self) -> &'static str {
        "waterfall"
    }

    fn request(
        &mut self,
        blocks: &mut BlockTable,
        now: Duration,
        chain: &mut ChainPart<'_>,
        progress: &mut ChainProgress,
        visits: &mut Visits,
    ) -> bool {
        self.order.request(blocks, now, chain, progress, visits)
    }

    fn touch(&mut self, blocks: &mut BlockTable, now: Duration, slot: Slot) {
        self.order.touch(blocks, now, slot);
    }

    fn insert(&mut self, blocks: &mut BlockTable, now: Duration, slot: Slot) {
        self.order.insert(blocks, now, slot);
    }

    fn remove(&mut self, blocks: &mut BlockTable, slot: Slot, why: RemovalReason) {
        self.order.remove(blocks, slot, why);
    }

    fn park(&mut self, blocks: &mut BlockTable, slot: Slot) {
        self.order.park(blocks, slot);
    }

    fn unpark(&mut self, blocks: &mut BlockTable, slot: Slot) {
        self.order.unpark(blocks, slot);
    }

    fn victim(
        &mut self,
        blocks: &mut BlockTable,
        now: Duration,
        spared: Option<Slot>,
        visits: &mut Visits,
    ) -> Search {
        self.order.victim(blocks, now, spared, visits)
    }

    fn promotes_hits(&self) -> bool {
        false
    }

    fn memory_bytes(&self) -> usize {
        self.order.memory_bytes()
    }
}
