//! Erasing: files are overwritten, synced and removed, and what could not be is told by name.

use std::io;
use std::path::{Path, PathBuf};

use cascade_block::{Deadline, with_causes};

use crate::io::{FileIo, FileOperations};
use crate::{DiskError, manifests};

/// What an erase did. Overwriting reaches the bytes that the file system shows; an SSD or a file
/// system that copies on write may keep older ones (`docs/security.md`).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EraseReport {
    /// Files that were overwritten, synced and removed.
    pub files_removed: u64,
    /// Bytes of them that were overwritten; holes hold nothing and are passed by.
    pub overwritten_bytes: u64,
    /// Files that are still there, or were removed without being overwritten.
    pub left: Vec<FileLeft>,
}

/// A file that an erase did not do away with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileLeft {
    /// Which.
    pub path: PathBuf,
    /// Why, and whether it is still there.
    pub reason: String,
}

impl EraseReport {
    /// Erases files one by one and returns those that are still there. One that cannot be
    /// overwritten is removed all the same, so that no later opening takes it in; but not while it
    /// may still be overwritten: that could not be told from one that is gone. What has not begun
    /// at the deadline never does, because the file may be another's by then.
    pub(crate) fn erase(
        &mut self,
        io: &Io,
        paths: Vec<PathBuf>,
        deadline: Deadline,
    ) -> Vec<PathBuf> {
        let mut still_there = Vec::new();
        for path in paths {
            if !self.erase_one(io, &path, deadline) {
                still_there.push(path);
            }
        }
        still_there
    }

    /// Whether the file is gone.
    fn erase_one(&mut self, io: &FileIo, path: &Path, deadline: Deadline) -> bool {
        let late = || DiskError::Timeout { operation: "overwrite", path: path.to_owned() };
        if deadline.has_passed(io.clock.as_ref()) {
            self.leave(path.to_owned(), "still there", &late());
            return false;
        }
        let target = path.to_owned();
        let overwritten =
            io.call("overwrite", path, deadline, move |files| files.overwrite(&target));
        if let Err(error @ DiskError::Timeout { .. }) = &overwritten {
            self.leave(path.to_owned(), "still there", error);
            return false;
        }
        let target = path.to_owned();
        let removed = io.call("remove", path, deadline, move |files| match files.remove(&target) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        });
        let is_gone = removed.is_ok();
        let path = path.to_owned();
        match (overwritten, removed) {
            (Ok(bytes), Ok(())) => {
                self.files_removed += 1;
                self.overwritten_bytes += bytes;
            }
            (Ok(_), Err(error)) => self.leave(path, "overwritten, not removed", &error),
            (Err(error), Ok(())) => self.leave(path, "removed, not overwritten", &error),
            (Err(error), Err(_)) => self.leave(path, "still there", &error),
        }
        is_gone
    }

    /// Erases the manifests that stand in a directory, and brings its removals to stable storage.
    /// They stay with files of blocks that do: without them ciphertext would pass for blocks.
    pub(crate) fn erase_manifests(
        &mut self,
        io: &Io,
        directory: &Path,
        still_there: &[PathBuf],
        deadline: Deadline,
    ) {
        if !still_there.is_empty() {
            let why = io::Error::other("files that they describe are still there");
            self.leave(directory.join("manifests"), "still there", &why);
            return self.sync(io, directory, deadline);
        }
        match manifests::files(io, directory, deadline) {
            Ok(paths) => drop(self.erase(io, paths, deadline)),
            Err(error) => self.leave(directory.join("manifests"), "not looked into", &error),
        }
        self.sync(io, directory, deadline);
    }

    /// Brings the removals in a directory to stable storage.
    pub(crate) fn sync(&mut self, io: &FileIo, directory: &Path, deadline: Deadline) {
        let target = directory.to_owned();
        let synced =
            io.call("sync", directory, deadline, move |files| files.sync_directory(&target));
        if let Err(error) = synced {
            self.leave(directory.to_owned(), "removals may not be on stable storage", &error);
        }
    }

    pub(crate) fn leave(&mut self, path: PathBuf, what: &str, why: &dyn std::error::Error) {
        let reason = format!("{what}: {}", with_causes(why));
        self.left.push(FileLeft { path, reason });
    }
}

/// The files below a directory for which `is_ours` says yes, those of its directories included.
pub(crate) fn files_below(
    io: &Io,
    directory: &Path,
    deadline: Deadline,
    is_ours: fn(&Path) -> bool,
) -> Result<Vec<PathBuf>, DiskError> {
    let top = directory.to_owned();
    io.call("list", directory, deadline, move |files| {
        let mut found = Vec::new();
        let mut pending = list(files, &top)?;
        while let Some(path) = pending.pop() {
            if is_ours(&path) {
                found.push(path);
            } else if path.extension().is_none() {
                pending.extend(list(files, &path)?);
            }
        }
        Ok(found)
    })
}

/// What is in a directory; nothing in what is none.
fn list(files: &dyn FileOperations, path: &Path) -> io::Result<Vec<PathBuf>> {
    match files.list(path) {
        Err(error)
            if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) =>
        {
            Ok(Vec::new())
        }
        other => other,
    }
}

/// Whether a path ends as one of the files that this tier makes.
pub(crate) fn has_extension(path: &Path, known: &[&str]) -> bool {
    path.extension().and_then(|extension| extension.to_str()).is_some_and(|it| known.contains(&it))
}
