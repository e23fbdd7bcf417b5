//! Shrinks a stage whose capacity was reduced, a part at a time.

use std::sync::Arc;
use std::time::Duration;

use cascade_runtime::Deadline;
use cascade_tier::tier::MakeRoomOutcome;

use crate::core::circuit::Direction;
use crate::core::health_signal::HealthSignal;
use crate::drive::breaker::record_health;
use crate::drive::room::make_room;
use crate::shared::StoreCore;
use crate::shared::hold::StateGuard;

/// Steps in a row that keep at least as many blocks as they drop. The next step keeps none, to make
/// sure that the stage gets smaller.
const KEEPING_STEPS_MAX: u32 = 4;
/// Times that room is made in one step. A stage that writes segments or the like needs two to get
/// smaller in spite of the writes between two steps.
const ROUNDS: u32 = 2;
/// Pause after a stage has failed to make room, or had none to make, unless there is something to
/// write.
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
            if !self.make_room(core, stage) {
                return;
            }
        }
    }

    /// Returns whether the stage has made room.
    fn make_room(&mut self, core: &Arc<StoreCore>, stage: usize) -> bool {
        if !core.stages[stage].is_shrinking() {
            self.keeping_steps = 0;
            return false;
        }
        let state = core.lock();
        // A close waits for the mover. The next opening goes on.
        let is_possible = !state.is_closing && !state.is_write_circuit_open(stage);
        drop(state);
        if !is_possible {
            return false;
        }
        let deadline = Deadline::after(&*core.clock, core.config.timeout);
        let may_keep = self.keeping_steps < KEEPING_STEPS_MAX;
        match make_room(core, stage, may_keep, deadline) {
            Ok(room) if is_empty(&room) => {
                // A tier of files has none to remove while all that it has are being written.
                pause(core, core.lock(), stage);
                false
            }
            Ok(room) => {
                let is_kept = may_keep && room.moved.len() >= room.dropped.len();
                self.keeping_steps = if is_kept { self.keeping_steps + 1 } else { 0 };
                true
            }
            Err(error) => {
                let mut state = core.lock();
                let signal = HealthSignal::of([Some(&error)].into_iter(), false);
                record_health(core, &mut state, stage, Direction::Writes, signal);
                state.note_error(stage, error);
                pause(core, state, stage);
                false
            }
        }
    }
}

fn is_empty(room: &MakeRoomOutcome) -> bool {
    room.moved.is_empty() && room.dropped.is_empty() && room.freed_bytes == 0
}

/// Pauses the mover of a stage, unless there is something to write. Nothing wakes it for what was
/// queued while it made room.
fn pause(core: &StoreCore, state: StateGuard<'_>, stage: usize) {
    let lower = &state.lower[stage];
    let is_idle =
        lower.queue.is_empty() && lower.key_changes.is_empty() && lower.requeue_count == 0;
    if is_idle && !state.is_closing {
        core.pause(state, RETRY_DELAY);
    }
}
