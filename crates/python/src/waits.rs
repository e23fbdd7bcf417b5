//! Waits that a signal such as that of Ctrl-C ends: Python's handlers run between their parts.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use cascade_runtime::thread::Builder;
use cascade_runtime::{Condvar, Deadline, Mutex, SystemClock};
use pyo3::prelude::*;

use crate::errors::CascadeError;

/// How long a part of a wait lasts: how late a handler runs.
pub(crate) const PART: Duration = Duration::from_millis(100);

/// Calls `wait` with deadlines that are near, until it has a result or the deadline has passed. It
/// runs detached from the interpreter. What a handler raises ends the wait.
pub(crate) fn in_parts<T: Send>(
    py: Python<'_>,
    deadline: Deadline,
    mut wait: impl FnMut(Deadline) -> Option<T> + Send,
) -> PyResult<Option<T>> {
    loop {
        let part = Deadline::after(&SystemClock, PART.min(deadline.remaining(&SystemClock)));
        if let Some(result) = py.detach(|| wait(part)) {
            return Ok(Some(result));
        }
        if deadline.has_passed(&SystemClock) {
            return Ok(None);
        }
        py.check_signals()?;
    }
}

/// The result of a call that ends by a deadline of its own. It runs in another thread, so that a
/// handler that raises ends the wait for it; what it returns then is dropped.
pub(crate) fn in_thread<T: Send + 'static>(
    py: Python<'_>,
    name: &str,
    call: impl FnOnce() -> T + Send + 'static,
) -> PyResult<T> {
    let over = Arc::new((Mutex::new(false), Condvar::new()));
    let of_thread = Arc::clone(&over);
    let builder = Builder::new().name(name.to_owned());
    let started = builder.spawn(move || {
        let result = call();
        *of_thread.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        of_thread.1.notify_one();
        result
    });
    let failed = |reason: String| CascadeError::new_err(format!("{name}: {reason}"));
    let thread = started.map_err(|error| failed(format!("no thread can be started: {error}")))?;
    let (is_over, changed) = &*over;
    loop {
        let is_over = py.detach(|| {
            let is_over = is_over.lock().unwrap_or_else(PoisonError::into_inner);
            let waited = changed.wait_timeout_while(is_over, PART, |is_over| !*is_over);
            *waited.unwrap_or_else(PoisonError::into_inner).0
        });
        // A thread that panicked has only ended.
        if is_over || thread.is_finished() {
            let joined = py.detach(|| thread.join());
            return joined.map_err(|_| failed("its thread panicked".to_owned()));
        }
        py.check_signals()?;
    }
}
