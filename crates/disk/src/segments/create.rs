//! Creates a segment: its file with the next free number, its header, the sync of its name.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use cascade_runtime::{Deadline, fill_random};

use super::SegmentFiles;
use super::segment::{Segment, SegmentState};
use super::write::WriterState;
use crate::DiskError;
use crate::format::{PAGE_BYTES, RandomId, SegmentHeader};
use crate::io::{Buffer, FileHandle, OpenMode, PageBuffer, Transfer, TransferKind};

/// Maximum number of successive file names tried for a new segment.
const NAME_TRIES_MAX: u32 = 64;

impl SegmentFiles {
    /// Creates the next segment's file and writes its header.
    pub(super) fn create_segment(
        &self,
        writer: &mut WriterState,
        allocate_bytes: u64,
        deadline: Deadline,
    ) -> Result<Arc<Segment>, DiskError> {
        let (number, path, file) = self.create_segment_file(writer, allocate_bytes, deadline)?;
        let file = Arc::new(file);
        let mut segment_id = RandomId::default();
        fill_random(&mut segment_id)
            .map_err(|error| DiskError::from_io("choose a segment ID for", &path, error))?;
        let header = SegmentHeader {
            segment_id,
            store_id: writer.store_id,
            number,
            writer: self.config.writer.clone(),
            capacity_bytes: allocate_bytes,
            created_unix_ms: self.io.clock.unix_ms(),
        };
        let mut page = PageBuffer::zeroed(PAGE_BYTES);
        header.encode(page.bytes_mut());
        let buffers = vec![Buffer::Pages(page)];
        let transfer = Transfer::new(TransferKind::Write, Arc::clone(&file), 0, buffers);
        let directory = self.config.directory.clone();
        let written = self
            .run_transfer(transfer, deadline)
            .map_err(|source| DiskError::from_io("write", &path, source))
            .and_then(|()| {
                if !self.config.durable {
                    // `sync_active` syncs the directory later.
                    return Ok(());
                }
                self.io.call("sync", &path, deadline, move |files| files.sync_directory(&directory))
            });
        // Added even if the header was not written: the file exists, so its bytes count.
        let state = SegmentState::empty(allocate_bytes);
        let segment = Arc::new(Segment::new(number, header.segment_id, path, file, state));
        self.segments
            .write()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
            .insert(number, Arc::clone(&segment));
        written.inspect_err(|_| self.close_failed(writer, &segment)).map(|()| segment)
    }

    /// Creates the segment's file. Skips a number if another file has its name.
    fn create_segment_file(
        &self,
        writer: &mut WriterState,
        allocate_bytes: u64,
        deadline: Deadline,
    ) -> Result<(u32, PathBuf, FileHandle), DiskError> {
        let mut tries = 0;
        loop {
            // Each attempt uses up a number. A creation that timed out may still happen later, and
            // an address must never refer to two files.
            let number = writer.next_number;
            let path = self.segment_path(number);
            // `u32::MAX` is reserved, and an earlier number may be in use.
            writer.next_number = number.checked_add(1).ok_or_else(|| {
                let why = "all segment numbers are used; choose an empty directory";
                DiskError::from_io("create", &path, io::Error::other(why))
            })?;
            let (create, direct) = (path.clone(), self.is_direct);
            let created = self.io.call("create", &path, deadline, move |files| {
                files.open(&create, OpenMode::Create { allocate_bytes }, direct)
            });
            tries += 1;
            match created {
                Ok(file) => return Ok((number, path, file)),
                Err(DiskError::Io { source, .. })
                    if source.kind() == io::ErrorKind::AlreadyExists && tries < NAME_TRIES_MAX =>
                {
                    let path = path.display();
                    self.problems
                        .add(format!("{path}: not a file of this writer; it is not touched"));
                }
                Err(error) => return Err(error),
            }
        }
    }
}
