//! Locks, threads, time and randomness: those of the system in production, those of a simulated
//! world on a thread that runs one.
//!
//! The choice is made at run time, so the code that is simulated is the code that is shipped.
//! Outside of a world each call costs one load of a flag and one branch more than these. With the
//! feature `simulated` off it costs nothing more.

mod calls;
mod clock;
mod condvar;
mod deadline_mutex;
mod futex;
mod mutex;
mod plant;
mod random;
mod release;
mod rwlock;
mod time;
mod user_directory;

pub mod thread;

#[cfg(feature = "simulated")]
pub mod simulated;
#[cfg(not(feature = "simulated"))]
#[path = "not_simulated.rs"]
mod simulated;

pub use calls::{CallError, CallLimit, Calls, Cancel, StartedCall};
pub use clock::{Clock, Deadline, ManualClock, SystemClock};
pub use condvar::{Condvar, WaitTimeoutResult};
pub use deadline_mutex::{DeadlineMutex, DeadlineMutexGuard};
pub use mutex::{Mutex, MutexGuard};
pub use plant::{Plant, UnknownPlant};
pub use random::{fill_random, random_u64};
pub use rwlock::{RwLock, RwLockReadGuard, RwLockWriteGuard};
pub use time::{now, sleep, thread_cpu_time, unix_ms};
pub use user_directory::user_directory;

pub use thread::yield_now;

/// A lock that is never held over a scheduling point, that is over any other call of this crate.
/// In a world it is then never contended. Where it is held over one, the world hangs.
pub type LeafMutex<T> = std::sync::Mutex<T>;

/// Whether the calling thread runs in a simulated world.
#[inline]
pub fn is_simulated() -> bool {
    simulated::current().is_some()
}

/// Whether the world of the calling thread has planted this bug. False outside of a world, whatever
/// the configuration.
#[inline]
pub fn is_planted(plant: Plant) -> bool {
    simulated::current().is_some_and(|world| world.is_planted(plant))
}
