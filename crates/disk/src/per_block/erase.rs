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
        let found = files_below(&self.io, &blocks, deadline, |path| {
            has_extension(path, &["block", "tmp"])
        })?;
        *self.table() = BlockFileTable::default();
        let mut erased = Erasure::default();
        let mut directories: Vec<_> =
            found.iter().filter_map(|path| path.parent().map(ToOwned::to_owned)).collect();
        let remaining = erased.erase(&self.io, found, deadline);
        directories.sort_unstable();
        directories.dedup();
        for directory in directories {
            erased.sync(&self.io, &directory, deadline);
        }
        let directory = &self.config.directory;
        erased.erase_manifests(&self.io, directory, &remaining, deadline);
        Ok(erased.report)
    }
}
