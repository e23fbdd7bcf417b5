//! Whose work the calls of a thread are part of.

use std::cell::Cell;
use std::marker::PhantomData;

use cascade_wire::TraceContext;

thread_local! {
    static CURRENT: Cell<Option<TraceContext>> = const { Cell::new(None) };
}

/// Until it ends, the calls that this thread makes of nodes are part of the caller's trace: each
/// is a span under the caller's there. Scopes end in the reverse of their order.
#[derive(Debug)]
#[must_use = "the scope ends when this is dropped"]
pub struct TraceScope {
    before: Option<TraceContext>,
    /// A thread's own.
    _here: PhantomData<*const ()>,
}

impl TraceScope {
    /// Begins one; without a context, calls belong to nobody's trace again.
    pub fn enter(context: Option<TraceContext>) -> Self {
        Self { before: replace(context), _here: PhantomData }
    }
}

/// As [`TraceScope::enter`], for callers that cannot hold a scope: gives what was before, which
/// they have to put back.
pub fn replace(context: Option<TraceContext>) -> Option<TraceContext> {
    CURRENT.replace(context)
}

impl Drop for TraceScope {
    fn drop(&mut self) {
        CURRENT.set(self.before);
    }
}

/// The context that this thread's calls carry.
pub(crate) fn current() -> Option<TraceContext> {
    CURRENT.get()
}
