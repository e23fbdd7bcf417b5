//! The trace context of a thread's calls.

use std::cell::Cell;
use std::marker::PhantomData;

use cascade_wire::TraceContext;

thread_local! {
    static CURRENT: Cell<Option<TraceContext>> = const { Cell::new(None) };
}

/// While it lives, the calls of this thread belong to the caller's trace: each is a child span of
/// the caller's span. Nested scopes end in reverse order.
#[derive(Debug)]
#[must_use = "the scope ends when this is dropped"]
pub struct TraceScope {
    previous: Option<TraceContext>,
    /// Keeps the scope on its thread.
    _not_send: PhantomData<*const ()>,
}

impl TraceScope {
    /// Begins a scope. Without a context, calls belong to no trace.
    pub fn enter(context: Option<TraceContext>) -> Self {
        Self { previous: replace(context), _not_send: PhantomData }
    }
}

/// As [`TraceScope::enter`], for callers that cannot hold a scope. Returns the previous context,
/// which the caller has to restore.
pub fn replace(context: Option<TraceContext>) -> Option<TraceContext> {
    CURRENT.replace(context)
}

impl Drop for TraceScope {
    fn drop(&mut self) {
        CURRENT.set(self.previous);
    }
}

/// The context that this thread's calls carry.
pub(crate) fn current() -> Option<TraceContext> {
    CURRENT.get()
}
