//! Reads block files: opens some at once, and verifies each while later reads are in flight.

use std::collections::VecDeque;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use cascade_block::{BlockKey, checksum};
use cascade_runtime::Deadline;

use super::PerBlockFiles;
use super::block_file::{address_of, decode_header};
use crate::alignment::{read_buffers, slab_from_read};
use crate::error::is_misplaced;
use crate::format::PAGE_BYTES;
use crate::io::{
    Buffer, FileHandle, OpenMode, PageBuffer, Transfer, TransferKind, TransferOutcome,
    TransferQueue,
};
use crate::{Address, DiskError, Load, LoadOutcome};
use cascade_tier::tier::{LoadQueue, TierError};

/// Maximum number of files that are opened in one call, because each call is handed to a worker
/// thread.
const OPENS_PER_CALL: usize = 64;

/// The block that a read in flight loads.
struct PendingRead {
    key: BlockKey,
    address: Address,
    slab_bytes: usize,
}

/// The reads of one call.
struct FileReads<'a> {
    files: &'a PerBlockFiles,
    queue: &'a mut dyn LoadQueue,
    deadline: Deadline,
    /// Reads of opened files that are not started yet.
    opened: VecDeque<(usize, Transfer)>,
    /// By the number of the block.
    pending: Vec<Option<PendingRead>>,
}

impl TransferQueue for FileReads<'_> {
    fn next_transfer(&mut self) -> Option<(usize, Transfer)> {
        loop {
            if let Some(opened) = self.opened.pop_front() {
                return Some(opened);
            }
            let mut requests = Vec::new();
            while requests.len() < OPENS_PER_CALL
                && let Some(request) = self.queue.next_load()
            {
                requests.push(request);
            }
            if requests.is_empty() {
                return None;
            }
            self.open(requests);
        }
    }

    fn complete(&mut self, number: usize, outcome: TransferOutcome) {
        let pending = self.pending[number].take().expect("a transfer completes once");
        let outcome = self.files.finish_read(&pending, outcome);
        self.queue.ended(number, outcome);
    }

    fn idle(&mut self) -> bool {
        self.queue.idle()
    }
}

impl FileReads<'_> {
    /// Opens the files of some blocks and prepares their reads.
    fn open(&mut self, requests: Vec<(usize, Load)>) {
        let sources: Vec<PathBuf> =
            requests.iter().map(|(_, request)| self.files.path(&request.key)).collect();
        let (io, direct) = (&self.files.io, self.files.is_direct);
        let directory = &self.files.config.directory;
        let opened = io.call_reading("open", directory, self.deadline, move |files| {
            let open = |path: &PathBuf| files.open(path, OpenMode::Read, direct);
            Ok(sources.iter().map(open).collect::<Vec<_>>())
        });
        let opened = match opened {
            Ok(opened) => opened,
            Err(error) => {
                for (number, _) in requests {
                    self.queue.ended(number, LoadOutcome::Failed(error.clone().into()));
                }
                return;
            }
        };
        for ((number, request), file) in requests.into_iter().zip(opened) {
            if let Err(outcome) = self.prepare(number, request, file) {
                self.queue.ended(number, outcome);
            }
        }
    }

    fn prepare(
        &mut self,
        number: usize,
        request: Load,
        file: io::Result<FileHandle>,
    ) -> Result<(), LoadOutcome> {
        let Load { key, address, slab } = request;
        // After the opening: a removal before it hides the file, one after it does not matter.
        if self.files.table().is_hidden(&key, address) {
            return Err(LoadOutcome::Gone);
        }
        let file = file.map_err(|error| match error {
            error if error.kind() == io::ErrorKind::NotFound => LoadOutcome::Gone,
            error if is_misplaced(&error) => self.files.damaged(),
            error => LoadOutcome::Failed(
                DiskError::from_io("open", &self.files.path(&key), error).into(),
            ),
        })?;
        if number >= self.pending.len() {
            self.pending.resize_with(number + 1, || None);
        }
        self.pending[number] = Some(PendingRead { key, address, slab_bytes: slab.len() });
        let slab = slab.into_host().map_err(|_| LoadOutcome::Failed(TierError::NotHostMemory))?;
        let mut buffers = vec![Buffer::Pages(PageBuffer::zeroed(PAGE_BYTES))];
        buffers.extend(read_buffers(slab));
        // One transfer for header and payload: the header tells whether the payload is that of the
        // address.
        let transfer = Transfer::new(TransferKind::Read, Arc::new(file), 0, buffers);
        self.opened.push_back((number, transfer));
        Ok(())
    }
}

impl PerBlockFiles {
    pub(super) fn read_files(&self, queue: &mut dyn LoadQueue, deadline: Deadline) {
        let (opened, pending) = (VecDeque::new(), Vec::new());
        let mut reads = FileReads { files: self, queue, deadline, opened, pending };
        self.io.run(&mut reads, deadline);
        // The engine started none of these before the deadline.
        for (number, _) in std::mem::take(&mut reads.opened) {
            let pending = reads.pending[number].take().expect("it was prepared");
            let path = self.path(&pending.key);
            let late = DiskError::Timeout { operation: "read", path };
            reads.queue.ended(number, LoadOutcome::Failed(late.into()));
        }
    }

    fn finish_read(
        &self,
        &PendingRead { ref key, address, slab_bytes }: &PendingRead,
        TransferOutcome { transfer, result }: TransferOutcome,
    ) -> LoadOutcome {
        let is_short = match &result {
            Ok(_bytes) => false,
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => true,
            Err(_) => {
                let error = result.expect_err("matched above");
                return LoadOutcome::Failed(
                    DiskError::from_io("read", &self.path(key), error).into(),
                );
            }
        };
        let mut transfer = transfer.expect("a completed transfer is returned");
        let header = transfer.buffers.remove(0);
        // Also after a short read: if the header is complete, it tells which write the file is of.
        let Some(entry) = decode_header(header.bytes(), key) else {
            return self.damaged();
        };
        // An intact file of another write replaced the requested block.
        if address_of(&entry) != address {
            return LoadOutcome::Gone;
        }
        if entry.meta.bytes as usize != slab_bytes {
            return LoadOutcome::Failed(
                DiskError::LengthMismatch {
                    payload_bytes: u64::from(entry.meta.bytes),
                    slab_bytes: slab_bytes as u64,
                }
                .into(),
            );
        }
        // Only after the nonce was compared: a short file of another write is `Gone`, not damage.
        if is_short {
            return self.damaged();
        }
        let slab = slab_from_read(transfer, slab_bytes);
        if checksum(&slab) != entry.payload_checksum {
            return self.damaged();
        }
        self.count_read(slab_bytes as u64);
        LoadOutcome::Hit(slab.into_slab())
    }
}
