//! Warm restart: a store recovers the DRAM of its killed predecessor.
//!
//! 100 rounds of SIGKILL by default; the slow gate runs more with `CASCADE_KILL_ROUNDS`. A failure
//! means that a restart served a wrong byte, lost blocks of DRAM, or reused memory that another
//! process could still access.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use cascade_block::{BlockKey, DigestAlgorithm, DigestMode};
use cascade_runtime::{Clock, SystemClock};
use cascade_store::{
    CallOptions, FilesConfig, HeldPiece, Process, Put, PutOutcome, Store, StoreConfig, StoreError,
    ViewOutcome,
};

use crate::blocks::{MIB, bytes_of, check, keys, put, wait_until};
use crate::child_test;
use crate::named_pool::{config, directory, pool, warm};
use crate::third_party::MapStage;

const BLOCK: usize = 48 << 10;
const KEYS: u64 = 400;
/// Blocks of 128 KiB: a pool of 4 GiB less what its magazines may cache.
const FOUR_GIB_BLOCKS: u64 = 32_700;
const DIRECTORY: &str = "CASCADE_WARM_DIRECTORY";
const ROLE: &str = "CASCADE_WARM_ROLE";

#[expect(clippy::disallowed_methods, reason = "the gate and the child are configured by variables")]
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

fn with_files(directory: &Path, mib: u64) -> StoreConfig {
    let capacity_bytes = 64 * MIB;
    let files = FilesConfig {
        capacity_bytes,
        segment_bytes: MIB,
        ..FilesConfig::new(directory.join("files"))
    };
    let pipeline = "Dram|Files".to_owned();
    StoreConfig { pipeline, files: Some(files), ..config(directory, mib) }
}

/// The child: runs its role until it is killed.
#[test]
#[ignore = "runs as the child of the tests below"]
fn child() {
    let (Some(directory), Some(role)) = (variable(DIRECTORY), variable(ROLE)) else { return };
    let directory = Path::new(&directory);
    match role.as_str() {
        "write" => write_and_delete(&Store::open(config(directory, 8)).unwrap()),
        "write-files" => write_and_delete(&Store::open(with_files(directory, 8)).unwrap()),
        "write-digests" => {
            let digest = DigestMode::On(DigestAlgorithm::Blake3);
            let config = StoreConfig { digest, ..config(directory, 8) };
            write_and_delete(&Store::open(config).unwrap());
        }
        "fill" => fill_and_wait(directory),
        "fill-4gib" => fill_four_gibibytes(directory),
        "hold" => hold_and_wait(directory),
        "load" => load_and_wait(directory),
        "dirty" => dirty_and_wait(directory),
        _ => panic!("no such role: {role}"),
    }
}

/// Two sizes, so that reused memory overlaps several earlier blocks.
fn length(key: u64) -> usize {
    if key.is_multiple_of(3) { 20_000 } else { BLOCK }
}

fn write_and_delete(store: &Store) {
    let start = u64::from(std::process::id()) * 7919 % KEYS;
    report("started");
    for at in start.. {
        let key = at % KEYS;
        put(store, &keys(key..key + 1), length(key));
        if at % 13 == 0 {
            store.delete(&keys(key..key + 1));
        }
        if at % 7 == 0 {
            // The same bytes under a second name: a second record of the same slab.
            let twin = bytes_of(&keys(key..key + 1)[0], length(key));
            let name = keys(KEYS + key..KEYS + key + 1)[0];
            store.put(&[Put::new(name, &twin)], CallOptions::default());
        }
        if at % 11 == 0 {
            store.view(&keys(at * 5 % KEYS..at * 5 % KEYS + 1), CallOptions::default());
        }
    }
}

fn fill_and_wait(directory: &Path) {
    let store = Store::open(config(directory, 64)).unwrap();
    put(&store, &keys(0..1000), BLOCK);
    report("full");
    wait();
}

/// Holds a block that is then deleted and a reservation, on behalf of the configured process.
fn hold_and_wait(directory: &Path) {
    let store = Store::open(config(directory, 4)).unwrap();
    let text = std::fs::read_to_string(directory.join("holder")).unwrap();
    let holder = Process::of(text.parse().unwrap()).unwrap();
    put(&store, &keys(0..40), BLOCK);
    let views = store.view(&keys(0..2), CallOptions::default());
    let slabs = views.iter().map(|view| match view {
        ViewOutcome::Hit { slab, .. } => slab,
        other => panic!("{other:?}"),
    });
    let mut pieces: Vec<_> = slabs.map(HeldPiece::lease).collect();
    let mut reserved = store.reserve(BLOCK, CallOptions::default()).unwrap();
    reserved.host_mut().unwrap().fill(0xA5);
    pieces.push(HeldPiece::reservation(&reserved));
    let mut ids = Vec::new();
    store.record_held(&pieces, holder, &mut ids).unwrap();
    assert_eq!(store.delete(&keys(0..1)), [true]);
    report(&reserved.offset().to_string());
    wait();
}

/// Dies while a stage reads into a slab of the pool.
fn load_and_wait(directory: &Path) {
    let stage = MapStage::new();
    let config = StoreConfig { pipeline: "Dram|Map".to_owned(), ..config(directory, 4) };
    let store = Store::open_with(config, &stage.registry(), Arc::new(SystemClock)).unwrap();
    put(&store, &keys(0..100), BLOCK);
    store.flush(CallOptions::default()).unwrap();
    let below = keys(0..100).into_iter().find(|key| store.locate(&[*key]) == [["map"]]).unwrap();
    stage.delay_ms.store(600_000, Relaxed);
    std::thread::scope(|scope| {
        scope.spawn(|| store.view(&[below], CallOptions::default()));
        wait_until("the stage loads", || stage.loads.load(Relaxed) > 0);
        report("loading");
        wait();
    });
}

fn dirty_and_wait(directory: &Path) {
    let budget = Some(1);
    let config = StoreConfig { mover_bytes_per_second: budget, ..with_files(directory, 8) };
    let store = Store::open(config).unwrap();
    put(&store, &keys(0..20), BLOCK);
    report("dirty");
    wait();
}

#[expect(clippy::disallowed_methods, reason = "it waits to be killed")]
fn wait() {
    std::thread::sleep(Duration::from_secs(600));
}

fn report(text: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "\nreport {text}").and_then(|()| out.flush()).unwrap();
}

struct Running {
    child: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Running {
    fn start(directory: &Path, role: &str) -> Self {
        let mut child = child_test::command(module_path!(), "child")
            .env(DIRECTORY, directory)
            .env(ROLE, role)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines }
    }

    fn report(&mut self) -> String {
        let mut lines = self.lines.by_ref().map_while(Result::ok);
        lines.find_map(|line| line.strip_prefix("report ").map(str::to_owned)).unwrap()
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// Checks that every served block has the bytes of its key, or of the first name for second names.
fn check_all(store: &Store) -> usize {
    let found = check(store, &keys(0..KEYS)).iter().filter(|tier| tier.is_some()).count();
    for (first, second) in keys(0..KEYS).iter().zip(keys(KEYS..2 * KEYS)) {
        let view = store.view(&[second], CallOptions::default()).remove(0);
        if let ViewOutcome::Hit { slab, .. } = view {
            assert!(
                slab.host() == Some(&bytes_of(first, slab.len())[..]),
                "wrong bytes for a second name"
            );
        }
    }
    found
}

#[expect(clippy::disallowed_methods, reason = "the kill comes at a random moment of real time")]
fn kill_rounds(role: &str, open: impl Fn(&Path) -> StoreConfig, rounds: u64) {
    let directory = directory();
    let mut random = u64::from(std::process::id());
    let (mut recovered, mut found) = (0, 0);
    for _ in 0..rounds {
        let mut running = Running::start(directory.path(), role);
        running.report();
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        std::thread::sleep(Duration::from_micros((random >> 33) % 30_000));
        running.kill();
        let store = Store::open(open(directory.path())).unwrap();
        let stats = warm(&store);
        assert_eq!(stats.rejected_records, 0, "a kill leaves no invalid records");
        recovered += stats.recovered_blocks;
        found += check_all(&store);
        store.close().unwrap();
    }
    assert!(recovered > rounds * 50 && found > 0, "{recovered} recovered, {found} found");
}

fn rounds() -> u64 {
    variable("CASCADE_KILL_ROUNDS").map_or(40, |text| text.parse().unwrap())
}

#[test]
fn recovered_blocks_have_the_right_bytes() {
    kill_rounds("write", |directory| config(directory, 8), rounds());
}

#[test]
fn recovered_blocks_with_digests_have_the_right_bytes() {
    let digest = DigestMode::On(DigestAlgorithm::Blake3);
    kill_rounds(
        "write-digests",
        |directory| StoreConfig { digest, ..config(directory, 8) },
        rounds() * 3 / 4,
    );
}

#[test]
fn recovered_blocks_over_files_have_the_right_bytes() {
    kill_rounds("write-files", |directory| with_files(directory, 8), rounds() * 3 / 4);
}

#[test]
fn every_resident_block_is_hit_in_dram_after_a_kill() {
    let directory = directory();
    let mut running = Running::start(directory.path(), "fill");
    running.report();
    running.kill();
    let store = Store::open(config(directory.path(), 64)).unwrap();
    let tiers = check(&store, &keys(0..1000));
    assert!(tiers.iter().all(|tier| *tier == Some("dram")));
    let stats = warm(&store);
    assert_eq!((stats.recovered_blocks, stats.rejected_records, stats.runs), (1000, 0, 2));
    assert_eq!(stats.recovered_bytes, 1000 * BLOCK as u64);
    // Recovered blocks can be evicted and deleted like others.
    put(&store, &keys(1000..3000), BLOCK);
    assert_eq!(store.stats().dram_bytes, store.stats().pool.requested_bytes as u64);
    store.clear();
    assert_eq!(store.stats().pool.reserved_bytes, 0);
}

/// Prints the time.
#[test]
#[ignore = "takes 4 GiB of memory"]
fn four_gibibytes_are_recovered_after_a_kill() {
    let directory = directory();
    let mut running = Running::start(directory.path(), "fill-4gib");
    running.report();
    running.kill();
    let began = SystemClock.monotonic();
    let store = Store::open(four_gibibytes(directory.path())).unwrap();
    let took = SystemClock.monotonic().saturating_sub(began);
    let tiers = check(&store, &keys(0..FOUR_GIB_BLOCKS));
    let hits = tiers.iter().filter(|tier| **tier == Some("dram")).count();
    report(&format!("opened in {took:?}; {hits} of {FOUR_GIB_BLOCKS} blocks hit, all bytes right"));
    assert_eq!(hits as u64, FOUR_GIB_BLOCKS);
}

fn four_gibibytes(directory: &Path) -> StoreConfig {
    StoreConfig { huge_pages: true, ..config(directory, 4096) }
}

fn fill_four_gibibytes(directory: &Path) {
    let store = Store::open(four_gibibytes(directory)).unwrap();
    for from in (0..FOUR_GIB_BLOCKS).step_by(100) {
        put(&store, &keys(from..(from + 100).min(FOUR_GIB_BLOCKS)), 128 << 10);
    }
    report("full");
    wait();
}

#[test]
#[ignore = "takes 1 GiB of memory"]
fn one_gibibyte_is_recovered() {
    let directory = directory();
    let config = StoreConfig { huge_pages: true, ..config(directory.path(), 1024) };
    let count = (1000 << 20) / (256 << 10);
    let store = Store::open(config.clone()).unwrap();
    for from in (0..count).step_by(100) {
        put(&store, &keys(from..from + 100), 256 << 10);
    }
    store.close().unwrap();
    drop(store);
    let store = Store::open(config).unwrap();
    assert!(check(&store, &keys(0..count)).iter().all(|tier| *tier == Some("dram")));
}

#[test]
fn pending_writes_are_completed_after_a_kill() {
    let directory = directory();
    let mut running = Running::start(directory.path(), "dirty");
    running.report();
    running.kill();
    let config = with_files(directory.path(), 8);
    let store = Store::open(config.clone()).unwrap();
    assert_eq!(warm(&store).recovered_blocks, 20);
    store.flush(CallOptions::default()).unwrap();
    store.close().unwrap();
    drop(store);
    std::fs::remove_file(pool(directory.path())).unwrap();
    let store = Store::open(config).unwrap();
    assert_eq!(warm(&store).recovered_blocks, 0);
    let tiers = check(&store, &keys(0..20));
    assert!(tiers.iter().all(|tier| *tier == Some("files")), "{tiers:?}");
}

/// Without digests the copies in DRAM and files could not be matched, and each restart wrote all of
/// DRAM again.
#[test]
fn blocks_already_in_files_are_not_written_again_after_a_restart() {
    let directory = directory();
    let config = with_files(directory.path(), 8);
    let store = Store::open(config.clone()).unwrap();
    put(&store, &keys(0..20), BLOCK);
    store.close().unwrap();
    drop(store);
    let store = Store::open(config).unwrap();
    store.flush(CallOptions::default()).unwrap();
    let stats = store.stats();
    assert_eq!((stats.counters.demoted_blocks, stats.keys), (0, 20));
    let tiers = store.locate(&keys(0..20));
    assert!(tiers.iter().all(|tiers| *tiers == ["dram", "files"]), "{tiers:?}");
}

/// Puts new blocks until the store is full, and returns their offsets.
fn refill(store: &Store, from: u64) -> Vec<usize> {
    put(store, &keys(from..from + 200), BLOCK);
    let views = store.view(&keys(from..from + 200), CallOptions::default());
    let offset = |view| match view {
        ViewOutcome::Hit { slab, .. } => Some(slab.offset()),
        _ => None,
    };
    views.into_iter().filter_map(offset).collect()
}

#[test]
fn memory_held_by_a_running_process_is_not_reused() {
    let directory = directory();
    let mut holder = Command::new("sleep").arg("600").spawn().unwrap();
    std::fs::write(directory.path().join("holder"), holder.id().to_string()).unwrap();
    let mut running = Running::start(directory.path(), "hold");
    let reserved: usize = running.report().parse().unwrap();
    running.kill();
    // Twice: holds survive a second restart as well.
    for run in 2..4 {
        let store = Store::open(config(directory.path(), 4)).unwrap();
        let stats = warm(&store);
        assert_eq!((stats.held_by_earlier, stats.rejected_records, stats.runs), (3, 0, run));
        assert!(!refill(&store, 1000 * run).contains(&reserved));
        // The leased block is not evicted; the deleted one is not recovered.
        assert_eq!(check(&store, &keys(0..2)), [None, Some("dram")]);
        let mut written = vec![0; BLOCK];
        let file = std::fs::File::open(pool(directory.path())).unwrap();
        file.read_exact_at(&mut written, reserved as u64).unwrap();
        assert!(written.iter().all(|byte| *byte == 0xA5), "held memory was overwritten");
        store.close().unwrap();
    }
    holder.kill().unwrap();
    holder.wait().unwrap();
    let store = Store::open(config(directory.path(), 4)).unwrap();
    assert_eq!(warm(&store).held_by_earlier, 0);
    assert!(refill(&store, 9000).contains(&reserved));
}

/// An I/O request of the dead process's ring could still overwrite a block.
#[test]
fn slabs_of_reads_in_flight_are_not_reused_for_one_run() {
    let directory = directory();
    let mut running = Running::start(directory.path(), "load");
    running.report();
    running.kill();
    for expected in [1, 0] {
        let store = Store::open(config(directory.path(), 4)).unwrap();
        let stats = warm(&store);
        assert_eq!((stats.held_by_earlier, stats.rejected_records), (expected, 0));
        store.clear();
        let reserved_bytes = store.stats().pool.reserved_bytes as u64;
        assert_eq!(reserved_bytes, expected * BLOCK as u64, "only its slab is reserved");
    }
}

#[test]
fn held_memory_is_freed_when_its_holder_releases_it_or_ends() {
    for is_released in [true, false] {
        let directory = directory();
        let mut holder = Command::new("sleep").arg("600").spawn().unwrap();
        std::fs::write(directory.path().join("holder"), holder.id().to_string()).unwrap();
        let mut running = Running::start(directory.path(), "hold");
        let reserved: usize = running.report().parse().unwrap();
        running.kill();
        let store = Store::open(config(directory.path(), 4)).unwrap();
        assert_eq!(warm(&store).held_by_earlier, 3);
        if is_released {
            assert_eq!(store.release_process(holder.id()), 3);
        }
        holder.kill().unwrap();
        holder.wait().unwrap();
        // A store that needs memory checks the holders, at most once a second.
        wait_until("the memory of the killed holder is allocated again", || {
            store.clear();
            refill(&store, 1000).contains(&reserved)
        });
        assert_eq!(warm(&store).held_by_earlier, 0);
    }
}

#[test]
fn released_holds_free_their_ledger_records() {
    let directory = directory();
    let store = Store::open(config(directory.path(), 4)).unwrap();
    let me = Process::of(std::process::id()).unwrap();
    let slab = store.reserve(BLOCK, CallOptions::default()).unwrap();
    for _ in 0..10_000 {
        let mut ids = Vec::new();
        store.record_held(&[HeldPiece::reservation(&slab)], me, &mut ids).unwrap();
        store.release_held(ids);
    }
    let mut ids = Vec::new();
    let pieces = vec![HeldPiece::reservation(&slab); 1 << 20];
    let error = store.record_held(&pieces, me, &mut ids).unwrap_err();
    assert!(matches!(error, StoreError::Limit { .. }), "{error:?}");
    assert!(ids.is_empty(), "all or none");
    drop(slab);
    store.close().unwrap();
    drop(store);
    let store = Store::open(config(directory.path(), 4)).unwrap();
    assert_eq!(warm(&store).held_by_earlier, 0);
}

/// One process filled the ledger, and no other client could read or write.
#[test]
fn a_process_leaves_half_of_the_free_ledger_places_to_others() {
    let directory = directory();
    let store = Store::open(config(directory.path(), 4)).unwrap();
    let slab = store.reserve(BLOCK, CallOptions::default()).unwrap();
    let piece = HeldPiece::reservation(&slab);
    let take_all = |pid: u32| {
        let (process, mut ids) = (Process { pid, start_time: 1 }, Vec::new());
        while store.record_held(&[piece], process, &mut ids).is_ok() {}
        ids
    };
    let mut all: Vec<_> = (1..=8).map(take_all).collect();
    let counts: Vec<usize> = all.iter().map(Vec::len).collect();
    assert!(counts[0] >= 10_000, "ten thousand small views in a small pool: {counts:?}");
    for (before, after) in counts.iter().zip(&counts[1..]) {
        assert!(*after > 0 && after.abs_diff(before / 2) <= 1, "{counts:?}");
    }
    store.release_held(all.drain(..).flatten());
    assert_eq!(take_all(9).len(), counts[0], "all of them are free again");
    store.close().unwrap();
}

/// A client at its limit got an error for a batch without a single hit.
#[test]
fn a_batch_without_pieces_succeeds_at_the_limit() {
    let directory = directory();
    let store = Store::open(config(directory.path(), 4)).unwrap();
    let slab = store.reserve(BLOCK, CallOptions::default()).unwrap();
    let piece = HeldPiece::reservation(&slab);
    let [one, other] = [1, 2].map(|pid| Process { pid, start_time: 1 });
    let mut ids = Vec::new();
    while store.record_held(&[piece], one, &mut ids).is_ok() {}
    store.record_held(&[piece; 100], other, &mut ids).unwrap();
    store.record_held(&[], one, &mut ids).unwrap();
    store.release_held(ids);
    store.close().unwrap();
}

#[test]
fn blocks_beyond_the_ledgers_capacity_are_counted_and_not_recovered() {
    let directory = directory();
    let store = Store::open(config(directory.path(), 8)).unwrap();
    let outcomes = put(&store, &keys(0..1500), 1024);
    assert!(outcomes.iter().all(|outcome| matches!(outcome, PutOutcome::Stored)));
    let stats = warm(&store);
    assert_eq!((stats.ledger_records, stats.ledger_full_drops), (1024, 476));
    store.close().unwrap();
    drop(store);
    let store = Store::open(config(directory.path(), 8)).unwrap();
    let found = check(&store, &keys(0..1500)).iter().filter(|tier| tier.is_some()).count();
    assert_eq!(found, 1024);
}

#[test]
fn every_name_of_a_block_is_recovered_and_its_bytes_once() {
    let directory = directory();
    let digest = DigestMode::On(DigestAlgorithm::Blake3);
    let open = || Store::open(StoreConfig { digest, ..config(directory.path(), 4) }).unwrap();
    let store = open();
    let names = keys(0..20);
    let bytes = bytes_of(&names[0], BLOCK);
    let put_all = |store: &Store| {
        let puts: Vec<Put<'_>> = names.iter().map(|name| Put::new(*name, &bytes)).collect();
        store.put(&puts, CallOptions::default())
    };
    put_all(&store);
    store.delete(&names[..1]);
    store.close().unwrap();
    drop(store);
    let store = open();
    let stats = store.stats();
    assert_eq!((stats.keys, stats.contents, stats.dram_bytes), (19, 1, BLOCK as u64));
    assert!(matches!(put_all(&store)[0], PutOutcome::Deduplicated), "its digest is known");
    store.delete(&names);
    assert_eq!(store.stats().pool.reserved_bytes, 0);
}

#[test]
fn chains_and_expiry_times_are_recovered() {
    let directory = directory();
    let store = Store::open(config(directory.path(), 4)).unwrap();
    let chain: Vec<BlockKey> = keys(0..30);
    let bytes: Vec<_> = chain.iter().map(|key| bytes_of(key, BLOCK)).collect();
    let puts: Vec<Put<'_>> = (0..30_usize)
        .map(|at| Put {
            parent: at.checked_sub(1).map(|before| chain[before]),
            ..Put::new(chain[at], &bytes[at])
        })
        .collect();
    store.put(&puts, CallOptions::default());
    let short = keys(100..101)[0];
    let expiring = Put { ttl_ms: Some(1), ..Put::new(short, &bytes[0]) };
    store.put(&[expiring], CallOptions::default());
    store.close().unwrap();
    drop(store);
    let store = Store::open(config(directory.path(), 4)).unwrap();
    assert!(!store.contains(&[short])[0], "it expired meanwhile");
    // Eviction starts at the chain's end: a block never outlives its parent.
    put(&store, &keys(200..300), BLOCK);
    let found = store.contains(&chain);
    let leading = found.iter().take_while(|is_there| **is_there).count();
    assert!(found.iter().skip(leading).all(|is_there| !is_there), "{found:?}");
    assert!(leading < 30, "some blocks were evicted");
}
