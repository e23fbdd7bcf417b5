//! Threads: the system's, or coroutines of the world.

#[cfg(feature = "simulated")]
mod in_world;

use std::any::Any;
use std::fmt;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, PoisonError};

use crate::LeafMutex;
use crate::simulated::{self, World};

/// Starts a thread with a name.
#[derive(Debug, Default)]
pub struct Builder {
    name: Option<String>,
}

/// Waits for the end of a thread. Dropping it detaches the thread.
pub struct JoinHandle<T>(Handle<T>);

enum Handle<T> {
    System(std::thread::JoinHandle<T>),
    Simulated(SimulatedHandle<T>),
}

struct SimulatedHandle<T> {
    thread: u32,
    result: Arc<LeafMutex<Option<std::thread::Result<T>>>>,
}

/// The payload of [`JoinHandle::join`] for a thread that was killed with its domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Killed;

impl Builder {
    /// A thread without a name.
    pub fn new() -> Self {
        Self::default()
    }

    /// The name of the thread, for messages and tools.
    pub fn name(self, name: String) -> Self {
        Self { name: Some(name) }
    }

    /// Starts the thread. In a world it belongs to the caller's domain, and some worlds let this
    /// fail now and then.
    pub fn spawn<F, T>(self, body: F) -> io::Result<JoinHandle<T>>
    where
        F: FnOnce() -> T + Send + 'static,
        T: Send + 'static,
    {
        if let Some(world) = simulated::current() {
            world.may_start_thread()?;
            let name = self.name.unwrap_or_else(|| "unnamed".to_owned());
            return Ok(start(name, body, |name, body| world.spawn(name, body)));
        }
        let builder = std::thread::Builder::new();
        let builder = match self.name {
            Some(name) => builder.name(name),
            None => builder,
        };
        builder.spawn(body).map(|handle| JoinHandle(Handle::System(handle)))
    }
}

/// Starts a thread of a world.
fn start<F, T>(
    name: String,
    body: F,
    spawn: impl FnOnce(String, Box<dyn FnOnce()>) -> u32,
) -> JoinHandle<T>
where
    F: FnOnce() -> T + 'static,
    T: 'static,
{
    let result = Arc::new(LeafMutex::new(None));
    let filled = Arc::clone(&result);
    let thread = spawn(
        name,
        Box::new(move || {
            let ended = catch_unwind(AssertUnwindSafe(body));
            *filled.lock().unwrap_or_else(PoisonError::into_inner) = Some(ended);
        }),
    );
    JoinHandle(Handle::Simulated(SimulatedHandle { thread, result }))
}

/// Starts a thread without a name.
///
/// # Panics
///
/// When the system cannot start a thread, as [`std::thread::spawn`].
pub fn spawn<F, T>(body: F) -> JoinHandle<T>
where
    F: FnOnce() -> T + Send + 'static,
    T: Send + 'static,
{
    Builder::new().spawn(body).expect("the system can start a thread")
}

/// Lets another thread run.
pub fn yield_now() {
    match simulated::current() {
        Some(world) => world.yield_now(),
        None => std::thread::yield_now(),
    }
}

impl<T> JoinHandle<T> {
    /// Waits for the end of the thread. An error holds the payload of its panic, or [`Killed`].
    ///
    /// # Panics
    ///
    /// When a thread of a world is joined from outside of it.
    #[track_caller]
    pub fn join(self) -> std::thread::Result<T> {
        match self.0 {
            Handle::System(handle) => handle.join(),
            Handle::Simulated(handle) => {
                own_world().join(handle.thread);
                let mut result = handle.result.lock().unwrap_or_else(PoisonError::into_inner);
                let killed = || Err(Box::new(Killed) as Box<dyn Any + Send>);
                result.take().unwrap_or_else(killed)
            }
        }
    }

    /// Whether the thread has ended.
    ///
    /// # Panics
    ///
    /// When a thread of a world is asked about from outside of it.
    pub fn is_finished(&self) -> bool {
        match &self.0 {
            Handle::System(handle) => handle.is_finished(),
            Handle::Simulated(handle) => own_world().has_ended(handle.thread),
        }
    }
}

fn own_world() -> &'static World {
    simulated::current().expect("a simulated thread is joined in its own world")
}

impl<T> fmt::Debug for JoinHandle<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Handle::System(handle) => handle.fmt(f),
            Handle::Simulated(handle) => {
                f.debug_struct("JoinHandle").field("thread", &handle.thread).finish()
            }
        }
    }
}
