//! Runs of the workload: on a map in memory, on a store, and on backends with planted faults.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

mod backends;
mod compatible;
mod dishonest;
mod documents;
mod faults;
mod io_log;
mod recorded;

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cascade_block::BlockKey;
use cascade_kv_bench::autoscaler::{AutoscalerMode, AutoscalerOptions, ScaleSettings};
use cascade_kv_bench::backend::{Backend, KvTier, NewBlock, Read, Space, Stored};
use cascade_kv_bench::model::KvModel;
use cascade_kv_bench::plan::{Phases, Workload};
use cascade_kv_bench::prepare::Precondition;
use cascade_kv_bench::progress::Progress;
use cascade_kv_bench::retrieval::Documents;
use cascade_kv_bench::run::{RunOptions, RunOutcome, run};
use cascade_kv_bench::store_backend::{StoreBackend, TierSizes};
use cascade_kv_bench::validity::{DeviceProof, Evidence, Validity};
use cascade_kv_bench::workload_settings::WorkloadSettings;
use cascade_runtime::{Clock, SystemClock};
use tempfile::TempDir;

use crate::backends::{MapBackend, SlowBackend};

/// Small blocks, so that thousands of them cost little.
fn workload(requests_max: Option<u64>) -> Workload {
    let model = KvModel {
        block_tokens: 128,
        bytes_per_token: 64,
        block_bytes: 128 * 64,
        ..KvModel::new("tiny-1b", 1).unwrap()
    };
    Workload {
        model,
        users: 12,
        seed: 42,
        has_multi_turn: true,
        has_shared_prompts: true,
        requests_max,
        documents: Documents::default(),
        phases: Phases::Both,
        recorded: None,
        settings: WorkloadSettings::default(),
    }
}

/// Users that do not think long enough to matter would still take seconds: requests arrive at once.
fn options(workers: usize) -> RunOptions {
    RunOptions {
        workers,
        batch_blocks: 8,
        duration: Duration::from_secs(600),
        request_rate: Some(1e6),
        token_time: Duration::ZERO,
        prefills_max: 0,
        verifies: true,
        device: None,
        precondition: None,
        autoscaling: None,
    }
}

fn run_on(backend: &dyn Backend, requests: u64, options: &RunOptions) -> RunOutcome {
    run(backend, &workload(Some(requests)), options, &Progress::default(), &SystemClock).unwrap()
}

fn sizes(gpu_bytes: u64, cpu_bytes: u64) -> TierSizes {
    TierSizes { gpu_bytes, cpu_bytes, staging_bytes: 16 << 20, files_bytes: 512 << 20 }
}

fn validity(outcome: &RunOutcome, tiers: &TierSizes) -> Validity {
    let plan = (&workload(None), &options(1));
    Validity::of(&Evidence::of_store(plan, tiers, outcome, None, DeviceProof::DirectIo))
}

fn store(directory: &Path, cpu_bytes: u64) -> StoreBackend {
    StoreBackend::open(directory, sizes(0, cpu_bytes)).unwrap()
}

#[test]
fn a_seed_determines_operations_and_bytes_whatever_the_threads() {
    let runs = [1, 2, 7, 7].map(|workers| {
        let outcome = run_on(&MapBackend::default(), 60, &options(workers));
        let figures = outcome.figures;
        assert_eq!((figures.requests, figures.misses, figures.wrong_blocks), (60, 0, 0));
        assert_eq!(figures.operations.bytes, figures.read_total().bytes + figures.written.bytes);
        (figures.operations, figures.read_total().bytes, figures.written.bytes, figures.tokens)
    });
    assert!(runs.iter().all(|it| *it == runs[0]), "{runs:?}");

    let other = Workload { seed: 43, ..workload(Some(60)) };
    let progress = Progress::default();
    let outcome = run(&MapBackend::default(), &other, &options(2), &progress, &SystemClock);
    assert_ne!(outcome.unwrap().figures.operations, runs[0].0);
}

#[test]
fn a_store_serves_the_same_operations_from_dram_files_and_a_simulated_gpu() {
    let expected = run_on(&MapBackend::default(), 40, &options(4)).figures.operations;
    for (gpu, cpu, tier) in
        [(0, 64 << 20, KvTier::Cpu), (0, 0, KvTier::Storage), (64 << 20, 16 << 20, KvTier::Gpu)]
    {
        let directory = TempDir::new().unwrap();
        let backend = StoreBackend::open(directory.path(), sizes(gpu, cpu)).unwrap();
        let outcome = run_on(&backend, 40, &options(4));
        backend.close().unwrap();
        let figures = &outcome.figures;
        assert_eq!(figures.operations, expected, "{tier:?}");
        assert_eq!((figures.misses, figures.wrong_blocks), (0, 0), "{tier:?}");
        assert!(figures.failures.is_empty(), "{:?}", figures.failures);
        let from_tier = figures.read[tier.index()].bytes;
        assert_eq!(from_tier, figures.read_total().bytes, "{tier:?}: {:?}", figures.read);
        let validity = validity(&outcome, &sizes(gpu, cpu));
        assert!(validity.is_valid, "{validity:?}");
    }
}

/// The shared prompts are stored once, and read by each turn of the conversations that have them.
#[test]
fn shared_prompts_are_stored_and_read_as_prefix_blocks() {
    let backend = MapBackend::default();
    let outcome = run_on(&backend, 120, &options(3));
    let figures = &outcome.figures;
    assert_eq!(outcome.blocks_before, 4 + 8 + 16);
    assert!(figures.prompt_requests[0] > 0 && figures.prompt_hits > 0);
    assert!(figures.turn_hits > 0);
    assert_eq!(figures.prompt_requests.iter().sum::<u64>(), 120);
    // Each key was put once: nothing was written again.
    let stored = figures.written_blocks + outcome.blocks_before;
    assert_eq!((backend.len() as u64, figures.recomputed.bytes), (stored, 0));
}

#[test]
fn documents_are_stored_before_and_read_by_some_requests() {
    let backend = MapBackend::default();
    let workload = Workload { documents: Documents { count: 4 }, ..workload(Some(120)) };
    let run = run(&backend, &workload, &options(3), &Progress::default(), &SystemClock);
    let outcome = run.unwrap();
    let figures = &outcome.figures;
    let documents = workload.documents.blocks(42, &workload.model);
    assert_eq!(outcome.blocks_before, 4 + 8 + 16 + documents);
    assert!(figures.retrieval.count() > 3 && figures.retrieval.count() < 30);
    assert_eq!((figures.misses, figures.wrong_blocks), (0, 0));
}

#[test]
fn one_phase_alone_only_writes_or_only_reads() {
    let run_phase = |phases| {
        let backend = MapBackend::default();
        let workload = Workload { phases, ..workload(Some(60)) };
        let run = run(&backend, &workload, &options(3), &Progress::default(), &SystemClock);
        run.unwrap().figures
    };
    let prefill = run_phase(Phases::PrefillOnly);
    assert!(prefill.written.bytes > 0 && prefill.turn_hits > 0);
    assert_eq!((prefill.decode.count(), prefill.decode_hits, prefill.misses), (0, 0, 0));
    let decode = run_phase(Phases::DecodeOnly);
    assert_eq!((decode.written.bytes, decode.misses, decode.reload.count()), (0, 0, 0));
    assert!(decode.decode_hits > 0 && decode.wrong_blocks == 0);
}

#[test]
fn preconditioning_leaves_no_block_and_changes_no_operation() {
    let backend = MapBackend::default();
    let bytes = 1000 * 8192;
    let options =
        RunOptions { precondition: Some(Precondition { bytes, threads: 3 }), ..options(2) };
    let outcome = run_on(&backend, 20, &options);
    assert_eq!(backend.most_blocks(), 1000);
    let stored = outcome.figures.written_blocks + outcome.blocks_before;
    assert!(stored < 1000 && backend.len() as u64 == stored);
}

/// A store whose files are damaged once, after the prefills of some requests.
struct DamagedFiles<'a> {
    store: &'a StoreBackend,
    directory: &'a Path,
    puts_left: std::sync::atomic::AtomicI64,
    is_damaged: AtomicBool,
}

impl DamagedFiles<'_> {
    /// Overwrites a part of every segment.
    fn damage(&self) -> io::Result<()> {
        for entry in fs::read_dir(self.directory)? {
            let path = entry?.path();
            let bytes = path.metadata()?.len();
            if !path.is_file() || bytes < 1 << 20 {
                continue;
            }
            let file = File::options().write(true).open(&path)?;
            for at in (64 << 10..(2 << 20).min(bytes)).step_by(16 << 10) {
                file.write_all_at(&[0xa5; 64], at)?;
            }
            file.sync_all()?;
        }
        Ok(())
    }
}

impl Backend for DamagedFiles<'_> {
    fn reserve(&self, bytes: usize) -> Result<Space, String> {
        self.store.reserve(bytes)
    }

    fn put(&self, blocks: Vec<NewBlock>) -> Vec<Stored> {
        let outcomes = self.store.put(blocks);
        let is_due = self.puts_left.fetch_sub(1, Ordering::Relaxed) <= 0;
        if is_due && !self.is_damaged.swap(true, Ordering::Relaxed) {
            self.damage().unwrap();
        }
        outcomes
    }

    fn read(&self, keys: &[BlockKey]) -> Vec<Read> {
        self.store.read(keys)
    }

    fn clear(&self) {
        self.store.clear();
    }
}

#[test]
fn damaged_files_cost_misses_and_never_wrong_bytes() {
    let directory = TempDir::new().unwrap();
    let store = store(directory.path(), 0);
    let damaged = DamagedFiles {
        store: &store,
        directory: directory.path(),
        puts_left: 100.into(),
        is_damaged: AtomicBool::new(false),
    };
    let outcome = run_on(&damaged, 60, &options(4));
    store.close().unwrap();
    assert!(damaged.is_damaged.load(Ordering::Relaxed));
    let figures = &outcome.figures;
    assert!(figures.misses > 0 && figures.recomputed.bytes > 0, "{figures:?}");
    assert_eq!((figures.wrong_blocks, figures.requests), (0, 60));
    // The requests are the same; only what they cost differs.
    let expected = run_on(&MapBackend::default(), 60, &options(4)).figures.operations;
    assert_eq!(figures.operations, expected);
}

#[test]
fn a_run_ends_with_its_window_and_states_the_tail() {
    let backend = SlowBackend::new(Duration::from_millis(40));
    let options = RunOptions { duration: Duration::from_millis(250), ..options(4) };
    let progress = Progress::default();
    let outcome = run(&backend, &workload(None), &options, &progress, &SystemClock).unwrap();
    let figures = &outcome.figures;
    assert!((outcome.window.seconds() - 0.25).abs() < 1e-9);
    assert!(!outcome.was_stopped && figures.cut_requests > 0);
    assert_eq!(outcome.tail, figures.last_end.saturating_sub(outcome.window.end));
    // Four workers were in a call at the end, and part of it was after the end.
    let (read, written) = (figures.read_total(), figures.written);
    assert!(read.window_bytes + written.window_bytes < read.bytes + written.bytes);
    assert!(outcome.tail > Duration::ZERO);
}

#[test]
fn a_stopped_run_reports_what_it_did() {
    stop(Duration::ZERO);
    // The window went on until the simulated generation would have ended.
    stop(Duration::from_millis(500));
}

fn stop(token_time: Duration) {
    let backend = SlowBackend::new(Duration::from_millis(1));
    let progress = Progress::default();
    let workload = workload(None);
    let options = RunOptions { token_time, ..options(2) };
    let started = SystemClock.monotonic();
    let outcome = std::thread::scope(|scope| {
        let running = scope.spawn(|| run(&backend, &workload, &options, &progress, &SystemClock));
        while progress.requests.load(Ordering::Relaxed) < 3 {
            std::thread::yield_now();
        }
        progress.is_stopped.store(true, Ordering::Relaxed);
        running.join().unwrap().unwrap()
    });
    assert!(outcome.was_stopped && outcome.figures.requests >= 3);
    let elapsed = SystemClock.monotonic().saturating_sub(started);
    let window = outcome.window.seconds();
    assert!(window > 0.0 && window <= elapsed.as_secs_f64(), "{window} of {elapsed:?}");
    assert_eq!(outcome.tail, Duration::ZERO);
}

#[test]
fn autoscaling_adds_users_and_ends_at_the_peak() {
    let scaled = |mode, backend: &dyn Backend, duration| {
        let (interval, settings) = (Duration::from_millis(60), ScaleSettings::default());
        let options = RunOptions {
            duration: Duration::from_millis(duration),
            request_rate: None,
            autoscaling: Some(AutoscalerOptions {
                mode,
                target_saturation: 0.8,
                interval,
                settings,
            }),
            ..options(4)
        };
        let progress = Progress::default();
        run(backend, &workload(None), &options, &progress, &SystemClock).unwrap()
    };
    let fast = scaled(AutoscalerMode::Qos, &MapBackend::default(), 1000);
    let scaling = fast.scaling.unwrap();
    assert_eq!(scaling.initial_users, 12);
    assert!(scaling.users > 12, "{:?}", scaling.events);
    assert!((fast.window.seconds() - 1.0).abs() < 1e-9);

    let slow = SlowBackend::new(Duration::from_millis(150));
    let scaling = scaled(AutoscalerMode::Qos, &slow, 1500).scaling.unwrap();
    assert!(scaling.events.iter().any(|it| it.action == "scale_down"), "{:?}", scaling.events);

    let slow = SlowBackend::new(Duration::from_millis(2));
    let peak = scaled(AutoscalerMode::Capacity, &slow, 60_000);
    assert_eq!(peak.scaling.unwrap().events.last().unwrap().action, "stop");
    assert!(peak.window.seconds() < 60.0 && !peak.was_stopped);
}

#[test]
fn prefills_at_once_are_limited() {
    let backend = SlowBackend::new(Duration::from_micros(200));
    let limited = RunOptions { prefills_max: 1, ..options(6) };
    run_on(&backend, 12, &limited);
    assert_eq!(backend.most_puts_at_once(), 1);
}
