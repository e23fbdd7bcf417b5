//! Refuses a directory with a file for each block, a layout that is no longer read.

use std::io;
use std::path::{Path, PathBuf};

use cascade_runtime::Deadline;

use crate::DiskError;
use crate::io::{FileIo, FileOperations, SystemFiles};
use crate::manifests::has_extension;

/// Returns the directory of block files, which an opening of a file tier there refuses, if any.
///
/// # Errors
/// A directory cannot be read.
pub fn find_block_files(directory: &Path) -> io::Result<Option<PathBuf>> {
    let path = directory.join("blocks");
    Ok(has_block_file(&SystemFiles, &path)?.then_some(path))
}

/// Returns an error if the directory has block files: `blocks/<digits>/<key>.block`.
pub(crate) fn refuse(io: &FileIo, directory: &Path, deadline: Deadline) -> Result<(), DiskError> {
    let path = directory.join("blocks");
    let searched = path.clone();
    let is_old = io.call("list", &path, deadline, move |files| has_block_file(files, &searched))?;
    if is_old { Err(DiskError::OldLayout { path }) } else { Ok(()) }
}

/// Whether there is a block file in a directory or in one of its subdirectories.
fn has_block_file(files: &dyn FileOperations, directory: &Path) -> io::Result<bool> {
    let is_block = |path: &PathBuf| has_extension(path, &["block"]);
    let found = list(files, directory)?;
    if found.iter().any(is_block) {
        return Ok(true);
    }
    for path in found {
        if list(files, &path)?.iter().any(is_block) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Lists a directory. There is nothing in what is missing or no directory.
fn list(files: &dyn FileOperations, path: &Path) -> io::Result<Vec<PathBuf>> {
    match files.list(path) {
        Err(error)
            if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) =>
        {
            Ok(Vec::new())
        }
        listed => listed,
    }
}
