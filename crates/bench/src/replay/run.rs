//! Drives a store with a workload: looks up, reads and checks what is there, puts the rest.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use cascade_block::{BlockKey, Clock};
use cascade_store::{CallOptions, Put, Request, Store, TierName, ViewOutcome};

use crate::payload;
use crate::replay::pace::Pace;
use crate::replay::tally::{RequestRecord, Tally, WrongBlock};
use crate::replay::workload::{PlannedRequest, Workload};

/// Blocks of one call at most; requests with more are cut.
const BATCH_BLOCKS_MAX: usize = 256;
/// Bytes of one call at most, so that scratch memory stays small beside the store's.
const BATCH_BYTES_MAX: u64 = 32 << 20;

/// How to run.
#[derive(Debug, Clone, Copy)]
pub struct RunOptions {
    /// Requests that fill the cache and are not counted.
    pub warm_up: usize,
    /// Workers that take requests in order of arrival.
    pub threads: u16,
    /// Zero, or how many times faster than recorded.
    pub speed: f64,
    /// The DRAM tier's size: a batch in flight must not fill it.
    pub dram_bytes: u64,
}

/// What others may watch while a replay runs, and how they stop it.
#[derive(Debug, Default)]
pub struct Progress {
    /// Requests that are done.
    pub requests: AtomicUsize,
    /// Blocks asked for, warm-up included.
    pub blocks: AtomicU64,
    /// Blocks hit, warm-up included.
    pub hits: AtomicU64,
    /// Set by anyone: no further request begins.
    pub is_stopped: AtomicBool,
}

/// What a run gave.
#[derive(Debug)]
pub struct RunOutcome {
    /// Counts and times of the requests after the warm-up.
    pub tally: Tally,
    /// From the first counted request to the last, waiting for arrival times included.
    pub took: Duration,
    /// Whether it was stopped before the end.
    pub was_stopped: bool,
}

/// Replays the workload; the caller watches `progress` from another thread.
pub fn run(
    store: &Store,
    workload: &Workload,
    options: RunOptions,
    progress: &Progress,
    clock: &dyn Clock,
) -> RunOutcome {
    let next = AtomicUsize::new(0);
    let total = Mutex::new(Tally::default());
    let warm_at = AtomicU64::new(u64::MAX);
    let pace = Pace::new(clock, options.speed);
    thread::scope(|scope| {
        for _ in 0..options.threads.max(1) {
            scope.spawn(|| {
                let mut worker = Worker::new(store, workload, options, clock);
                while !progress.is_stopped.load(Ordering::Relaxed) {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some(request) = workload.requests.get(at) else { break };
                    if !pace.wait_until(request.at, &progress.is_stopped) {
                        break;
                    }
                    if at >= options.warm_up {
                        let now = u64::try_from(clock.monotonic().as_nanos()).unwrap_or(u64::MAX);
                        warm_at.fetch_min(now, Ordering::Relaxed);
                    }
                    worker.serve(at, request, at >= options.warm_up, progress);
                }
                let mut total = total.lock().unwrap_or_else(PoisonError::into_inner);
                total.merge(worker.tally);
            });
        }
    });
    let began = Duration::from_nanos(warm_at.into_inner());
    let mut tally = total.into_inner().unwrap_or_else(PoisonError::into_inner);
    tally.requests.sort_by_key(|request| request.index);
    RunOutcome {
        tally,
        took: clock.monotonic().saturating_sub(began),
        was_stopped: progress.is_stopped.load(Ordering::Relaxed),
    }
}

/// One thread of a replay with its scratch memory.
struct Worker<'a> {
    store: &'a Store,
    workload: &'a Workload,
    clock: &'a dyn Clock,
    scratch: Vec<u8>,
    batch_blocks: usize,
    tally: Tally,
}

impl<'a> Worker<'a> {
    fn new(
        store: &'a Store,
        workload: &'a Workload,
        options: RunOptions,
        clock: &'a dyn Clock,
    ) -> Self {
        let share = options.dram_bytes / (8 * u64::from(options.threads.max(1)));
        let fitting = share.min(BATCH_BYTES_MAX) / workload.block_bytes as u64;
        let batch_blocks =
            usize::try_from(fitting).unwrap_or(BATCH_BLOCKS_MAX).clamp(1, BATCH_BLOCKS_MAX);
        let scratch = vec![0; batch_blocks * workload.block_bytes];
        Self { store, workload, clock, scratch, batch_blocks, tally: Tally::default() }
    }

    fn serve(
        &mut self,
        index: usize,
        request: &PlannedRequest,
        is_counted: bool,
        progress: &Progress,
    ) {
        let before = (!is_counted).then(|| std::mem::take(&mut self.tally));
        let began = self.clock.monotonic();
        let mut asked = Request::new(&request.keys);
        asked.partial_tail = request.has_partial_tail;
        // The policy learns from the trace's own times, however fast it is replayed.
        asked.at = Some(request.at);
        let leading = self.store.lookup_prefix(&asked).tiers.len().min(request.keys.len());
        let took = self.clock.monotonic().saturating_sub(began);
        self.tally.lookup.record(took);
        self.tally.time.lookup += took;

        let hits = self.read(&request.keys[..leading]);
        let hit_count: u64 = hits.iter().map(|(_, count)| count).sum();
        let found = usize::try_from(hit_count).expect("no more hits than keys");
        self.put(request, found);

        let blocks = request.keys.len() as u64;
        self.tally.blocks_requested += blocks;
        self.tally.count_hits(&hits);
        self.tally.requests.push(RequestRecord { index, at: request.at, blocks, hits });
        progress.requests.fetch_add(1, Ordering::Relaxed);
        progress.blocks.fetch_add(blocks, Ordering::Relaxed);
        progress.hits.fetch_add(hit_count, Ordering::Relaxed);
        if let Some(before) = before {
            let warm = std::mem::replace(&mut self.tally, before);
            self.keep_damage(warm);
        }
    }

    /// A warm-up is not counted, but a wrong byte in it is still a wrong byte.
    fn keep_damage(&mut self, warm: Tally) {
        self.tally.wrong_blocks += warm.wrong_blocks;
        self.tally.wrong_examples.extend(warm.wrong_examples);
        for (message, count) in warm.failures {
            *self.tally.failures.entry(message).or_default() += count;
        }
    }

    /// Reads and checks leading blocks up to the first that is not there; how many, by tier.
    fn read(&mut self, keys: &[BlockKey]) -> Vec<(TierName, u64)> {
        let mut hits: Vec<(TierName, u64)> = Vec::new();
        for batch in keys.chunks(self.batch_blocks) {
            let began = self.clock.monotonic();
            let outcomes = self.store.view(batch, CallOptions::default());
            let took = self.clock.monotonic().saturating_sub(began);
            self.tally.time.read += took;
            let (found, is_unbroken) = self.check(batch, outcomes);
            if let Some((slowest, _)) = found.iter().max_by_key(|(tier, _)| rank(tier)) {
                let blocks: u64 = found.iter().map(|(_, count)| count).sum();
                self.tally.count_read(slowest, blocks * self.workload.block_bytes as u64, took);
            }
            for (tier, count) in found {
                match hits.iter_mut().find(|(known, _)| *known == tier) {
                    Some((_, sum)) => *sum += count,
                    None => hits.push((tier, count)),
                }
            }
            if !is_unbroken {
                break;
            }
        }
        hits
    }

    /// Compares every byte of the leading hits; the second value says whether all were hits.
    fn check(
        &mut self,
        keys: &[BlockKey],
        outcomes: Vec<ViewOutcome>,
    ) -> (Vec<(TierName, u64)>, bool) {
        let began = self.clock.monotonic();
        let mut found: Vec<(TierName, u64)> = Vec::new();
        let mut is_unbroken = outcomes.len() == keys.len();
        for (key, outcome) in keys.iter().zip(outcomes) {
            let (slab, tier) = match outcome {
                ViewOutcome::Hit { slab, tier } => (slab, tier),
                ViewOutcome::Miss => {
                    is_unbroken = false;
                    break;
                }
                ViewOutcome::Failed(error) => {
                    self.tally.count_failure(&error);
                    is_unbroken = false;
                    break;
                }
            };
            self.tally.bytes_read += slab.len() as u64;
            if let Err(first) = payload::check(key, &slab, self.workload.block_bytes) {
                self.tally.count_wrong(WrongBlock { key: *key, tier, first });
            }
            match found.iter_mut().find(|(known, _)| *known == tier) {
                Some((_, count)) => *count += 1,
                None => found.push((tier, 1)),
            }
        }
        self.tally.checking += self.clock.monotonic().saturating_sub(began);
        (found, is_unbroken)
    }

    /// Puts the blocks after the first `found`, root first.
    fn put(&mut self, request: &PlannedRequest, found: usize) {
        let block_bytes = self.workload.block_bytes;
        let last = request.keys.len().saturating_sub(1);
        for first in (found..request.keys.len()).step_by(self.batch_blocks) {
            let end = (first + self.batch_blocks).min(request.keys.len());
            let began = self.clock.monotonic();
            let pieces = self.scratch.chunks_exact_mut(block_bytes);
            for (key, piece) in request.keys[first..end].iter().zip(pieces) {
                payload::fill(key, piece);
            }
            let batch: Vec<Put<'_>> = (first..end)
                .zip(self.scratch.chunks_exact(block_bytes))
                .map(|(at, bytes)| Put {
                    parent: at.checked_sub(1).map(|parent| request.keys[parent]),
                    namespace: self.workload.namespace,
                    is_partial: request.has_partial_tail && at == last,
                    ..Put::new(request.keys[at], bytes)
                })
                .collect();
            let filled = self.clock.monotonic();
            let outcomes = self.store.put(&batch, CallOptions::default());
            let took = self.clock.monotonic().saturating_sub(filled);
            self.tally.checking += filled.saturating_sub(began);
            self.tally.time.put += took;
            self.tally.put.record(took);
            for outcome in &outcomes {
                self.tally.count_put(outcome, block_bytes);
            }
        }
    }
}

/// Tiers from fast to slow, as far as they are known; a stage of its own counts as slowest.
fn rank(tier: &str) -> usize {
    let known = ["hbm", "dram", "peers", "files"];
    known.iter().position(|name| *name == tier).unwrap_or(known.len())
}
