//! Warm restart: a new process restores the blocks that a dead process had in DRAM.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use cascade_block::BlockKey;
use cascade_memory::SlabMut;
use cascade_tier::StoreError;

use crate::core::catalog::{ContentIndex, NewKey};
use crate::core::state::StoreState;
use crate::durable::ledger::{HeldId, HeldPiece, Process, Recovered};
use crate::durable::named_pool::millis;
use crate::shared::StoreCore;
use crate::{KeepPool, Store};

/// Blocks restored to DRAM, by key, for the comparison with the blocks of the stages.
#[derive(Debug, Default)]
pub(crate) struct RestoredBlocks(HashMap<BlockKey, Recovered>);

impl RestoredBlocks {
    /// Whether the bytes at this address of a stage are the ones in DRAM under this key.
    pub(crate) fn is_stored_at(
        &self,
        key: &BlockKey,
        stage: usize,
        address: cascade_tier::tier::Address,
    ) -> bool {
        self.0.get(key).is_some_and(|recovered| recovered.is_stored_at(stage, address))
    }
}

impl StoreCore {
    /// Adds the blocks of an earlier run to the catalog and the policy, parents first, so that
    /// chains are linked. The times of their last uses are lost.
    pub(crate) fn restore_dram(
        &self,
        state: &mut StoreState,
        recovered: Vec<Recovered>,
    ) -> RestoredBlocks {
        let now_unix_ms = self.clock.unix_ms();
        let now = self.policy_now(state);
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
        let by_key = recovered.into_iter().map(|one| (one.facts().key, one));
        RestoredBlocks(by_key.collect())
    }

    /// Queues the restored blocks that the movers of the earlier run had not written yet. A block
    /// without a namespace in its record was promoted from a stage that has reclaimed it since; as
    /// without a restart, it is not written again.
    pub(crate) fn queue_unwritten(&self, state: &mut StoreState, restored: &RestoredBlocks) {
        for (name, recovered) in &restored.0 {
            // A block that had expired is not in the catalog.
            let Some(key) = state.catalog.find(name) else { continue };
            let content = state.catalog.entry(key).content;
            for stage in 0..self.stages.len() {
                let entry = state.catalog.content(content);
                // A write that is queued or in flight counts, too.
                let is_there = entry.has_address(stage) || entry.dirty & (1 << stage) != 0;
                if !is_there && entry.slab.is_some() && recovered.has_namespace() {
                    state.push_block(stage, *recovered.facts(), content);
                }
            }
        }
    }

    /// Records that a stage is about to read into a slab: with `io_uring`, the kernel can still
    /// write into it after this process has ended. The read proceeds even if the ledger is full.
    pub(crate) fn note_load(&self, slab: &mut SlabMut) {
        if let Some(warm) = &self.warm {
            warm.holders.record_load(slab);
        }
    }

    /// Whether to look for processes of an earlier run that have ended.
    pub(crate) fn is_sweep_of_holders_due(&self) -> bool {
        let now = self.clock.monotonic();
        self.warm.as_ref().is_some_and(|warm| warm.holders.is_sweep_due(now))
    }

    /// Frees memory held by processes of an earlier run that have ended.
    pub(crate) fn release_dead_holders(&self) {
        if let Some(warm) = &self.warm {
            warm.holders.sweep(self.clock.monotonic());
        }
    }

    /// Notes for the operator on the pool of an earlier run.
    pub(crate) fn warm_notes(&self) -> &[String] {
        self.warm.as_ref().map_or(&[], |warm| &warm.notes)
    }

    /// At the end of a clean close: removes the files of the pool, unless its blocks are kept.
    pub(crate) fn remove_pool_files(&self) -> Result<(), StoreError> {
        match &self.warm {
            Some(warm) if self.config.keep_pool == KeepPool::AfterCrash => {
                warm.holders.remove_files().map_err(|error| StoreError::Memory(Arc::new(error)))
            }
            _ => Ok(()),
        }
    }

    /// Counts the restored blocks.
    pub(crate) fn count_restored(&mut self, started: Duration) {
        let state = self.lock();
        let (blocks, bytes) = (state.catalog.key_count() as u64, state.dram_bytes);
        drop(state);
        let took = self.clock.monotonic().saturating_sub(started);
        if let Some(warm) = &mut self.warm {
            warm.stats.recovered_blocks = blocks;
            warm.stats.recovered_bytes = bytes;
            // Added to the time that opening the pool took.
            warm.stats.recover_ms += millis(took);
        }
    }
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
        state.dram_bytes += u64::from(facts.bytes);
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

impl Store {
    /// Records in the ledger that another process may access pieces of the pool. If this process
    /// dies, the next run does not reuse these pieces while the other process lives. Records all
    /// pieces or none; on an error, do not pass the pieces to the process. Cheap, and always `Ok`
    /// without a `pool_file`.
    ///
    /// # Errors
    /// [`StoreError::Limit`] if the process would exceed its share of the ledger: a process may
    /// hold as many pieces as remain free for the others.
    pub fn record_held(
        &self,
        pieces: &[HeldPiece],
        process: Process,
        ids: &mut Vec<HeldId>,
    ) -> Result<(), StoreError> {
        if let Some(warm) = &self.core().warm {
            return warm.holders.record(pieces, process, ids);
        }
        ids.extend(pieces.iter().map(|_| HeldId::none()));
        Ok(())
    }

    /// Removes records of [`Store::record_held`], because the process has released the pieces. Must
    /// be called before the pieces are freed.
    pub fn release_held(&self, ids: impl IntoIterator<Item = HeldId>) {
        if let Some(warm) = &self.core().warm {
            warm.holders.release_ids(ids);
        }
    }

    /// Releases all memory of an earlier run that a process holds, because it no longer accesses
    /// it. Returns the number of pieces. Without this call they are released when the process ends.
    pub fn release_process(&self, pid: u32) -> usize {
        let core = self.core();
        let released = core.warm.as_ref().map_or(0, |warm| warm.holders.release_process(pid));
        if released > 0 {
            core.notify_changed();
        }
        released
    }
}
