//! The pages of a listing have each key once that is stored throughout, whatever else changes.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use cascade_block::BlockKey;
use cascade_runtime::ManualClock;
use cascade_store::stages::StageRegistry;
use cascade_store::{CallOptions, KeyPage, ListRequest, ListedKey, Put, Store, StoreConfig};

use crate::blocks::{dram, keys, put};
use crate::third_party::MapStage;

fn page(store: &Store, request: &ListRequest<'_>) -> KeyPage {
    store.list_keys(request, |_| true, CallOptions::default()).unwrap()
}

/// All pages of `most` keys; `between` is called after each.
fn listing(store: &Store, most: usize, mut between: impl FnMut(usize)) -> Vec<ListedKey> {
    let (mut listed, mut from) = (Vec::new(), 0);
    for number in 0.. {
        let page = page(store, &ListRequest { from, most, tier: None });
        assert!(page.keys.len() <= most);
        listed.extend(page.keys);
        between(number);
        match page.next {
            Some(next) => from = next,
            None => break,
        }
    }
    listed
}

fn keys_of(listed: &[ListedKey]) -> Vec<BlockKey> {
    let mut keys: Vec<_> = listed.iter().map(|it| it.key).collect();
    keys.sort_unstable();
    keys
}

fn sorted(mut keys: Vec<BlockKey>) -> Vec<BlockKey> {
    keys.sort_unstable();
    keys
}

#[test]
fn every_key_is_listed_once_whatever_the_length_of_a_page() {
    let store = Store::open(dram(16)).unwrap();
    assert_eq!(page(&store, &ListRequest::default()), KeyPage::default());
    let many = keys(0..1000);
    put(&store, &many, 8);
    for most in [1, 7, 250, 256, 999, 1000, 5000] {
        let listed = listing(&store, most, |_| ());
        assert_eq!(keys_of(&listed), sorted(many.clone()), "pages of {most}");
    }
    let beyond = ListRequest { from: u32::MAX, most: 5, tier: None };
    assert_eq!(page(&store, &beyond), KeyPage::default());
}

#[test]
fn no_key_that_stays_is_missed_or_listed_twice_while_others_change() {
    let store = Store::open(dram(16)).unwrap();
    let (stay, go) = (keys(0..1000), keys(1000..2000));
    put(&store, &[stay[..500].to_vec(), go.clone(), stay[500..].to_vec()].concat(), 8);
    let mut came = 2000;
    let listed = listing(&store, 100, |number| {
        // What is removed was listed already, or not yet; what is put takes freed entries.
        let at = (number * 70) % 930;
        store.delete(&go[at..at + 70]);
        put(&store, &keys(came..came + 30), 8);
        came += 30;
    });
    let stays: BTreeSet<_> = stay.iter().copied().collect();
    let listed: Vec<_> = listed.iter().map(|it| it.key).filter(|it| stays.contains(it)).collect();
    assert_eq!(sorted(listed), sorted(stay));
}

#[test]
fn a_key_has_the_length_the_tiers_and_the_use_of_its_block() {
    let stage = MapStage::new();
    let config = StoreConfig { pipeline: "Dram|Map".to_owned(), dram_blocks: Some(1), ..dram(4) };
    let clock = Arc::new(ManualClock::default());
    clock.advance(Duration::from_secs(1_000));
    let store = Store::open_with(config, &stage.registry(), clock.clone()).unwrap();
    let both = keys(0..2);
    put(&store, &both[..1], 4096);
    store.flush(CallOptions::default()).unwrap();
    put(&store, &both[1..], 100);
    store.flush(CallOptions::default()).unwrap();
    drop(store.view(&both[1..], CallOptions::default()));
    let all = page(&store, &ListRequest { most: 10, ..ListRequest::default() });
    let found = |key: BlockKey| all.keys.iter().find(|it| it.key == key).unwrap();
    let (evicted, read) = (found(both[0]), found(both[1]));
    assert_eq!((evicted.bytes, &evicted.tiers[..], evicted.uses), (4096, &["map"][..], 0));
    assert_eq!((read.bytes, &read.tiers[..], read.uses), (100, &["dram", "map"][..], 1));
    assert!(evicted.used_unix_ms.is_none() && read.used_unix_ms.is_some(), "{all:?}");
    let in_tier = |tier| page(&store, &ListRequest { most: 10, tier: Some(tier), from: 0 }).keys;
    assert_eq!(keys_of(&in_tier("dram")), [both[1]]);
    assert_eq!(keys_of(&in_tier("map")), sorted(both.clone()));
    assert!(in_tier("files").is_empty());
    let only = |key: &BlockKey| *key == both[0];
    let request = ListRequest { most: 10, ..ListRequest::default() };
    let matched = store.list_keys(&request, only, CallOptions::default()).unwrap();
    assert_eq!(keys_of(&matched.keys), [both[0]]);
}

#[test]
fn an_expired_or_cleared_key_is_not_listed() {
    let clock = Arc::new(ManualClock::default());
    let store = Store::open_with(dram(4), &StageRegistry::default(), clock.clone()).unwrap();
    let some = keys(0..3);
    let short = Put { ttl_ms: Some(1000), ..Put::new(some[0], b"short") };
    store.put(&[short, Put::new(some[1], b"long")], CallOptions::default());
    clock.advance(Duration::from_secs(2));
    assert_eq!(keys_of(&listing(&store, 10, |_| ())), [some[1]]);
    store.clear();
    assert!(listing(&store, 10, |_| ()).is_empty());
    put(&store, &some[2..], 8);
    assert_eq!(keys_of(&listing(&store, 10, |_| ())), [some[2]]);
}
