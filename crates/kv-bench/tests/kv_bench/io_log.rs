//! Logs of operations: their rows are those that tiers would do, and a seed repeats them.

use std::collections::HashMap;
use std::time::Duration;

use cascade_kv_bench::compatible::figures::ObjectFigures;
use cascade_kv_bench::compatible::io_log::{IoLog, LoggedRows};
use cascade_kv_bench::compatible::logged;
use cascade_kv_bench::compatible::plan::{ObjectRequest, Schedule};
use cascade_kv_bench::compatible::waterfall::WaterfallSizes;
use cascade_kv_bench::plan::{Phases, Workload};
use cascade_kv_bench::prepare::Precondition;
use cascade_kv_bench::progress::Progress;
use cascade_kv_bench::run::{RunOptions, RunOutcome};
use cascade_runtime::ManualClock;
use tempfile::NamedTempFile;

use crate::{options, workload};

const UNLIMITED: WaterfallSizes =
    WaterfallSizes { gpu_bytes: 0, cpu_bytes: 0, files_bytes: u64::MAX };

/// A row without its time.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Row {
    operation: String,
    bytes: u64,
    tier: String,
    key: String,
    phase: String,
}

struct Logged {
    times: Vec<f64>,
    rows: Vec<Row>,
    counts: LoggedRows,
    outcome: RunOutcome,
    objects: ObjectFigures,
}

fn log(sizes: WaterfallSizes, workload: &Workload, options: &RunOptions) -> Logged {
    let file = NamedTempFile::new().unwrap();
    let clock = ManualClock::default();
    let log = IoLog::new(file.reopen().unwrap(), false, Duration::from_secs(1000), &clock).unwrap();
    let progress = Progress::default();
    let (outcome, objects) =
        logged::run((&log, &clock), sizes, workload, options, &progress).unwrap();
    let counts = log.finish().unwrap();
    let text = std::fs::read_to_string(file.path()).unwrap();
    let mut lines = text.lines();
    assert_eq!(lines.next(), Some("Timestamp,Operation,Object_Size_Bytes,Tier,Key,Phase"));
    let parsed = lines.map(|line| {
        let [time, operation, bytes, tier, key, phase] =
            line.split(',').map(str::to_owned).collect::<Vec<_>>().try_into().unwrap();
        let bytes = bytes.parse().unwrap();
        (time.parse::<f64>().unwrap(), Row { operation, bytes, tier, key, phase })
    });
    let (times, rows): (Vec<f64>, Vec<Row>) = parsed.unzip();
    assert_eq!(rows.len() as u64, counts.count());
    assert!(times.is_sorted());
    Logged { times, rows, counts, outcome, objects }
}

fn bytes_of(rows: &[Row], operation: &str, tier: &str) -> u64 {
    let is_it = |row: &&Row| row.operation == operation && row.tier == tier;
    rows.iter().filter(is_it).map(|row| row.bytes).sum()
}

#[test]
fn a_request_reads_its_earlier_turns_writes_its_own_and_reads_it_while_it_generates() {
    let workload = Workload { users: 1, has_shared_prompts: false, ..workload(Some(20)) };
    let logged = log(UNLIMITED, &workload, &options(1));
    let row = |request: &ObjectRequest, turn: u32, bytes, is_write: bool| Row {
        operation: if is_write { "Write" } else { "Read" }.to_owned(),
        bytes,
        tier: "Tier-2".to_owned(),
        key: format!("user-0-conversation-{}-turn-{turn}", request.conversation),
        phase: if is_write { "Prefill" } else { "Decode" }.to_owned(),
    };
    let mut sizes = HashMap::new();
    let (mut rows, mut times) = (Vec::new(), Vec::new());
    for request in Schedule::new(&workload).take(20) {
        let bytes = request.context_tokens * 64;
        sizes.insert((request.conversation, request.turn), bytes);
        let size = |turn| sizes[&(request.conversation, turn)];
        rows.extend((1..request.turn).map(|turn| row(&request, turn, size(turn), false)));
        rows.push(row(&request, request.turn, bytes, true));
        let reads =
            if request.only_writes { 0 } else { 1 + request.decode_reads(&workload.settings) };
        rows.extend((0..reads).map(|_| row(&request, request.turn, bytes, false)));
        times.resize(rows.len(), 1000.0 + request.arrival.as_secs_f64());
    }
    assert_eq!(logged.rows, rows);
    let is_close = |(time, expected): (&f64, &f64)| (time - expected).abs() < 1e-5;
    assert!(logged.times.iter().zip(&times).all(is_close));
}

#[test]
fn a_seed_repeats_all_rows_and_times() {
    let sizes = WaterfallSizes { gpu_bytes: 1 << 20, cpu_bytes: 2 << 20, files_bytes: 8 << 20 };
    let timed = RunOptions { token_time: Duration::from_millis(2), ..options(3) };
    let runs = [42, 42, 43].map(|seed| {
        let logged = log(sizes, &Workload { seed, ..workload(Some(100)) }, &timed);
        assert_eq!(logged.outcome.figures.requests, 100);
        (logged.rows, logged.times, logged.counts)
    });
    assert_eq!(runs[0], runs[1]);
    assert_ne!(runs[0].0, runs[2].0);
}

/// Replays the rows: each read finds its entry in the tier that the rows before it say.
#[test]
fn rows_say_where_each_entry_is() {
    let sizes = WaterfallSizes { gpu_bytes: 2 << 20, cpu_bytes: 3 << 20, files_bytes: 20 << 20 };
    let logged = log(sizes, &workload(Some(200)), &options(4));
    let mut places: HashMap<&str, (&str, u64)> = HashMap::new();
    for row in &logged.rows {
        let place = (row.tier.as_str(), row.bytes);
        match (row.operation.as_str(), row.phase.as_str()) {
            ("Write", "Prefill") => assert_eq!(places.insert(&row.key, place), None, "{row:?}"),
            ("Read", "Decode" | "Evict") => assert_eq!(places[&*row.key], place, "{row:?}"),
            ("Write", "Evict") => {
                let (from, bytes) = places.insert(&row.key, place).unwrap();
                assert!(from < row.tier.as_str() && bytes == row.bytes, "{row:?}");
            }
            other => panic!("{other:?}"),
        }
    }
    let moved = logged.objects.moved;
    assert!(moved.to_cpu > 50 && moved.to_files > 50 && moved.dropped > 0, "{moved:?}");
    let evicted = logged.rows.iter().filter(|row| row.phase == "Evict");
    let to_files = evicted.filter(|row| row.operation == "Write" && row.tier == "Tier-2");
    assert_eq!(to_files.map(|row| row.bytes).sum::<u64>(), moved.demoted_bytes);
    for (tier, counted) in logged.counts.tiers.iter().enumerate() {
        let name = format!("Tier-{tier}");
        assert_eq!(counted.written_bytes, bytes_of(&logged.rows, "Write", &name));
        assert_eq!(counted.read_bytes, bytes_of(&logged.rows, "Read", &name));
    }
}

/// A worker is busy while its request generates tokens, so that later ones wait for it.
#[test]
fn generation_takes_simulated_time_and_the_window_ends_the_log() {
    let workload = Workload { users: 1, ..workload(None) };
    let window = Duration::from_secs(60);
    let at_once = RunOptions { duration: window, ..options(1) };
    let all = log(UNLIMITED, &workload, &at_once);
    let slow = RunOptions { token_time: Duration::from_millis(100), ..at_once };
    let few = log(UNLIMITED, &workload, &slow);
    let [all, few] = [all, few].map(|logged| {
        assert!(logged.times.iter().all(|time| (1000.0..1060.0).contains(time)));
        assert!((logged.outcome.window.seconds() - 60.0).abs() < 1e-9);
        logged.outcome.figures.requests
    });
    assert!(few > 1 && few * 4 < all, "{few} of {all}");
}

#[test]
fn what_is_stored_before_the_window_is_logged_in_order() {
    let workload = Workload { phases: Phases::DecodeOnly, users: 2, ..workload(Some(30)) };
    let precondition = Some(Precondition { bytes: 3 * 2048 * 64, threads: 4 });
    let logged = log(UNLIMITED, &workload, &RunOptions { precondition, ..options(4) });
    let written: Vec<_> = logged.rows.iter().take(23).map(|row| row.key.as_str()).collect();
    assert_eq!(written[..3], ["precondition-0", "precondition-1", "precondition-2"]);
    assert_eq!((written[3], written[22]), ("context-0", "context-19"));
    let rest = &logged.rows[23..];
    assert!(!rest.is_empty() && rest.iter().all(|row| row.operation == "Read"));
}
