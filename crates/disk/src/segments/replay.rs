//! Replays entries in the order of writing to determine the live blocks.

use std::collections::HashMap;

use cascade_block::BlockKey;

use crate::Address;
use crate::format::{EntryKind, RecordEntry};
use crate::place::Place as _;

/// The result of replaying all entries in order.
#[derive(Debug, Default)]
pub(crate) struct ReplayResult {
    pub(crate) live: Vec<RecordEntry>,
    /// The blocks that live aliases refer to.
    pub(crate) bodies: Vec<RecordEntry>,
    /// Blocks that a newer block of the same key replaced without a tombstone.
    pub(crate) superseded: Vec<(BlockKey, Address)>,
    pub(crate) expired: u64,
    /// One more than the highest sequence number and segment number.
    pub(crate) sequence_end: u64,
    pub(crate) number_end: u32,
}

/// Replays entries, oldest first. The last entry of each key is valid.
pub(crate) fn replay(entries: &[RecordEntry], now_unix_ms: u64) -> ReplayResult {
    let mut outcome = ReplayResult {
        // The numbers come from files, so the sums may overflow.
        sequence_end: entries.last().map_or(0, |last| last.sequence.saturating_add(1)),
        number_end: entries
            .iter()
            .map(|each| each.address.segment().saturating_add(1))
            .max()
            .unwrap_or(0),
        ..ReplayResult::default()
    };
    let mut blocks: HashMap<Address, usize> = HashMap::with_capacity(entries.len());
    // The entry that is valid for each key so far.
    let mut valid_entries: HashMap<BlockKey, usize> = HashMap::with_capacity(entries.len());
    for (at, entry) in entries.iter().enumerate() {
        match entry.kind {
            EntryKind::Block => {
                blocks.insert(entry.address, at);
            }
            EntryKind::Alias => {
                // A reclaimed segment may leave an alias of an address that a later block uses.
                // Length and checksum tell them apart.
                let is_same = |block: &usize| {
                    entries[*block].payload_checksum == entry.payload_checksum
                        && entries[*block].meta.bytes == entry.meta.bytes
                };
                if !blocks.get(&entry.address).is_some_and(is_same) {
                    continue;
                }
            }
            EntryKind::Tombstone => {
                // A tombstone removes its key from one address only: a newer block of the key
                // has another address and stays.
                let current = valid_entries.get(&entry.meta.key);
                if current.is_some_and(|current| entries[*current].address == entry.address) {
                    valid_entries.remove(&entry.meta.key);
                }
                continue;
            }
        }
        // An entry that a reclaim rewrote has the same address as the original.
        if let Some(before) = valid_entries.insert(entry.meta.key, at)
            && entries[before].address != entry.address
        {
            outcome.superseded.push((entry.meta.key, entries[before].address));
        }
    }
    let mut live: Vec<_> = valid_entries.into_values().collect();
    // These are indices of `entries`, so the oldest comes first.
    live.sort_unstable();
    // Only now, because an expired entry too replaces older ones of its key.
    let unexpired = live.iter().filter(|at| !entries[**at].meta.has_expired(now_unix_ms));
    outcome.live = unexpired.map(|at| entries[*at]).collect();
    outcome.expired = (live.len() - outcome.live.len()) as u64;
    outcome.bodies = outcome
        .live
        .iter()
        .filter(|entry| entry.kind == EntryKind::Alias)
        .filter_map(|entry| blocks.get(&entry.address).map(|at| entries[*at]))
        .collect();
    outcome
}
