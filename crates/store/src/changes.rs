//! The change log: keys added and removed, in order, so that a follower knows the exact set.
//!
//! The log is bounded and protected by the lock of the state. It starts with the first call of
//! [`Store::changes`], and ends when no call has come for as many changes as it keeps. The catalog
//! appends to it when it adds and removes keys.
//!
//! A new follower first gets a scan: the catalog's entries by index, in pieces, and between two
//! pieces the changes since the last one. The result is exact, because an entry never changes its
//! index. A key that did not change during the scan is at its index when the scan reads it. For a
//! key that changed, its last change comes after every piece that was read before the change, and
//! every later piece agrees with it.

use std::collections::{BTreeSet, VecDeque};
use std::hash::{BuildHasher, RandomState};

use cascade_block::BlockKey;

use crate::catalog::{ContentIndex, KeyIndex};
use crate::history::Loss;
use crate::state::StoreState;
use crate::{Store, StoreError};

/// Changes returned and entries scanned while the lock is held once.
const PIECE_KEYS: u32 = 2048;
/// Encodes a complete scan in the bytes of a cursor.
const NO_SCAN: u32 = u32::MAX;

/// One change of the set of blocks that a store has in any tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Change {
    /// The store has this block now.
    Stored(BlockKey),
    /// The store does not have this block any more. A follower can get this for a block that it
    /// does not know.
    Removed(BlockKey),
    /// The store has no blocks any more.
    Cleared,
}

/// The position of a follower in the changes of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ChangeCursor {
    /// Identifies the log; differs after every start.
    epoch: u64,
    /// Number of changes before the next one.
    sequence: u64,
    /// Index of the next entry to scan; `None` once the scan is complete.
    scan: Option<u32>,
}

impl ChangeCursor {
    /// Length of a cursor as bytes.
    pub const BYTES: usize = 20;

    /// Encodes the cursor, to store or send it.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&self.epoch.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[16..].copy_from_slice(&self.scan.unwrap_or(NO_SCAN).to_le_bytes());
        bytes
    }

    /// Decodes a cursor. Any bytes are valid; for a cursor that did not come from this store,
    /// [`Store::changes`] returns `is_lost`.
    pub fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        let word = |first: usize| u64::from_le_bytes(std::array::from_fn(|at| bytes[first + at]));
        let scan = u32::from_le_bytes(std::array::from_fn(|at| bytes[16 + at]));
        Self { epoch: word(0), sequence: word(8), scan: (scan != NO_SCAN).then_some(scan) }
    }
}

/// Result of [`Store::changes`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Changes {
    /// The cursor for the next call.
    pub next: ChangeCursor,
    /// Whether the changes since the cursor are no longer in the log, or the cursor is of another
    /// run. The changes start with all keys again: empty the set before applying them.
    pub is_lost: bool,
    /// Whether the set is exact after these changes: the blocks that the store had at one time
    /// during this call. Otherwise call again at once.
    pub is_current: bool,
    /// The changes, in their order.
    pub changes: Vec<Change>,
}

/// The log of the latest changes, with the expiration times of keys.
#[derive(Debug)]
pub(crate) struct ChangeLog {
    epoch: u64,
    entries: VecDeque<Change>,
    /// Maximum number of entries.
    entries_max: usize,
    /// Number of changes before the first entry.
    first: u64,
    /// Number of changes at the last call: no cursor is newer.
    last_read: u64,
    /// Expiration times of keys, in milliseconds since 1970, with the indices of their entries. The
    /// store removes an expired block only when a call finds it; a follower must learn in time.
    expirations: BTreeSet<(u64, u32)>,
}

impl ChangeLog {
    fn new(entries_max: usize) -> Self {
        Self {
            // `RandomState` has random keys, so that the number differs in every run.
            epoch: RandomState::new().hash_one(entries_max),
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

    fn end(&self) -> u64 {
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
    fn first_expired(&self, now_unix_ms: u64) -> Option<u32> {
        self.expirations
            .first()
            .filter(|(expires, _)| *expires <= now_unix_ms)
            .map(|(_, index)| *index)
    }

    /// Invalidates all cursors.
    fn invalidate_cursors(&mut self) {
        // One more than the end: a cursor at the end has read everything, and is valid otherwise.
        self.first = self.end() + 1;
        self.entries.clear();
    }

    /// Whether the log has all changes since a cursor.
    fn is_valid(&self, cursor: &ChangeCursor) -> bool {
        let kept = self.first..=self.end();
        cursor.epoch == self.epoch && kept.contains(&cursor.sequence)
    }

    /// The cursor of a new follower: a scan from the first entry.
    fn start_cursor(&self) -> ChangeCursor {
        ChangeCursor { epoch: self.epoch, sequence: self.end(), scan: Some(0) }
    }

    /// Appends the changes since the cursor to `changes`, until it has `most`.
    fn read(&self, cursor: &mut ChangeCursor, changes: &mut Vec<Change>, most: usize) {
        let room = most.saturating_sub(changes.len());
        let from = usize::try_from(cursor.sequence - self.first).expect("it is in the log");
        let to = self.entries.len().min(from.saturating_add(room));
        changes.extend(self.entries.range(from..to));
        cursor.sequence = self.first + to as u64;
    }
}

impl Store {
    /// Returns the changes since a cursor, at most `max` (zero counts as one). Without a cursor,
    /// returns the keys that the store has now; continue with the returned cursors.
    ///
    /// A follower keeps a set of keys. It applies the changes of each result, after emptying the
    /// set if the result `is_lost`. Whenever a result `is_current`, the set is exactly the keys for
    /// which [`Store::contains`] is true.
    ///
    /// The first call starts a log of `changes_max` changes. The log ends if that many changes
    /// happen without a further call. The lock is released after every 2,048 changes.
    ///
    /// # Errors
    /// [`StoreError::Config`] if `changes_max` is 0; [`StoreError::Closed`] if the store is closed.
    pub fn changes(&self, since: Option<ChangeCursor>, max: usize) -> Result<Changes, StoreError> {
        let core = self.core();
        let entries_max = core.config.changes_max;
        if entries_max == 0 {
            let reason = "0; the store keeps no change log: set its length".to_owned();
            return Err(StoreError::Config { setting: "changes_max", reason });
        }
        let max = max.max(1);
        let mut cursor = since;
        let mut answer: Option<Changes> = None;
        loop {
            let mut state = core.lock();
            if state.is_closed {
                return Err(StoreError::Closed);
            }
            let now_unix_ms = core.clock.unix_ms();
            state.history.set_time(now_unix_ms);
            let count = answer.as_ref().map_or(0, |answer| answer.changes.len());
            let most = (max - count).min(PIECE_KEYS as usize);
            let piece = state.read_changes(cursor, most, entries_max, now_unix_ms);
            core.unlock(state);
            cursor = Some(piece.next);
            // If the log lost this cursor between two pieces, the pieces before it are obsolete.
            let whole = match answer.take().filter(|_| !piece.is_lost) {
                None => piece,
                Some(mut before) => {
                    before.changes.extend(piece.changes);
                    Changes { changes: before.changes, is_lost: before.is_lost, ..piece }
                }
            };
            if whole.is_current || whole.changes.len() >= max {
                return Ok(whole);
            }
            answer = Some(whole);
        }
    }
}

impl StoreState {
    /// One piece of the result of [`Store::changes`], of at most `most` changes.
    ///
    /// The order matters: the changes since the cursor come before the entries of the scan, because
    /// a scanned entry is newer than these changes. Expired keys are removed before the scan, so
    /// that their removals are in the log.
    fn read_changes(
        &mut self,
        since: Option<ChangeCursor>,
        most: usize,
        entries_max: usize,
        now_unix_ms: u64,
    ) -> Changes {
        let log = self.catalog.changes_mut();
        let log = log.get_or_insert_with(|| Box::new(ChangeLog::new(entries_max)));
        let valid = since.filter(|cursor| log.is_valid(cursor));
        let mut next = valid.unwrap_or_else(|| log.start_cursor());
        let mut changes = Vec::new();
        // Before `expire` appends: `push` takes a log for unread after `entries_max` changes, and
        // `expire` appends at most that many.
        log.last_read = log.end();
        log.read(&mut next, &mut changes, most);
        if next.sequence == log.end() && changes.len() < most {
            // At most as many as the log holds: more would drop entries that this call must return.
            self.expire(most.min(entries_max) - changes.len().min(entries_max), now_unix_ms);
        }
        let log = self.catalog.changes_mut().as_mut().expect("entries_max changes do not end it");
        log.read(&mut next, &mut changes, most);
        // An expired key that is left would be in the set of the follower, while `Store::contains`
        // is false for it.
        let is_log_read = next.sequence == log.end() && log.first_expired(now_unix_ms).is_none();
        if is_log_read && changes.len() < most {
            self.scan(&mut next, &mut changes, most, now_unix_ms);
        }
        if let Some(log) = self.catalog.changes_mut() {
            log.last_read = log.end();
        }
        let is_lost = since.is_some() && valid.is_none();
        Changes { is_lost, is_current: is_log_read && next.scan.is_none(), next, changes }
    }

    /// Forgets at most `most` expired keys.
    fn expire(&mut self, most: usize, now_unix_ms: u64) {
        for _ in 0..most {
            let log = self.catalog.changes_mut().as_ref();
            let Some(index) = log.and_then(|log| log.first_expired(now_unix_ms)) else { return };
            self.forget(KeyIndex(index), Loss::Expired);
        }
    }

    /// Scans one piece of the catalog from the cursor on, and adds the keys that can be read.
    fn scan(
        &mut self,
        cursor: &mut ChangeCursor,
        changes: &mut Vec<Change>,
        most: usize,
        now_unix_ms: u64,
    ) {
        let Some(from) = cursor.scan else { return };
        let end = self.catalog.key_indices_end();
        let mut to = from.saturating_add(PIECE_KEYS).min(end);
        let mut expirations = Vec::new();
        for key in self.catalog.keys_at(from..to) {
            if changes.len() == most {
                // The next piece begins with this entry.
                to = key.0;
                break;
            }
            let entry = self.catalog.entry(key);
            if entry.expires_unix_ms != 0 {
                expirations.push((entry.expires_unix_ms, key.0));
            }
            // A block that only an open circuit hides is reported once it is readable again: by
            // `note_readability`, or by a new scan when the circuit closes.
            let content = self.catalog.content(entry.content);
            if !entry.has_expired(now_unix_ms) && !self.is_unreadable(content) {
                changes.push(Change::Stored(entry.key));
            }
        }
        if let Some(log) = self.catalog.changes_mut() {
            // Keys from before the start of the log have no expiration in it yet.
            log.expirations.extend(expirations);
        }
        cursor.scan = (to < end).then_some(to);
    }

    /// Logs that all keys were removed, in place of their single removals.
    pub(crate) fn note_cleared(&mut self) {
        if let Some(log) = self.catalog.changes_mut() {
            // `forget_all` has detached the log, so that removed keys did not remove their
            // expirations.
            log.expirations.clear();
        }
        self.catalog.report(Change::Cleared);
    }

    /// Makes all followers start again, after too many changes for single entries.
    pub(crate) fn invalidate_change_cursors(&mut self) {
        if let Some(log) = self.catalog.changes_mut() {
            log.invalidate_cursors();
        }
    }

    /// Whether a content can be read now. True for every content while all read circuits are
    /// closed.
    pub(crate) fn is_readable(&self, content: ContentIndex) -> bool {
        self.open_read_circuits == 0 || !self.is_unreadable(self.catalog.content(content))
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
