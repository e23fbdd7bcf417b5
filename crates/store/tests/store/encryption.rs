//! Encryption at rest: no plaintext below DRAM, and a wrong key or a swapped record is a miss.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use cascade_block::{DigestAlgorithm, DigestMode};
use cascade_runtime::{Clock, SystemClock};
use cascade_store::stages::{EncryptedStage, StageContext, open_files};
use cascade_store::{
    CallOptions, EncryptionConfig, FilesConfig, IoEngine, Put, PutOutcome, Store, StoreConfig,
};
use cascade_tier::conformance::tier as conformance;

use crate::blocks::{MIB, bytes_of, check, dram, key, keys, put, wait_until};
use crate::third_party::{self, MapStage};

const BLOCK: usize = 64 << 10;

fn key_file(directory: &Path, name: &str, keys: &[u8]) -> PathBuf {
    let lines: Vec<_> = keys.iter().map(|key| format!("{key:02x}").repeat(32)).collect();
    let path = directory.join(name);
    fs::write(&path, lines.join("\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    path
}

fn config(directory: &Path, keys: &[u8]) -> StoreConfig {
    let files = FilesConfig {
        capacity_bytes: 64 * MIB,
        segment_bytes: 4 * MIB,
        ..FilesConfig::new(directory.join("tier"))
    };
    let encryption = EncryptionConfig::new(key_file(directory, &format!("key{keys:?}"), keys));
    StoreConfig {
        pipeline: "Dram|Files".to_owned(),
        files: Some(files),
        encryption: Some(encryption),
        ..dram(4)
    }
}

fn files_below(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { files_below(&path) } else { vec![path] }).collect()
}

fn is_on_disk(directory: &Path, bytes: &[u8]) -> bool {
    let holds = |path: &PathBuf| {
        let content = fs::read(path).unwrap();
        content.windows(bytes.len()).any(|window| window == bytes)
    };
    files_below(&directory.join("tier")).iter().any(holds)
}

fn fill(config: &StoreConfig) {
    let store = Store::open(config.clone()).unwrap();
    let outcomes = put(&store, &keys(0..100), BLOCK);
    assert!(outcomes.iter().all(|outcome| matches!(outcome, PutOutcome::Stored)));
    store.close().unwrap();
}

fn hits(store: &Store, range: std::ops::Range<u64>) -> usize {
    check(store, &keys(range)).iter().filter(|tier| tier.is_some()).count()
}

fn notes(store: &Store) -> String {
    store.stats().stages[0].1.notes.join("; ")
}

#[test]
fn files_have_no_plaintext_and_every_block_survives_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let config = config(directory.path(), &[1]);
    fill(&config);
    let plain = StoreConfig {
        encryption: None,
        files: Some(FilesConfig::new(directory.path().join("plain/tier"))),
        ..config.clone()
    };
    fill(&plain);
    let mark = &bytes_of(&key(42), BLOCK)[1000..1032];
    assert!(is_on_disk(&directory.path().join("plain"), mark), "the search finds plaintext");
    assert!(!is_on_disk(directory.path(), mark));
    let store = Store::open(config).unwrap();
    assert_eq!(hits(&store, 0..100), 100);
    assert_eq!(store.stats().counters.damaged_blocks, 0);
}

#[test]
fn reads_with_a_wrong_key_are_misses_with_one_note() {
    let directory = tempfile::tempdir().unwrap();
    let right = config(directory.path(), &[1]);
    fill(&right);
    let wrong = config(directory.path(), &[2]);
    let store = Store::open(wrong.clone()).unwrap();
    assert_eq!(hits(&store, 0..100), 0);
    assert_eq!(
        store.stats().counters.damaged_blocks,
        0,
        "one note instead of a hundred damaged blocks"
    );
    assert!(notes(&store).contains("does not hold"), "{}", notes(&store));
    let encryption = store.stats().stages[0].1.encryption.clone().unwrap();
    assert!(encryption.starts_with("AES-256-GCM, writes with key "), "{encryption}");
    assert!(!notes(&store).contains("AES"), "working encryption is no problem");
    drop(store);
    // Nothing was deleted under the wrong key.
    let store = Store::open(right).unwrap();
    assert_eq!(hits(&store, 0..100), 100);
}

#[test]
fn a_damaged_encryption_marker_is_restored_and_never_disables_encryption() {
    let directory = tempfile::tempdir().unwrap();
    let config = config(directory.path(), &[1]);
    fill(&config);
    let manifests = files_below(&directory.path().join("tier").join("manifests"));
    assert_eq!(manifests.len(), 2, "{manifests:?}");
    for path in &manifests {
        let good = fs::read(path).unwrap();
        let mut flipped = good.clone();
        flipped[good.len() / 2] ^= 2;
        for damaged in [flipped, Vec::new(), good[..good.len() / 2].to_vec()] {
            fs::write(path, damaged).unwrap();
            let plain = StoreConfig { encryption: None, ..config.clone() };
            let refused = Store::open(plain).unwrap_err().to_string();
            assert!(refused.contains("encrypted"), "{refused}");
            let store = Store::open(config.clone()).unwrap();
            assert_eq!(hits(&store, 0..100), 100);
            drop(store);
            // Opening with the key has restored the marker.
            assert_eq!(fs::read(path).unwrap(), good);
        }
    }
}

#[test]
fn after_key_rotation_the_new_key_writes_and_the_old_one_reads() {
    let directory = tempfile::tempdir().unwrap();
    fill(&config(directory.path(), &[1]));
    let rotated = config(directory.path(), &[2, 1]);
    let store = Store::open(rotated).unwrap();
    assert_eq!(hits(&store, 0..100), 100);
    put(&store, &keys(200..240), BLOCK);
    drop(store);
    let store = Store::open(config(directory.path(), &[2])).unwrap();
    assert_eq!(hits(&store, 0..100), 0, "the old key was removed");
    assert_eq!(hits(&store, 200..240), 40);
    let text = notes(&store);
    assert!(text.contains("100 reads met a key"), "{text}");
}

/// A stage whose records an attacker can write: checksums do not detect this.
#[test]
fn swapped_records_are_detected() {
    let directory = tempfile::tempdir().unwrap();
    let stage = MapStage::new();
    let encryption = EncryptionConfig::new(key_file(directory.path(), "key", &[1]));
    let config =
        StoreConfig { pipeline: "Map".to_owned(), encryption: Some(encryption), ..dram(8) };
    let store = Store::open_with(config, &stage.registry(), Arc::new(SystemClock)).unwrap();
    put(&store, &keys(0..20), 5000);
    assert_eq!(hits(&store, 0..20), 20);
    stage.swap_all();
    assert_eq!(hits(&store, 0..20), 0);
}

#[test]
fn equal_contents_share_a_record_under_names_that_the_store_knows() {
    let directory = tempfile::tempdir().unwrap();
    let digest = DigestMode::On(DigestAlgorithm::Blake3);
    let config = StoreConfig { digest, ..config(directory.path(), &[1]) };
    let store = Store::open(config.clone()).unwrap();
    let bytes = bytes_of(&key(1), BLOCK);
    let twins = keys(0..8);
    for twin in &twins {
        drop(store.put(&[Put::new(*twin, &bytes)], CallOptions::default()));
    }
    store.flush(CallOptions::default()).unwrap();
    // Other blocks evict them from DRAM.
    put(&store, &keys(100..200), BLOCK);
    let read = |store: &Store| {
        let mut buffer = vec![0; BLOCK];
        let hit = |twin| {
            buffer.fill(0);
            drop(store.get(&[twin], &mut [&mut buffer], CallOptions::default()));
            if buffer == bytes {
                1
            } else {
                assert!(buffer.iter().all(|byte| *byte == 0), "never a wrong byte");
                0
            }
        };
        twins.iter().copied().map(hit).sum::<usize>()
    };
    assert_eq!(read(&store), 8);
    store.close().unwrap();
    drop(store);
    // After a restart only the first name is trusted; putting the others again links them.
    let store = Store::open(config).unwrap();
    assert!((1..8).contains(&read(&store)));
    for twin in &twins {
        drop(store.put(&[Put::new(*twin, &bytes)], CallOptions::default()));
    }
    assert_eq!(read(&store), 8);
}

#[test]
fn key_files_readable_by_others_or_inside_the_tier_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let mut config = config(directory.path(), &[1]);
    let path = config.encryption.as_ref().unwrap().key_file.clone();
    let refusal = |config: &StoreConfig| Store::open(config.clone()).unwrap_err().to_string();
    for mode in [0o640, 0o604, 0o620, 0o777] {
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        assert!(refusal(&config).contains("chmod 600"), "{mode:o}");
    }
    fs::create_dir_all(directory.path().join("tier")).unwrap();
    let beside = key_file(&directory.path().join("tier"), "key", &[1]);
    config.encryption = Some(EncryptionConfig::new(&beside));
    assert!(refusal(&config).contains("move it elsewhere"));
    let link = directory.path().join("link");
    std::os::unix::fs::symlink(beside, &link).unwrap();
    config.encryption = Some(EncryptionConfig::new(link));
    assert!(refusal(&config).contains("move it elsewhere"));
    config.encryption = Some(EncryptionConfig::new(directory.path().join("missing")));
    assert!(refusal(&config).contains("missing"));
}

#[test]
fn a_tier_cannot_mix_encrypted_and_plain_blocks() {
    let directory = tempfile::tempdir().unwrap();
    let encrypted = config(directory.path(), &[1]);
    let plain = StoreConfig { encryption: None, ..encrypted.clone() };
    fill(&encrypted);
    let error = Store::open(plain.clone()).unwrap_err().to_string();
    assert!(error.contains("encrypted blocks"), "{error}");
    fs::remove_dir_all(directory.path().join("tier")).unwrap();
    fill(&plain);
    let error = Store::open(encrypted).unwrap_err().to_string();
    assert!(error.contains("unencrypted"), "{error}");
}

/// Both marks had been damaged. The store then refused to open for good, with "holds unencrypted
/// blocks". Found by `cascade sim`.
#[test]
fn a_tier_without_marks_is_opened_if_its_blocks_are_encrypted_with_the_key() {
    let directory = tempfile::tempdir().unwrap();
    let encrypted = config(directory.path(), &[1]);
    fill(&encrypted);
    let manifests = directory.path().join("tier/manifests");
    fs::remove_dir_all(&manifests).unwrap();
    let other_key = config(directory.path(), &[2]);
    let error = Store::open(other_key).unwrap_err().to_string();
    assert!(error.contains("such as"), "{error}");
    let store = Store::open(encrypted.clone()).unwrap();
    assert_eq!(hits(&store, 0..100), 100);
    drop(store);
    assert_eq!(fs::read_dir(&manifests).unwrap().count(), 2, "the marks are there again");
}

#[test]
fn the_encrypted_stage_conforms() {
    let directory = tempfile::tempdir().unwrap();
    let pool = conformance::pool();
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    for (engine, direct) in
        [(IoEngine::Uring, true), (IoEngine::Psync, false), (IoEngine::Psync, true)]
    {
        let mut fresh = 0;
        conformance::all(&pool, &mut || {
            fresh += 1;
            let mut config = config(directory.path(), &[1]);
            let files = config.files.as_mut().unwrap();
            (files.engine, files.direct) = (engine, direct);
            files.directory = directory.path().join(format!("{engine:?}-{direct}-{fresh}"));
            let context = StageContext { config: &config, pool: &pool, clock: &clock };
            let inner = open_files(&context).unwrap();
            let encryption = config.encryption.as_ref().unwrap();
            Arc::new(EncryptedStage::open(inner, encryption, &context).unwrap())
        });
    }
}

#[test]
fn a_full_encrypted_tier_reclaims_and_stores_blocks_larger_than_its_buffers() {
    let directory = tempfile::tempdir().unwrap();
    let mut config = config(directory.path(), &[1]);
    config.dram_bytes = 16 * MIB;
    config.files.as_mut().unwrap().capacity_bytes = 16 * MIB;
    let store = Store::open(config).unwrap();
    for from in (0..512).step_by(64) {
        put(&store, &keys(from..from + 64), BLOCK);
    }
    put(&store, &keys(600..602), 3 << 20);
    store.flush(CallOptions::default()).unwrap();
    let stats = store.stats();
    assert!(stats.counters.reclaimed_blocks > 0 && stats.counters.damaged_blocks == 0);
    assert!(hits(&store, 0..512) > 100);
    assert_eq!(hits(&store, 600..602), 2);
}

/// An erase removes the encryption marker. If it could not be restored, ciphertext was written that
/// an opening without the key would have served as blocks.
#[test]
fn nothing_is_written_before_the_encryption_marker_is_restored() {
    let directory = tempfile::tempdir().unwrap();
    let encryption = Some(EncryptionConfig::new(key_file(directory.path(), "key", &[1])));
    let health = third_party::frequent_probes();
    let (store, stage) = third_party::open(StoreConfig { encryption, health, ..dram(8) });
    stage.erases.store(true, Ordering::Relaxed);
    put(&store, &keys(0..4), BLOCK);
    third_party::flush(&store);
    assert_eq!(stage.block_count(), 4);
    stage.fails_to_register.store(true, Ordering::Relaxed);
    let erased = store.erase(CallOptions::default()).unwrap();
    assert!(erased.is_complete(), "{erased:?}");
    put(&store, &keys(10..11), BLOCK);
    assert!(store.flush(CallOptions::default()).is_err());
    assert_eq!(stage.block_count(), 0);
    stage.fails_to_register.store(false, Ordering::Relaxed);
    // Failed attempts may have opened the circuit, and one flush reports the earlier failure.
    wait_until("a flush succeeds", || {
        third_party::wait_for(&store, 0, third_party::Circuits::BothClosed);
        store.flush(CallOptions::default()).is_ok()
    });
    put(&store, &keys(20..24), BLOCK);
    third_party::flush(&store);
    assert!(stage.block_count() >= 4);
}
