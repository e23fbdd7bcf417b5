//! The conformance suite over a source that is another store, and stores that read from each other.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::sync::Arc;

use cascade_store::{
    CallOptions, FilesConfig, Put, PutOutcome, Request, SourceList, Store, StoreConfig,
};
use cascade_tier::conformance::source::{SourceSubject, all};
use cascade_tier::conformance::tier::pool;
use cascade_tier::source::{Source, StoreSource};

use crate::blocks::{check, dram, keys, put};
use crate::map_source::MapSource;

const BLOCK: usize = 64 << 10;

fn subject(store: Store) -> SourceSubject {
    let [putting, removing] = [store.clone(), store.clone()];
    SourceSubject {
        source: Arc::new(StoreSource::new("peers", Arc::new(store))),
        put: Box::new(move |key, bytes| {
            let outcomes = putting.put(&[Put::new(*key, bytes)], CallOptions::default());
            assert!(matches!(outcomes[0], PutOutcome::Stored), "{outcomes:?}");
        }),
        remove: Box::new(move |key| drop(removing.delete(&[*key]))),
        stall: None,
    }
}

#[test]
fn a_source_over_a_store_of_dram_conforms() {
    all(&pool(), &mut || subject(Store::open(dram(16)).unwrap()));
}

#[test]
fn a_source_over_a_store_of_files_conforms() {
    let mut directories = Vec::new();
    all(&pool(), &mut || {
        let directory = tempfile::tempdir().unwrap();
        let files = FilesConfig::new(directory.path());
        directories.push(directory);
        let pipeline = "Dram|Files".to_owned();
        subject(Store::open(StoreConfig { pipeline, files: Some(files), ..dram(16) }).unwrap())
    });
}

/// The test double of the other tests. It can also keep its callers waiting.
#[test]
fn the_test_double_conforms() {
    all(&pool(), &mut || {
        let source = MapSource::new("peers");
        let [putting, removing, stalling] = [(); 3].map(|()| Arc::clone(&source));
        SourceSubject {
            source,
            put: Box::new(move |key, bytes| putting.add_bytes(key, bytes)),
            remove: Box::new(move |key| removing.remove(key)),
            stall: Some(Box::new(move || Box::new(stalling.hold_all()))),
        }
    });
}

fn reading_from(store: &Store) -> Store {
    let source = StoreSource::new("peers", Arc::new(store.clone()));
    let sources = SourceList::new(vec![Arc::new(source) as Arc<dyn Source>]);
    Store::open(StoreConfig { sources, ..dram(16) }).unwrap()
}

#[test]
fn a_chain_is_read_from_another_store() {
    let other = Store::open(dram(16)).unwrap();
    let keys = keys(0..40);
    put(&other, &keys[..30], BLOCK);
    let store = reading_from(&other);
    put(&store, &keys[..10], BLOCK);
    let matched = store.lookup_prefix(&Request::new(&keys)).tiers;
    assert_eq!(matched, [["dram"; 10].as_slice(), ["peers"; 20].as_slice()].concat());
    let tiers = check(&store, &keys);
    assert_eq!(tiers.iter().flatten().filter(|tier| **tier == "peers").count(), 20);
    assert_eq!(tiers.iter().filter(|tier| tier.is_none()).count(), 10);
    other.clear();
    assert_eq!(check(&store, &keys[..30]), [Some("dram"); 30]);
}

/// A store asks its source only for what is in the catalog there: it does not ask a third store.
#[test]
fn a_source_does_not_ask_the_sources_of_its_store() {
    let last = Store::open(dram(16)).unwrap();
    let keys = keys(0..4);
    put(&last, &keys, BLOCK);
    let middle = reading_from(&last);
    let first = reading_from(&middle);
    assert_eq!(check(&first, &keys), [None; 4]);
    assert_eq!(check(&middle, &keys), [Some("peers"); 4]);
    assert_eq!(check(&first, &keys), [Some("peers"); 4]);
}

#[test]
fn a_store_goes_on_without_the_store_that_it_read_from() {
    let other = Store::open(dram(16)).unwrap();
    let keys = keys(0..4);
    put(&other, &keys, BLOCK);
    let store = reading_from(&other);
    assert_eq!(check(&store, &keys[..2]), [Some("peers"); 2]);
    other.close().unwrap();
    assert_eq!(check(&store, &keys), [Some("dram"), Some("dram"), None, None]);
}
