//! The store against a naive model: a map without eviction.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use cascade_block::{BlockKey, DigestAlgorithm, DigestMode};
use cascade_runtime::SystemClock;
use cascade_store::stages::StageRegistry;
use cascade_store::{
    CallOptions, GetOutcome, Put, PutOutcome, Store, StoreConfig, ViewOutcome, WritePolicy,
};
use proptest::prelude::*;

use crate::blocks::{bytes_of, dram, key};
use crate::third_party::{MapStage, frequent_probes};

#[derive(Debug, Clone)]
enum Operation {
    /// Key, which bytes (equal numbers are equal bytes), length.
    Put(u64, u64, usize),
    View(u64),
    Delete(u64),
    Pin(u64),
    Unpin(u64),
    Clear,
    Flush,
}

fn operation() -> impl Strategy<Value = Operation> {
    let length = prop::sample::select(vec![0usize, 1, 500, 4096, 70_000, 300_000]);
    prop_oneof![
        6 => (0u64..12, 0u64..4, length).prop_map(|(k, b, l)| Operation::Put(k, b, l)),
        6 => (0u64..12).prop_map(Operation::View),
        2 => (0u64..12).prop_map(Operation::Delete),
        1 => (0u64..12).prop_map(Operation::Pin),
        1 => (0u64..12).prop_map(Operation::Unpin),
        1 => Just(Operation::Clear),
        1 => Just(Operation::Flush),
    ]
}

fn bytes(number: u64, length: usize) -> Vec<u8> {
    bytes_of(&key(1_000_000 + number), length)
}

struct ModeledStore {
    store: Store,
    model: HashMap<BlockKey, Vec<u8>>,
    /// Whether every block must be kept (eviction loses none).
    keeps_all: bool,
}

impl ModeledStore {
    fn put(&mut self, n: u64, number: u64, length: usize) {
        let (key, new) = (key(n), bytes(number, length));
        let outcome = self.store.put(&[Put::new(key, &new)], CallOptions::default()).pop().unwrap();
        match (&outcome, self.model.get(&key)) {
            (PutOutcome::Stored | PutOutcome::Deduplicated, None) => {
                self.model.insert(key, new);
            }
            (PutOutcome::Stored | PutOutcome::Deduplicated, Some(_)) if !self.keeps_all => {
                self.model.insert(key, new);
            }
            (PutOutcome::Present, Some(old)) => assert_eq!(*old, new),
            (PutOutcome::Conflict, Some(old)) => assert_ne!(*old, new),
            (PutOutcome::Declined(_), _) if !self.keeps_all => {}
            (outcome, old) => panic!("{outcome:?} while the model has {:?}", old.map(Vec::len)),
        }
    }

    fn view(&self, n: u64) {
        let view = self.store.view(&[key(n)], CallOptions::default()).pop().unwrap();
        match (view, self.model.get(&key(n))) {
            (ViewOutcome::Hit { slab, .. }, Some(bytes)) => {
                assert!(slab.host() == Some(&bytes[..]));
            }
            (ViewOutcome::Miss, None) => {}
            (ViewOutcome::Miss, Some(_)) if !self.keeps_all => {}
            (view, bytes) => panic!("{view:?} while the model has {:?}", bytes.map(Vec::len)),
        }
    }

    fn play(&mut self, operation: &Operation) {
        match *operation {
            Operation::Put(n, number, length) => self.put(n, number, length),
            Operation::View(n) => self.view(n),
            Operation::Delete(n) => {
                let deleted = self.store.delete(&[key(n)])[0];
                let known = self.model.remove(&key(n)).is_some();
                assert!(deleted == known || (!self.keeps_all && !deleted));
            }
            Operation::Pin(n) => {
                self.store.pin(&[key(n)]);
            }
            Operation::Unpin(n) => {
                self.store.unpin(&[key(n)]);
            }
            Operation::Clear => {
                self.store.clear();
                self.model.clear();
            }
            Operation::Flush => self.store.flush(CallOptions::default()).unwrap(),
        }
        let stats = self.store.stats();
        assert!(stats.pool.reserved_bytes <= stats.pool.capacity_bytes);
        if self.keeps_all {
            assert_eq!(stats.keys, self.model.len() as u64);
        }
    }
}

fn digest() -> impl Strategy<Value = DigestMode> {
    prop_oneof![
        Just(DigestMode::Off),
        Just(DigestMode::On(DigestAlgorithm::Blake3)),
        Just(DigestMode::On(DigestAlgorithm::Sha256)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn two_tiers_lose_no_block(
        operations in prop::collection::vec(operation(), 1..60),
        digest in digest(),
        is_through in any::<bool>(),
    ) {
        let stage = MapStage::new();
        let write = if is_through { WritePolicy::Through } else { WritePolicy::Back };
        let config = StoreConfig {
            pipeline: "Dram|Map".to_owned(), digest, write, dram_blocks: Some(4), ..dram(4)
        };
        let registry = stage.registry();
        let store = Store::open_with(config, &registry, Arc::new(SystemClock)).unwrap();
        let mut modeled = ModeledStore { store, model: HashMap::new(), keeps_all: true };
        // Without pins, which could fill the four blocks of DRAM; the other test has them.
        for operation in operations.iter().filter(|o| !matches!(o, Operation::Pin(_))) {
            modeled.play(operation);
        }
    }

    #[test]
    fn one_small_tier_may_evict_but_serves_no_wrong_byte(
        operations in prop::collection::vec(operation(), 1..60),
        digest in digest(),
    ) {
        let config = StoreConfig { digest, dram_blocks: Some(3), ..dram(4) };
        let store = Store::open(config).unwrap();
        let mut modeled = ModeledStore { store, model: HashMap::new(), keeps_all: false };
        for operation in &operations {
            modeled.play(operation);
        }
    }

    #[test]
    fn four_lower_tiers_lose_no_block_while_one_fails_and_one_drops_blocks(
        operations in prop::collection::vec(tiers_operation(), 1..60),
        digest in digest(),
    ) {
        let mut tiers = TieredStore::open(digest);
        for operation in &operations {
            tiers.play(operation);
        }
        tiers.check_all();
    }
}

/// An operation on a store with several lower tiers.
#[derive(Debug, Clone)]
enum TiersOperation {
    Store(Operation),
    /// A tier begins or ceases to fail.
    Fail(usize, bool),
    /// The first tier has room for this many bytes.
    Shrink(u64),
    Get(u64),
}

fn tiers_operation() -> impl Strategy<Value = TiersOperation> {
    let room = prop::sample::select(vec![300_000_u64, 400_000, 1_000_000]);
    prop_oneof![
        12 => operation().prop_map(TiersOperation::Store),
        2 => (0usize..3, any::<bool>()).prop_map(|(tier, fails)| TiersOperation::Fail(tier, fails)),
        1 => room.prop_map(TiersOperation::Shrink),
        3 => (0u64..12).prop_map(TiersOperation::Get),
    ]
}

/// A store over four map stages. The first three may fail, and the first drops blocks for room; the
/// last one keeps all blocks.
struct TieredStore {
    stages: [Arc<MapStage>; 4],
    modeled: ModeledStore,
}

impl TieredStore {
    fn open(digest: DigestMode) -> Self {
        let stages = [(); 4].map(|()| MapStage::new());
        stages[0].capacity_bytes.store(400_000, Relaxed);
        let mut registry = StageRegistry::default();
        for (at, stage) in stages.iter().enumerate() {
            let stage = Arc::clone(stage);
            registry.register(&format!("Map{at}"), Arc::new(move |_| Ok(stage.clone())));
        }
        let config = StoreConfig {
            pipeline: "Dram|Map0|Map1|Map2|Map3".to_owned(),
            digest,
            dram_blocks: Some(4),
            health: frequent_probes(),
            ..dram(4)
        };
        let store = Store::open_with(config, &registry, Arc::new(SystemClock)).unwrap();
        Self { stages, modeled: ModeledStore { store, model: HashMap::new(), keeps_all: true } }
    }

    fn play(&mut self, operation: &TiersOperation) {
        match operation {
            // Pins could fill the four blocks of DRAM, and a flush reports the tiers that fail.
            TiersOperation::Store(Operation::Pin(_)) => {}
            TiersOperation::Store(Operation::Flush) => {
                drop(self.modeled.store.flush(CallOptions::default()));
            }
            TiersOperation::Store(operation) => self.modeled.play(operation),
            TiersOperation::Fail(tier, fails) => self.stages[*tier].fails.store(*fails, Relaxed),
            TiersOperation::Shrink(bytes) => self.stages[0].capacity_bytes.store(*bytes, Relaxed),
            TiersOperation::Get(n) => self.get(*n),
        }
    }

    fn get(&self, n: u64) {
        let expected = self.modeled.model.get(&key(n));
        let mut buffer = vec![0; expected.map_or(1, Vec::len)];
        let mut buffers = [buffer.as_mut_slice()];
        let outcome =
            self.modeled.store.get(&[key(n)], &mut buffers, CallOptions::default()).pop().unwrap();
        match (outcome, expected) {
            (GetOutcome::Hit { .. }, Some(bytes)) => assert_eq!(buffer, *bytes),
            (GetOutcome::Miss, None) => {}
            (outcome, expected) => panic!("{outcome:?} of {:?} bytes", expected.map(Vec::len)),
        }
    }

    /// After a flush, the last tier has every block, under all of its keys.
    fn check_all(&self) {
        for stage in &self.stages {
            stage.fails.store(false, Relaxed);
        }
        drop(self.modeled.store.flush(CallOptions::default()));
        for n in 0..12 {
            self.modeled.view(n);
            self.get(n);
            let tiers = self.modeled.store.locate(&[key(n)]).remove(0);
            let is_known = self.modeled.model.contains_key(&key(n));
            assert_eq!((!tiers.is_empty(), self.stages[3].has(&key(n))), (is_known, is_known));
        }
    }
}
