//! The Fake stage: keeps names, never bytes. For hit-rate studies and ceilings.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use cascade_block::{BlockKey, Deadline};
use cascade_memory::Slab;

use super::{Address, BlockFacts, Load, Loaded, Room, Stage, StageError, StageStats};
use crate::TierName;

/// Knows which blocks it would have. A load finds nothing, because there are no bytes to serve.
#[derive(Debug, Default)]
pub struct FakeStage {
    state: Mutex<Names>,
}

#[derive(Debug, Default)]
struct Names {
    next: u64,
    bytes: u64,
    lengths: HashMap<u64, (u32, u32)>,
}

impl FakeStage {
    fn state(&self) -> MutexGuard<'_, Names> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Stage for FakeStage {
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
    ) -> Vec<Result<Address, StageError>> {
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

    fn load(&self, batch: Vec<Load>, _deadline: Deadline) -> Vec<Loaded> {
        batch.into_iter().map(|_| Loaded::Gone).collect()
    }

    fn alias(
        &self,
        batch: Vec<(BlockFacts, Address)>,
        _deadline: Deadline,
    ) -> Result<(), StageError> {
        let mut names = self.state();
        for (_, address) in batch {
            if let Some((_, count)) = names.lengths.get_mut(&address.0) {
                *count += 1;
            }
        }
        Ok(())
    }

    fn remove(&self, batch: &[(BlockKey, Address)], _: Deadline) -> Result<(), StageError> {
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
    ) -> Result<Room, StageError> {
        Ok(Room::default())
    }

    fn recover(&self) -> Vec<(BlockFacts, Address)> {
        Vec::new()
    }

    fn flush(&self, _deadline: Deadline) -> Result<(), StageError> {
        Ok(())
    }

    fn stats(&self) -> StageStats {
        let used_bytes = self.state().bytes;
        let notes = vec!["keeps names only: nothing is served from here".to_owned()];
        StageStats { used_bytes, capacity_bytes: u64::MAX, notes, ..StageStats::default() }
    }
}
