//! Write-through: a put returns only once every tier has its blocks.

use cascade_tier::tier::TierError;
use cascade_tier::{Put, PutOutcome, StoreError};

use crate::WritePolicy;
use crate::calls::put_facts::facts;
use crate::core::awaited::Place;
use crate::core::history::Loss;
use crate::core::state::StoreState;
use crate::shared::call::CallContext;
use crate::shared::hold::StateGuard;
use crate::shared::{StoreCore, tier_error};

/// Whether a put waits for the stages. Without DRAM no tier keeps the block until a stage has
/// written it, so that the put waits as with write-through.
pub(super) fn waits_for_writes(core: &StoreCore) -> bool {
    core.config.write == WritePolicy::Through || !core.pipeline.keeps_in_memory
}

/// Waits for the writes of the blocks of a put.
#[derive(Debug, Clone, Copy)]
pub(super) struct WriteThrough<'a> {
    pub(super) core: &'a StoreCore,
    pub(super) call: CallContext,
}

impl<'a> WriteThrough<'a> {
    /// Waits until every stage has written the block, or until another caller has removed it. A
    /// block that is only in DRAM, because an earlier write failed, is queued once more. `place` is
    /// the block of a put that stored it; the writes of this block are awaited already.
    pub(super) fn wait_written(
        self,
        (put, bytes): (&Put<'_>, usize),
        outcome: &PutOutcome,
        place: Option<Place>,
    ) -> Result<(), StoreError> {
        use PutOutcome::{Deduplicated, Present, Stored};
        if !matches!(outcome, Stored | Deduplicated | Present) {
            return Ok(());
        }
        let mut state = if place.is_some() {
            self.core.lock()
        } else {
            self.core.lock_or_time_out("put", self.call)?
        };
        let place = if let Some(place) = place {
            place
        } else {
            let Some(place) = place_of(&state, put, bytes) else {
                return self.result_without_block(&state, put, 0);
            };
            state.awaited.begin(place);
            place
        };
        let (mut state, written) = self.wait_for_stages(state, put, place);
        state.awaited.end(place);
        written?;
        if matches!(outcome, Deduplicated) {
            if let Some(stage) =
                (0..self.core.stages.len()).find(|stage| state.is_write_circuit_open(*stage))
            {
                return Err(self.core.stage_error(&state, stage, "record a key"));
            }
            let tickets = state.key_changes_pushed();
            drop(self.core.wait_for_key_changes(state, tickets, "put", self.call)?);
        }
        Ok(())
    }

    /// The result of a put that does not wait any longer; `None` if a stage has yet to write the
    /// block.
    pub(super) fn result_now(
        self,
        state: &mut StoreState,
        (put, bytes): (&Put<'_>, usize),
        outcome: &PutOutcome,
        place: Option<Place>,
    ) -> Option<Result<(), StoreError>> {
        use PutOutcome::{Deduplicated, Present, Stored};
        if !matches!(outcome, Stored | Deduplicated | Present) {
            return Some(Ok(()));
        }
        let Some(place) = place.or_else(|| place_of(state, put, bytes)) else {
            return Some(self.result_without_block(state, put, 0));
        };
        for stage in 0..self.core.stages.len() {
            let result = self.result_so_far(state, stage, put, place)?;
            let is_recorded = !matches!(outcome, Deduplicated)
                || !state.lower[stage].additions.is_pending(&put.key);
            if result.is_err() || !is_recorded {
                return result.is_err().then_some(result);
            }
        }
        Some(Ok(()))
    }

    fn wait_for_stages(
        self,
        mut state: StateGuard<'a>,
        put: &Put<'_>,
        place: Place,
    ) -> (StateGuard<'a>, Result<(), StoreError>) {
        for stage in 0..self.core.stages.len() {
            let mut was_queued = false;
            loop {
                if let Some(result) = self.result_so_far(&mut state, stage, put, place) {
                    match result {
                        Ok(()) => break,
                        Err(error) => return (state, Err(error)),
                    }
                }
                let content = state.catalog.content(place.0);
                let content_bytes = content.bytes;
                if content.dirty & (1 << stage) == 0 {
                    if was_queued || content.slab.is_none() || state.is_write_circuit_open(stage) {
                        let error = self.core.stage_error(&state, stage, "write a block");
                        return (state, Err(error));
                    }
                    was_queued = true;
                    let digest = state.catalog.digest_of(place.0).copied();
                    let bytes = content_bytes as usize;
                    let facts = facts(&*self.core.clock, put, bytes, digest);
                    state.push_block(stage, facts, place.0);
                    self.core.notify_movers();
                }
                let (again, in_time) = self.core.wait_for_change(state, self.call);
                state = again;
                if !in_time {
                    return (state, Err(self.call.timeout_error("put")));
                }
            }
        }
        (state, Ok(()))
    }

    /// The result of a stage for a block; `None` as long as the stage has yet to write it.
    fn result_so_far(
        self,
        state: &mut StoreState,
        stage: usize,
        put: &Put<'_>,
        place: Place,
    ) -> Option<Result<(), StoreError>> {
        match state.awaited.result(place, stage) {
            Some(Ok(())) => return Some(Ok(())),
            // The error that opened the circuit says more.
            Some(Err(TierError::CircuitOpen)) if !state.is_closed => {
                return Some(Err(self.core.stage_error(state, stage, "write a block")));
            }
            Some(Err(error)) if !state.is_closed => {
                return Some(Err(tier_error(
                    &self.core.stages[stage],
                    "write a block",
                    error.clone(),
                )));
            }
            // The close has ended all writes, which says nothing about the stage.
            _ if state.is_closed => return Some(Err(StoreError::Closed)),
            _ => {}
        }
        let Some(content) = state.catalog.live_content(place) else {
            return Some(self.result_without_block(state, put, stage));
        };
        content.has_address(stage).then_some(Ok(()))
    }

    /// The result for a block that is no longer in the store. Success if a caller removed it, or if
    /// a tier dropped it after its write: neither says anything about the put.
    fn result_without_block(
        self,
        state: &StoreState,
        put: &Put<'_>,
        stage: usize,
    ) -> Result<(), StoreError> {
        if state.is_closed {
            return Err(StoreError::Closed);
        }
        match state.history.loss_of(&put.key) {
            Some((
                Loss::EvictedUnwritten | Loss::Unwritten | Loss::Damaged | Loss::PutFailed,
                _,
            )) => Err(self.core.stage_error(state, stage, "write a block")),
            _ => Ok(()),
        }
    }
}

/// The block of a put whose key was present.
fn place_of(state: &StoreState, put: &Put<'_>, bytes: usize) -> Option<Place> {
    let content = state.catalog.entry(state.catalog.find(&put.key)?).content;
    let entry = state.catalog.content(content);
    // Else it was removed after the put, and put with other bytes by another caller.
    (entry.bytes as usize == bytes).then_some((content, entry.generation))
}
