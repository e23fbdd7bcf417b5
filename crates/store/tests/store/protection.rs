//! Protected prefixes: evicted from DRAM last, within their quota, and always readable.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::sync::Arc;

use cascade_block::BlockKey;
use cascade_runtime::SystemClock;
use cascade_store::{CallOptions, PolicyKind, Put, Store, StoreConfig};

use crate::blocks::{MIB, bytes_of, check, dram, keys};
use crate::third_party::MapStage;

const BLOCK: usize = 2 << 20;

fn put_all(store: &Store, keys: &[BlockKey], is_prefix: bool) {
    for key in keys {
        let bytes = bytes_of(key, BLOCK);
        drop(store.put(&[Put { is_prefix, ..Put::new(*key, &bytes) }], CallOptions::default()));
    }
}

fn in_dram(store: &Store, keys: &[BlockKey]) -> usize {
    store.locate(keys).iter().filter(|tiers| tiers.first() == Some(&"dram")).count()
}

fn open(config: StoreConfig) -> Store {
    let config = StoreConfig { pipeline: "Dram|Map".to_owned(), ..config };
    Store::open_with(config, &MapStage::new().registry(), Arc::new(SystemClock)).unwrap()
}

/// Puts ten prefixes and forty fillers of 2 MiB into 25 MiB of DRAM. Returns the prefixes still in
/// DRAM and the readable fillers.
fn retained(config: StoreConfig) -> (usize, usize) {
    let store = open(config);
    put_all(&store, &keys(0..10), true);
    put_all(&store, &keys(100..140), false);
    store.flush(CallOptions::default()).unwrap();
    let kept = in_dram(&store, &keys(0..10));
    let readable = check(&store, &keys(100..140)).iter().filter(|tier| tier.is_some()).count();
    assert_eq!(store.stats().counters.lost_blocks, 0);
    (kept, readable)
}

#[test]
fn protected_prefixes_stay_in_dram_and_under_lru_none_does() {
    assert_eq!(retained(dram(25)), (10, 40));
    let lru = StoreConfig { policy: PolicyKind::Lru, protected_percent: 0, ..dram(25) };
    assert_eq!(retained(lru), (0, 40));
}

#[test]
fn prefixes_beyond_the_quota_are_not_protected_and_are_counted() {
    let store = open(dram(25));
    put_all(&store, &keys(0..24), true);
    put_all(&store, &keys(100..104), false);
    store.flush(CallOptions::default()).unwrap();
    let stats = store.stats();
    assert_eq!(stats.protected_blocks, 11, "90 % of 25 MiB");
    assert_eq!(stats.protection_refused, 13);
    assert!(stats.dram_bytes <= 25 * MIB);
    assert!(check(&store, &keys(0..24)).iter().all(Option::is_some));
}
