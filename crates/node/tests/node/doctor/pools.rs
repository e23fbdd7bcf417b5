//! Pools that nobody uses.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use cascade_node::doctor::{CheckState, ThisMachine};
use cascade_store::{LeftoverPool, Store, StoreConfig};
use tempfile::TempDir;

use super::fake_machine::FakeMachine;
use super::{GIB, assert_reported, diagnose, node, result_of};

#[test]
fn unused_pool_files_are_reported() {
    let directory = TempDir::new().unwrap();
    let path = Path::new("/dev/shm/cascade-7-ab-default.pool");
    for (has_blocks, found) in [(true, "with blocks"), (false, "of an interrupted start")] {
        let mut machine = FakeMachine::healthy();
        machine.left_pools =
            vec![LeftoverPool { path: path.to_owned(), bytes: 2 * GIB, has_blocks }];
        let report = diagnose(node(directory.path()), machine);
        assert_reported(&report, "left_pools", CheckState::Warning, found, "rm /dev/shm/");
    }
}

#[test]
fn the_pool_file_of_a_closed_store_is_reported() {
    let directory = TempDir::new().unwrap();
    let mut config = node(directory.path());
    config.pool_directory = Some(directory.path().to_owned());
    let user = fs::metadata(directory.path()).unwrap().uid();
    let path = directory.path().join(format!("cascade-{user}-abc-default.pool"));
    let (pool_file, keep_pool) = (Some(path), cascade_store::KeepPool::Always);
    let store = StoreConfig { dram_bytes: 4 << 20, pool_file, keep_pool, ..StoreConfig::default() };
    let store = Store::open(store).unwrap();
    let key = cascade_block::BlockKey::from_bytes([7; 32]);
    store.put(&[cascade_store::Put::new(key, &[7; 100])], cascade_store::CallOptions::default());
    let report = diagnose(config.clone(), ThisMachine::default());
    assert_eq!(result_of(&report, "left_pools").0, CheckState::Ok, "it is in use");
    store.close().unwrap();
    drop(store);
    let report = diagnose(config, ThisMachine::default());
    let (after, found, _) = result_of(&report, "left_pools");
    assert_eq!(after, CheckState::Warning);
    assert!(found.contains("abc-default.pool (6.2 MiB, with blocks)"), "{found}");
}
