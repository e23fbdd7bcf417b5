//! Files that others put into the directory of a tier lead it to no other file.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::thread;

use cascade_block::{Manifest, Namespace, TenantSecret};
use cascade_disk::conformance::{append, assert_hits, deadline, open, pool};
use cascade_disk::io::{FileOperations as _, SystemFiles};
use cascade_disk::{DiskError, FilesConfig};
use cascade_runtime::SystemClock;
use cascade_tier::tier::Tier as _;

const LENGTH: usize = 40_000;
const SECRET: &str = "the secret of somebody else";

/// Plants something that leads to a file at a path.
type Plant = fn(&Path, &Path);

/// What is planted under a name, all of it leading to the file of somebody else.
const PLANTED: [(&str, Plant); 3] = [
    ("symbolic link", |target, path| symlink(target, path).unwrap()),
    ("hard links", |target, path| fs::hard_link(target, path).unwrap()),
    ("named pipe", |_, path| {
        assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
    }),
];

/// A directory of a tier, and a file of somebody else beside it.
struct World {
    top: tempfile::TempDir,
    directory: PathBuf,
    target: PathBuf,
}

impl World {
    fn new() -> Self {
        let top = tempfile::tempdir().unwrap();
        let (directory, target) = (top.path().join("files"), top.path().join("target"));
        fs::create_dir(&directory).unwrap();
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o700)).unwrap();
        fs::write(&target, SECRET).unwrap();
        Self { top, directory, target }
    }

    fn config(&self) -> FilesConfig {
        let new = FilesConfig::new(&self.directory);
        FilesConfig { capacity_bytes: 24 << 20, segment_bytes: 1 << 20, ..new }
    }

    /// Why the tier cannot be opened, with all causes.
    fn refusal(&self) -> String {
        let error = open(self.config(), Arc::new(SystemClock), &pool(), deadline()).unwrap_err();
        assert!(matches!(error, DiskError::Io { .. }), "{error:?}");
        cascade_block::with_causes(&error)
    }

    fn assert_untouched(&self) {
        assert_eq!(fs::read_to_string(&self.target).unwrap(), SECRET);
    }
}

#[test]
fn what_is_planted_as_a_segment_is_named_and_not_touched() {
    for (reason, plant) in PLANTED {
        let world = World::new();
        let planted = world.directory.join("w0-00000003.segment");
        plant(&world.target, &planted);
        let pool = pool();
        let (files, _) = open(world.config(), Arc::new(SystemClock), &pool, deadline()).unwrap();
        let problems = files.stats().notes;
        let named = problems
            .iter()
            .any(|problem| problem.contains("w0-00000003.segment") && problem.contains(reason));
        assert!(named, "{reason}: {problems:?}");
        let blocks: Vec<_> = (0..200).map(|number| (number, LENGTH)).collect();
        let stored = append(&files, &pool, &blocks);
        assert_hits(&files, &pool, &stored);
        files.checkpoint(deadline()).unwrap();
        world.assert_untouched();
        let erased = files.erase(deadline()).unwrap();
        let left = &erased.left;
        assert!(left.iter().any(|it| it.what.contains("w0-00000003")), "{reason}: {erased:?}");
        world.assert_untouched();
    }
}

#[test]
fn a_planted_lock_is_refused() {
    for (reason, plant) in PLANTED {
        let world = World::new();
        plant(&world.target, &world.directory.join("w0.lock"));
        let refusal = world.refusal();
        assert!(refusal.contains("w0.lock") && refusal.contains(reason), "{reason}: {refusal}");
        world.assert_untouched();
    }
}

#[test]
fn a_planted_checkpoint_is_replaced_without_its_target() {
    for (reason, plant) in PLANTED {
        let world = World::new();
        let pool = pool();
        for name in ["w0.checkpoint", "w0.checkpoint.tmp", "w0.probe"] {
            plant(&world.target, &world.directory.join(name));
        }
        for _ in 0..2 {
            let (files, _) =
                open(world.config(), Arc::new(SystemClock), &pool, deadline()).unwrap();
            append(&files, &pool, &[(1, LENGTH)]);
            files.checkpoint(deadline()).unwrap();
            files.probe(deadline()).unwrap();
            world.assert_untouched();
        }
        let checkpoint = world.directory.join("w0.checkpoint");
        assert!(fs::symlink_metadata(checkpoint).unwrap().is_file(), "{reason}");
    }
}

#[test]
fn a_link_to_another_directory_of_manifests_is_named_and_not_followed() {
    let (world, pool) = (World::new(), pool());
    let elsewhere = world.top.path().join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    fs::write(elsewhere.join("settings.json"), SECRET).unwrap();
    symlink(&elsewhere, world.directory.join("manifests")).unwrap();
    let (files, _) = open(world.config(), Arc::new(SystemClock), &pool, deadline()).unwrap();
    let notes = files.stats().notes;
    let is_named = |text: &str| text.contains("manifests") && text.contains("symbolic link");
    assert!(notes.iter().any(|note| is_named(note)), "{notes:?}");
    let namespace = Namespace::new(Manifest::new().with("a", "b"), &TenantSecret::new("s"));
    let refused = files.register(&namespace, deadline()).unwrap_err();
    assert!(is_named(&cascade_block::with_causes(&refused)), "{refused:?}");
    let left = files.erase(deadline()).unwrap().left;
    assert!(left.iter().any(|it| is_named(&format!("{it:?}"))), "{left:?}");
    assert_eq!(fs::read_dir(&elsewhere).unwrap().count(), 1, "nothing is created");
    let content = fs::read_to_string(elsewhere.join("settings.json")).unwrap();
    assert_eq!(content, SECRET);
}

#[test]
fn a_directory_that_all_may_write_is_refused() {
    for mode in [0o777, 0o1777, 0o702] {
        let world = World::new();
        fs::set_permissions(&world.directory, fs::Permissions::from_mode(mode)).unwrap();
        let refusal = world.refusal();
        assert!(refusal.contains("all users may write to it"), "{mode:o}: {refusal}");
        assert_eq!(fs::read_dir(&world.directory).unwrap().count(), 0, "nothing is created");
    }
    // A group may write, which the tier reports.
    let world = World::new();
    fs::set_permissions(&world.directory, fs::Permissions::from_mode(0o770)).unwrap();
    let pool = pool();
    let (files, _) = open(world.config(), Arc::new(SystemClock), &pool, deadline()).unwrap();
    let notes = files.stats().notes;
    assert!(notes.iter().any(|note| note.contains("open to other users")), "{notes:?}");
}

#[test]
#[expect(clippy::print_stderr, reason = "says what was left out")]
fn a_directory_and_files_of_another_user_are_refused() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can give files to another user");
        return;
    }
    let world = World::new();
    std::os::unix::fs::chown(&world.directory, Some(65_534), None).unwrap();
    let refusal = world.refusal();
    assert!(refusal.contains("belongs to user 65534"), "{refusal}");
    assert_eq!(fs::read_dir(&world.directory).unwrap().count(), 0, "nothing is left");

    let world = World::new();
    let planted = world.directory.join("w0.lock");
    fs::write(&planted, SECRET).unwrap();
    std::os::unix::fs::chown(&planted, Some(65_534), None).unwrap();
    let refusal = world.refusal();
    assert!(refusal.contains("w0.lock") && refusal.contains("user 65534"), "{refusal}");
    assert_eq!(fs::read_to_string(&planted).unwrap(), SECRET);
}

/// Regression: all writers of a file used one temporary name, and a third of the calls failed where
/// several clients registered the same namespace at once.
#[test]
fn a_file_that_many_replace_at_once_has_the_content_of_one() {
    let world = World::new();
    let path = world.directory.join("file");
    let contents: Vec<_> = (0_u8..8).map(|byte| vec![byte; 100_000]).collect();
    for _ in 0..10 {
        thread::scope(|scope| {
            for content in &contents {
                scope.spawn(|| SystemFiles.replace(&path, content).unwrap());
            }
        });
        assert!(contents.contains(&fs::read(&path).unwrap()));
        assert_eq!(fs::read_dir(&world.directory).unwrap().count(), 1, "nothing else is left");
    }
}

#[test]
fn many_may_register_a_namespace_at_once() {
    let world = World::new();
    let pool = pool();
    let (files, _) = open(world.config(), Arc::new(SystemClock), &pool, deadline()).unwrap();
    for round in 0..20 {
        let manifest = Manifest::new().with("round", round.to_string());
        let namespace = Namespace::new(manifest, &TenantSecret::new("s"));
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| files.register(&namespace, deadline()).unwrap());
            }
        });
    }
}
