//! What the state reports to the change log, beside single keys that the catalog reports.

use cascade_tier::Change;

use super::StoreState;
use crate::core::catalog::ContentIndex;

impl StoreState {
    /// Logs that all keys were removed, in place of their single removals.
    pub(crate) fn note_cleared(&mut self) {
        // The removals of the single keys are not reported, and leave the expirations alone.
        self.catalog.clear_expirations();
        self.catalog.report(Change::Cleared);
    }

    /// Makes all followers start again, after too many changes for single entries.
    pub(crate) fn invalidate_change_cursors(&mut self) {
        if let Some(log) = self.catalog.changes_mut() {
            log.invalidate_cursors();
        }
    }

    /// Whether a content can be read now. True for every content while all read circuits are
    /// closed, and for cleared ones, whose followers have been told.
    pub(crate) fn is_readable(&self, content: ContentIndex) -> bool {
        self.open_read_circuits == 0
            || self.catalog.is_cleared(content)
            || !self.is_unreadable(self.catalog.content(content))
    }

    /// Logs the keys of a content if its readability changed: a tier gained or lost the content
    /// while a read circuit is open.
    pub(crate) fn note_readability(&mut self, content: ContentIndex, was_readable: bool) {
        let is_readable = self.is_readable(content);
        if is_readable == was_readable {
            return;
        }
        for key in self.catalog.keys_of(content) {
            let name = self.catalog.entry(key).key;
            let change = if is_readable { Change::Stored } else { Change::Removed };
            self.catalog.report(change(name));
        }
    }
}
