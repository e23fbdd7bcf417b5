//! Reads certificates and keys from PEM files.

use std::error::Error;
use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{Mode, OFlags};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use crate::TransportError;

/// Size limit of a file.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// What nobody but the owner may do with a key.
const OTHERS: u32 = 0o077;

/// The certificates of a file, at least one.
pub(super) fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TransportError> {
    let (bytes, _) = read(path)?;
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes).collect();
    match chain {
        Ok(chain) if chain.is_empty() => Err(error(path, "contains no PEM certificate", None)),
        Ok(chain) => Ok(chain),
        Err(source) => Err(invalid(path, "cannot be read as PEM", source)),
    }
}

/// The private key of a file that only its owner can read.
pub(super) fn key(path: &Path) -> Result<PrivateKeyDer<'static>, TransportError> {
    let (bytes, mode) = read(path)?;
    if mode & OTHERS != 0 {
        return Err(error(path, "can be read or changed by others: chmod 600", None));
    }
    let key = PrivateKeyDer::from_pem_slice(&bytes);
    key.map_err(|source| invalid(path, "contains no PEM private key", source))
}

/// The bytes of a regular file, and its mode.
fn read(path: &Path) -> Result<(Vec<u8>, u32), TransportError> {
    let failed = |source: io::Error| invalid(path, "cannot be read", source);
    // Without `NONBLOCK`, opening a named pipe would wait for its other end without a deadline.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let file = rustix::fs::open(path, flags, Mode::empty());
    let file = File::from(file.map_err(|error| failed(error.into()))?);
    let metadata = file.metadata().map_err(failed)?;
    if !metadata.is_file() {
        return Err(error(path, "is not a regular file", None));
    }
    let mut bytes = vec![];
    file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(error(path, "is longer than 1 MiB", None));
    }
    Ok((bytes, metadata.mode()))
}

/// An error about a file, with its cause.
pub(super) fn invalid(
    path: &Path,
    reason: &'static str,
    source: impl Error + Send + Sync + 'static,
) -> TransportError {
    error(path, reason, Some(Arc::new(source)))
}

fn error(
    path: &Path,
    reason: &'static str,
    source: Option<Arc<dyn Error + Send + Sync>>,
) -> TransportError {
    TransportError::Certificate { path: path.to_owned(), reason, source }
}
