//! Erasing: files are overwritten, synced and removed; files that could not be erased are reported.

use std::io;
use std::path::{Path, PathBuf};

use cascade_block::with_causes;
use cascade_runtime::Deadline;
use cascade_tier::tier::{EraseOutcome, NotErased};

use crate::io::FileIo;
use crate::{DiskError, manifests};

/// Erases files and collects the result. Overwriting replaces the bytes that the file system
/// exposes; an SSD or a copy-on-write file system may keep older copies (`docs/security.md`).
#[derive(Debug, Default)]
pub(crate) struct Erasure {
    pub(crate) report: EraseOutcome,
}

impl Erasure {
    /// Erases files one by one and returns those that still exist. A file that cannot be
    /// overwritten is removed all the same, so that no later opening recovers it.
    ///
    /// A file is not removed if its overwrite timed out: the write may still be in progress, and
    /// after a removal nothing would show whether it completed. No step starts after the deadline,
    /// because another file may have the name by then.
    pub(crate) fn erase(
        &mut self,
        io: &FileIo,
        paths: Vec<PathBuf>,
        deadline: Deadline,
    ) -> Vec<PathBuf> {
        let mut remaining = Vec::new();
        for path in paths {
            if !self.erase_one(io, &path, deadline) {
                remaining.push(path);
            }
        }
        remaining
    }

    /// Erases one file. Returns whether it no longer exists.
    fn erase_one(&mut self, io: &FileIo, path: &Path, deadline: Deadline) -> bool {
        let timed_out = || DiskError::Timeout { operation: "overwrite", path: path.to_owned() };
        if deadline.has_passed(io.clock.as_ref()) {
            self.add_remaining(path, "not removed", &timed_out());
            return false;
        }
        let target = path.to_owned();
        let overwritten =
            io.call("overwrite", path, deadline, move |files| files.overwrite(&target));
        if let Err(error @ DiskError::Timeout { .. }) = &overwritten {
            self.add_remaining(path, "not removed", error);
            return false;
        }
        let target = path.to_owned();
        let removed = io.call("remove", path, deadline, move |files| match files.remove(&target) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        });
        let is_gone = removed.is_ok();
        match (overwritten, removed) {
            (Ok(bytes), Ok(())) => {
                self.report.files_removed += 1;
                self.report.overwritten_bytes += bytes;
            }
            (Ok(_), Err(error)) => self.add_remaining(path, "overwritten, not removed", &error),
            (Err(error), Ok(())) => self.add_remaining(path, "removed, not overwritten", &error),
            (Err(error), Err(_)) => self.add_remaining(path, "not removed", &error),
        }
        is_gone
    }

    /// Erases the manifests of a directory and syncs the removals. Manifests are kept as long as a
    /// segment may be there, or come back by a power loss: without its manifest, encrypted data
    /// would be taken for plain blocks.
    pub(crate) fn erase_manifests(
        &mut self,
        io: &FileIo,
        directory: &Path,
        are_blocks_gone: bool,
        deadline: Deadline,
    ) {
        let manifests = directory.join("manifests");
        if are_blocks_gone {
            match manifests::files(io, directory, deadline) {
                // There may be no directory to sync.
                Ok(paths) if paths.is_empty() => {}
                Ok(paths) => {
                    drop(self.erase(io, paths, deadline));
                    self.sync(io, &manifests, deadline);
                }
                Err(error) => self.add_remaining(&manifests, "not listed", &error),
            }
        } else {
            let why = io::Error::other("segments with their namespaces may be left");
            self.add_remaining(&manifests, "not removed", &why);
        }
        self.sync(io, directory, deadline);
    }

    /// Syncs the directory, so that its removals are on stable storage. Returns whether they are.
    pub(crate) fn sync(&mut self, io: &FileIo, directory: &Path, deadline: Deadline) -> bool {
        let Err(error) = io.sync_directory(directory, deadline) else { return true };
        let what = "removals may not be on stable storage";
        self.add_remaining(directory, what, &error);
        false
    }

    pub(crate) fn add_remaining(&mut self, path: &Path, what: &str, why: &dyn std::error::Error) {
        let why = format!("{what}: {}", with_causes(why));
        self.report.left.push(NotErased { what: path.display().to_string(), why });
    }
}
