//! A store in the memory of a device, which is a fake: an access to its addresses ends the test.
//! Every byte that is read is a function of the key.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::error::Error as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use cascade_block::{BlockKey, DigestAlgorithm, DigestMode};
use cascade_memory::{DeviceError, FakeDevice};
use cascade_runtime::SystemClock;
use cascade_store::stages::StageRegistry;
use cascade_store::{
    CallOptions, EncryptionConfig, FilesConfig, GetOutcome, PrepareOutcome, Put, PutOutcome,
    Request, Store, StoreConfig, StoreError, ViewOutcome,
};

use crate::blocks::{self, MIB, bytes_of, key, keys, put};

const BLOCK: usize = 64 << 10;
const NOW: CallOptions = CallOptions { timeout: Some(Duration::from_secs(30)), writer: None };

fn open(config: StoreConfig, mib: u64) -> (Arc<FakeDevice>, Store) {
    let device = FakeDevice::new(usize::try_from(mib * MIB).unwrap()).unwrap();
    let registry = StageRegistry::default();
    let clock = Arc::new(SystemClock);
    let store = Store::open_on_device(config, device.clone(), &registry, clock).unwrap();
    (device, store)
}

fn hbm() -> StoreConfig {
    StoreConfig { pipeline: "Hbm".to_owned(), ..StoreConfig::default() }
}

fn over_files(directory: &Path) -> StoreConfig {
    let files = FilesConfig {
        capacity_bytes: 64 * MIB,
        segment_bytes: 4 * MIB,
        ..FilesConfig::new(directory)
    };
    StoreConfig { pipeline: "Hbm|Files".to_owned(), files: Some(files), ..hbm() }
}

fn stored(outcomes: &[PutOutcome]) -> bool {
    outcomes.iter().all(|outcome| matches!(outcome, PutOutcome::Stored))
}

/// The tier that each block was copied from; checks every byte.
fn tiers(store: &Store, keys: &[BlockKey]) -> Vec<Option<&'static str>> {
    let mut memory = vec![vec![0; BLOCK]; keys.len()];
    let mut buffers: Vec<&mut [u8]> = memory.iter_mut().map(Vec::as_mut_slice).collect();
    let outcomes = store.get(keys, &mut buffers, NOW);
    let check = |((key, outcome), bytes): ((&BlockKey, GetOutcome), &Vec<u8>)| match outcome {
        GetOutcome::Hit { bytes: length, tier } => {
            assert!(bytes[..length] == *bytes_of(key, length), "wrong bytes for {key} from {tier}");
            Some(tier)
        }
        GetOutcome::Miss => None,
        other => panic!("{key}: {other:?}"),
    };
    keys.iter().zip(outcomes).zip(&memory).map(check).collect()
}

#[test]
fn blocks_are_put_and_got_by_copies() {
    let (_device, store) = open(hbm(), 8);
    assert_eq!(store.tier_names(), ["hbm"]);
    assert_eq!(store.config().dram_bytes, 8 * MIB);
    let all = keys(0..16);
    assert!(stored(&put(&store, &all, BLOCK)));
    assert_eq!(tiers(&store, &all), [Some("hbm"); 16]);
    assert_eq!(store.lookup_prefix(&Request::new(&all)).tiers, ["hbm"; 16]);
    assert_eq!(store.locate(&all[..2]), [["hbm"], ["hbm"]]);
    assert_eq!(store.delete(&all[..8]), [true; 8]);
    assert_eq!(tiers(&store, &all)[..8], [None; 8]);
    assert_eq!(tiers(&store, &all)[8..], [Some("hbm"); 8]);
    let stats = store.stats();
    assert_eq!(stats.hits_by_tier[0].tier, "hbm");
    assert_eq!(stats.pool.capacity_bytes as u64, 8 * MIB);
}

#[test]
fn a_put_of_a_present_key_compares_the_bytes_of_the_device() {
    for digest in [DigestMode::Off, DigestMode::On(DigestAlgorithm::Blake3)] {
        let (_device, store) = open(StoreConfig { digest, ..hbm() }, 8);
        assert!(stored(&put(&store, &keys(0..2), BLOCK)));
        let again = put(&store, &keys(0..1), BLOCK);
        assert!(matches!(again[..], [PutOutcome::Present]), "{again:?}");
        let other = bytes_of(&key(1), BLOCK);
        let conflict = store.put(&[Put::new(key(0), &other)], NOW);
        assert!(matches!(conflict[..], [PutOutcome::Conflict]), "{conflict:?}");
        assert_eq!(tiers(&store, &keys(0..2)), [Some("hbm"); 2]);
    }
}

#[test]
fn blocks_are_evicted_to_files_and_loaded_back() {
    let directory = tempfile::tempdir().unwrap();
    let (device, store) = open(over_files(directory.path()), 4);
    let all = keys(0..256);
    for some in all.chunks(16) {
        assert!(stored(&put(&store, some, BLOCK)));
        store.flush(NOW).unwrap();
    }
    let read = tiers(&store, &all);
    assert!(read.iter().all(Option::is_some), "the files have room for all: {read:?}");
    assert!(read.contains(&Some("files")), "4 MiB of 16 fit the device");
    assert!(store.stats().counters.evicted_blocks > 0);
    store.delete(&all[..128]);
    assert_eq!(tiers(&store, &all[..128]), [None; 128]);
    let copied = device.bytes_copied_out();
    drop(store);
    assert!(copied >= 256 * BLOCK, "each block was copied to the files");
    let (_device, store) = open(over_files(directory.path()), 4);
    assert!(tiers(&store, &all[128..]).iter().all(|tier| *tier == Some("files")));
    assert_eq!(tiers(&store, &all[255..]), [Some("hbm")], "the last block was promoted");
}

#[test]
fn files_below_a_device_can_be_encrypted() {
    use std::os::unix::fs::PermissionsExt as _;
    let directory = tempfile::tempdir().unwrap();
    let key_file = directory.path().join("key");
    std::fs::write(&key_file, [7; 32]).unwrap();
    std::fs::set_permissions(&key_file, std::fs::Permissions::from_mode(0o600)).unwrap();
    let files = directory.path().join("files");
    let encryption = Some(EncryptionConfig::new(&key_file));
    let config = StoreConfig { encryption, ..over_files(&files) };
    let (_device, store) = open(config.clone(), 8);
    assert!(stored(&put(&store, &keys(0..8), BLOCK)));
    store.flush(NOW).unwrap();
    drop(store);
    let (_device, store) = open(config, 8);
    assert_eq!(tiers(&store, &keys(0..8)), [Some("files"); 8]);
}

#[test]
fn calls_that_give_access_in_place_are_refused_and_say_what_to_do() {
    let (_device, store) = open(hbm(), 8);
    let all = keys(0..2);
    assert!(stored(&put(&store, &all, BLOCK)));
    let mut each = Vec::new();
    store.view_each(&all, NOW, &mut |_, view| each.push(view));
    let views = [
        store.view(&all, NOW),
        store.acquire(&Request::new(&all), NOW),
        store.view_resident(&all, NOW),
        store.peek(&all, NOW),
        store.own().peek(&all, NOW),
        each,
    ];
    for views in views {
        assert_eq!(views.len(), 2);
        for view in views {
            let ViewOutcome::Failed(error) = view else { panic!("{view:?}") };
            assert!(matches!(error, StoreError::NotHostMemory { tier: "hbm", .. }), "{error}");
            assert!(error.to_string().contains("get and put"), "{error}");
        }
    }
    let error = store.reserve(BLOCK, NOW).expect_err("no slab to fill");
    assert!(matches!(error, StoreError::NotHostMemory { .. }), "{error}");
    let puts = [Put::new(key(9), &[])];
    let prepared =
        [store.prepare(&puts, &[BLOCK], usize::MAX, NOW), store.prepare_all(&puts, &[BLOCK], NOW)];
    for prepared in prepared {
        let [PrepareOutcome::Settled(PutOutcome::Failed(error))] = &prepared[..] else {
            panic!("{prepared:?}");
        };
        assert!(matches!(error, StoreError::NotHostMemory { .. }), "{error}");
    }
    assert_eq!(tiers(&store, &all), [Some("hbm"); 2], "and nothing else changed");
}

#[test]
fn a_device_that_fails_costs_its_blocks_and_nothing_else() {
    let (device, store) = open(hbm(), 8);
    assert!(stored(&put(&store, &keys(0..2), BLOCK)));
    device.fail_next(1);
    let outcomes = put(&store, &keys(2..4), BLOCK);
    let [PutOutcome::Failed(StoreError::Device(error)), PutOutcome::Stored] = &outcomes[..] else {
        panic!("{outcomes:?}");
    };
    assert!(matches!(error, DeviceError::Failed { .. }) && error.source().is_some(), "{error}");
    assert_eq!(tiers(&store, &keys(0..4)), [Some("hbm"), Some("hbm"), None, Some("hbm")]);
    device.fail_next(1);
    let mut buffer = vec![0; BLOCK];
    let got = store.get(&keys(0..1), &mut [&mut buffer], NOW);
    assert!(matches!(got[..], [GetOutcome::Failed(StoreError::Device(_))]), "{got:?}");
    assert_eq!(tiers(&store, &keys(0..1)), [Some("hbm")]);
    device.lose();
    let got = store.get(&keys(0..1), &mut [&mut buffer], NOW);
    let lost = matches!(got[..], [GetOutcome::Failed(StoreError::Device(DeviceError::Lost))]);
    assert!(lost, "{got:?}");
    assert_eq!(store.delete(&keys(0..4)), [true, true, false, true]);
    let reserved = || store.stats().pool.reserved_bytes;
    blocks::wait_until("all slabs are free", || reserved() == 0);
}

/// A copy that the device refuses is a fault of the block: its write ends after some tries, and the
/// circuit of the files, which work, stays closed.
#[test]
fn a_device_that_refuses_reads_fails_a_flush_and_not_the_files() {
    let directory = tempfile::tempdir().unwrap();
    let (device, store) = open(over_files(directory.path()), 8);
    device.refuse_reads(true);
    assert!(stored(&put(&store, &keys(0..2), BLOCK)));
    let error = store.flush(NOW).expect_err("nothing can be copied to the files");
    assert!(matches!(error, StoreError::Tier { tier: "files", .. }), "{error:?}");
    device.refuse_reads(false);
    assert_eq!(tiers(&store, &keys(0..2)), [Some("hbm"); 2]);
    assert!(stored(&put(&store, &keys(2..4), BLOCK)));
    store.flush(NOW).unwrap();
    let (_, health) = &store.stats().health[0];
    assert_eq!((health.opened_count, &health.last_error), (0, &None), "{health:?}");
    drop(store);
    let (_device, store) = open(over_files(directory.path()), 8);
    assert_eq!(tiers(&store, &keys(2..4)), [Some("files"); 2]);
}

/// A flip in the device's memory after the checksum was recorded: the block is never written to a
/// file with a valid checksum, and a scrub finds it.
#[test]
fn a_block_that_changed_in_the_device_is_not_stored_below() {
    let (device, store) = open(hbm(), 8);
    assert!(stored(&put(&store, &keys(0..8), BLOCK)));
    let first = store.scrub(NOW);
    assert_eq!((first.blocks, first.damaged), (8, 0));
    let block = bytes_of(&key(3), BLOCK);
    let at = device.contents().unwrap().windows(64).position(|bytes| *bytes == block[..64]);
    device.flip_bit(at.unwrap() + 1000).unwrap();
    assert_eq!(store.scrub(NOW).damaged, 1);
    let read = tiers(&store, &keys(0..8));
    assert_eq!(read[3], None, "a damaged block is a miss");
    assert_eq!(read.iter().flatten().count(), 7);
}

#[test]
fn an_erase_zeroes_the_memory_of_the_device() {
    let (device, store) = open(hbm(), 8);
    assert!(stored(&put(&store, &keys(0..32), BLOCK)));
    let report = store.erase(NOW).unwrap();
    assert!(report.left.is_empty(), "{report:?}");
    assert!(device.contents().unwrap().iter().all(|byte| *byte == 0));
    assert_eq!(tiers(&store, &keys(0..1)), [None]);
}

#[test]
fn settings_that_need_host_memory_are_refused() {
    let registry = StageRegistry::default();
    let open = |config: StoreConfig| {
        let device = FakeDevice::new(8 << 20).unwrap();
        Store::open_on_device(config, device, &registry, Arc::new(SystemClock))
            .expect_err("refused")
    };
    let directory = tempfile::tempdir().unwrap();
    let named = StoreConfig { pool_file: Some(directory.path().join("pool")), ..hbm() };
    let error = open(named);
    assert!(matches!(error, StoreError::Config { setting: "pool_file", .. }), "{error}");
    let error = open(StoreConfig { pipeline: "Hbm|Dram".to_owned(), ..StoreConfig::default() });
    assert!(error.to_string().contains("no Dram yet"), "{error}");
}
