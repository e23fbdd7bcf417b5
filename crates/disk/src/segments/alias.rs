//! Adds keys to stored blocks: alias entries in the active segment, and the table in memory.

use std::collections::HashMap;

use cascade_runtime::Deadline;

use super::replay::ReplayResult;
use super::segment::BlockSlot;
use super::write::{SpaceClass, WriterState};
use super::write_run::PendingEntry;
use super::{Alias, SegmentFiles};
use crate::format::{ENTRIES_PER_FRAME, EntryKind, RecordEntry};
use crate::place::Place as _;
use crate::{Address, BlockFacts, DiskError};

impl SegmentFiles {
    /// Adds another key to stored bytes and returns their address.
    pub fn alias_blocks(
        &self,
        batch: &[(BlockFacts, Address)],
        deadline: Deadline,
    ) -> Vec<Result<Address, DiskError>> {
        // Locked before the addresses are resolved: a reclaim moves blocks and removes segments
        // under this lock. The targets thus stay valid until their aliases are written.
        match self.lock(&self.writer, deadline) {
            Ok(mut writer) => self.add_keys(&mut writer, batch, SpaceClass::Ordinary, deadline),
            Err(error) => batch.iter().map(|_| Err(error.clone())).collect(),
        }
    }

    fn add_keys(
        &self,
        writer: &mut WriterState,
        batch: &[(BlockFacts, Address)],
        space: SpaceClass,
        deadline: Deadline,
    ) -> Vec<Result<Address, DiskError>> {
        batch
            .chunks(ENTRIES_PER_FRAME)
            .flat_map(|chunk| {
                let pending: Vec<_> =
                    chunk.iter().map(|(meta, address)| self.alias_entry(meta, *address)).collect();
                let (good, mut results) = split(pending);
                let written = self.write_aliases(writer, good, space, deadline);
                fill(&mut results, written);
                results.into_iter().flatten().collect::<Vec<_>>()
            })
            .collect()
    }

    /// Gives all keys of the same bytes one address, as the store has one for each content. A crash
    /// or a reclaim that failed can leave several blocks with the same bytes: the keys of the later
    /// ones become aliases of the first. A key whose alias cannot be written is missing until the
    /// next opening.
    pub(super) fn merge_equal(
        &self,
        writer: &mut WriterState,
        replay: &mut ReplayResult,
        deadline: Deadline,
    ) {
        let mut first_of = HashMap::new();
        let mut later = Vec::new();
        replay.live.retain(|entry| {
            let Some(digest) = entry.meta.digest else { return true };
            let content = (digest, entry.meta.bytes, entry.payload_checksum);
            let first = *first_of.entry(content).or_insert(entry.address);
            let is_first = first == entry.address;
            if !is_first {
                later.push((*entry, first));
            }
            is_first
        });
        let batch: Vec<_> = later.iter().map(|(entry, first)| (entry.meta, *first)).collect();
        let added = self.add_keys(writer, &batch, SpaceClass::Reserve, deadline);
        for ((entry, _), added) in later.into_iter().zip(added) {
            let key = entry.meta.key;
            self.remove_from_memory(&key, entry.address);
            // No tombstone yet: after a power loss there could be one without the alias. The next
            // opening writes it, when it has synced the alias.
            writer.other_copies.entry(key).or_default().push(entry.address);
            if let Ok(address) = added {
                replay.live.push(RecordEntry { address, ..entry });
            }
        }
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
