//! Creates a segment: its file with the next free number, its header, the sync of its name.

use std::io;
use std::path::PathBuf;
use std::sync::{Arc, PoisonError};

use cascade_runtime::{Deadline, fill_random};

use super::background::Background;
use super::segment::{Segment, SegmentState};
use super::write::WriterState;
use super::{SegmentFiles, count};
use crate::DiskError;
use crate::format::{PAGE_BYTES, RandomId, SegmentHeader};
use crate::io::{Buffer, FileIo, OpenMode, PageBuffer, Transfer, TransferKind};

/// Maximum number of successive file names tried for a new segment.
const NAME_TRIES_MAX: u32 = 64;

/// A segment to create.
struct SegmentPlan {
    path: PathBuf,
    header: SegmentHeader,
    /// The directory, if its names are synced at once.
    synced_directory: Option<PathBuf>,
    is_direct: bool,
}

/// A segment whose file exists.
struct NewSegment {
    segment: Arc<Segment>,
    /// Whether its header was written and its name synced.
    written: Result<(), DiskError>,
}

/// A segment that another thread creates.
pub(super) struct Creation(Background<Result<NewSegment, DiskError>>);

impl SegmentPlan {
    /// Creates the file and writes the header. An error if there is no file.
    fn create(self, io: &FileIo, deadline: Deadline) -> Result<NewSegment, DiskError> {
        let Self { path, header, synced_directory, is_direct } = self;
        let (created, allocate_bytes) = (path.clone(), header.capacity_bytes);
        let file = io.call("create", &path, deadline, move |files| {
            files.open(&created, OpenMode::Create { allocate_bytes }, is_direct)
        })?;
        let file = Arc::new(file);
        let mut page = PageBuffer::zeroed(PAGE_BYTES);
        header.encode(page.bytes_mut());
        let buffers = vec![Buffer::Pages(page)];
        let transfer = Transfer::new(TransferKind::Write, Arc::clone(&file), 0, buffers);
        let written = io
            .transfer_one(transfer, deadline)
            .map_err(|source| DiskError::from_io("write", &path, source))
            .and_then(|()| match synced_directory {
                // `sync_active` syncs the directory later.
                None => Ok(()),
                Some(directory) => io.sync_directory(&directory, deadline),
            });
        let state = SegmentState::empty(allocate_bytes);
        let segment = Segment::new(header.number, header.segment_id, path, file, state);
        Ok(NewSegment { segment: Arc::new(segment), written })
    }
}

impl SegmentFiles {
    /// Creates the next segment's file and writes its header. Skips a number if another file has
    /// its name.
    pub(super) fn create_segment(
        &self,
        writer: &mut WriterState,
        allocate_bytes: u64,
        deadline: Deadline,
    ) -> Result<Arc<Segment>, DiskError> {
        let mut tries = 0;
        let created = loop {
            let plan = self.plan_segment(writer, allocate_bytes)?;
            tries += 1;
            match plan.create(&self.io, deadline) {
                Err(error) if is_taken(&error) && tries < NAME_TRIES_MAX => {
                    self.report_taken(&error);
                }
                created => break created?,
            }
        };
        let NewSegment { segment, written } = created;
        self.add_segment(&segment);
        written.inspect_err(|_| self.close_failed(writer, &segment)).map(|()| segment)
    }

    /// Begins to create the next segment on another thread, if there is room for a whole one beside
    /// the reserve. [`Self::finish_create`] waits for it.
    pub(super) fn begin_create(
        &self,
        writer: &mut WriterState,
        deadline: Deadline,
    ) -> Option<Creation> {
        let segment_bytes = self.capacity.segment_bytes();
        self.check_capacity(0, 2 * segment_bytes, 0).ok()?;
        let plan = self.plan_segment(writer, segment_bytes).ok()?;
        let io = self.io.clone();
        Background::start(&self.io, move || plan.create(&io, deadline)).map(Creation)
    }

    /// Waits for a segment that is being created; it is then the next one to write. A failure has
    /// no effect but a number that is not used: the segment is created when it is needed.
    pub(super) fn finish_create(
        &self,
        writer: &mut WriterState,
        creation: Creation,
        deadline: Deadline,
    ) {
        match creation.0.wait(deadline, self.io.clock.as_ref()) {
            Some(Ok(NewSegment { segment, written })) => {
                self.add_segment(&segment);
                // Its header: a flush may come before it is written.
                writer.unsynced.push(Arc::clone(&segment));
                if written.is_ok() {
                    writer.next = Some(segment);
                } else {
                    count(&self.counters.segments_failed, 1);
                }
            }
            Some(Err(error)) if is_taken(&error) => self.report_taken(&error),
            // After a time-out the file may still be created, with a number that is used up.
            Some(Err(_)) | None => {}
        }
    }

    /// Chooses the number and the ID of the next segment.
    fn plan_segment(
        &self,
        writer: &mut WriterState,
        allocate_bytes: u64,
    ) -> Result<SegmentPlan, DiskError> {
        // Each attempt uses up a number. A creation that timed out may still happen later, and an
        // address must never refer to two files.
        let number = writer.next_number;
        let path = self.segment_path(number);
        // `u32::MAX` is reserved, and an earlier number may be in use.
        writer.next_number = number.checked_add(1).ok_or_else(|| {
            let why = "all segment numbers are used; choose an empty directory";
            DiskError::from_io("create", &path, io::Error::other(why))
        })?;
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
        let synced_directory = self.config.durable.then(|| self.config.directory.clone());
        Ok(SegmentPlan { path, header, synced_directory, is_direct: self.is_direct })
    }

    /// Adds a new segment, also if its header was not written: the file exists, so its bytes count.
    fn add_segment(&self, segment: &Arc<Segment>) {
        let mut segments = self.segments.write().unwrap_or_else(PoisonError::into_inner);
        segments.insert(segment.number, Arc::clone(segment));
    }

    fn report_taken(&self, error: &DiskError) {
        if let DiskError::Io { path, .. } = error {
            let path = path.display();
            self.problems.add(format!("{path}: not a file of this writer; it is not touched"));
        }
    }
}

/// Whether another file has the name.
fn is_taken(error: &DiskError) -> bool {
    let DiskError::Io { source, operation, .. } = error else { return false };
    *operation == "create" && source.kind() == io::ErrorKind::AlreadyExists
}
