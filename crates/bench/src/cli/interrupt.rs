//! Control-C: the first asks to stop and report, the second ends the process at once.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::cli::{EXIT_INTERRUPTED, Failure};

static IS_ASKED: AtomicBool = AtomicBool::new(false);

/// Takes over the signal, once a process.
pub(super) fn watch() -> Result<(), Failure> {
    static SET: OnceLock<Result<(), String>> = OnceLock::new();
    let set = SET.get_or_init(|| {
        let asked = || {
            if IS_ASKED.swap(true, Ordering::Relaxed) {
                std::process::exit(EXIT_INTERRUPTED);
            }
        };
        ctrlc::set_handler(asked).map_err(|error| error.to_string())
    });
    set.clone().map_err(|reason| Failure::measure("with Control-C as a way to stop", reason))
}

/// Whether someone asked to stop.
pub(super) fn is_asked() -> bool {
    IS_ASKED.load(Ordering::Relaxed)
}
