//! Directories and file systems of the machine that runs the tests.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::Command;

use cascade_node::doctor::{CheckState, Machine as _, ThisMachine};
use tempfile::TempDir;

use super::fake_machine::FakeMachine;
use super::{assert_reported, diagnose, node, result_of};

/// Two concurrent checks used the same file name: 4 of 32 starts reported `direct_io` with "File
/// exists" on a healthy machine.
#[test]
fn concurrent_checks_can_probe_one_directory() {
    let directory = TempDir::new().unwrap();
    std::thread::scope(|scope| {
        for _ in 0..16 {
            scope.spawn(|| {
                for _ in 0..50 {
                    ThisMachine::default().try_file(directory.path()).unwrap();
                }
            });
        }
    });
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0, "probe files are removed");
}

#[test]
fn a_file_in_place_of_the_directory_is_reported() {
    let directory = TempDir::new().unwrap();
    fs::write(directory.path().join("files"), "").unwrap();
    let report = diagnose(node(directory.path()), FakeMachine::healthy());
    assert_reported(&report, "files_directory", CheckState::Failed, "is not a directory", "files");
}

#[test]
fn a_directory_in_the_old_layout_is_reported() {
    let directory = TempDir::new().unwrap();
    let blocks = directory.path().join("files/blocks");
    fs::create_dir_all(blocks.join("2a")).unwrap();
    fs::set_permissions(directory.path().join("files"), Permissions::from_mode(0o700)).unwrap();
    fs::write(blocks.join("2a/2af8.block"), "").unwrap();
    let report = diagnose(node(directory.path()), FakeMachine::healthy());
    let remedy = format!("remove {}", blocks.display());
    let found = "a file for each block";
    assert_reported(&report, "files_directory", CheckState::Failed, found, &remedy);
    fs::remove_file(blocks.join("2a/2af8.block")).unwrap();
    assert!(diagnose(node(directory.path()), FakeMachine::healthy()).is_ready);
}

/// A tmpfs of 8 MiB, unmounted on drop. None if mounting is not permitted.
struct TinyFileSystem(TempDir);

impl TinyFileSystem {
    fn mount(options: &str) -> Option<Self> {
        let directory = TempDir::new().unwrap();
        let options = format!("size=8M,{options}");
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &options, "tmpfs"]).arg(directory.path());
        mount.output().is_ok_and(|out| out.status.success()).then_some(Self(directory))
    }

    fn path(&self) -> PathBuf {
        self.0.path().to_owned()
    }
}

impl Drop for TinyFileSystem {
    fn drop(&mut self) {
        let unmounted = Command::new("umount").arg("-l").arg(self.0.path()).status();
        assert!(unmounted.is_ok_and(|status| status.success()), "cannot unmount the test's tmpfs");
    }
}

#[test]
fn a_file_system_that_is_too_small_is_reported() {
    let Some(tiny) = TinyFileSystem::mount("mode=0700") else {
        eprintln!("skipped: this user may not mount a tmpfs");
        return;
    };
    let mut config = node(&tiny.path());
    config.pool_directory = Some(tiny.path());
    let report = diagnose(config, ThisMachine::default());
    let (state, found, remedy) = result_of(&report, "files_space");
    assert_eq!(state, CheckState::Failed);
    assert!(found.contains("8.0 MiB free") && remedy.contains("8MiB"), "{found}: {remedy}");
    let (state, found, remedy) = result_of(&report, "shared_memory");
    assert_eq!(state, CheckState::Failed);
    assert!(found.contains("8.0 MiB free") && remedy.contains("size=8369M"), "{found}: {remedy}");
    assert_eq!(result_of(&report, "file_system").0, CheckState::Warning);
    assert_eq!(result_of(&report, "files_directory").0, CheckState::Ok);
    assert_eq!(fs::read_dir(tiny.path()).unwrap().count(), 0, "probes are removed");
}

/// The size in the remedy was that of the pool alone, and the node then started without a pool that
/// outlives it.
#[test]
fn the_remedy_for_a_small_file_system_suffices() {
    let Some(tiny) = TinyFileSystem::mount("mode=0700") else {
        eprintln!("skipped: this user may not mount a tmpfs");
        return;
    };
    let run = TempDir::new().unwrap();
    let mut config = node(run.path());
    config.pool_directory = Some(tiny.path());
    config.store.dram_bytes = 16 << 20;
    let report = diagnose(config.clone(), ThisMachine::default());
    let (state, found, remedy) = result_of(&report, "shared_memory");
    assert_eq!(state, CheckState::Failed);
    let command = remedy.split(';').next().unwrap().replace("sudo ", "");
    let mut words = command.split_whitespace();
    let applied = Command::new(words.next().unwrap()).args(words).status().unwrap();
    assert!(applied.success(), "{found}: {remedy}");
    assert_eq!(
        result_of(&diagnose(config, ThisMachine::default()), "shared_memory").0,
        CheckState::Ok
    );
    let pool = tiny.path().join("cascade.pool");
    let store = cascade_store::Store::open(cascade_store::StoreConfig {
        dram_bytes: 16 << 20,
        pool_file: Some(pool.clone()),
        ..cascade_store::StoreConfig::default()
    });
    let store = store.unwrap();
    let ledger = fs::metadata(format!("{}.ledger", pool.display())).unwrap().len();
    assert_eq!(ledger, cascade_store::ledger_bytes(16 << 20));
    store.close().unwrap();
}

#[test]
fn a_read_only_file_system_is_reported() {
    let Some(tiny) = TinyFileSystem::mount("ro") else {
        eprintln!("skipped: this user may not mount a tmpfs");
        return;
    };
    let mut config = node(&tiny.path());
    config.pool_directory = Some(tiny.path());
    config.socket = tiny.path().join("run/cascade.sock");
    let report = diagnose(config, ThisMachine::default());
    for id in ["files_directory", "shared_memory", "socket"] {
        let (state, found, remedy) = result_of(&report, id);
        assert_eq!(state, CheckState::Failed, "{id}: {found}");
        assert!(found.contains("Read-only file system"), "{id}: {found}");
        assert!(!remedy.is_empty(), "{id}");
    }
}

#[test]
fn a_missing_pool_directory_is_reported() {
    let directory = TempDir::new().unwrap();
    let mut config = node(directory.path());
    config.pool_directory = Some(directory.path().join("shm"));
    let (state, _, remedy) = result_of(&diagnose(config, ThisMachine::default()), "shared_memory");
    assert!(state == CheckState::Failed && remedy.contains("mount -t tmpfs"), "{remedy}");
}

#[test]
fn a_directory_that_all_may_write_is_reported() {
    let directory = TempDir::new().unwrap();
    let config = node(directory.path());
    let files = directory.path().join("files");
    fs::create_dir(&files).unwrap();
    let state = |mode| {
        fs::set_permissions(&files, Permissions::from_mode(mode)).unwrap();
        let report = diagnose(config.clone(), ThisMachine::default());
        let (state, found, remedy) = result_of(&report, "files_directory");
        assert!(state == CheckState::Ok || remedy.contains("chmod 700"), "{found}: {remedy}");
        state
    };
    assert_eq!(state(0o1777), CheckState::Failed);
    assert_eq!(state(0o750), CheckState::Warning);
    assert_eq!(state(0o700), CheckState::Ok);
}

/// The existing files of a tier are part of its capacity, so their space counts as available.
#[test]
fn the_existing_files_of_a_tier_count_as_room() {
    let directory = TempDir::new().unwrap();
    fs::create_dir_all(directory.path().join("files/sub")).unwrap();
    fs::write(directory.path().join("files/sub/segment"), vec![7; 1 << 20]).unwrap();
    let used = ThisMachine::default().used_bytes(&directory.path().join("files"), "").unwrap();
    assert!((1 << 20..2 << 20).contains(&used), "{used}");
    assert_eq!(ThisMachine::default().used_bytes(directory.path(), "other").unwrap(), 0);
}
