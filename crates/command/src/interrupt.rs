//! Control-C: the first one stops the run and reports, the second ends the process at once.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cascade_runtime::{Clock, SystemClock};

use crate::{EXIT_INTERRUPTED, Failure};

static IS_REQUESTED: AtomicBool = AtomicBool::new(false);
/// When it was requested first.
static FIRST: OnceLock<Duration> = OnceLock::new();

/// A second signal within this time is the first one again: `timeout --signal=INT` sends it to its
/// child and to its group.
const REPEAT: Duration = Duration::from_millis(500);

/// Installs the signal handler, once per process.
pub(super) fn install_handler() -> Result<(), Failure> {
    static INSTALLED: OnceLock<Result<(), String>> = OnceLock::new();
    let installed = INSTALLED.get_or_init(|| {
        let handler = || {
            let now = SystemClock.monotonic();
            let first = *FIRST.get_or_init(|| now);
            let is_repeat = now.saturating_sub(first) < REPEAT;
            if IS_REQUESTED.swap(true, Ordering::Relaxed) && !is_repeat {
                std::process::exit(EXIT_INTERRUPTED);
            }
        };
        ctrlc::set_handler(handler).map_err(|error| error.to_string())
    });
    installed.clone().map_err(|reason| Failure::other("install a handler for Control-C", reason))
}

/// Acts as if Control-C was pressed, for a process whose parent has ended or wants it to stop.
pub(super) fn request() {
    IS_REQUESTED.store(true, Ordering::Relaxed);
}

/// Whether Control-C was pressed.
pub(super) fn is_requested() -> bool {
    IS_REQUESTED.load(Ordering::Relaxed)
}
