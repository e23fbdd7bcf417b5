//! What a device may still use after it was lost. It is kept until the process ends.

use std::any::Any;
use std::sync::PoisonError;

use cascade_runtime::LeafMutex;

static ABANDONED: LeafMutex<Vec<Box<dyn Any + Send>>> = LeafMutex::new(Vec::new());

/// Keeps the memory of a copy that may never end: no other use of it would be safe.
pub(crate) fn keep(memory: impl Any + Send) {
    ABANDONED.lock().unwrap_or_else(PoisonError::into_inner).push(Box::new(memory));
}
