//! The token of a user: whoever knows it is a process of that user, or of root, on this host.

use std::env::var_os;
use std::fs::{DirBuilder, File, Metadata, hard_link, metadata, remove_file};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use cascade_runtime::{fill_random, random_u64, user_directory};
use rustix::fs::{Mode, OFlags, open};
use rustix::process::geteuid;

use crate::TransportError;

/// The shortest token: a shorter one could be guessed.
pub(crate) const TOKEN_BYTES_MIN: usize = 16;
/// Bytes that are read of the file.
const FILE_BYTES_MAX: u64 = 4096;
/// Permissions of a directory with which other users can replace files in it.
const WRITABLE_BY_OTHERS: u32 = 0o022;
/// With the sticky bit, only a file's owner can replace it.
const STICKY: u32 = 0o1000;

/// The file of this user's token: beside the default socket of its node.
#[expect(
    clippy::disallowed_methods,
    reason = "each process of the user finds it without a setting"
)]
pub(crate) fn default_path() -> PathBuf {
    user_directory(|name| var_os(name), geteuid().as_raw()).join("cascade-transfer-token")
}

/// The token of this user, for programs that prove to each other that they have one user.
///
/// # Errors
/// If the file cannot be read or made, or if it may be that of another user.
pub fn user_token() -> Result<Vec<u8>, TransportError> {
    let path = default_path();
    read_or_make(&path).map_err(|error| TransportError::Unavailable(why_not(&path, &error)))
}

/// Why the token cannot be had, and what to do.
pub(crate) fn why_not(path: &Path, error: &io::Error) -> String {
    format!("there is no token of this user, {}: {error}; or configure a token", path.display())
}

/// Reads the token, or makes one that others cannot read. Read again for each connection: cleaners
/// of temporary files may have removed it since.
///
/// # Errors
/// If the file cannot be read or made, or if it may be that of another user.
pub(crate) fn read_or_make(path: &Path) -> io::Result<Vec<u8>> {
    let directory = path.parent().unwrap_or(Path::new("/"));
    DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
    check_directory(&metadata(directory)?)?;
    loop {
        match read(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => make(path)?,
            read => return read,
        }
    }
}

fn check_directory(directory: &Metadata) -> io::Result<()> {
    let (owner, mode) = (directory.uid(), directory.mode() & 0o7777);
    let is_shared = mode & WRITABLE_BY_OTHERS != 0 && mode & STICKY == 0;
    if ![0, geteuid().as_raw()].contains(&owner) || is_shared {
        return Err(unsafe_file(format!(
            "its directory belongs to user {owner} and has mode {mode:04o}: others could put a \
             file there"
        )));
    }
    Ok(())
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file: File = open(path, flags, Mode::empty())?.into();
    let facts = file.metadata()?;
    let mode = facts.mode() & 0o777;
    if !facts.is_file() || facts.uid() != geteuid().as_raw() || mode & 0o077 != 0 {
        return Err(unsafe_file(format!(
            "it is not a file that only this user can read (owner {}, mode {mode:04o}): remove it",
            facts.uid()
        )));
    }
    let mut token = vec![];
    file.take(FILE_BYTES_MAX).read_to_end(&mut token)?;
    let token = token.trim_ascii();
    if token.len() < TOKEN_BYTES_MIN {
        return Err(unsafe_file(format!("it has less than {TOKEN_BYTES_MIN} bytes: remove it")));
    }
    Ok(token.to_vec())
}

/// Makes the file, unless another process has made it meanwhile. It is never seen incomplete.
fn make(path: &Path) -> io::Result<()> {
    let mut random = [0; 16];
    fill_random(&mut random)?;
    let first = u128::from_le_bytes(random);
    fill_random(&mut random)?;
    let token = format!("{first:032x}{:032x}\n", u128::from_le_bytes(random));
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{:016x}.tmp", random_u64()?));
    let temporary = PathBuf::from(name);
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let mut file: File = open(&temporary, flags, Mode::RUSR | Mode::WUSR)?.into();
    let written = file.write_all(token.as_bytes());
    let linked = written.and_then(|()| match hard_link(&temporary, path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        linked => linked,
    });
    remove_file(&temporary)?;
    linked
}

fn unsafe_file(reason: String) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, reason)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    fn directory() -> tempfile::TempDir {
        tempfile::tempdir().unwrap()
    }

    fn refused(path: &Path) -> String {
        read_or_make(path).unwrap_err().to_string()
    }

    #[test]
    fn processes_of_a_user_get_the_same_token() {
        let directory = directory();
        let path = directory.path().join("made/token");
        let threads: Vec<_> = (0..8)
            .map(|_| {
                let path = path.clone();
                cascade_runtime::thread::spawn(move || read_or_make(&path).unwrap())
            })
            .collect();
        let tokens: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        assert!(tokens.iter().all(|token| *token == tokens[0]), "{tokens:?}");
        assert_eq!(tokens[0].len(), 64);
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(fs::metadata(path.parent().unwrap()).unwrap().mode() & 0o777, 0o700);
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
        fs::remove_file(&path).unwrap();
        assert_ne!(read_or_make(&path).unwrap(), tokens[0]);
    }

    #[test]
    fn a_file_that_others_may_know_is_refused() {
        let directory = directory();
        let path = directory.path().join("token");
        let token = read_or_make(&path).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
        assert!(refused(&path).contains("only this user"));
        let link = directory.path().join("link");
        fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        symlink(&path, &link).unwrap();
        assert!(read_or_make(&link).is_err());
        assert_eq!(read_or_make(&path).unwrap(), token);
        fs::write(&path, "short\n").unwrap();
        assert!(refused(&path).contains("less than 16 bytes"));
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert!(refused(&path).contains("only this user"));
    }

    #[test]
    fn a_directory_in_which_others_may_put_files_is_refused() {
        let directory = directory();
        let path = directory.path().join("token");
        for (mode, is_refused) in [(0o777, true), (0o770, true), (0o1777, false), (0o755, false)] {
            fs::set_permissions(directory.path(), Permissions::from_mode(mode)).unwrap();
            assert_eq!(read_or_make(&path).is_err(), is_refused, "{mode:o}");
        }
    }
}
