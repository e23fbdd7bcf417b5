//! Erases every block file below the directory, of all writers, and the manifests.

use cascade_runtime::Deadline;

use super::PerBlockFiles;
use super::table::BlockFileTable;
use crate::erase::{Erasure, files_below};
use crate::manifests::has_extension;
use crate::{DiskError, EraseOutcome};

impl PerBlockFiles {
    pub(super) fn erase_all(&self, deadline: Deadline) -> Result<EraseOutcome, DiskError> {
        let timed_out = || DiskError::Timeout {
            operation: "waiting for earlier writes",
            path: self.config.directory.clone(),
        };
        let clock = self.io.clock.as_ref();
        // With both locks this process neither renames nor removes a file meanwhile.
        let _reclaims = self.reclaim_lock.lock(deadline, clock).ok_or_else(timed_out)?;
        let _renames = self.rename_lock.lock(deadline, clock).ok_or_else(timed_out)?;
        let blocks = self.config.directory.join("blocks");
        let (found, mut directories) = files_below(&self.io, &blocks, deadline, |path| {
            has_extension(path, &["block", "tmp"])
        })?;
        *self.table() = BlockFileTable::default();
        let mut erased = Erasure::default();
        let mut are_gone = erased.erase(&self.io, found, deadline).is_empty();
        // Also those without files: an earlier removal may not be on stable storage.
        directories.sort_unstable();
        for directory in directories {
            are_gone &= erased.sync(&self.io, &directory, deadline);
        }
        erased.erase_manifests(&self.io, &self.config.directory, are_gone, deadline);
        Ok(erased.report)
    }
}
