//! Starts of threads in a chosen domain of a world.

use super::{JoinHandle, start};
use crate::simulated::{Domain, World};

impl World {
    /// Starts a thread in a domain. It always starts.
    pub fn spawn_in<F, T>(&'static self, domain: Domain, name: &str, body: F) -> JoinHandle<T>
    where
        F: FnOnce() -> T + Send + 'static,
        T: Send + 'static,
    {
        start(name.to_owned(), body, |name, body| {
            let thread = self.start_thread(name, domain, body);
            self.point();
            thread
        })
    }
}
