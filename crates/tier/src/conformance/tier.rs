//! Conformance checks of stages, for the built-in ones and for third parties'.
//!
//! Each check takes a new stage and panics with a description of the failure. Call [`all`] from a
//! test.

use std::sync::Arc;
use std::time::Duration;

use cascade_block::{BlockKey, NamespaceId};
use cascade_memory::{HugePages, Pool, PoolConfig, Slab};
use cascade_runtime::{Deadline, SystemClock};

use crate::tier::{Address, BlockFacts, Load, LoadOutcome, Tier};

/// The stage and the pool of one check.
#[derive(Debug)]
pub struct TierFixture<'a> {
    /// A new stage.
    pub stage: Arc<dyn Tier>,
    /// The pool for slabs, which the stage was made with.
    pub pool: &'a Pool,
}

/// A pool for the checks, as a store would make it.
///
/// # Panics
/// If 32 MiB of memory cannot be allocated.
pub fn pool() -> Pool {
    let config =
        PoolConfig { capacity_bytes: 32 << 20, huge_pages: HugePages::Never, populate: false };
    Pool::new(&config).expect("32 MiB of shared memory for a test")
}

/// Runs every check, each on a new stage.
pub fn all(pool: &Pool, make: &mut dyn FnMut() -> Arc<dyn Tier>) {
    let checks: [fn(&TierFixture<'_>); 8] = [
        a_new_stage_is_empty,
        a_stored_block_loads_back,
        blocks_of_any_size_load_back,
        an_empty_batch_succeeds,
        a_removed_block_is_gone,
        a_wrong_key_is_never_a_hit,
        bytes_are_removed_with_their_last_name,
        a_name_has_the_bytes_of_its_address,
    ];
    for check in checks {
        check(&TierFixture { stage: make(), pool });
    }
}

impl TierFixture<'_> {
    fn store(&self, blocks: &[(BlockKey, Vec<u8>)]) -> Vec<Address> {
        let batch: Vec<_> = blocks
            .iter()
            .map(|(key, bytes)| (facts(*key, bytes.len()), self.slab(bytes)))
            .collect();
        let results = self.stage.store(batch, deadline());
        assert_eq!(results.len(), blocks.len(), "one result for each block");
        let expect = "a fresh stage takes a few blocks";
        results.into_iter().map(|result| result.expect(expect)).collect()
    }

    fn slab(&self, bytes: &[u8]) -> Slab {
        let mut slab = self.pool.allocate(bytes.len()).expect("the checks fit the pool");
        slab.fill_from(bytes).expect("host memory never fails");
        slab.seal()
    }

    fn load(&self, key: BlockKey, address: Address, bytes: usize) -> LoadOutcome {
        let slab = self.pool.allocate(bytes).expect("the checks fit the pool");
        let mut loaded = self.stage.load(vec![Load { key, address, slab }], deadline());
        assert_eq!(loaded.len(), 1, "one result for each block");
        loaded.remove(0)
    }

    fn assert_served(&self, key: BlockKey, address: Address, bytes: &[u8]) {
        match self.load(key, address, bytes.len()) {
            LoadOutcome::Hit(slab) => {
                assert!(slab.host() == Some(bytes), "{key} came back with other bytes");
            }
            LoadOutcome::Gone if self.stage.keeps_names_only() => {}
            other => panic!("{key} was stored and is {other:?}"),
        }
    }

    fn assert_gone(&self, key: BlockKey, address: Address, bytes: usize) {
        let loaded = self.load(key, address, bytes);
        assert!(matches!(loaded, LoadOutcome::Gone), "{key} is not here and is {loaded:?}");
    }
}

fn deadline() -> Deadline {
    Deadline::after(&SystemClock, Duration::from_secs(30))
}

fn facts(key: BlockKey, bytes: usize) -> BlockFacts {
    BlockFacts {
        key,
        digest: None,
        parent: None,
        namespace: NamespaceId::default(),
        bytes: u32::try_from(bytes).expect("a small block"),
        is_prefix: false,
        written_unix_ms: 0,
        expires_unix_ms: None,
    }
}

/// Block `n`: a unique key and unique bytes.
fn block(n: u8, bytes: usize) -> (BlockKey, Vec<u8>) {
    let period: Vec<u8> = (0..251).map(|at| n ^ at).collect();
    let pattern = period.into_iter().cycle().take(bytes).collect();
    (BlockKey::from_bytes([n; 32]), pattern)
}

fn a_new_stage_is_empty(fixture: &TierFixture<'_>) {
    assert_eq!(fixture.stage.recover(), []);
    assert_eq!(fixture.stage.stats().damaged_blocks, 0);
}

fn a_stored_block_loads_back(fixture: &TierFixture<'_>) {
    let blocks: Vec<_> = (0..40).map(|n| block(n, 64 << 10)).collect();
    let addresses = fixture.store(&blocks);
    for ((key, bytes), address) in blocks.iter().zip(&addresses).rev() {
        fixture.assert_served(*key, *address, bytes);
    }
    fixture.stage.flush(deadline()).expect("a stage that works flushes");
    for ((key, bytes), address) in blocks.iter().zip(&addresses) {
        fixture.assert_served(*key, *address, bytes);
    }
}

fn blocks_of_any_size_load_back(fixture: &TierFixture<'_>) {
    let sizes = [1, 2, 511, 512, 513, 4095, 4096, 4097, 65_535, 65_537, 1_000_003];
    let blocks: Vec<_> = (0u8..).zip(sizes).map(|(n, size)| block(n, size)).collect();
    let addresses = fixture.store(&blocks);
    for ((key, bytes), address) in blocks.iter().zip(&addresses) {
        fixture.assert_served(*key, *address, bytes);
    }
}

fn an_empty_batch_succeeds(fixture: &TierFixture<'_>) {
    assert!(fixture.stage.store(Vec::new(), deadline()).is_empty());
    assert!(fixture.stage.load(Vec::new(), deadline()).is_empty());
    fixture.stage.remove(&[], deadline()).expect("nothing to forget");
    fixture.stage.alias(Vec::new(), deadline()).expect("nothing to name");
}

fn a_removed_block_is_gone(fixture: &TierFixture<'_>) {
    let blocks = [block(1, 5000), block(2, 5000)];
    let addresses = fixture.store(&blocks);
    fixture.stage.remove(&[(blocks[0].0, addresses[0])], deadline()).expect("it is there");
    fixture.assert_gone(blocks[0].0, addresses[0], 5000);
    fixture.assert_served(blocks[1].0, addresses[1], &blocks[1].1);
}

fn a_wrong_key_is_never_a_hit(fixture: &TierFixture<'_>) {
    let blocks = [block(1, 5000)];
    let addresses = fixture.store(&blocks);
    let loaded = fixture.load(BlockKey::from_bytes([9; 32]), addresses[0], 5000);
    let is_refused = matches!(loaded, LoadOutcome::Gone | LoadOutcome::Damaged);
    assert!(is_refused, "a key that was never stored is {loaded:?}");
    let loaded = fixture.load(blocks[0].0, Address(u64::MAX - 1), 5000);
    assert!(!matches!(loaded, LoadOutcome::Hit(_)), "an address that was never given out is a hit");
}

fn bytes_are_removed_with_their_last_name(fixture: &TierFixture<'_>) {
    let blocks = [block(1, 5000)];
    let addresses = fixture.store(&blocks);
    let other = BlockKey::from_bytes([7; 32]);
    let alias = vec![(facts(other, 5000), addresses[0])];
    fixture.stage.alias(alias, deadline()).expect("the bytes are there");
    fixture.assert_served(other, addresses[0], &blocks[0].1);
    fixture.stage.remove(&[(blocks[0].0, addresses[0])], deadline()).expect("it is there");
    fixture.assert_served(other, addresses[0], &blocks[0].1);
    fixture.stage.remove(&[(other, addresses[0])], deadline()).expect("it is there");
    fixture.assert_gone(other, addresses[0], 5000);
}

/// A key that was deleted and added again has two addresses until the removal of the first arrives.
fn a_name_has_the_bytes_of_its_address(fixture: &TierFixture<'_>) {
    let blocks = [block(1, 5000), block(2, 5000)];
    let addresses = fixture.store(&blocks);
    let (key, later) = (blocks[0].0, &blocks[1].1);
    let alias = vec![(facts(key, 5000), addresses[1])];
    fixture.stage.alias(alias, deadline()).expect("the bytes are there");
    let loaded = fixture.load(key, addresses[0], 5000);
    let is_later = matches!(&loaded, LoadOutcome::Hit(slab) if slab.host() == Some(later));
    assert!(!is_later, "the bytes of another address");
    fixture.stage.remove(&[(key, addresses[0])], deadline()).expect("it is there");
    fixture.assert_served(key, addresses[1], later);
    fixture.assert_served(blocks[1].0, addresses[1], later);
    fixture.assert_gone(key, addresses[0], 5000);
}
