//! What a flush reports: syncs that failed, and segments whose files somebody else removed.

use std::io;
use std::sync::{Arc, PoisonError};

use cascade_runtime::Deadline;

use super::segment::Segment;
use super::write::{SYNC, WriterState};
use super::{SegmentFiles, count};
use crate::DiskError;
use crate::place::Place as _;

impl WriterState {
    /// Keeps the error of a sync that no flush made: the next flush fails with it. Other errors
    /// leave the blocks to the next sync.
    pub(super) fn note_failed_sync(&mut self, error: &DiskError) {
        if matches!(error, DiskError::Io { operation: SYNC, .. }) {
            self.failed_sync = Some(error.clone());
        }
    }
}

/// Syncs everything written so far. Fails, too, if an earlier sync has failed and no flush has
/// reported it: what it has lost, no later one can save.
pub(super) fn sync_for_flush(
    files: &SegmentFiles,
    writer: &mut WriterState,
    deadline: Deadline,
) -> Result<(), DiskError> {
    // First: its sync may fail.
    files.wait_for_seals(writer, deadline)?;
    let earlier = writer.failed_sync.take();
    let synced = files.sync_active(writer, deadline);
    earlier.map_or(synced, Err)
}

/// Forgets the segments whose files have no name any more: what a flush reports as written must
/// be there after a restart. Until then, their blocks could be read and written as before. The
/// caller has locked the reclaims.
///
/// # Errors
/// If there is such a segment: its blocks are lost. The next call does not report it again.
pub(super) fn forget_removed(
    files: &SegmentFiles,
    writer: &mut WriterState,
    deadline: Deadline,
) -> Result<(), DiskError> {
    let segments = files.all_segments();
    let handles: Vec<_> = segments.iter().map(|segment| Arc::clone(&segment.file)).collect();
    let have_names = files.io.call("check", &files.config.directory, deadline, move |all| {
        handles.iter().map(|file| all.has_name(file)).collect::<io::Result<Vec<bool>>>()
    })?;
    let removed = segments.iter().zip(have_names).filter(|(_, has_name)| !has_name);
    let mut outcome = Ok(());
    for (segment, _) in removed {
        forget_segment(files, writer, segment);
        count(&files.counters.structures_damaged, 1);
        let path = segment.path.display();
        files.problems.add(format!("{path} was removed while it was in use; its blocks are lost"));
        let source = io::Error::other("the file was removed while it was in use");
        outcome = Err(DiskError::from_io(SYNC, &segment.path, source));
    }
    outcome
}

/// Removes a segment from memory. Its blocks are gone for all later calls.
pub(super) fn forget_segment(
    files: &SegmentFiles,
    writer: &mut WriterState,
    segment: &Arc<Segment>,
) {
    let is_other = |other: &Arc<Segment>| !Arc::ptr_eq(other, segment);
    writer.active = writer.active.take().filter(is_other);
    writer.next = writer.next.take().filter(is_other);
    writer.unsynced.retain(is_other);
    writer.sealing.retain(|sealing| is_other(&sealing.segment));
    files.segments.write().unwrap_or_else(PoisonError::into_inner).remove(&segment.number);
    files.aliases().retain(|address, _| address.segment() != segment.number);
}
