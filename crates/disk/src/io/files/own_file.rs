//! Opens files so that what others put into the tier's directory leads it to no other file.

use std::error::Error;
use std::fs::{File, Metadata, metadata, remove_file, symlink_metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::Path;

use rustix::fs::{Mode, OFlags, fcntl_getfl, fcntl_setfl, open as open_file};
use rustix::process::geteuid;

/// Why a file is neither read nor written: it may be that of somebody else.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct NotOwn(String);

fn not_own(reason: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, NotOwn(reason.into()))
}

/// Whether a file was refused because it may be that of somebody else.
pub(crate) fn is_not_own(error: &io::Error) -> bool {
    error.get_ref().is_some_and(<dyn Error + Send + Sync>::is::<NotOwn>)
}

/// Opens a file, without following a symbolic link of this name and without waiting for the other
/// end of a named pipe.
///
/// # Errors
/// [`is_not_own`] for everything that is not a regular file, and, if it is opened for writing, for
/// a file with another hard link or another owner. `IsADirectory` for a directory.
pub(super) fn open(path: &Path, flags: OFlags) -> io::Result<File> {
    let all = flags | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file: File = match open_file(path, all, Mode::RUSR | Mode::WUSR) {
        Ok(file) => file.into(),
        Err(rustix::io::Errno::LOOP) => return Err(not_own("it is a symbolic link")),
        Err(rustix::io::Errno::NXIO) => return Err(not_own("it is a named pipe or a socket")),
        Err(error) => {
            // A directory or a pipe cannot be opened with `O_DIRECT`, which says so like a file
            // system without it.
            if error == rustix::io::Errno::INVAL {
                check(path, &symlink_metadata(path)?, false)?;
            }
            return Err(error.into());
        }
    };
    check(path, &file.metadata()?, flags.intersects(OFlags::WRONLY | OFlags::RDWR))?;
    // `io_uring` would not wait for a transfer of such a file.
    fcntl_setfl(&file, fcntl_getfl(&file)? - OFlags::NONBLOCK)?;
    Ok(file)
}

fn check(path: &Path, found: &Metadata, is_written: bool) -> io::Result<()> {
    if found.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    if !found.is_file() {
        let kind = found.file_type();
        let is_device = kind.is_block_device() || kind.is_char_device();
        return Err(not_own(if is_device { "it is a device" } else { "it is a named pipe" }));
    }
    if !is_written {
        return Ok(());
    }
    if found.nlink() > 1 {
        return Err(not_own(format!("it has {} hard links", found.nlink())));
    }
    if found.uid() != geteuid().as_raw() && !has_owner_of_directory(path, found)? {
        return Err(not_own(format!("it belongs to user {}", found.uid())));
    }
    Ok(())
}

/// Whether a file has the owner of its directory. Some file systems show one user as the owner of
/// all files; [`check_directory`] has proved that of the directory.
fn has_owner_of_directory(path: &Path, found: &Metadata) -> io::Result<bool> {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    Ok(metadata(directory.unwrap_or(Path::new(".")))?.uid() == found.uid())
}

/// Checks that no other user can put files into a directory, unless the owner lets a group. Returns
/// the permission bits. The path may be a symbolic link, if it is not the tier's own.
///
/// # Errors
/// [`is_not_own`] for a directory of another user, and for one in which all may create files.
pub(super) fn check_directory(directory: &Path) -> io::Result<u32> {
    let found = metadata(directory)?;
    let mode = found.mode() & 0o7777;
    let (path, user) = (directory.display(), geteuid().as_raw());
    if mode & 0o002 != 0 {
        return Err(not_own(format!(
            "all users may write to it (mode {mode:04o}); chmod 700 {path}"
        )));
    }
    if found.uid() != user && owner_of_new_file(directory)? != found.uid() {
        return Err(not_own(format!(
            "it belongs to user {}, this process runs as {user}; chown {user} {path}",
            found.uid()
        )));
    }
    Ok(mode)
}

/// Checks that a path is no symbolic link.
pub(super) fn check_not_link(path: &Path) -> io::Result<()> {
    let is_link = symlink_metadata(path)?.is_symlink();
    if is_link { Err(not_own("it is a symbolic link")) } else { Ok(()) }
}

/// The owner of a file that this process creates in a directory.
fn owner_of_new_file(directory: &Path) -> io::Result<u32> {
    let (path, file) = super::create_temporary(&directory.join("owner"))?;
    let found = file.metadata();
    remove_file(path)?;
    Ok(found?.uid())
}
