//! Reads payloads into their slabs and verifies each while later reads are in flight.

use std::io;
use std::sync::Arc;

use cascade_block::{BlockKey, Checksum, checksum};
use cascade_runtime::Deadline;

use super::segment::{BlockSlot, Segment};
use super::{SegmentFiles, count};
use crate::alignment::{read_buffers, slab_from_read};
use crate::io::{Transfer, TransferKind, TransferOutcome, TransferQueue};
use crate::place::Place as _;
use crate::{Address, DiskError, Load, LoadOutcome};
use cascade_tier::tier::{LoadQueue, TierError};

/// A block whose read is in flight.
#[derive(Debug)]
struct PendingRead {
    segment: Arc<Segment>,
    payload_bytes: usize,
    checksum: Checksum,
}

/// The reads of one call.
struct SegmentReads<'a> {
    files: &'a SegmentFiles,
    queue: &'a mut dyn LoadQueue,
    /// By the number of the block.
    pending: Vec<Option<PendingRead>>,
}

impl TransferQueue for SegmentReads<'_> {
    fn next_transfer(&mut self) -> Option<(usize, Transfer)> {
        loop {
            let (number, request) = self.queue.next_load()?;
            match self.files.start_read(request) {
                Ok((pending, transfer)) => {
                    if number >= self.pending.len() {
                        self.pending.resize_with(number + 1, || None);
                    }
                    self.pending[number] = Some(pending);
                    return Some((number, transfer));
                }
                // A request that fails here needs no I/O, so the loop goes on to the next one.
                Err(outcome) => self.queue.ended(number, outcome),
            }
        }
    }

    fn complete(&mut self, number: usize, finished: TransferOutcome) {
        let pending = self.pending[number].take().expect("a transfer completes once");
        let outcome = self.files.finish_read(&pending, finished);
        self.queue.ended(number, outcome);
    }

    fn idle(&mut self) -> bool {
        self.queue.idle()
    }
}

impl SegmentFiles {
    /// Reads the blocks of a queue into their slabs and checks key, length and checksum, until the
    /// queue is empty or the deadline passes.
    ///
    /// Gives each block that it takes from the queue back once, before it returns. Blocks that it
    /// has not taken by the deadline stay in the queue.
    pub(super) fn read_blocks(&self, queue: &mut dyn LoadQueue, deadline: Deadline) {
        self.io.run(&mut SegmentReads { files: self, queue, pending: Vec::new() }, deadline);
    }

    /// Finds a block and checks everything that can be checked before its bytes are read.
    fn start_read(&self, request: Load) -> Result<(PendingRead, Transfer), LoadOutcome> {
        let Load { address, key, slab } = request;
        // A reclaim that removes the segment meanwhile does not affect this read: it keeps the
        // file open.
        let found =
            self.find_moved(address, |at| self.find_block(&key, at).map(|block| (at, block)));
        let (address, (segment, slot)) = found.ok_or(LoadOutcome::Gone)?;
        let payload_bytes = slot.payload_bytes as usize;
        if slab.len() != payload_bytes {
            return Err(LoadOutcome::Failed(
                DiskError::LengthMismatch {
                    payload_bytes: payload_bytes as u64,
                    slab_bytes: slab.len() as u64,
                }
                .into(),
            ));
        }
        let file = Arc::clone(&segment.file);
        let slab = slab.into_host().map_err(|_| LoadOutcome::Failed(TierError::NotHostMemory))?;
        let buffers = read_buffers(slab);
        let transfer = Transfer::new(TransferKind::Read, file, address.byte_offset(), buffers);
        Ok((PendingRead { segment, payload_bytes, checksum: slot.checksum }, transfer))
    }

    fn find_block(&self, key: &BlockKey, address: Address) -> Option<(Arc<Segment>, BlockSlot)> {
        let segment = self.segment(address.segment())?;
        // The state is unlocked again before `is_alias` locks the aliases.
        let slot = segment.state().slot(address.page()).filter(BlockSlot::is_live)?;
        let is_alias = || {
            let aliases = self.aliases();
            let mut others = aliases.get(&address).into_iter().flatten();
            others.any(|alias| alias.meta.key == *key)
        };
        (slot.is_first_key(key) || is_alias()).then_some((segment, slot))
    }

    /// Verifies a completed read.
    fn finish_read(
        &self,
        pending: &PendingRead,
        TransferOutcome { transfer, result }: TransferOutcome,
    ) -> LoadOutcome {
        let damaged = || {
            count(&self.counters.records_damaged, 1);
            LoadOutcome::Damaged
        };
        match result {
            Ok(_bytes) => {}
            // The file ends before the payload does. Other errors say nothing about the block.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                return damaged();
            }
            Err(error) => {
                return LoadOutcome::Failed(
                    DiskError::from_io("read", &pending.segment.path, error).into(),
                );
            }
        }
        let transfer = transfer.expect("a completed transfer is returned");
        let slab = slab_from_read(transfer, pending.payload_bytes);
        if checksum(&slab) != pending.checksum {
            return damaged();
        }
        count(&self.counters.records_read, 1);
        count(&self.counters.bytes_read, pending.payload_bytes as u64);
        LoadOutcome::Hit(slab.into_slab())
    }
}
