//! Runs a workload on a store: looks up each request, reads and checks its hits, puts the rest.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use cascade_block::BlockKey;
use cascade_runtime::Clock;
use cascade_store::{CallOptions, Put, Request, Store, StoreError, TierName, ViewOutcome};

use crate::counts::{ReplayCounts, RequestRecord, WrongBlock};
use crate::pace::Pace;
use crate::payload;
use crate::workload::{PlannedRequest, Workload};

/// Limit of the blocks of one call; larger requests take several calls.
const BATCH_BLOCKS_MAX: usize = 256;
/// Limit of the bytes of one call, so that the workers' buffers stay small.
const BATCH_BYTES_MAX: u64 = 32 << 20;

/// The options of a run.
#[derive(Debug, Clone, Copy)]
pub struct RunOptions {
    /// Requests that fill the cache and are not counted.
    pub warm_up: usize,
    /// Worker threads; they take requests in order of arrival.
    pub threads: u16,
    /// Speed: 0 is as fast as possible, 1 is real time.
    pub speed: f64,
    /// Capacity of the DRAM tier. Batches in flight must not fill it.
    pub dram_bytes: u64,
}

/// The progress of a run, for other threads, and their way to stop it.
#[derive(Debug, Default)]
pub struct Progress {
    /// Finished requests.
    pub requests: AtomicUsize,
    /// Blocks requested, including the warm-up.
    pub blocks: AtomicU64,
    /// Blocks hit, including the warm-up.
    pub hits: AtomicU64,
    /// Once set, no further request begins.
    pub is_stopped: AtomicBool,
}

/// The outcome of a run.
#[derive(Debug)]
pub struct RunOutcome {
    /// Counts and times of the requests after the warm-up.
    pub counts: ReplayCounts,
    /// Wall time from the first counted request to the end of the last, including waits.
    pub took: Duration,
    /// Whether it was stopped before the end.
    pub was_stopped: bool,
}

/// Replays the workload. Another thread may read `progress` and stop the run.
pub fn run(
    store: &Store,
    workload: &Workload,
    options: RunOptions,
    progress: &Progress,
    clock: &dyn Clock,
) -> RunOutcome {
    let next = AtomicUsize::new(0);
    let total = Mutex::new(ReplayCounts::default());
    // Workers take requests side by side: the earliest counted one starts the measurement.
    let counting_since_ns = AtomicU64::new(u64::MAX);
    let pace = Pace::new(clock, options.speed);
    thread::scope(|scope| {
        for _ in 0..options.threads.max(1) {
            scope.spawn(|| {
                let mut worker = ReplayWorker::new(store, workload, options, clock);
                while !progress.is_stopped.load(Ordering::Relaxed) {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some(request) = workload.requests.get(at) else { break };
                    if !pace.wait_until(request.at, &progress.is_stopped) {
                        break;
                    }
                    if at >= options.warm_up {
                        let now = u64::try_from(clock.monotonic().as_nanos()).unwrap_or(u64::MAX);
                        counting_since_ns.fetch_min(now, Ordering::Relaxed);
                    }
                    worker.replay(at, request, at >= options.warm_up, progress);
                }
                let mut total = total.lock().unwrap_or_else(PoisonError::into_inner);
                total.merge(worker.counts);
            });
        }
    });
    let began = Duration::from_nanos(counting_since_ns.into_inner());
    let mut counts = total.into_inner().unwrap_or_else(PoisonError::into_inner);
    counts.requests.sort_by_key(|request| request.index);
    RunOutcome {
        counts,
        took: clock.monotonic().saturating_sub(began),
        was_stopped: progress.is_stopped.load(Ordering::Relaxed),
    }
}

/// One thread of a replay with its buffer.
struct ReplayWorker<'a> {
    store: &'a Store,
    workload: &'a Workload,
    clock: &'a dyn Clock,
    /// The payload of one batch of puts.
    buffer: Vec<u8>,
    batch_blocks: usize,
    counts: ReplayCounts,
}

impl<'a> ReplayWorker<'a> {
    fn new(
        store: &'a Store,
        workload: &'a Workload,
        options: RunOptions,
        clock: &'a dyn Clock,
    ) -> Self {
        // All batches in flight together use at most an eighth of DRAM.
        let share = options.dram_bytes / (8 * u64::from(options.threads.max(1)));
        let fitting = share.min(BATCH_BYTES_MAX) / workload.block_bytes as u64;
        let batch_blocks =
            usize::try_from(fitting).unwrap_or(BATCH_BLOCKS_MAX).clamp(1, BATCH_BLOCKS_MAX);
        let buffer = vec![0; batch_blocks * workload.block_bytes];
        let counts = ReplayCounts::default();
        Self { store, workload, clock, buffer, batch_blocks, counts }
    }

    fn replay(
        &mut self,
        index: usize,
        request: &PlannedRequest,
        is_counted: bool,
        progress: &Progress,
    ) {
        // A warm-up request is counted in an empty set of counts, which is discarded below.
        let before = (!is_counted).then(|| std::mem::take(&mut self.counts));
        let began = self.clock.monotonic();
        let mut lookup = Request::new(&request.keys);
        lookup.partial_tail = request.has_partial_tail;
        // The policy gets the recorded times, whatever the speed of the replay.
        lookup.at = Some(request.at);
        let leading = self.store.lookup_prefix(&lookup).tiers.len().min(request.keys.len());
        let took = self.clock.monotonic().saturating_sub(began);
        self.counts.lookup.record(took);
        self.counts.time.lookup += took;

        let hits = self.read(&request.keys[..leading]);
        let hit_count: u64 = hits.iter().map(|(_, count)| count).sum();
        let found = usize::try_from(hit_count).expect("no more hits than keys");
        self.put(request, found);

        let blocks = request.keys.len() as u64;
        self.counts.blocks_requested += blocks;
        self.counts.count_hits(&hits);
        self.counts.requests.push(RequestRecord { index, at: request.at, blocks, hits });
        progress.requests.fetch_add(1, Ordering::Relaxed);
        progress.blocks.fetch_add(blocks, Ordering::Relaxed);
        progress.hits.fetch_add(hit_count, Ordering::Relaxed);
        if let Some(before) = before {
            let warm_up = std::mem::replace(&mut self.counts, before);
            self.add_errors(warm_up);
        }
    }

    /// Adds the wrong blocks and failures of a warm-up request, which count nevertheless.
    fn add_errors(&mut self, warm_up: ReplayCounts) {
        self.counts.wrong_blocks += warm_up.wrong_blocks;
        self.counts.wrong_examples.extend(warm_up.wrong_examples);
        for (message, count) in warm_up.failures {
            *self.counts.failures.entry(message).or_default() += count;
        }
    }

    /// Reads and checks blocks up to the first miss. Returns the hits by tier.
    fn read(&mut self, keys: &[BlockKey]) -> Vec<(TierName, u64)> {
        let mut hits: Vec<(TierName, u64)> = Vec::new();
        for batch in keys.chunks(self.batch_blocks) {
            let began = self.clock.monotonic();
            let outcomes = self.store.view(batch, CallOptions::default());
            let took = self.clock.monotonic().saturating_sub(began);
            self.counts.time.read += took;
            let (found, is_unbroken) = self.check(batch, outcomes);
            if let Some((slowest, _)) = found.iter().max_by_key(|(tier, _)| rank(tier)) {
                let blocks: u64 = found.iter().map(|(_, count)| count).sum();
                self.counts.count_read(slowest, blocks * self.workload.block_bytes as u64, took);
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

    /// Checks every byte of the leading hits. The second value is whether all blocks were hits.
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
                    self.counts.count_failure(&error);
                    is_unbroken = false;
                    break;
                }
            };
            self.counts.bytes_read += slab.len() as u64;
            match slab.bytes_or_copy() {
                Ok(bytes) => {
                    if let Err(first) = payload::check(key, &bytes, self.workload.block_bytes) {
                        self.counts.count_wrong(WrongBlock { key: *key, tier, first });
                    }
                }
                Err(error) => self.counts.count_failure(&StoreError::Device(error)),
            }
            match found.iter_mut().find(|(known, _)| *known == tier) {
                Some((_, count)) => *count += 1,
                None => found.push((tier, 1)),
            }
        }
        self.counts.checking += self.clock.monotonic().saturating_sub(began);
        (found, is_unbroken)
    }

    /// Puts the blocks after the first `found`, root first.
    fn put(&mut self, request: &PlannedRequest, found: usize) {
        let block_bytes = self.workload.block_bytes;
        let last = request.keys.len().saturating_sub(1);
        for first in (found..request.keys.len()).step_by(self.batch_blocks) {
            let end = (first + self.batch_blocks).min(request.keys.len());
            let began = self.clock.monotonic();
            let pieces = self.buffer.chunks_exact_mut(block_bytes);
            for (key, piece) in request.keys[first..end].iter().zip(pieces) {
                payload::fill(key, piece);
            }
            let batch: Vec<Put<'_>> = (first..end)
                .zip(self.buffer.chunks_exact(block_bytes))
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
            self.counts.checking += filled.saturating_sub(began);
            self.counts.time.put += took;
            self.counts.put.record(took);
            for outcome in &outcomes {
                self.counts.count_put(outcome, block_bytes);
            }
        }
    }
}

/// The position of a tier from fast to slow. An unknown stage counts as the slowest.
fn rank(tier: &str) -> usize {
    let known = ["hbm", "dram", "peers", "files"];
    known.iter().position(|name| *name == tier).unwrap_or(known.len())
}
