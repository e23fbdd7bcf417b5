//! How many writes of new KV may be under way at once.

use std::sync::{Condvar, Mutex, PoisonError};

/// A bounded number of permits.
#[derive(Debug)]
pub(crate) struct Permits {
    /// 0: no limit.
    limit: usize,
    taken: Mutex<usize>,
    returned: Condvar,
}

impl Permits {
    /// As many permits as `limit`; 0: no limit.
    pub(crate) fn new(limit: usize) -> Self {
        Self { limit, taken: Mutex::new(0), returned: Condvar::new() }
    }

    /// Does `work` with a permit. Waits for one.
    pub(crate) fn with<T>(&self, work: impl FnOnce() -> T) -> T {
        let lock = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let is_full = |taken: &mut usize| self.limit > 0 && *taken >= self.limit;
        let waited = self.returned.wait_while(lock, is_full);
        *waited.unwrap_or_else(PoisonError::into_inner) += 1;
        let done = work();
        *self.taken.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.returned.notify_one();
        done
    }
}
