//! Measures the throughput of segments beside fio on the same device, and the time of a restart.
//!
//! `cargo bench -p cascade-disk --bench segments -- [DIRECTORY]` uses up to 2 GiB there for about a
//! minute and removes its files. Reads bypass the page cache, so they are cold.
#![expect(clippy::print_stdout, clippy::unwrap_used, reason = "a program that prints a table")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use cascade_block::BlockKey;
use cascade_disk::conformance::{key, meta, open, open_with};
use cascade_disk::io::FileIo;
use cascade_disk::{Address, FilesConfig, IoEngine, Load, LoadOutcome, Recovery, SegmentFiles};
use cascade_memory::{HugePages, Pool, PoolConfig};
use cascade_runtime::{Clock, Deadline, SystemClock};
use cascade_tier::tier::Tier as _;

const TOTAL_BYTES: usize = 512 << 20;
const BATCH_BYTES: usize = 64 << 20;
const ROUNDS: usize = 5;

fn deadline() -> Deadline {
    Deadline::after(&SystemClock, Duration::from_secs(300))
}

fn seconds<T>(work: impl FnOnce() -> T) -> (T, f64) {
    let start = SystemClock.monotonic();
    let result = work();
    (result, SystemClock.monotonic().saturating_sub(start).as_secs_f64())
}

fn open_tier(
    directory: &Path,
    engine: IoEngine,
    depth: u32,
    pool: &Pool,
) -> (Arc<SegmentFiles>, Recovery) {
    let config = FilesConfig {
        capacity_bytes: 8 << 30,
        engine,
        queue_depth: depth,
        ..FilesConfig::new(directory)
    };
    open(config, Arc::new(SystemClock), pool, deadline()).unwrap()
}

fn gib_per_second(bytes: usize, seconds: f64) -> f64 {
    let mib = u32::try_from(bytes >> 20).expect("a few GiB");
    f64::from(mib) / 1024.0 / seconds
}

fn write_all(files: &SegmentFiles, pool: &Pool, length: usize) -> f64 {
    let count = TOTAL_BYTES / length;
    let mut slab = pool.allocate(length).unwrap();
    slab.host_mut().unwrap().fill(0x5a);
    let slab = slab.seal();
    let numbers: Vec<u64> = (0..count as u64).collect();
    let ((), taken) = seconds(|| {
        for chunk in numbers.chunks((BATCH_BYTES / length).max(1)) {
            let batch = chunk.iter().map(|&number| (meta(number, length), slab.clone())).collect();
            for result in files.append(batch, deadline()) {
                result.unwrap();
            }
        }
        files.sync(deadline()).unwrap();
    });
    gib_per_second(count * length, taken)
}

fn read_all(
    files: &SegmentFiles,
    pool: &Pool,
    length: usize,
    blocks: &[(BlockKey, Address)],
) -> f64 {
    let ((), taken) = seconds(|| {
        for chunk in blocks.chunks((BATCH_BYTES / length).max(1)) {
            let request = |&(key, address): &(BlockKey, Address)| Load {
                address,
                key,
                slab: pool.allocate(length).unwrap(),
            };
            for outcome in files.load(chunk.iter().map(request).collect(), deadline()) {
                assert!(matches!(outcome, LoadOutcome::Hit(_)), "{outcome:?}");
            }
        }
    });
    gib_per_second(blocks.len() * length, taken)
}

/// The throughput of fio in GiB/s, or `None` if fio is not installed.
fn fio(directory: &Path, operation: &str, length: usize, depth: u32) -> Option<f64> {
    let output = Command::new("fio")
        .args(["--name=limit", "--ioengine=io_uring", "--direct=1", "--output-format=json"])
        .arg(format!("--filename={}", directory.join("fio.data").display()))
        .arg(format!("--rw={operation}"))
        .arg(format!("--bs={length}"))
        .arg(format!("--iodepth={depth}"))
        .arg(format!("--size={TOTAL_BYTES}"))
        .arg("--end_fsync=1")
        .output()
        .ok()?;
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).ok()?;
    let side = if operation.contains("write") { "write" } else { "read" };
    report["jobs"][0][side]["bw_bytes"].as_f64().map(|bytes| bytes / f64::from(1 << 30))
}

fn print(name: &str, ours: f64, limit: Option<f64>) {
    let limit = limit.map_or_else(
        || "fio not installed".to_owned(),
        |limit| format!("fio {limit:.2} GiB/s, share {:.2}", ours / limit),
    );
    println!("{name:44} {ours:6.2} GiB/s   {limit}");
}

/// CPU time of this process in seconds.
fn cpu_seconds() -> f64 {
    let spent = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::try_from(spent).unwrap().as_secs_f64()
}

/// The effect of registering the pool with the kernel: throughput and CPU time per block.
fn registered(root: &Path) {
    for length in [16 << 10, 128 << 10, 1 << 20] {
        let pool = &touched_pool(length);
        let directory = root.join("tier");
        let (files, _) = open_tier(&directory, IoEngine::Uring, 8, pool);
        write_all(files.as_ref(), pool, length);
        drop(files);
        let mut rows = [Vec::new(), Vec::new()];
        for _ in 0..ROUNDS {
            for (given, row) in [None, Some(pool)].into_iter().zip(&mut rows) {
                let clock = Arc::new(SystemClock);
                let io = FileIo::system(IoEngine::Uring, true, 8, given, clock).unwrap();
                let config = FilesConfig {
                    capacity_bytes: 8 << 30,
                    queue_depth: 8,
                    ..FilesConfig::new(&directory)
                };
                let (files, recovery) = open_with(config, io, deadline()).unwrap();
                assert!(given.is_some() || !files.disk_stats().is_registered);
                let live = recovery.live.iter().map(|(meta, at)| (meta.key, *at)).collect();
                let blocks = shuffled(live);
                let before = cpu_seconds();
                let rate = read_all(files.as_ref(), pool, length, &blocks);
                let blocks_read = u32::try_from(blocks.len()).unwrap();
                let cpu = (cpu_seconds() - before) / f64::from(blocks_read);
                row.push((cpu * 1e6, rate, files.disk_stats().is_registered));
            }
        }
        for mut row in rows {
            row.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
            let (cpu, rate, is_registered) = row[ROUNDS / 2];
            println!(
                "read {} KiB, registered {is_registered:5}: {cpu:7.1} us of CPU per block, \
                 {rate:.2} GiB/s",
                length >> 10
            );
        }
        std::fs::remove_dir_all(&directory).unwrap();
    }
}

fn shuffled(mut blocks: Vec<(BlockKey, Address)>) -> Vec<(BlockKey, Address)> {
    blocks.sort_unstable();
    blocks
}

/// Medians of alternating rounds, because both sides vary over time.
fn alternate(
    mut limit: impl FnMut() -> Option<f64>,
    mut ours: impl FnMut() -> f64,
) -> (f64, Option<f64>) {
    let (mut limits, mut figures) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        limits.extend(limit());
        figures.push(ours());
    }
    limits.sort_unstable_by(f64::total_cmp);
    figures.sort_unstable_by(f64::total_cmp);
    (figures[ROUNDS / 2], limits.get(ROUNDS / 2).copied())
}

/// A pool whose slabs of this length were touched, so that page faults are not measured.
fn touched_pool(length: usize) -> Pool {
    let config =
        PoolConfig { capacity_bytes: 256 << 20, huge_pages: HugePages::Auto, populate: true };
    let pool = Pool::new(&config).unwrap();
    let slabs: Vec<_> = std::iter::from_fn(|| pool.allocate(length)).collect();
    for mut slab in slabs {
        slab.host_mut().unwrap().fill(1);
    }
    pool
}

fn throughput(root: &Path) {
    for length in [128 << 10, 1 << 20, 2 << 20] {
        let pool = &touched_pool(length);
        let directory = root.join("tier");
        let (written, limit) = alternate(
            || fio(root, "write", length, 8),
            || {
                if directory.exists() {
                    std::fs::remove_dir_all(&directory).unwrap();
                }
                let (files, _) = open_tier(&directory, IoEngine::Uring, 8, pool);
                let figure = write_all(files.as_ref(), pool, length);
                files.checkpoint(deadline()).unwrap();
                figure
            },
        );
        print(&format!("append {} KiB, depth 8", length >> 10), written, limit);
        for (engine, depth) in [
            (IoEngine::Uring, 1),
            (IoEngine::Uring, 8),
            (IoEngine::Uring, 32),
            (IoEngine::Psync, 8),
        ] {
            let (files, recovery) = open_tier(&directory, engine, depth, pool);
            let live = recovery.live.iter().map(|(meta, at)| (meta.key, *at)).collect();
            let blocks = shuffled(live);
            let (read, limit) = alternate(
                || fio(root, "randread", length, depth),
                || read_all(files.as_ref(), pool, length, &blocks),
            );
            let name = format!("read {} KiB cold, depth {depth}, {engine:?}", length >> 10);
            print(&name, read, limit);
        }
        std::fs::remove_dir_all(&directory).unwrap();
        if root.join("fio.data").exists() {
            std::fs::remove_file(root.join("fio.data")).unwrap();
        }
    }
}

/// Measures opening with this many blocks: by scan, from footers, from a checkpoint.
fn restart(root: &Path, pool: &Pool, count: u64) {
    let directory = root.join("restart");
    let (files, _) = open_tier(&directory, IoEngine::Auto, 8, pool);
    let slab = pool.allocate(64).unwrap().seal();
    let numbers: Vec<u64> = (0..count).collect();
    for chunk in numbers.chunks(4096) {
        let batch = chunk.iter().map(|&number| (meta(number, 64), slab.clone())).collect();
        for result in files.append(batch, deadline()) {
            result.unwrap();
        }
    }
    drop(files);
    for name in ["scan and footers", "footers", "checkpoint"] {
        let ((files, recovery), taken) = seconds(|| open_tier(&directory, IoEngine::Auto, 8, pool));
        assert_eq!(recovery.live.len() as u64, count);
        let first = recovery.live[0];
        assert_eq!(first.0.key, key(0));
        println!("restart with {count} blocks, {name:20} {taken:6.2} s");
        if name == "footers" {
            files.checkpoint(deadline()).unwrap();
        }
    }
    std::fs::remove_dir_all(&directory).unwrap();
}

fn main() {
    let given = std::env::args().skip(1).find(|argument| !argument.starts_with('-'));
    let parent = given.map_or_else(std::env::temp_dir, PathBuf::from);
    let root = tempfile::tempdir_in(parent).unwrap();
    registered(root.path());
    throughput(root.path());
    let pool = touched_pool(4096);
    for count in [100_000, 400_000] {
        restart(root.path(), &pool, count);
    }
}
