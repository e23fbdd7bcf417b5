//! Values that only the process that created them may use. In a forked child, access is an error.
//!
//! A fork copies locks in their current state, but only the calling thread. So a child that used a
//! store or released a slab could wait for a lock for ever. It leaks the value instead.

use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::process;

use pyo3::{PyResult, Python};

use crate::errors::ForkError;

/// A value that belongs to one process.
#[derive(Debug)]
pub(crate) struct ProcessBound<T> {
    /// Taken only by `into_inner` and on drop.
    value: Option<T>,
    process: u32,
}

impl<T> ProcessBound<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { value: Some(value), process: process::id() }
    }

    /// The value. Fails in a forked child; `what` is its name in the error.
    pub(crate) fn get(&self, what: &str) -> PyResult<&T> {
        self.check(what)?;
        Ok(self.value.as_ref().expect("the value is taken only by consuming self"))
    }

    /// The value, mutable.
    pub(crate) fn get_mut(&mut self, what: &str) -> PyResult<&mut T> {
        self.check(what)?;
        Ok(self.value.as_mut().expect("the value is taken only by consuming self"))
    }

    /// The owned value.
    pub(crate) fn into_inner(mut self, what: &str) -> PyResult<T> {
        self.check(what)?;
        Ok(self.value.take().expect("the value is taken only by consuming self"))
    }

    fn check(&self, what: &str) -> PyResult<()> {
        if self.process == process::id() {
            return Ok(());
        }
        Err(ForkError::new_err(format!(
            "this {what} belongs to process {}, which forked this one; make another one in this \
             process (with multiprocessing, use the start method \"spawn\")",
            self.process
        )))
    }
}

impl<T> Drop for ProcessBound<T> {
    fn drop(&mut self) {
        if self.process != process::id() {
            let _leaked = ManuallyDrop::new(self.value.take());
        }
    }
}

/// A value that is dropped while this thread is detached from the interpreter: its drop waits for
/// locks or threads whose holders may need the interpreter.
#[derive(Debug)]
pub(crate) struct DroppedDetached<T: Send>(Option<T>);

impl<T: Send> DroppedDetached<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(Some(value))
    }
}

impl<T: Send> Deref for DroppedDetached<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_ref().expect("the value is taken only on drop")
    }
}

impl<T: Send> Drop for DroppedDetached<T> {
    fn drop(&mut self) {
        let mut value = self.0.take();
        Python::try_attach(|py| py.detach(|| drop(value.take())));
    }
}
