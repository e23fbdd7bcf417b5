//! The one driver of the process: its settings and its state.
#![expect(unsafe_code, reason = "reports when the process ends")]

use std::cell::RefCell;
use std::sync::{OnceLock, PoisonError};

use cascade_runtime::{Condvar, Mutex, MutexGuard};

use crate::settings::Settings;
use crate::state::{INVALID_CONTEXT, NOT_INITIALIZED, State, is_fatal};
use crate::wake::announce;

/// `CUresult`.
pub(crate) type Status = i32;

pub(crate) const SUCCESS: Status = 0;

#[derive(Debug)]
pub(crate) struct World {
    pub(crate) settings: Settings,
    state: Mutex<State>,
    pub(crate) changed: Condvar,
}

static WORLD: OnceLock<World> = OnceLock::new();

thread_local! {
    /// The contexts that a thread pushed.
    static CURRENT: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// What a function needs before it does anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Needs {
    Nothing,
    /// `cuInit`.
    Start,
    /// A context that lives.
    Context,
    /// A context that lives and is current in the thread.
    Current,
}

impl World {
    pub(crate) fn get() -> &'static Self {
        WORLD.get_or_init(|| {
            let settings = Settings::read();
            let held = settings.held.iter().cloned().collect();
            let mut state = State::default();
            state.held = held;
            if settings.report.is_some() {
                // SAFETY: the function takes nothing, and the library is never closed.
                let refused = unsafe { libc::atexit(write_report) };
                debug_assert_eq!(refused, 0, "there is memory for one entry");
            }
            Self { settings, state: Mutex::new(state), changed: Condvar::new() }
        })
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a call; its injected error, if it has one.
    fn begin(&self, name: &'static str, needs: Needs) -> (MutexGuard<'_, State>, Status) {
        let mut state = self.lock();
        let of_it = state.calls.entry(name).or_default();
        *of_it += 1;
        let of_it = *of_it;
        state.call_count += 1;
        let injected = self.settings.failure(name, of_it, state.call_count);
        let needs_context = matches!(needs, Needs::Context | Needs::Current);
        if let Some(code) = injected.filter(|code| is_fatal(*code) && needs_context) {
            state.death = Some(code);
            self.changed.notify_all();
        }
        let status = match (injected, state.death) {
            (Some(code), _) => code,
            (None, Some(death)) if needs_context => death,
            (None, _) if needs != Needs::Nothing && !state.is_initialized => NOT_INITIALIZED,
            (None, _) if needs == Needs::Current && current().is_none() => INVALID_CONTEXT,
            (None, _) => SUCCESS,
        };
        (state, status)
    }

    /// Runs a function of the driver, unless its error was injected.
    pub(crate) fn call(
        name: &'static str,
        needs: Needs,
        run: impl FnOnce(&Self, &mut State) -> Result<(), Status>,
    ) -> Status {
        let world = Self::get();
        let (mut state, status) = world.begin(name, needs);
        if status != SUCCESS {
            return status;
        }
        let status = run(world, &mut state).err().unwrap_or(SUCCESS);
        announce(&state, &world.changed);
        status
    }

    /// Runs a release, also if its error was injected, unless the context is dead.
    pub(crate) fn release(
        name: &'static str,
        needs: Needs,
        run: impl FnOnce(&mut State) -> Result<(), Status>,
    ) -> Status {
        let world = Self::get();
        let (mut state, status) = world.begin(name, needs);
        if state.death.is_some() {
            return status;
        }
        let released = run(&mut state).err().unwrap_or(SUCCESS);
        announce(&state, &world.changed);
        if status == SUCCESS { released } else { status }
    }
}

/// The current context of the thread.
pub(crate) fn current() -> Option<usize> {
    CURRENT.with_borrow(|stack| stack.last().copied())
}

pub(crate) fn push_current(context: usize) {
    CURRENT.with_borrow_mut(|stack| stack.push(context));
}

pub(crate) fn pop_current() -> Option<usize> {
    CURRENT.with_borrow_mut(Vec::pop)
}

extern "C" fn write_report() {
    let world = World::get();
    let state = world.lock();
    let counts = ["live", "contexts", "deaths", "misused", "copies"];
    let lines = counts.map(|what| format!("{what} {}\n", state.count(what)));
    if let Some(path) = &world.settings.report {
        // The process ends, and no caller is left that could get this error.
        drop(std::fs::write(path, lines.concat()));
    }
}
