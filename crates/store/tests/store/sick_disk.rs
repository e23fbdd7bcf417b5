//! File tiers on real file systems that freeze, fill up or disappear: the store keeps working.
//!
//! Needs root and loop devices; without them a test prints that it is skipped, and passes.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]
#![expect(clippy::print_stdout, reason = "prints what is skipped")]

use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

use cascade_runtime::{Deadline, SystemClock};
use cascade_store::{
    CallOptions, FilesConfig, HealthConfig, HealthState, IoEngine, PutOutcome, Store, StoreConfig,
    StoreError,
};

use crate::blocks::{check, dram, keys, put};
use crate::third_party::{Circuits, flush, wait_for};

const BLOCK: usize = 64 << 10;

fn run(program: &str, arguments: &[&str]) -> Result<(), String> {
    let output = Command::new(program).args(arguments).output();
    let output = output.map_err(|error| format!("{program}: {error}"))?;
    let message = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    if output.status.success() { Ok(()) } else { Err(format!("{program}: {message}")) }
}

/// A file system mounted below a temporary directory.
struct Disk {
    directory: tempfile::TempDir,
    /// Thaws the file system if this process is killed while it is frozen.
    thaws: Option<Child>,
}

impl Disk {
    fn mount(prepare: impl FnOnce(&Path, &Path) -> Result<(), String>) -> Option<Self> {
        // In memory: a slow disk of this machine must not look like the fault of a test.
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let (image, place) = (directory.path().join("image"), directory.path().join("mount"));
        std::fs::create_dir(&place).unwrap();
        match prepare(&image, &place) {
            Ok(()) => Some(Self { directory, thaws: None }),
            Err(why) => {
                println!("skipped: cannot mount a file system here: {why}");
                None
            }
        }
    }

    fn ext4() -> Option<Self> {
        Self::mount(|image, place| {
            let file = std::fs::File::create(image).map_err(|error| error.to_string())?;
            file.set_len(96 << 20).map_err(|error| error.to_string())?;
            let (image, place) = (image.to_str().unwrap(), place.to_str().unwrap());
            run("mkfs.ext4", &["-q", image])?;
            run("mount", &["-o", "loop", image, place])
        })
    }

    fn tmpfs(size: &str) -> Option<Self> {
        let options = format!("size={size},mode=700");
        Self::mount(|_, place| {
            run("mount", &["-t", "tmpfs", "-o", &options, "tmpfs", place.to_str().unwrap()])
        })
    }

    fn place(&self) -> PathBuf {
        self.directory.path().join("mount")
    }

    fn path(&self) -> String {
        self.place().to_str().unwrap().to_owned()
    }

    /// Makes every write to it hang uninterruptibly in the kernel.
    fn freeze(&mut self) -> Result<(), String> {
        let path = self.path();
        let later = Command::new("sh").args(["-c", "sleep 120; fsfreeze -u \"$0\"", &path]).spawn();
        self.thaws = Some(later.map_err(|error| error.to_string())?);
        run("fsfreeze", &["-f", &path])
    }

    fn thaw(&mut self) {
        if let Some(mut child) = self.thaws.take() {
            run("fsfreeze", &["-u", &self.path()]).unwrap();
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        self.thaw();
        // Lazily: a hung call may end after its store.
        drop(run("umount", &["-l", &self.path()]));
    }
}

fn store(directory: PathBuf, engine: IoEngine) -> Store {
    let files = FilesConfig {
        capacity_bytes: 64 << 20,
        segment_bytes: 4 << 20,
        engine,
        durable: true,
        ..FilesConfig::new(directory)
    };
    let health = HealthConfig {
        probe_interval: Duration::from_millis(50),
        probe_timeout: Duration::from_secs(1),
        ..HealthConfig::default()
    };
    let pipeline = "Dram|Files".to_owned();
    Store::open(StoreConfig { pipeline, files: Some(files), health, ..dram(16) }).unwrap()
}

/// Waits until the circuit for reads of the file tier is open.
#[expect(clippy::disallowed_methods, reason = "waits for another thread of the store")]
fn wait_until_unread(store: &Store) {
    let limit = Deadline::after(&SystemClock, Duration::from_secs(60));
    while store.stats().health[0].1.reads.state == HealthState::Healthy {
        assert!(!limit.has_passed(&SystemClock), "{:?}", store.stats().health);
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn a_frozen_file_system_blocks_no_call(engine: IoEngine) {
    let Some(mut disk) = Disk::ext4() else { return };
    let store = store(disk.place(), engine);
    put(&store, &keys(0..400), BLOCK);
    flush(&store);
    if let Err(why) = disk.freeze() {
        println!("skipped: cannot freeze a file system here: {why}");
        return;
    }
    println!("{engine:?}: writes to {} hang in the kernel", disk.path());
    put(&store, &keys(400..408), BLOCK);
    wait_for(&store, 0, Circuits::OneOpen);
    for at in 60..120 {
        let outcomes = put(&store, &keys(at * 8..at * 8 + 8), BLOCK);
        assert!(outcomes.iter().all(|o| matches!(o, PutOutcome::Stored)), "{outcomes:?}");
        assert_eq!(check(&store, &keys(at * 8..at * 8 + 8)), [Some("dram"); 8]);
    }
    assert!(store.flush(CallOptions::default()).is_err());
    // A frozen file system can still be read.
    assert_eq!(check(&store, &keys(0..400)).iter().flatten().count(), 400);
    let stats = store.stats();
    let health = &stats.health[0].1;
    assert!(health.stuck_calls > 0, "{health:?}");
    assert_eq!(health.reads.state, HealthState::Healthy, "{health:?}");
    assert_ne!(health.writes.state, HealthState::Healthy, "{health:?}");
    assert!(stats.counters.shed_puts > 0 && stats.counters.shed_gets == 0, "{stats:?}");
    disk.thaw();
    wait_for(&store, 0, Circuits::BothClosed);
    assert!(check(&store, &keys(0..400)).iter().all(Option::is_some), "every block is kept");
    drop(store.close());
}

#[test]
fn a_frozen_file_system_blocks_no_call_with_uring() {
    a_frozen_file_system_blocks_no_call(IoEngine::Auto);
}

#[test]
fn a_frozen_file_system_blocks_no_call_with_psync() {
    a_frozen_file_system_blocks_no_call(IoEngine::Psync);
}

#[test]
fn closing_a_store_on_a_frozen_file_system_returns() {
    let Some(mut disk) = Disk::ext4() else { return };
    let store = store(disk.place(), IoEngine::Auto);
    put(&store, &keys(0..100), BLOCK);
    flush(&store);
    if let Err(why) = disk.freeze() {
        println!("skipped: cannot freeze a file system here: {why}");
        return;
    }
    put(&store, &keys(100..200), BLOCK);
    let closed = store.close();
    assert!(matches!(closed, Err(StoreError::Tier { tier: "files", .. })), "{closed:?}");
    disk.thaw();
}

/// The circuit opened for reads, too, at the first failed write: 0 of 400 blocks were served, which
/// the file system could still read.
fn a_file_system_whose_writes_fail_is_still_read(engine: IoEngine) {
    let Some(disk) = Disk::ext4() else { return };
    let store = store(disk.place(), engine);
    put(&store, &keys(0..400), BLOCK);
    flush(&store);
    // What ext4 does when its device fails it: no write from now on succeeds.
    if let Err(why) = run("mount", &["-o", "remount,abort", &disk.path()]) {
        println!("skipped: cannot make a file system fail here: {why}");
        return;
    }
    wait_for(&store, 0, Circuits::OneOpen);
    for at in 60..120 {
        let outcomes = put(&store, &keys(at * 8..at * 8 + 8), BLOCK);
        assert!(outcomes.iter().all(|o| matches!(o, PutOutcome::Stored)), "{outcomes:?}");
    }
    let error = store.flush(CallOptions::default()).unwrap_err();
    assert!(matches!(error, StoreError::Tier { tier: "files", .. }), "{error}");
    for _ in 0..2 {
        let served = check(&store, &keys(0..400));
        assert_eq!(served.iter().flatten().count(), 400, "{engine:?}");
        let below = served.iter().filter(|tier| **tier == Some("files")).count();
        assert!(below > 100, "{below} of them were read from files");
    }
    let health = store.stats().health.remove(0).1;
    assert_eq!((health.reads.state, health.reads.opened_count), (HealthState::Healthy, 0));
    assert_ne!(health.writes.state, HealthState::Healthy, "{health:?}");
    let why = health.last_error.unwrap();
    println!("its circuit for writes is open because {why}");
    assert!(why.contains("os error"), "the kernel's error is included: {why}");
}

#[test]
fn a_file_system_whose_writes_fail_is_still_read_with_uring() {
    a_file_system_whose_writes_fail_is_still_read(IoEngine::Auto);
}

#[test]
fn a_file_system_whose_writes_fail_is_still_read_with_psync() {
    a_file_system_whose_writes_fail_is_still_read(IoEngine::Psync);
}

#[test]
fn a_full_file_system_opens_no_circuit() {
    let Some(disk) = Disk::tmpfs("24m") else { return };
    let store = store(disk.place(), IoEngine::Auto);
    // Four times what fits: the tier reclaims its oldest blocks, which frees space.
    for at in 0..192 {
        let outcomes = put(&store, &keys(at * 8..at * 8 + 8), BLOCK);
        assert!(outcomes.iter().all(|o| matches!(o, PutOutcome::Stored)), "{outcomes:?}");
    }
    drop(store.flush(CallOptions::default()));
    let stats = store.stats();
    assert_eq!(stats.health[0].1.opened_count, 0, "{:?}", stats.health);
    let found = check(&store, &keys(0..1536));
    let below = found.iter().filter(|tier| **tier == Some("files")).count();
    assert!(below > 50, "{below} blocks are read from a full disk");
    assert_eq!(store.stats().health[0].1.state, HealthState::Healthy);
    drop(store.close());
}

#[test]
fn probes_detect_an_unmounted_directory() {
    let Some(disk) = Disk::tmpfs("96m") else { return };
    let store = store(disk.place(), IoEngine::Auto);
    put(&store, &keys(0..100), BLOCK);
    flush(&store);
    run("umount", &["-l", &disk.path()]).unwrap();
    wait_for(&store, 0, Circuits::BothOpen);
    let why = store.stats().health.remove(0).1.last_error.unwrap();
    assert!(why.contains("mounted"), "the message names the cause: {why}");
    assert!(check(&store, &keys(90..100)).iter().all(|tier| *tier == Some("dram")));
}

#[test]
fn the_circuit_is_open_while_the_directory_is_moved_away() {
    let parent = tempfile::tempdir().unwrap();
    let (here, away) = (parent.path().join("here"), parent.path().join("away"));
    let store = store(here.clone(), IoEngine::Auto);
    put(&store, &keys(0..400), BLOCK);
    flush(&store);
    std::fs::rename(&here, &away).unwrap();
    wait_until_unread(&store);
    assert_eq!(check(&store, &keys(0..4)), [None; 4]);
    std::fs::rename(&away, &here).unwrap();
    wait_for(&store, 0, Circuits::BothClosed);
    assert_eq!(check(&store, &keys(0..4)), [Some("files"); 4]);
}
