//! Reconstructs the entries of a segment with a damaged footer from its frames and the checkpoint.
//!
//! A footer is read when its segment is reclaimed and when a checkpoint is written. A damaged
//! footer costs one scan and no data: the live blocks are known in memory, each block has its own
//! checksum, and the frames repeat every entry.

use std::collections::HashMap;
use std::sync::Arc;

use cascade_runtime::Deadline;

use super::recovery::load_checkpoint;
use super::segment::{BlockSlot, EntriesError, EntryLocation, Segment};
use super::{SegmentFiles, count};
use crate::DiskError;
use crate::format::{EntryKind, RecordEntry, encode_entries};
use crate::place::Place as _;
use crate::scan::{FileSource, read_frames};

impl SegmentFiles {
    /// All entries of a segment that can be read. The caller holds `reclaim_lock`.
    pub(super) fn entries_of(
        &self,
        segment: &Arc<Segment>,
        deadline: Deadline,
    ) -> Result<Vec<RecordEntry>, DiskError> {
        let why = match segment.entries(&self.io, deadline) {
            Ok(entries) => return Ok(entries),
            Err(EntriesError::Failed(error)) => return Err(error),
            Err(EntriesError::Damaged(why)) => why,
        };
        let mut entries = self.read_frame_entries(segment, deadline)?;
        let undescribed = self.add_from_checkpoint(segment, &mut entries, deadline)?;
        // Entries of the checkpoint were added at the end.
        entries.sort_by_key(|entry| entry.sequence);
        // Kept in memory, so that the damage is counted once and the next call needs no scan.
        segment.state_mut().entry_location = EntryLocation::Memory(encode_entries(&entries));
        count(&self.counters.structures_damaged, 1);
        let path = segment.path.display();
        self.problems.add(format!(
            "{path}: its footer is damaged ({why}); {} entries were read from its frames; \
             {undescribed} blocks without an entry will be dropped when it is reclaimed",
            entries.len()
        ));
        Ok(entries)
    }

    fn read_frame_entries(
        &self,
        segment: &Arc<Segment>,
        deadline: Deadline,
    ) -> Result<Vec<RecordEntry>, DiskError> {
        let (file, number, id) = (Arc::clone(&segment.file), segment.number, segment.id);
        let end_page = segment.state().end_page;
        let content = self.io.call("read", &segment.path, deadline, move |files| {
            read_frames(&FileSource { files, file: &file }, number, id, end_page)
        })?;
        Ok(content.entries)
    }

    /// Adds entries of the last checkpoint for live blocks with damaged frames. Returns the number
    /// of live blocks without any entry.
    fn add_from_checkpoint(
        &self,
        segment: &Segment,
        entries: &mut Vec<RecordEntry>,
        deadline: Deadline,
    ) -> Result<usize, DiskError> {
        let mut missing: HashMap<u32, BlockSlot> =
            segment.state().live_slots().map(|slot| (slot.page(), *slot)).collect();
        for entry in entries.iter().filter(|entry| entry.kind == EntryKind::Block) {
            missing.remove(&entry.address.page());
        }
        if missing.is_empty() {
            return Ok(0);
        }
        let checkpoint = load_checkpoint(&self.io, &self.config, deadline)?;
        for entry in checkpoint.ok().flatten().into_iter().flat_map(|it| it.entries) {
            // The checkpoint may be that of an earlier file with this number, so an entry must
            // match its slot.
            let is_here = entry.kind == EntryKind::Block
                && entry.address.segment() == segment.number
                && missing
                    .get(&entry.address.page())
                    .is_some_and(|slot| slot.matches_entry(&entry));
            if is_here {
                missing.remove(&entry.address.page());
                entries.push(entry);
            }
        }
        Ok(missing.len())
    }
}
