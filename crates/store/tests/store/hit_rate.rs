//! The hit rate: blocks matched over blocks requested, each request counted once.

use cascade_store::{CallOptions, FilesConfig, Request, Store};

use crate::blocks::{MIB, check, dram, keys, put};

const BLOCK: usize = 4 << 10;

/// Requested and matched blocks. The matched blocks of all tiers have to add up.
fn rate(store: &Store) -> (u64, u64) {
    let stats = store.stats();
    let by_tier: u64 = stats.hits_by_tier.iter().map(|tier| tier.matched_blocks).sum();
    assert_eq!(by_tier, stats.counters.matched());
    (stats.counters.requested(), stats.counters.matched())
}

fn load(store: &Store, range: std::ops::Range<u64>) {
    drop(store.view(&keys(range), CallOptions::default()));
}

#[test]
fn a_block_that_is_looked_up_and_then_loaded_is_requested_once() {
    let store = Store::open(dram(16)).unwrap();
    put(&store, &keys(0..10), BLOCK);
    // Three requests of 100 blocks share ten. They are looked up before the first one is loaded.
    for _ in 0..3 {
        assert_eq!(store.lookup_prefix(&Request::new(&keys(0..100))).tiers.len(), 10);
    }
    assert_eq!(rate(&store), (300, 30));
    for _ in 0..3 {
        load(&store, 0..10);
    }
    assert_eq!(rate(&store), (300, 30), "loads after a lookup are not counted again");
    // Loading more than what matched is not a new request.
    load(&store, 0..100);
    assert_eq!(rate(&store), (300, 30));
    store.acquire(&Request::new(&keys(0..20)), CallOptions::default());
    assert_eq!(rate(&store), (320, 40));
}

#[test]
fn reads_without_a_lookup_count_as_requests() {
    let store = Store::open(dram(16)).unwrap();
    put(&store, &keys(0..10), BLOCK);
    load(&store, 0..40);
    load(&store, 0..10);
    assert_eq!(rate(&store), (50, 20));
    let mut bytes = vec![0; 20 * BLOCK];
    let mut buffers: Vec<&mut [u8]> = bytes.chunks_mut(BLOCK).collect();
    store.get(&keys(0..20), &mut buffers, CallOptions::default());
    assert_eq!(rate(&store), (70, 30));
    store.contains(&keys(0..20));
    assert_eq!(rate(&store), (70, 30), "a query is not a request");
}

#[test]
fn matches_and_contents_are_counted_by_tier() {
    let directory = tempfile::tempdir().unwrap();
    let mut config = dram(4);
    config.pipeline = "Dram|Files".to_owned();
    let mut files = FilesConfig::new(directory.path().join("blocks"));
    files.capacity_bytes = 64 * MIB;
    files.segment_bytes = 4 * MIB;
    config.files = Some(files);
    let open = || Store::open(config.clone()).unwrap();
    let store = open();
    // 1,536 blocks are more than DRAM holds; in steps, so that the file tier keeps up.
    for from in (0..1536).step_by(64) {
        put(&store, &keys(from..from + 64), BLOCK);
        store.flush(CallOptions::default()).unwrap();
    }
    let matched = store.lookup_prefix(&Request::new(&keys(0..1600))).tiers.len() as u64;
    assert_eq!((rate(&store), matched), ((1600, 1536), 1536));
    let stats = store.stats();
    let of = |tier: &str| {
        let found = stats.hits_by_tier.iter().find(|hits| hits.tier == tier);
        found.unwrap().matched_blocks
    };
    assert!(of("dram") > 0 && of("files") > 0, "{:?}", stats.hits_by_tier);
    assert_eq!(stats.stage_blocks, [1536]);
    check(&store, &keys(0..1536));
    assert_eq!(rate(&store), (1600, 1536), "reads after the lookup are not counted again");
    store.delete(&keys(0..12));
    assert_eq!(store.stats().stage_blocks, [1524]);
    store.close().unwrap();
    drop(store);
    assert_eq!(open().stats().stage_blocks, [1524], "counted again when the store is opened");
}
