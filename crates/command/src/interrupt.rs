//! Control-C and SIGTERM: the first stops the run and reports, the second ends the process at once.

use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::Builder;
use std::time::Duration;

use cascade_runtime::{Clock, SystemClock};
use signal_hook::consts::SIGTERM;
use signal_hook::iterator::Signals;

use crate::{EXIT_INTERRUPTED, Failure};

static IS_REQUESTED: AtomicBool = AtomicBool::new(false);
/// When it was requested first.
static FIRST: OnceLock<Duration> = OnceLock::new();

/// A second signal within this time is the first one again: `timeout --signal=INT` sends it to its
/// child and to its group.
const REPEAT: Duration = Duration::from_millis(500);

/// Installs the signal handlers, once per process.
pub(super) fn install_handler() -> Result<(), Failure> {
    static INSTALLED: OnceLock<Result<(), String>> = OnceLock::new();
    let installed = INSTALLED.get_or_init(|| {
        ctrlc::set_handler(on_signal).map_err(|error| error.to_string())?;
        stop_on_termination().map_err(|error| error.to_string())
    });
    installed.clone().map_err(|reason| Failure::other("install a handler for Control-C", reason))
}

fn on_signal() {
    let now = SystemClock.monotonic();
    let first = *FIRST.get_or_init(|| now);
    let is_repeat = now.saturating_sub(first) < REPEAT;
    if IS_REQUESTED.swap(true, Ordering::Relaxed) && !is_repeat {
        std::process::exit(EXIT_INTERRUPTED);
    }
}

/// Schedulers of clusters end a job with SIGTERM. `ctrlc` would take SIGHUP together with it, which
/// `nohup` ignores.
fn stop_on_termination() -> io::Result<()> {
    let mut signals = Signals::new([SIGTERM])?;
    let wait = move || signals.forever().for_each(|_| on_signal());
    Builder::new().name("termination".to_owned()).spawn(wait).map(drop)
}

/// Acts as if Control-C was pressed, for a process whose parent has ended or wants it to stop.
pub(super) fn request() {
    IS_REQUESTED.store(true, Ordering::Relaxed);
}

/// Whether Control-C was pressed.
pub(super) fn is_requested() -> bool {
    IS_REQUESTED.load(Ordering::Relaxed)
}
