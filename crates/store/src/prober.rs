//! The prober: watches one stage, so that a dead one is found before many have waited for it.

use std::sync::Arc;
use std::time::Duration;

use cascade_block::Deadline;

use crate::node::Node;
use crate::shedding::Verdict;
use crate::stage::StageError;

/// It looks so many times an interval whether something is due.
const LOOKS_PER_INTERVAL: u32 = 5;
/// And no less often than this: calls that hang are counted by its looks.
const LOOK: Duration = Duration::from_secs(1);

/// Runs until the store closes.
fn run(node: &Node, stage: usize) {
    let health = node.config.health;
    let rest = (health.probe_interval / LOOKS_PER_INTERVAL).min(health.probe_timeout).min(LOOK);
    let mut state = node.lock();
    while !state.is_closed {
        if node.stages[stage].has_hung(health.probe_timeout * health.threshold) {
            state.note_error(stage, StageError::Timeout);
            node.judge(&mut state, stage, Verdict::Hangs);
        }
        if state.breakers[stage].begin_probe(node.clock.monotonic()) {
            drop(state);
            let deadline = Deadline::after(&*node.clock, health.probe_timeout);
            let result = node.stages[stage].probe(deadline);
            state = node.lock();
            if !state.is_closed {
                node.end_probe(&mut state, stage, result);
            }
        } else {
            state = node.wait_look(state, rest);
        }
    }
}

/// A prober of this node, for a thread of its own.
pub(crate) fn start(
    node: &Arc<Node>,
    stage: usize,
) -> std::io::Result<std::thread::JoinHandle<()>> {
    let node = Arc::clone(node);
    std::thread::Builder::new()
        .name(format!("cascade-prober-{}", node.stages[stage].name()))
        .spawn(move || run(&node, stage))
}
