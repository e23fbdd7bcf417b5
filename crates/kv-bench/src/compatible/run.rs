//! Runs the original's workload: workers take requests that have arrived, write and read entries.
//!
//! A request that began within the window is served on after it, for as long as the original waits
//! for its threads. All bytes of its entries that were written and read by then count.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use cascade_runtime::{Clock, thread_cpu_time};

use crate::KvBenchError;
use crate::backend::KvTier;
use crate::compatible::document_count::DocumentCount;
use crate::compatible::documents::{ObjectDocuments, ObjectRetrieval};
use crate::compatible::entry::EntryName;
use crate::compatible::figures::ObjectFigures;
use crate::compatible::object_file::Unfinished;
use crate::compatible::plan::{
    COUNTED_PROMPT_TOKENS, ObjectRequest, STORED_PER_USER, STORED_TOKENS, Schedule,
};
use crate::compatible::queue::ObjectQueue;
pub use crate::compatible::queue::Pace;
use crate::compatible::tail::wait_for_workers;
use crate::compatible::waterfall::{ObjectRead, Waterfall};
use crate::devices::KernelCounters;
use crate::measurements::{Answered, Measurements, Moved, RequestFacts, Span, WrittenBlocks};
use crate::permits::Permits;
use crate::plan::{Phases, Workload};
use crate::prepare::in_parallel;
use crate::progress::Progress;
use crate::qos::QosClass;
use crate::run::{RunOptions, RunOutcome};
use crate::window::Window;

/// How long a worker sleeps at once while tokens are generated.
const GENERATION_POLL: Duration = Duration::from_millis(100);

/// The run ended before the operation.
struct Cut;

/// Runs the workload until the end of the window, of the requests, or until it is stopped.
///
/// # Errors
/// If what requests expect to be there cannot be stored.
pub fn run(
    waterfall: &Waterfall<'_>,
    workload: &Workload,
    options: &RunOptions,
    pace: Pace,
    progress: &Progress,
    clock: &dyn Clock,
) -> Result<(RunOutcome, ObjectFigures), KvBenchError> {
    let entries_before = store_before(waterfall, workload, options, progress)?;
    waterfall.start_window();
    let before = KernelCounters::now(options.device);
    let start = clock.monotonic();
    let planned = Window { start, end: start + options.duration };
    let started_ns = u64::try_from(start.as_nanos()).unwrap_or(u64::MAX).max(1);
    progress.started_ns.store(started_ns, Ordering::Relaxed);
    let schedule = Schedule::new(workload);
    let queue = ObjectQueue::new(&schedule, workload.requests_max, pace, start);
    let shared = Shared::new((waterfall, clock), (workload, options), progress, planned);
    thread::scope(|scope| {
        if let Some(documents) = schedule.documents() {
            scope.spawn(|| Worker::new(&shared).store_documents(documents));
        }
        let work = || Worker::new(&shared).work(&queue);
        let workers = (0..options.workers.max(1)).map(|_| scope.spawn(work)).collect::<Vec<_>>();
        let left = planned.end.saturating_sub(clock.monotonic());
        wait_for_workers(&workers, left, pace.thread_wait, &|| shared.is_stopped());
        // What is still under way ends at its next piece, and counts nowhere.
        waterfall.cut();
    });
    let kernel = KernelCounters::now(options.device).since(&before);
    Ok(shared.outcome(kernel, entries_before))
}

fn note_failures(figures: &mut Measurements, failures: BTreeMap<String, u64>) {
    for (reason, count) in failures {
        (0..count).for_each(|_| figures.failed(&reason));
    }
}

/// Writes what preconditioning writes, which stays, and the contexts of decode alone. Returns how
/// many of those there are.
pub(crate) fn store_before(
    waterfall: &Waterfall<'_>,
    workload: &Workload,
    options: &RunOptions,
    progress: &Progress,
) -> Result<u64, KvBenchError> {
    let bytes = STORED_TOKENS * workload.model.bytes_per_token;
    let failure = Mutex::new(None);
    let store = |name: EntryName| {
        if progress.is_stopped.load(Ordering::Relaxed) {
            return false;
        }
        let names = waterfall.names();
        let mut fill = |number, piece: &mut [u8]| name.fill(names, number, piece);
        let written = waterfall.write(name, bytes, &mut fill, &mut Vec::new());
        let mut failure = failure.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(Unfinished::Failed(error)) = written {
            failure.get_or_insert(cannot_write(&error));
        }
        failure.is_none()
    };
    if let Some(precondition) = options.precondition {
        let count = precondition.bytes.div_ceil(bytes);
        in_parallel(precondition.threads, &|index| {
            let number = u32::try_from(index).unwrap_or(u32::MAX);
            u64::from(number) < count && store(EntryName::Precondition(number))
        });
    }
    let contexts = match workload.phases {
        Phases::DecodeOnly => workload.users.saturating_mul(STORED_PER_USER),
        _ => 0,
    };
    in_parallel(options.workers, &|index| {
        let number = u32::try_from(index).unwrap_or(u32::MAX);
        number < contexts && store(EntryName::Context(number))
    });
    let failure = failure.into_inner().unwrap_or_else(PoisonError::into_inner);
    failure.map_or(Ok(u64::from(contexts)), |reason| Err(KvBenchError::Prepare(reason)))
}

fn cannot_write(error: &io::Error) -> String {
    format!("cannot write an entry: {error}")
}

#[derive(Default)]
struct Figures {
    common: Measurements,
    objects: ObjectFigures,
}

/// What all workers share.
pub(crate) struct Shared<'a> {
    waterfall: &'a Waterfall<'a>,
    workload: &'a Workload,
    options: &'a RunOptions,
    progress: &'a Progress,
    clock: &'a dyn Clock,
    window: Window,
    figures: Mutex<Figures>,
    prefills: Permits,
    documents: DocumentCount,
}

impl<'a> Shared<'a> {
    pub(crate) fn new(
        (waterfall, clock): (&'a Waterfall<'a>, &'a dyn Clock),
        (workload, options): (&'a Workload, &'a RunOptions),
        progress: &'a Progress,
        window: Window,
    ) -> Self {
        let prefills = Permits::new(options.prefills_max);
        Self {
            waterfall,
            workload,
            options,
            progress,
            clock,
            window,
            figures: Mutex::default(),
            prefills,
            documents: DocumentCount::default(),
        }
    }

    /// What all workers have done, once they have ended.
    pub(crate) fn outcome(
        self,
        kernel: KernelCounters,
        entries_before: u64,
    ) -> (RunOutcome, ObjectFigures) {
        let was_stopped = self.is_stopped();
        let Self { waterfall, workload, clock, window: planned, .. } = self;
        let all = self.figures.into_inner().unwrap_or_else(PoisonError::into_inner);
        let Figures { common: mut figures, mut objects } = all;
        note_failures(&mut figures, waterfall.take_failures());
        objects.contents = waterfall.contents();
        objects.moved = waterfall.moved();
        let rank_bytes = workload.model.bytes_per_token.max(1);
        objects.storage_tokens += (objects.moved.demoted_bytes / rank_bytes) as f64;
        let end = if was_stopped || clock.monotonic() < planned.end {
            figures.last_end.clamp(planned.start, planned.end)
        } else {
            planned.end
        };
        let outcome = RunOutcome {
            tail: figures.last_end.saturating_sub(end),
            window: Window { start: planned.start, end },
            figures,
            was_stopped,
            kernel,
            blocks_before: entries_before,
            scaling: None,
            gave_up: false,
        };
        (outcome, objects)
    }

    fn figures(&self) -> MutexGuard<'_, Figures> {
        self.figures.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_stopped(&self) -> bool {
        self.progress.is_stopped.load(Ordering::Relaxed)
    }

    /// Whether no further operation begins.
    fn is_cut(&self) -> bool {
        self.is_stopped() || self.waterfall.is_cut()
    }

    /// Whether no further request begins.
    pub(crate) fn is_over(&self) -> bool {
        self.is_stopped() || self.clock.monotonic() >= self.window.end
    }
}

/// One thread.
pub(crate) struct Worker<'a> {
    shared: &'a Shared<'a>,
    /// Memory for a piece of an entry.
    piece: Vec<u8>,
}

/// An entry to write.
#[derive(Debug, Clone, Copy)]
struct NewEntry {
    name: EntryName,
    tokens: u64,
    is_again: bool,
}

/// The outcome of a read, for its caller.
#[derive(Debug, Clone, Copy)]
struct ReadOutcome {
    is_hit: bool,
    took: Duration,
}

impl<'a> Worker<'a> {
    pub(crate) fn new(shared: &'a Shared<'a>) -> Self {
        Self { shared, piece: Vec::new() }
    }

    fn work(mut self, queue: &ObjectQueue) {
        let shared = self.shared;
        while let Some(request) = queue.take(shared.clock, &|| shared.is_over()) {
            self.answer(&request, queue);
        }
    }

    /// Serves a request that was taken from the queue, and counts it.
    pub(crate) fn answer(&mut self, request: &ObjectRequest, queue: &ObjectQueue) {
        let shared = self.shared;
        match self.serve(request, queue.due(request)) {
            Ok(times) => {
                let mut figures = shared.figures();
                figures.common.answered(shared.window, request.facts(), times);
                drop(figures);
                shared.progress.requests.fetch_add(1, Ordering::Relaxed);
            }
            Err(Cut) => shared.figures().common.cut_requests += 1,
        }
        queue.finish(request);
    }

    fn serve(&mut self, request: &ObjectRequest, due: Duration) -> Result<Answered, Cut> {
        let shared = self.shared;
        let taken = shared.clock.monotonic();
        let phases = shared.workload.phases;
        let mut storage = Duration::ZERO;
        self.count_prompt(request);
        if phases != Phases::DecodeOnly {
            for turn in 1..request.turn {
                let read = self.read(request, request.entry_of(turn), 3)?;
                storage += read.took;
                let mut figures = shared.figures();
                if read.is_hit {
                    figures.common.turn_hits += 1;
                } else {
                    figures.common.turn_misses += 1;
                }
            }
            if request.question.is_none() {
                storage += self.write(request, false)?;
            }
        }
        if let Some(retrieval) = &request.retrieval {
            storage += self.retrieve(request, retrieval)?;
        }
        if phases != Phases::PrefillOnly && !request.only_writes {
            storage += self.decode(request)?;
        }
        let tokens = u32::try_from(request.generated_tokens).unwrap_or(u32::MAX);
        let generation = shared.options.token_time.saturating_mul(tokens);
        self.generate(generation)?;
        let at = shared.clock.monotonic();
        Ok(Answered { due, taken, storage, generation, at })
    }

    /// Counts the system prompt. Its KV is looked up and never there: the original stores none.
    fn count_prompt(&self, request: &ObjectRequest) {
        if !self.shared.workload.has_shared_prompts {
            return;
        }
        let mut figures = self.shared.figures();
        let figures = &mut figures.common;
        figures.prompt_requests[usize::from(request.prompt.is_none())] += 1;
        if let Some(prompt) = request.prompt {
            let tokens = COUNTED_PROMPT_TOKENS[usize::from(prompt)];
            figures.prompt_bytes_saved += tokens * self.shared.workload.model.model_bytes_per_token;
            figures.misses += 1;
            figures.read_blocks += 1;
        }
    }

    /// Stores the documents, as the original does while it serves requests. A limited run stores
    /// all of them, so that a seed repeats it.
    pub(crate) fn store_documents(mut self, documents: &ObjectDocuments) {
        let storing = self.shared.documents.store();
        let is_limited = self.shared.workload.requests_max.is_some();
        'all: for document in 0..documents.count() {
            if !is_limited && self.shared.is_over() {
                break;
            }
            let facts = RequestFacts {
                user: u32::MAX,
                number: u64::from(document),
                class: QosClass::Batch,
                generated_tokens: 0,
            };
            for (chunk, tokens) in (0..).zip(documents.chunks(document)) {
                let name = EntryName::Chunk { document, chunk };
                let (tokens, is_again) = (u64::from(tokens), false);
                if self.write_entry(facts, NewEntry { name, tokens, is_again }).is_err() {
                    break 'all;
                }
            }
            storing.stored(document);
        }
    }

    /// Reads chunks of a document.
    fn retrieve(
        &mut self,
        request: &ObjectRequest,
        retrieval: &ObjectRetrieval,
    ) -> Result<Duration, Cut> {
        let document = retrieval.document;
        self.shared.documents.wait_for(document);
        let (mut took, mut hits) = (Duration::ZERO, 0);
        for chunk in retrieval.chunks() {
            let read = self.read(request, EntryName::Chunk { document, chunk }, 2)?;
            took += read.took;
            hits += u64::from(read.is_hit);
        }
        let mut figures = self.shared.figures();
        figures.common.decode_hits += hits;
        figures.common.retrieval.record(took);
        Ok(took)
    }

    /// Writes the entry of a request. Returns the time in the tier.
    fn write(&mut self, request: &ObjectRequest, is_again: bool) -> Result<Duration, Cut> {
        let (name, tokens) = (request.own_entry(), request.context_tokens);
        self.write_entry(request.facts(), NewEntry { name, tokens, is_again })
    }

    fn write_entry(&mut self, facts: RequestFacts, entry: NewEntry) -> Result<Duration, Cut> {
        let shared = self.shared;
        if shared.is_cut() {
            return Err(Cut);
        }
        let (waterfall, clock) = (shared.waterfall, shared.clock);
        let NewEntry { name, tokens, is_again } = entry;
        let bytes = tokens * shared.workload.model.bytes_per_token;
        let mut filling = Duration::ZERO;
        let mut fill = |number, piece: &mut [u8]| {
            let began = thread_cpu_time();
            name.fill(waterfall.names(), number, piece);
            filling += thread_cpu_time().saturating_sub(began);
        };
        let piece = &mut self.piece;
        let (began, written) = shared.prefills.with(|| {
            // Waiting for the permit may have taken long.
            if shared.is_cut() {
                return Err(Cut);
            }
            Ok((clock.monotonic(), waterfall.write(name, bytes, &mut fill, piece)))
        })?;
        let span = Span { began, ended: clock.monotonic() };
        let mut figures = shared.figures();
        let Figures { common, objects } = &mut *figures;
        common.payload += filling;
        let written = match written {
            Ok(written) => written,
            Err(Unfinished::Cut { tier, bytes }) => {
                let counted = common.wrote_part(shared.window, span, bytes);
                objects.written[tier.index()].window_bytes += counted;
                return Err(Cut);
            }
            Err(Unfinished::Failed(error)) => {
                common.failed(&cannot_write(&error));
                None
            }
        };
        if !is_again {
            let key = name.key(waterfall.names(), 0);
            common.operations.add(facts, 1, &key, bytes);
        }
        let Some(written) = written else { return Ok(Duration::ZERO) };
        let took = written.times.total();
        let what = WrittenBlocks { blocks: 1, bytes, is_again };
        common.wrote(shared.window, span, took, what);
        common.prefilled(took);
        let tier = written.tier.index();
        let counted = shared.window.clip(bytes, span.began, span.ended);
        objects.written[tier].add(Moved { bytes, window_bytes: counted });
        objects.write_by_tier[tier].record(took);
        if written.tier == KvTier::Storage {
            objects.wrote_file(written.times.device, written.times.host);
            objects.storage_tokens += tokens as f64;
        }
        drop(figures);
        shared.progress.written_bytes.fetch_add(bytes, Ordering::Relaxed);
        Ok(took)
    }

    /// Reads the entry of a request once, and once more for each 32 generated tokens.
    fn decode(&mut self, request: &ObjectRequest) -> Result<Duration, Cut> {
        let own = request.own_entry();
        let name = request.stored_context.map_or(own, EntryName::Context);
        let first = self.read(request, name, 4)?;
        let (mut took, mut again, mut hits) = (first.took, Duration::ZERO, 0);
        if first.is_hit {
            hits += 1;
            for number in 1..=request.decode_reads(&self.shared.workload.settings) {
                let read = self.read(request, name, 4 + number)?;
                took += read.took;
                hits += u64::from(read.is_hit);
            }
        } else if request.stored_context.is_none() {
            // Questions store nothing before: the first one about a document writes its context.
            again = self.write(request, request.question.is_none_or(|it| !it.is_first))?;
        }
        let mut figures = self.shared.figures();
        let figures = &mut figures.common;
        // Hits of a request with a system prompt are counted as hits of the prompt.
        if request.prompt.is_some() {
            figures.prompt_hits += hits;
        } else {
            figures.decode_hits += hits;
        }
        figures.decode.record(took);
        figures.samples.decode.offer(took.as_secs_f64());
        Ok(took + again)
    }

    /// Reads an entry.
    fn read(
        &mut self,
        request: &ObjectRequest,
        name: EntryName,
        what: u64,
    ) -> Result<ReadOutcome, Cut> {
        let shared = self.shared;
        if shared.is_cut() {
            return Err(Cut);
        }
        let (names, verifies) = (shared.waterfall.names(), shared.options.verifies);
        let (mut checking, mut wrong) = (Duration::ZERO, None);
        let mut look = |number, piece: &[u8]| {
            if verifies {
                let began = thread_cpu_time();
                wrong = wrong.or_else(|| name.first_wrong(names, number, piece));
                checking += thread_cpu_time().saturating_sub(began);
            }
        };
        let began = shared.clock.monotonic();
        let read = shared.waterfall.read(name, &mut self.piece, &mut look);
        let span = Span { began, ended: shared.clock.monotonic() };
        let mut figures = shared.figures();
        let Figures { common, objects } = &mut *figures;
        common.payload += checking;
        if let Some(offset) = wrong {
            common.wrong(|| format!("entry {}: byte {offset} differs", name.file_name()));
        }
        let (tier, bytes, times) = match read {
            Ok(ObjectRead::Hit { tier, bytes, times }) => (tier, bytes, times),
            Err(Unfinished::Cut { tier, bytes }) => {
                common.read_part(shared.window, span, tier, bytes);
                return Err(Cut);
            }
            missed => {
                if let Err(Unfinished::Failed(error)) = missed {
                    common.failed(&format!("cannot read an entry: {error}"));
                }
                common.read_blocks += 1;
                common.misses += 1;
                return Ok(ReadOutcome { is_hit: false, took: Duration::ZERO });
            }
        };
        let took = times.total();
        common.read_blocks += 1;
        common.hits += 1;
        common.decode_reads += 1;
        common.operations.add(request.facts(), what, &name.key(names, 0), bytes);
        let mut bytes_by_tier = [0; 3];
        bytes_by_tier[tier.index()] = bytes;
        common.read(shared.window, span, bytes_by_tier);
        common.read_by_tier[tier.index()].record(took);
        common.verified_blocks += u64::from(verifies);
        if tier == KvTier::Storage {
            objects.read_file(times.device, times.host);
            let token_bytes = shared.workload.model.model_bytes_per_token as f64;
            objects.storage_tokens += bytes as f64 / token_bytes;
        }
        drop(figures);
        shared.progress.read_bytes.fetch_add(bytes, Ordering::Relaxed);
        Ok(ReadOutcome { is_hit: true, took })
    }

    /// Lets the time pass that generation would take. The worker is busy during it.
    fn generate(&self, time: Duration) -> Result<(), Cut> {
        let clock = self.shared.clock;
        let until = clock.monotonic() + time;
        loop {
            let left = until.saturating_sub(clock.monotonic());
            if left.is_zero() {
                return Ok(());
            }
            if self.shared.is_cut() {
                return Err(Cut);
            }
            cascade_runtime::sleep(left.min(GENERATION_POLL));
        }
    }
}
