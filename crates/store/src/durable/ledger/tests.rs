//! Addresses in many tiers: a kill at every store, pipelines that change, and damage.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use cascade_block::BlockKey;
use cascade_memory::{HugePages, PoolConfig};
use cascade_runtime::SystemClock;

use super::opening::{header_sum, is_complete};
use super::*;

const TIERS: [&str; 4] = ["one", "two", "three", "four"];
const UNIT: usize = 4096;

/// The addresses of each block, by its name; zero for none.
type Expected = BTreeMap<u8, [u64; 4]>;

#[derive(Debug, Clone, Copy)]
enum Operation {
    /// A block with addresses.
    Record(u8, [u64; 4]),
    Note(u8, usize, u64),
    Clear(u8),
}

const NONE: [u64; 4] = [0; 4];

const OPERATIONS: [Operation; 18] = [
    Operation::Record(1, NONE),
    Operation::Note(1, 0, 10),
    Operation::Note(1, 1, 11),
    Operation::Note(1, 2, 12),
    Operation::Note(1, 3, 13),
    Operation::Note(1, 1, 21),
    Operation::Note(1, 3, 23),
    Operation::Record(2, [30, 31, 32, 33]),
    Operation::Record(3, [40, 0, 0, 43]),
    Operation::Clear(2),
    // In the places of the second block.
    Operation::Record(4, NONE),
    Operation::Note(4, 3, 53),
    Operation::Note(4, 2, 52),
    // Again, as when a block is put under a key that has a record.
    Operation::Record(1, [60, 61, 62, 63]),
    Operation::Clear(3),
    Operation::Record(5, [0, 71, 0, 0]),
    Operation::Clear(4),
    Operation::Note(5, 2, 72),
];

fn config(mib: usize) -> PoolConfig {
    PoolConfig { capacity_bytes: mib << 20, huge_pages: HugePages::Never, populate: false }
}

fn names(stages: &[&str]) -> Vec<String> {
    stages.iter().map(|name| (*name).to_owned()).collect()
}

fn reopen(path: &Path, stages: &[&str]) -> WarmPool {
    open(path, &config(1), &names(stages), &SystemClock).expect("a small pool")
}

/// A directory, and the path of a pool in it.
fn new_pool() -> (tempfile::TempDir, PathBuf) {
    // In memory if possible: a test opens some hundred pools.
    let shared = tempfile::tempdir_in("/dev/shm");
    let directory = shared.or_else(|_| tempfile::tempdir()).expect("a directory");
    let path = directory.path().join("pool");
    (directory, path)
}

fn facts(name: u8) -> BlockFacts {
    BlockFacts {
        key: BlockKey::from_bytes([name; 32]),
        digest: None,
        parent: None,
        namespace: NamespaceId::default(),
        bytes: u32::try_from(UNIT).expect("a small block"),
        is_prefix: name.is_multiple_of(2),
        written_unix_ms: 0,
        expires_unix_ms: None,
    }
}

fn addresses(of: [u64; 4]) -> [Option<Address>; LOWER_STAGES_MAX] {
    std::array::from_fn(|at| of.get(at).filter(|address| **address != 0).map(|at| Address(*at)))
}

fn apply(ledger: &mut Ledger, slabs: &[Slab], operation: Operation) {
    let key = |name: u8| KeyIndex(u32::from(name));
    match operation {
        Operation::Record(name, at) => {
            ledger.record(key(name), &facts(name), true, &slabs[usize::from(name)], addresses(at));
        }
        Operation::Note(name, stage, at) => ledger.note_stored(key(name), stage, Address(at)),
        Operation::Clear(name) => ledger.clear(key(name)),
    }
}

fn expect(expected: &mut Expected, operation: Operation) {
    match operation {
        Operation::Record(name, at) => drop(expected.insert(name, at)),
        Operation::Note(name, stage, at) => {
            expected.get_mut(&name).expect("it was recorded")[stage] = at;
        }
        Operation::Clear(name) => drop(expected.remove(&name)),
    }
}

/// Applies all operations to a new pool; stores after the first `stores` are lost, as if the
/// process was killed. Returns the number of stores before each operation, and in all.
fn run(path: &Path, stores: u64) -> Vec<u64> {
    let mut warm = reopen(path, &TIERS);
    let slab = || warm.pool.allocate(UNIT).expect("a pool of many blocks").seal();
    let slabs: Vec<Slab> = (0..8).map(|_| slab()).collect();
    let mut counts = vec![0];
    let mut left = stores;
    for operation in OPERATIONS {
        kills::kill_after(left);
        apply(&mut warm.ledger, &slabs, operation);
        let after = kills::restart();
        counts.push(counts[counts.len() - 1] + left - after);
        left = after;
    }
    counts
}

/// The recovered blocks and their addresses.
fn recovered(warm: &WarmPool, stages: usize) -> BTreeMap<u8, Vec<u64>> {
    let of = |one: &Recovered| {
        let name = one.facts().key.as_bytes()[0];
        assert_eq!(*one.facts(), facts(name));
        let at = one.stored.iter().take(stages).map(|stored| stored.saturating_sub(1)).collect();
        (name, at)
    };
    warm.recovered.iter().map(of).collect()
}

fn check_kill(stores: u64, boundaries: &[u64]) {
    let (_directory, path) = new_pool();
    run(&path, stores);
    let warm = reopen(&path, &TIERS);
    assert_eq!(warm.stats.rejected_records, 0, "killed after {stores} stores");
    // The operation during which the process was killed.
    let (mut before, mut after) = (Expected::new(), Expected::new());
    for (operation, at) in OPERATIONS.iter().zip(boundaries) {
        if *at <= stores {
            before.clone_from(&after);
            expect(&mut after, *operation);
        }
    }
    let found = recovered(&warm, 4);
    for name in 1..=5 {
        let (before, after) = (before.get(&name), after.get(&name));
        let Some(found) = found.get(&name) else {
            assert!(before != after || before.is_none(), "block {name}, {stores} stores");
            continue;
        };
        assert!(before.is_some() || after.is_some(), "block {name}, {stores} stores");
        for (stage, found) in found.iter().enumerate() {
            let allowed = [before, after].map(|block| block.map_or(0, |at| at[stage]));
            let is_lost = *found == 0 && before != after;
            assert!(
                allowed.contains(found) || is_lost,
                "block {name}, stage {stage}, {stores} stores: {found} of {allowed:?}"
            );
        }
    }
    let continuations = warm.recovered.iter().filter(|one| one.continuation.is_some()).count();
    assert_eq!(
        warm.ledger.free.len(),
        1024 - warm.recovered.len() - continuations,
        "no place lost"
    );
}

#[test]
fn a_kill_at_any_store_loses_at_most_what_it_was_storing() {
    let (_directory, path) = new_pool();
    let boundaries = run(&path, u64::MAX);
    let all = boundaries[boundaries.len() - 1];
    assert!(all > 100, "{all} stores");
    for stores in 0..=all {
        check_kill(stores, &boundaries);
    }
    let mut expected = Expected::new();
    for operation in OPERATIONS {
        expect(&mut expected, operation);
    }
    let found = recovered(&reopen(&path, &TIERS), 4);
    assert!(
        found
            .iter()
            .map(|(name, at)| (*name, at.as_slice()))
            .eq(expected.iter().map(|(name, at)| (*name, at.as_slice())))
    );
}

#[test]
fn a_restart_reuses_the_places_of_cleared_continuations() {
    let (_directory, path) = new_pool();
    run(&path, u64::MAX);
    let mut warm = reopen(&path, &TIERS);
    for one in std::mem::take(&mut warm.recovered) {
        let key = KeyIndex(u32::from(one.facts().key.as_bytes()[0]));
        warm.ledger.keep(key, &one);
        warm.ledger.note_stored(key, 3, Address(99));
        warm.ledger.clear(key);
    }
    assert_eq!(warm.ledger.free.len(), 1024);
    drop(warm);
    assert_eq!(recovered(&reopen(&path, &TIERS), 4), BTreeMap::new());
}

#[test]
fn a_header_is_complete_only_with_this_version_and_its_checksum() {
    let header = |version| [MAGIC, version, 3, 4, 5, 6, 7, 8, 9, 10];
    let sum = |version| header_sum(&header(version));
    assert!(is_complete(&header(VERSION), sum(VERSION)));
    for (version, sum) in [(2, sum(2)), (4, sum(4)), (VERSION, sum(2)), (VERSION, 0)] {
        assert!(!is_complete(&header(version), sum), "version {version}");
    }
}

#[test]
fn an_address_belongs_to_a_tier_by_its_name() {
    let (_directory, path) = new_pool();
    run(&path, u64::MAX);
    let of_first = |stages: &[&str]| recovered(&reopen(&path, stages), stages.len())[&1].clone();
    assert_eq!(of_first(&TIERS), [60, 61, 62, 63]);
    assert_eq!(of_first(&["four", "one", "three", "two"]), [63, 60, 62, 61]);
    // Tiers that a pipeline leaves out are forgotten, and their places are used by new ones.
    assert_eq!(of_first(&["four", "two", "five"]), [63, 61, 0]);
    for _ in 0..2 {
        assert_eq!(of_first(&TIERS), [0, 61, 0, 63]);
    }
    assert!(of_first(&[]).is_empty());
    assert_eq!(of_first(&TIERS), NONE);
}

#[test]
fn a_record_moves_between_pipelines_of_different_lengths() {
    let (_directory, path) = new_pool();
    run(&path, u64::MAX);
    let seven = ["a", "b", "c", "d", "e", "f", "g"];
    let mut warm = reopen(&path, &seven);
    for one in std::mem::take(&mut warm.recovered) {
        let key = KeyIndex(u32::from(one.facts().key.as_bytes()[0]));
        warm.ledger.keep(key, &one);
        for stage in 0..seven.len() {
            warm.ledger.note_stored(key, stage, Address(80 + stage as u64));
        }
    }
    drop(warm);
    for found in recovered(&reopen(&path, &seven), 7).values() {
        assert_eq!(*found, [80, 81, 82, 83, 84, 85, 86]);
    }
    for found in recovered(&reopen(&path, &["g", "a"]), 2).values() {
        assert_eq!(*found, [86, 80]);
    }
}

#[test]
fn a_flipped_bit_loses_an_address_and_gives_no_other_one() {
    let (_directory, path) = new_pool();
    run(&path, u64::MAX);
    let warm = reopen(&path, &TIERS);
    let expected = recovered(&warm, 4);
    let first = warm.recovered.iter().find(|one| one.facts().key.as_bytes()[0] == 1);
    let (place, continuation) = first.map(|one| (one.place, one.continuation)).expect("block 1");
    drop(warm);
    let bytes = |place: u32| (HEADER_WORDS + place as usize * BLOCK_WORDS) * 8;
    let record = bytes(place) + 19 * 8..bytes(place) + 24 * 8;
    let continuation = bytes(continuation.expect("it has one"));
    let ledger = path.with_file_name("pool.ledger");
    let whole = std::fs::read(&ledger).expect("the ledger");
    let (mut lost, mut rejected) = (0, 0);
    // The record's words behind its checksum, the continuation, and the names of the tiers.
    for at in record.chain(continuation..continuation + BLOCK_WORDS * 8).chain(128..160) {
        let mut damaged = whole.clone();
        damaged[at] ^= 1 << (at % 8);
        // In place: the pool's lock and rights are those of the file.
        std::fs::write(&ledger, damaged).expect("the ledger");
        let warm = reopen(&path, &TIERS);
        let found = recovered(&warm, 4);
        assert_eq!(found.len(), expected.len(), "byte {at}");
        rejected += warm.stats.rejected_records;
        for (name, found) in &found {
            for (found, right) in found.iter().zip(&expected[name]) {
                assert!(found == right || *found == 0, "byte {at}: {found} instead of {right}");
                lost += u64::from(found != right);
            }
        }
    }
    assert!(lost > 50 && rejected > 8, "{lost} addresses lost, {rejected} records rejected");
}

#[test]
fn without_a_free_place_the_addresses_of_slow_tiers_are_not_recorded() {
    let (_directory, path) = new_pool();
    let mut warm = reopen(&path, &TIERS);
    let slab = warm.pool.allocate(UNIT).expect("a pool of many blocks").seal();
    warm.ledger.free.truncate(1);
    let slabs = vec![slab.clone(), slab];
    apply(&mut warm.ledger, &slabs, Operation::Record(1, [1, 2, 3, 4]));
    apply(&mut warm.ledger, &slabs, Operation::Note(1, 3, 5));
    apply(&mut warm.ledger, &slabs, Operation::Note(1, 0, 6));
    drop((warm, slabs));
    assert_eq!(recovered(&reopen(&path, &TIERS), 4)[&1], [6, 2, 0, 0]);
}
