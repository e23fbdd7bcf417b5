//! Lock-free primitives; loom substitutes its own to check every interleaving.

#[cfg(not(loom))]
pub(crate) use crossbeam_queue::ArrayQueue;
#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicUsize, Ordering};
#[cfg(loom)]
pub(crate) use modelled::ArrayQueue;
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicUsize, Ordering};

#[cfg(loom)]
mod modelled {
    use std::collections::VecDeque;

    use loom::sync::Mutex;

    /// Model of crossbeam's queue, which loom cannot instrument: loom checks our use of it.
    #[derive(Debug)]
    pub(crate) struct ArrayQueue<T> {
        items: Mutex<VecDeque<T>>,
        capacity: usize,
    }

    impl<T> ArrayQueue<T> {
        pub(crate) fn new(capacity: usize) -> Self {
            Self { items: Mutex::new(VecDeque::new()), capacity }
        }

        pub(crate) fn len(&self) -> usize {
            self.items.lock().expect("no model panics inside").len()
        }

        pub(crate) fn push(&self, item: T) -> Result<(), T> {
            let mut items = self.items.lock().expect("no model panics inside");
            if items.len() == self.capacity {
                return Err(item);
            }
            items.push_back(item);
            Ok(())
        }

        pub(crate) fn pop(&self) -> Option<T> {
            self.items.lock().expect("no model panics inside").pop_front()
        }
    }
}
