//! Erases all segments of this writer, its checkpoint and the manifests.

use std::path::Path;
use std::sync::{Arc, PoisonError};

use cascade_runtime::Deadline;

use super::SegmentFiles;
use super::segment::{Segment, SegmentState};
use crate::DiskError;
use crate::erase::{FileEraseReport, has_extension};
use crate::scan::segment_name;

impl SegmentFiles {
    pub(super) fn erase_all(&self, deadline: Deadline) -> Result<FileEraseReport, DiskError> {
        // With both locks no segment is created after the files are listed.
        let mut unreported = self.lock(&self.reclaim_lock, deadline)?;
        let mut writer = self.lock(&self.writer, deadline)?;
        let directory = &self.config.directory;
        let found = self.files_beside(deadline)?;
        // From here on reads return `Gone`, and failures are reported per file.
        writer.active = None;
        writer.unsynced.clear();
        writer.failed_copies.clear();
        let segments =
            std::mem::take(&mut *self.segments.write().unwrap_or_else(PoisonError::into_inner));
        self.moved_addresses.write().unwrap_or_else(PoisonError::into_inner).clear();
        unreported.clear();
        self.aliases().clear();
        let mut erased = FileEraseReport::default();
        let (own, others): (Vec<_>, Vec<_>) = found.into_iter().partition(|path| self.owns(path));
        for path in others {
            let why = std::io::Error::other("it belongs to another writer of this directory");
            erased.add_remaining(path, "not removed", &why);
        }
        let remaining = erased.erase(&self.io, own, deadline);
        // A file that remains uses space until it is reclaimed or erased. It gets an empty segment,
        // so that its size counts and no block in it can be read.
        for (number, segment) in segments {
            if remaining.contains(&segment.path) {
                let state = SegmentState::empty(segment.state().file_bytes);
                let (id, path) = (segment.id, segment.path.clone());
                let left = Segment::new(number, id, path, Arc::clone(&segment.file), state);
                let mut segments = self.segments.write().unwrap_or_else(PoisonError::into_inner);
                segments.insert(number, Arc::new(left));
            }
        }
        erased.erase_manifests(&self.io, directory, &remaining, deadline);
        Ok(erased)
    }

    /// Lists the tier's files in the directory itself. Subdirectories belong to other stores.
    fn files_beside(&self, deadline: Deadline) -> Result<Vec<std::path::PathBuf>, DiskError> {
        let is_ours = |path: &Path| has_extension(path, &["segment", "checkpoint", "probe", "tmp"]);
        let directory = self.config.directory.clone();
        let found = self
            .io
            .call("list", &self.config.directory, deadline, move |files| files.list(&directory))?;
        Ok(found.into_iter().filter(|path| is_ours(path)).collect())
    }

    fn owns(&self, path: &Path) -> bool {
        let writer = self.config.writer.as_str();
        if let Some((name, _)) = segment_name(path) {
            return name == writer;
        }
        // Checkpoint and probe are named `<writer>.<kind>`. A writer's name contains no point.
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        name.split('.').next() == Some(writer)
    }
}
