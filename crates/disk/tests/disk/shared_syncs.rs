//! Many callers of sync and checkpoint with different deadlines, on a disk whose syncs fail, hang
//! or are slow: a call that succeeds has synced every write that was done before it.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cascade_disk::conformance::{append, deadline, open_with, pool};
use cascade_disk::io::{
    FileIo, Transfer, TransferEngine, TransferKind, TransferOutcome, TransferQueue,
};
use cascade_disk::{FilesConfig, IoEngine};
use cascade_runtime::{Deadline, SystemClock};

const THREADS: u64 = 6;
/// Rounds of each thread; it goes on while fewer calls than this succeeded, as on a slow disk.
const ROUNDS: u64 = 60;
const ROUNDS_MAX: u64 = 20 * ROUNDS;
const BLOCK_BYTES: usize = 5000;
const SEGMENT_BYTES: u64 = 64 << 10;
/// A segment for each block: a sync that fails ends its segment, and nothing is reclaimed here.
const CAPACITY_BYTES: u64 = THREADS * ROUNDS_MAX * SEGMENT_BYTES;

/// What happened to one file, in ticks of the log.
#[derive(Debug, Default)]
struct FileLog {
    /// When each write was done.
    writes: Vec<u64>,
    /// When the last successful sync began.
    synced_from: u64,
}

/// Fails and delays syncs of another engine, and writes down what really happened.
#[derive(Debug)]
struct LoggingEngine {
    inner: Arc<dyn TransferEngine>,
    ticks: AtomicU64,
    syncs: AtomicU64,
    /// By the address of their handles, which live as long as the tier.
    files: Mutex<BTreeMap<usize, FileLog>>,
}

struct LoggingQueue<'a> {
    inner: &'a mut dyn TransferQueue,
    engine: &'a LoggingEngine,
    /// Beginnings of the syncs of this call.
    begun: BTreeMap<usize, u64>,
}

impl LoggingEngine {
    fn tick(&self) -> u64 {
        self.ticks.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// Files that have a write from before this tick and no sync after it.
    fn unsynced(&self, tick: u64) -> Vec<(u64, u64)> {
        let files = self.files.lock().unwrap();
        let last_before = |log: &FileLog| log.writes.iter().copied().filter(|at| *at <= tick).max();
        let times = files.values().filter_map(|log| Some((last_before(log)?, log.synced_from)));
        times.filter(|(written, synced_from)| synced_from < written).collect()
    }
}

impl TransferEngine for LoggingEngine {
    fn name(&self) -> &'static str {
        "logging"
    }

    fn run(&self, queue: &mut dyn TransferQueue, deadline: Deadline) {
        let mut queue = LoggingQueue { inner: queue, engine: self, begun: BTreeMap::new() };
        self.inner.run(&mut queue, deadline);
    }
}

impl TransferQueue for LoggingQueue<'_> {
    fn next_transfer(&mut self) -> Option<(usize, Transfer)> {
        let (number, transfer) = self.inner.next_transfer()?;
        if transfer.kind == TransferKind::Sync {
            self.begun.insert(number, self.engine.tick());
            if self.engine.syncs.load(Ordering::SeqCst) % 7 == 3 {
                cascade_runtime::sleep(Duration::from_millis(3));
            }
        }
        Some((number, transfer))
    }

    fn complete(&mut self, number: usize, mut outcome: TransferOutcome) {
        let done = outcome.transfer.as_ref().filter(|_| outcome.result.is_ok());
        if let Some(transfer) = done {
            let file = Arc::as_ptr(&transfer.file).addr();
            let mut files = self.engine.files.lock().unwrap();
            let log = files.entry(file).or_default();
            if let Some(begun) = self.begun.get(&number) {
                // Rarely enough that a sync of the many segments of earlier failures still
                // succeeds on a slow disk.
                match self.engine.syncs.fetch_add(1, Ordering::SeqCst) % 11 {
                    1 => outcome.result = Err(ErrorKind::TimedOut.into()),
                    6 => outcome.result = Err(ErrorKind::Other.into()),
                    _ => log.synced_from = log.synced_from.max(*begun),
                }
            } else if transfer.kind == TransferKind::Write {
                log.writes.push(self.engine.tick());
            }
        }
        self.inner.complete(number, outcome);
    }
}

#[test]
fn a_call_that_succeeds_has_synced_all_writes_before_it() {
    let directory = tempfile::tempdir().unwrap();
    let config = FilesConfig {
        capacity_bytes: CAPACITY_BYTES,
        segment_bytes: SEGMENT_BYTES,
        direct: false,
        ..FilesConfig::new(directory.path())
    };
    let io = FileIo::system(IoEngine::Psync, false, 4, None, Arc::new(SystemClock)).unwrap();
    let engine = Arc::new(LoggingEngine {
        inner: Arc::clone(&io.engine),
        ticks: AtomicU64::new(0),
        syncs: AtomicU64::new(0),
        files: Mutex::default(),
    });
    let io = FileIo { engine: Arc::<LoggingEngine>::clone(&engine), ..io };
    let (files, _) = open_with(config, io, deadline()).unwrap();
    let (pool, succeeded) = (pool(), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (files, engine, pool, succeeded) = (&files, &engine, &pool, &succeeded);
            scope.spawn(move || {
                for round in 0..ROUNDS_MAX {
                    if round >= ROUNDS && succeeded.load(Ordering::SeqCst) > ROUNDS {
                        break;
                    }
                    append(files.as_ref(), pool, &[(thread * ROUNDS_MAX + round, BLOCK_BYTES)]);
                    let before = engine.tick();
                    let time =
                        Duration::from_millis(if round.is_multiple_of(3) { 1 } else { 5000 });
                    let until = Deadline::after(&SystemClock, time);
                    let is_checkpoint = (thread + round).is_multiple_of(2);
                    let synced =
                        if is_checkpoint { files.checkpoint(until) } else { files.sync(until) };
                    if synced.is_ok() {
                        succeeded.fetch_add(1, Ordering::SeqCst);
                        let unsynced = engine.unsynced(before);
                        assert!(unsynced.is_empty(), "checkpoint: {is_checkpoint}, {unsynced:?}");
                    }
                }
            });
        }
    });
    assert!(succeeded.into_inner() > ROUNDS, "too few calls succeeded to prove anything");
}
