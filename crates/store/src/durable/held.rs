//! Pieces of the pool that other processes hold, as the ledger records them.

use cascade_tier::StoreError;

use crate::Store;
use crate::durable::ledger::{HeldId, HeldPiece, Process};

impl Store {
    /// Records in the ledger that another process may access pieces of the pool. If this process
    /// dies, the next run does not reuse these pieces while the other process lives. Records all
    /// pieces or none; on an error, do not pass the pieces to the process. Cheap, and always `Ok`
    /// without a `pool_file`.
    ///
    /// # Errors
    /// [`StoreError::Limit`] if the process would exceed its share of the ledger: a process may
    /// hold as many pieces as remain free for the others.
    pub fn record_held(
        &self,
        pieces: &[HeldPiece],
        process: Process,
        ids: &mut Vec<HeldId>,
    ) -> Result<(), StoreError> {
        if let Some(warm) = &self.core().warm {
            return warm.holders.record(pieces, process, ids);
        }
        ids.extend(pieces.iter().map(|_| HeldId::none()));
        Ok(())
    }

    /// Removes records of [`Store::record_held`], because the process has released the pieces. Must
    /// be called before the pieces are freed.
    pub fn release_held(&self, ids: impl IntoIterator<Item = HeldId>) {
        if let Some(warm) = &self.core().warm {
            warm.holders.release_ids(ids);
        }
    }

    /// Releases all memory of an earlier run that a process holds, because it no longer accesses
    /// it. Returns the number of pieces. Without this call they are released when the process ends.
    pub fn release_process(&self, pid: u32) -> usize {
        let core = self.core();
        let released = core.warm.as_ref().map_or(0, |warm| warm.holders.release_process(pid));
        if released > 0 {
            core.notify_changed();
        }
        released
    }
}
