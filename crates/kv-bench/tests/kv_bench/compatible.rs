//! Runs of the original's workload: its files, its tiers, its counts, and that a seed repeats it.

use std::fs;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

use cascade_block::BlockKey;
use cascade_kv_bench::backend::KvTier;
use cascade_kv_bench::block_names::BlockNames;
use cascade_kv_bench::compatible::entry::EntryName;
use cascade_kv_bench::compatible::figures::ObjectFigures;
use cascade_kv_bench::compatible::plan::{COUNTED_PROMPT_TOKENS, ObjectRequest, Schedule};
use cascade_kv_bench::compatible::run::{Pace, run};
use cascade_kv_bench::compatible::waterfall::{TierContents, Waterfall, WaterfallSizes};
use cascade_kv_bench::directory::BenchDirectory;
use cascade_kv_bench::measurements::Measurements;
use cascade_kv_bench::plan::{Phases, Workload};
use cascade_kv_bench::prepare::Precondition;
use cascade_kv_bench::progress::Progress;
use cascade_kv_bench::run::{RunOptions, RunOutcome};
use cascade_kv_bench::workload_settings::WorkloadSettings;
use cascade_runtime::{Clock, SystemClock};
use tempfile::TempDir;

use crate::{options, workload};

/// All requests are there at once.
const AT_ONCE: Pace = Pace { think_scale: 0.0, thread_wait: LONG };
/// Longer than any request of a test.
const LONG: Duration = Duration::from_secs(600);
/// Larger than all that a test writes.
const LARGE: u64 = 1 << 40;

const FILES_ONLY: WaterfallSizes =
    WaterfallSizes { gpu_bytes: 0, cpu_bytes: 0, files_bytes: LARGE };

fn run_in(
    directory: &Path,
    sizes: WaterfallSizes,
    workload: &Workload,
    options: &RunOptions,
) -> (RunOutcome, ObjectFigures) {
    let waterfall = Waterfall::new(directory, sizes, workload.seed, &SystemClock).unwrap();
    let progress = Progress::default();
    run(&waterfall, workload, options, AT_ONCE, &progress, &SystemClock).unwrap()
}

fn run_with(
    sizes: WaterfallSizes,
    workload: &Workload,
    workers: usize,
) -> (RunOutcome, ObjectFigures) {
    let directory = TempDir::new().unwrap();
    run_in(directory.path(), sizes, workload, &options(workers))
}

fn requests(workload: &Workload) -> Vec<ObjectRequest> {
    let count = usize::try_from(workload.requests_max.unwrap()).unwrap();
    Schedule::new(workload).take(count).collect()
}

/// Bytes that these requests write, and that they read if nothing is dropped.
fn planned_bytes(workload: &Workload) -> (u64, u64) {
    let all = requests(workload);
    let bytes = |it: &ObjectRequest| it.context_tokens * workload.model.bytes_per_token;
    let read = all.iter().map(|request| {
        let earlier = all.iter().filter(|it| {
            (it.user, it.conversation) == (request.user, request.conversation)
                && it.turn < request.turn
        });
        let decode = if request.only_writes {
            0
        } else {
            1 + request.decode_reads(&WorkloadSettings::default())
        };
        earlier.map(&bytes).sum::<u64>() + decode * bytes(request)
    });
    (all.iter().map(&bytes).sum(), read.sum())
}

fn read_from(figures: &Measurements) -> [u64; 3] {
    figures.read.map(|it| it.bytes)
}

#[test]
fn each_turn_is_one_file_with_bytes_of_its_own() {
    let directory = TempDir::new().unwrap();
    let workload = workload(Some(40));
    let (outcome, objects) = run_in(directory.path(), FILES_ONLY, &workload, &options(3));
    let names = BlockNames::new(workload.seed);
    for request in requests(&workload) {
        let name = request.entry_of(request.turn);
        let bytes = fs::read(directory.path().join(name.file_name())).unwrap();
        assert_eq!(bytes.len() as u64, request.context_tokens * 64, "{request:?}");
        assert_eq!(name.first_wrong(names, 0, &bytes), None, "{request:?}");
    }
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 40);
    let (written, read) = planned_bytes(&workload);
    let figures = &outcome.figures;
    assert_eq!(objects.written.map(|it| it.bytes), [0, 0, written]);
    assert_eq!(read_from(figures), [0, 0, read]);
    assert_eq!((figures.wrong_blocks, figures.turn_misses, figures.requests), (0, 0, 40));
    assert_eq!(figures.verified_blocks, figures.hits);
    assert_eq!(objects.contents[2], TierContents { entries: 40, bytes: written });
}

#[test]
fn a_damaged_file_is_read_as_wrong_bytes() {
    let directory = TempDir::new().unwrap();
    let workload = Workload { phases: Phases::DecodeOnly, ..workload(Some(60)) };
    let waterfall =
        Waterfall::new(directory.path(), FILES_ONLY, workload.seed, &SystemClock).unwrap();
    // Stored before, so that the run finds it there and does not write it again.
    let measured = |requests_max| {
        let workload = Workload { requests_max: Some(requests_max), ..workload.clone() };
        let progress = Progress::default();
        run(&waterfall, &workload, &options(2), AT_ONCE, &progress, &SystemClock).unwrap().0
    };
    assert_eq!(measured(1).figures.wrong_blocks, 0);
    for number in 0..workload.users * 10 {
        let path = waterfall.path(EntryName::Context(number));
        let mut bytes = fs::read(&path).unwrap();
        bytes[5000] ^= 1;
        fs::write(path, bytes).unwrap();
    }
    let figures = measured(60).figures;
    assert!(figures.wrong_blocks > 0 && figures.wrong_blocks == figures.hits, "{figures:?}");
    assert!(figures.wrong_examples[0].contains("byte 5000 differs"), "{figures:?}");
}

/// The original never moves an entry up: what was moved down is read from there each time.
#[test]
fn an_entry_that_was_moved_down_is_read_from_there_again_and_again() {
    // Ten contexts of 2,048 tokens of 64 bytes; memory has room for four of them.
    let entry = 2048 * 64;
    let sizes = WaterfallSizes { gpu_bytes: 0, cpu_bytes: entry * 5, files_bytes: LARGE };
    let workload = Workload { users: 1, phases: Phases::DecodeOnly, ..workload(Some(80)) };
    let (outcome, objects) = run_with(sizes, &workload, 1);
    assert_eq!(objects.contents[1], TierContents { entries: 4, bytes: 4 * entry });
    assert_eq!(objects.contents[2], TierContents { entries: 6, bytes: 6 * entry });
    // The window moved nothing, up or down, and the first four contexts are those in files: the
    // least recently used ones, with the two that had no use since.
    assert_eq!((objects.moved.to_cpu, objects.moved.to_files), (0, 0));
    let mut from_files = 0;
    let mut in_all = 0;
    for request in requests(&workload) {
        let Some(number) = request.stored_context else { continue };
        let reads = 1 + request.decode_reads(&WorkloadSettings::default());
        in_all += reads;
        from_files += if number < 6 { reads } else { 0 };
    }
    let read = read_from(&outcome.figures);
    assert_eq!(read, [0, (in_all - from_files) * entry, from_files * entry]);
    assert!(from_files > 100 && in_all > from_files);
    let storage = &outcome.figures.read_by_tier[KvTier::Storage.index()];
    assert_eq!(storage.count(), from_files);
}

#[test]
fn entries_fall_from_gpu_to_cpu_to_files_and_out() {
    let entry = 2048 * 64;
    // A tenth of what is stored in each tier above, and files for a third of it.
    let sizes =
        WaterfallSizes { gpu_bytes: entry * 13, cpu_bytes: entry * 13, files_bytes: entry * 40 };
    let workload = Workload { users: 12, phases: Phases::DecodeOnly, ..workload(Some(60)) };
    let (outcome, objects) = run_with(sizes, &workload, 1);
    let entries = objects.contents.map(|it| it.entries);
    // Memory is filled to 80 %, files to the end.
    assert_eq!(entries, [10, 10, 40]);
    let figures = &outcome.figures;
    assert!(read_from(figures).iter().all(|bytes| *bytes > 0), "{:?}", figures.read);
    // Sixty contexts were dropped, and a read of one of them is a miss.
    assert!(figures.misses > figures.prompt_requests[0]);
    assert!(figures.failures.is_empty(), "{:?}", figures.failures);
}

#[test]
fn an_entry_that_is_too_large_for_a_tier_goes_to_the_next_one() {
    // Within a user, contexts differ by a factor of four: some fit into the GPU tier, some do not.
    let workload = Workload { users: 1, has_multi_turn: false, ..workload(Some(40)) };
    let bytes = |it: &ObjectRequest| it.context_tokens * 64;
    let all = requests(&workload);
    let mut sizes: Vec<u64> = all.iter().map(bytes).collect();
    sizes.sort_unstable();
    let gpu_bytes = sizes[20];
    let tiers = WaterfallSizes { gpu_bytes, cpu_bytes: LARGE, files_bytes: LARGE };
    let (_, objects) = run_with(tiers, &workload, 1);
    let too_large = |it: &&ObjectRequest| bytes(it) * 100 > gpu_bytes * 95;
    let expected: u64 = all.iter().filter(too_large).map(bytes).sum();
    let written = objects.written.map(|it| it.bytes);
    assert!(written[1] >= expected && expected > 0, "{written:?}, {expected}");
    assert!(written[0] > 0 && written[2] == 0, "{written:?}");
}

#[test]
fn a_seed_determines_operations_and_bytes_whatever_the_threads() {
    let workload = workload(Some(60));
    let (written, read) = planned_bytes(&workload);
    let runs = [1, 7].map(|workers| {
        let (outcome, _) = run_with(FILES_ONLY, &workload, workers);
        let figures = outcome.figures;
        assert_eq!((figures.requests, figures.written.bytes), (60, written));
        assert_eq!(figures.read_total().bytes, read);
        (figures.operations, figures.hits, figures.misses, figures.tokens)
    });
    assert_eq!(runs[0], runs[1]);
    let other = Workload { seed: 43, ..workload };
    assert_ne!(run_with(FILES_ONLY, &other, 2).0.figures.operations, runs[0].0);
}

/// The original looks up system prompts that it never stores: each is a miss, and bytes "saved".
#[test]
fn system_prompts_are_counted_and_not_stored() {
    let workload = workload(Some(100));
    let (outcome, objects) = run_with(FILES_ONLY, &workload, 4);
    let prompts: Vec<u8> = requests(&workload).iter().filter_map(|it| it.prompt).collect();
    let tokens: u64 = prompts.iter().map(|it| COUNTED_PROMPT_TOKENS[usize::from(*it)]).sum();
    let figures = &outcome.figures;
    assert!(prompts.len() > 5);
    assert_eq!(figures.prompt_requests, [prompts.len() as u64, 100 - prompts.len() as u64]);
    assert_eq!(figures.misses, prompts.len() as u64);
    assert_eq!(figures.prompt_bytes_saved, tokens * workload.model.model_bytes_per_token);
    assert_eq!((objects.contents[2].entries, outcome.blocks_before), (100, 0));
    // Hits of a request with a prompt are hits of the prompt, whatever it reads.
    assert!(figures.prompt_hits > 0 && figures.decode_hits > 0);

    let without = Workload { has_shared_prompts: false, ..workload };
    let figures = run_with(FILES_ONLY, &without, 4).0.figures;
    assert_eq!((figures.prompt_requests, figures.misses, figures.prompt_hits), ([0, 0], 0, 0));
}

#[test]
fn one_phase_alone_only_writes_or_only_reads() {
    let prefill = Workload { phases: Phases::PrefillOnly, ..workload(Some(60)) };
    let figures = run_with(FILES_ONLY, &prefill, 3).0.figures;
    assert!(figures.written.bytes > 0 && figures.turn_hits > 0);
    assert_eq!(figures.hits, figures.turn_hits);
    let decode = Workload { phases: Phases::DecodeOnly, ..workload(Some(60)) };
    let (outcome, objects) = run_with(FILES_ONLY, &decode, 3);
    assert_eq!((outcome.figures.written.bytes, outcome.blocks_before), (0, 120));
    assert!(outcome.figures.hits > 0 && outcome.figures.turn_hits == 0);
    assert_eq!(objects.contents[2].entries, 120);
}

/// As in the original, what preconditioning writes stays until files need its room.
#[test]
fn what_preconditioning_writes_is_not_counted_and_dropped_first() {
    let workload = Workload { has_multi_turn: false, ..workload(Some(20)) };
    let (written, _) = planned_bytes(&workload);
    let entry = 2048 * 64;
    let files_bytes = written.max(10 * entry) + entry;
    let sizes = WaterfallSizes { gpu_bytes: 0, cpu_bytes: 0, files_bytes };
    let bytes = files_bytes;
    let precondition = Some(Precondition { bytes, threads: 2 });
    let directory = TempDir::new().unwrap();
    let options = RunOptions { precondition, ..options(1) };
    let (outcome, objects) = run_in(directory.path(), sizes, &workload, &options);
    assert_eq!((outcome.figures.written.bytes, outcome.figures.requests), (written, 20));
    assert!(objects.moved.dropped > 0);
    assert_eq!(outcome.figures.misses, outcome.figures.prompt_requests[0]);
}

/// A clock on which time passes when it is read.
#[derive(Debug)]
struct SteppingClock {
    reads: std::sync::atomic::AtomicU64,
}

impl Clock for SteppingClock {
    fn monotonic(&self) -> Duration {
        Duration::from_millis(self.reads.fetch_add(1, Ordering::Relaxed))
    }

    fn unix_ms(&self) -> u64 {
        0
    }
}

/// The original counts all bytes of a request that ends after the window, which is the divisor.
#[test]
fn bytes_after_the_window_count_and_the_divisor_is_the_window() {
    let directory = TempDir::new().unwrap();
    let clock = SteppingClock { reads: 0.into() };
    let workload = Workload { users: 1, ..workload(None) };
    let waterfall = Waterfall::new(directory.path(), FILES_ONLY, workload.seed, &clock).unwrap();
    // Too short for the first request, whatever the disk does: each call takes some milliseconds.
    let options = RunOptions { duration: Duration::from_millis(12), ..options(1) };
    let progress = Progress::default();
    let pace = Pace { think_scale: 1e-3, thread_wait: LONG };
    let (outcome, _) = run(&waterfall, &workload, &options, pace, &progress, &clock).unwrap();
    let figures = &outcome.figures;
    // It was served to its end, and none began after the window.
    assert_eq!((figures.requests, figures.cut_requests), (1, 0));
    let first = Schedule::new(&workload).next().unwrap();
    let bytes = first.context_tokens * 64;
    let reads =
        if first.only_writes { 0 } else { 1 + first.decode_reads(&WorkloadSettings::default()) };
    assert_eq!((figures.written.bytes, figures.read_total().bytes), (bytes, reads * bytes));
    let within = figures.written.window_bytes + figures.read_total().window_bytes;
    assert!(within < bytes * (1 + reads), "{within}");
    assert!((outcome.window.seconds() - 0.012).abs() < 1e-9);
    assert!(outcome.tail > Duration::ZERO && !outcome.was_stopped);
}

/// The original waits for each of its threads for 2 s, one after another, and then reports.
#[test]
fn requests_that_take_longer_than_the_tail_are_cut() {
    let directory = TempDir::new().unwrap();
    let workload = workload(None);
    let waterfall =
        Waterfall::new(directory.path(), FILES_ONLY, workload.seed, &SystemClock).unwrap();
    let token_time = Duration::from_secs(3600);
    let options = RunOptions { duration: Duration::from_secs(2), token_time, ..options(4) };
    let pace = Pace { think_scale: 1e-3, thread_wait: Duration::from_millis(50) };
    let progress = Progress::default();
    let (outcome, _) = run(&waterfall, &workload, &options, pace, &progress, &SystemClock).unwrap();
    let figures = &outcome.figures;
    assert_eq!((figures.requests, figures.cut_requests), (0, 4));
    assert!(!outcome.was_stopped && figures.failures.is_empty(), "{figures:?}");
}

#[test]
fn an_interrupted_run_reports_what_it_did_and_leaves_nothing_behind() {
    let root = TempDir::new().unwrap();
    let directory = BenchDirectory::claim(&root.path().join("cache"), false).unwrap();
    let workload = workload(None);
    let sizes = WaterfallSizes { gpu_bytes: 1 << 20, cpu_bytes: 4 << 20, files_bytes: LARGE };
    let waterfall =
        Waterfall::new(&directory.blocks(), sizes, workload.seed, &SystemClock).unwrap();
    let (options, progress) = (options(3), Progress::default());
    let pace = Pace { think_scale: 0.01, thread_wait: LONG };
    let (outcome, objects) = std::thread::scope(|scope| {
        let running =
            scope.spawn(|| run(&waterfall, &workload, &options, pace, &progress, &SystemClock));
        while progress.requests.load(Ordering::Relaxed) < 20 {
            std::thread::yield_now();
        }
        progress.is_stopped.store(true, Ordering::Relaxed);
        running.join().unwrap().unwrap()
    });
    assert!(outcome.was_stopped && outcome.figures.requests >= 20);
    assert!(outcome.window.seconds() < 600.0 && outcome.window.seconds() > 0.0);
    let files = fs::read_dir(directory.blocks()).unwrap().count() as u64;
    assert_eq!(files, objects.contents[2].entries);
    drop(directory);
    assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
}

#[test]
fn keys_of_entries_are_those_of_no_block() {
    let names = BlockNames::new(42);
    let turn = EntryName::Turn { user: 3, conversation: 2, turn: 1 };
    let all: Vec<BlockKey> = vec![
        turn.key(names, 0),
        turn.key(names, 1),
        EntryName::Turn { user: 3, conversation: 1, turn: 2 }.key(names, 0),
        EntryName::Context(3).key(names, 0),
        EntryName::Precondition(3).key(names, 0),
        EntryName::Question(3).key(names, 0),
        EntryName::Chunk { document: 3, chunk: 0 }.key(names, 0),
        EntryName::Chunk { document: 3, chunk: 1 }.key(names, 0),
        names.of_conversation(3, 2, 0),
        names.of_conversation(3, 2, 1),
        names.of_prompt(3, 0),
    ];
    let mut distinct = all.clone();
    distinct.sort_unstable();
    distinct.dedup();
    assert_eq!(distinct.len(), all.len());
}
