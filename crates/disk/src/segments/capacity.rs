//! The capacity of a tier, which can change while it is in use, and the size of its next segments.

use std::sync::atomic::{AtomicU64, Ordering};

use cascade_block::with_causes;
use cascade_runtime::Deadline;

use super::SegmentFiles;
use super::write::WriterState;
use crate::{DiskError, FilesConfig};

/// How many bytes the files may use.
///
/// A tier that holds more than its capacity shrinks: its limit is then what the files use and two
/// segments, one to write and the reserve. Each reclaim lowers the limit to that sum. So the tier
/// is at every time a full tier of the size of its limit, which writes and reclaims as any other.
/// Two reclaims without a write between them always lower the limit by a segment.
#[derive(Debug)]
pub(super) struct Capacity {
    /// The size of a segment if the capacity is four of them or more.
    segment_bytes_max: u64,
    configured_bytes: AtomicU64,
    /// The capacity, or more while the tier shrinks.
    limit_bytes: AtomicU64,
}

impl Capacity {
    /// The capacity of a tier whose files use `used_bytes` at opening. The limit is not below
    /// that: an earlier run may have had a larger capacity.
    pub(super) fn new(config: &FilesConfig, used_bytes: u64) -> Self {
        let capacity_bytes = config.capacity_bytes;
        let new = Self {
            segment_bytes_max: config.segment_bytes,
            configured_bytes: AtomicU64::new(capacity_bytes),
            limit_bytes: AtomicU64::new(capacity_bytes),
        };
        // A process that was killed while it used the reserve leaves more than the capacity less a
        // segment. That is no reason to use more than the capacity.
        if used_bytes > capacity_bytes {
            new.limit_bytes.store(u64::MAX, Ordering::Relaxed);
            new.lower_limit(used_bytes);
        }
        new
    }

    /// The capacity that is set.
    pub(super) fn bytes(&self) -> u64 {
        // Relaxed, here and below: the numbers guard no memory. All that must agree are read and
        // written with the writer locked.
        self.configured_bytes.load(Ordering::Relaxed)
    }

    /// How many bytes the files may use now.
    pub(super) fn limit_bytes(&self) -> u64 {
        self.limit_bytes.load(Ordering::Relaxed)
    }

    /// The size of a new segment.
    pub(super) fn segment_bytes(&self) -> u64 {
        FilesConfig::segment_bytes_of(self.segment_bytes_max, self.bytes())
    }

    /// Whether the files use more than the capacity less the reserve, because it was reduced.
    pub(super) fn is_exceeded(&self) -> bool {
        self.limit_bytes() > self.bytes()
    }

    fn set(&self, capacity_bytes: u64, used_bytes: u64) {
        self.configured_bytes.store(capacity_bytes, Ordering::Relaxed);
        self.lower_limit(used_bytes);
    }

    /// Lowers the limit as far as the used bytes and the capacity allow, or raises it to a larger
    /// capacity.
    pub(super) fn lower_limit(&self, used_bytes: u64) {
        let (capacity_bytes, segment_bytes) = (self.bytes(), self.segment_bytes());
        let limit_bytes = if used_bytes.saturating_add(segment_bytes) <= capacity_bytes {
            capacity_bytes
        } else {
            let needed_bytes = used_bytes.saturating_add(2 * segment_bytes);
            self.limit_bytes().min(needed_bytes).max(capacity_bytes)
        };
        self.limit_bytes.store(limit_bytes, Ordering::Relaxed);
    }
}

/// Changes the capacity. What the files use above it is removed by the next reclaims, one segment
/// each; [`Capacity::is_exceeded`] says whether there is more. New segments have the configured
/// size, or a quarter of the capacity if that is less.
///
/// # Errors
/// If the capacity is too small. Nothing changes then, nor if the deadline passes.
pub(super) fn resize(
    files: &SegmentFiles,
    capacity_bytes: u64,
    deadline: Deadline,
) -> Result<(), DiskError> {
    FilesConfig { capacity_bytes, ..files.config.clone() }.check()?;
    // No reclaim runs meanwhile, and no write.
    let _reclaims = files.lock(&files.reclaim_lock, deadline)?;
    let mut writer = files.lock(&files.writer, deadline)?;
    files.wait_for_seals(&mut writer, deadline)?;
    let before = files.capacity.segment_bytes();
    files.capacity.set(capacity_bytes, files.used_bytes());
    if files.capacity.segment_bytes() < before {
        end_long_segments(files, &mut writer, deadline);
        files.capacity.lower_limit(files.used_bytes());
    }
    Ok(())
}

/// Ends the segments that are written now or next, which have the earlier, larger size. They are
/// allocated in full, and no reclaim takes them.
fn end_long_segments(files: &SegmentFiles, writer: &mut WriterState, deadline: Deadline) {
    files.seal(writer, deadline);
    let Some(next) = writer.next.take() else { return };
    if let Err(error) = files.remove_segment(writer, &next, deadline) {
        // It is written as any other, and reclaimed when it is full.
        files.problems.add(with_causes(&error));
        writer.next = Some(next);
    }
}
