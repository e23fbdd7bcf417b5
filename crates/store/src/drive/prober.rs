//! The prober: checks one stage in the background, so that few callers wait for a failed stage.

use std::sync::Arc;
use std::time::Duration;

use cascade_runtime::{Deadline, thread};
use cascade_tier::tier::TierError;

use crate::HealthConfig;
use crate::core::circuit::Direction;
use crate::core::health_signal::HealthSignal;
use crate::drive::breaker::{end_probe, record_health};
use crate::shared::StoreCore;

/// Checks per probe interval for a probe that is due.
const CHECKS_PER_INTERVAL: u32 = 5;
/// Longest time between two checks: hanging calls are also found by these checks.
const CHECK_INTERVAL_MAX: Duration = Duration::from_secs(1);

/// Runs until the store closes.
fn run(core: &StoreCore, stage: usize) {
    let health = core.config.health;
    let check_interval = check_interval(health);
    let mut state = core.lock();
    while !state.is_closed {
        for direction in core.stages[stage].hung_directions(health.probe_timeout * health.threshold)
        {
            state.note_error(stage, TierError::Timeout);
            record_health(core, &mut state, stage, direction, HealthSignal::Hang);
        }
        let mut has_probed = false;
        // Writes first: a successful write probe also proves that reads work.
        for direction in [Direction::Writes, Direction::Reads] {
            if !state.lower[stage].breaker.begin_probe(direction, core.clock.monotonic()) {
                continue;
            }
            has_probed = true;
            // The probe can take its whole time-out: no call may wait for it.
            drop(state);
            let deadline = Deadline::after(&*core.clock, health.probe_timeout);
            let result = core.stages[stage].probe(direction, deadline);
            state = core.lock();
            // The close has aborted the probe: its result says nothing about the stage.
            if state.is_closed {
                return;
            }
            end_probe(core, &mut state, stage, direction, result);
        }
        // After a probe the checks are overdue, because it may have taken longer than their
        // interval.
        if !has_probed {
            state = core.wait_for_prober_wakeup(state, check_interval);
        }
    }
}

/// Time between two checks.
pub(crate) fn check_interval(health: HealthConfig) -> Duration {
    (health.probe_interval / CHECKS_PER_INTERVAL).min(health.probe_timeout).min(CHECK_INTERVAL_MAX)
}

/// Starts the prober thread of a stage.
pub(crate) fn start(
    core: &Arc<StoreCore>,
    stage: usize,
) -> std::io::Result<thread::JoinHandle<()>> {
    let core = Arc::clone(core);
    thread::Builder::new()
        .name(format!("cascade-prober-{}", core.stages[stage].name()))
        .spawn(move || run(&core, stage))
}
