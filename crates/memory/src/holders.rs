//! The number of holders of a sealed slab. Reports when the second to last holder of a watched slab
//! lets go.
//!
//! The count of references to the slab cannot do this: whoever decrements it may not touch
//! the slab any more. This count is decremented before that one, while the slab still lives.

use crate::sync::{AtomicUsize, Ordering};

/// Bit of the count: the next drop that leaves one holder is reported.
const WATCHED: usize = 1 << (usize::BITS - 1);

#[derive(Debug)]
pub(crate) struct Holders {
    count: AtomicUsize,
    /// Identifies the slab in reports.
    token: AtomicUsize,
}

impl Holders {
    pub(crate) fn one() -> Self {
        Self { count: AtomicUsize::new(1), token: AtomicUsize::new(0) }
    }

    pub(crate) fn count(&self) -> usize {
        self.count.load(Ordering::Acquire) & !WATCHED
    }

    #[inline]
    pub(crate) fn add(&self) {
        // Relaxed: the caller holds the slab already, as with an `Arc`.
        self.count.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts one holder less. Returns the token if this drop has to be reported.
    #[inline]
    pub(crate) fn remove(&self) -> Option<usize> {
        let mut count = self.count.load(Ordering::Relaxed);
        loop {
            // The mark goes with the report, so that each watch is reported once.
            let is_reported = count == WATCHED | 2;
            let rest = if is_reported { 1 } else { count - 1 };
            // Acquire: sees the token that `watch` stored before it set the mark.
            let order = (Ordering::AcqRel, Ordering::Relaxed);
            match self.count.compare_exchange_weak(count, rest, order.0, order.1) {
                Ok(_) => return is_reported.then(|| self.token.load(Ordering::Relaxed)),
                Err(now) => count = now,
            }
        }
    }

    /// Whether there is another holder than the caller. If so, the drop that leaves one holder is
    /// reported. Calls do not overlap.
    pub(crate) fn watch(&self, token: usize) -> bool {
        self.token.store(token, Ordering::Relaxed);
        let is_held = self.count.fetch_or(WATCHED, Ordering::AcqRel) & !WATCHED > 1;
        if !is_held {
            self.count.fetch_and(!WATCHED, Ordering::Relaxed);
        }
        is_held
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn each_watch_is_reported_once() {
        let holders = Holders::one();
        assert!(!holders.watch(7), "the caller is the only holder");
        holders.add();
        assert_eq!(holders.remove(), None, "not watched");
        holders.add();
        holders.add();
        assert!(holders.watch(8));
        assert_eq!((holders.count(), holders.remove()), (3, None), "a holder is left");
        assert_eq!(holders.remove(), Some(8));
        holders.add();
        assert_eq!(holders.remove(), None, "a new holder was not watched");
        assert_eq!((holders.remove(), holders.count()), (None, 0));
    }
}

#[cfg(all(test, loom))]
mod loom_models {
    use std::sync::atomic::AtomicUsize as Plain;

    use loom::sync::Arc;

    use super::*;

    /// A search that finds a slab held is told when its holders are gone: `watch` returns false, or
    /// exactly one of the drops reports.
    #[test]
    fn no_release_is_missed() {
        loom::model(|| {
            let holders = Arc::new(Holders::one());
            let reports = std::sync::Arc::new(Plain::new(0));
            let drops: Vec<_> = (0..2)
                .map(|_| {
                    holders.add();
                    let (holders, reports) = (Arc::clone(&holders), reports.clone());
                    loom::thread::spawn(move || {
                        if let Some(token) = holders.remove() {
                            assert_eq!(token, 5);
                            reports.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                        }
                    })
                })
                .collect();
            let is_held = holders.watch(5);
            for drop in drops {
                drop.join().expect("no drop panics");
            }
            assert_eq!(holders.count(), 1);
            let reported = reports.load(std::sync::atomic::Ordering::SeqCst);
            assert_eq!(reported, usize::from(is_held));
        });
    }
}
