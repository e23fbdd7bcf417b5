//! The ledger of a fixture is read, and a ledger serves pipelines with many tiers.
//!
//! The fixture has the words of a ledger that are not zero, one on a line: its number, and its
//! value in hexadecimal. The bytes of its blocks are a function of their keys.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::fmt::Write as _;
use std::io::Write as _;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use cascade_block::{BlockKey, checksum};
use cascade_runtime::SystemClock;
use cascade_store::stages::StageRegistry;
use cascade_store::{CallOptions, Put, Store, StoreConfig};

use crate::blocks::{bytes_of, check, keys, put};
use crate::named_pool::{config, directory, ledger, pool};
use crate::third_party::{MapStage, facts_of, flush};

const BLOCK: usize = 4096;
const BLOCKS: u64 = 6;
/// The block that is deleted from the fixture.
const DELETED: usize = 2;
/// The first stage's first address; those of the others are multiples.
const FIRST_ADDRESS: u64 = 100;
/// Words of the header that differ by file and boot, and their checksum.
const IDENTITY: std::ops::RangeInclusive<usize> = 6..=10;

/// Map stages with the names of a pipeline.
fn registry(stages: &[(&str, Arc<MapStage>)]) -> StageRegistry {
    let mut registry = StageRegistry::default();
    for (name, stage) in stages {
        let stage = Arc::clone(stage);
        registry.register(name, Arc::new(move |_| Ok(stage.clone())));
    }
    registry
}

fn open(directory: &Path, stages: &[(&str, Arc<MapStage>)]) -> Store {
    let names = stages.iter().map(|(name, _)| *name);
    let pipeline = std::iter::once("Dram").chain(names).collect::<Vec<_>>().join("|");
    let config = StoreConfig { pipeline, ..config(directory, 4) };
    Store::open_with(config, &registry(stages), Arc::new(SystemClock)).unwrap()
}

fn new_stages<'a>(names: &[&'a str]) -> Vec<(&'a str, Arc<MapStage>)> {
    let new = |(at, name): (usize, &&'a str)| {
        let stage = MapStage::new();
        stage.next.store(FIRST_ADDRESS * (1 + at as u64), Relaxed);
        (*name, stage)
    };
    names.iter().enumerate().map(new).collect()
}

/// A chain, its second half protected.
fn put_chain(store: &Store, chain: &[BlockKey]) {
    for (at, key) in chain.iter().enumerate() {
        let bytes = bytes_of(key, BLOCK);
        let put = Put {
            parent: at.checked_sub(1).map(|before| chain[before]),
            is_prefix: at >= chain.len() / 2,
            ..Put::new(*key, &bytes)
        };
        store.put(&[put], CallOptions::default());
        // One after the other, so that the addresses are those of the order.
        flush(store);
    }
}

/// The words of a ledger that are not zero, without those that identify its file and boot.
fn words_of(ledger: &Path) -> String {
    let bytes = std::fs::read(ledger).unwrap();
    let words = bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap()));
    let words = words.enumerate().filter(|(at, word)| *word != 0 && !IDENTITY.contains(at));
    let mut text = String::new();
    for (at, word) in words {
        writeln!(text, "{at} {word:016x}").unwrap();
    }
    text
}

/// Fills new files with the words of the fixture and the bytes of its blocks.
fn restore(directory: &Path, fixture: &str) {
    let store = open(directory, &[]);
    store.put(&[Put::new(keys(0..1)[0], b"so that the files are kept")], CallOptions::default());
    store.close().unwrap();
    drop(store);
    let ledger = ledger(directory);
    let before = std::fs::read(&ledger).unwrap();
    let mut words = vec![0; before.len() / 8];
    for at in IDENTITY {
        words[at] = u64::from_le_bytes(before[at * 8..at * 8 + 8].try_into().unwrap());
    }
    for line in fixture.lines() {
        let (at, word) = line.split_once(' ').unwrap();
        words[at.parse::<usize>().unwrap()] = u64::from_str_radix(word, 16).unwrap();
    }
    let bytes = |words: &[u64]| -> Vec<u8> { words.iter().flat_map(|w| w.to_le_bytes()).collect() };
    words[10] = u64::from(checksum(&bytes(&words[..10])));
    std::fs::write(&ledger, bytes(&words)).unwrap();
    let file = std::fs::File::options().write(true).open(pool(directory)).unwrap();
    // The records of blocks: 24 words each, behind a header of 512; a continuation has a flag.
    for record in words[512..].chunks_exact(24).take(1024).filter(|record| record[0] >> 32 == 1) {
        let key = BlockKey::from_bytes(bytes(&record[4..8]).try_into().unwrap());
        file.write_all_at(&bytes_of(&key, BLOCK), record[1]).unwrap();
    }
}

/// Over stages that have the blocks of the fixture, nothing is written again.
#[test]
fn a_ledger_of_version_3_is_read() {
    let directory = directory();
    restore(directory.path(), include_str!("../../../../testdata/ledger-3.words"));
    let names = ["One", "Two", "Three", "Four"];
    let stages = new_stages(&names);
    let chain = keys(0..BLOCKS);
    for (_, stage) in &stages {
        for (at, key) in chain.iter().enumerate() {
            stage.add_survivor(facts_of(key, BLOCK), bytes_of(key, BLOCK));
            if at == DELETED {
                // The stage has no block at this address any more.
                stage.survivors.lock().unwrap().pop();
            }
        }
    }
    for run in 2..4 {
        let store = open(directory.path(), &stages);
        flush(&store);
        let stats = store.stats();
        let warm = stats.warm.unwrap();
        assert_eq!((warm.recovered_blocks, warm.rejected_records, warm.runs), (5, 0, run));
        assert_eq!(stats.counters.demoted_blocks, 0, "the stages have all blocks");
        for (at, tiers) in store.locate(&chain).iter().enumerate() {
            let expected = if at == DELETED { 0 } else { 1 + names.len() };
            assert_eq!(tiers.len(), expected, "block {at}: {tiers:?}");
        }
        let found = check(&store, &chain);
        assert_eq!(found.iter().filter(|tier| **tier == Some("dram")).count(), 5);
        store.close().unwrap();
        drop(store);
        let deleted = &chain[DELETED];
        for (_, stage) in &stages {
            stage.restart();
            stage.survivors.lock().unwrap().retain(|(facts, _)| facts.key != *deleted);
        }
    }
}

/// Prints the fixture.
#[test]
#[ignore = "makes the fixture of a new version"]
fn print_the_words_of_a_ledger() {
    let directory = directory();
    let store = open(directory.path(), &new_stages(&["One", "Two", "Three", "Four"]));
    put_chain(&store, &keys(0..BLOCKS));
    store.delete(&keys(DELETED as u64..DELETED as u64 + 1));
    store.close().unwrap();
    drop(store);
    let words = words_of(&ledger(directory.path()));
    std::io::stdout().write_all(words.as_bytes()).unwrap();
}

/// Puts blocks over stages, and opens the store again over the stages in another order or number.
fn reopen_over(before: &[&str], after: &[&str], lost: Option<&str>) -> (u64, Vec<usize>) {
    let directory = directory();
    let stages = new_stages(before);
    let store = open(directory.path(), &stages);
    put(&store, &keys(0..20), BLOCK);
    flush(&store);
    store.close().unwrap();
    drop(store);
    for (name, stage) in &stages {
        if Some(*name) == lost {
            stage.lose_everything();
        }
        stage.restart();
    }
    let mut after = new_stages(after);
    for (name, stage) in &mut after {
        if let Some((_, known)) = stages.iter().find(|(known, _)| known == name) {
            *stage = Arc::clone(known);
        }
    }
    let store = open(directory.path(), &after);
    flush(&store);
    let found = check(&store, &keys(0..20));
    assert!(found.iter().all(|tier| *tier == Some("dram")), "{found:?}");
    let tiers = store.locate(&keys(0..20)).iter().map(Vec::len).collect();
    (store.stats().counters.demoted_blocks, tiers)
}

#[test]
fn blocks_in_many_tiers_are_not_written_again_after_a_restart() {
    let names = ["One", "Two", "Three", "Four", "Five", "Six", "Seven"];
    for count in [3, 4, 7] {
        let (written, tiers) = reopen_over(&names[..count], &names[..count], None);
        assert_eq!((written, tiers), (0, vec![1 + count; 20]), "{count} tiers");
    }
}

#[test]
fn only_the_tier_that_lost_its_blocks_gets_them_again() {
    let names = ["One", "Two", "Three", "Four"];
    for lost in names {
        let (written, tiers) = reopen_over(&names, &names, Some(lost));
        assert_eq!((written, tiers), (20, vec![5; 20]), "{lost}");
    }
}

/// The address in the first stage was taken for one in whichever stage was the first.
#[test]
fn stages_may_change_places_between_runs() {
    let (written, tiers) = reopen_over(&["One", "Two", "Three"], &["Three", "One", "Two"], None);
    assert_eq!((written, tiers), (0, vec![4; 20]));
    let (written, tiers) = reopen_over(&["One", "Two", "Three"], &["Three", "New", "One"], None);
    assert_eq!((written, tiers), (20, vec![4; 20]), "only the new tier lacks blocks");
    let (written, tiers) = reopen_over(&["One", "Two", "Three"], &["Three"], None);
    assert_eq!((written, tiers), (0, vec![2; 20]));
}
