//! A process that is killed between two stores into the ledger.

use std::cell::Cell;

thread_local! {
    static STORES_LEFT: Cell<u64> = const { Cell::new(u64::MAX) };
}

/// Ends the stores of this thread after some more.
pub(super) fn kill_after(stores: u64) {
    STORES_LEFT.set(stores);
}

/// How many stores were left. From now on there is no limit.
pub(super) fn restart() -> u64 {
    STORES_LEFT.replace(u64::MAX)
}

pub(super) fn may_store() -> bool {
    let left = STORES_LEFT.get();
    STORES_LEFT.set(left.saturating_sub(1));
    left > 0
}
