//! The machine as the checks see it: what they read and try, and nothing else.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cascade_block::{Clock as _, SystemClock};
use cascade_disk::io::{Engine as _, UringEngine};
use cascade_memory::{HugePages, MemoryError, PageReport, Pool, PoolConfig};
use cascade_store::LeftPool;
use rustix::fs::{Access, OFlags, access, statfs};

use super::{FileSystem, Space};
use crate::socket_place::{self, Occupant, SocketPlaceError};

/// Two huge pages: what a trial of them takes.
const TRIAL_BYTES: usize = 4 << 20;

/// Files that are looked at for the space that a directory takes.
const FILES_MAX: usize = 1 << 20;

/// Whether a file can be made in a directory, and read and written past the page cache.
#[derive(Debug)]
pub struct ProbeFile {
    /// Why the file could not be opened with `O_DIRECT`.
    pub direct_refusal: Option<io::Error>,
}

/// What checks ask a machine. A test's machine lies about one thing.
pub trait Machine: Send + Sync + fmt::Debug {
    /// A small text file of `/proc` or `/sys`.
    fn read(&self, path: &str) -> io::Result<String>;

    /// Names in a directory of `/proc`, `/sys` or `/dev`.
    fn list(&self, path: &str) -> io::Result<Vec<String>>;

    /// Room in a directory that exists.
    fn space(&self, directory: &Path) -> io::Result<Space>;

    /// Bytes that files take in a directory that exists and below it, of those entries in it
    /// whose names begin with `prefix`.
    fn used_bytes(&self, directory: &Path, prefix: &str) -> io::Result<u64>;

    /// Makes a file in a directory that exists, and removes it.
    fn try_file(&self, directory: &Path) -> io::Result<ProbeFile>;

    /// Whether this user could make something in a directory that exists.
    fn may_write(&self, directory: &Path) -> io::Result<()>;

    /// What is at the path of a socket.
    fn socket(&self, path: &Path) -> Result<Occupant, SocketPlaceError>;

    /// Listens at an address for a moment.
    fn try_listen(&self, address: SocketAddr) -> io::Result<()>;

    /// Maps a little memory and asks for huge pages.
    fn try_huge_pages(&self) -> Result<PageReport, MemoryError>;

    /// Makes a ring of `io_uring`; whether memory could be registered with it.
    fn try_ring(&self) -> io::Result<bool>;

    /// Pools of this user's nodes in a directory that no running process has.
    fn left_pools(&self, directory: &Path) -> io::Result<Vec<LeftPool>>;

    /// Seconds since 1970 by the machine's clock.
    fn unix_seconds(&self) -> u64;
}

/// The machine that this process runs on.
#[derive(Debug, Clone, Copy, Default)]
pub struct ThisMachine;

impl Machine for ThisMachine {
    fn read(&self, path: &str) -> io::Result<String> {
        fs::read_to_string(path)
    }

    fn list(&self, path: &str) -> io::Result<Vec<String>> {
        let entries = fs::read_dir(path)?;
        entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
    }

    fn space(&self, directory: &Path) -> io::Result<Space> {
        let facts = statfs(directory)?;
        let block_bytes = u64::try_from(facts.f_bsize).unwrap_or_default();
        Ok(Space {
            file_system: FileSystem(facts.f_type.cast_unsigned() & 0xffff_ffff),
            free_bytes: facts.f_bavail.saturating_mul(block_bytes),
            total_bytes: facts.f_blocks.saturating_mul(block_bytes),
        })
    }

    fn used_bytes(&self, directory: &Path, prefix: &str) -> io::Result<u64> {
        used_bytes(directory, prefix)
    }

    fn try_file(&self, directory: &Path) -> io::Result<ProbeFile> {
        // Several checks try one directory at the same time, and so may several machines.
        static TRIED: AtomicU64 = AtomicU64::new(0);
        let (path, made) = loop {
            let number = TRIED.fetch_add(1, Ordering::Relaxed);
            let name = format!(".cascade-doctor-{}-{number}", std::process::id());
            let path = directory.join(name);
            match OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                made => break (path, made?),
            }
        };
        drop(made);
        let direct = open_direct(&path);
        fs::remove_file(&path)?;
        Ok(ProbeFile { direct_refusal: direct.err() })
    }

    fn may_write(&self, directory: &Path) -> io::Result<()> {
        access(directory, Access::WRITE_OK | Access::EXEC_OK)?;
        Ok(())
    }

    fn socket(&self, path: &Path) -> Result<Occupant, SocketPlaceError> {
        socket_place::examine(path, rustix::process::geteuid().as_raw())
    }

    fn try_listen(&self, address: SocketAddr) -> io::Result<()> {
        TcpListener::bind(address).map(drop)
    }

    fn try_huge_pages(&self) -> Result<PageReport, MemoryError> {
        let pool = trial_pool()?;
        let report = pool.region().pages();
        let refusal =
            report.refusal.as_ref().map(|error| io::Error::new(error.kind(), error.to_string()));
        Ok(PageReport { source: report.source, huge_bytes: report.huge_bytes, refusal })
    }

    fn try_ring(&self) -> io::Result<bool> {
        let pool = trial_pool().map_err(io::Error::other)?;
        let engine = UringEngine::new(4, Some(&pool), Arc::new(SystemClock))?;
        Ok(engine.is_registered())
    }

    fn left_pools(&self, directory: &Path) -> io::Result<Vec<LeftPool>> {
        cascade_store::left_pools(directory)
    }

    fn unix_seconds(&self) -> u64 {
        SystemClock.unix_ms() / 1000
    }
}

fn trial_pool() -> Result<Pool, MemoryError> {
    let huge_pages = HugePages::Auto;
    Pool::new(&PoolConfig { capacity_bytes: TRIAL_BYTES, huge_pages, populate: true })
}

fn open_direct(path: &Path) -> io::Result<File> {
    let direct = OFlags::DIRECT.bits().cast_signed();
    OpenOptions::new().read(true).write(true).custom_flags(direct).open(path)
}

/// What files take; links are not followed.
fn used_bytes(directory: &Path, prefix: &str) -> io::Result<u64> {
    let mut pending: Vec<PathBuf> = vec![directory.to_owned()];
    let (mut bytes, mut files) = (0, 0);
    while let Some(current) = pending.pop() {
        for entry in fs::read_dir(&current)? {
            let entry = entry?;
            let is_meant = entry.file_name().to_string_lossy().starts_with(prefix);
            if current == directory && !is_meant {
                continue;
            }
            let facts = match entry.metadata() {
                // A node that serves removes files while they are counted.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                facts => facts?,
            };
            files += 1;
            if files > FILES_MAX {
                return Ok(bytes);
            }
            if facts.is_dir() {
                pending.push(entry.path());
            } else {
                bytes += facts.blocks() * 512;
            }
        }
    }
    Ok(bytes)
}
