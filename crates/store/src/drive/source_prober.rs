//! The prober of a source: finds hung calls, and probes the source while it is idle or its circuit
//! is open.

use std::sync::Arc;

use cascade_runtime::thread;

use crate::drive::prober::check_interval;
use crate::shared::StoreCore;

/// Runs until the store closes.
fn run(core: &StoreCore, source: usize) {
    let health = core.config.health;
    loop {
        let has_probed = core.sources.list[source].probe_if_due(health);
        let state = core.lock();
        if state.is_closed {
            return;
        }
        // After a probe the checks are overdue, because it may have taken longer than their
        // interval.
        if !has_probed {
            drop(core.wait_for_prober_wakeup(state, check_interval(health)));
        }
    }
}

/// Starts the prober thread of a source.
pub(crate) fn start(
    core: &Arc<StoreCore>,
    source: usize,
) -> std::io::Result<thread::JoinHandle<()>> {
    let core = Arc::clone(core);
    thread::Builder::new()
        .name(format!("cascade-prober-{}", core.sources.list[source].name()))
        .spawn(move || run(&core, source))
}
