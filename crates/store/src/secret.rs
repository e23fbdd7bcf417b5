//! Files with secrets: read whole, and refused if anyone but their owner may read them.

use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use thiserror::Error;

/// Why a file with a secret was not taken.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SecretError {
    /// It cannot be opened or read.
    #[error("{} cannot be read", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: std::io::Error,
    },
    /// Others may read or change it.
    #[error(
        "{} has mode {mode:04o}: others than its owner may read or change it; run `chmod 600 {}`",
        path.display(), path.display()
    )]
    Exposed {
        /// The file.
        path: PathBuf,
        /// Its permissions.
        mode: u32,
    },
    /// It does not hold what it should.
    #[error("{}: {reason}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// What is wrong, without any of its bytes.
        reason: String,
    },
}

/// Who may read a secret beside its owner; nobody else may change it in any case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Readers {
    /// Nobody: 0600, 0400.
    Owner,
    /// Its group: 0640, 0440.
    Group,
}

/// Reads a file of at most that many bytes, if no others than `readers` may.
///
/// Looks at the file that it reads, not at the name once more, so that nobody can swap it between.
pub fn read_secret(path: &Path, bytes_max: u64, readers: Readers) -> Result<Vec<u8>, SecretError> {
    let forbidden = if readers == Readers::Owner { 0o077 } else { 0o037 };
    let failed = |source| SecretError::Read { path: path.to_owned(), source };
    let content = |reason: String| SecretError::Content { path: path.to_owned(), reason };
    let file = File::open(path).map_err(failed)?;
    let facts = file.metadata().map_err(failed)?;
    if !facts.is_file() {
        return Err(content("it is no regular file".to_owned()));
    }
    let mode = facts.mode() & 0o7777;
    if mode & forbidden != 0 {
        return Err(SecretError::Exposed { path: path.to_owned(), mode });
    }
    let mut secret = Vec::new();
    file.take(bytes_max + 1).read_to_end(&mut secret).map_err(failed)?;
    if secret.len() as u64 > bytes_max {
        return Err(content(format!("it is longer than {bytes_max} bytes")));
    }
    Ok(secret)
}
