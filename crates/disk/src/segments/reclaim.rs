//! Reclaims space one segment at a time: blocks to keep are moved, then the segment is removed.

use std::collections::HashSet;
use std::sync::{Arc, PoisonError};

use cascade_block::{BlockKey, checksum};
use cascade_runtime::Deadline;

use super::flush::forget_segment;
use super::segment::{BlockSlot, Segment};
use super::write::{SpaceClass, WriterState};
use super::write_run::{PendingEntry, PendingPayload, tombstone};
use super::{Alias, SegmentFiles, UnreportedMoves, count};
use crate::error::is_misplaced;
use crate::format::{EntryKind, PAGE_BYTES, RecordEntry, pages_of};
use crate::io::{Buffer, PageBuffer, Transfer, TransferKind};
use crate::place::Place as _;
use crate::{Address, BlockFacts, DiskError, MakeRoomOutcome};

/// Maximum number of bytes that a reclaim holds in memory.
const MOVE_BYTES_MAX: u64 = 8 << 20;

/// The segment to remove.
struct Victim {
    segment: Arc<Segment>,
    /// Aliases from this number on were added after it was chosen.
    late_from: u64,
}

/// A block to move, with the keys to keep. The first key becomes its own, the others its aliases.
#[derive(Debug)]
struct BlockMove {
    from: Address,
    keys: Vec<BlockFacts>,
}

impl SegmentFiles {
    /// Frees one segment: a mostly dead one if there is one, otherwise the oldest. `keep` is called
    /// for every live key in it; blocks to keep are moved first, as far as the capacity allows.
    /// `keep` may read, but not write or reclaim.
    ///
    /// Reads do not wait: those in flight complete on the old file. After an error the old
    /// addresses of blocks that were moved before it stay valid, until the next reclaim that
    /// succeeds reports the new ones.
    pub fn reclaim(
        &self,
        keep: &mut dyn FnMut(&BlockFacts, Address) -> bool,
        deadline: Deadline,
    ) -> Result<MakeRoomOutcome, DiskError> {
        let mut unreported = self.lock(&self.reclaim_lock, deadline)?;
        let before = self.used_bytes();
        let mut reclaimed = MakeRoomOutcome::default();
        if let Err(error) = self.reclaim_victim(keep, &unreported, &mut reclaimed, deadline) {
            unreported.append(&mut reclaimed.moved);
            return Err(error);
        }
        let used = self.used_bytes();
        self.capacity.lower_limit(used);
        let mut moved = std::mem::take(&mut *unreported);
        for (_, _, to) in &mut moved {
            // This reclaim may have moved the block again.
            *to = self.resolve(*to);
        }
        moved.append(&mut reclaimed.moved);
        reclaimed.moved = moved;
        reclaimed.freed_bytes = before.saturating_sub(used);
        Ok(reclaimed)
    }

    /// Chooses a segment, moves the blocks to keep and removes it. After an error `reclaimed` has
    /// the blocks that were moved before it.
    fn reclaim_victim(
        &self,
        keep: &mut dyn FnMut(&BlockFacts, Address) -> bool,
        unreported: &UnreportedMoves,
        reclaimed: &mut MakeRoomOutcome,
        deadline: Deadline,
    ) -> Result<(), DiskError> {
        let Some(chosen) = self.choose_victim(deadline)? else { return Ok(()) };
        let victim = Arc::clone(&chosen.segment);
        let entries = self.entries_of(&victim, deadline)?;
        self.drop_undescribed(&victim, &entries, reclaimed);
        let moves = self.select_moves(&chosen, &entries, keep, reclaimed);
        self.forget_reported_moves(unreported);
        // In batches, which bound the memory and unlock the writer in between, so that appends
        // continue.
        for batch in batches(moves) {
            self.move_blocks(&chosen, batch, reclaimed, deadline)?;
        }
        let mut writer = self.lock(&self.writer, deadline)?;
        self.drop_late_aliases(&chosen, reclaimed);
        // The order matters: the victim is removed only after its moved blocks and rewritten
        // entries are on stable storage. A crash before the removal leaves both copies, which
        // recovery resolves by their sequence numbers.
        self.rewrite_foreign_entries(&mut writer, &victim, &entries, deadline)?;
        self.write_tombstones_of_other_copies(
            &mut writer,
            &victim,
            unreported,
            &reclaimed.dropped,
            deadline,
        )?;
        self.sync_active(&mut writer, deadline)
            .inspect_err(|error| writer.note_failed_sync(error))?;
        self.remove_segment(&mut writer, &victim, deadline)
    }

    /// Ends the validity of old addresses that an earlier reclaim has reported as moved.
    fn forget_reported_moves(&self, unreported: &UnreportedMoves) {
        let kept: HashSet<Address> = unreported.iter().map(|(_, from, _)| *from).collect();
        let mut moved = self.moved_addresses.write().unwrap_or_else(PoisonError::into_inner);
        moved.retain(|from, _| kept.contains(from));
    }

    /// Writes tombstones for copies that failed writes and reclaims left in other segments than the
    /// victim: the old blocks of unreported moves, and all blocks of dropped keys. A restart would
    /// bring such a key back after its current block was removed or reclaimed.
    fn write_tombstones_of_other_copies(
        &self,
        writer: &mut WriterState,
        victim: &Segment,
        unreported: &UnreportedMoves,
        dropped: &[(BlockKey, Address)],
        deadline: Deadline,
    ) -> Result<(), DiskError> {
        let is_left =
            |at: Address| at.segment() != victim.number && self.segment(at.segment()).is_some();
        for copies in writer.other_copies.values_mut() {
            copies.retain(|at| is_left(*at));
        }
        writer.other_copies.retain(|_, copies| !copies.is_empty());
        let old_copies = unreported.iter().filter(|(_, from, _)| is_left(*from));
        let mut pending: Vec<_> = old_copies.map(|(key, from, _)| tombstone(key, *from)).collect();
        for (key, _) in dropped {
            pending.extend(writer.tombstones_of_other_copies(key));
        }
        self.write_all(writer, pending, SpaceClass::Overcommit, deadline)
    }

    /// Selects the segment with the smallest live share if that is below 50 %, otherwise the
    /// oldest.
    fn choose_victim(&self, deadline: Deadline) -> Result<Option<Victim>, DiskError> {
        let mut writer = self.lock(&self.writer, deadline)?;
        // A segment is not removed while it is being sealed.
        self.wait_for_seals(&mut writer, deadline)?;
        let mut candidates = self.all_segments();
        let is_written = |segment: &Arc<Segment>, writer: &WriterState| {
            let mut written = writer.active.iter().chain(&writer.next);
            written.any(|its| Arc::ptr_eq(its, segment))
        };
        // The active segment and the next one are never victims, because they are still written. If
        // there is no other, the active one is sealed and thus becomes one.
        if candidates.iter().all(|segment| is_written(segment, &writer)) {
            self.seal(&mut writer, deadline);
        }
        candidates.retain(|segment| !is_written(segment, &writer));
        let live_percent = |segment: &Arc<Segment>| {
            let state = segment.state();
            // Recovery may find an empty file, which has no bytes to divide by.
            state.live_bytes * 100 / state.file_bytes.max(1)
        };
        let emptiest = candidates.iter().min_by_key(|segment| live_percent(segment));
        let segment = match emptiest {
            Some(segment) if live_percent(segment) < 50 => Some(Arc::clone(segment)),
            _ => candidates.into_iter().next(),
        };
        let late_from = writer.next_sequence;
        Ok(segment.map(|segment| Victim { segment, late_from }))
    }

    /// Drops live blocks that no entry describes. Only keys of their aliases are known and
    /// reported; reads with other keys return `Gone`.
    fn drop_undescribed(
        &self,
        victim: &Segment,
        entries: &[RecordEntry],
        reclaimed: &mut MakeRoomOutcome,
    ) {
        let known: HashSet<u32> = entries
            .iter()
            .filter(|entry| entry.kind == EntryKind::Block)
            .map(|entry| entry.address.page())
            .collect();
        // Collected first: a removal locks the aliases before the state of a segment, so locking
        // them here while the state is locked could deadlock.
        let state = victim.state();
        let pages: Vec<u32> = state.live_slots().map(BlockSlot::page).collect();
        drop(state);
        for page in pages.into_iter().filter(|page| !known.contains(page)) {
            count(&self.counters.records_damaged, 1);
            let address = Address::in_segment(victim.number, page);
            let aliases = self.aliases();
            let others = aliases.get(&address).into_iter().flatten();
            reclaimed.dropped.extend(others.map(|alias| (alias.meta.key, address)));
        }
    }

    /// Drops the aliases that were added after `keep` was called, to blocks that do not move. The
    /// caller has locked the writer, so that no more are added.
    fn drop_late_aliases(&self, victim: &Victim, reclaimed: &mut MakeRoomOutcome) {
        let is_late = |alias: &&Alias| alias.sequence >= victim.late_from;
        let aliases = self.aliases();
        let of_victim = aliases.iter().filter(|(at, _)| at.segment() == victim.segment.number);
        let late = of_victim
            .flat_map(|(at, those)| those.iter().filter(is_late).map(|each| (each.meta.key, *at)));
        let late: Vec<_> = late.collect();
        drop(aliases);
        if late.is_empty() {
            return;
        }
        // A block that found no space was dropped with its late aliases.
        let dropped: HashSet<_> = reclaimed.dropped.iter().copied().collect();
        reclaimed.dropped.extend(late.into_iter().filter(|each| !dropped.contains(each)));
    }

    /// Calls `keep` for every live key of a segment. Returns the blocks to move.
    fn select_moves(
        &self,
        Victim { segment: victim, late_from }: &Victim,
        entries: &[RecordEntry],
        keep: &mut dyn FnMut(&BlockFacts, Address) -> bool,
        reclaimed: &mut MakeRoomOutcome,
    ) -> Vec<BlockMove> {
        let now = self.io.clock.unix_ms();
        let mut moves = Vec::new();
        for entry in entries.iter().filter(|entry| entry.kind == EntryKind::Block) {
            let from = entry.address;
            let Some(slot) = victim.state().slot(from.page()).filter(BlockSlot::is_live) else {
                continue;
            };
            let first_key = slot.is_first_key(&entry.meta.key).then_some(entry.meta);
            // Copied, so that the aliases are unlocked while `keep` is called: it may read, and
            // reads lock them.
            let others = self.aliases_at(from, |sequence| sequence < *late_from);
            let mut keys: Vec<BlockFacts> = first_key.into_iter().chain(others).collect();
            keys.retain(|meta| {
                let is_kept = !meta.has_expired(now) && keep(meta, from);
                if !is_kept {
                    reclaimed.dropped.push((meta.key, from));
                }
                is_kept
            });
            if !keys.is_empty() {
                moves.push(BlockMove { from, keys });
            }
        }
        moves
    }

    /// The aliases of a block whose numbers are as wanted.
    fn aliases_at(&self, address: Address, is_wanted: impl Fn(u64) -> bool) -> Vec<BlockFacts> {
        let aliases = self.aliases();
        let those = aliases.get(&address).into_iter().flatten();
        those.filter(|alias| is_wanted(alias.sequence)).map(|alias| alias.meta).collect()
    }

    /// Copies blocks to the end of the active segment and redirects their old addresses.
    fn move_blocks(
        &self,
        Victim { segment: victim, late_from }: &Victim,
        moves: Vec<BlockMove>,
        reclaimed: &mut MakeRoomOutcome,
        deadline: Deadline,
    ) -> Result<(), DiskError> {
        // Read without the writer's lock, so that appends continue meanwhile.
        let payloads = self.read_payloads(victim, &moves, deadline)?;
        let mut writer = self.lock(&self.writer, deadline)?;
        let mut pending = Vec::new();
        let mut placed = Vec::new();
        for (each, payload) in moves.into_iter().zip(payloads) {
            let Some((payload, checksum)) = payload else {
                count(&self.counters.records_damaged, 1);
                let dropped = each.keys.iter().map(|meta| (meta.key, each.from));
                reclaimed.dropped.extend(dropped);
                continue;
            };
            // A key may have been removed since `keep` was called for it.
            let mut keys: Vec<_> =
                each.keys.into_iter().filter(|meta| self.has_key(&meta.key, each.from)).collect();
            // And others may have been added.
            for late in self.aliases_at(each.from, |sequence| sequence >= *late_from) {
                if keys.iter().all(|meta| meta.key != late.key) {
                    keys.push(late);
                }
            }
            // The first key is written with the block even if it was an alias before.
            let Some(&first) = keys.first() else { continue };
            count(&self.counters.bytes_moved, u64::from(first.bytes));
            pending.push(PendingEntry {
                kind: EntryKind::Block,
                meta: first,
                target: each.from,
                checksum,
                sequence: None,
                payload: Some(PendingPayload::Pages(payload)),
            });
            placed.push(BlockMove { from: each.from, keys });
        }
        let written = self.write(&mut writer, pending, SpaceClass::Reserve, deadline);
        let mut outcome = Ok(());
        for (moved, to) in placed.iter().zip(written) {
            match to {
                Ok(to) => {
                    let redirected = self.redirect(&mut writer, moved, to, reclaimed, deadline);
                    outcome = outcome.and(redirected);
                }
                // A reclaim must finish even without space: blocks that do not fit are dropped.
                Err(DiskError::Full { .. }) => {
                    reclaimed.dropped.extend(moved.keys.iter().map(|meta| (meta.key, moved.from)));
                }
                // The victim stays: it is not removed after an error. The loop continues, because
                // later blocks may have been written at the same time.
                Err(error) => outcome = outcome.and(Err(error)),
            }
        }
        outcome
    }

    /// Redirects the keys of a moved block to its new address. The first key was written with it.
    fn redirect(
        &self,
        writer: &mut WriterState,
        moved: &BlockMove,
        to: Address,
        reclaimed: &mut MakeRoomOutcome,
        deadline: Deadline,
    ) -> Result<(), DiskError> {
        let from = moved.from;
        let aliases: Vec<_> = moved.keys[1..]
            .iter()
            .map(|meta| self.alias_entry(meta, to))
            .collect::<Result<_, _>>()?;
        let written = self.write_aliases(writer, aliases, SpaceClass::Reserve, deadline);
        // Before a key is removed from the old block: `find_moved` relies on this order.
        self.moved_addresses.write().unwrap_or_else(PoisonError::into_inner).insert(from, to);
        let mut outcome = Ok(());
        for (meta, result) in moved.keys.iter().zip(std::iter::once(Ok(to)).chain(written)) {
            match result {
                // If the reclaim fails later, the next one does not move the key again.
                Ok(_) => {
                    self.remove_from_memory(&meta.key, from);
                    reclaimed.moved.push((meta.key, from, to));
                }
                Err(DiskError::Full { .. }) => reclaimed.dropped.push((meta.key, from)),
                Err(error) => outcome = outcome.and(Err(error)),
            }
        }
        outcome
    }

    fn has_key(&self, key: &BlockKey, address: Address) -> bool {
        let Some(segment) = self.segment(address.segment()) else { return false };
        let slot = segment.state().slot(address.page());
        // The state is unlocked again by now: aliases are locked before it, never after.
        let aliases = self.aliases();
        let mut others = aliases.get(&address).into_iter().flatten();
        slot.is_some_and(|slot| slot.is_first_key(key))
            || others.any(|alias| alias.meta.key == *key)
    }

    /// Reads the payloads of blocks to move, with their checksums; `None` for damaged ones.
    fn read_payloads(
        &self,
        victim: &Arc<Segment>,
        moves: &[BlockMove],
        deadline: Deadline,
    ) -> Result<Vec<Option<(PageBuffer, u32)>>, DiskError> {
        let slots: Vec<_> = moves
            .iter()
            .map(|each| victim.state().slot(each.from.page()).expect("slots are never removed"))
            .collect();
        let transfers = moves
            .iter()
            .zip(&slots)
            .map(|(each, slot)| {
                let pages = PageBuffer::zeroed(slot.payload_bytes as usize);
                let file = Arc::clone(&victim.file);
                let buffers = vec![Buffer::Pages(pages)];
                Transfer::new(TransferKind::Read, file, each.from.byte_offset(), buffers)
            })
            .collect();
        let results = self.io.transfer_all(transfers, deadline);
        let mut payloads = Vec::with_capacity(moves.len());
        for (slot, (transfer, result)) in slots.into_iter().zip(results) {
            let pages = match (result, transfer.and_then(|mut each| each.buffers.pop())) {
                (Ok(()), Some(Buffer::Pages(pages))) => Some(pages),
                // A time-out says nothing about the block, so the reclaim fails. After any other
                // error the block counts as damaged.
                (Err(error), _) if error.kind() == std::io::ErrorKind::TimedOut => {
                    return Err(DiskError::from_io("read", &victim.path, error));
                }
                _ => None,
            };
            let is_right = |pages: &PageBuffer| {
                checksum(&pages.bytes()[..slot.payload_bytes as usize]) == slot.checksum
            };
            payloads.push(pages.filter(is_right).map(|pages| (pages, slot.checksum)));
        }
        Ok(payloads)
    }

    /// Rewrites aliases and tombstones in the victim that refer to other segments.
    fn rewrite_foreign_entries(
        &self,
        writer: &mut WriterState,
        victim: &Segment,
        entries: &[RecordEntry],
        deadline: Deadline,
    ) -> Result<(), DiskError> {
        let pending: Vec<_> = entries
            .iter()
            .filter(|entry| entry.address.segment() != victim.number && self.is_current(entry))
            .map(|entry| PendingEntry {
                kind: entry.kind,
                meta: entry.meta,
                target: entry.address,
                checksum: entry.payload_checksum,
                // The old number: a rewritten entry must not replace a later one of its key.
                sequence: Some(entry.sequence),
                payload: None,
            })
            .collect();
        self.write_all(writer, pending, SpaceClass::Overcommit, deadline)
    }

    fn is_current(&self, entry: &RecordEntry) -> bool {
        match entry.kind {
            // A block is in the segment of its own entry, so none refers to another segment.
            EntryKind::Block => false,
            // Needed as long as the segment of the removed block exists: its entries would bring
            // the key back.
            EntryKind::Tombstone => self.segment(entry.address.segment()).is_some(),
            EntryKind::Alias => self
                .aliases()
                .get(&entry.address)
                .into_iter()
                .flatten()
                .any(|alias| alias.sequence == entry.sequence),
        }
    }

    /// Removes a segment from memory and its file from the directory.
    pub(super) fn remove_segment(
        &self,
        writer: &mut WriterState,
        victim: &Arc<Segment>,
        deadline: Deadline,
    ) -> Result<(), DiskError> {
        // The file first: if it cannot be removed, the segment stays in memory and its bytes still
        // count.
        let path = victim.path.clone();
        self.io.call("remove", &victim.path, deadline, move |files| match files.remove(&path) {
            // The segment's file no longer exists; anything else with its name is not ours.
            Err(error) if is_misplaced(&error) => Ok(()),
            other => other,
        })?;
        forget_segment(self, writer, victim);
        Ok(())
    }
}

/// Splits moves into batches of at most [`MOVE_BYTES_MAX`].
fn batches(moves: Vec<BlockMove>) -> Vec<Vec<BlockMove>> {
    let mut batches: Vec<Vec<BlockMove>> = Vec::new();
    // The first block thus starts the first batch.
    let mut bytes = u64::MAX;
    for each in moves {
        let length = u64::from(pages_of(u64::from(each.keys[0].bytes))) * PAGE_BYTES as u64;
        if bytes.saturating_add(length) > MOVE_BYTES_MAX {
            batches.push(Vec::new());
            bytes = 0;
        }
        bytes += length;
        batches.last_mut().expect("one was pushed above").push(each);
    }
    batches
}
