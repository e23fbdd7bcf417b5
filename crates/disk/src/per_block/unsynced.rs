//! The names of a tier without durable writes that have yet to reach stable storage.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use cascade_block::BlockKey;

/// Most files or directories of one call. Of a sync that times out, all but the last call counts.
const NAMES_PER_CALL: usize = 8;

/// Files that were written since the last sync, and directories from which files were removed.
#[derive(Debug, Default)]
pub(super) struct Unsynced {
    /// No more than there are files. Ordered, so that neighbours share a directory.
    files: BTreeSet<BlockKey>,
    directories: BTreeSet<PathBuf>,
}

/// Part of the names, for one call.
#[derive(Debug)]
pub(super) enum Names {
    Files(Vec<BlockKey>),
    Directories(Vec<PathBuf>),
}

impl Unsynced {
    pub(super) fn wrote(&mut self, key: BlockKey) {
        self.files.insert(key);
    }

    /// A key has no file any more in its directory.
    pub(super) fn removed(&mut self, key: &BlockKey, directory: &Path) {
        self.files.remove(key);
        if !self.directories.contains(directory) {
            self.directories.insert(directory.to_owned());
        }
    }

    /// Takes the names of the next call.
    pub(super) fn take_some(&mut self) -> Option<Names> {
        let files: Vec<_> =
            std::iter::from_fn(|| self.files.pop_first()).take(NAMES_PER_CALL).collect();
        if !files.is_empty() {
            return Some(Names::Files(files));
        }
        let directories: Vec<_> =
            std::iter::from_fn(|| self.directories.pop_first()).take(NAMES_PER_CALL).collect();
        (!directories.is_empty()).then_some(Names::Directories(directories))
    }

    /// Puts back what could not be synced. `has_file` says which keys still have a file.
    pub(super) fn put_back(
        &mut self,
        failed: Names,
        mut rest: Self,
        has_file: impl Fn(&BlockKey) -> bool,
    ) {
        match failed {
            Names::Files(keys) => rest.files.extend(keys),
            Names::Directories(directories) => rest.directories.extend(directories),
        }
        self.files.extend(rest.files.into_iter().filter(has_file));
        self.directories.append(&mut rest.directories);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(number: u8) -> BlockKey {
        BlockKey::from_bytes([number; 32])
    }

    fn names(unsynced: &mut Unsynced) -> (Vec<BlockKey>, Vec<PathBuf>) {
        let (mut keys, mut directories) = (Vec::new(), Vec::new());
        while let Some(names) = unsynced.take_some() {
            match names {
                Names::Files(some) => keys.extend(some),
                Names::Directories(some) => directories.extend(some),
            }
        }
        (keys, directories)
    }

    #[test]
    fn a_key_counts_once_however_often_it_is_written() {
        let mut unsynced = Unsynced::default();
        for _ in 0..100 {
            (0..20).for_each(|number| unsynced.wrote(key(number)));
            (0..10).for_each(|number| unsynced.removed(&key(number), Path::new("directory")));
        }
        let (keys, directories) = names(&mut unsynced);
        assert_eq!(keys, (10..20).map(key).collect::<Vec<_>>());
        assert_eq!(directories, [PathBuf::from("directory")]);
    }

    #[test]
    fn what_failed_is_put_back_and_removed_files_are_not() {
        let mut taken = Unsynced::default();
        (0..20).for_each(|number| taken.wrote(key(number)));
        taken.removed(&key(99), Path::new("directory"));
        let failed = taken.take_some().expect("there are files");
        let mut unsynced = Unsynced::default();
        unsynced.wrote(key(30));
        unsynced.put_back(failed, taken, |of| *of != key(3) && *of != key(15));
        let (keys, directories) = names(&mut unsynced);
        let left = (0..20).chain([30]).filter(|number| ![3, 15].contains(number));
        assert_eq!(keys, left.map(key).collect::<Vec<_>>());
        assert_eq!(directories, [PathBuf::from("directory")]);
    }
}
