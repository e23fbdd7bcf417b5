//! Waiting threads: what for, until when, and who wakes them.

use std::panic::Location;
use std::time::Duration;

use super::threads::{State, Thread};
use super::timers::nanoseconds;
use super::wait::{LockKind, Reason, Wait};
use super::{Ending, World};

/// Stale timers that are kept at most, beside twice the threads.
const STALE_MAX: usize = 1024;

/// Waiting threads in the order of their arrival, apart by reason, because each is searched by
/// what happens at another rate. Threads that wait for time alone are not listed.
#[derive(Default)]
pub(super) struct Waiting {
    pub(super) locks: Vec<(LockKind, usize, u32)>,
    notifications: Vec<(usize, u32)>,
    ends: Vec<(u32, u32)>,
    kills: Vec<u32>,
}

impl Waiting {
    fn add(&mut self, thread: u32, reason: Reason) {
        match reason {
            Reason::Lock(kind, lock) => self.locks.push((kind, lock, thread)),
            Reason::Notification(condition) => self.notifications.push((condition, thread)),
            Reason::EndOf(other) => self.ends.push((other, thread)),
            Reason::Kill => self.kills.push(thread),
            Reason::Time => {}
        }
    }

    pub(super) fn remove(&mut self, thread: u32, reason: Reason) {
        match reason {
            Reason::Lock(..) => self.locks.retain(|(_, _, waiting)| *waiting != thread),
            Reason::Notification(_) => self.notifications.retain(|(_, it)| *it != thread),
            Reason::EndOf(_) => self.ends.retain(|(_, waiting)| *waiting != thread),
            Reason::Kill => self.kills.retain(|waiting| *waiting != thread),
            Reason::Time => {}
        }
    }
}

impl World {
    /// Registers a wait for a notification. No other thread runs before `end_wait`.
    #[track_caller]
    pub(crate) fn begin_wait_for_notification(&self, condition: usize, time: Option<Duration>) {
        self.begin_wait(Reason::Notification(condition), time);
    }

    #[track_caller]
    pub(crate) fn sleep(&self, time: Duration) {
        self.wait(Reason::Time, Some(time));
    }

    #[track_caller]
    pub(super) fn wait_for_end(&self, thread: u32) {
        self.wait(Reason::EndOf(thread), None);
    }

    /// Returns whether the time was over.
    #[track_caller]
    pub(super) fn wait(&self, reason: Reason, time: Option<Duration>) -> bool {
        self.begin_wait(reason, time);
        self.end_wait()
    }

    #[track_caller]
    fn begin_wait(&self, reason: Reason, time: Option<Duration>) {
        let (me, location) = (self.current.get(), Location::caller());
        if std::thread::panicking() {
            let what = format!("`{}` at {location}", self.with(me, |it| it.name.clone()));
            self.stop(Ending::WaitWhileUnwinding(what));
        }
        let generation = self.with(me, |thread| {
            let has_time_limit = time.is_some();
            thread.state = State::Waiting(Wait { reason, has_time_limit, location });
            thread.timed_out = false;
            thread.generation
        });
        self.runnable.borrow_mut().retain(|runnable| *runnable != me);
        self.waiting.borrow_mut().add(me, reason);
        if let Some(time) = time {
            let due_ns = self.now_ns.get().saturating_add(nanoseconds(time));
            let (mut timers, threads) = (self.timers.borrow_mut(), self.threads.borrow());
            timers.set(due_ns, me, generation);
            // Each thread has one that is not stale, at most.
            if timers.count() > STALE_MAX + 2 * threads.len() {
                timers.retain(|it| threads[it.thread as usize].generation == it.generation);
            }
            self.slow_from_ns.set(self.slow_from_ns.get().min(due_ns));
        }
    }

    /// Lets others run until this thread is woken. Returns whether its time was over.
    pub(crate) fn end_wait(&self) -> bool {
        let me = self.current.get();
        self.record_wait_under_lock(me);
        self.leave();
        self.with(me, |thread| thread.timed_out)
    }

    /// A thread that waits without a limit while it holds a lock can stop all who need that lock.
    fn record_wait_under_lock(&self, me: u32) {
        const LISTED_MAX: usize = 20;
        self.with(me, |thread| {
            let State::Waiting(wait) = thread.state else { return };
            let is_bounded = wait.has_time_limit
                || matches!(wait.reason, Reason::Lock(..) | Reason::Time | Reason::Kill);
            let Some(held) = thread.held.first().filter(|_| !is_bounded) else { return };
            let what = format!("a wait at {} holds the lock of {}", wait.location, held.location);
            let mut listed = self.waits_under_lock.borrow_mut();
            if listed.len() < LISTED_MAX && !listed.contains(&what) {
                listed.push(what);
            }
        });
    }

    /// Wakes one thread that waits for this condition, any of them, or all.
    pub(crate) fn notify(&self, condition: usize, all: bool) {
        self.point();
        let mut waiting = self.waiting.borrow_mut();
        let list = &mut waiting.notifications;
        let mut waiters = list.iter().filter(|(on, _)| *on == condition).count();
        if !all && waiters > 1 {
            // Not the first in line: callers must not rely on an order.
            let chosen = self.schedule.borrow_mut().index_below(waiters);
            let mut matching = list.iter().enumerate().filter(|(_, (on, _))| *on == condition);
            let (at, (_, thread)) =
                matching.nth(chosen).map(|(at, it)| (at, *it)).expect("counted");
            list.remove(at);
            self.wake(thread);
            waiters = 0;
        }
        if waiters > 0 {
            list.retain(|(on, thread)| *on != condition || !self.wake(*thread));
        }
    }

    /// Wakes all who wait for this lock: each tries again.
    pub(super) fn wake_for_lock(&self, lock: usize) {
        let mut waiting = self.waiting.borrow_mut();
        if !waiting.locks.is_empty() {
            waiting.locks.retain(|(_, on, thread)| *on != lock || !self.wake(*thread));
        }
    }

    pub(super) fn wake_joining(&self, ended: u32) {
        self.waiting.borrow_mut().ends.retain(|(on, thread)| *on != ended || !self.wake(*thread));
    }

    pub(super) fn wake_after_kill(&self) {
        self.waiting.borrow_mut().kills.retain(|thread| !self.wake(*thread));
    }

    /// Wakes a thread without a notification, as `std` may do.
    pub(super) fn wake_spuriously(&self) {
        let mut waiting = self.waiting.borrow_mut();
        let count = waiting.notifications.len();
        if count > 0 && self.faults.borrow_mut().one_in(self.settings.spurious_one_in) {
            let at = self.faults.borrow_mut().index_below(count);
            let (_, thread) = waiting.notifications.remove(at);
            self.wake(thread);
        }
    }

    /// Wakes all whose time is over, and notes when the next one's is.
    pub(super) fn fire_timers(&self) {
        let mut timers = self.timers.borrow_mut();
        while let Some(timer) = timers.first() {
            let is_stale = self.with(timer.thread, |it| it.generation != timer.generation);
            if !is_stale && timer.due_ns > self.now_ns.get() {
                break;
            }
            timers.remove_first();
            if !is_stale {
                self.time_out(timer.thread);
            }
        }
        self.slow_from_ns.set(timers.first().map_or(u64::MAX, |timer| timer.due_ns));
    }

    fn time_out(&self, number: u32) {
        let reason = self.with(number, |thread| {
            let State::Waiting(wait) = thread.state else { return None };
            thread.timed_out = true;
            Some(wait.reason)
        });
        if let Some(reason) = reason {
            self.waiting.borrow_mut().remove(number, reason);
            self.wake(number);
        }
    }

    /// Makes a thread runnable that is in no list of waiting threads any more. Always true.
    fn wake(&self, number: u32) -> bool {
        let mut threads = self.threads.borrow_mut();
        let thread = &mut threads[number as usize];
        thread.state = State::Runnable;
        thread.generation = thread.generation.wrapping_add(1);
        self.runnable.borrow_mut().push(number);
        self.preempt_for(&threads[number as usize], &threads[self.current.get() as usize]);
        true
    }

    /// Makes the next point a decision, if the policy prefers the thread to the running one.
    pub(super) fn preempt_for(&self, runnable: &Thread, running: &Thread) {
        if self.settings.policy.prefers(runnable, running) {
            self.slow_from_ns.set(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::simulated::Settings;
    use crate::{Condvar, Mutex, thread};

    /// Each wait left its timer behind until it was due.
    #[test]
    fn timers_of_waits_that_ended_otherwise_are_removed() {
        const ROUNDS: u64 = 5000;
        let body = || {
            let pair = Arc::new((Mutex::new(0), Condvar::new()));
            let notifying = Arc::clone(&pair);
            let notifier = thread::spawn(move || {
                for _ in 0..ROUNDS {
                    *notifying.0.lock().unwrap() += 1;
                    notifying.1.notify_one();
                    thread::yield_now();
                }
            });
            let (mut count, mut waits) = (pair.0.lock().unwrap(), 0);
            while *count < ROUNDS {
                let long = Duration::from_secs(1_000_000);
                count = pair.1.wait_timeout(count, long).unwrap().0;
                waits += 1;
            }
            drop(count);
            assert!(waits > 2 * STALE_MAX, "{waits} waits");
            let timers = super::super::current().unwrap().timers.borrow().count();
            assert!(timers <= STALE_MAX + 4, "{timers} timers");
            notifier.join().unwrap();
        };
        assert_eq!(World::run(Settings::default(), body).ending, Ending::Finished);
    }
}
