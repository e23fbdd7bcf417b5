//! Calls that end in time, late, or never: on threads of the system, and in worlds.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use cascade_runtime::{CallError, CallLimit, Calls, Cancel, Deadline, ManualClock, SystemClock};

const LONG: Duration = Duration::from_secs(600);
/// Real time that another thread may take to get where the test waits for it.
const LIMIT: Duration = Duration::from_secs(60);

fn calls(threads_max: usize) -> Calls {
    Calls::new("test-call", threads_max, Arc::new(SystemClock))
}

fn limit(timeout: Duration) -> CallLimit<'static> {
    CallLimit::until(Deadline::after(&SystemClock, timeout))
}

fn soon() -> CallLimit<'static> {
    limit(Duration::from_millis(10))
}

/// Starts a call that hangs, waits until it has begun, and lets its deadline pass. Returns what
/// ends it and what receives its late result.
fn hang(calls: &Calls, clock: &ManualClock) -> (mpsc::Sender<u32>, mpsc::Receiver<u32>) {
    let (release, hold) = mpsc::channel();
    let (sender, receiver) = mpsc::channel();
    let (begun, has_begun) = mpsc::channel();
    let work = move || {
        begun.send(()).unwrap();
        hold.recv().unwrap_or(0)
    };
    let deadline = Deadline::after(clock, LONG);
    let late = move |value| sender.send(value).unwrap_or(());
    std::thread::scope(|scope| {
        let hung = scope.spawn(move || calls.call(CallLimit::until(deadline), work, late));
        has_begun.recv_timeout(LIMIT).unwrap();
        clock.advance(LONG);
        let result = hung.join().unwrap();
        assert!(matches!(result, Err(CallError::TimedOut)), "{result:?}");
    });
    (release, receiver)
}

#[test]
fn a_hung_call_times_out_and_its_late_result_is_delivered() {
    let clock = Arc::new(ManualClock::default());
    let calls = Calls::new("test-call", 1, Arc::clone(&clock) as _);
    let (release, late) = hang(&calls, &clock);
    assert_eq!(calls.stuck_calls(), 1);
    let patient = CallLimit::until(Deadline::after(&*clock, LONG));
    let refused = calls.call(CallLimit { refuse_if_stuck: true, ..patient }, || 1, drop);
    assert!(matches!(refused, Err(CallError::AllStuck)), "at once: {refused:?}");
    release.send(7).unwrap();
    assert_eq!(late.recv_timeout(LIMIT).unwrap(), 7);
    assert_eq!(calls.call(patient, || 8, drop).unwrap(), 8);
    assert_eq!(calls.stuck_calls(), 0);
}

/// An erase that had timed out removed files that were written later.
#[test]
fn a_call_that_times_out_before_it_starts_never_starts() {
    let calls = calls(1);
    let (release, hold) = mpsc::channel::<()>();
    calls.submit(move || hold.recv().unwrap_or(())).unwrap();
    let held = Arc::new(AtomicBool::new(false));
    let starts = Arc::clone(&held);
    let timed_out = calls.call(soon(), move || starts.store(true, Ordering::Release), drop);
    assert!(matches!(timed_out, Err(CallError::TimedOut)), "{timed_out:?}");
    assert_eq!(calls.stuck_calls(), 0);
    assert_eq!(Arc::strong_count(&held), 1, "what was passed is dropped");
    drop(release);
    calls.call(limit(LONG), || (), drop).unwrap();
    assert!(!held.load(Ordering::Acquire));
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
    let is_gone: [Arc<AtomicBool>; 2] = Default::default();
    let [worked, stood_by] = is_gone.clone().map(DropFlag);
    calls(1).call(limit(LONG), move || drop(worked), move |()| drop(stood_by)).unwrap();
    assert!(is_gone.iter().all(|is_gone| is_gone.load(Ordering::Acquire)));
}

#[test]
fn a_wait_ends_at_once_when_it_is_cancelled() {
    let (calls, cancel) = (calls(1), Cancel::new());
    let (_release, hold) = mpsc::channel::<u32>();
    std::thread::scope(|scope| {
        let limit = CallLimit { cancel: Some(&cancel), ..limit(LONG) };
        let (begun, has_begun) = mpsc::channel();
        let work = move || {
            begun.send(()).unwrap();
            hold.recv()
        };
        let calls = &calls;
        let waiting = scope.spawn(move || calls.call(limit, work, drop));
        has_begun.recv_timeout(LIMIT).unwrap();
        let queued = scope.spawn(move || calls.call(limit, || Ok(1), drop));
        std::thread::park_timeout(Duration::from_millis(10));
        cancel.set();
        for call in [waiting, queued] {
            let result = call.join().unwrap();
            assert!(matches!(result, Err(CallError::Cancelled)), "{result:?}");
        }
    });
    assert_eq!(calls.stuck_calls(), 1);
}

/// An erase that was refused while the circuit was open was executed later, and erased new blocks.
#[test]
fn a_refused_call_is_never_made() {
    let (calls, cancel) = (calls(1), Cancel::new());
    cancel.set();
    let limit = CallLimit { cancel: Some(&cancel), ..limit(LONG) };
    let is_made = Arc::new(AtomicBool::new(false));
    let made = Arc::clone(&is_made);
    let refused = calls.call(limit, move || made.store(true, Ordering::Release), drop);
    assert!(matches!(refused, Err(CallError::Cancelled)), "{refused:?}");
    cancel.clear();
    calls.call(limit, || (), drop).unwrap();
    assert!(!is_made.load(Ordering::Acquire));
}

#[test]
fn a_queued_call_is_refused_once_all_threads_are_stuck() {
    let clock = Arc::new(ManualClock::default());
    let calls = Calls::new("test-call", 1, Arc::clone(&clock) as _);
    let after = |time| CallLimit::until(Deadline::after(&*clock, time));
    let patient = CallLimit { refuse_if_stuck: true, ..after(LONG * 3) };
    std::thread::scope(|scope| {
        let calls = &calls;
        let (begun, has_begun) = mpsc::channel();
        let (release, hold) = mpsc::channel::<u32>();
        let work = move || {
            begun.send(()).unwrap();
            hold.recv()
        };
        let hung = after(LONG);
        let hung = scope.spawn(move || calls.call(hung, work, drop));
        has_begun.recv_timeout(LIMIT).unwrap();
        let queued = scope.spawn(move || calls.call(patient, || (), drop));
        std::thread::park_timeout(Duration::from_millis(10));
        clock.advance(LONG);
        assert!(matches!(hung.join().unwrap(), Err(CallError::TimedOut)));
        let refused = queued.join().unwrap();
        assert!(matches!(refused, Err(CallError::AllStuck)), "{refused:?}");
        drop(release);
    });
}

/// Each panic ended a thread that was not replaced, so all later calls timed out.
/// Its caller does other work meanwhile. When it stops waiting, a call that has begun counts as
/// stuck, and one that has not is never made.
#[test]
fn a_started_call_runs_until_its_caller_drops_it() {
    let calls = calls(1);
    let (release, hold) = mpsc::channel::<()>();
    let (begun, has_begun) = mpsc::channel();
    let first = calls.start(false, move || {
        begun.send(()).unwrap();
        hold.recv().unwrap_or(());
    });
    let first = first.unwrap();
    has_begun.recv_timeout(LIMIT).unwrap();
    let was_made = Arc::new(AtomicBool::new(false));
    let made = Arc::clone(&was_made);
    let second = calls.start(false, move || made.store(true, Ordering::Relaxed)).unwrap();
    assert_eq!(calls.stuck_calls(), 0);
    drop(second);
    drop(first);
    assert_eq!(calls.stuck_calls(), 1);
    assert!(matches!(calls.start(false, || ()), Err(CallError::AllStuck)));
    drop(release);
    // In turn behind the late call.
    calls.call(limit(LONG), || (), drop).unwrap();
    assert_eq!(calls.stuck_calls(), 0);
    assert!(!was_made.load(Ordering::Relaxed), "its caller had stopped waiting");
}

#[test]
fn a_started_call_is_refused_once_all_threads_are_stuck() {
    let calls = calls(1);
    let (release, hold) = mpsc::channel::<()>();
    let (begun, has_begun) = mpsc::channel();
    let first = calls.start(false, move || {
        begun.send(()).unwrap();
        hold.recv().unwrap_or(());
    });
    has_begun.recv_timeout(LIMIT).unwrap();
    let second = calls.start(false, || ()).unwrap();
    assert!(!second.is_refused());
    drop(first.unwrap());
    assert!(second.is_refused());
    drop(release);
}

#[test]
fn a_panic_fails_its_call_and_costs_no_thread() {
    let calls = calls(1);
    for _ in 0..3 {
        calls.submit(|| panic!("on purpose")).unwrap();
        let failed = calls.call(limit(LONG), || panic!("on purpose"), |(): ()| ());
        assert!(matches!(failed, Err(CallError::Panicked)), "{failed:?}");
        assert_eq!(calls.call(limit(LONG), || 7, drop).unwrap(), 7);
    }
    assert_eq!(calls.stuck_calls(), 0);
}

#[test]
fn more_callers_than_threads_take_turns() {
    let calls = calls(2);
    let (running, most) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    std::thread::scope(|scope| {
        for number in 0..8 {
            let (calls, running, most) = (&calls, &running, &most);
            scope.spawn(move || {
                for _ in 0..50 {
                    let (running, most) = (Arc::clone(running), Arc::clone(most));
                    let work = move || {
                        let now = running.fetch_add(1, Ordering::AcqRel) + 1;
                        most.fetch_max(now, Ordering::AcqRel);
                        std::thread::yield_now();
                        running.fetch_sub(1, Ordering::AcqRel);
                        number
                    };
                    assert_eq!(calls.call(limit(LONG), work, drop).unwrap(), number);
                }
            });
        }
    });
    assert!((1..=2).contains(&most.load(Ordering::Acquire)));
}

#[test]
fn a_call_that_lasts_too_long_is_reported_once() {
    let clock = Arc::new(ManualClock::default());
    let calls = Calls::new("test-call", 1, Arc::clone(&clock) as _);
    let (begun, has_begun) = mpsc::channel();
    let (_release, hold) = mpsc::channel::<u32>();
    std::thread::scope(|scope| {
        let deadline = Deadline::after(&*clock, Duration::from_secs(30));
        let watched = CallLimit { is_watched: true, ..CallLimit::until(deadline) };
        let calls = &calls;
        let work = move || {
            begun.send(()).unwrap();
            hold.recv()
        };
        let waiting = scope.spawn(move || calls.call(watched, work, drop));
        has_begun.recv_timeout(LIMIT).unwrap();
        let limit = Duration::from_secs(3);
        assert!(!calls.has_hung(limit));
        clock.advance(Duration::from_secs(4));
        assert!(calls.has_hung(limit));
        assert!(!calls.has_hung(limit), "one call opens the circuit once");
        clock.advance(Duration::from_secs(30));
        assert!(matches!(waiting.join().unwrap(), Err(CallError::TimedOut)));
    });
}

#[cfg(feature = "simulated")]
mod in_worlds {
    use super::*;
    use cascade_runtime::simulated::{Ending, Random, Settings, World};
    use cascade_runtime::{Plant, now, sleep, thread};

    const TIMEOUT: Duration = Duration::from_millis(100);

    fn add(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }

    /// Callers whose calls sleep, some longer than their time-outs. Checks that each call returns
    /// in time and that each result is delivered once: to its caller, or late.
    fn callers(seed: u64) {
        let calls = Arc::new(calls(2));
        let delivered = Arc::new(AtomicU64::new(0));
        let made = Arc::new(AtomicU64::new(0));
        let threads: Vec<_> = (0..4)
            .map(|caller| {
                let (calls, delivered) = (Arc::clone(&calls), Arc::clone(&delivered));
                let (made, mut random) = (Arc::clone(&made), Random::new(seed, 10 + caller));
                thread::spawn(move || {
                    for _ in 0..20 {
                        // Quiet calls need far less than the time-out, all together.
                        let is_slow = random.one_in(10);
                        let time = Duration::from_millis(if is_slow { 300 } else { 1 });
                        let (begin, counted) = (now(), Arc::clone(&made));
                        let work = move || {
                            add(&counted);
                            sleep(time);
                        };
                        let late = Arc::clone(&delivered);
                        let late = move |()| add(&late);
                        let result = calls.call(limit(TIMEOUT), work, late);
                        let took = now().saturating_sub(begin);
                        assert!(took < TIMEOUT + Duration::from_millis(1), "late by {took:?}");
                        if result.is_ok() {
                            add(&delivered);
                        }
                        let is_allowed = matches!(result, Ok(()) | Err(CallError::TimedOut));
                        assert!(is_allowed, "{result:?}");
                        // The slow calls of others have ended.
                        sleep(Duration::from_millis(700));
                    }
                })
            })
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
        sleep(Duration::from_secs(1));
        assert_eq!(delivered.load(Ordering::Relaxed), made.load(Ordering::Relaxed));
        assert_eq!(calls.stuck_calls(), 0);
    }

    /// Calls that take no time: none times out.
    fn quick_callers() {
        let calls = Arc::new(calls(2));
        let threads: Vec<_> = (0..3)
            .map(|number| {
                let calls = Arc::clone(&calls);
                thread::spawn(move || {
                    for _ in 0..10 {
                        assert_eq!(
                            calls.call(limit(TIMEOUT), move || number, drop).unwrap(),
                            number
                        );
                    }
                })
            })
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
    }

    fn ending(seed: u64, plant: Option<Plant>, body: impl FnOnce() + Send + 'static) -> Ending {
        World::run(Settings { plant, ..Settings::from_seed(seed) }, body).ending
    }

    #[test]
    fn calls_return_in_time_and_deliver_each_result_once() {
        for seed in 0..40 {
            assert_eq!(ending(seed, None, move || callers(seed)), Ending::Finished, "seed {seed}");
            assert_eq!(ending(seed, None, quick_callers), Ending::Finished, "seed {seed}");
        }
    }

    #[test]
    fn a_deadline_that_is_not_kept_is_found() {
        let endings =
            (0..40).map(|seed| ending(seed, Some(Plant::LateDeadline), move || callers(seed)));
        let found = endings.filter(|it| matches!(it, Ending::Panicked(_))).count();
        assert!(found > 20, "{found} of 40 seeds");
    }

    #[test]
    fn a_lost_wake_up_of_a_thread_is_found() {
        let endings = (0..200).map(|seed| ending(seed, Some(Plant::LostWakeUp), quick_callers));
        let found = endings.filter(|it| matches!(it, Ending::Panicked(_))).count();
        assert!(found > 0, "no seed of 200");
    }
}
