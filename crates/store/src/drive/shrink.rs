//! Shrinks a stage whose capacity was reduced, a part at a time.

use std::sync::Arc;
use std::time::Duration;

use cascade_runtime::Deadline;

use crate::core::circuit::Direction;
use crate::core::health_signal::HealthSignal;
use crate::drive::breaker::record_health;
use crate::drive::room::make_room;
use crate::shared::StoreCore;

/// Steps in a row that keep at least as many blocks as they drop. The next step keeps none, to make
/// sure that the stage gets smaller.
const KEEPING_STEPS_MAX: u32 = 4;
/// Times that room is made in one step. A stage that writes segments or the like needs two to get
/// smaller in spite of the writes between two steps.
const ROUNDS: u32 = 2;
/// Pause after a stage has failed to make room, unless there is a batch to write.
const RETRY_DELAY: Duration = Duration::from_secs(1);

/// How far the shrinking of a stage is.
#[derive(Debug, Default)]
pub(super) struct Shrink {
    keeping_steps: u32,
}

impl Shrink {
    /// Makes a part of the room if the stage has to shrink: in the file tier, removes two segments.
    /// The mover calls it between two batches, so that puts do not wait for all of it.
    pub(super) fn step(&mut self, core: &Arc<StoreCore>, stage: usize) {
        for _ in 0..ROUNDS {
            self.make_room(core, stage);
        }
    }

    fn make_room(&mut self, core: &Arc<StoreCore>, stage: usize) {
        if !core.stages[stage].is_shrinking() {
            self.keeping_steps = 0;
            return;
        }
        let state = core.lock();
        // A close waits for the mover. The next opening goes on.
        let is_possible = !state.is_closing && !state.is_write_circuit_open(stage);
        drop(state);
        if !is_possible {
            return;
        }
        let deadline = Deadline::after(&*core.clock, core.config.timeout);
        let may_keep = self.keeping_steps < KEEPING_STEPS_MAX;
        match make_room(core, stage, may_keep, deadline) {
            Ok(room) => {
                let is_kept = may_keep && room.moved.len() >= room.dropped.len();
                self.keeping_steps = if is_kept { self.keeping_steps + 1 } else { 0 };
            }
            Err(error) => {
                let mut state = core.lock();
                let signal = HealthSignal::of([Some(&error)].into_iter(), false);
                record_health(core, &mut state, stage, Direction::Writes, signal);
                state.note_error(stage, error);
                core.pause(state, RETRY_DELAY);
            }
        }
    }
}
