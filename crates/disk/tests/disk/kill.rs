//! After `kill -9` of a writing process every block that it acknowledged is recovered and right.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]
#![expect(
    clippy::disallowed_methods,
    reason = "the child reads its parameters from its environment"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;

use cascade_disk::conformance::{StoredBlock, assert_hits, block, deadline, key, open, pool};
use cascade_disk::{DiskError, FilesConfig, SegmentFiles};
use cascade_memory::Pool;
use cascade_runtime::SystemClock;
use cascade_tier::tier::Tier as _;

use crate::child_test;

const DIRECTORY: &str = "CASCADE_TEST_KILL_DIRECTORY";
const FIRST: &str = "CASCADE_TEST_KILL_FIRST";
const BATCH: &str = "CASCADE_TEST_KILL_BATCH";
/// Blocks of a small batch, and of one that fills more than a segment: while it is written, full
/// segments are sealed and new ones created.
const BATCHES: [u64; 2] = [8, 64];

fn config(directory: &Path) -> FilesConfig {
    FilesConfig { capacity_bytes: 16 << 20, segment_bytes: 2 << 20, ..FilesConfig::new(directory) }
}

fn length(number: u64) -> usize {
    [300, 4096, 20_000, 65_536, 131_072][usize::try_from(number % 5).unwrap()]
}

/// Prints an event for the parent and flushes it before anything else happens.
fn report_event(word: &str, number: u64) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "\n{word} {number}").unwrap();
    out.flush().unwrap();
}

/// Not a test: the child process, which runs until it is killed.
#[test]
#[ignore = "run by no_block_is_lost_or_wrong_after_a_kill in a child process"]
fn child() {
    let (Some(directory), Some(first)) = (std::env::var_os(DIRECTORY), std::env::var_os(FIRST))
    else {
        return;
    };
    let pool = pool();
    let config = config(Path::new(&directory));
    let (files, _) = open(config, Arc::new(SystemClock), &pool, deadline()).unwrap();
    let first: u64 = first.to_str().unwrap().parse().unwrap();
    report_event("open", u64::from(std::process::id()));
    let batch: u64 = std::env::var(BATCH).unwrap().parse().unwrap();
    for start in (first..).step_by(usize::try_from(batch).unwrap()) {
        write_batch(files.as_ref(), &pool, start..start + batch);
    }
}

fn write_batch(files: &SegmentFiles, pool: &Pool, numbers: std::ops::Range<u64>) {
    let start = numbers.start;
    let mut open: Vec<u64> = numbers.collect();
    while !open.is_empty() {
        let batch = open.iter().map(|&number| block(pool, number, length(number))).collect();
        let results = files.append(batch, deadline());
        let mut refused = Vec::new();
        for (&number, result) in open.iter().zip(results) {
            match result {
                Ok(address) => {
                    report_event("stored", number);
                    if number.is_multiple_of(7) {
                        report_event("removing", number);
                        files.remove(&[(key(number), address)], deadline()).unwrap();
                        report_event("removed", number);
                    }
                }
                Err(DiskError::Full { .. }) => refused.push(number),
                Err(error) => panic!("block {number}: {error:?}"),
            }
        }
        if !refused.is_empty() {
            let keep = &mut |meta: &cascade_disk::BlockFacts, _| {
                if meta.is_prefix && meta.written_unix_ms + 40 > start {
                    return true;
                }
                report_event("removing", meta.written_unix_ms);
                false
            };
            files.reclaim(keep, deadline()).unwrap();
        }
        open = refused;
    }
    if start.is_multiple_of(64) {
        files.checkpoint(deadline()).unwrap();
    }
}

/// The events that the parent received: stored blocks, until their removal begins, and removed
/// blocks.
#[derive(Default)]
struct ReceivedEvents {
    stored: BTreeSet<u64>,
    removed: BTreeSet<u64>,
    last: u64,
}

fn kill_after(directory: &Path, batch: u64, lines: usize, events: &mut ReceivedEvents) {
    let mut child = child_test::command(module_path!(), "child")
        .env(DIRECTORY, directory)
        .env(FIRST, (events.last + 64).next_multiple_of(64).to_string())
        .env(BATCH, batch.to_string())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut event_count = 0;
    for line in output.by_ref() {
        let is_event = parse_event(&line.unwrap(), events);
        event_count += usize::from(is_event);
        if event_count == lines {
            child.kill().unwrap();
        }
    }
    child.wait().unwrap();
    assert!(event_count >= lines, "the child ended by itself after {event_count} events");
}

fn parse_event(line: &str, events: &mut ReceivedEvents) -> bool {
    let Some((word, Ok(number))) =
        line.split_once(' ').map(|(word, number)| (word, number.parse::<u64>()))
    else {
        return false;
    };
    match word {
        "stored" => {
            events.stored.insert(number);
            events.last = events.last.max(number);
        }
        "removing" => drop(events.stored.remove(&number)),
        "removed" => drop(events.removed.insert(number)),
        "open" => {}
        _ => return false,
    }
    true
}

fn rounds(count: usize) {
    let directory = tempfile::tempdir().unwrap();
    let pool = pool();
    let mut events = ReceivedEvents::default();
    for round in 0..count {
        // From the first events to several times the capacity.
        let batch = BATCHES[round % BATCHES.len()];
        kill_after(directory.path(), batch, 1 + round * 37 % 400, &mut events);
        let config = config(directory.path());
        let (files, recovery) = open(config, Arc::new(SystemClock), &pool, deadline()).unwrap();
        let live: BTreeMap<u64, StoredBlock> = recovery
            .live
            .iter()
            .map(|(meta, address)| {
                let number = meta.written_unix_ms;
                (number, StoredBlock { number, length: length(number), address: *address })
            })
            .collect();
        let all: Vec<_> = live.values().copied().collect();
        assert_hits(files.as_ref(), &pool, &all);
        let lost: Vec<_> = events.stored.iter().filter(|each| !live.contains_key(each)).collect();
        assert!(lost.is_empty(), "round {round}: acknowledged but lost: {lost:?}");
        let back: Vec<_> = events.removed.iter().filter(|each| live.contains_key(each)).collect();
        assert!(back.is_empty(), "round {round}: removed but recovered: {back:?}");
        // Blocks that were recovered without acknowledgement must be kept from now on.
        events.stored = live.keys().copied().collect();
        events.last = events.last.max(live.keys().last().copied().unwrap_or(0));
    }
}

#[test]
fn no_block_is_lost_or_wrong_after_a_kill() {
    rounds(20);
}

#[test]
#[ignore = "takes minutes; the build server runs it"]
fn no_block_is_lost_or_wrong_after_two_hundred_kills() {
    rounds(200);
}

#[test]
fn the_error_for_a_second_writer_names_the_process_of_the_first() {
    let directory = tempfile::tempdir().unwrap();
    let mut child = child_test::command(module_path!(), "child")
        .env(DIRECTORY, directory.path())
        .env(FIRST, "0")
        .env(BATCH, "8")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let is_open = lines.any(|line| line.unwrap().starts_with("open "));
    assert!(is_open);
    let pool = pool();
    let second = config(directory.path());
    let error = open(second.clone(), Arc::new(SystemClock), &pool, deadline()).expect_err("locked");
    assert!(
        matches!(error, DiskError::Locked { pid: Some(pid), .. } if pid == child.id()),
        "{error:?}"
    );
    let other = FilesConfig { writer: cascade_disk::WriterName::new("w1").unwrap(), ..second };
    let (files, recovery) = open(other, Arc::new(SystemClock), &pool, deadline()).unwrap();
    assert!(recovery.live.is_empty(), "each writer has its own files");
    let stored = cascade_disk::conformance::append(files.as_ref(), &pool, &[(1, 4096)]);
    assert_hits(files.as_ref(), &pool, &stored);
    child.kill().unwrap();
    drop(lines);
    child.wait().unwrap();
}
