//! The store's reaction when the circuit of a stage opens and closes.
//!
//! While the read circuit is open, reads treat the stage as empty and continue with the next tier.
//! While the write circuit is open, no block is queued for the stage; blocks that it should have
//! are listed, and queued when the circuit closes. An open write circuit does not affect reads.

use cascade_tier::tier::TierError;

use crate::core::circuit::{CircuitChange, Direction};
use crate::core::health_signal::HealthSignal;
use crate::core::state::StoreState;
use crate::shared::StoreCore;

/// Records the health signal of a call, and applies the change of the circuit.
pub(crate) fn record_health(
    core: &StoreCore,
    state: &mut StoreState,
    stage: usize,
    direction: Direction,
    signal: HealthSignal,
) {
    if let (HealthSignal::Failure(error), Direction::Writes) = (&signal, direction) {
        // Before the circuit can open: callers then report this error.
        state.note_error(stage, error.clone());
    }
    let now = core.clock.monotonic();
    let breaker = &mut state.lower[stage].breaker;
    let change = match signal {
        HealthSignal::Success => {
            breaker.succeed(direction, now);
            CircuitChange::None
        }
        HealthSignal::Failure(error) => {
            core.wake_probers();
            breaker.fail(direction, error, now, core.clock.unix_ms())
        }
        HealthSignal::Hang => breaker.hang(direction, now, core.clock.unix_ms()),
        HealthSignal::Inconclusive => {
            breaker.suspect(direction, now);
            core.wake_probers();
            CircuitChange::None
        }
        HealthSignal::None => CircuitChange::None,
    };
    apply_circuit_change(core, state, stage, direction, change);
}

/// Records the result of a probe, and applies the change of the circuit.
pub(crate) fn end_probe(
    core: &StoreCore,
    state: &mut StoreState,
    stage: usize,
    direction: Direction,
    result: Result<(), TierError>,
) {
    if let Err(error) = &result {
        state.note_error(stage, error.clone());
    }
    let (now, now_unix_ms) = (core.clock.monotonic(), core.clock.unix_ms());
    let is_writable = result.is_ok() && direction == Direction::Writes;
    if is_writable && !state.lower[stage].unstored.is_empty() {
        // The circuit stayed closed because too few writes failed: retry those now.
        state.lower[stage].requeue_count = state.lower[stage].unstored.len();
        core.notify_movers();
    }
    let change = state.lower[stage].breaker.end_probe(direction, result, now, now_unix_ms);
    apply_circuit_change(core, state, stage, direction, change);
}

/// Opens or closes a circuit for all users: the guard of the stage, the bits in the state, and
/// the queues.
fn apply_circuit_change(
    core: &StoreCore,
    state: &mut StoreState,
    stage: usize,
    direction: Direction,
    change: CircuitChange,
) {
    let is_open = match change {
        CircuitChange::None => return,
        CircuitChange::Opened => true,
        CircuitChange::Closed => false,
    };
    // Opening ends the waits for the calls in flight in this direction.
    core.stages[stage].set_circuit_open(direction, is_open);
    let bits = match direction {
        Direction::Reads => &mut state.open_read_circuits,
        Direction::Writes => &mut state.open_write_circuits,
    };
    *bits = *bits & !(1 << stage) | u8::from(is_open) << stage;
    match (direction, is_open) {
        // All blocks that only this stage has become unreadable or readable at once, too many
        // for single entries in the change log: followers start again.
        (Direction::Reads, _) => state.invalidate_change_cursors(),
        // The mover fails the queued blocks.
        (Direction::Writes, true) => core.notify_movers(),
        (Direction::Writes, false) => {
            // The mover sends the queued key changes before it writes these blocks.
            state.lower[stage].requeue_count = state.lower[stage].unstored.len();
            core.notify_movers();
        }
    }
    core.notify_changed();
}

/// Whether no tier accepts blocks: the pipeline has no DRAM, and the write circuits of all
/// stages that keep bytes are open.
pub(crate) fn has_no_writable_tier(core: &StoreCore, state: &StoreState) -> bool {
    let mut keepers = (0..core.stages.len()).filter(|at| !core.stages[*at].keeps_names_only());
    !state.memory.keeps_blocks
        && state.open_write_circuits != 0
        && keepers.all(|stage| state.is_write_circuit_open(stage))
}
