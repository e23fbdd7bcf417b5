//! Reading: payloads straight into slabs, each checked while the next ones are on their way.

use std::io;
use std::sync::Arc;

use cascade_block::{BlockKey, Checksum, Deadline, checksum};

use super::segment::{Segment, Slot};
use super::{SegmentFiles, count};
use crate::io::{Finished, Traffic, Transfer, TransferKind};
use crate::placement::{received_slab, receiving_buffers};
use crate::tier::ReadRequest;
use crate::{Address, Damage, DiskError, ReadOutcome};

/// A block that was found, on its way.
#[derive(Debug)]
struct Fetch {
    segment: Arc<Segment>,
    payload_bytes: usize,
    checksum: Checksum,
}

/// A batch on its way: found, fetched and checked block by block.
struct Reading<'a> {
    files: &'a SegmentFiles,
    batch: std::vec::IntoIter<ReadRequest>,
    taken: usize,
    fetches: Vec<Option<Fetch>>,
    outcomes: Vec<Option<ReadOutcome>>,
}

impl Traffic for Reading<'_> {
    fn next(&mut self) -> Option<(usize, Transfer)> {
        loop {
            let request = self.batch.next()?;
            let number = self.taken;
            self.taken += 1;
            match self.files.prepare(request) {
                Ok((fetch, transfer)) => {
                    self.fetches[number] = Some(fetch);
                    return Some((number, transfer));
                }
                Err(outcome) => self.outcomes[number] = Some(outcome),
            }
        }
    }

    fn end(&mut self, number: usize, finished: Finished) {
        let fetch = self.fetches[number].take().expect("a transfer ends once");
        self.outcomes[number] = Some(self.files.conclude(&fetch, finished));
    }
}

impl SegmentFiles {
    pub(super) fn read_blocks(
        &self,
        batch: Vec<ReadRequest>,
        deadline: Deadline,
    ) -> Vec<ReadOutcome> {
        let mut reading = Reading {
            files: self,
            outcomes: batch.iter().map(|_| None).collect(),
            fetches: batch.iter().map(|_| None).collect(),
            batch: batch.into_iter(),
            taken: 0,
        };
        self.io.carry(&mut reading, deadline);
        let late = || {
            ReadOutcome::Failed(DiskError::Timeout {
                operation: "read",
                path: self.config.directory.clone(),
            })
        };
        reading.outcomes.into_iter().map(|outcome| outcome.unwrap_or_else(late)).collect()
    }

    /// Finds a block and checks what can be checked before its bytes are here.
    fn prepare(&self, request: ReadRequest) -> Result<(Fetch, Transfer), ReadOutcome> {
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
        Ok((Fetch { segment, payload_bytes, checksum: slot.checksum }, transfer))
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
    fn conclude(&self, fetch: &Fetch, Finished { transfer, result }: Finished) -> ReadOutcome {
        let damaged = |damage| {
            count(&self.counters.records_damaged, 1);
            ReadOutcome::Damaged(damage)
        };
        match result {
            Ok(_bytes) => {}
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
