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

use cascade_tier::{Change, ChangeCursor, Changes, StoreError};

use crate::Store;
use crate::core::catalog::KeyIndex;
use crate::core::change_log::ChangeLog;
use crate::core::history::Loss;
use crate::core::state::StoreState;

/// Changes returned and entries scanned while the lock is held once.
const PIECE_KEYS: u32 = 256;

impl Store {
    /// Returns the changes since a cursor, at most `max` (zero counts as one). Without a cursor,
    /// returns the keys that the store has now; continue with the returned cursors.
    ///
    /// A follower keeps a set of keys. It applies the changes of each result, after emptying the
    /// set if the result `is_lost`. Whenever a result `is_current`, the set is exactly the keys for
    /// which [`Store::contains`] is true.
    ///
    /// The first call starts a log of `changes_max` changes. The log ends if that many changes
    /// happen without a further call. The lock is released after every 256 changes.
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
            let mut state = core.lock_for(PIECE_KEYS as usize);
            state.charge(PIECE_KEYS);
            if state.is_closed {
                return Err(StoreError::Closed);
            }
            let now_unix_ms = core.clock.unix_ms();
            state.history.set_time(now_unix_ms);
            let count = answer.as_ref().map_or(0, |answer| answer.changes.len());
            let most = (max - count).min(PIECE_KEYS as usize);
            let piece = read_changes(&mut state, cursor, most, entries_max, now_unix_ms);
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

/// One piece of the result of [`Store::changes`], of at most `most` changes.
///
/// The order matters: the changes since the cursor come before the entries of the scan, because
/// a scanned entry is newer than these changes. Expired keys are removed before the scan, so
/// that their removals are in the log.
fn read_changes(
    state: &mut StoreState,
    since: Option<ChangeCursor>,
    most: usize,
    entries_max: usize,
    now_unix_ms: u64,
) -> Changes {
    let next_epoch = &mut state.next_epoch;
    let log = state.catalog.changes_mut().get_or_insert_with(|| {
        let epoch = std::mem::replace(next_epoch, next_epoch.wrapping_add(1));
        Box::new(ChangeLog::new(entries_max, epoch))
    });
    let valid = since.filter(|cursor| log.is_valid(cursor));
    let mut next = valid.unwrap_or_else(|| log.start_cursor());
    let mut changes = Vec::new();
    // Before `expire` appends: `push` takes a log for unread after `entries_max` changes, and
    // `expire` appends at most that many.
    log.last_read = log.end();
    log.read(&mut next, &mut changes, most);
    if next.sequence == log.end() && changes.len() < most {
        // At most as many as the log holds: more would drop entries that this call must return.
        expire(state, most.min(entries_max) - changes.len().min(entries_max), now_unix_ms);
    }
    let log = state.catalog.changes_mut().as_mut().expect("entries_max changes do not end it");
    log.read(&mut next, &mut changes, most);
    // An expired key that is left would be in the set of the follower, while `Store::contains`
    // is false for it.
    let is_log_read = next.sequence == log.end() && log.first_expired(now_unix_ms).is_none();
    if is_log_read && changes.len() < most {
        scan(state, &mut next, &mut changes, most, now_unix_ms);
    }
    if let Some(log) = state.catalog.changes_mut() {
        log.last_read = log.end();
    }
    let is_lost = since.is_some() && valid.is_none();
    Changes { is_lost, is_current: is_log_read && next.scan.is_none(), next, changes }
}

/// Forgets at most `most` expired keys.
fn expire(state: &mut StoreState, most: usize, now_unix_ms: u64) {
    for _ in 0..most {
        let log = state.catalog.changes_mut().as_ref();
        let Some(index) = log.and_then(|log| log.first_expired(now_unix_ms)) else { return };
        state.forget(KeyIndex(index), Loss::Expired);
    }
}

/// Scans one piece of the catalog from the cursor on, and adds the keys that can be read.
fn scan(
    state: &mut StoreState,
    cursor: &mut ChangeCursor,
    changes: &mut Vec<Change>,
    most: usize,
    now_unix_ms: u64,
) {
    let Some(from) = cursor.scan else { return };
    let end = state.catalog.key_indices_end();
    let mut to = from.saturating_add(PIECE_KEYS).min(end);
    let mut expirations = Vec::new();
    for key in state.catalog.keys_at(from..to) {
        if changes.len() == most {
            // The next piece begins with this entry.
            to = key.0;
            break;
        }
        let entry = state.catalog.entry(key);
        if entry.expires_unix_ms != 0 {
            expirations.push((entry.expires_unix_ms, key.0));
        }
        // A block that only an open circuit hides is reported once it is readable again: by
        // `note_readability`, or by a new scan when the circuit closes.
        let content = state.catalog.content(entry.content);
        if !entry.has_expired(now_unix_ms) && !state.is_unreadable(content) {
            changes.push(Change::Stored(entry.key));
        }
    }
    if let Some(log) = state.catalog.changes_mut() {
        // Keys from before the start of the log have no expiration in it yet.
        log.expirations.extend(expirations);
    }
    cursor.scan = (to < end).then_some(to);
}
