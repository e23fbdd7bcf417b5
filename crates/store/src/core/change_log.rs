//! The log of the latest changes, protected by the lock of the state.

use std::collections::{BTreeSet, VecDeque};

use cascade_tier::{Change, ChangeCursor};

/// The log of the latest changes, with the expiration times of keys.
#[derive(Debug)]
pub(crate) struct ChangeLog {
    /// Differs in every run of a store, so that no cursor of another log is valid here.
    epoch: u64,
    entries: VecDeque<Change>,
    /// Maximum number of entries.
    entries_max: usize,
    /// Number of changes before the first entry.
    first: u64,
    /// Number of changes at the last call: no cursor is newer.
    pub(crate) last_read: u64,
    /// Expiration times of keys, in milliseconds since 1970, with the indices of their entries. The
    /// store removes an expired block only when a call finds it; a follower must learn in time.
    pub(crate) expirations: BTreeSet<(u64, u32)>,
}

impl ChangeLog {
    pub(crate) fn new(entries_max: usize, epoch: u64) -> Self {
        Self {
            epoch,
            // Reserved whole, so that growing never copies; pages are touched only as it fills.
            entries: VecDeque::with_capacity(entries_max),
            entries_max,
            first: 0,
            last_read: 0,
            expirations: BTreeSet::new(),
        }
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        self.entries.len() * size_of::<Change>() + self.expirations.len() * size_of::<(u64, u32)>()
    }

    pub(crate) fn end(&self) -> u64 {
        self.first + self.entries.len() as u64
    }

    /// Appends a change. Returns false if the log has no reader any more: every cursor would be
    /// lost.
    pub(crate) fn push(&mut self, change: Change) -> bool {
        if self.entries.len() == self.entries_max {
            if self.end() - self.last_read >= self.entries_max as u64 {
                return false;
            }
            self.entries.pop_front();
            self.first += 1;
        }
        self.entries.push_back(change);
        true
    }

    /// Adds the expiration time of a new key; zero is never.
    pub(crate) fn add_expiration(&mut self, expires_unix_ms: u64, index: u32) {
        if expires_unix_ms != 0 {
            self.expirations.insert((expires_unix_ms, index));
        }
    }

    /// Removes the expiration time of a removed key.
    pub(crate) fn remove_expiration(&mut self, expires_unix_ms: u64, index: u32) {
        if expires_unix_ms != 0 {
            self.expirations.remove(&(expires_unix_ms, index));
        }
    }

    /// An expired key.
    pub(crate) fn first_expired(&self, now_unix_ms: u64) -> Option<u32> {
        self.expirations
            .first()
            .filter(|(expires, _)| *expires <= now_unix_ms)
            .map(|(_, index)| *index)
    }

    /// Invalidates all cursors.
    pub(crate) fn invalidate_cursors(&mut self) {
        // One more than the end: a cursor at the end has read everything, and is valid otherwise.
        self.first = self.end() + 1;
        self.entries.clear();
    }

    /// Whether the log has all changes since a cursor.
    pub(crate) fn is_valid(&self, cursor: &ChangeCursor) -> bool {
        let kept = self.first..=self.end();
        cursor.epoch == self.epoch && kept.contains(&cursor.sequence)
    }

    /// The cursor of a new follower: a scan from the first entry.
    pub(crate) fn start_cursor(&self) -> ChangeCursor {
        ChangeCursor { epoch: self.epoch, sequence: self.end(), scan: Some(0) }
    }

    /// Appends the changes since the cursor to `changes`, until it has `most`.
    pub(crate) fn read(&self, cursor: &mut ChangeCursor, changes: &mut Vec<Change>, most: usize) {
        let room = most.saturating_sub(changes.len());
        let from = usize::try_from(cursor.sequence - self.first).expect("it is in the log");
        let to = self.entries.len().min(from.saturating_add(room));
        changes.extend(self.entries.range(from..to));
        cursor.sequence = self.first + to as u64;
    }
}
