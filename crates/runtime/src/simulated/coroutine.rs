//! Coroutines: the stacks of simulated threads. With `futex.rs` the only file of this crate with
//! unsafe code.
//!
//! Invariants:
//! - `ACTIVE` holds the yielder of the coroutine that runs on this OS thread, and null outside of
//!   coroutines. Only code that runs in that coroutine sets it: when its body begins, and each time
//!   `suspend` returns. It clears it before each suspension and when the body ends.
//! - A coroutine stays on its OS thread: neither it nor its yielder is `Send`.
//! - A stack is used again only after its coroutine has returned. The stack of a suspended
//!   coroutine is never freed: dropping a [`Coroutine`] leaks it.
#![expect(unsafe_code, reason = "suspends a coroutine from code that does not know it runs in one")]

use std::cell::{Cell, RefCell};
use std::mem::ManuallyDrop;
use std::ptr;

use corosensei::stack::DefaultStack;
use corosensei::{CoroutineResult, Yielder};

/// Address space of a stack; pages are mapped when touched. Builds without optimisation need more.
const STACK_BYTES: usize = if cfg!(debug_assertions) { 1 << 20 } else { 256 << 10 };

thread_local! {
    static ACTIVE: Cell<*const Yielder<(), ()>> = const { Cell::new(ptr::null()) };
    /// Stacks of coroutines that have returned.
    static STACKS: RefCell<Vec<DefaultStack>> = const { RefCell::new(Vec::new()) };
}

/// A thread of a world: suspended, or running while `resume` is on the stack.
///
/// Its drop forgets it with its stack and everything on it, as a killed process does. It must not
/// unwind: that would run destructors of threads that the world has killed.
pub(super) struct Coroutine(ManuallyDrop<corosensei::Coroutine<(), (), ()>>);

/// Why `resume` returned.
pub(super) enum Resumed {
    Suspended,
    Returned,
}

/// Clears `ACTIVE` at the end of a body, also after a panic.
struct Deactivate;

impl Drop for Deactivate {
    fn drop(&mut self) {
        ACTIVE.set(ptr::null());
    }
}

#[cfg(feature = "sanitizer")]
unsafe extern "C" {
    /// Leaks of what this OS thread allocates from now on are not reported. It takes nothing and
    /// changes a counter of the calling thread.
    safe fn __lsan_disable();
}

/// What threads of a world own when they are killed is leaked by design: the leak sanitizer, if
/// there is one, does not report what this OS thread allocates from now on.
pub(super) fn ignore_leaks() {
    #[cfg(feature = "sanitizer")]
    __lsan_disable();
}

impl Coroutine {
    pub(super) fn new(body: Box<dyn FnOnce()>) -> Self {
        let free = STACKS.with_borrow_mut(Vec::pop);
        let stack = free.unwrap_or_else(|| {
            DefaultStack::new(STACK_BYTES).expect("there is address space for one more stack")
        });
        Self(ManuallyDrop::new(corosensei::Coroutine::with_stack(stack, move |yielder, ()| {
            ACTIVE.set(yielder);
            let _deactivate = Deactivate;
            body();
        })))
    }

    /// Runs the coroutine until it suspends itself or returns.
    pub(super) fn resume(&mut self) -> Resumed {
        assert!(ACTIVE.get().is_null(), "a coroutine does not resume another one");
        match self.0.resume(()) {
            CoroutineResult::Yield(()) => Resumed::Suspended,
            CoroutineResult::Return(()) => Resumed::Returned,
        }
    }

    /// Keeps the stack of a coroutine that has returned for the next one.
    pub(super) fn recycle(self) {
        let stack = ManuallyDrop::into_inner(self.0).into_stack();
        STACKS.with_borrow_mut(|stacks| stacks.push(stack));
    }
}

/// Suspends the running coroutine; returns when it is resumed.
///
/// # Panics
///
/// Outside of a coroutine.
pub(super) fn suspend() {
    let yielder = ACTIVE.replace(ptr::null());
    assert!(!yielder.is_null(), "only a coroutine can be suspended");
    // SAFETY: `ACTIVE` was not null, so by the first invariant this code runs in the coroutine
    // whose yielder it is. The yielder lies at the base of that coroutine's stack until its body
    // returns, which is after this function has returned.
    let running = unsafe { &*yielder };
    running.suspend(());
    ACTIVE.set(yielder);
}
