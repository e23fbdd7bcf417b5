//! What a thread can wait for.

use std::panic::Location;

/// What a thread waits for, and where in the code.
#[derive(Clone, Copy)]
pub(super) struct Wait {
    pub(super) reason: Reason,
    pub(super) has_time_limit: bool,
    pub(super) location: &'static Location<'static>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Reason {
    Lock(LockKind, usize),
    Notification(usize),
    EndOf(u32),
    Time,
    Kill,
}

/// How a thread wants a lock.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum LockKind {
    Mutex,
    Read,
    Write,
}
