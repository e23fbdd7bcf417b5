//! Operations on the names of a simulated disk.

use std::ffi::{OsStr, OsString};
use std::io;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use super::device::{Device, Inode, ROOT, device_error};
use super::faults::DiskFault;
use super::names::Directory;

/// Maximum number of files that are set aside for one name.
const SET_ASIDE_MAX: u32 = 100;

impl Device {
    /// The file or directory of a path.
    pub(super) fn resolve(&self, path: &Path) -> io::Result<u64> {
        let mut inode = ROOT;
        for component in path.components() {
            let name = match component {
                Component::RootDir | Component::CurDir => continue,
                Component::Normal(name) => name,
                Component::ParentDir | Component::Prefix(_) => {
                    return Err(io::ErrorKind::InvalidInput.into());
                }
            };
            let Some(Inode::Directory(directory)) = self.inodes.get(&inode) else {
                return Err(io::ErrorKind::NotADirectory.into());
            };
            inode = directory.get(name).ok_or(io::ErrorKind::NotFound)?;
        }
        Ok(inode)
    }

    /// The directory of a path and the name in it.
    pub(super) fn parent(&self, path: &Path) -> io::Result<(u64, OsString)> {
        let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?.to_owned();
        let parent = self.resolve(path.parent().unwrap_or(Path::new("/")))?;
        match self.inodes.get(&parent) {
            Some(Inode::Directory(_)) => Ok((parent, name)),
            _ => Err(io::ErrorKind::NotADirectory.into()),
        }
    }

    pub(super) fn directory(&mut self, inode: u64) -> io::Result<&mut Directory> {
        match self.inodes.get_mut(&inode) {
            Some(Inode::Directory(directory)) => Ok(directory),
            Some(Inode::File(_)) => Err(io::ErrorKind::NotADirectory.into()),
            None => Err(io::ErrorKind::NotFound.into()),
        }
    }

    fn is_directory(&self, inode: u64) -> bool {
        matches!(self.inodes.get(&inode), Some(Inode::Directory(_)))
    }

    /// The file of a path; a directory is an error.
    pub(super) fn file(&self, path: &Path) -> io::Result<u64> {
        let inode = self.resolve(path)?;
        if self.is_directory(inode) { Err(io::ErrorKind::IsADirectory.into()) } else { Ok(inode) }
    }

    pub(super) fn rename(&mut self, from: &Path, to: &Path) -> io::Result<()> {
        let moved = self.resolve(from)?;
        let ((directory, old), (target, new)) = (self.parent(from)?, self.parent(to)?);
        // The names of two directories would have to reach stable storage together.
        if directory != target {
            return Err(io::ErrorKind::CrossesDevices.into());
        }
        let replaced = self.directory(target)?.get(&new);
        if replaced == Some(moved) {
            return Ok(());
        }
        if let Some(replaced) = replaced {
            if self.is_directory(replaced) {
                self.set_aside(to)?;
            } else if self.is_directory(moved) {
                return Err(io::ErrorKind::NotADirectory.into());
            }
        }
        let change = self.next_name_change();
        self.directory(directory)?.rename(change, &old, &new, moved);
        if let Some(replaced) = replaced.filter(|replaced| !self.is_directory(*replaced)) {
            self.unlinked(replaced);
        }
        Ok(())
    }

    pub(super) fn set_aside(&mut self, path: &Path) -> io::Result<PathBuf> {
        let (parent, name) = self.parent(path)?;
        let inode = self.resolve(path)?;
        let change = self.next_name_change();
        for number in 0..SET_ASIDE_MAX {
            let mut target = name.clone();
            target.push(format!(".set-aside-{number}"));
            let directory = self.directory(parent)?;
            if directory.get(&target).is_none() {
                directory.rename(change, &name, &target, inode);
                return Ok(path.with_file_name(target));
            }
        }
        Err(io::ErrorKind::AlreadyExists.into())
    }

    pub(super) fn remove(&mut self, path: &Path) -> io::Result<()> {
        let inode = self.file(path)?;
        let (parent, name) = self.parent(path)?;
        let change = self.next_name_change();
        self.directory(parent)?.set(change, &name, None);
        self.unlinked(inode);
        Ok(())
    }

    /// Creates a directory and its parents. Succeeds if it exists.
    pub(super) fn make_directory(&mut self, path: &Path) -> io::Result<()> {
        let mut inode = ROOT;
        let names: Vec<&OsStr> = path.iter().filter(|name| *name != OsStr::new("/")).collect();
        for (at, name) in names.iter().enumerate() {
            let found = self.directory(inode)?.get(name);
            inode = match found {
                Some(found) if self.is_directory(found) => found,
                Some(_) if at + 1 == names.len() => {
                    return Err(io::ErrorKind::AlreadyExists.into());
                }
                Some(_) => return Err(io::ErrorKind::NotADirectory.into()),
                None => {
                    let created = self.add_inode(Inode::Directory(Directory::default()));
                    let change = self.next_name_change();
                    self.directory(inode)?.set(change, name, Some(created));
                    created
                }
            };
        }
        Ok(())
    }

    /// The paths in a directory, in any order.
    pub(super) fn list(&mut self, path: &Path) -> io::Result<Vec<PathBuf>> {
        let inode = self.resolve(path)?;
        let mut paths: Vec<PathBuf> =
            self.directory(inode)?.entries().map(|(name, _)| path.join(name)).collect();
        for end in (1..paths.len()).rev() {
            paths.swap(end, self.random.index_below(end + 1));
        }
        Ok(paths)
    }

    /// Ends a sync of a directory that began when this change of a name was the last one.
    pub(super) fn end_directory_sync(
        &mut self,
        inode: u64,
        last: u64,
        effect: Option<DiskFault>,
        now: Duration,
    ) -> io::Result<()> {
        let Some(fault) = effect else {
            self.directory(inode)?.sync(last);
            self.commit_journal(last);
            self.free_unreferenced();
            return Ok(());
        };
        self.count_fault(fault, now);
        if let Some(Inode::Directory(directory)) = self.inodes.get_mut(&inode) {
            directory.fail_sync(&mut self.random);
        }
        Err(device_error())
    }

    /// With a journal each sync makes all changes of names up to its beginning durable.
    pub(super) fn commit_journal(&mut self, last: u64) {
        if self.settings.has_journal {
            for inode in self.inodes.values_mut() {
                if let Inode::Directory(directory) = inode {
                    directory.sync(last);
                }
            }
        }
    }

    /// Leaves the names that a power loss leaves: the first of the unsynced changes, of all
    /// directories together with a journal, else of each one.
    pub(super) fn lose_unsynced_names(&mut self) {
        let mut unsynced: Vec<u64> = self.directories().flat_map(Directory::unsynced).collect();
        unsynced.sort_unstable();
        let kept = self.random.index_below(unsynced.len() + 1);
        let last = kept.checked_sub(1).map_or(0, |last| unsynced[last]);
        self.commit_journal(last);
        for inode in self.inodes.values_mut() {
            if let Inode::Directory(directory) = inode {
                if !self.settings.has_journal {
                    directory.fail_sync(&mut self.random);
                }
                directory.forget_unsynced();
            }
        }
    }

    pub(super) fn directories(&self) -> impl Iterator<Item = &Directory> {
        self.inodes.values().filter_map(|inode| match inode {
            Inode::Directory(directory) => Some(directory),
            Inode::File(_) => None,
        })
    }

    /// Takes the lock of a path, whose file is created if there is none. `None` if it is held.
    pub(super) fn lock(&mut self, path: &Path, now: Duration) -> io::Result<Option<(u64, u64)>> {
        let inode = match self.file(path) {
            Err(error) if error.kind() == io::ErrorKind::IsADirectory => {
                self.set_aside(path)?;
                self.create(path, 0, now)?
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => self.create(path, 0, now)?,
            found => found?,
        };
        if self.locks.contains_key(&inode) {
            return Ok(None);
        }
        let number = self.next_number();
        self.locks.insert(inode, number);
        let text = format!("{}\n", self.process());
        self.change(inode, |content| {
            content.truncate(0);
            content.write(0, text.as_bytes());
        })?;
        Ok(Some((inode, number)))
    }

    /// Whether the path still leads to the locked file; an error if another file has it.
    pub(super) fn is_locked(&self, path: &Path, inode: u64, number: u64) -> io::Result<bool> {
        let found = match self.resolve(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            found => found?,
        };
        if found == inode {
            return Ok(self.locks.get(&inode) == Some(&number));
        }
        if self.is_directory(found) {
            return Ok(false);
        }
        Err(io::Error::other(format!("{} was replaced by another file", path.display())))
    }

    pub(super) fn unlock(&mut self, inode: u64, number: u64) {
        if self.locks.get(&inode) == Some(&number) {
            self.locks.remove(&inode);
        }
    }
}
