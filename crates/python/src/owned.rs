//! Values that only the process that made them may touch: a forked child gets an error instead.
//!
//! A fork copies locks in whatever state they are and no thread but the caller's, so a child that
//! used a store, or gave a slab back, could wait for ever. The child leaks the value instead.

use std::mem::ManuallyDrop;
use std::process;

use pyo3::PyResult;

use crate::errors::ForkError;

/// A value of this process.
#[derive(Debug)]
pub(crate) struct Owned<T> {
    /// Taken only by `into_inner` and on drop.
    value: Option<T>,
    process: u32,
}

impl<T> Owned<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { value: Some(value), process: process::id() }
    }

    /// The value, unless this is a forked child of the process that made it.
    pub(crate) fn get(&self, what: &str) -> PyResult<&T> {
        self.check(what)?;
        Ok(self.value.as_ref().expect("the value is taken only by consuming self"))
    }

    /// The value, to change it.
    pub(crate) fn get_mut(&mut self, what: &str) -> PyResult<&mut T> {
        self.check(what)?;
        Ok(self.value.as_mut().expect("the value is taken only by consuming self"))
    }

    /// The value itself.
    pub(crate) fn into_inner(mut self, what: &str) -> PyResult<T> {
        self.check(what)?;
        Ok(self.value.take().expect("the value is taken only by consuming self"))
    }

    fn check(&self, what: &str) -> PyResult<()> {
        if self.process == process::id() {
            return Ok(());
        }
        Err(ForkError::new_err(format!(
            "this {what} belongs to process {}, which forked this one; open a store of its own \
             here (with multiprocessing, use the spawn start method)",
            self.process
        )))
    }
}

impl<T> Drop for Owned<T> {
    fn drop(&mut self) {
        if self.process != process::id() {
            let _leaked = ManuallyDrop::new(self.value.take());
        }
    }
}
