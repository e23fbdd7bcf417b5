//! The figures of a run. Their memory does not depend on its length.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use cascade_block::BlockKey;
use cascade_replay::random::mix;
use serde::Serialize;

use crate::backend::KvTier;
use crate::histogram::LatencyHistogram;
use crate::qos::QosClass;
use crate::samples::Samples;
use crate::timeline::{Slice, Timeline};
use crate::window::Window;

/// Most samples of each list in the results.
const SAMPLES_MAX: usize = 10_000;
/// Most different failures that are described.
const FAILURES_MAX: usize = 20;

/// Blocks that are kept in mind as those that were stored last.
const LAST_STORED_MAX: usize = 32;

/// Why blocks are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadPurpose {
    /// A later turn, or one with a shared prompt, loads what is stored.
    Reload,
    /// Tokens are generated.
    Decode,
    /// Chunks of a document are loaded.
    Retrieval,
}

/// A span of the run's time.
#[derive(Debug, Clone, Copy)]
pub struct Span {
    /// Its start.
    pub began: Duration,
    /// Its end.
    pub ended: Duration,
}

impl Span {
    /// How long it was.
    pub fn took(&self) -> Duration {
        self.ended.saturating_sub(self.began)
    }
}

/// What a call wrote.
#[derive(Debug, Clone, Copy)]
pub struct WrittenBlocks {
    /// Number of blocks.
    pub blocks: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Whether they were stored before, and had to be computed again.
    pub is_again: bool,
}

/// Counts and bytes in one direction.
#[derive(Debug, Clone, Copy, Default)]
pub struct Moved {
    /// Bytes, all of them.
    pub bytes: u64,
    /// Bytes within the window.
    pub window_bytes: u64,
}

impl Moved {
    /// Adds what moved.
    pub fn add(&mut self, other: Self) {
        self.bytes += other.bytes;
        self.window_bytes += other.window_bytes;
    }
}

/// What the figures need of a request.
#[derive(Debug, Clone, Copy)]
pub struct RequestFacts {
    /// The user.
    pub user: u32,
    /// Its number, in the order of the plan.
    pub number: u64,
    /// The user's class.
    pub class: QosClass,
    /// Tokens to generate.
    pub generated_tokens: u64,
}

/// A digest of operations that does not depend on their order.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OperationsDigest {
    sum: u64,
    /// Number of operations.
    pub count: u64,
    /// Bytes of the operations.
    pub bytes: u64,
}

impl OperationsDigest {
    /// Adds the operation on one block.
    pub fn add(&mut self, request: RequestFacts, what: u64, key: &BlockKey, bytes: u64) {
        let parts = [u64::from(request.user), request.number, what, key.fingerprint(), bytes];
        let operation = parts.iter().fold(0, |state, part| mix(state ^ mix(part.wrapping_add(1))));
        self.sum = self.sum.wrapping_add(operation);
        self.count += 1;
        self.bytes += bytes;
    }

    /// 16 hexadecimal digits.
    pub fn text(&self) -> String {
        format!("{:016x}", self.sum)
    }
}

/// Figures of a class of service.
#[derive(Debug, Default)]
pub struct ClassFigures {
    /// End-to-end latencies of its requests.
    pub latency: LatencyHistogram,
}

/// The blocks that were stored last.
#[derive(Debug, Default)]
pub struct LastStored {
    pub(crate) keys: VecDeque<BlockKey>,
}

/// What was read again after the window.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct AuditCounts {
    /// Blocks that were read again.
    pub blocks: u64,
    /// Blocks that no tier had.
    pub missing: u64,
}

impl LastStored {
    pub(crate) fn add(&mut self, key: BlockKey) {
        if self.keys.len() == LAST_STORED_MAX {
            self.keys.pop_front();
        }
        self.keys.push_back(key);
    }
}

/// All figures of a run.
#[derive(Debug)]
pub struct Measurements {
    /// Requests that were answered.
    pub requests: u64,
    /// Tokens that they generated.
    pub tokens: u64,
    /// Requests that the end of the window, or of the tail, cut off.
    pub cut_requests: u64,
    /// Reads by tier.
    pub read: [Moved; 3],
    /// Writes, each block once.
    pub written: Moved,
    /// Of these, blocks that were computed again because no tier had them.
    pub recomputed: Moved,
    /// Blocks read and written.
    pub read_blocks: u64,
    /// Blocks written.
    pub written_blocks: u64,
    /// Blocks hit.
    pub hits: u64,
    /// Blocks missed.
    pub misses: u64,
    /// Hits in shared system prompts.
    pub prompt_hits: u64,
    /// Hits in what earlier turns stored.
    pub turn_hits: u64,
    /// Misses there.
    pub turn_misses: u64,
    /// Hits while tokens are generated.
    pub decode_hits: u64,
    /// Prefills that wrote something.
    pub prefills: u64,
    /// Reads of a whole context while tokens were generated.
    pub decode_reads: u64,
    /// Requests with, and without, a shared system prompt.
    pub prompt_requests: [u64; 2],
    /// Bytes of shared system prompts that were not written again.
    pub prompt_bytes_saved: u64,
    /// Latency of a prefill: all new blocks of a request.
    pub write: LatencyHistogram,
    /// Latency of one read of a context, by the slowest tier that a block of it came from.
    pub read_by_tier: [LatencyHistogram; 3],
    /// Latency of loading what earlier turns stored.
    pub reload: LatencyHistogram,
    /// Latency of loading chunks of a document.
    pub retrieval: LatencyHistogram,
    /// Latency of one read of the context while tokens are generated.
    pub decode: LatencyHistogram,
    /// Latency of one call that writes a batch of blocks.
    pub write_call: LatencyHistogram,
    /// Latency of one call that reads a batch of blocks.
    pub read_call: LatencyHistogram,
    /// Calls since the last decision of autoscaling.
    pub interval: IntervalCalls,
    /// From when a request was due to its answer.
    pub end_to_end: LatencyHistogram,
    /// From when a request was due until it was served.
    pub queue: LatencyHistogram,
    /// All calls of a request.
    pub storage: LatencyHistogram,
    /// Simulated generation of its tokens.
    pub generation: LatencyHistogram,
    /// By class of service.
    pub classes: [ClassFigures; 3],
    /// Samples of `end_to_end`, `storage`, `generation`, `write` and `decode` in seconds.
    pub samples: SampleLists,
    /// Bytes and tokens over time.
    pub timeline: Timeline,
    /// Every operation of answered requests and of those that were cut off.
    pub operations: OperationsDigest,
    /// Blocks that were read and compared with what was written.
    pub verified_blocks: u64,
    /// Blocks with other bytes than were written.
    pub wrong_blocks: u64,
    /// The first of them.
    pub wrong_examples: Vec<String>,
    /// The blocks that were stored last.
    pub last_stored: LastStored,
    /// Those blocks, read again after the window.
    pub audit: AuditCounts,
    /// Failures by message.
    pub failures: BTreeMap<String, u64>,
    /// Processor time for making and comparing bytes.
    pub payload: Duration,
    /// The end of the last operation.
    pub last_end: Duration,
}

/// The lists of the original's result files, bounded.
#[derive(Debug)]
pub struct SampleLists {
    /// From when a request was due to its answer.
    pub end_to_end: Samples,
    /// All calls of a request.
    pub storage: Samples,
    /// Simulated generation.
    pub generation: Samples,
    /// Prefills.
    pub prefill: Samples,
    /// Reads of the context.
    pub decode: Samples,
}

impl Default for SampleLists {
    fn default() -> Self {
        let list = || Samples::new(SAMPLES_MAX);
        Self {
            end_to_end: list(),
            storage: list(),
            generation: list(),
            prefill: list(),
            decode: list(),
        }
    }
}

/// Latencies of calls since they were taken last.
#[derive(Debug, Default)]
pub struct IntervalCalls {
    /// Calls that read.
    pub read_call: LatencyHistogram,
    /// Calls that wrote.
    pub write_call: LatencyHistogram,
}

/// The times of an answered request.
#[derive(Debug, Clone, Copy)]
pub struct Answered {
    /// When it was due.
    pub due: Duration,
    /// When a worker took it.
    pub taken: Duration,
    /// All its calls.
    pub storage: Duration,
    /// Simulated generation.
    pub generation: Duration,
    /// Its answer, with simulated generation.
    pub at: Duration,
}

impl Default for Measurements {
    fn default() -> Self {
        Self {
            requests: 0,
            tokens: 0,
            cut_requests: 0,
            read: <[Moved; 3]>::default(),
            written: Moved::default(),
            recomputed: Moved::default(),
            read_blocks: 0,
            written_blocks: 0,
            hits: 0,
            misses: 0,
            prompt_hits: 0,
            turn_hits: 0,
            turn_misses: 0,
            decode_hits: 0,
            prefills: 0,
            decode_reads: 0,
            prompt_requests: [0; 2],
            prompt_bytes_saved: 0,
            write: LatencyHistogram::default(),
            read_by_tier: Default::default(),
            reload: LatencyHistogram::default(),
            retrieval: LatencyHistogram::default(),
            decode: LatencyHistogram::default(),
            write_call: LatencyHistogram::default(),
            read_call: LatencyHistogram::default(),
            interval: IntervalCalls::default(),
            end_to_end: LatencyHistogram::default(),
            queue: LatencyHistogram::default(),
            storage: LatencyHistogram::default(),
            generation: LatencyHistogram::default(),
            classes: Default::default(),
            samples: SampleLists::default(),
            timeline: Timeline::default(),
            operations: OperationsDigest::default(),
            verified_blocks: 0,
            wrong_blocks: 0,
            wrong_examples: Vec::new(),
            last_stored: LastStored::default(),
            audit: AuditCounts::default(),
            failures: BTreeMap::new(),
            payload: Duration::ZERO,
            last_end: Duration::ZERO,
        }
    }
}

impl Measurements {
    /// Counts a call that wrote blocks, and what its caller waited for memory and for it.
    pub fn wrote(&mut self, window: Window, span: Span, waited: Duration, what: WrittenBlocks) {
        let WrittenBlocks { blocks, bytes, is_again } = what;
        let counted = window.clip(bytes, span.began, span.ended);
        let mut sums = vec![&mut self.written];
        if is_again {
            sums.push(&mut self.recomputed);
        }
        for sum in sums {
            sum.bytes += bytes;
            sum.window_bytes += counted;
        }
        self.written_blocks += blocks;
        self.write_call.record(waited);
        self.interval.write_call.record(waited);
        let slice = Slice { written_bytes: counted, ..Slice::default() };
        self.note_end(window, span, slice);
    }

    /// Counts a call that read bytes from these tiers.
    pub fn read(&mut self, window: Window, span: Span, bytes_by_tier: [u64; 3]) {
        let mut slice = Slice::default();
        for tier in KvTier::ALL {
            let bytes = bytes_by_tier[tier.index()];
            let counted = window.clip(bytes, span.began, span.ended);
            let sum = &mut self.read[tier.index()];
            sum.bytes += bytes;
            sum.window_bytes += counted;
            slice.read_bytes += counted;
        }
        self.read_call.record(span.took());
        self.interval.read_call.record(span.took());
        self.note_end(window, span, slice);
    }

    /// Counts a call that the end of the run cut off: what it wrote within the window, which is
    /// returned.
    pub fn wrote_part(&mut self, window: Window, span: Span, bytes: u64) -> u64 {
        let counted = window.clip(bytes, span.began, span.ended);
        self.written.window_bytes += counted;
        self.note_end(window, span, Slice { written_bytes: counted, ..Slice::default() });
        counted
    }

    /// Counts a call that the end of the run cut off: what it read within the window.
    pub fn read_part(&mut self, window: Window, span: Span, tier: KvTier, bytes: u64) {
        let counted = window.clip(bytes, span.began, span.ended);
        self.read[tier.index()].window_bytes += counted;
        self.note_end(window, span, Slice { read_bytes: counted, ..Slice::default() });
    }

    /// The calls since this was called last.
    pub fn take_interval(&mut self) -> IntervalCalls {
        std::mem::take(&mut self.interval)
    }

    /// Counts one read of a context.
    pub fn read_context(&mut self, purpose: ReadPurpose, slowest: Option<KvTier>, took: Duration) {
        if let Some(slowest) = slowest {
            self.read_by_tier[slowest.index()].record(took);
        }
        match purpose {
            ReadPurpose::Reload => self.reload.record(took),
            ReadPurpose::Retrieval => self.retrieval.record(took),
            ReadPurpose::Decode => {
                self.decode.record(took);
                self.decode_reads += 1;
                self.samples.decode.offer(took.as_secs_f64());
            }
        }
    }

    /// Counts a prefill.
    pub fn prefilled(&mut self, took: Duration) {
        self.prefills += 1;
        self.write.record(took);
        self.samples.prefill.offer(took.as_secs_f64());
    }

    /// Counts a request that was answered.
    pub fn answered(&mut self, window: Window, request: RequestFacts, times: Answered) {
        self.requests += 1;
        self.last_end = self.last_end.max(times.at);
        self.tokens += request.generated_tokens;
        let whole = times.at.saturating_sub(times.due);
        self.end_to_end.record(whole);
        self.queue.record(times.taken.saturating_sub(times.due));
        self.storage.record(times.storage);
        self.generation.record(times.generation);
        self.classes[request.class.index()].latency.record(whole);
        self.samples.end_to_end.offer(whole.as_secs_f64());
        self.samples.storage.offer(times.storage.as_secs_f64());
        self.samples.generation.offer(times.generation.as_secs_f64());
        let tokens = Slice { tokens: request.generated_tokens, ..Slice::default() };
        // Generation is simulated: its end may be after the window.
        self.timeline.add(times.at.min(window.last()).saturating_sub(window.start), tokens);
    }

    /// Counts a failure by its message.
    pub fn failed(&mut self, message: &str) {
        let is_known = self.failures.contains_key(message);
        let message =
            if is_known || self.failures.len() < FAILURES_MAX { message } else { "others" };
        *self.failures.entry(message.to_owned()).or_default() += 1;
    }

    /// Counts a block with wrong bytes.
    pub fn wrong(&mut self, example: impl FnOnce() -> String) {
        self.wrong_blocks += 1;
        if self.wrong_examples.len() < FAILURES_MAX {
            self.wrong_examples.push(example());
        }
    }

    /// All reads.
    pub fn read_total(&self) -> Moved {
        self.read.iter().fold(Moved::default(), |sum, it| Moved {
            bytes: sum.bytes + it.bytes,
            window_bytes: sum.window_bytes + it.window_bytes,
        })
    }

    /// Blocks hit over blocks read. `None` if none was read.
    pub fn hit_rate(&self) -> Option<f64> {
        let all = self.hits + self.misses;
        (all > 0).then(|| self.hits as f64 / all as f64)
    }

    /// The classes of service of which no request was answered.
    pub fn starved_classes(&self) -> Vec<QosClass> {
        let is_starved = |class: &QosClass| self.classes[class.index()].latency.count() == 0;
        QosClass::ALL.into_iter().filter(is_starved).collect()
    }

    fn note_end(&mut self, window: Window, span: Span, slice: Slice) {
        self.last_end = self.last_end.max(span.ended);
        let since_start = |time: Duration| time.min(window.last()).saturating_sub(window.start);
        self.timeline.spread(since_start(span.began), since_start(span.ended), slice);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::KvModel;
    use crate::plan::{Phases, UserPlan, Workload};
    use crate::retrieval::Documents;

    const WINDOW: Window = Window { start: Duration::from_secs(10), end: Duration::from_secs(20) };

    fn span(began: u64, ended: u64) -> Span {
        Span { began: Duration::from_secs(began), ended: Duration::from_secs(ended) }
    }

    /// The original counts all bytes of a request that ends after the window.
    #[test]
    fn bytes_after_the_window_are_moved_but_not_counted() {
        let mut figures = Measurements::default();
        figures.read(WINDOW, span(12, 14), [0, 300, 100]);
        figures.read(WINDOW, span(18, 22), [0, 0, 1000]);
        let what = WrittenBlocks { blocks: 2, bytes: 800, is_again: false };
        figures.wrote(WINDOW, span(19, 21), Duration::from_secs(3), what);
        assert_eq!(figures.read_total().bytes, 1400);
        assert_eq!(figures.read_total().window_bytes, 900);
        assert_eq!(figures.read[KvTier::Storage.index()].window_bytes, 600);
        assert_eq!((figures.written.bytes, figures.written.window_bytes), (800, 400));
        assert_eq!(figures.last_end, Duration::from_secs(22));
        let slices = figures.timeline.slices();
        assert_eq!(slices.iter().map(|(_, it)| it.read_bytes).sum::<u64>(), 900);
    }

    #[test]
    fn the_digest_depends_on_each_operation_and_not_on_the_order() {
        let workload = Workload {
            model: KvModel::new("tiny-1b", 1).unwrap(),
            users: 1,
            seed: 1,
            has_multi_turn: true,
            has_shared_prompts: true,
            requests_max: None,
            documents: Documents::default(),
            phases: Phases::Both,
            recorded: None,
            settings: crate::workload_settings::WorkloadSettings::default(),
        };
        let request = UserPlan::new(&workload, 0).next_request(&workload);
        let key = |index| crate::block_names::BlockNames::new(1).of_conversation(0, 1, index);
        let digest = |operations: &[(u64, u64, u64)]| {
            let mut digest = OperationsDigest::default();
            for (what, index, bytes) in operations {
                digest.add(request.facts(), *what, &key(*index), *bytes);
            }
            digest.text()
        };
        let whole = digest(&[(1, 1, 5), (2, 2, 5), (3, 3, 5)]);
        assert_eq!(whole, digest(&[(3, 3, 5), (1, 1, 5), (2, 2, 5)]));
        assert_ne!(whole, digest(&[(1, 1, 5), (2, 2, 5)]));
        assert_ne!(whole, digest(&[(1, 1, 5), (2, 2, 5), (3, 3, 6)]));
        assert_ne!(whole, digest(&[(1, 1, 5), (2, 2, 5), (3, 4, 5)]));
        assert_ne!(whole, digest(&[(1, 1, 5), (2, 2, 5), (4, 3, 5)]));
    }

    #[test]
    fn failures_are_bounded() {
        let mut figures = Measurements::default();
        (0..100).for_each(|at| figures.failed(&format!("failure {at}")));
        assert_eq!(figures.failures.len(), FAILURES_MAX + 1);
        assert_eq!(figures.failures["others"], 80);
    }
}
