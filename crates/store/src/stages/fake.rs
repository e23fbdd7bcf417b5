//! The Fake stage: keeps names without bytes. For hit-rate studies and upper bounds.

use std::collections::HashMap;
use std::sync::PoisonError;

use cascade_block::BlockKey;
use cascade_memory::Slab;
use cascade_runtime::{Deadline, Mutex, MutexGuard};
use cascade_tier::TierName;
use cascade_tier::tier::{
    Address, BlockFacts, EraseOutcome, Load, LoadOutcome, MakeRoomOutcome, Tier, TierError,
    TierStats,
};

/// Counts the blocks that it would have. A load finds nothing, because it stores no bytes.
#[derive(Debug, Default)]
pub struct FakeTier {
    state: Mutex<Names>,
}

#[derive(Debug, Default)]
struct Names {
    next: u64,
    bytes: u64,
    /// Length of a block and number of its names, by address.
    lengths: HashMap<u64, (u32, u32)>,
}

impl FakeTier {
    fn state(&self) -> MutexGuard<'_, Names> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Tier for FakeTier {
    fn name(&self) -> TierName {
        "fake"
    }

    fn keeps_names_only(&self) -> bool {
        true
    }

    fn keeps_deadlines(&self) -> bool {
        true
    }

    fn store(
        &self,
        batch: Vec<(BlockFacts, Slab)>,
        _deadline: Deadline,
    ) -> Vec<Result<Address, TierError>> {
        let mut names = self.state();
        let mut keep = |facts: &BlockFacts| {
            names.next += 1;
            names.bytes += u64::from(facts.bytes);
            let address = names.next;
            names.lengths.insert(address, (facts.bytes, 1));
            Ok(Address(address))
        };
        batch.iter().map(|(facts, _)| keep(facts)).collect()
    }

    fn load(&self, batch: Vec<Load>, _deadline: Deadline) -> Vec<LoadOutcome> {
        batch.into_iter().map(|_| LoadOutcome::Gone).collect()
    }

    fn alias(
        &self,
        batch: Vec<(BlockFacts, Address)>,
        _deadline: Deadline,
    ) -> Result<(), TierError> {
        let mut names = self.state();
        for (_, address) in batch {
            if let Some((_, count)) = names.lengths.get_mut(&address.0) {
                *count += 1;
            }
        }
        Ok(())
    }

    fn remove(&self, batch: &[(BlockKey, Address)], _: Deadline) -> Result<(), TierError> {
        let mut names = self.state();
        for (_, address) in batch {
            let Some((bytes, count)) = names.lengths.get_mut(&address.0) else { continue };
            *count -= 1;
            if *count == 0 {
                let bytes = u64::from(*bytes);
                names.lengths.remove(&address.0);
                names.bytes -= bytes;
            }
        }
        Ok(())
    }

    fn make_room(
        &self,
        _keep: &mut dyn FnMut(&BlockKey, Address) -> bool,
        _deadline: Deadline,
    ) -> Result<MakeRoomOutcome, TierError> {
        Ok(MakeRoomOutcome::default())
    }

    fn recover(&self) -> Vec<(BlockFacts, Address)> {
        Vec::new()
    }

    fn flush(&self, _deadline: Deadline) -> Result<(), TierError> {
        Ok(())
    }

    fn erase(&self, _deadline: Deadline) -> Result<EraseOutcome, TierError> {
        let mut names = self.state();
        names.lengths.clear();
        names.bytes = 0;
        Ok(EraseOutcome::default())
    }

    fn stats(&self) -> TierStats {
        let used_bytes = self.state().bytes;
        let notes = vec!["keeps names only: every load is a miss".to_owned()];
        TierStats { used_bytes, capacity_bytes: u64::MAX, notes, ..TierStats::default() }
    }
}
