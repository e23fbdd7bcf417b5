//! The threads of a world and their states.

use std::panic::{AssertUnwindSafe, Location, catch_unwind};

use super::coroutine::Coroutine;
use super::wait::Wait;
use super::{Domain, Ending, World, panics};

pub(super) struct Thread {
    pub(super) name: String,
    pub(super) domain: Domain,
    pub(super) state: State,
    /// Changes at each wake-up, so that the timer of an earlier wait does nothing.
    pub(super) generation: u32,
    /// Whether the last wait ended by its time.
    pub(super) timed_out: bool,
    pub(super) priority: u64,
    /// The decision that let it run last.
    pub(super) last_run: u64,
    /// Decisions that let it run.
    pub(super) turns: u64,
    /// Locks of this crate that it holds. One that has ended or was killed may hold some.
    pub(super) held: Vec<Held>,
    /// Taken out while it runs.
    pub(super) coroutine: Option<Coroutine>,
}

#[derive(Clone, Copy)]
pub(super) enum State {
    Runnable,
    Waiting(Wait),
    Ended,
    Killed,
}

/// A lock that a thread holds, and where it locked it.
#[derive(Clone, Copy)]
pub(super) struct Held {
    pub(super) lock: usize,
    pub(super) location: &'static Location<'static>,
}

impl World {
    /// Adds a thread that is runnable.
    pub(crate) fn start_thread(
        &self,
        name: String,
        domain: Domain,
        body: Box<dyn FnOnce()>,
    ) -> u32 {
        let mut threads = self.threads.borrow_mut();
        let number = u32::try_from(threads.len()).expect("fewer than 2^32 threads");
        threads.push(Thread {
            name,
            domain,
            state: State::Runnable,
            generation: 0,
            timed_out: false,
            priority: self.schedule.borrow_mut().first_priority(),
            last_run: self.decisions.get(),
            turns: 0,
            held: Vec::new(),
            coroutine: Some(Coroutine::new(Box::new(move || {
                // The panic hook has recorded a panic. It must not reach the scheduler's stack.
                let ended = catch_unwind(AssertUnwindSafe(body));
                if let (0, Err(payload)) = (number, ended) {
                    let world = super::current().expect("a coroutine runs in its world");
                    let message = panics::message_of(&*payload);
                    *world.ending.borrow_mut() = Some(Ending::Panicked(message));
                }
            }))),
        });
        self.runnable.borrow_mut().push(number);
        self.preempt_for(&threads[number as usize], &threads[self.current.get() as usize]);
        number
    }

    pub(super) fn end_thread(&self, number: u32) {
        self.runnable.borrow_mut().retain(|runnable| *runnable != number);
        self.with(number, |thread| thread.state = State::Ended);
        self.wake_joining(number);
    }

    /// Waits for the end of a thread, also by a kill.
    #[track_caller]
    pub(crate) fn join(&self, number: u32) {
        self.point();
        while !self.with(number, |thread| thread.is_over()) {
            self.wait_for_end(number);
        }
    }

    pub(crate) fn has_ended(&self, number: u32) -> bool {
        self.with(number, |thread| thread.is_over())
    }

    /// Threads of a domain that have neither ended nor been killed.
    pub fn live_threads(&self, domain: Domain) -> usize {
        let threads = self.threads.borrow();
        threads.iter().filter(|thread| thread.domain == domain && !thread.is_over()).count()
    }

    pub(super) fn with<R>(&self, number: u32, change: impl FnOnce(&mut Thread) -> R) -> R {
        change(&mut self.threads.borrow_mut()[number as usize])
    }
}

impl Thread {
    pub(super) fn is_over(&self) -> bool {
        matches!(self.state, State::Ended | State::Killed)
    }

    pub(super) fn is_runnable(&self) -> bool {
        matches!(self.state, State::Runnable)
    }
}
