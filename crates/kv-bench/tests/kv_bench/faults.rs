//! A full disk in the middle of a run, and an interrupt after its window.

#![expect(clippy::print_stdout, reason = "a test that cannot run says why")]

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cascade_block::BlockKey;
use cascade_kv_bench::backend::{Backend, NewBlock, Read, Space, Stored};
use cascade_kv_bench::compatible::run::{Pace, run as run_objects};
use cascade_kv_bench::compatible::waterfall::{Waterfall, WaterfallSizes};
use cascade_kv_bench::plan::{Phases, Workload};
use cascade_kv_bench::progress::Progress;
use cascade_kv_bench::run::{RunOptions, run};
use cascade_kv_bench::validity::{DeviceProof, Evidence, Validity};
use cascade_runtime::{ManualClock, SystemClock};
use tempfile::TempDir;

use crate::backends::MapBackend;
use crate::{options, sizes, store, validity, workload};

/// A small file system in memory, unmounted on drop.
struct SmallDisk(TempDir);

impl SmallDisk {
    /// Mounts it, or prints why it cannot.
    fn mount(mib: u64) -> Option<Self> {
        let directory = TempDir::new().unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("mode=700,size={mib}m"), "tmpfs"]);
        let is_mounted = mount.arg(directory.path()).output().is_ok_and(|it| it.status.success());
        if !is_mounted {
            println!("skipped: this user may not mount a file system");
        }
        is_mounted.then(|| Self(directory))
    }

    fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for SmallDisk {
    /// Another test that starts a process may keep this one's files open for a moment.
    fn drop(&mut self) {
        let is_unmounted = (0..200).any(|number| {
            std::thread::park_timeout(Duration::from_millis(if number > 0 { 50 } else { 0 }));
            Command::new("umount").arg(self.path()).output().is_ok_and(|it| it.status.success())
        });
        assert!(is_unmounted, "the disk is still in use");
    }
}

/// Longer than any request of a test.
const LONG: Duration = Duration::from_secs(600);

fn codes(validity: &Validity) -> Vec<&'static str> {
    validity.reasons.iter().map(|reason| reason.code).collect()
}

#[test]
fn a_compatible_run_goes_on_when_the_disk_is_full_and_is_not_valid() {
    let Some(disk) = SmallDisk::mount(4) else { return };
    let workload = workload(Some(60));
    let tiers = WaterfallSizes { gpu_bytes: 0, cpu_bytes: 0, files_bytes: 1 << 40 };
    let waterfall =
        Waterfall::new(&disk.path().join("kv"), tiers, workload.seed, &SystemClock).unwrap();
    let (options, progress) = (options(3), Progress::default());
    let pace = Pace { think_scale: 0.0, thread_wait: LONG };
    let run = run_objects(&waterfall, &workload, &options, pace, &progress, &SystemClock);
    let (outcome, objects) = run.unwrap();
    let figures = &outcome.figures;
    assert_eq!((figures.requests, figures.wrong_blocks), (60, 0));
    let reasons: Vec<_> = figures.failures.keys().collect();
    assert!(reasons.iter().any(|it| it.contains("No space left on device")), "{reasons:?}");
    // What was written before, and what still fits, is there and right. The rest is missed.
    assert!(objects.contents[2].entries > 0 && figures.hits > 0);
    assert!(figures.misses > figures.prompt_requests[0]);
    let plan = (&workload, &options);
    let evidence = Evidence::of_store(plan, &sizes(0, 0), &outcome, None, DeviceProof::DirectIo);
    assert!(codes(&Validity::of(&evidence)).contains(&"failed"));
}

#[test]
fn a_run_on_a_store_goes_on_when_the_disk_is_full_and_is_not_valid() {
    let Some(disk) = SmallDisk::mount(200) else { return };
    let store = store(&disk.path().join("kv"), 0);
    let workload = Workload { phases: Phases::PrefillOnly, ..workload(Some(1000)) };
    assert!(workload.stored_bytes() > 220 << 20);
    let (options, progress) = (options(3), Progress::default());
    let outcome = run(&store, &workload, &options, &progress, &SystemClock).unwrap();
    let figures = &outcome.figures;
    assert!(!figures.failures.is_empty() && figures.hits > 0, "{figures:?}");
    assert_eq!(figures.wrong_blocks, 0);
    assert!(figures.requests == 1000 || outcome.gave_up, "{}", figures.requests);
    assert!(codes(&validity(&outcome, &sizes(0, 0))).contains(&"failed"));
}

/// A map that gives no answer until it is let go.
#[derive(Default)]
struct StuckBackend {
    map: MapBackend,
    has_read: AtomicBool,
    may_go_on: AtomicBool,
}

impl Backend for StuckBackend {
    fn reserve(&self, bytes: usize) -> Result<Space, String> {
        self.map.reserve(bytes)
    }

    fn put(&self, blocks: Vec<NewBlock>) -> Vec<Stored> {
        self.map.put(blocks)
    }

    fn read(&self, keys: &[BlockKey]) -> Vec<Read> {
        self.has_read.store(true, Ordering::Relaxed);
        wait_until(&|| self.may_go_on.load(Ordering::Relaxed));
        self.map.read(keys)
    }

    fn clear(&self) {
        self.map.clear();
    }
}

fn wait_until(is_true: &dyn Fn() -> bool) {
    while !is_true() {
        std::thread::park_timeout(Duration::from_millis(1));
    }
}

const WINDOW: Duration = Duration::from_secs(3600);

#[test]
fn an_interrupt_after_the_window_gives_a_partial_report() {
    let (backend, progress) = (StuckBackend::default(), Progress::default());
    let (clock, workload) = (ManualClock::default(), workload(None));
    let options = RunOptions { duration: WINDOW, ..options(1) };
    let outcome = std::thread::scope(|scope| {
        let running = scope.spawn(|| run(&backend, &workload, &options, &progress, &clock));
        wait_until(&|| progress.started_ns.load(Ordering::Relaxed) > 0);
        clock.advance(Duration::from_secs(10));
        wait_until(&|| backend.has_read.load(Ordering::Relaxed));
        clock.advance(WINDOW);
        progress.is_stopped.store(true, Ordering::Relaxed);
        backend.may_go_on.store(true, Ordering::Relaxed);
        running.join().unwrap().unwrap()
    });
    assert!(outcome.was_stopped && outcome.tail > Duration::ZERO);
    assert_eq!((outcome.figures.requests, outcome.figures.cut_requests), (0, 1));
    // Control-C asks for the report now: no bytes are compared after it.
    assert_eq!(outcome.figures.audit.blocks, 0);
}

/// In compatible mode a request is served on after the window.
#[test]
fn an_interrupt_in_the_tail_of_a_compatible_run_ends_it() {
    let directory = TempDir::new().unwrap();
    let tiers = WaterfallSizes { gpu_bytes: 0, cpu_bytes: 1 << 30, files_bytes: 1 << 40 };
    let (workload, progress) = (workload(None), Progress::default());
    let clock = ManualClock::default();
    let waterfall = Waterfall::new(directory.path(), tiers, workload.seed, &clock).unwrap();
    // Each request generates for half a day at least.
    let options = RunOptions { duration: WINDOW, token_time: WINDOW, ..options(2) };
    let pace = Pace { think_scale: 1.0, thread_wait: LONG };
    let (outcome, _) = std::thread::scope(|scope| {
        let running =
            scope.spawn(|| run_objects(&waterfall, &workload, &options, pace, &progress, &clock));
        wait_until(&|| progress.started_ns.load(Ordering::Relaxed) > 0);
        clock.advance(Duration::from_secs(10));
        wait_until(&|| progress.written_bytes.load(Ordering::Relaxed) > 0);
        clock.advance(WINDOW);
        progress.is_stopped.store(true, Ordering::Relaxed);
        running.join().unwrap().unwrap()
    });
    assert!(outcome.was_stopped && outcome.figures.written.bytes > 0);
    assert_eq!(outcome.figures.requests, 0);
    assert!(outcome.figures.cut_requests > 0);
}
