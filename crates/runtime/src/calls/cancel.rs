//! A flag that ends waits for calls.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};

use crate::{Mutex, MutexGuard};

/// While it is set, waits for calls that were given it end at once.
#[derive(Default)]
pub struct Cancel {
    is_set: AtomicBool,
    waits: Mutex<Waits>,
}

/// A caller that waits.
pub(super) trait Waiting: Send + Sync {
    /// Lets the caller look again whether it is cancelled.
    fn wake(&self);

    /// Ends the wait: the call is not made.
    fn refuse(&self);
}

#[derive(Default)]
struct Waits {
    next_number: u64,
    listed: Vec<(u64, Arc<dyn Waiting>)>,
}

/// Ends the registration of a wait when dropped.
pub(super) struct Registered<'a> {
    cancel: &'a Cancel,
    number: u64,
}

impl Cancel {
    /// The flag, for a caller that looks at it again and again.
    pub fn flag(&self) -> &AtomicBool {
        &self.is_set
    }

    /// A flag that is not set.
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether it is set.
    pub fn is_set(&self) -> bool {
        self.is_set.load(Ordering::Acquire)
    }

    /// Ends all waits, and those that begin before `clear`.
    pub fn set(&self) {
        // Before the list is read: a wait that is registered later sees the flag.
        self.is_set.store(true, Ordering::Release);
        let waits: Vec<_> = self.lock().listed.iter().map(|(_, it)| Arc::clone(it)).collect();
        for wait in waits {
            wait.wake();
        }
    }

    /// Lets later waits last until their deadlines.
    pub fn clear(&self) {
        self.is_set.store(false, Ordering::Release);
    }

    /// None if the flag is set.
    pub(super) fn register(&self, wait: &Arc<dyn Waiting>) -> Option<Registered<'_>> {
        let mut waits = self.lock();
        if self.is_set() {
            return None;
        }
        let number = waits.next_number;
        waits.next_number += 1;
        waits.listed.push((number, Arc::clone(wait)));
        Some(Registered { cancel: self, number })
    }

    fn lock(&self) -> MutexGuard<'_, Waits> {
        self.waits.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Registered<'_> {
    fn drop(&mut self) {
        self.cancel.lock().listed.retain(|(number, _)| *number != self.number);
    }
}

impl fmt::Debug for Cancel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cancel").field("is_set", &self.is_set()).finish_non_exhaustive()
    }
}
