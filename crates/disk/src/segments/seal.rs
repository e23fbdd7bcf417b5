//! Seals segments: writes the footer, truncates the file to it and syncs both if need be.

use std::sync::Arc;

use cascade_block::checksum;
use cascade_runtime::Deadline;

use super::background::{Background, Sealing};
use super::segment::{EntryLocation, Segment};
use super::write::{SYNC, WriterState};
use super::{SegmentFiles, count};
use crate::DiskError;
use crate::format::{ENTRY_BYTES, PAGE_BYTES, encode_footer};
use crate::io::{Buffer, FileIo, PageBuffer, Transfer, TransferKind};

impl SegmentFiles {
    /// Begins to seal the active segment on another thread, while the next one is created and
    /// written, also by later calls. [`Self::finish_seals`] waits for it.
    pub(super) fn begin_seal(&self, writer: &mut WriterState, deadline: Deadline) {
        self.finish_seals(writer, deadline);
        let Some(segment) = writer.active.take() else { return };
        let (io, full) = (self.io.clone(), Arc::clone(&segment));
        let needs_sync = self.needs_sync_of_seal();
        let started = self.held_lock().ok().and_then(|lock| {
            Background::start(&self.io, move || {
                let sealed = seal_segment(&io, &full, needs_sync, deadline);
                // Until here: another process must not open a segment that is being sealed.
                drop(lock);
                sealed
            })
        });
        if let Some(sealed) = started {
            writer.sealing.push(Sealing { segment, sealed, deadline });
        } else {
            // There is no thread for it, or the tier was closed during this call.
            writer.active = Some(segment);
            self.seal(writer, deadline);
        }
    }

    /// Waits for the segments that are being sealed. `false` if one is not sealed by the deadline:
    /// a later call waits for it, because the seal may still write to it, and because only the seal
    /// learns of the bytes that its own sync loses.
    pub(super) fn finish_seals(&self, writer: &mut WriterState, deadline: Deadline) -> bool {
        let clock = self.io.clock.as_ref();
        let sealing = std::mem::take(&mut writer.sealing).into_iter();
        let (ended, running): (Vec<_>, Vec<_>) =
            sealing.partition(|sealing| sealing.sealed.wait_for_end(deadline, clock));
        writer.sealing = running;
        for Sealing { segment, sealed, .. } in ended {
            let sealed = sealed.wait(deadline, clock);
            if !matches!(sealed, Some(Ok(()))) {
                // Its entries stay in memory. The next sync covers it, the next opening scans it.
                count(&self.counters.segments_failed, 1);
                writer.unsynced.push(segment);
            }
            if let Some(Err(error)) = sealed {
                writer.note_failed_sync(&error);
            }
        }
        writer.sealing.is_empty()
    }

    /// As [`Self::finish_seals`], with an error if a segment is not sealed by the deadline.
    pub(super) fn wait_for_seals(
        &self,
        writer: &mut WriterState,
        deadline: Deadline,
    ) -> Result<(), DiskError> {
        if self.finish_seals(writer, deadline) {
            return Ok(());
        }
        let path = self.config.directory.clone();
        Err(DiskError::Timeout { operation: "waiting for the seal of a segment", path })
    }

    /// Whether the seal has to sync a segment. In a durable tier every entry was synced when it was
    /// written, and an opening that does not find the footer has the same entries from the frames.
    fn needs_sync_of_seal(&self) -> bool {
        !self.config.durable
    }

    /// Seals the active segment.
    pub(super) fn seal(&self, writer: &mut WriterState, deadline: Deadline) {
        let Some(segment) = writer.active.take() else { return };
        if let Err(error) = seal_segment(&self.io, &segment, self.needs_sync_of_seal(), deadline) {
            // Its entries stay in memory. The next opening scans it.
            self.close_failed(writer, &segment);
            writer.note_failed_sync(&error);
        }
    }
}

/// Writes the footer of a segment, if its entries are in memory, and truncates its file. No entry
/// is added meanwhile.
pub(super) fn seal_segment(
    io: &FileIo,
    segment: &Segment,
    needs_sync: bool,
    deadline: Deadline,
) -> Result<(), DiskError> {
    let (end_page, count, footer) = {
        let state = segment.state();
        let EntryLocation::Memory(entries) = &state.entry_location else { return Ok(()) };
        let footer = encode_footer(entries, segment.id, segment.number, state.end_page);
        (state.end_page, state.entry_count(), footer)
    };
    let offset = u64::from(end_page) * PAGE_BYTES as u64;
    let file_bytes = offset + footer.len() as u64;
    let entries_checksum = checksum(&footer[..count * ENTRY_BYTES]);
    let buffers = vec![Buffer::Pages(PageBuffer::copied(&footer))];
    let file = Arc::clone(&segment.file);
    let write = Transfer::new(TransferKind::Write, Arc::clone(&file), offset, buffers);
    let failed = |source| DiskError::from_io("seal", &segment.path, source);
    // The order matters: `file_bytes` in memory changes only after the footer is written, the file
    // is truncated to it and both are synced if they have to be. After a failure before that the
    // entries in memory stay valid.
    io.transfer_one(write, deadline).map_err(failed)?;
    let truncated = Arc::clone(&file);
    io.call("truncate", &segment.path, deadline, move |files| {
        files.truncate(&truncated, file_bytes)
    })?;
    if needs_sync {
        let failed = |source| DiskError::from_io(SYNC, &segment.path, source);
        io.transfer_one(Transfer::sync(file), deadline).map_err(failed)?;
    }
    let mut state = segment.state_mut();
    state.file_bytes = file_bytes;
    state.entry_location = EntryLocation::Footer {
        page: end_page,
        count: u32::try_from(count).expect("a segment holds fewer entries than pages"),
        checksum: entries_checksum,
    };
    Ok(())
}
