//! The prober: checks one stage in the background, so that few callers wait for a failed stage.

use std::sync::Arc;
use std::time::Duration;

use cascade_block::Deadline;

use crate::circuits::HealthSignal;
use crate::health::Direction;
use crate::node::Node;
use crate::stage::StageError;

/// Checks per probe interval for a probe that is due.
const CHECKS_PER_INTERVAL: u32 = 5;
/// Longest time between two checks: hanging calls are also found by these checks.
const CHECK_INTERVAL_MAX: Duration = Duration::from_secs(1);

/// Runs until the store closes.
fn run(node: &Node, stage: usize) {
    let health = node.config.health;
    let check_interval = (health.probe_interval / CHECKS_PER_INTERVAL)
        .min(health.probe_timeout)
        .min(CHECK_INTERVAL_MAX);
    let mut state = node.lock();
    while !state.is_closed {
        for direction in node.stages[stage].hung(health.probe_timeout * health.threshold) {
            state.note_error(stage, StageError::Timeout);
            node.record_health(&mut state, stage, direction, HealthSignal::Hang);
        }
        let mut has_probed = false;
        // Writes first: a successful write probe also proves that reads work.
        for direction in [Direction::Writes, Direction::Reads] {
            if !state.breakers[stage].begin_probe(direction, node.clock.monotonic()) {
                continue;
            }
            has_probed = true;
            drop(state);
            let deadline = Deadline::after(&*node.clock, health.probe_timeout);
            let result = node.stages[stage].probe(direction, deadline);
            state = node.lock();
            if state.is_closed {
                return;
            }
            node.end_probe(&mut state, stage, direction, result);
        }
        if !has_probed {
            state = node.wait_for_prober_wakeup(state, check_interval);
        }
    }
}

/// Starts the prober thread of a stage.
pub(crate) fn start(
    node: &Arc<Node>,
    stage: usize,
) -> std::io::Result<std::thread::JoinHandle<()>> {
    let node = Arc::clone(node);
    std::thread::Builder::new()
        .name(format!("cascade-prober-{}", node.stages[stage].name()))
        .spawn(move || run(&node, stage))
}
