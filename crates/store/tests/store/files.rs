//! DRAM over a file tier: restart, damage, full tiers, two stores on one directory.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use cascade_block::{
    ChainTail, DigestAlgorithm, DigestMode, Manifest, Namespace, TenantSecret, chain_keys,
};
use cascade_disk::io::FileIo;
use cascade_disk::io::fault::{Fault, FaultPlan};
use cascade_runtime::SystemClock;
use cascade_store::stages::{StageRegistry, open_files_with};
use cascade_store::{
    CallOptions, FilesConfig, IoEngine, Put, PutOutcome, Store, StoreConfig, StoreError,
    ViewOutcome,
};

use crate::blocks::{MIB, bytes_of, check, dram, key, keys, put};

const BLOCK: usize = 64 << 10;

fn config(directory: &Path) -> StoreConfig {
    let files = FilesConfig {
        capacity_bytes: 64 * MIB,
        segment_bytes: 4 * MIB,
        ..FilesConfig::new(directory)
    };
    StoreConfig { pipeline: "Dram|Files".to_owned(), files: Some(files), ..dram(4) }
}

fn for_every_engine(directory: &Path, mut check: impl FnMut(StoreConfig, &str)) {
    for engine in [IoEngine::Uring, IoEngine::Psync] {
        for direct in [true, false] {
            let name = format!("{engine:?}-{direct}");
            let mut config = config(&directory.join(&name));
            let files = config.files.as_mut().unwrap();
            (files.engine, files.direct) = (engine, direct);
            check(config, &name);
        }
    }
}

/// Also with a setting that the given I/O does not have.
#[test]
fn a_file_stage_uses_the_io_that_it_is_given() {
    let directory = tempfile::tempdir().unwrap();
    let clock = || Arc::new(SystemClock);
    let plan = FaultPlan::new(Fault::Io, u64::MAX, false);
    let system = FileIo::system(IoEngine::Psync, false, 4, None, clock()).unwrap();
    let io = plan.wrap(&system);
    let mut registry = StageRegistry::default();
    registry.register("Files", Arc::new(move |context| open_files_with(context, io.clone())));
    let mut config = config(directory.path());
    config.files.as_mut().unwrap().engine = IoEngine::Uring;
    let store = Store::open_with(config, &registry, clock()).unwrap();
    let opening = plan.calls();
    assert!(opening > 0, "the opening uses it");
    put(&store, &keys(0..20), BLOCK);
    store.flush(CallOptions::default()).unwrap();
    assert!(plan.calls() > opening, "so do writes");
    assert!(check(&store, &keys(0..20)).iter().all(Option::is_some));
    store.close().unwrap();
}

#[test]
fn blocks_survive_a_restart_with_every_engine() {
    let directory = tempfile::tempdir().unwrap();
    for_every_engine(directory.path(), |config, name| {
        let store = Store::open(config.clone()).unwrap();
        let outcomes = [put(&store, &keys(0..200), BLOCK), put(&store, &keys(200..220), 5000)];
        let not_stored = outcomes.iter().flatten().find(|o| !matches!(o, PutOutcome::Stored));
        assert!(not_stored.is_none(), "{name}: {not_stored:?}");
        assert!(check(&store, &keys(0..220)).iter().all(Option::is_some), "{name}");
        store.delete(&keys(7..8));
        store.close().unwrap();
        let store = Store::open(config).unwrap();
        assert_eq!(store.stats().keys, 219, "{name}");
        let tiers = check(&store, &keys(0..220));
        for (at, tier) in tiers.iter().enumerate() {
            assert_eq!(*tier, if at == 7 { None } else { Some("files") }, "{name}: block {at}");
        }
    });
}

#[test]
fn shared_contents_survive_a_restart_under_every_name() {
    let directory = tempfile::tempdir().unwrap();
    for_every_engine(directory.path(), |config, name| {
        let digest = DigestMode::On(DigestAlgorithm::Blake3);
        let config = StoreConfig { digest, ..config };
        let bytes = bytes_of(&key(0), BLOCK);
        let put_as = |store: &Store, n| {
            store.put(&[Put::new(key(n), &bytes)], CallOptions::default()).pop().unwrap()
        };
        let store = Store::open(config.clone()).unwrap();
        put_as(&store, 0);
        assert!(matches!(put_as(&store, 1), PutOutcome::Deduplicated), "{name}");
        store.flush(CallOptions::default()).unwrap();
        assert!(matches!(put_as(&store, 2), PutOutcome::Deduplicated), "{name}");
        drop(store);
        let store = Store::open(config.clone()).unwrap();
        assert_eq!((store.stats().keys, store.stats().contents), (3, 1), "{name}");
        assert!(matches!(put_as(&store, 3), PutOutcome::Deduplicated), "{name}");
        store.delete(&keys(0..1));
        drop(store);
        let store = Store::open(config).unwrap();
        for n in 1..4 {
            let view = store.view(&[key(n)], CallOptions::default()).pop().unwrap();
            let is_right =
                matches!(&view, ViewOutcome::Hit { slab, .. } if slab.host() == Some(&bytes[..]));
            assert!(is_right, "{name}, key {n}: {view:?}");
        }
        assert_eq!(store.contains(&keys(0..1)), [false], "{name}");
    });
}

#[test]
fn a_content_outlives_its_first_name() {
    let directory = tempfile::tempdir().unwrap();
    for_every_engine(directory.path(), |config, name| {
        let digest = DigestMode::On(DigestAlgorithm::Blake3);
        let store = Store::open(StoreConfig { digest, ..config }).unwrap();
        let bytes = bytes_of(&key(0), BLOCK);
        let put_as = |n| store.put(&[Put::new(key(n), &bytes)], CallOptions::default()).remove(0);
        put_as(0);
        put_as(1);
        store.flush(CallOptions::default()).unwrap();
        store.delete(&keys(0..1));
        store.flush(CallOptions::default()).unwrap();
        assert!(matches!(put_as(2), PutOutcome::Deduplicated), "{name}");
        store.flush(CallOptions::default()).unwrap();
        put(&store, &keys(100..300), BLOCK);
        for n in 1..3 {
            let view = store.view(&[key(n)], CallOptions::default()).remove(0);
            let is_right =
                matches!(&view, ViewOutcome::Hit { slab, .. } if slab.host() == Some(&bytes[..]));
            assert!(is_right, "{name}, key {n}: {view:?}");
        }
    });
}

#[test]
fn files_stay_within_their_capacity_and_keep_the_newest_blocks() {
    let directory = tempfile::tempdir().unwrap();
    let mut config = config(directory.path());
    config.files.as_mut().unwrap().capacity_bytes = 16 * MIB;
    config.files.as_mut().unwrap().segment_bytes = 2 * MIB;
    let store = Store::open(config.clone()).unwrap();
    for at in 0..48 {
        put(&store, &keys(at * 16..at * 16 + 16), BLOCK);
    }
    store.flush(CallOptions::default()).unwrap();
    let (_, files) = store.stats().stages.remove(0);
    assert!(files.used_bytes <= 16 * MIB, "{} bytes", files.used_bytes);
    assert_eq!(check(&store, &keys(0..1)), [None]);
    assert!(check(&store, &keys(760..768)).iter().all(Option::is_some));
    let all = keys(0..768);
    let before: Vec<bool> = store.contains(&all);
    assert!(before.iter().filter(|is_here| **is_here).count() > 100);
    let on_disk: u64 = disk_usage(directory.path());
    assert!(on_disk <= 17 * MIB, "{on_disk} bytes on disk");
    drop(store);
    let store = Store::open(config).unwrap();
    assert!(check(&store, &all).iter().filter(|tier| tier.is_some()).count() > 100);
}

fn disk_usage(directory: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let entries = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap());
    entries
        .map(|entry| {
            let meta = entry.metadata().unwrap();
            if meta.is_dir() { disk_usage(&entry.path()) } else { meta.blocks() * 512 }
        })
        .sum()
}

#[test]
fn a_flipped_bit_in_a_file_is_a_miss() {
    let directory = tempfile::tempdir().unwrap();
    let config = config(directory.path());
    let store = Store::open(config.clone()).unwrap();
    put(&store, &keys(0..100), BLOCK);
    store.close().unwrap();
    drop(store);
    // One byte every three blocks of every segment.
    let mut flipped = 0;
    for entry in std::fs::read_dir(directory.path()).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "segment") {
            continue;
        }
        let mut bytes = std::fs::read(&path).unwrap();
        for at in (8 << 10..bytes.len()).step_by(3 * BLOCK) {
            bytes[at] ^= 0x10;
            flipped += 1;
        }
        std::fs::write(&path, bytes).unwrap();
    }
    assert!(flipped > 10, "the test flips too few bytes: {flipped}");
    let store = Store::open(config).unwrap();
    let tiers = check(&store, &keys(0..100));
    let misses = tiers.iter().filter(|tier| tier.is_none()).count();
    assert!((1..100).contains(&misses), "{misses} misses");
    assert_eq!(store.stats().counters.misses, misses as u64);
}

#[test]
fn a_second_store_on_one_directory_is_refused_with_the_process_of_the_first() {
    let directory = tempfile::tempdir().unwrap();
    let first = Store::open(config(directory.path())).unwrap();
    let error = Store::open(config(directory.path())).unwrap_err();
    let StoreError::Tier { tier: "files", source, .. } = &error else { panic!("{error:?}") };
    let text = source.to_string();
    assert!(text.contains(&std::process::id().to_string()), "{text}");
    drop(first);
    Store::open(config(directory.path())).unwrap();
}

#[test]
fn manifests_are_stored_with_their_blocks_and_explain_a_mismatch() {
    let directory = tempfile::tempdir().unwrap();
    let config = config(directory.path());
    let manifest = |dtype: &str| Manifest::new().with("weights", "abc").with("dtype", dtype);
    let secret = TenantSecret::new("secret");
    let ours = Namespace::new(manifest("bf16"), &secret);
    let store = Store::open(config.clone()).unwrap();
    store.register(&ours, CallOptions::default()).unwrap();
    let tokens: Vec<u32> = (0..256).collect();
    let chain = chain_keys(ours.root(), &tokens, 128, ChainTail::Drop);
    put(&store, &chain, BLOCK);
    drop(store);
    let store = Store::open(config).unwrap();
    let other = Namespace::new(manifest("fp8"), &secret);
    let theirs = chain_keys(other.root(), &tokens, 128, ChainTail::Drop);
    assert_eq!(store.contains(&theirs), [false; 2]);
    let kept = store.manifests(CallOptions::default()).unwrap();
    let [(id, kept)] = kept.as_slice() else { panic!("{kept:?}") };
    assert_eq!(*id, ours.id());
    let differences = kept.difference(other.manifest());
    assert!(format!("{differences:?}").contains("dtype"), "{differences:?}");
    assert_eq!(differences.len(), 1);
}

#[test]
fn a_pipeline_with_files_needs_a_directory() {
    let config = StoreConfig { pipeline: "Dram|Files".to_owned(), ..dram(4) };
    let error = Store::open(config).unwrap_err().to_string();
    assert!(error.contains("files") && error.contains("directory"), "{error}");
}

#[test]
fn the_file_stage_conforms() {
    use cascade_runtime::{Clock, SystemClock};
    use cascade_store::stages::{StageContext, open_files};
    use cascade_tier::conformance::tier as conformance;
    use std::sync::Arc;

    let directory = tempfile::tempdir().unwrap();
    let pool = conformance::pool();
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    for_every_engine(directory.path(), |config, name| {
        let mut fresh = 0;
        conformance::all(&pool, &mut || {
            fresh += 1;
            let mut config = config.clone();
            let files = config.files.as_mut().unwrap();
            files.directory = directory.path().join(format!("{name}-{fresh}"));
            let context = StageContext { config: &config, pool: &pool, clock: &clock };
            open_files(&context).unwrap()
        });
    });
}

/// The mover retried the key changes of a full tier without making room: no block was written any
/// more, and every flush timed out.
#[test]
fn keys_are_added_and_removed_in_a_full_tier() {
    let directory = tempfile::tempdir().unwrap();
    let files = FilesConfig {
        capacity_bytes: 4 * MIB,
        segment_bytes: MIB,
        ..FilesConfig::new(directory.path())
    };
    let digest = DigestMode::On(DigestAlgorithm::Blake3);
    let timeout = Duration::from_secs(20);
    let config = config(directory.path());
    let store = Store::open(StoreConfig { digest, timeout, files: Some(files), ..config }).unwrap();
    put(&store, &keys(0..100), BLOCK);
    store.flush(CallOptions::default()).unwrap();
    let bytes = bytes_of(&key(99), BLOCK);
    let mut names = VecDeque::new();
    for at in 0..400 {
        let name = key(1000 + at);
        store.put(&[Put::new(name, &bytes)], CallOptions::default());
        names.push_back(name);
        if names.len() > 20 {
            store.delete(&[names.pop_front().unwrap()]);
        }
        let flushed = store.flush(CallOptions::default());
        assert!(flushed.is_ok(), "{at}: {flushed:?}");
    }
    put(&store, &keys(200..300), BLOCK);
    store.flush(CallOptions::default()).unwrap();
    assert_eq!(check(&store, &keys(299..300)), [Some("dram")]);
    assert_eq!(store.stats().counters.name_failures, 0);
}

/// The second key stayed in the catalog after the tier had dropped its bytes.
#[test]
fn both_keys_of_equal_bytes_go_with_their_segment() {
    for is_first_deleted in [true, false] {
        let case = format!("first key deleted: {is_first_deleted}");
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let mut config = config(directory.path());
        config.digest = DigestMode::On(DigestAlgorithm::Blake3);
        let files = config.files.as_mut().unwrap();
        (files.capacity_bytes, files.segment_bytes) = (8 * MIB, MIB);
        let store = Store::open(config.clone()).unwrap();
        let put_as = |n: u64| {
            let bytes = bytes_of(&key(0), BLOCK);
            store.put(&[Put::new(key(n), &bytes)], CallOptions::default()).remove(0)
        };
        assert!(matches!(put_as(0), PutOutcome::Stored), "{case}");
        store.flush(CallOptions::default()).unwrap();
        assert!(matches!(put_as(1), PutOutcome::Deduplicated), "{case}");
        store.flush(CallOptions::default()).unwrap();
        if is_first_deleted {
            assert_eq!(store.delete(&[key(0)]), [true], "{case}");
        }
        let mut next = 100;
        while store.contains(&[key(1)]) == [true] {
            assert!(next < 4100, "{case}: present, read as {:?}", check(&store, &keys(1..2)));
            put(&store, &keys(next..next + 40), BLOCK);
            store.flush(CallOptions::default()).unwrap();
            next += 40;
        }
        assert_eq!(store.contains(&keys(0..2)), [false; 2], "{case}");
        assert_eq!(store.delete(&keys(0..2)), [false; 2], "{case}");
        store.close().unwrap();
        let again = Store::open(config).unwrap();
        assert_eq!(again.contains(&keys(0..2)), [false; 2], "{case}: after a restart");
    }
}
