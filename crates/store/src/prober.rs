//! The prober: watches one stage, so that a dead one is found before many have waited for it.

use std::sync::Arc;
use std::time::Duration;

use cascade_block::Deadline;

use crate::health::Direction;
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
        for direction in node.stages[stage].hung(health.probe_timeout * health.threshold) {
            state.note_error(stage, StageError::Timeout);
            node.judge(&mut state, stage, direction, Verdict::Hangs);
        }
        let mut has_probed = false;
        // A probe of writing that succeeds says that reads work, too: it goes first.
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
