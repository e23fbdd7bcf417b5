//! Checks a put against the catalog before its bytes are copied.

use cascade_block::{Digest, DigestMode};
use cascade_tier::{DeclineReason, Put, PutOutcome, StoreError};

use crate::calls::put_facts::{facts, new_key};
use crate::core::catalog::{ContentIndex, KeyIndex};
use crate::core::state::StoreState;
use crate::drive::breaker::has_no_writable_tier;
use crate::shared::{StoreCore, Timestamps};

/// Result of checking a put against the catalog.
pub(super) enum PutCheck {
    /// The block needs a slab. Its key, if it is present: then its bytes cannot be read.
    New(Option<KeyIndex>),
    /// The outcome is known without its bytes.
    Settled(PutOutcome),
    /// The key is present; the bytes have to be compared.
    Compare,
}

/// Checks puts under one hold of the lock.
#[derive(Debug, Clone, Copy)]
pub(super) struct Admission<'a> {
    core: &'a StoreCore,
    pub(super) now: Timestamps,
}

impl<'a> Admission<'a> {
    /// Reads the clocks: once for all blocks of a hold.
    pub(super) fn new(core: &'a StoreCore, state: &mut StoreState) -> Self {
        Self { core, now: core.timestamps(state) }
    }

    /// Checks everything that can refuse a new block: the store's state first, then the block's own
    /// properties.
    fn check_new(self, state: &StoreState, put: &Put<'_>, bytes: usize) -> PutCheck {
        let declined = |reason| PutCheck::Settled(PutOutcome::Declined(reason));
        if state.is_closing {
            return PutCheck::Settled(PutOutcome::Failed(StoreError::Closed));
        }
        if has_no_writable_tier(self.core, state) {
            // At least one bit is set: `has_no_writable_tier` has checked it.
            let circuit = state.open_write_circuits.trailing_zeros() as usize;
            let error = self.core.stage_error(state, circuit, "store a block");
            return PutCheck::Settled(PutOutcome::Failed(error));
        }
        if state.is_erasing {
            return PutCheck::Settled(PutOutcome::Failed(StoreError::Erasing));
        }
        if !state.memory.keeps_blocks && self.core.stages.is_empty() {
            return declined(DeclineReason::Empty);
        }
        if put.is_partial && !self.core.config.admit_partial {
            return declined(DeclineReason::Partial);
        }
        if u32::try_from(bytes).is_err() {
            return declined(DeclineReason::TooLarge);
        }
        PutCheck::New(None)
    }

    /// Decides about a block of this length, whose bytes need not be there yet.
    pub(super) fn check(
        self,
        state: &mut StoreState,
        put: &Put<'_>,
        bytes: usize,
        digest: Option<Digest>,
    ) -> PutCheck {
        if let Some(key) = state.find_live(&put.key, self.now.unix_ms) {
            let index = state.catalog.entry(key).content;
            let content = state.catalog.content(index);
            if content.bytes as usize != bytes {
                return PutCheck::Settled(PutOutcome::Conflict);
            }
            if state.is_unreadable(content) {
                return match self.check_by_digest(state, put, index, digest) {
                    PutCheck::New(_) => PutCheck::New(Some(key)),
                    settled => settled,
                };
            }
            let keeps_bytes = |stage: usize| !self.core.stages[stage].keeps_names_only();
            let has_bytes = (0..self.core.stages.len())
                .any(|stage| content.has_address(stage) && keeps_bytes(stage));
            let is_same = digest.is_some() && digest.as_ref() == state.catalog.digest_of(index);
            // Different digests may come from two algorithms, the catalog's from an earlier run:
            // only the bytes decide. If only stages without bytes have the block, there is nothing
            // to compare.
            return if is_same || (content.slab.is_none() && !has_bytes) {
                PutCheck::Settled(PutOutcome::Present)
            } else {
                PutCheck::Compare
            };
        }
        // Only a new block needs admission: a present key has its outcome even while no block is
        // accepted.
        if let PutCheck::Settled(outcome) = self.check_new(state, put, bytes) {
            return PutCheck::Settled(outcome);
        }
        state.forget_cleared(&put.key);
        match digest.and_then(|digest| state.catalog.find_digest(&digest)) {
            // A key linked to bytes that cannot be read would be a miss: such bytes are stored
            // again.
            Some(content) if !state.is_unreadable(state.catalog.content(content)) => {
                PutCheck::Settled(self.deduplicate(state, put, digest, content))
            }
            Some(_) | None => PutCheck::New(None),
        }
    }

    /// A put of a present key. Its bytes are only in stages with an open circuit, so they cannot be
    /// compared. Bytes with an equal digest are stored in DRAM again. Others are refused: if the
    /// process ended before a stage forgot the old bytes, they would be served under this key after
    /// a restart.
    fn check_by_digest(
        self,
        state: &StoreState,
        put: &Put<'_>,
        index: ContentIndex,
        digest: Option<Digest>,
    ) -> PutCheck {
        let known = state.catalog.digest_of(index);
        let is_same = match digest {
            Some(digest) => known == Some(&digest),
            // The bytes are not available yet; they are compared later.
            None => known.is_some() && self.core.config.digest != DigestMode::Off,
        };
        if is_same {
            return self.check_new(state, put, state.catalog.content(index).bytes as usize);
        }
        let content = state.catalog.content(index);
        let has_it =
            |stage: &usize| content.has_address(*stage) && state.is_read_circuit_open(*stage);
        let stage = (0..self.core.stages.len()).find(has_it).unwrap_or(0);
        let error = self.core.stage_error(state, stage, "compare a block that only this tier has");
        PutCheck::Settled(PutOutcome::Failed(error))
    }

    /// Links a key to a content that is already present under another key.
    fn deduplicate(
        self,
        state: &mut StoreState,
        put: &Put<'_>,
        digest: Option<Digest>,
        content: ContentIndex,
    ) -> PutOutcome {
        let bytes = state.catalog.content(content).bytes as usize;
        let facts = facts(&*self.core.clock, put, bytes, digest);
        let key = state.catalog.link(&new_key(&facts), content);
        state.history.forget(&put.key);
        if state.catalog.content(content).slab.is_some() {
            state.record(key, Some(&facts));
            state.make_resident(key, self.now.policy);
        }
        // The new key is the first one.
        let other = state.catalog.each_key_of(content).nth(1);
        let other = state.catalog.entry(other.expect("the content had a key")).key;
        let place = (content, state.catalog.content(content).generation);
        for stage in 0..self.core.stages.len() {
            // For a content that is still queued, the mover adds its other keys after the write.
            if let Some(address) = state.catalog.address(content, stage) {
                state.push_addition(stage, facts, address, (place, other));
            }
        }
        PutOutcome::Deduplicated
    }
}
