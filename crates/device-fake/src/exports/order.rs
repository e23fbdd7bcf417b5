//! Functions about streams and events.
#![expect(unsafe_code, reason = "exports functions with C's interface")]

use std::ffi::{c_int, c_uint, c_void};
use std::time::Duration;

use super::write;
use crate::state::{Event, INVALID_HANDLE, INVALID_VALUE, NOT_READY, State, Stream, Work};
use crate::streams::{create, submit, wait_until};
use crate::world::{Needs, SUCCESS, Status, World};

/// `CU_EVENT_DISABLE_TIMING`.
const DISABLE_TIMING: c_uint = 2;

#[unsafe(export_name = "cuStreamCreateWithPriority")]
pub(crate) unsafe extern "C" fn stream_create(
    stream: *mut *mut c_void,
    flags: c_uint,
    _priority: c_int,
) -> Status {
    World::call("cuStreamCreateWithPriority", Needs::Current, |_, state| {
        if flags > 1 {
            return Err(INVALID_VALUE);
        }
        let handle = std::ptr::without_provenance_mut(create(state));
        // SAFETY: the caller's promise.
        unsafe { write(stream, handle) }
    })
}

#[unsafe(export_name = "cuStreamDestroy_v2")]
pub(crate) unsafe extern "C" fn stream_destroy(stream: *mut c_void) -> Status {
    World::release("cuStreamDestroy_v2", Needs::Context, |state| {
        let stream = state.streams.get_mut(&stream.addr()).filter(|stream| !stream.is_destroyed);
        stream.ok_or(INVALID_HANDLE)?.is_destroyed = true;
        Ok(())
    })
}

#[unsafe(export_name = "cuStreamWaitEvent")]
pub(crate) unsafe extern "C" fn stream_wait_event(
    stream: *mut c_void,
    event: *mut c_void,
    _flags: c_uint,
) -> Status {
    World::call("cuStreamWaitEvent", Needs::Context, |_, state| {
        let event = event.addr();
        let count = state.events.get(&event).ok_or(INVALID_HANDLE)?.recorded;
        submit(state, stream.addr(), "cuStreamWaitEvent", Work::Wait { event, count })
    })
}

fn is_idle(stream: &Stream) -> bool {
    stream.queue.is_empty() && !stream.is_running
}

#[unsafe(export_name = "cuStreamQuery")]
pub(crate) unsafe extern "C" fn stream_query(stream: *mut c_void) -> Status {
    World::call("cuStreamQuery", Needs::Context, |_, state| {
        let stream = state.streams.get(&stream.addr()).ok_or(INVALID_HANDLE)?;
        is_idle(stream).then_some(()).ok_or(NOT_READY)
    })
}

/// Waits as the driver does: without a time limit.
fn synchronize(name: &'static str, is_over: impl Fn(&State) -> bool) -> Status {
    let status = World::call(name, Needs::Context, |_, _| Ok(()));
    if status != SUCCESS {
        return status;
    }
    let world = World::get();
    let state = wait_until(world.lock(), world, is_over);
    state.death.unwrap_or(SUCCESS)
}

#[unsafe(export_name = "cuStreamSynchronize")]
pub(crate) unsafe extern "C" fn stream_synchronize(stream: *mut c_void) -> Status {
    let stream = stream.addr();
    synchronize("cuStreamSynchronize", |state| state.streams.get(&stream).is_none_or(is_idle))
}

/// For the library of an engine: we never wait by a call of the driver.
#[unsafe(export_name = "cuCtxSynchronize")]
pub(crate) unsafe extern "C" fn context_synchronize() -> Status {
    synchronize("cuCtxSynchronize", |state| state.streams.values().all(is_idle))
}

#[unsafe(export_name = "cuLaunchHostFunc")]
pub(crate) unsafe extern "C" fn launch_host_function(
    stream: *mut c_void,
    function: Option<unsafe extern "C" fn(*mut c_void)>,
    argument: *mut c_void,
) -> Status {
    World::call("cuLaunchHostFunc", Needs::Context, |_, state| {
        let function = function.ok_or(INVALID_VALUE)? as *const c_void;
        let function = function.expose_provenance();
        let argument = argument.expose_provenance();
        submit(state, stream.addr(), "cuLaunchHostFunc", Work::Call { function, argument })
    })
}

#[unsafe(export_name = "cuEventCreate")]
pub(crate) unsafe extern "C" fn event_create(event: *mut *mut c_void, flags: c_uint) -> Status {
    World::call("cuEventCreate", Needs::Current, |_, state| {
        if flags > 7 {
            return Err(INVALID_VALUE);
        }
        let handle = state.new_handle();
        // SAFETY: the caller's promise.
        unsafe { write(event, std::ptr::without_provenance_mut(handle)) }?;
        let is_timed = flags & DISABLE_TIMING == 0;
        state.events.insert(handle, Event { is_timed, ..Event::default() });
        Ok(())
    })
}

#[unsafe(export_name = "cuEventRecord")]
pub(crate) unsafe extern "C" fn event_record(event: *mut c_void, stream: *mut c_void) -> Status {
    World::call("cuEventRecord", Needs::Context, |_, state| {
        let event = event.addr();
        let recorded = state.events.get_mut(&event).ok_or(INVALID_HANDLE)?;
        recorded.recorded += 1;
        let count = recorded.recorded;
        submit(state, stream.addr(), "cuEventRecord", Work::Record { event, count })
    })
}

fn is_over(state: &State, event: usize) -> Option<bool> {
    state.events.get(&event).map(|event| event.reached >= event.recorded)
}

#[unsafe(export_name = "cuEventQuery")]
pub(crate) unsafe extern "C" fn event_query(event: *mut c_void) -> Status {
    World::call("cuEventQuery", Needs::Context, |_, state| {
        let is_over = is_over(state, event.addr()).ok_or(INVALID_HANDLE)?;
        is_over.then_some(()).ok_or(NOT_READY)
    })
}

#[unsafe(export_name = "cuEventSynchronize")]
pub(crate) unsafe extern "C" fn event_synchronize(event: *mut c_void) -> Status {
    let event = event.addr();
    synchronize("cuEventSynchronize", |state| is_over(state, event).unwrap_or(true))
}

#[unsafe(export_name = "cuEventElapsedTime")]
pub(crate) unsafe extern "C" fn event_elapsed_time(
    time_ms: *mut f32,
    first: *mut c_void,
    last: *mut c_void,
) -> Status {
    World::call("cuEventElapsedTime", Needs::Context, |_, state| {
        let (first, last) = (time_of(state, first.addr())?, time_of(state, last.addr())?);
        // Negative if the events are in the other order, as on a GPU.
        let elapsed_ms = (last.as_secs_f64() - first.as_secs_f64()) * 1e3;
        #[expect(clippy::cast_possible_truncation, reason = "the driver's type")]
        let elapsed_ms = elapsed_ms as f32;
        // SAFETY: the caller's promise.
        unsafe { write(time_ms, elapsed_ms) }
    })
}

/// When an event was reached.
fn time_of(state: &State, event: usize) -> Result<Duration, Status> {
    let event = state.events.get(&event).filter(|it| it.is_timed && it.recorded > 0);
    let event = event.ok_or(INVALID_HANDLE)?;
    event.time.filter(|_| event.reached >= event.recorded).ok_or(NOT_READY)
}

#[unsafe(export_name = "cuEventDestroy_v2")]
pub(crate) unsafe extern "C" fn event_destroy(event: *mut c_void) -> Status {
    World::release("cuEventDestroy_v2", Needs::Context, |state| {
        let event = state.events.get_mut(&event.addr()).filter(|event| !event.is_destroyed);
        // What waits for it goes on to wait.
        event.ok_or(INVALID_HANDLE)?.is_destroyed = true;
        Ok(())
    })
}
