//! Panics in a world: recorded by the hook, because a `catch_unwind` in the code under test hides
//! them from callers.

use std::any::Any;
use std::panic::PanicHookInfo;
use std::sync::Once;

use super::World;

/// Panics that a report lists at most.
const LISTED_MAX: usize = 100;

/// Records panics of worlds. The hook of before goes on handling those of other threads.
pub(super) fn install_hook() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| match super::current() {
            // No backtrace: to resolve one takes more stack than a coroutine has.
            Some(world) => world.record_panic(info),
            None => before(info),
        }));
    });
}

impl World {
    fn record_panic(&self, info: &PanicHookInfo<'_>) {
        let message = message_of(info.payload());
        let location = info.location().map(ToString::to_string).unwrap_or_default();
        // A second panic in a hook would abort, so this one takes no cell that the scheduler, if it
        // is what panicked, may have borrowed.
        // Without it the panic is recorded under the scheduler's name.
        let threads = self.threads.try_borrow().ok();
        let running = threads.as_ref().and_then(|it| it.get(self.current.get() as usize));
        let name = running.map_or("the scheduler", |thread| &thread.name);
        if let Ok(mut panics) = self.panics.try_borrow_mut()
            && panics.len() < LISTED_MAX
        {
            panics.push(format!("`{name}` at {location}: {message}"));
        }
    }
}

/// The message of a panic.
pub(super) fn message_of(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().copied();
    let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("a payload without a message").to_owned()
}
