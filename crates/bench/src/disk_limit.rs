//! The throughput of the disk without a store: the best of both I/O engines over several depths.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::fs::FallocateFlags;

use crate::{gib_per_second, timed};

const MIB: usize = 1 << 20;
const HUGE_PAGE: usize = 2 * MIB;
/// Queue depths that are tried.
const DEPTHS: [usize; 7] = [1, 2, 4, 8, 16, 32, 64];
/// Bytes of a trial, at least two blocks.
const TRIAL_BYTES: usize = 64 * MIB;

/// What is done to the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    Read,
    /// Blocks of a file that is there are overwritten.
    Write,
    /// The blocks of a new file with preallocated space are written for the first time, as those of
    /// a new segment. Some disks take twice as long for space that was never written.
    WriteNew,
}

impl Direction {
    fn is_write(self) -> bool {
        self != Self::Read
    }
}

/// What makes the requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Tool {
    /// `fio` with this engine.
    Fio(&'static str),
    /// Threads of this process.
    Threads,
}

/// The fastest way to use the disk.
#[derive(Debug, Clone, Copy)]
pub(super) struct Best {
    tool: Tool,
    depth: usize,
}

impl Best {
    pub(super) fn describe(self) -> String {
        let (first, last) = (DEPTHS[0], DEPTHS[DEPTHS.len() - 1]);
        let tool = match self.tool {
            Tool::Fio(engine) => format!("fio, {engine}, O_DIRECT, depth {}", self.depth),
            Tool::Threads => format!(
                "pread and pwrite with O_DIRECT, huge pages, {} threads (fio is not installed)",
                self.depth
            ),
        };
        format!("{tool}: the best of all engines at depths {first} to {last}")
    }
}

/// Memory of one request, in huge pages if the kernel has them, as the store's pool is: a request
/// whose small pages are scattered is divided.
struct Buffer {
    memory: Vec<u8>,
    start: usize,
    bytes: usize,
}

impl Buffer {
    fn new(bytes: usize) -> Self {
        let mut memory = Vec::with_capacity(bytes.next_multiple_of(HUGE_PAGE) + HUGE_PAGE);
        // Without them the requests are those of a program with ordinary memory.
        let _has_huge_pages = cascade_memory::prefer_huge_pages(&memory);
        memory.resize(memory.capacity(), 7_u8);
        let start = memory.as_ptr().align_offset(HUGE_PAGE);
        Self { memory, start, bytes }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.bytes]
    }
}

/// A file to measure the disk with.
pub(super) struct DiskLimit {
    path: PathBuf,
    bytes: usize,
    block: usize,
    tools: &'static [Tool],
}

impl DiskLimit {
    pub(super) fn new(path: PathBuf, bytes: usize, block: usize) -> io::Result<Self> {
        let has_fio =
            Command::new("fio").arg("--version").output().is_ok_and(|o| o.status.success());
        let tools: &[Tool] = if has_fio {
            &[Tool::Fio("io_uring"), Tool::Fio("libaio"), Tool::Fio("psync")]
        } else {
            &[Tool::Threads]
        };
        let file = File::create(&path)?;
        let piece = vec![7; MIB];
        for at in 0..bytes / MIB {
            file.write_all_at(&piece, (at * MIB) as u64)?;
        }
        file.sync_all()?;
        Ok(Self { path, bytes, block, tools })
    }

    /// Finds the fastest engine and depth. A single fixed depth is no limit: on some disks a store
    /// with another one is faster.
    pub(super) fn calibrate(&self, direction: Direction) -> io::Result<Best> {
        let bytes = TRIAL_BYTES.max(2 * self.block).min(self.bytes);
        let mut best: Option<(f64, Best)> = None;
        for &tool in self.tools {
            for depth in DEPTHS {
                let rate = self.rate(direction, Best { tool, depth }, bytes)?;
                if best.is_none_or(|(most, _)| rate > most) {
                    best = Some((rate, Best { tool, depth }));
                }
            }
        }
        Ok(best.expect("there is a tool and a depth").1)
    }

    /// GiB/s of the whole file.
    pub(super) fn measure(&self, direction: Direction, best: Best) -> io::Result<f64> {
        self.rate(direction, best, self.bytes)
    }

    fn rate(&self, direction: Direction, best: Best, bytes: usize) -> io::Result<f64> {
        let path = if direction == Direction::WriteNew {
            self.new_file(bytes)?
        } else {
            self.path.clone()
        };
        match best.tool {
            Tool::Fio(engine) => self.fio((direction, &path), engine, best.depth, bytes),
            Tool::Threads => self.plain((direction, &path), best.depth, bytes),
        }
    }

    /// A new file with preallocated space, as a new segment has it.
    fn new_file(&self, bytes: usize) -> io::Result<PathBuf> {
        let path = self.path.with_extension("new");
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let file = File::create(&path)?;
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, bytes as u64)?;
        file.sync_all()?;
        Ok(path)
    }

    fn fio(
        &self,
        (direction, path): (Direction, &Path),
        engine: &str,
        depth: usize,
        bytes: usize,
    ) -> io::Result<f64> {
        let direction = if direction.is_write() { "write" } else { "read" };
        // Synchronous requests are one at a time per thread. With more threads than blocks, all
        // threads would transfer the same block.
        let threads = depth.min((bytes / self.block).max(1));
        let (depth, jobs) = if engine == "psync" { (1, threads) } else { (depth, 1) };
        let output = Command::new("fio")
            .args(["--name=limit", "--direct=1", "--output-format=json", "--group_reporting"])
            .args(["--thread", &format!("--ioengine={engine}")])
            .arg(format!("--filename={}", path.display()))
            .arg(format!("--rw={direction}"))
            .arg(format!("--bs={}", self.block))
            .arg(format!("--size={}", (bytes / jobs / self.block).max(1) * self.block))
            .arg(format!("--offset_increment={}", bytes / jobs / self.block * self.block))
            .arg(format!("--numjobs={jobs}"))
            .arg(format!("--iodepth={depth}"))
            .output()?;
        let report: serde_json::Value = serde_json::from_slice(&output.stdout)?;
        let rate = report["jobs"][0][direction]["bw_bytes"].as_f64().filter(|rate| *rate > 0.0);
        let rate = rate.ok_or_else(|| {
            let errors = String::from_utf8_lossy(&output.stderr);
            io::Error::other(format!("fio reported no throughput: {}", errors.trim()))
        })?;
        Ok(rate / crate::GIB)
    }

    /// One thread per request in flight, each with an aligned buffer.
    fn plain(
        &self,
        (direction, path): (Direction, &Path),
        depth: usize,
        bytes: usize,
    ) -> io::Result<f64> {
        let is_write = direction.is_write();
        let direct = rustix::fs::OFlags::DIRECT.bits().cast_signed();
        let mut options = OpenOptions::new();
        let file = options.read(true).write(is_write).custom_flags(direct).open(path)?;
        let (next, blocks) = (AtomicUsize::new(0), bytes / self.block);
        // Made before the time is taken.
        let mut buffers: Vec<_> = (0..depth.min(blocks)).map(|_| Buffer::new(self.block)).collect();
        let mut outcome = Ok(());
        let took = timed(|| {
            outcome = std::thread::scope(|scope| {
                let (file, next) = (&file, &next);
                let threads: Vec<_> = buffers
                    .iter_mut()
                    .map(|buffer| {
                        let bytes = buffer.bytes_mut();
                        scope.spawn(move || self.plain_thread(file, is_write, bytes, blocks, next))
                    })
                    .collect();
                threads.into_iter().try_for_each(|thread| {
                    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
                })
            });
        });
        outcome.map(|()| gib_per_second(blocks * self.block, took))
    }

    fn plain_thread(
        &self,
        file: &File,
        is_write: bool,
        buffer: &mut [u8],
        blocks: usize,
        next: &AtomicUsize,
    ) -> io::Result<()> {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            if at >= blocks {
                return Ok(());
            }
            let offset = (at * self.block) as u64;
            if is_write {
                file.write_all_at(buffer, offset)?;
            } else {
                file.read_exact_at(buffer, offset)?;
            }
        }
    }
}
