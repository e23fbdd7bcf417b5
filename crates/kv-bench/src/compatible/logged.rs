//! Runs the original's workload without storing anything: what the tiers would do is logged.
//!
//! Time is simulated: it passes while users think and tokens are generated, and operations take
//! none. So a run takes as long as writing its rows, and a seed repeats all of them.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::atomic::Ordering;
use std::time::Duration;

use cascade_runtime::{Clock, ManualClock};

use crate::KvBenchError;
use crate::compatible::figures::ObjectFigures;
use crate::compatible::io_log::IoLog;
use crate::compatible::plan::{ObjectRequest, Schedule};
use crate::compatible::queue::{ObjectQueue, Pace, Taken};
use crate::compatible::run::{Shared, Worker, store_before};
use crate::compatible::waterfall::{Waterfall, WaterfallSizes};
use crate::devices::KernelCounters;
use crate::plan::Workload;
use crate::prepare::Precondition;
use crate::progress::Progress;
use crate::run::{RunOptions, RunOutcome};
use crate::window::Window;

/// Logs the operations of the workload until the end of the window, of the requests, or until it is
/// stopped. The log has the same clock. `options.workers` requests are served at once.
///
/// A row that cannot be written ends the run. [`IoLog::finish`] says why.
///
/// # Errors
/// If what requests expect to be there has no place in the tiers.
pub fn run(
    (log, clock): (&IoLog<'_>, &ManualClock),
    sizes: WaterfallSizes,
    workload: &Workload,
    options: &RunOptions,
    progress: &Progress,
) -> Result<(RunOutcome, ObjectFigures), KvBenchError> {
    let waterfall = Waterfall::logged(log, sizes, workload.seed, clock);
    // One thread, so that the order of rows depends on none. No time passes in it.
    let one = RunOptions {
        workers: 1,
        precondition: options.precondition.map(|it| Precondition { threads: 1, ..it }),
        token_time: Duration::ZERO,
        ..*options
    };
    let entries_before = store_before(&waterfall, workload, &one, progress)?;
    waterfall.start_window();
    let start = clock.monotonic();
    let window = Window { start, end: start + options.duration };
    progress.started_ns.store(1, Ordering::Relaxed);
    // Operations take no time, so that there is no tail.
    let pace = Pace { think_scale: 1.0, thread_wait: Duration::ZERO };
    let schedule = Schedule::new(workload);
    let queue = ObjectQueue::new(&schedule, workload.requests_max, pace, start);
    let shared = Shared::new((&waterfall, clock), (workload, &one), progress, window);
    if let Some(documents) = schedule.documents() {
        Worker::new(&shared).store_documents(documents);
    }
    let mut worker = Worker::new(&shared);
    // When each of the simulated workers is free again.
    let mut free: BinaryHeap<_> = (0..options.workers.max(1)).map(|_| Reverse(start)).collect();
    while let Some(Reverse(at)) = free.pop() {
        clock.set(at.min(window.end));
        if shared.is_over() || log.has_failed() {
            break;
        }
        match queue.take_at(clock.monotonic()) {
            Taken::Request(request) => {
                worker.answer(&request, &queue);
                free.push(Reverse(clock.monotonic() + generation(options, &request)));
            }
            Taken::NotBefore(due) => {
                clock.set(due.min(window.end));
                free.push(Reverse(at));
            }
            Taken::None => break,
        }
    }
    let nothing = KernelCounters { cpu: Duration::ZERO, process: None, device: None };
    Ok(shared.outcome(nothing, entries_before))
}

fn generation(options: &RunOptions, request: &ObjectRequest) -> Duration {
    let tokens = u32::try_from(request.generated_tokens).unwrap_or(u32::MAX);
    options.token_time.saturating_mul(tokens)
}
