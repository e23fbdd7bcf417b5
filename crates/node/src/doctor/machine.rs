//! Access of the checks to the host: all that they read and try.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use std::{fmt, io};

use cascade_disk::io::{TransferEngine as _, UringEngine};
use cascade_memory::{HugePages, MemoryError, PageReport, Pool, PoolConfig};
use cascade_runtime::{Clock as _, SystemClock};
use cascade_store::LeftoverPool;
use cascade_transport::verbs::Verbs;
use rustix::fs::{Access, OFlags, access, statfs};

use super::gpu_answer::GpuAnswer;
use super::running::{self, RunningNode};
use super::{DiskSpace, FileSystem, driver_process};
use crate::socket_place::{self, SocketPathState, SocketPlaceError};

/// Size of the pool for a trial: two huge pages.
const TRIAL_BYTES: usize = 4 << 20;

/// Limit of the files that are counted for the size of a directory.
const FILES_MAX: usize = 1 << 20;

/// The result of creating a probe file in a directory.
#[derive(Debug)]
pub struct ProbeFile {
    /// Why the file could not be opened with `O_DIRECT`.
    pub direct_refusal: Option<io::Error>,
}

/// The operations of the checks on a host. Tests implement it with one fault.
pub trait Machine: Send + Sync + fmt::Debug {
    /// Reads a small text file in `/proc` or `/sys`.
    fn read(&self, path: &str) -> io::Result<String>;

    /// Lists the names in a directory in `/proc`, `/sys` or `/dev`.
    fn list(&self, path: &str) -> io::Result<Vec<String>>;

    /// The space of the file system of an existing directory.
    fn space(&self, directory: &Path) -> io::Result<DiskSpace>;

    /// Disk usage of the entries of an existing directory whose names begin with `prefix`, with
    /// all files below them.
    fn used_bytes(&self, directory: &Path, prefix: &str) -> io::Result<u64>;

    /// Creates a file in an existing directory, opens it with `O_DIRECT`, and removes it.
    fn try_file(&self, directory: &Path) -> io::Result<ProbeFile>;

    /// Succeeds if this user may create files in an existing directory.
    fn may_write(&self, directory: &Path) -> io::Result<()>;

    /// What is at the path of a socket.
    fn socket(&self, path: &Path) -> Result<SocketPathState, SocketPlaceError>;

    /// The node that serves a socket, if one does.
    fn running_node(&self, socket: &Path) -> Option<RunningNode>;

    /// Listens on an address, and closes the port again.
    fn try_listen(&self, address: SocketAddr) -> io::Result<()>;

    /// Maps a small pool with huge pages.
    fn try_huge_pages(&self) -> Result<PageReport, MemoryError>;

    /// Creates an `io_uring` instance. Returns whether it could register memory.
    fn try_ring(&self) -> io::Result<bool>;

    /// Loads the library of RDMA devices. An error says what is missing, and at its end what to do.
    fn try_verbs(&self) -> Result<(), String>;

    /// Pool files in a directory that belong to this user and to no running process.
    fn left_pools(&self, directory: &Path) -> io::Result<Vec<LeftoverPool>>;

    /// Seconds since 1970 by the host's clock.
    fn unix_seconds(&self) -> u64;

    /// What the CUDA driver says about GPUs, within a time limit.
    fn gpus(&self, time_limit: Duration) -> GpuAnswer;
}

/// The host that this process runs on.
#[derive(Debug, Clone, Default)]
pub struct ThisMachine {
    /// A command that loads the CUDA driver and prints a [`GpuAnswer`] as JSON: program and
    /// arguments. Without one the driver is not asked.
    pub gpu_command: Vec<OsString>,
}

impl Machine for ThisMachine {
    fn read(&self, path: &str) -> io::Result<String> {
        fs::read_to_string(path)
    }

    fn list(&self, path: &str) -> io::Result<Vec<String>> {
        let entries = fs::read_dir(path)?;
        entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
    }

    fn space(&self, directory: &Path) -> io::Result<DiskSpace> {
        let stat = statfs(directory)?;
        let block_bytes = u64::try_from(stat.f_bsize).unwrap_or_default();
        Ok(DiskSpace {
            // Magic numbers have 32 bits, whatever the width of the field.
            file_system: FileSystem(stat.f_type.cast_unsigned() & 0xffff_ffff),
            free_bytes: stat.f_bavail.saturating_mul(block_bytes),
            total_bytes: stat.f_blocks.saturating_mul(block_bytes),
        })
    }

    fn used_bytes(&self, directory: &Path, prefix: &str) -> io::Result<u64> {
        used_bytes(directory, prefix)
    }

    fn try_file(&self, directory: &Path) -> io::Result<ProbeFile> {
        // Several checks probe the same directory in parallel, and on a shared file system so may
        // several hosts with equal process IDs.
        static PROBES: AtomicU64 = AtomicU64::new(0);
        let (path, created) = loop {
            let number = PROBES.fetch_add(1, Ordering::Relaxed);
            let name = format!(".cascade-doctor-{}-{number}", std::process::id());
            let path = directory.join(name);
            match OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                created => break (path, created?),
            }
        };
        drop(created);
        let direct = open_direct(&path);
        fs::remove_file(&path)?;
        Ok(ProbeFile { direct_refusal: direct.err() })
    }

    fn may_write(&self, directory: &Path) -> io::Result<()> {
        access(directory, Access::WRITE_OK | Access::EXEC_OK)?;
        Ok(())
    }

    fn socket(&self, path: &Path) -> Result<SocketPathState, SocketPlaceError> {
        socket_place::examine(path, rustix::process::geteuid().as_raw())
    }

    fn running_node(&self, socket: &Path) -> Option<RunningNode> {
        running::at(socket)
    }

    fn try_listen(&self, address: SocketAddr) -> io::Result<()> {
        TcpListener::bind(address).map(drop)
    }

    fn try_huge_pages(&self) -> Result<PageReport, MemoryError> {
        let pool = trial_pool()?;
        let report = pool.region().host().expect("`Pool::new` maps host memory").pages();
        let refusal =
            report.refusal.as_ref().map(|error| io::Error::new(error.kind(), error.to_string()));
        Ok(PageReport { source: report.source, huge_bytes: report.huge_bytes, refusal })
    }

    fn try_ring(&self) -> io::Result<bool> {
        let pool = trial_pool().map_err(io::Error::other)?;
        let engine = UringEngine::new(4, Some(&pool), Arc::new(SystemClock))?;
        Ok(engine.is_registered())
    }

    fn try_verbs(&self) -> Result<(), String> {
        Verbs::open().map(drop).map_err(|error| error.to_string())
    }

    fn left_pools(&self, directory: &Path) -> io::Result<Vec<LeftoverPool>> {
        cascade_store::leftover_pools(directory)
    }

    fn unix_seconds(&self) -> u64 {
        SystemClock.unix_ms() / 1000
    }

    fn gpus(&self, time_limit: Duration) -> GpuAnswer {
        driver_process::ask(&self.gpu_command, time_limit)
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

/// Disk usage of files. Links are not followed. Stops counting at [`FILES_MAX`] files.
fn used_bytes(directory: &Path, prefix: &str) -> io::Result<u64> {
    let mut pending: Vec<PathBuf> = vec![directory.to_owned()];
    let (mut bytes, mut files) = (0, 0);
    while let Some(current) = pending.pop() {
        for entry in fs::read_dir(&current)? {
            let entry = entry?;
            let has_prefix = entry.file_name().to_string_lossy().starts_with(prefix);
            if current == directory && !has_prefix {
                continue;
            }
            let metadata = match entry.metadata() {
                // A running node may remove a file during the count.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                metadata => metadata?,
            };
            files += 1;
            if files > FILES_MAX {
                return Ok(bytes);
            }
            if metadata.is_dir() {
                pending.push(entry.path());
            } else {
                // The kernel counts in units of 512 bytes, whatever the file system's block size.
                bytes += metadata.blocks() * 512;
            }
        }
    }
    Ok(bytes)
}
