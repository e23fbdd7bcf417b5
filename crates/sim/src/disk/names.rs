//! The names in a simulated directory: the current ones, and those that a power loss leaves.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::{OsStr, OsString};

use cascade_runtime::simulated::Random;

/// Unsynced changes of a directory. The file system commits older ones by itself.
const UNSYNCED_MAX: usize = 64;

/// A directory.
#[derive(Debug, Default)]
pub(super) struct Directory {
    current: BTreeMap<OsString, u64>,
    durable: BTreeMap<OsString, u64>,
    /// Changes that are not on stable storage, in their order, with their numbers on the disk.
    unsynced: VecDeque<(u64, NameChange)>,
}

/// New meanings of names, which reach stable storage together.
type NameChange = Vec<(OsString, Option<u64>)>;

impl Directory {
    /// The file or directory of a name.
    pub(super) fn get(&self, name: &OsStr) -> Option<u64> {
        self.current.get(name).copied()
    }

    /// The names and what they mean, in their order.
    pub(super) fn entries(&self) -> impl Iterator<Item = (&OsString, u64)> {
        self.current.iter().map(|(name, inode)| (name, *inode))
    }

    /// Gives a name to a file, or takes it away.
    pub(super) fn set(&mut self, change: u64, name: &OsStr, inode: Option<u64>) {
        self.change(change, vec![(name.to_owned(), inode)]);
    }

    /// Renames a file; both names change together, also on stable storage.
    pub(super) fn rename(&mut self, change: u64, from: &OsStr, to: &OsStr, inode: u64) {
        self.change(change, vec![(from.to_owned(), None), (to.to_owned(), Some(inode))]);
    }

    /// Makes all changes up to this number durable.
    pub(super) fn sync(&mut self, last: u64) {
        while self.unsynced.front().is_some_and(|(change, _)| *change <= last) {
            self.commit_oldest();
        }
    }

    /// The numbers of the changes that are not on stable storage.
    pub(super) fn unsynced(&self) -> impl Iterator<Item = u64> {
        self.unsynced.iter().map(|(change, _)| *change)
    }

    /// A sync that fails: some of the first changes are durable.
    pub(super) fn fail_sync(&mut self, random: &mut Random) {
        let count = random.index_below(self.unsynced.len() + 1);
        for _ in 0..count {
            self.commit_oldest();
        }
    }

    /// The names are those on stable storage, as after a power loss.
    pub(super) fn forget_unsynced(&mut self) {
        self.unsynced.clear();
        self.current.clone_from(&self.durable);
    }

    /// Everything that a name means, or may mean after a power loss.
    pub(super) fn referenced(&self) -> impl Iterator<Item = u64> {
        let unsynced = self.unsynced.iter().flat_map(|(_, change)| change);
        let unsynced = unsynced.filter_map(|(_, inode)| *inode);
        self.current.values().chain(self.durable.values()).copied().chain(unsynced)
    }

    fn change(&mut self, number: u64, change: NameChange) {
        apply(&mut self.current, &change);
        self.unsynced.push_back((number, change));
        if self.unsynced.len() > UNSYNCED_MAX {
            self.commit_oldest();
        }
    }

    fn commit_oldest(&mut self) {
        if let Some((_, change)) = self.unsynced.pop_front() {
            apply(&mut self.durable, &change);
        }
    }
}

fn apply(names: &mut BTreeMap<OsString, u64>, change: &NameChange) {
    for (name, inode) in change {
        match inode {
            Some(inode) => drop(names.insert(name.clone(), *inode)),
            None => drop(names.remove(name)),
        }
    }
}
