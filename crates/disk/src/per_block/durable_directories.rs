//! The directories of block files whose own names are on stable storage.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::PoisonError;

use cascade_runtime::LeafMutex;

use crate::io::FileOperations;

/// Saves syncs: after the first one for a directory only the names in it have to be synced.
#[derive(Debug)]
pub(super) struct DurableDirectories {
    /// The tier's directory, which is durable since the opening.
    top: PathBuf,
    known: LeafMutex<BTreeSet<PathBuf>>,
}

impl DurableDirectories {
    pub(super) fn new(top: PathBuf) -> Self {
        Self { top, known: LeafMutex::default() }
    }

    /// A directory was created, maybe instead of one that another process removed.
    pub(super) fn created(&self, directory: &Path) {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).remove(directory);
    }

    /// Syncs the names in a directory. Syncs its own name too, and those of its parents, unless
    /// that was done before: a directory that a power loss removes takes its files with it.
    pub(super) fn sync(&self, files: &dyn FileOperations, directory: &Path) -> io::Result<()> {
        files.sync_directory(directory)?;
        if self.known.lock().unwrap_or_else(PoisonError::into_inner).contains(directory) {
            return Ok(());
        }
        // By the names themselves, because another call may have created the directory, and may not
        // have synced anything yet.
        for parent in directory.ancestors().skip(1).take_while(|it| it.starts_with(&self.top)) {
            files.sync_directory(parent)?;
        }
        self.known.lock().unwrap_or_else(PoisonError::into_inner).insert(directory.to_owned());
        Ok(())
    }
}
