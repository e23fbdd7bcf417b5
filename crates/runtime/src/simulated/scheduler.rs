//! The scheduler: points, decisions and switches.

use std::time::Duration;

use super::coroutine::{self, Resumed};
use super::settings::TraceEntry;
use super::threads::State;
use super::{Ending, World};

/// Virtual time that a yield takes, so that a thread that polls does not stop time.
const YIELD_TIME: Duration = Duration::from_micros(1);

impl World {
    /// The loop below all threads, on the OS thread's own stack.
    pub(super) fn drive(&self) -> Ending {
        loop {
            // Chosen by the thread that was suspended, or here if it has ended.
            let next = match self.chosen.take().map_or_else(|| self.decide(), Ok) {
                Ok(next) => next,
                Err(ending) => return ending,
            };
            self.current.set(next);
            let suspended = self.with(next, |thread| thread.coroutine.take());
            let mut coroutine = suspended.expect("a thread that was chosen is suspended");
            match coroutine.resume() {
                Resumed::Suspended => self.with(next, |thread| {
                    // The coroutine of a killed thread is dropped here, which forgets it.
                    if !matches!(thread.state, State::Killed) {
                        thread.coroutine = Some(coroutine);
                    }
                }),
                Resumed::Returned => {
                    coroutine.recycle();
                    self.end_thread(next);
                    if next == 0 {
                        return self.ending.take().unwrap_or(Ending::Finished);
                    }
                }
            }
            if let Some(ending) = self.ending.take() {
                return ending;
            }
        }
    }

    /// A scheduling point: the running thread may lose its turn here.
    #[inline]
    pub(crate) fn point(&self) {
        self.advance(self.settings.point_time);
        let left = self.points_left.get();
        // Saturating: a panic may have kept the scheduler from being asked.
        self.points_left.set(left.saturating_sub(1));
        if left <= 1 || self.now_ns.get() >= self.slow_from_ns.get() {
            self.leave_if_running();
        }
    }

    pub(crate) fn yield_now(&self) {
        self.advance(YIELD_TIME);
        self.with(self.current.get(), |thread| self.schedule.borrow_mut().yielded(thread));
        self.leave_if_running();
    }

    fn leave_if_running(&self) {
        // `std` counts panics per OS thread. Another coroutine that ran now would seem to panic: it
        // would not poison its locks, and would abort at a panic of its own.
        if !std::thread::panicking() {
            self.leave();
        }
    }

    /// Ends this thread's turn. Returns at its next one, which may begin at once.
    pub(super) fn leave(&self) {
        if std::thread::panicking() {
            let name = self.with(self.current.get(), |thread| thread.name.clone());
            self.stop(Ending::WaitWhileUnwinding(format!("`{name}` was killed")));
        }
        match self.decide() {
            Ok(next) if next == self.current.get() => {}
            Ok(next) => {
                // Another thread would find what this one has borrowed.
                debug_assert!(self.has_no_borrow(), "a switch while a cell is borrowed");
                self.chosen.set(Some(next));
                self.switches.set(self.switches.get() + 1);
                coroutine::suspend();
            }
            Err(ending) => self.stop(ending),
        }
    }

    fn has_no_borrow(&self) -> bool {
        self.threads.try_borrow_mut().is_ok()
            && self.runnable.try_borrow_mut().is_ok()
            && self.waiting.try_borrow_mut().is_ok()
            && self.timers.try_borrow_mut().is_ok()
            && self.schedule.try_borrow_mut().is_ok()
    }

    /// Stops the world from within one of its threads.
    pub(super) fn stop(&self, ending: Ending) -> ! {
        *self.ending.borrow_mut() = Some(ending);
        coroutine::suspend();
        unreachable!("no thread of a stopped world is resumed")
    }

    /// The thread that runs next, or why the world ends.
    fn decide(&self) -> Result<u32, Ending> {
        let passed = self.granted.get() - self.points_left.get();
        self.points.set(self.points.get() + passed);
        self.granted.set(self.points_left.get());
        let decision = self.decisions.get() + 1;
        self.decisions.set(decision);
        if decision > self.settings.decisions_max {
            return Err(Ending::Livelock(self.describe_threads()));
        }
        self.kill_if_due();
        if self.settings.spurious_one_in > 0 {
            self.wake_spuriously();
        }
        self.wait_for_runnable()?;
        let runnable = self.runnable.borrow();
        let mut schedule = self.schedule.borrow_mut();
        let next = schedule.choose(passed, decision, &runnable, &mut self.threads.borrow_mut());
        let gap = schedule.next_gap().min(self.points_until_kill());
        self.granted.set(gap);
        self.points_left.set(gap);
        self.note(u64::from(next) ^ self.now_ns.get().rotate_left(16));
        if self.settings.trace_every > 0 && decision.is_multiple_of(self.settings.trace_every) {
            let (hash, now) = (self.hash.get().value(), self.now());
            self.trace.borrow_mut().push(TraceEntry { decision, now, thread: next, hash });
        }
        Ok(next)
    }

    /// Moves time forward until a thread is runnable.
    fn wait_for_runnable(&self) -> Result<(), Ending> {
        loop {
            self.fire_timers();
            if !self.runnable.borrow().is_empty() {
                return Ok(());
            }
            let next = self.timers.borrow().first();
            match next {
                Some(timer) => self.now_ns.set(timer.due_ns.max(self.now_ns.get())),
                // The points that the crash is to happen after are never reached.
                None if self.kill_now() => {}
                None => return Err(Ending::Deadlock(self.describe_threads())),
            }
        }
    }
}
