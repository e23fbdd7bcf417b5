//! Adds keys to stored blocks: alias entries in the active segment, and the table in memory.

use cascade_runtime::Deadline;

use super::segment::BlockSlot;
use super::write::{SpaceClass, WriterState};
use super::write_run::PendingEntry;
use super::{Alias, SegmentFiles};
use crate::format::{ENTRIES_PER_FRAME, EntryKind};
use crate::place::Place as _;
use crate::{Address, BlockFacts, DiskError};

impl SegmentFiles {
    pub(super) fn alias_blocks(
        &self,
        batch: &[(BlockFacts, Address)],
        deadline: Deadline,
    ) -> Vec<Result<Address, DiskError>> {
        // Locked before the addresses are resolved: a reclaim moves blocks and removes segments
        // under this lock. The targets thus stay valid until their aliases are written.
        let mut writer = match self.lock(&self.writer, deadline) {
            Ok(writer) => writer,
            Err(error) => return batch.iter().map(|_| Err(error.clone())).collect(),
        };
        batch
            .chunks(ENTRIES_PER_FRAME)
            .flat_map(|chunk| {
                let pending: Vec<_> =
                    chunk.iter().map(|(meta, address)| self.alias_entry(meta, *address)).collect();
                let (good, mut results) = split(pending);
                let written = self.write_aliases(&mut writer, good, SpaceClass::Ordinary, deadline);
                fill(&mut results, written);
                results.into_iter().flatten().collect::<Vec<_>>()
            })
            .collect()
    }

    /// Writes aliases and adds those that were written in memory. Returns one result each.
    pub(super) fn write_aliases(
        &self,
        writer: &mut WriterState,
        pending: Vec<PendingEntry>,
        space: SpaceClass,
        deadline: Deadline,
    ) -> Vec<Result<Address, DiskError>> {
        let metas: Vec<_> = pending.iter().map(|pending| pending.meta).collect();
        // `write` assigns ascending numbers from here on, and no other thread writes meanwhile.
        let sequence = writer.next_sequence;
        let written = self.write(writer, pending, space, deadline);
        for ((meta, result), sequence) in metas.into_iter().zip(&written).zip(sequence..) {
            if let Ok(address) = result {
                let alias = Alias { meta, sequence };
                self.aliases().entry(*address).or_default().push(alias);
            }
        }
        written
    }

    /// The entry of an additional key for the block at an address.
    pub(super) fn alias_entry(
        &self,
        meta: &BlockFacts,
        address: Address,
    ) -> Result<PendingEntry, DiskError> {
        let target = self.resolve(address);
        let segment = self.segment(target.segment()).ok_or(DiskError::NoTarget)?;
        let slot = segment.state().slot(target.page()).filter(BlockSlot::is_live);
        let slot = slot.ok_or(DiskError::NoTarget)?;
        if slot.payload_bytes != meta.bytes {
            return Err(DiskError::LengthMismatch {
                payload_bytes: u64::from(meta.bytes),
                slab_bytes: u64::from(slot.payload_bytes),
            });
        }
        Ok(PendingEntry {
            kind: EntryKind::Alias,
            meta: *meta,
            target,
            checksum: slot.checksum,
            sequence: None,
            payload: None,
        })
    }
}

type AppendResults = Vec<Option<Result<Address, DiskError>>>;

/// Separates valid entries from rejected ones. The results of the valid ones are left open.
fn split(pending: Vec<Result<PendingEntry, DiskError>>) -> (Vec<PendingEntry>, AppendResults) {
    // Rejected entries keep their places, so that results stay in the order of the batch.
    let mut good = Vec::with_capacity(pending.len());
    let results = pending
        .into_iter()
        .map(|each| match each {
            Ok(pending) => {
                good.push(pending);
                None
            }
            Err(error) => Some(Err(error)),
        })
        .collect();
    (good, results)
}

/// Fills the open results, in order.
fn fill(results: &mut AppendResults, written: Vec<Result<Address, DiskError>>) {
    let open = results.iter_mut().filter(|result| result.is_none());
    for (place, result) in open.zip(written) {
        *place = Some(result);
    }
}
