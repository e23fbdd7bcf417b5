//! Recovery: enters the blocks that an earlier run left in DRAM and in the stages in the catalog.

use std::time::Duration;

use cascade_tier::tier::BlockFacts;

use crate::core::catalog::{LOWER_STAGES_MAX, NewKey};
use crate::core::pending::KeyChange;
use crate::core::state::StoreState;
use crate::durable::ledger::Recovered;
use crate::durable::named_pool::millis;
use crate::durable::warm::restore_dram;
use crate::shared::StoreCore;

/// Restores the blocks of an earlier run: first from DRAM, then from the stages. The order
/// matters: the block in DRAM is at least as new, and is kept where the copy of a stage cannot
/// be shown to be the same.
pub(crate) fn recover(core: &mut StoreCore, recovered: Vec<Recovered>) {
    let started = core.clock.monotonic();
    let restored = restore_dram(core, &mut core.lock(), recovered);
    count_restored(core, started);
    let mut state = core.lock();
    let state = &mut *state;
    let now_unix_ms = core.clock.unix_ms();
    let mut parents = Vec::new();
    for (at, stage) in core.stages.iter().enumerate() {
        for (facts, address) in stage.recover() {
            if facts.expires_unix_ms.is_some_and(|expires| expires <= now_unix_ms) {
                // The stage still has the block, and would return it at every start.
                state.push_key_change(at, KeyChange::Remove(facts.key, address));
                continue;
            }
            // The ledger recorded this address for the block in DRAM: the bytes are the same.
            let is_same = restored.is_stored_at(&facts.key, at, address);
            insert_recovered(state, at, &facts, (address, is_same));
            parents.extend(facts.parent.map(|parent| (facts.key, parent)));
        }
    }
    // Parents last: a block can come before its parent, or from a faster stage.
    for (key, parent) in parents {
        if let Some(key) = state.catalog.find(&key) {
            state.catalog.set_parent(key, &parent);
        }
    }
    // Last: only now are the addresses in all stages known.
    restored.queue_unwritten(state);
}

/// Counts the restored blocks.
fn count_restored(core: &mut StoreCore, started: Duration) {
    let state = core.lock();
    let (blocks, bytes) = (state.catalog.key_count() as u64, state.memory.used_bytes);
    drop(state);
    let took = core.clock.monotonic().saturating_sub(started);
    if let Some(warm) = &mut core.warm {
        warm.stats.recovered_blocks = blocks;
        warm.stats.recovered_bytes = bytes;
        // Added to the time that opening the pool took.
        warm.stats.recover_ms += millis(took);
    }
}

/// Adds one block of a stage to the catalog. Its checksum is compared when it is read. `is_same`:
/// it has the bytes of the block in DRAM.
fn insert_recovered(
    state: &mut StoreState,
    stage: usize,
    facts: &BlockFacts,
    (address, is_same): (cascade_tier::tier::Address, bool),
) {
    debug_assert!(stage < LOWER_STAGES_MAX, "the pipeline limits the number of stages");
    let new = NewKey {
        key: facts.key,
        parent: None,
        is_prefix: facts.is_prefix,
        expires_unix_ms: facts.expires_unix_ms.unwrap_or(0),
    };
    if let Some(key) = state.catalog.find(&facts.key) {
        let content = state.catalog.entry(key).content;
        let is_same = is_same
            || state.catalog.content(content).bytes == facts.bytes
                && facts.digest.is_some()
                && facts.digest.as_ref() == state.catalog.digest_of(content);
        match state.catalog.address(content, stage) {
            None if is_same => state.set_address(content, stage, address),
            Some(known) if is_same && known == address => {}
            // A faster tier has this key already, and its bytes cannot be shown to be the same: the
            // slower copy may be older. Or it is a second copy.
            None | Some(_) => state.push_key_change(stage, KeyChange::Remove(facts.key, address)),
        }
        return;
    }
    let known = facts.digest.and_then(|digest| state.catalog.find_digest(&digest));
    let known = known.filter(|content| state.catalog.content(*content).bytes == facts.bytes);
    let content = if let Some(content) = known {
        state.catalog.link(&new, content);
        content
    } else {
        state.content_bytes += u64::from(facts.bytes);
        state.catalog.insert(&new, facts.bytes, facts.digest).1
    };
    // One address for each stage: a stage that has further copies of the content finds them by
    // their keys.
    if !state.catalog.content(content).has_address(stage) {
        state.catalog.set_address(content, stage, Some(address));
    }
}
