//! Erases all segments of this writer, its checkpoint and the manifests.

use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};

use cascade_block::with_causes;
use cascade_runtime::Deadline;

use super::SegmentFiles;
use super::recovery::checkpoint_path;
use super::segment::{Segment, SegmentState};
use super::write::WriterState;
use crate::erase::Erasure;
use crate::format::Checkpoint;
use crate::manifests::has_extension;
use crate::scan::segment_name;
use crate::{DiskError, EraseOutcome};

impl SegmentFiles {
    /// Overwrites and removes every file of the tier: segments, checkpoint, manifests. The tier is
    /// empty and usable afterwards. The result lists files that could not be erased.
    pub(super) fn erase_all(&self, deadline: Deadline) -> Result<EraseOutcome, DiskError> {
        // With both locks no segment is created after the files are listed.
        let mut unreported = self.lock(&self.reclaim_lock, deadline)?;
        let mut writer = self.lock(&self.writer, deadline)?;
        self.wait_for_seals(&mut writer, deadline)?;
        let directory = &self.config.directory;
        let found = self.files_beside(deadline)?;
        let mut erased = Erasure::default();
        let (own, others): (Vec<_>, Vec<_>) = found.into_iter().partition(|path| self.owns(path));
        let (mut segments, rest): (Vec<_>, Vec<_>) =
            own.into_iter().partition(|path| segment_name(path).is_some());
        // The old checkpoint's bytes are overwritten, too, and the segments have its content.
        let mut remaining = erased.erase(&self.io, rest, deadline);
        let is_marked = remaining.is_empty() && self.write_mark(&writer, deadline)?;
        // From here on reads return `Gone`, and failures are reported per file.
        writer.active = None;
        writer.next = None;
        writer.unsynced.clear();
        writer.other_copies.clear();
        let in_memory =
            std::mem::take(&mut *self.segments.write().unwrap_or_else(PoisonError::into_inner));
        self.moved_addresses.write().unwrap_or_else(PoisonError::into_inner).clear();
        unreported.clear();
        self.aliases().clear();
        for path in &others {
            let why = std::io::Error::other("it belongs to another writer of this directory");
            erased.add_remaining(path, "not removed", &why);
        }
        // The oldest first: without a mark, a crash leaves the newest blocks and no earlier ones.
        segments.sort_unstable_by_key(|path| segment_name(path).map(|(_, number)| number));
        remaining.extend(erased.erase(&self.io, segments, deadline));
        // A file that remains uses space until it is reclaimed or erased. It gets an empty segment,
        // so that its size counts and no block in it can be read.
        for (number, segment) in in_memory {
            if remaining.contains(&segment.path) {
                let state = SegmentState::empty(segment.state().file_bytes);
                let (id, path) = (segment.id, segment.path.clone());
                let left = Segment::new(number, id, path, Arc::clone(&segment.file), state);
                let mut segments = self.segments.write().unwrap_or_else(PoisonError::into_inner);
                segments.insert(number, Arc::new(left));
            }
        }
        // The mark stays while a segment may come back.
        let mut are_gone = remaining.is_empty() && erased.sync(&self.io, directory, deadline);
        if is_marked && are_gone {
            let mark = vec![checkpoint_path(&self.config)];
            are_gone = erased.erase(&self.io, mark, deadline).is_empty();
        }
        // Writers share the manifests.
        are_gone &= others.iter().all(|path| segment_name(path).is_none());
        erased.erase_manifests(&self.io, directory, are_gone, deadline);
        Ok(erased.report)
    }

    /// Writes a checkpoint without segments and entries. An opening then ignores everything that
    /// was written before it: after a crash between two removals, a segment that is still there
    /// would bring back earlier blocks of keys whose later ones are gone.
    ///
    /// Returns whether it was written. A failure that is not a time-out does not end the erase,
    /// because a full device has no room for it.
    fn write_mark(&self, writer: &WriterState, deadline: Deadline) -> Result<bool, DiskError> {
        let mark = Checkpoint {
            store_id: writer.store_id,
            next_sequence: writer.next_sequence,
            next_number: writer.next_number,
            segments: Vec::new(),
            entries: Vec::new(),
        };
        let path = checkpoint_path(&self.config);
        let (target, bytes) = (path.clone(), mark.encode());
        let written =
            self.io.call("write", &path, deadline, move |files| files.replace(&target, &bytes));
        match written {
            Ok(()) => Ok(true),
            // It may still be written.
            Err(error @ DiskError::Timeout { .. }) => Err(error),
            Err(error) => {
                self.problems.add(format!(
                    "{}; a crash during the erase may leave its last blocks",
                    with_causes(&error)
                ));
                Ok(false)
            }
        }
    }

    /// Lists the tier's files in the directory itself. Subdirectories belong to other stores.
    fn files_beside(&self, deadline: Deadline) -> Result<Vec<PathBuf>, DiskError> {
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
