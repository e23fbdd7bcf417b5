//! Bit flips in DRAM: detected by a scrub, before blocks are demoted, and when a pool is reopened.
//!
//! Without checksums in DRAM a flipped bit was served, and demoted with a checksum of the wrong
//! bytes.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::num::NonZeroU64;
use std::os::unix::fs::FileExt;

use cascade_block::BlockKey;
use cascade_store::{
    CallOptions, EncryptionConfig, FilesConfig, Loss, ScrubReport, Store, StoreConfig, ViewOutcome,
};

use crate::blocks::{MIB, StopOnDrop, check, dram, keys, put, wait_until};
use crate::named_pool::{config, directory, pool, warm};

const BLOCK: usize = 48 << 10;

fn options() -> CallOptions {
    CallOptions::default()
}

/// Flips one bit of a block in the pool's file. Returns its offset.
fn flip(store: &Store, key: &BlockKey, at: u64) -> u64 {
    let views = store.peek(&[*key], options());
    let [ViewOutcome::Hit { slab, .. }] = &views[..] else { panic!("{views:?}") };
    let at = slab.offset() as u64 + at;
    let mut byte = [0];
    store.region().host().expect("host memory").file().read_exact_at(&mut byte, at).unwrap();
    store.region().host().expect("host memory").file().write_all_at(&[byte[0] ^ 4], at).unwrap();
    at
}

#[test]
fn a_block_with_a_flipped_bit_is_a_miss_after_the_next_scrub() {
    let store = Store::open(dram(8)).unwrap();
    put(&store, &keys(0..100), BLOCK);
    let bytes = 100 * BLOCK as u64;
    let clean = ScrubReport { blocks: 100, bytes, damaged: 0, is_complete: true };
    assert_eq!(store.scrub(options()), clean, "records checksums");
    assert_eq!(store.scrub(options()), clean, "compares checksums");
    store.pin(&keys(7..8));
    for (number, at) in [(7, 0), (31, BLOCK as u64 - 1)] {
        flip(&store, &keys(number..number + 1)[0], at);
    }
    assert_eq!(store.scrub(options()), ScrubReport { damaged: 2, ..clean });
    let tiers = check(&store, &keys(0..100));
    let missing: Vec<_> = (0..100).filter(|at| tiers[*at].is_none()).collect();
    assert_eq!(missing, [7, 31]);
    assert_eq!(store.stats().counters.damaged_blocks, 2);
    let explained = store.explain(&keys(7..8), None, options());
    let gone = explained.map(|it| format!("{:?}", it.blocks[0].state)).unwrap();
    assert!(gone.contains(&format!("{:?}", Loss::Damaged)), "{gone}");

    // The key can be put again, and every block can be evicted.
    put(&store, &keys(7..8), BLOCK);
    put(&store, &keys(100..400), BLOCK);
    check(&store, &keys(0..400));
    assert_eq!(store.scrub(options()).damaged, 0);
}

#[test]
fn a_damaged_block_in_dram_is_not_demoted_to_segments() {
    check_demotion_of_damage(false);
}

#[test]
fn a_damaged_block_in_dram_is_not_encrypted() {
    check_demotion_of_damage(true);
}

fn check_demotion_of_damage(is_encrypted: bool) {
    let directory = tempfile::tempdir().unwrap();
    let key_file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(key_file.path(), "07".repeat(32)).unwrap();
    let files = FilesConfig {
        capacity_bytes: 64 * MIB,
        segment_bytes: 8 * MIB,
        ..FilesConfig::new(directory.path())
    };
    let config = StoreConfig {
        encryption: is_encrypted.then(|| EncryptionConfig::new(key_file.path())),
        pipeline: "Dram|Files".to_owned(),
        files: Some(files),
        // The first block keeps the mover busy for some seconds.
        mover_bytes_per_second: Some(MIB),
        dirty_bytes_max: Some(32 * MIB),
        ..dram(32)
    };
    let store = Store::open(config.clone()).unwrap();
    put(&store, &keys(0..1), 5 << 20);
    wait_until("it is demoted", || store.stats().counters.demoted_blocks > 0);
    put(&store, &keys(1..21), BLOCK);
    assert_eq!(store.scrub(options()).blocks, 21);
    flip(&store, &keys(5..6)[0], 1000);
    store.flush(options()).unwrap();
    assert_eq!(store.stats().counters.damaged_blocks, 1);
    assert_eq!(store.stats().pending_bytes, 0);
    store.close().unwrap();
    drop(store);
    let store = Store::open(config).unwrap();
    let tiers = check(&store, &keys(1..21));
    let missing: Vec<_> = (0..20).filter(|at| tiers[*at].is_none()).collect();
    assert_eq!(missing, [4], "not in files either");
}

#[test]
fn recovered_blocks_are_verified_before_they_are_served() {
    let directory = directory();
    let store = Store::open(config(directory.path(), 8)).unwrap();
    put(&store, &keys(0..100), BLOCK);
    store.scrub(options());
    let at = flip(&store, &keys(9..10)[0], 77);
    assert!(at > 0 && pool(directory.path()).exists());
    store.close().unwrap();
    drop(store);
    let store = Store::open(config(directory.path(), 8)).unwrap();
    assert_eq!((warm(&store).recovered_blocks, warm(&store).rejected_records), (99, 1));
    let tiers = check(&store, &keys(0..100));
    let missing: Vec<_> = (0..100).filter(|at| tiers[*at].is_none()).collect();
    assert_eq!(missing, [9]);
    assert_eq!(store.scrub(options()).blocks, 99);
}

#[test]
fn a_scrub_does_not_block_puts() {
    let rate = NonZeroU64::new(64 << 30);
    let store = Store::open(StoreConfig { scrub_bytes_per_second: rate, ..dram(4) }).unwrap();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                store.scrub(options());
            }
        });
        let _stopper = StopOnDrop(&stop);
        for round in 0..40 {
            let outcomes = put(&store, &keys(round * 50..(round + 1) * 50), BLOCK);
            let is_right = |it: &cascade_store::PutOutcome| {
                use cascade_store::{DeclineReason::WorthLess, PutOutcome};
                matches!(it, PutOutcome::Stored | PutOutcome::Declined(WorthLess))
            };
            assert!(outcomes.iter().all(is_right), "{outcomes:?}");
        }
    });
    check(&store, &keys(0..2000));
    assert_eq!(store.stats().counters.damaged_blocks, 0);
}
