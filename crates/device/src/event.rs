//! An event: the point in a stream at which it was recorded.
#![expect(unsafe_code, reason = "calls the driver")]

use std::fmt;
use std::ptr::null_mut;
use std::sync::Arc;
use std::time::Duration;

use cascade_runtime::Deadline;

use crate::context::Context;
use crate::error::CudaError;
use crate::functions::{Handle, Status};

/// `CU_EVENT_DISABLE_TIMING`: events with times are slower.
const NO_TIMING: u32 = 2;
/// `CU_EVENT_DEFAULT`.
const TIMING: u32 = 0;

/// A point in a stream. Before it was recorded it counts as passed.
pub struct Event {
    context: Arc<Context>,
    handle: Handle,
    is_timed: bool,
}

// SAFETY: the handle is an address that only the driver follows, from any thread.
unsafe impl Send for Event {}
// SAFETY: the driver may be called about one event by several threads at once.
unsafe impl Sync for Event {}

impl Event {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        Self::create(context, false)
    }

    /// An event that knows when it was reached.
    pub(crate) fn timed(context: &Arc<Context>) -> Result<Self, CudaError> {
        Self::create(context, true)
    }

    fn create(context: &Arc<Context>, is_timed: bool) -> Result<Self, CudaError> {
        let flags = if is_timed { TIMING } else { NO_TIMING };
        context.with(|| {
            let mut handle = null_mut();
            let create = |create: unsafe extern "C" fn(*mut Handle, u32) -> Status| {
                // SAFETY: writes to a local variable.
                unsafe { create(&raw mut handle, flags) }
            };
            context.call(|functions| &functions.event_create, create)?;
            Ok(Self { context: Arc::clone(context), handle, is_timed })
        })
    }

    pub(crate) fn handle(&self) -> Handle {
        self.handle
    }

    /// Whether all work before it in its stream is over.
    ///
    /// # Errors
    /// If the device failed, with this work or earlier.
    pub fn is_over(&self) -> Result<bool, CudaError> {
        let query = |query: unsafe extern "C" fn(Handle) -> Status| {
            // SAFETY: the event exists until this value is dropped.
            unsafe { query(self.handle) }
        };
        self.context.query(|functions| &functions.event_query, query)
    }

    /// The time between an earlier event and this one, by the device's clock. Both are over. None
    /// if one of them has no time, or the driver has no such function.
    ///
    /// # Errors
    /// If one of them is not over, or the device failed.
    pub fn time_since(&self, earlier: &Self) -> Result<Option<Duration>, CudaError> {
        if !self.is_timed || !earlier.is_timed {
            return Ok(None);
        }
        let mut time_ms = 0.0_f32;
        let ask = |ask: unsafe extern "C" fn(*mut f32, Handle, Handle) -> Status| {
            // SAFETY: writes to a local variable; both events exist until they are dropped.
            unsafe { ask(&raw mut time_ms, earlier.handle, self.handle) }
        };
        let asked = self.context.with(|| {
            let context = &self.context;
            context.call(|functions| &functions.event_elapsed_time, ask)
        });
        match asked {
            // Rounding may give a negative time, which is none.
            Ok(()) => {
                let seconds = f64::from(time_ms.max(0.0)) / 1e3;
                Ok(Some(Duration::try_from_secs_f64(seconds).unwrap_or_default()))
            }
            Err(CudaError::MissingFunction { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Waits until all work before it in its stream is over.
    ///
    /// # Errors
    /// As [`Event::is_over`]; [`CudaError::TimedOut`] at the deadline: the work may still run.
    pub fn wait(&self, deadline: Deadline) -> Result<(), CudaError> {
        self.context.wait("the work before an event", deadline, || self.is_over())
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let destroy = |destroy: unsafe extern "C" fn(Handle) -> Status| {
            // SAFETY: created by `new` and destroyed once. The driver keeps what waits for it.
            unsafe { destroy(self.handle) }
        };
        self.context.release(|functions| &functions.event_destroy, destroy);
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Event({:p})", self.handle)
    }
}
