//! A writing process killed with SIGKILL at random points, again and again on one directory.
//!
//! 20 rounds by default; the slow gate runs 200 with `CASCADE_KILL_ROUNDS=200`. A failure means
//! that a restart served a wrong byte, lost a flushed block, or hung.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Duration;

use cascade_store::{CallOptions, FilesConfig, PutOutcome, Store, StoreConfig};

use crate::blocks::{MIB, check, dram, keys, put};
use crate::child_test;

const BLOCK: usize = 48 << 10;
const KEYS: u64 = 400;
const DIRECTORY: &str = "CASCADE_KILL_DIRECTORY";

#[expect(clippy::disallowed_methods, reason = "the gate and the child are configured by variables")]
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

fn open(directory: &Path) -> Store {
    let files =
        FilesConfig { capacity_bytes: 16 * MIB, segment_bytes: MIB, ..FilesConfig::new(directory) };
    let config = StoreConfig { pipeline: "Dram|Files".to_owned(), files: Some(files), ..dram(4) };
    Store::open(config).unwrap()
}

/// The child: writes, deletes and flushes until it is killed. Reports which block a flush covered.
#[test]
#[ignore = "runs as the child of the test below"]
fn write_until_killed() {
    let Some(directory) = variable(DIRECTORY) else { return };
    let store = open(Path::new(&directory));
    let start = u64::from(std::process::id()) * 7919 % KEYS;
    for at in start.. {
        let key = at % KEYS;
        let outcome = put(&store, &keys(key..key + 1), BLOCK).remove(0);
        if at % 13 == 0 {
            store.delete(&keys(key..key + 1));
        } else if at % 17 == 0 {
            store.flush(CallOptions::default()).unwrap();
            // A block of an earlier round may be the next that the full tier reclaims; a block of
            // this round is the last.
            if matches!(outcome, PutOutcome::Stored) {
                // Flushed to the pipe at once, and only after the store's flush has returned.
                report(key);
            }
        }
    }
}

fn report(key: u64) {
    use std::io::Write;
    let mut out = std::io::stdout().lock();
    writeln!(out, "\nflushed {key}").and_then(|()| out.flush()).unwrap();
}

fn start(directory: &Path) -> Child {
    child_test::command(module_path!(), "write_until_killed")
        .env(DIRECTORY, directory)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

#[test]
#[expect(clippy::disallowed_methods, reason = "the kill comes at a random moment of real time")]
fn blocks_after_a_kill_have_the_right_bytes_and_flushed_blocks_survive() {
    let rounds = variable("CASCADE_KILL_ROUNDS").map_or(20, |text| text.parse().unwrap());
    let directory = tempfile::tempdir().unwrap();
    let mut random = u64::from(std::process::id());
    let (mut found, mut promised) = (0, 0);
    for round in 0..rounds {
        let mut child = start(directory.path());
        let mut lines = BufReader::new(child.stdout.take().unwrap())
            .lines()
            .map_while(Result::ok)
            .filter_map(|line| line.strip_prefix("flushed ")?.parse::<u64>().ok());
        // On a busy machine, a child may not come to its first flush in the time of a round.
        let first = if round % 4 == 0 { lines.next() } else { None };
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let delay = Duration::from_millis(20 + (random >> 33) % 200);
        std::thread::sleep(delay);
        child.kill().unwrap();
        child.wait().unwrap();
        let store = open(directory.path());
        // `check` compares every byte of every block that is served.
        found += check(&store, &keys(0..KEYS)).iter().filter(|tier| tier.is_some()).count();
        if let Some(last) = lines.last().or(first) {
            promised += 1;
            let tier = check(&store, &keys(last..last + 1))[0];
            assert!(tier.is_some(), "block {last} was flushed before the kill");
        }
        assert_eq!(store.stats().counters.damaged_blocks, 0, "a torn record is skipped, not read");
    }
    assert!(found > 0 && promised > 0, "{found} blocks found, {promised} rounds with a flush");
}
