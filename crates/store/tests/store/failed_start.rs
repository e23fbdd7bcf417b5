//! Files in the pool's directory after a start that failed or was killed.
//!
//! A start with `dram` larger than the machine left a ledger of 2 GB in `/dev/shm`, and one whose
//! file tier was in use left its whole pool. A process killed before its first block left both,
//! until a node with the same socket was started.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

use cascade_store::{FilesConfig, KeepPool, Store, StoreConfig, StoreError, leftover_pools};

use crate::blocks::{MIB, StopOnDrop, check, keys, put};
use crate::child_test;
use crate::named_pool::{config, directory, warm};
use crate::small_disk::SmallDisk;

const BLOCK: usize = 48 << 10;
const POOL: &str = "CASCADE_LEFT_POOL";
const BLOCKS: &str = "CASCADE_LEFT_BLOCKS";

#[expect(clippy::disallowed_methods, reason = "the child is configured by variables")]
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// The path that a node of this user gives its pool.
fn node_pool(directory: &Path, place: &str) -> PathBuf {
    let user = rustix::process::geteuid().as_raw();
    directory.join(format!("cascade-{user}-{place}-default.pool"))
}

fn named(path: PathBuf) -> StoreConfig {
    StoreConfig { pool_file: Some(path), ..config(Path::new("/"), 8) }
}

fn names(directory: &Path) -> Vec<String> {
    let names = std::fs::read_dir(directory).unwrap();
    let mut names: Vec<_> =
        names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort_unstable();
    names
}

/// The child: opens a store, puts the configured number of blocks, and waits to be killed.
#[test]
#[ignore = "runs as the child of the tests below"]
fn open_and_wait() {
    let Some(path) = variable(POOL) else { return };
    let store = Store::open(named(path.into())).unwrap();
    let blocks = variable(BLOCKS).map_or(0, |text| text.parse().unwrap());
    put(&store, &keys(0..blocks), BLOCK);
    writeln!(std::io::stdout(), "\nopened").unwrap();
    // Ends with the parent, if that does not kill it.
    drop(std::io::stdin().lock().lines().next());
}

fn start(path: &Path, blocks: u64) -> Child {
    let mut child = child_test::command(module_path!(), "open_and_wait")
        .env(POOL, path)
        .env(BLOCKS, blocks.to_string())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.map_while(Result::ok).any(|line| line == "opened"), "it came up");
    child
}

fn kill(mut child: Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn a_start_that_fails_after_creating_its_pool_leaves_no_files() {
    let (shared, files) = (directory(), tempfile::tempdir().unwrap());
    let with_files = |keep_pool| {
        let (config, files) = (config(shared.path(), 8), FilesConfig::new(files.path()));
        let files = Some(FilesConfig { capacity_bytes: 16 * MIB, segment_bytes: MIB, ..files });
        StoreConfig { pipeline: "Dram|Files".to_owned(), files, keep_pool, ..config }
    };
    let first = StoreConfig { pool_file: None, ..with_files(KeepPool::Always) };
    let first = Store::open(first).unwrap();
    for keep_pool in [KeepPool::Always, KeepPool::AfterCrash] {
        let error = Store::open(with_files(keep_pool)).unwrap_err();
        assert!(matches!(error, StoreError::Tier { .. }), "{error:?}");
        assert_eq!(names(shared.path()), [""; 0]);
    }
    first.close().unwrap();
    drop(first);

    // Files of an earlier run are kept if a start fails.
    let store = Store::open(with_files(KeepPool::Always)).unwrap();
    put(&store, &keys(0..20), BLOCK);
    store.close().unwrap();
    drop(store);
    let other = Store::open(StoreConfig { pool_file: None, ..with_files(KeepPool::Always) });
    Store::open(with_files(KeepPool::AfterCrash)).unwrap_err();
    assert_eq!(names(shared.path()), ["pool", "pool.ledger"]);
    drop(other);
    let store = Store::open(with_files(KeepPool::AfterCrash)).unwrap();
    assert_eq!(warm(&store).recovered_blocks, 20);
    assert!(check(&store, &keys(0..20)).iter().all(|tier| *tier == Some("dram")));
}

#[test]
fn a_pool_that_cannot_fit_is_refused_before_anything_is_reserved() {
    let directory = directory();
    let error = Store::open(config(directory.path(), 1 << 30)).unwrap_err();
    let StoreError::Memory(cause) = &error else { panic!("{error}") };
    assert!(cause.to_string().contains("does not fit"), "{cause}");
    assert_eq!(names(directory.path()), [""; 0]);

    // The ledger fits this disk, the pool does not. An earlier pool of another size is not removed
    // for one that cannot be created.
    let Some(disk) = SmallDisk::mount(16) else { return };
    let store = Store::open(config(disk.path(), 8)).unwrap();
    put(&store, &keys(0..20), BLOCK);
    store.close().unwrap();
    drop(store);
    let error = Store::open(config(disk.path(), 64)).unwrap_err();
    let StoreError::Memory(cause) = &error else { panic!("{error}") };
    assert!(cause.to_string().contains("cannot reserve"), "{cause}");
    assert_eq!(warm(&Store::open(config(disk.path(), 8)).unwrap()).recovered_blocks, 20);
}

#[test]
fn the_next_start_removes_empty_pools_of_killed_starts() {
    let directory = directory();
    let pool = |place: &str| node_pool(directory.path(), place);
    // Killed before its first block, killed with blocks, still alive without one.
    let killed = [start(&pool("empty"), 0), start(&pool("used"), 30)];
    let alive = start(&pool("alive"), 0);
    killed.into_iter().for_each(kill);
    // Killed before the ledger had a header; of another user; of another program.
    for (name, mode) in [("young", 0o600), ("shared", 0o666)] {
        let ledger = pool(name).with_extension("pool.ledger");
        std::fs::write(&ledger, [0; 100]).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(mode);
        std::fs::set_permissions(&ledger, mode).unwrap();
    }
    std::fs::write(directory.path().join("else.ledger"), b"not ours").unwrap();

    let found = leftover_pools(directory.path()).unwrap();
    let found: Vec<_> = found.iter().map(|it| (it.path.clone(), it.has_blocks)).collect();
    let expected = [(pool("empty"), false), (pool("used"), true), (pool("young"), false)];
    assert_eq!(found, expected);

    let store = Store::open(named(pool("mine"))).unwrap();
    let notes = store.stats().notes;
    assert_eq!(notes.iter().filter(|note| note.contains("removed")).count(), 2, "{notes:?}");
    let user = rustix::process::geteuid().as_raw();
    let mut left: Vec<String> = ["alive", "mine", "used"]
        .iter()
        .flat_map(|place| {
            ["", ".ledger"].map(|end| format!("cascade-{user}-{place}-default.pool{end}"))
        })
        .collect();
    left.extend([format!("cascade-{user}-shared-default.pool.ledger"), "else.ledger".to_owned()]);
    left.sort_unstable();
    assert_eq!(names(directory.path()), left);
    kill(alive);
    drop(store);

    let store = Store::open(named(pool("used"))).unwrap();
    assert_eq!(warm(&store).recovered_blocks, 30);
    check(&store, &keys(0..30));
    assert!(
        leftover_pools(directory.path()).unwrap().is_empty(),
        "the pool of the killed process is removed, too"
    );
}

#[test]
fn a_start_waits_while_another_process_lists_its_files() {
    let directory = directory();
    let path = node_pool(directory.path(), "watched");
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                leftover_pools(directory.path()).unwrap();
            }
        });
        let _stopper = StopOnDrop(&stop);
        for round in 0..50 {
            let store = Store::open(named(path.clone()));
            let store = store.unwrap_or_else(|error| panic!("round {round}: {error:?}"));
            put(&store, &keys(0..2), BLOCK);
        }
    });
}
