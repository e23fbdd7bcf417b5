//! Reading: payloads straight into slabs, neighbours in one transfer, every byte checked.

use std::io;
use std::sync::Arc;

use cascade_block::{BlockKey, Checksum, Deadline, checksum};

use super::segment::{Segment, Slot};
use super::{SegmentFiles, count};
use crate::io::{Transfer, TransferKind};
use crate::placement::{received_slab, receiving_buffers};
use crate::tier::ReadRequest;
use crate::{Address, Damage, DiskError, ReadOutcome};

/// A block that was found, on its way.
#[derive(Debug)]
struct Fetch {
    index: usize,
    segment: Arc<Segment>,
    payload_bytes: usize,
    checksum: Checksum,
}

impl SegmentFiles {
    pub(super) fn read_blocks(
        &self,
        batch: Vec<ReadRequest>,
        deadline: Deadline,
    ) -> Vec<ReadOutcome> {
        let mut outcomes: Vec<_> = batch.iter().map(|_| None).collect();
        let mut fetches = Vec::with_capacity(batch.len());
        let mut transfers = Vec::with_capacity(batch.len());
        for (index, request) in batch.into_iter().enumerate() {
            match self.prepare(index, request) {
                Ok((fetch, transfer)) => {
                    fetches.push(fetch);
                    transfers.push(transfer);
                }
                Err(outcome) => outcomes[index] = Some(outcome),
            }
        }
        let answers = self.io.transfer_all(transfers, deadline);
        for (fetch, (transfer, result)) in fetches.into_iter().zip(answers) {
            outcomes[fetch.index] = Some(self.conclude(&fetch, transfer, result));
        }
        outcomes.into_iter().map(|outcome| outcome.expect("each block was answered")).collect()
    }

    /// Finds a block and checks what can be checked before its bytes are here.
    fn prepare(
        &self,
        index: usize,
        request: ReadRequest,
    ) -> Result<(Fetch, Transfer), ReadOutcome> {
        let ReadRequest { address, key, slab } = request;
        let address = self.resolve(address);
        let (segment, slot) = self.find(&key, address).ok_or(ReadOutcome::Gone)?;
        let payload_bytes = slot.payload_bytes as usize;
        if slab.len() != payload_bytes {
            return Err(ReadOutcome::Failed(DiskError::LengthMismatch {
                payload_bytes: payload_bytes as u64,
                slab_bytes: slab.len() as u64,
            }));
        }
        let file = Arc::clone(&segment.file);
        let buffers = receiving_buffers(slab);
        let transfer = Transfer::new(TransferKind::Read, file, address.byte_offset(), buffers);
        Ok((Fetch { index, segment, payload_bytes, checksum: slot.checksum }, transfer))
    }

    fn find(&self, key: &BlockKey, address: Address) -> Option<(Arc<Segment>, Slot)> {
        let segment = self.segment(address.segment())?;
        let slot = segment.state().slot(address.page()).filter(Slot::is_live)?;
        let is_alias = || {
            let aliases = self.aliases();
            let mut others = aliases.get(&address).into_iter().flatten();
            others.any(|alias| alias.meta.key == *key)
        };
        (slot.is_named(key) || is_alias()).then_some((segment, slot))
    }

    /// Turns what the engine answered into what the caller learns.
    fn conclude(
        &self,
        fetch: &Fetch,
        transfer: Option<Transfer>,
        result: io::Result<()>,
    ) -> ReadOutcome {
        let damaged = |damage| {
            count(&self.counters.records_damaged, 1);
            ReadOutcome::Damaged(damage)
        };
        match result {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                return damaged(Damage::Truncated);
            }
            Err(error) => {
                return ReadOutcome::Failed(DiskError::from_io("read", &fetch.segment.path, error));
            }
        }
        let transfer = transfer.expect("a finished transfer comes back");
        let slab = received_slab(transfer, fetch.payload_bytes);
        if checksum(&slab) != fetch.checksum {
            return damaged(Damage::Checksum);
        }
        count(&self.counters.records_read, 1);
        count(&self.counters.bytes_read, fetch.payload_bytes as u64);
        ReadOutcome::Hit(slab)
    }
}
