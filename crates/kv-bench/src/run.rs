//! Runs the workload: workers take requests that are due, read and write their blocks, and count.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use cascade_block::BlockKey;
use cascade_replay::payload;
use cascade_runtime::{Clock, thread_cpu_time};

use crate::KvBenchError;
use crate::audit::audit;
use crate::autoscaler::{Autoscaler, AutoscalerOptions, Interval, ScaleAction};
use crate::backend::{Backend, KvTier, NewBlock, Read, Stored};
use crate::block_names::BlockNames;
use crate::devices::{Device, KernelCounters};
use crate::measurements::{Answered, Measurements, ReadPurpose, Span, WrittenBlocks};
use crate::permits::Permits;
use crate::plan::{Phases, PlannedRequest, Workload};
use crate::prepare::{Precondition, precondition, store_before};
use crate::progress::Progress;
use crate::queue::{Arrivals, RequestQueue, Task};
use crate::retrieval::Documents;
use crate::window::Window;

/// How often autoscaling looks whether the run is over.
const SCALE_POLL: Duration = Duration::from_millis(50);

/// Operations that fail one after another until the run ends: the store does not work any more.
const FAILED_IN_A_ROW_MAX: u64 = 256;
/// Why an operation without an outcome failed.
const NO_OUTCOME: &str = "the store gave no outcome of a block";
/// Why a new block that is said to be present failed. Each block is unique.
const WAS_NEVER_STORED: &str = "the store took a block as present that was never stored";

/// How a run is driven.
#[derive(Debug, Clone, Copy)]
pub struct RunOptions {
    /// Threads that serve requests.
    pub workers: usize,
    /// Most blocks of one call.
    pub batch_blocks: usize,
    /// Length of the window. A run with a limited number of requests may end before.
    pub duration: Duration,
    /// Requests that arrive a second. `None`: a user asks again after its answer.
    pub request_rate: Option<f64>,
    /// Simulated time to generate a token.
    pub token_time: Duration,
    /// Most prefills at once; 0: no limit.
    pub prefills_max: usize,
    /// Whether bytes that were read are compared with those that were written.
    pub verifies: bool,
    /// The device whose counters are read before and after.
    pub device: Option<Device>,
    /// What is written before the window and removed again.
    pub precondition: Option<Precondition>,
    /// How users are added and taken away. `None`: their number does not change.
    pub autoscaling: Option<AutoscalerOptions>,
}

/// The outcome of a run.
#[derive(Debug)]
pub struct RunOutcome {
    /// Its figures.
    pub figures: Measurements,
    /// What counted. Its end is that of the last answer, if all requests were answered before the
    /// planned end.
    pub window: Window,
    /// How long the operations that were in flight at the end of the window took to end.
    pub tail: Duration,
    /// Whether it was stopped before the end.
    pub was_stopped: bool,
    /// What the kernel counted from the start of the window to the end of the last operation.
    pub kernel: KernelCounters,
    /// Blocks that were stored before the window: shared system prompts, documents, contexts.
    pub blocks_before: u64,
    /// How users were added and taken away.
    pub scaling: Option<Autoscaler>,
    /// Whether it ended early, because the store did not work any more.
    pub gave_up: bool,
}

/// The operation did not begin, because the run is over.
struct Cut;

/// Runs the workload until the end of the window, of the requests, or until it is stopped.
///
/// # Errors
/// If what requests expect to be there cannot be stored.
pub fn run(
    backend: &dyn Backend,
    workload: &Workload,
    options: &RunOptions,
    progress: &Progress,
    clock: &dyn Clock,
) -> Result<RunOutcome, KvBenchError> {
    if let Some(written) = options.precondition {
        precondition(backend, workload, written, progress)?;
    }
    let blocks_before = store_before(backend, workload, options.workers, progress)?;
    let before = KernelCounters::now(options.device);
    let start = clock.monotonic();
    let planned = Window { start, end: start + options.duration };
    progress.started_ns.store(nanoseconds(start).max(1), Ordering::Relaxed);
    let arrivals = Arrivals::of(workload, options.request_rate);
    let queue = RequestQueue::new(workload, arrivals, start);
    let shared = Shared {
        backend,
        workload,
        options,
        progress,
        clock,
        window: planned,
        names: BlockNames::new(workload.seed),
        figures: Mutex::default(),
        prefills: Permits::new(options.prefills_max),
        is_peak_found: AtomicBool::new(false),
        failed_in_a_row: AtomicU64::new(0),
    };
    let mut scaling =
        options.autoscaling.as_ref().map(|it| (Autoscaler::new(it, workload.users), it.interval));
    thread::scope(|scope| {
        for _ in 0..options.workers.max(1) {
            scope.spawn(|| Worker { shared: &shared, chain: Vec::new() }.work(&queue));
        }
        if let Some((autoscaler, interval)) = &mut scaling {
            shared.scale(&queue, autoscaler, *interval);
        }
    });
    let kernel = KernelCounters::now(options.device).since(&before);
    let gave_up = shared.has_given_up();
    let mut figures = shared.figures.into_inner().unwrap_or_else(PoisonError::into_inner);
    let was_stopped = progress.is_stopped.load(Ordering::Relaxed);
    if was_stopped {
        // Answers that were to come after their simulated generation do not come any more.
        figures.last_end = figures.last_end.min(clock.monotonic());
    }
    let end = if was_stopped || clock.monotonic() < planned.end {
        figures.last_end.clamp(start, planned.end)
    } else {
        planned.end
    };
    if !was_stopped && !gave_up {
        audit(backend, workload, &mut figures, options.verifies, clock);
    }
    Ok(RunOutcome {
        tail: figures.last_end.saturating_sub(end),
        window: Window { start, end },
        figures,
        was_stopped,
        kernel,
        blocks_before,
        scaling: scaling.map(|(autoscaler, _)| autoscaler),
        gave_up,
    })
}

/// What all workers share.
struct Shared<'a> {
    backend: &'a dyn Backend,
    workload: &'a Workload,
    options: &'a RunOptions,
    progress: &'a Progress,
    clock: &'a dyn Clock,
    window: Window,
    names: BlockNames,
    figures: Mutex<Measurements>,
    prefills: Permits,
    /// Whether autoscaling has ended the run.
    is_peak_found: AtomicBool,
    /// Operations that failed since the last one that did not.
    failed_in_a_row: AtomicU64,
}

impl Shared<'_> {
    fn figures(&self) -> MutexGuard<'_, Measurements> {
        self.figures.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_over(&self) -> bool {
        self.progress.is_stopped.load(Ordering::Relaxed)
            || self.is_peak_found.load(Ordering::Relaxed)
            || self.has_given_up()
            || self.clock.monotonic() >= self.window.end
    }

    fn has_given_up(&self) -> bool {
        self.failed_in_a_row.load(Ordering::Relaxed) >= FAILED_IN_A_ROW_MAX
    }

    /// Counts the outcomes of a call.
    fn note_outcomes(&self, succeeded: usize, failed: usize) {
        let counter = &self.failed_in_a_row;
        let next = |count: u64| match succeeded {
            _ if count >= FAILED_IN_A_ROW_MAX => count,
            0 => count + failed as u64,
            _ => 0,
        };
        // Once given up, always given up: workers have ended.
        let mut count = counter.load(Ordering::Relaxed);
        while let Err(newer) =
            counter.compare_exchange_weak(count, next(count), Ordering::Relaxed, Ordering::Relaxed)
        {
            count = newer;
        }
    }

    /// Adds users and takes them away until the run is over.
    fn scale(&self, queue: &RequestQueue<'_>, autoscaler: &mut Autoscaler, interval: Duration) {
        let (mut since, mut bytes, mut tokens) = (self.window.start, 0, 0);
        while !self.is_over() {
            let now = self.clock.monotonic();
            let length = now.saturating_sub(since);
            if length < interval {
                cascade_runtime::sleep((interval.saturating_sub(length)).min(SCALE_POLL));
                continue;
            }
            let (measured, all_bytes, all_tokens) = {
                let mut figures = self.figures();
                let all = figures.read_total().bytes + figures.written.bytes;
                (figures.take_interval(), all, figures.tokens)
            };
            let per_second = |amount: u64| amount as f64 / length.as_secs_f64();
            let measured = Interval {
                read_ms_p95: measured.read_call.ms_at(0.95),
                write_ms_p95: measured.write_call.ms_at(0.95),
                gib_per_second: per_second(all_bytes - bytes) / crate::GIB,
                tokens_per_second: per_second(all_tokens - tokens),
            };
            (since, bytes, tokens) = (now, all_bytes, all_tokens);
            match autoscaler.decide(now.saturating_sub(self.window.start), &measured) {
                ScaleAction::Hold => {}
                ScaleAction::Users(users) => queue.set_users(users, now),
                ScaleAction::Stop => self.is_peak_found.store(true, Ordering::Relaxed),
            }
        }
    }

    fn check_time(&self) -> Result<(), Cut> {
        if self.is_over() { Err(Cut) } else { Ok(()) }
    }
}

/// One thread.
struct Worker<'a> {
    shared: &'a Shared<'a>,
    /// The blocks of the request's context, root first.
    chain: Vec<BlockKey>,
}

/// What a block was read for, as the digest has it.
#[derive(Debug, Clone, Copy)]
struct Pass {
    purpose: ReadPurpose,
    number: u64,
}

impl Worker<'_> {
    fn work(mut self, queue: &RequestQueue<'_>) {
        let shared = self.shared;
        while let Some(task) = queue.take(shared.clock, &|| shared.is_over()) {
            match self.serve(&task) {
                Ok(times) if times.at <= shared.window.end => {
                    shared.figures().answered(shared.window, task.request.facts(), times);
                    shared.progress.requests.fetch_add(1, Ordering::Relaxed);
                    queue.finish(task.plan, times.at);
                }
                _ => shared.figures().cut_requests += 1,
            }
        }
    }

    fn serve(&mut self, task: &Task) -> Result<Answered, Cut> {
        let (shared, request) = (self.shared, &task.request);
        let taken = shared.clock.monotonic();
        let phases = shared.workload.phases;
        let mut storage = Duration::ZERO;
        if let Some(retrieval) = &request.retrieval {
            let blocks = Documents::chunk_blocks(&shared.workload.model);
            self.chain.clear();
            for chunk in &retrieval.chunks {
                let positions = chunk * blocks..(chunk + 1) * blocks;
                let name = |at| shared.names.of_document(retrieval.document, at);
                self.chain.extend(positions.map(name));
            }
            let pass = Pass { purpose: ReadPurpose::Retrieval, number: 0 };
            storage += self.read_context(request, self.chain.len(), pass)?;
        }
        self.set_chain(request);
        self.count_prompt(request);
        let known = self.chain.len() - usize::try_from(request.new_blocks()).unwrap_or(usize::MAX);
        if known > 0 && phases != Phases::DecodeOnly {
            let pass = Pass { purpose: ReadPurpose::Reload, number: 0 };
            storage += self.read_context(request, known, pass)?;
        }
        if known < self.chain.len() {
            storage += self.prefill(request, known)?;
        }
        let reads = if phases == Phases::PrefillOnly { 0 } else { request.decode_reads() };
        for number in 0..reads {
            let pass = Pass { purpose: ReadPurpose::Decode, number };
            storage += self.read_context(request, self.chain.len(), pass)?;
        }
        let generation = times(shared.options.token_time, request.generated_tokens);
        let at = shared.clock.monotonic() + generation;
        Ok(Answered { due: task.due, taken, storage, generation, at })
    }

    /// Sets the chain to the context of a request: the shared prompt, then its own blocks.
    fn set_chain(&mut self, request: &PlannedRequest) {
        let names = self.shared.names;
        self.chain.clear();
        let prompt = request.prompt.into_iter().flat_map(|prompt| {
            (0..request.prompt_blocks).map(move |at| names.of_prompt(prompt, at))
        });
        self.chain.extend(prompt);
        let (user, conversation) = (request.user, request.conversation);
        let own = 0..request.total_blocks;
        self.chain.extend(own.map(|at| names.of_conversation(user, conversation, at)));
    }

    fn count_prompt(&self, request: &PlannedRequest) {
        let mut figures = self.shared.figures();
        figures.prompt_requests[usize::from(request.prompt.is_none())] += 1;
        let bytes = request.prompt_blocks * self.shared.workload.model.block_bytes as u64;
        // Each turn would have to compute the prompt again.
        figures.prompt_bytes_saved += bytes;
    }

    /// Writes the blocks from `first` to the end of the chain.
    fn prefill(&self, request: &PlannedRequest, first: usize) -> Result<Duration, Cut> {
        let mut took = Duration::ZERO;
        for from in (first..self.chain.len()).step_by(self.shared.options.batch_blocks) {
            self.shared.check_time()?;
            let to = (from + self.shared.options.batch_blocks).min(self.chain.len());
            took += self.put(&(from..to).collect::<Vec<_>>(), false)?;
            let bytes = self.shared.workload.model.block_bytes as u64;
            let mut figures = self.shared.figures();
            for key in &self.chain[from..to] {
                figures.operations.add(request.facts(), 1, key, bytes);
            }
        }
        self.shared.figures().prefilled(took);
        Ok(took)
    }

    /// Writes some blocks of the chain. Returns the time in the store.
    fn put(&self, positions: &[usize], is_again: bool) -> Result<Duration, Cut> {
        self.shared.prefills.with(|| {
            // Waiting for the permit may have taken long.
            self.shared.check_time()?;
            Ok(self.put_now(positions, is_again))
        })
    }

    fn put_now(&self, positions: &[usize], is_again: bool) -> Duration {
        let Shared { backend, clock, workload, .. } = *self.shared;
        let block_bytes = workload.model.block_bytes;
        let (mut waited, mut filling) = (Duration::ZERO, Duration::ZERO);
        let mut blocks = Vec::with_capacity(positions.len());
        let mut refused = Vec::new();
        for at in positions {
            let began = clock.monotonic();
            let reserved = backend.reserve(block_bytes);
            waited += clock.monotonic().saturating_sub(began);
            let filled_from = thread_cpu_time();
            match reserved {
                Ok(mut space) => {
                    let key = self.chain[*at];
                    payload::fill(&key, space.bytes_mut());
                    let parent = at.checked_sub(1).map(|before| self.chain[before]);
                    blocks.push(NewBlock { key, parent, space });
                }
                Err(reason) => refused.push(reason),
            }
            filling += thread_cpu_time().saturating_sub(filled_from);
        }
        let keys: Vec<BlockKey> = blocks.iter().map(|block| block.key).collect();
        let began = clock.monotonic();
        let mut outcomes = backend.put(blocks);
        let span = Span { began, ended: clock.monotonic() };
        outcomes.resize_with(keys.len(), || Stored::No(NO_OUTCOME.to_owned()));
        waited += span.took();
        let mut figures = self.shared.figures();
        figures.payload += filling;
        let mut stored = 0;
        for (key, outcome) in keys.into_iter().zip(outcomes) {
            match outcome {
                Stored::Yes => {
                    stored += 1;
                    figures.last_stored.add(key);
                }
                // Another request may have computed it again.
                Stored::Present if is_again => {}
                Stored::Present => refused.push(WAS_NEVER_STORED.to_owned()),
                Stored::No(reason) => refused.push(reason),
            }
        }
        for reason in &refused {
            figures.failed(reason);
        }
        let bytes = stored * block_bytes as u64;
        let what = WrittenBlocks { blocks: stored, bytes, is_again };
        figures.wrote(self.shared.window, span, waited, what);
        drop(figures);
        self.shared.note_outcomes(usize::try_from(stored).unwrap_or(usize::MAX), refused.len());
        self.shared.progress.written_bytes.fetch_add(bytes, Ordering::Relaxed);
        waited
    }

    /// Reads the first `count` blocks of the chain once, and computes again what no tier has.
    fn read_context(
        &self,
        request: &PlannedRequest,
        count: usize,
        pass: Pass,
    ) -> Result<Duration, Cut> {
        let (mut took, mut again) = (Duration::ZERO, Duration::ZERO);
        let mut slowest: Option<KvTier> = None;
        for from in (0..count).step_by(self.shared.options.batch_blocks) {
            self.shared.check_time()?;
            let batch = from..(from + self.shared.options.batch_blocks).min(count);
            let (call, missing, tier) = self.read_batch(request, batch, pass);
            took += call;
            slowest = slowest.max(tier);
            if !missing.is_empty() {
                again += self.put(&missing, true)?;
            }
        }
        self.shared.figures().read_context(pass.purpose, slowest, took);
        Ok(took + again)
    }

    /// Reads and checks a batch. Returns the time in the store, what is missing, and the slowest
    /// tier.
    fn read_batch(
        &self,
        request: &PlannedRequest,
        batch: Range<usize>,
        pass: Pass,
    ) -> (Duration, Vec<usize>, Option<KvTier>) {
        let Shared { backend, clock, workload, progress, options, .. } = *self.shared;
        let keys = &self.chain[batch.clone()];
        let began = clock.monotonic();
        let mut outcomes = backend.read(keys);
        let span = Span { began, ended: clock.monotonic() };
        outcomes.resize_with(keys.len(), || Read::Failed(NO_OUTCOME.to_owned()));
        let block_bytes = workload.model.block_bytes;
        let checked_from = thread_cpu_time();
        let mut bytes_by_tier = [0; 3];
        let mut checks = Vec::with_capacity(outcomes.len());
        let (mut missing, mut slowest, mut failures) = (Vec::new(), None, Vec::new());
        for (at, outcome) in batch.clone().zip(outcomes) {
            match outcome {
                Read::Hit { held, tier } => {
                    bytes_by_tier[tier.index()] += held.bytes().len() as u64;
                    slowest = slowest.max(Some(tier));
                    if options.verifies {
                        let key = &self.chain[at];
                        checks.push((at, tier, payload::check(key, held.bytes(), block_bytes)));
                    }
                }
                Read::Miss => missing.push(at),
                Read::Failed(reason) => {
                    missing.push(at);
                    failures.push(reason);
                }
            }
        }
        let checking = thread_cpu_time().saturating_sub(checked_from);
        let mut figures = self.shared.figures();
        figures.payload += checking;
        figures.read(self.shared.window, span, bytes_by_tier);
        for reason in &failures {
            figures.failed(reason);
        }
        count_hits(&mut figures, request, &batch, &missing, pass);
        figures.verified_blocks += checks.len() as u64;
        for (at, tier, checked) in checks {
            if let Err(wrong) = checked {
                let (key, offset) = (&self.chain[at], wrong.offset);
                let name = tier.name();
                figures.wrong(|| format!("block {key} from {name}: byte {offset} differs"));
            }
        }
        let what = match pass.purpose {
            ReadPurpose::Retrieval => 2,
            ReadPurpose::Reload => 3,
            ReadPurpose::Decode => 4 + pass.number,
        };
        for key in keys {
            figures.operations.add(request.facts(), what, key, block_bytes as u64);
        }
        drop(figures);
        self.shared.note_outcomes(keys.len() - missing.len(), failures.len());
        progress.read_bytes.fetch_add(bytes_by_tier.iter().sum(), Ordering::Relaxed);
        (span.took(), missing, slowest)
    }
}

/// Counts the blocks of a batch by what they stand for.
fn count_hits(
    figures: &mut Measurements,
    request: &PlannedRequest,
    batch: &Range<usize>,
    missing: &[usize],
    pass: Pass,
) {
    figures.read_blocks += batch.len() as u64;
    for at in batch.clone() {
        let is_hit = !missing.contains(&at);
        let is_prompt = (at as u64) < request.prompt_blocks;
        figures.hits += u64::from(is_hit);
        figures.misses += u64::from(!is_hit);
        let counter = match (pass.purpose, is_prompt, is_hit) {
            (ReadPurpose::Reload, true, true) => &mut figures.prompt_hits,
            (ReadPurpose::Reload, false, true) => &mut figures.turn_hits,
            (ReadPurpose::Reload, false, false) => &mut figures.turn_misses,
            (ReadPurpose::Decode, _, true) => &mut figures.decode_hits,
            _ => continue,
        };
        *counter += 1;
    }
}

fn times(time: Duration, count: u64) -> Duration {
    time.saturating_mul(u32::try_from(count).unwrap_or(u32::MAX))
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
