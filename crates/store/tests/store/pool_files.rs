//! The files of a named pool: ownership checks, when they are discarded, and that damage to them
//! loses blocks but serves no wrong byte.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;

use cascade_store::{
    CallOptions, FilesConfig, KeepPool, Store, StoreConfig, StoreError, WarmStats,
};

use crate::blocks::{MIB, check, keys, put};
use crate::named_pool::{config, directory, ledger, pool, warm};
use crate::small_disk::SmallDisk;

const BLOCK: usize = 48 << 10;

/// Statistics and notes of a store whose files were changed by `damage` between two runs.
fn reopen_after(mut damage: impl FnMut(&Path)) -> (WarmStats, Vec<String>) {
    let directory = directory();
    let store = Store::open(config(directory.path(), 8)).unwrap();
    put(&store, &keys(0..100), BLOCK);
    store.close().unwrap();
    drop(store);
    damage(directory.path());
    let store = Store::open(config(directory.path(), 8)).unwrap();
    // Recovered blocks have the right bytes, and the store works.
    check(&store, &keys(0..100));
    put(&store, &keys(100..300), BLOCK);
    check(&store, &keys(0..300));
    (warm(&store), store.stats().notes)
}

fn overwrite(path: &Path, at: u64, bytes: &[u8]) {
    let file = std::fs::File::options().write(true).open(path).unwrap();
    file.write_all_at(bytes, at).unwrap();
}

fn cut(path: &Path, bytes: u64) {
    std::fs::File::options().write(true).open(path).unwrap().set_len(bytes).unwrap();
}

type Damage<'a> = &'a dyn Fn(&Path);

#[test]
fn mismatched_files_are_discarded_with_a_note() {
    let damages: [(&str, Damage<'_>); 8] = [
        ("a magic number of something else", &|at| overwrite(&ledger(at), 0, b"SOMETHIN")),
        ("another version", &|at| overwrite(&ledger(at), 8, &[77])),
        ("another boot", &|at| overwrite(&ledger(at), 64, &[7; 8])),
        ("another checksum", &|at| overwrite(&ledger(at), 80, &[7; 8])),
        ("a short ledger", &|at| cut(&ledger(at), 4096)),
        ("no ledger", &|at| std::fs::remove_file(ledger(at)).unwrap()),
        ("a short pool", &|at| cut(&pool(at), MIB)),
        ("another pool of that size", &|at| {
            std::fs::copy(pool(at), at.join("copy")).unwrap();
            let mode = std::fs::Permissions::from_mode(0o600);
            std::fs::set_permissions(at.join("copy"), mode).unwrap();
            std::fs::rename(at.join("copy"), pool(at)).unwrap();
        }),
    ];
    for (name, damage) in damages {
        let (stats, notes) = reopen_after(damage);
        assert_eq!((stats.recovered_blocks, stats.runs), (0, 1), "{name}");
        assert!(notes.iter().any(|note| note.contains("discarded")), "{name}: {notes:?}");
    }
    assert_eq!(reopen_after(|_| {}).0.recovered_blocks, 100, "undamaged files are reused");
}

#[test]
fn a_damaged_ledger_loses_blocks_and_serves_no_wrong_byte() {
    let mut random = 1_u64;
    for round in 0..20 {
        let (stats, _) = reopen_after(|directory| {
            for _ in 0..round * 10 {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                // Behind the header, among the first records.
                let at = 4096 + (random >> 33) % (110 * 192);
                overwrite(&ledger(directory), at, &random.to_le_bytes()[3..4]);
            }
        });
        let all = stats.recovered_blocks + stats.rejected_records;
        assert!((100..=110).contains(&all), "round {round}: {stats:?}");
    }
}

#[test]
fn a_pool_in_use_is_refused() {
    let directory = directory();
    let store = Store::open(config(directory.path(), 4)).unwrap();
    put(&store, &keys(0..10), BLOCK);
    let view = store.view(&keys(0..1), CallOptions::default());
    let refused = || match Store::open(config(directory.path(), 4)) {
        Err(StoreError::Memory(error)) => error.to_string(),
        other => panic!("{other:?}"),
    };
    assert!(refused().contains("in use by another store"), "{}", refused());
    store.close().unwrap();
    drop(store);
    assert!(refused().contains("in use"), "a view of it is still held");
    drop(view);
    assert_eq!(warm(&Store::open(config(directory.path(), 4)).unwrap()).recovered_blocks, 10);
}

#[test]
fn a_closed_store_removes_its_files_unless_configured_to_keep_them() {
    let directory = directory();
    let open = |keep_pool| {
        let store = Store::open(StoreConfig { keep_pool, ..config(directory.path(), 4) }).unwrap();
        put(&store, &keys(0..10), BLOCK);
        store
    };
    let are_there = || (pool(directory.path()).exists(), ledger(directory.path()).exists());
    let store = open(KeepPool::AfterCrash);
    assert_eq!(are_there(), (true, true));
    drop(store);
    assert_eq!(are_there(), (false, false));
    drop(open(KeepPool::Always));
    assert_eq!(are_there(), (true, true));
    let store = open(KeepPool::Never);
    assert_eq!(are_there(), (false, false));
    assert!(store.stats().warm.is_none());
}

#[test]
fn files_that_others_could_change_are_refused() {
    for (name, spoil) in [
        ("rights", (|path| set_mode(path, 0o644)) as fn(&Path)),
        ("link", |path| {
            let target = path.with_extension("target");
            std::fs::rename(path, &target).unwrap();
            std::os::unix::fs::symlink(&target, path).unwrap();
        }),
        ("name", |path| std::fs::hard_link(path, path.with_extension("twin")).unwrap()),
        ("directory", |path| {
            std::fs::remove_file(path).unwrap();
            std::fs::create_dir(path).unwrap();
        }),
    ] {
        for file in [pool, ledger] {
            let directory = directory();
            let store = Store::open(config(directory.path(), 4)).unwrap();
            put(&store, &keys(0..1), BLOCK);
            store.close().unwrap();
            drop(store);
            spoil(&file(directory.path()));
            let error = Store::open(config(directory.path(), 4)).unwrap_err();
            assert!(matches!(error, StoreError::Memory(_)), "{name}: {error}");
        }
    }
}

fn set_mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

#[test]
fn only_the_owner_can_access_the_files() {
    let directory = directory();
    let _store = Store::open(config(directory.path(), 4)).unwrap();
    for path in [pool(directory.path()), ledger(directory.path())] {
        assert_eq!(std::fs::metadata(path).unwrap().permissions().mode() & 0o777, 0o600);
    }
}

#[test]
fn a_pipeline_without_dram_has_no_pool_to_keep() {
    let directory = directory();
    let pipeline = "Files".to_owned();
    let files = Some(FilesConfig::new(directory.path().join("files")));
    let error = Store::open(StoreConfig { pipeline, files, ..config(directory.path(), 4) });
    assert!(matches!(error, Err(StoreError::Config { setting: "pool_file", .. })), "{error:?}");
}

#[test]
fn a_full_file_system_is_an_error_and_not_a_signal() {
    let Some(disk) = SmallDisk::mount(8) else { return };
    let error = Store::open(config(disk.path(), 16)).unwrap_err();
    let StoreError::Memory(cause) = &error else { panic!("{error}") };
    assert!(cause.to_string().contains("cannot reserve"), "{cause}");
    assert!(!pool(disk.path()).exists(), "a pool that cannot be reserved is removed");
    let store = Store::open(config(disk.path(), 4)).unwrap();
    put(&store, &keys(0..50), BLOCK);
    store.close().unwrap();
}

#[test]
fn an_erased_ledger_contains_no_key() {
    let directory = directory();
    let store = Store::open(config(directory.path(), 4)).unwrap();
    put(&store, &keys(0..20), 4096);
    let name = keys(7..8)[0];
    let is_named = || {
        let ledger = std::fs::read(ledger(directory.path())).unwrap();
        ledger.windows(32).any(|window| window == name.as_bytes())
    };
    assert!(is_named());
    let erased = store.erase(cascade_store::CallOptions::default()).unwrap();
    assert!(erased.is_complete(), "{erased:?}");
    assert!(!is_named());
}
