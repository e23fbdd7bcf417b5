//! How many documents are stored, for requests that wait until they are.

use std::sync::{Condvar, Mutex, PoisonError};

/// How many documents are stored. A document that never will be counts once storing has ended.
#[derive(Debug, Default)]
pub(super) struct DocumentCount {
    count: Mutex<u32>,
    changed: Condvar,
}

/// The thread that stores the documents. When it ends, also by a panic, nobody waits any more.
#[derive(Debug)]
pub(super) struct Storing<'a>(&'a DocumentCount);

impl DocumentCount {
    /// Begins to store documents.
    pub(super) fn store(&self) -> Storing<'_> {
        Storing(self)
    }

    /// Waits until a document is stored, or storing has ended.
    pub(super) fn wait_for(&self, document: u32) {
        let count = self.count.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.changed.wait_while(count, |count| *count <= document));
    }

    fn set(&self, count: u32) {
        *self.count.lock().unwrap_or_else(PoisonError::into_inner) = count;
        self.changed.notify_all();
    }
}

impl Storing<'_> {
    /// Notes that a document is stored, after those before it.
    pub(super) fn stored(&self, document: u32) {
        self.0.set(document + 1);
    }
}

impl Drop for Storing<'_> {
    fn drop(&mut self) {
        self.0.set(u32::MAX);
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn requests_wait_for_their_document_and_no_longer_than_documents_are_stored() {
        let documents = DocumentCount::default();
        thread::scope(|scope| {
            let storing = documents.store();
            let first = scope.spawn(|| documents.wait_for(0));
            let last = scope.spawn(|| documents.wait_for(9));
            storing.stored(0);
            first.join().expect("the first document is stored");
            assert!(!last.is_finished(), "the last one is not");
            let panics = scope.spawn(move || {
                let _storing = storing;
                panic!("storing fails");
            });
            assert!(panics.join().is_err());
            last.join().expect("nobody stores it any more");
        });
    }
}
