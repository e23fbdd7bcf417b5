//! A follower of the changes: its set of keys has to be exact whenever the store says so.

use std::collections::BTreeSet;

use cascade_block::BlockKey;
use cascade_store::{Change, ChangeCursor};

use super::{Client, note};

/// Changes that one call returns at most.
const CHANGES_MAX: usize = 100;
/// Calls of one operation at most.
const CALLS_MAX: usize = 8;

/// The keys that a store has, as its changes tell.
#[derive(Debug, Default)]
pub(super) struct Follower {
    cursor: Option<ChangeCursor>,
    keys: BTreeSet<BlockKey>,
}

impl Client {
    /// Follows the changes until the set is exact, for some calls at most.
    pub(super) fn follow(&mut self) {
        for _ in 0..CALLS_MAX {
            let call = self.begin("changes");
            let changes = match self.store.changes(self.follower.cursor, CHANGES_MAX) {
                Ok(changes) => changes,
                Err(error) => {
                    self.check_error(&mut self.checked(call), call, 0, &error);
                    return self.end(call);
                }
            };
            let Follower { cursor, keys } = &mut self.follower;
            *cursor = Some(changes.next);
            if changes.is_lost {
                keys.clear();
            }
            note(changes.changes.len() as u64);
            for change in changes.changes {
                match change {
                    Change::Stored(key) => drop(keys.insert(key)),
                    Change::Removed(key) => drop(keys.remove(&key)),
                    Change::Cleared => keys.clear(),
                }
            }
            if changes.is_current {
                self.check_followed(call);
            }
            self.end(call);
            if changes.is_current {
                return;
            }
        }
    }

    fn check_followed(&self, call: super::Call) {
        let mut model = self.checked(call);
        let mut known = 0;
        for (key, block_key) in (0..).zip(&self.shared.keys) {
            if self.follower.keys.contains(block_key) {
                known += 1;
                model.found(call.begin, key, "a follower of the changes");
            } else {
                model.miss(call.begin, key, "a follower of the changes");
            }
        }
        if known != self.follower.keys.len() {
            model.findings.add("a follower of the changes has keys that no caller put");
        }
    }
}
