//! What stands for a world in a build without the simulator: a type without a value, so that all
//! code that needs one is removed.

use std::io;
use std::time::Duration;

use crate::Plant;

pub(crate) enum World {}

pub(crate) enum LockKind {
    Mutex,
    Read,
    Write,
}

#[expect(dead_code, reason = "no world constructs it")]
pub(crate) enum Attempt {
    Again,
    HeldOutside,
}

#[inline]
pub(crate) fn current() -> Option<&'static World> {
    None
}

macro_rules! without_a_value {
    ($($name:ident($($argument:ident: $kind:ty),*) $(-> $result:ty)?;)*) => {
        impl World {$(
            pub(crate) fn $name(&self, $($argument: $kind),*) $(-> $result)? {
                $(let _: $kind = $argument;)*
                match *self {}
            }
        )*}
    };
}

without_a_value! {
    point();
    acquired(lock: usize);
    released(lock: usize);
    wait_for_lock(kind: LockKind, lock: usize, time: Option<Duration>) -> Attempt;
    has_waiting_writer(lock: usize) -> bool;
    begin_wait_for_notification(condition: usize, time: Option<Duration>);
    end_wait() -> bool;
    notify(condition: usize, all: bool);
    now() -> Duration;
    unix_ms() -> u64;
    sleep(time: Duration);
    yield_now();
    fill_random(bytes: &mut [u8]);
    is_planted(plant: Plant) -> bool;
    may_start_thread() -> io::Result<()>;
    spawn(name: String, body: Box<dyn FnOnce()>) -> u32;
    join(thread: u32);
    has_ended(thread: u32) -> bool;
}
