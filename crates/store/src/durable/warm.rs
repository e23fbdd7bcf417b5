//! Warm restart: a new process restores the blocks that a dead process had in DRAM.

use std::collections::HashMap;

use cascade_block::BlockKey;

use crate::core::catalog::{ContentIndex, NewKey};
use crate::core::state::StoreState;
use crate::durable::ledger::Recovered;
use crate::shared::StoreCore;

/// Blocks restored to DRAM, for the comparison with the blocks of the stages.
#[derive(Debug, Default)]
pub(super) struct RestoredBlocks {
    /// Parents first. An order of its own, so that equal pools give equal queues.
    blocks: Vec<Recovered>,
    by_key: HashMap<BlockKey, usize>,
}

impl RestoredBlocks {
    /// Whether the bytes at this address of a stage are the ones in DRAM under this key.
    pub(super) fn is_stored_at(
        &self,
        key: &BlockKey,
        stage: usize,
        address: cascade_tier::tier::Address,
    ) -> bool {
        let found = self.by_key.get(key).map(|at| &self.blocks[*at]);
        found.is_some_and(|recovered| recovered.is_stored_at(stage, address))
    }

    /// Queues the restored blocks that the movers of the earlier run had not written yet. A block
    /// without a namespace in its record was promoted from a stage that has reclaimed it since; as
    /// without a restart, it is not written again.
    pub(super) fn queue_unwritten(&self, state: &mut StoreState) {
        for recovered in &self.blocks {
            // A block that had expired is not in the catalog.
            let Some(key) = state.catalog.find(&recovered.facts().key) else { continue };
            let content = state.catalog.entry(key).content;
            for stage in 0..state.lower.len() {
                let entry = state.catalog.content(content);
                // A write that is queued or in flight counts, too.
                let is_there = entry.has_address(stage) || entry.dirty & (1 << stage) != 0;
                if !is_there && entry.slab.is_some() && recovered.has_namespace() {
                    state.push_block(stage, *recovered.facts(), content);
                }
            }
        }
    }
}

/// Adds the blocks of an earlier run to the catalog and the policy, parents first, so that
/// chains are linked. The times of their last uses are lost.
pub(super) fn restore_dram(
    core: &StoreCore,
    state: &mut StoreState,
    recovered: Vec<Recovered>,
) -> RestoredBlocks {
    let now_unix_ms = core.clock.unix_ms();
    let now = core.policy_now(state);
    let mut contents = HashMap::new();
    let recovered = sort_parents_first(recovered);
    for one in &recovered {
        let facts = one.facts();
        if facts.expires_unix_ms.is_some_and(|expires| expires <= now_unix_ms) {
            // The record is cleared while `recovered` still holds the slab.
            if let Some(ledger) = &mut state.ledger {
                ledger.discard(one);
            }
            continue;
        }
        let key = insert_restored(state, one, &mut contents);
        state.make_resident(key, now);
    }
    let by_key = recovered.iter().enumerate().map(|(at, one)| (one.facts().key, at)).collect();
    RestoredBlocks { blocks: recovered, by_key }
}

/// Adds one block to the catalog. Blocks in the same piece of memory share a content.
fn insert_restored(
    state: &mut StoreState,
    recovered: &Recovered,
    contents: &mut HashMap<usize, ContentIndex>,
) -> crate::core::catalog::KeyIndex {
    let facts = recovered.facts();
    let new = NewKey {
        key: facts.key,
        parent: facts.parent,
        is_prefix: facts.is_prefix,
        expires_unix_ms: facts.expires_unix_ms.unwrap_or(0),
    };
    let offset = recovered.slab().offset();
    // Recovery rejects overlaps, so an offset identifies a piece.
    let key = if let Some(content) = contents.get(&offset) {
        state.catalog.link(&new, *content)
    } else {
        // The number of keys per content is limited, so that several contents can have one digest:
        // lookups by the digest find the first.
        let digest = facts.digest.filter(|digest| state.catalog.find_digest(digest).is_none());
        let (key, content) = state.catalog.insert(&new, facts.bytes, digest);
        state.content_bytes += u64::from(facts.bytes);
        state.memory.used_bytes += u64::from(facts.bytes);
        state.catalog.content_mut(content).slab = Some(recovered.slab().clone());
        contents.insert(offset, content);
        key
    };
    if let Some(ledger) = &mut state.ledger {
        ledger.keep(key, recovered);
    }
    key
}

/// Sorts blocks so that each comes after its parent, if that is among them.
fn sort_parents_first(mut recovered: Vec<Recovered>) -> Vec<Recovered> {
    let at: HashMap<BlockKey, usize> =
        recovered.iter().enumerate().map(|(at, one)| (one.facts().key, at)).collect();
    let parent = |one: &Recovered| one.facts().parent.and_then(|parent| at.get(&parent).copied());
    let parents: Vec<Option<usize>> = recovered.iter().map(parent).collect();
    let mut depths: Vec<Option<u32>> = vec![None; recovered.len()];
    // Walks up to the first ancestor with a known depth, and assigns depths on the way back.
    // Without cycles each block is walked once.
    for start in 0..recovered.len() {
        let mut chain = Vec::new();
        let mut next = Some(start);
        // A damaged ledger can contain a cycle: stop at the number of all blocks.
        while let Some(one) = next.filter(|one| depths[*one].is_none())
            && chain.len() < recovered.len()
        {
            chain.push(one);
            next = parents[one];
        }
        let mut depth = next.and_then(|known| depths[known]).map_or(0, |depth| depth + 1);
        for one in chain.into_iter().rev() {
            depths[one] = Some(depth);
            depth = depth.saturating_add(1);
        }
    }
    let mut order: Vec<usize> = (0..recovered.len()).collect();
    order.sort_by_key(|one| depths[*one]);
    let mut places: Vec<Option<Recovered>> = recovered.drain(..).map(Some).collect();
    order.into_iter().filter_map(|one| places[one].take()).collect()
}
