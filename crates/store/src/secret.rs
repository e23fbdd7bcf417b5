//! Reading of secret files, with a check that only permitted users can read them.

use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use thiserror::Error;

/// Why a secret file was refused.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SecretError {
    /// The file cannot be opened or read.
    #[error("{} cannot be read", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        #[source]
        source: std::io::Error,
    },
    /// The mode of the file lets other users read or change it.
    #[error(
        "{} has mode {mode:04o}, which lets other users read or change it; run `chmod 600 {}`",
        path.display(), path.display()
    )]
    Exposed {
        /// The file.
        path: PathBuf,
        /// Its permissions.
        mode: u32,
    },
    /// The content of the file is not valid.
    #[error("{}: {reason}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// What is wrong, without any byte of the content.
        reason: String,
    },
}

/// Users that may read a secret file. Only the owner may ever change it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SecretReaders {
    /// The owner: modes 0600 and 0400.
    Owner,
    /// The owner and the group: also modes 0640 and 0440.
    Group,
}

/// Reads a secret file of at most `bytes_max` bytes. Fails if its mode permits more than `readers`.
///
/// Checks the mode of the open file, not of the path: the file cannot be replaced in between.
pub fn read_secret(
    path: &Path,
    bytes_max: u64,
    readers: SecretReaders,
) -> Result<Vec<u8>, SecretError> {
    let forbidden = if readers == SecretReaders::Owner { 0o077 } else { 0o037 };
    let failed = |source| SecretError::Read { path: path.to_owned(), source };
    let content = |reason: String| SecretError::Content { path: path.to_owned(), reason };
    // Without `NONBLOCK`, opening a named pipe would wait for its other end without a deadline.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let file = rustix::fs::open(path, flags, Mode::empty());
    let file = File::from(file.map_err(|error| failed(error.into()))?);
    let metadata = file.metadata().map_err(failed)?;
    if !metadata.is_file() {
        return Err(content("not a regular file".to_owned()));
    }
    let mode = metadata.mode() & 0o7777;
    if mode & forbidden != 0 {
        return Err(SecretError::Exposed { path: path.to_owned(), mode });
    }
    let mut secret = Vec::new();
    file.take(bytes_max + 1).read_to_end(&mut secret).map_err(failed)?;
    if secret.len() as u64 > bytes_max {
        return Err(content(format!("the file is longer than {bytes_max} bytes")));
    }
    Ok(secret)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A key file that was a named pipe made the start wait for ever.
    #[test]
    fn a_named_pipe_is_refused_without_waiting() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("key");
        rustix::fs::mkfifoat(rustix::fs::CWD, &path, Mode::RUSR | Mode::WUSR).unwrap();
        let error = read_secret(&path, 100, SecretReaders::Owner).unwrap_err();
        assert!(error.to_string().contains("not a regular file"), "{error}");
    }
}
