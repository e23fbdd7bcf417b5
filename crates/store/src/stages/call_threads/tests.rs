//! Tests of calls that end in time, late, or never, some on a manual clock.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use cascade_runtime::{Deadline, ManualClock, SystemClock};

use super::{CallThreads, WaitLimit};
use crate::stage::StageError;

fn never() -> AtomicBool {
    AtomicBool::new(false)
}

fn wait_limit(milliseconds: u64, is_cancelled: &AtomicBool) -> WaitLimit<'_> {
    let deadline = Deadline::after(&SystemClock, Duration::from_millis(milliseconds));
    WaitLimit { deadline, is_cancelled, is_watched: true }
}

fn threads(calls_max: usize) -> CallThreads {
    CallThreads::new(calls_max, Arc::new(SystemClock))
}

#[test]
fn a_hung_call_times_out_and_its_late_result_is_delivered() {
    let (threads, never) = (threads(1), never());
    let (release, hold) = mpsc::channel::<u32>();
    let (sender, receiver) = mpsc::channel();
    let late = move |value| sender.send(value).unwrap();
    let result = threads.call(wait_limit(10, &never), move || hold.recv().unwrap(), late);
    assert!(matches!(result, Err(StageError::Timeout)), "{result:?}");
    assert_eq!(threads.stuck_calls(), 1);
    let refused = threads.call(wait_limit(60_000, &never), || 1, drop);
    assert!(
        matches!(refused, Err(StageError::CircuitOpen)),
        "at once, as no thread is left: {refused:?}"
    );
    release.send(7).unwrap();
    assert_eq!(receiver.recv().unwrap(), 7);
    assert_eq!(threads.call(wait_limit(60_000, &never), || 8, drop).unwrap(), 8);
    assert_eq!(threads.stuck_calls(), 0);
}

/// The handler for late results outlived its call for a moment, and kept a closed store alive:
/// opening it again found its memory in use.
#[test]
fn everything_passed_to_a_call_is_dropped_before_it_returns() {
    struct DropFlag(Arc<AtomicBool>);
    impl Drop for DropFlag {
        fn drop(&mut self) {
            std::thread::park_timeout(Duration::from_millis(50));
            self.0.store(true, Ordering::Release);
        }
    }
    let (threads, never) = (threads(1), never());
    let is_gone: [Arc<AtomicBool>; 2] = Default::default();
    let [worked, stood_by] = is_gone.clone().map(DropFlag);
    let work = move || drop(worked);
    threads.call(wait_limit(60_000, &never), work, move |()| drop(stood_by)).unwrap();
    assert!(is_gone.iter().all(|is_gone| is_gone.load(Ordering::Acquire)));
}

#[test]
fn a_wait_ends_at_once_when_it_is_cancelled() {
    let (threads, is_cancelled) = (threads(1), AtomicBool::new(false));
    let (_release, hold) = mpsc::channel::<u32>();
    std::thread::scope(|scope| {
        let waiting = scope
            .spawn(|| threads.call(wait_limit(600_000, &is_cancelled), move || hold.recv(), drop));
        is_cancelled.store(true, Ordering::Release);
        let result = waiting.join().unwrap();
        assert!(matches!(result, Err(StageError::CircuitOpen)), "{result:?}");
    });
}

/// An erase that was refused while the circuit was open was executed later, and erased new blocks.
#[test]
fn a_refused_call_is_never_executed() {
    let (threads, is_cancelled) = (threads(1), AtomicBool::new(true));
    let is_made = Arc::new(AtomicBool::new(false));
    let made = Arc::clone(&is_made);
    let work = move || made.store(true, Ordering::Release);
    let refused = threads.call(wait_limit(600_000, &is_cancelled), work, drop);
    assert!(matches!(refused, Err(StageError::CircuitOpen)), "{refused:?}");
    is_cancelled.store(false, Ordering::Release);
    threads.call(wait_limit(600_000, &is_cancelled), || (), drop).unwrap();
    assert!(!is_made.load(Ordering::Acquire));
}

#[test]
fn a_panic_is_an_error_and_its_thread_serves_the_next_call() {
    let (threads, never) = (threads(1), never());
    let result = threads.call(wait_limit(60_000, &never), || panic!("injected"), |(): ()| ());
    assert!(matches!(result, Err(StageError::NoResult)), "{result:?}");
    assert_eq!(threads.call(wait_limit(60_000, &never), || 1, drop).unwrap(), 1);
}

#[test]
fn more_callers_than_threads_take_turns() {
    let (threads, never) = (threads(2), never());
    std::thread::scope(|scope| {
        for number in 0..8 {
            let (threads, never) = (&threads, &never);
            scope.spawn(move || {
                for _ in 0..50 {
                    let result = threads.call(wait_limit(60_000, never), move || number, drop);
                    assert_eq!(result.unwrap(), number);
                }
            });
        }
    });
    assert!(threads.shared.lock().threads <= 2);
}

#[test]
fn a_call_that_lasts_too_long_is_reported_once() {
    let clock = Arc::new(ManualClock::default());
    let threads = CallThreads::new(1, Arc::clone(&clock) as _);
    let (is_cancelled, limit) = (AtomicBool::new(false), Duration::from_secs(3));
    let (_release, hold) = mpsc::channel::<u32>();
    std::thread::scope(|scope| {
        let deadline = Deadline::after(&*clock, Duration::from_secs(30));
        let wait_limit = WaitLimit { deadline, is_cancelled: &is_cancelled, is_watched: true };
        let caller = &threads;
        let waiting = scope.spawn(move || caller.call(wait_limit, move || hold.recv(), drop));
        while threads.shared.lock().running.is_empty() {
            std::thread::yield_now();
        }
        assert!(!threads.has_hung(limit));
        clock.advance(Duration::from_secs(4));
        assert!(threads.has_hung(limit));
        assert!(!threads.has_hung(limit), "one call opens the circuit once");
        clock.advance(Duration::from_secs(30));
        assert!(matches!(waiting.join().unwrap(), Err(StageError::Timeout)));
    });
}
