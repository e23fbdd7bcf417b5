//! Crashes: threads of a domain that never run again, as after `kill -9`.

use std::time::Duration;

use super::threads::State;
use super::wait::Reason;
use super::{Domain, World};

impl World {
    /// Kills all threads of a domain: none of them runs again, and nothing of theirs is dropped.
    /// Locks that they hold stay locked.
    pub fn kill(&self, domain: Domain) {
        let has_killed_me = self.kill_threads(domain);
        if has_killed_me {
            self.leave();
        }
    }

    /// Kills a domain after so many further scheduling points, of whatever threads. At once if no
    /// thread can run before. Replaces an earlier call.
    pub fn kill_after(&self, points: u64, domain: Domain) {
        self.armed_crash.set(Some((self.points().saturating_add(points), domain)));
        // The scheduler is asked at the next point, and plans with the crash from there.
        self.slow_from_ns.set(0);
    }

    /// Waits until the crash of `kill_after` has happened, at most for `time`. Returns whether it
    /// has.
    #[track_caller]
    pub fn wait_for_kill(&self, time: Duration) -> bool {
        if self.armed_crash.get().is_some() {
            self.wait(Reason::Kill, Some(time));
        }
        self.armed_crash.get().is_none()
    }

    /// Cancels `kill_after`.
    pub fn cancel_kill(&self) {
        self.armed_crash.set(None);
    }

    pub(super) fn kill_if_due(&self) {
        if let Some((at, _)) = self.armed_crash.get()
            && self.points.get() >= at
        {
            self.kill_now();
        }
    }

    /// Carries out an armed crash. Returns whether there was one.
    pub(super) fn kill_now(&self) -> bool {
        let armed = self.armed_crash.take();
        if let Some((_, domain)) = armed {
            self.kill_threads(domain);
        }
        armed.is_some()
    }

    pub(super) fn points_until_kill(&self) -> u64 {
        let armed = self.armed_crash.get();
        armed.map_or(u64::MAX, |(at, _)| at.saturating_sub(self.points.get()).max(1))
    }

    /// Returns whether the running thread is among them.
    fn kill_threads(&self, domain: Domain) -> bool {
        self.note(0xdead_0000 | u64::from(domain.0));
        let count = u32::try_from(self.threads.borrow().len()).expect("fewer than 2^32 threads");
        let mut killed = Vec::new();
        for number in 0..count {
            let waited_for = self.with(number, |thread| {
                if thread.domain != domain || thread.is_over() {
                    return None;
                }
                let before = std::mem::replace(&mut thread.state, State::Killed);
                thread.generation = thread.generation.wrapping_add(1);
                // Dropping a coroutine forgets it. The running one is on the stack of `drive`.
                thread.coroutine = None;
                Some(before)
            });
            match waited_for {
                None => continue,
                Some(State::Waiting(wait)) => {
                    self.waiting.borrow_mut().remove(number, wait.reason);
                }
                Some(_) => self.runnable.borrow_mut().retain(|runnable| *runnable != number),
            }
            killed.push(number);
        }
        for number in &killed {
            self.wake_joining(*number);
        }
        self.wake_after_kill();
        killed.contains(&self.current.get())
    }
}
