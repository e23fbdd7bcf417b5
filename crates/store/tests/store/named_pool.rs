//! A named pool in a temporary directory, for tests of warm restarts.

use std::path::{Path, PathBuf};

use cascade_store::{KeepPool, Store, StoreConfig, WarmStats};

use crate::blocks::dram;

/// A temporary directory, in `/dev/shm` if possible.
pub(crate) fn directory() -> tempfile::TempDir {
    let shared = Path::new("/dev/shm");
    let made = tempfile::Builder::new().prefix("cascade-test").tempdir_in(shared);
    made.or_else(|_| tempfile::tempdir()).expect("a directory for the test")
}

pub(crate) fn pool(directory: &Path) -> PathBuf {
    directory.join("pool")
}

pub(crate) fn ledger(directory: &Path) -> PathBuf {
    directory.join("pool.ledger")
}

pub(crate) fn config(directory: &Path, mib: u64) -> StoreConfig {
    let keep_pool = KeepPool::Always;
    StoreConfig { pool_file: Some(pool(directory)), keep_pool, ..dram(mib) }
}

pub(crate) fn warm(store: &Store) -> WarmStats {
    store.stats().warm.expect("its pool is named")
}
