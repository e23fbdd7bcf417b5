//! Recorded requests: a trace brings lengths and arrivals, a data set conversations.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use cascade_kv_bench::KvBenchError;
use cascade_kv_bench::compatible::plan::{ObjectRequest, Schedule};
use cascade_kv_bench::compatible::run::{Pace, run as run_objects};
use cascade_kv_bench::compatible::waterfall::{Waterfall, WaterfallSizes};
use cascade_kv_bench::plan::{PlannedRequest, UserPlan, Workload};
use cascade_kv_bench::progress::Progress;
use cascade_kv_bench::qos::QosClass;
use cascade_kv_bench::recorded::Recorded;
use cascade_kv_bench::run::{RunOptions, run};
use cascade_runtime::SystemClock;
use tempfile::TempDir;

use crate::backends::MapBackend;
use crate::{options, workload};

struct Files(TempDir);

impl Files {
    fn new() -> Self {
        Self(TempDir::new().unwrap())
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.path().join(name);
        fs::write(&path, text).unwrap();
        path
    }

    fn burst(&self, rows: &str) -> PathBuf {
        let header = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n";
        self.write("burst.csv", &format!("{header}{rows}"))
    }

    /// Conversations with these tokens of questions and answers.
    fn conversations(&self, all: &[&[(usize, usize)]]) -> PathBuf {
        let turn = |(question, answer): &(usize, usize)| {
            format!(
                "{{\"from\":\"human\",\"value\":\"{}\"}},{{\"from\":\"gpt\",\"value\":\"{}\"}}",
                "q".repeat(question * 4),
                "a".repeat(answer * 4),
            )
        };
        let one = |turns: &&[(usize, usize)]| {
            let turns: Vec<_> = turns.iter().map(turn).collect();
            format!("{{\"id\":\"x\",\"conversations\":[{}]}}", turns.join(","))
        };
        let all: Vec<_> = all.iter().map(one).collect();
        self.write("sharegpt.json", &format!("[{}]", all.join(",")))
    }
}

/// Longer than any request of a test.
const LONG: Duration = Duration::from_secs(600);

fn with(recorded: Recorded, users: u32) -> Workload {
    let requests_max = recorded.requests_max();
    let users = recorded.users(users);
    let recorded = Some(Arc::new(recorded));
    Workload { users, requests_max, recorded, has_shared_prompts: false, ..workload(None) }
}

/// All requests of a workload that ends, user by user.
fn requests(workload: &Workload) -> Vec<PlannedRequest> {
    let of_user = |user| {
        let mut plan = UserPlan::new(workload, user);
        let most = workload.requests_of(user).unwrap_or(u64::MAX);
        let mut all = Vec::new();
        while (all.len() as u64) < most {
            let request = plan.next_request(workload);
            if plan.is_exhausted() {
                break;
            }
            all.push(request);
        }
        all
    };
    (0..workload.users).flat_map(of_user).collect()
}

fn lengths(requests: &[PlannedRequest]) -> Vec<(u64, u64)> {
    requests.iter().map(|it| (it.context_tokens, it.generated_tokens)).collect()
}

const ROWS: &str = "5,ChatGPT,472,18,490,API log\n45,ChatGPT,1087,230,1317,API log\n\
                    50,GPT-4,9,0,9,API log\n118,GPT-4,40000,276,693,API log\n";

#[test]
fn a_trace_gives_each_row_to_a_user_and_shares_nothing() {
    let files = Files::new();
    let recorded = Recorded::burst_trace(&files.burst(ROWS), 1.0, Some(2), false).unwrap();
    assert_eq!(recorded.context_tokens_max(), 40_000);
    assert!(recorded.text().contains("3 requests, times divided by 1"), "{}", recorded.text());
    assert!(recorded.text().contains("skipped rows: 1 zero response"), "{}", recorded.text());
    let workload = with(recorded, 100);
    assert_eq!((workload.users, workload.requests_max), (3, Some(6)));
    let all = requests(&workload);
    let (first, second, third) = ((472, 18), (1087, 230), (40_000, 276));
    assert_eq!(lengths(&all), [first, first, second, second, third, third]);
    for request in &all {
        assert_eq!((request.turn, request.earlier_blocks, request.prompt), (1, 0, None));
        assert_eq!(request.total_blocks, request.context_tokens / 128);
        assert!(request.think.is_zero());
    }
    assert_ne!(all[0].conversation, all[1].conversation);
}

#[test]
fn a_run_of_a_trace_serves_every_row_of_all_cycles() {
    let files = Files::new();
    // Hours of a trace pass in no time, because the speed is unlimited.
    let recorded = Recorded::burst_trace(&files.burst(ROWS), 0.0, Some(3), false).unwrap();
    let workload = with(recorded, 100);
    let options = RunOptions { request_rate: None, ..options(4) };
    let progress = Progress::default();
    let outcome = run(&MapBackend::default(), &workload, &options, &progress, &SystemClock);
    let figures = outcome.unwrap().figures;
    assert_eq!((figures.requests, figures.wrong_blocks, figures.misses), (9, 0, 0));
    assert_eq!(figures.tokens, 3 * (18 + 230 + 276));
    // 472, 1,087 and 40,000 tokens are 3, 8 and 312 whole blocks.
    assert_eq!(figures.written.bytes, 3 * (3 + 8 + 312) * 128 * 64);
}

#[test]
fn turns_of_a_data_set_continue_their_conversation() {
    let files = Files::new();
    let path = files.conversations(&[&[(256, 128), (300, 10), (1, 1)], &[(9000, 3000)]]);
    let recorded = Recorded::data_set(&path, 500, Some(1), false).unwrap();
    let workload = with(recorded, 1);
    let all = requests(&workload);
    let mut sorted = lengths(&all);
    sorted.sort_unstable();
    assert_eq!(sorted, [(1, 1), (256, 128), (300, 10), (8192, 2048)], "long turns are cut");
    let at = all.iter().position(|it| it.context_tokens == 256).unwrap();
    let [one, two, three] = [&all[at], &all[at + 1], &all[at + 2]];
    assert_eq!((one.turn, one.earlier_blocks, one.total_blocks), (1, 0, 2));
    assert_eq!((two.turn, two.earlier_blocks, two.total_blocks), (2, 2, (256 + 128 + 300) / 128));
    assert_eq!((three.turn, three.conversation), (3, one.conversation));
    let alone = Workload { has_multi_turn: false, ..workload.clone() };
    assert!(requests(&alone).iter().all(|it| it.turn == 1 && it.earlier_blocks == 0));
    assert!(workload.stored_bytes() > 64 * 128 * 64, "all requests count");
}

#[test]
fn users_share_the_conversations_of_each_cycle() {
    let files = Files::new();
    let conversation: Vec<Vec<(usize, usize)>> =
        (1..=7).map(|number| vec![(number * 10, 1); 2]).collect();
    let all: Vec<&[(usize, usize)]> = conversation.iter().map(Vec::as_slice).collect();
    let path = files.conversations(&all);
    for users in [1, 3, 40] {
        let workload = with(Recorded::data_set(&path, 500, Some(3), false).unwrap(), users);
        assert_eq!(workload.users, users);
        let found = requests(&workload);
        assert_eq!(found.len(), 3 * 7 * 2, "{users} users");
        for number in 1..=7 {
            let turns = found.iter().filter(|it| it.context_tokens == number * 10).count();
            assert_eq!(turns, 6, "{users} users");
        }
    }
    let few = with(Recorded::data_set(&path, 2, Some(1), false).unwrap(), 1);
    assert_eq!(requests(&few).len(), 2 * 2);
    let endless = with(Recorded::data_set(&path, 2, None, false).unwrap(), 1);
    let mut plan = UserPlan::new(&endless, 0);
    assert!((0..100).all(|_| plan.next_request(&endless).turn > 0 && !plan.is_exhausted()));
}

#[test]
fn a_run_of_a_data_set_ends_after_its_cycles() {
    let files = Files::new();
    let path = files.conversations(&[&[(256, 128), (300, 10)], &[(500, 5)], &[(700, 7)]]);
    let workload = with(Recorded::data_set(&path, 500, Some(2), false).unwrap(), 5);
    let options = RunOptions { request_rate: None, ..options(3) };
    let outcome =
        run(&MapBackend::default(), &workload, &options, &Progress::default(), &SystemClock);
    let figures = outcome.unwrap().figures;
    assert_eq!((figures.requests, figures.misses, figures.wrong_blocks), (8, 0, 0));
    assert_eq!(figures.turn_hits, 2 * 2, "the second turn loads the two blocks of the first");
}

#[test]
fn a_trace_that_cannot_be_read_is_refused_with_its_option_and_cause() {
    let files = Files::new();
    let missing =
        Recorded::burst_trace(&files.0.path().join("none.csv"), 1.0, None, false).unwrap_err();
    assert!(missing.to_string().starts_with("--burst-trace-path cannot be used"), "{missing}");
    let empty = Recorded::data_set(&files.write("empty.json", "[]"), 500, None, false).unwrap_err();
    let KvBenchError::Trace { option, source } = empty else { panic!("{empty}") };
    assert_eq!(option, "--dataset-path");
    assert!(source.to_string().ends_with("has no requests"), "{source}");
}

/// The first requests of a compatible run.
fn scheduled(workload: &Workload, count: usize) -> Vec<ObjectRequest> {
    Schedule::new(workload).take(count).collect()
}

#[test]
fn a_compatible_run_replays_all_rows_of_a_trace_with_their_arrivals() {
    let files = Files::new();
    let recorded = Recorded::burst_trace(&files.burst(ROWS), 2.0, None, true).unwrap();
    assert_eq!((recorded.all_requests(), recorded.request_tokens_max()), (None, 40_000));
    let workload = with(recorded, 3);
    let all = scheduled(&workload, 2001);
    let facts: Vec<_> = all[..5]
        .iter()
        .map(|it| (it.arrival.as_millis(), it.context_tokens, it.generated_tokens))
        .collect();
    let expected = [
        (0, 472, 18),
        (20_000, 1087, 230),
        (22_500, 9, 0),
        (56_500, 40_000, 276),
        (56_500, 472, 18),
    ];
    assert_eq!(facts, expected);
    assert!(all[3].only_writes && all[2].decode_reads(&workload.settings) == 1);
    let entry = |at: usize| (all[at].user, all[at].conversation, all[at].turn);
    assert_eq!((entry(0), entry(999), entry(1000)), ((0, 1, 1), (999, 1, 1), (0, 2, 1)));
    let share = |class| {
        let count = all.iter().filter(|it| it.class == class).count();
        u32::try_from(count).map(f64::from).unwrap() / 2001.0
    };
    assert!((share(QosClass::Interactive) - 0.15).abs() < 0.03);
    assert!((share(QosClass::Batch) - 0.5).abs() < 0.05);
}

/// A turn is an entry of its own, which later cycles find. No turn reads earlier ones.
#[test]
fn a_compatible_run_stores_each_turn_of_a_data_set_once() {
    let files = Files::new();
    let path = files.conversations(&[&[(20, 40), (30, 8)], &[(50, 1)], &[(17_000, 2500)]]);
    let recorded = Recorded::data_set(&path, 500, Some(3), true).unwrap();
    assert_eq!(recorded.all_requests(), Some(12));
    let workload = Workload { requests_max: Some(12), ..with(recorded, 4) };
    let all = scheduled(&workload, 12);
    let mut entries: Vec<_> =
        all.iter().map(|it| (it.user, it.conversation, it.context_tokens)).collect();
    for cycle in entries.chunks_mut(4) {
        let turns: Vec<_> = cycle.iter().filter(|it| it.0 == 0).map(|it| it.1).collect();
        assert_eq!(turns, [1, 2]);
        cycle.sort_unstable();
        assert_eq!(cycle, [(0, 1, 20), (0, 2, 30), (1, 1, 50), (2, 1, 16_384)]);
    }
    assert!(all.iter().all(|it| it.turn == 1 && it.arrival.is_zero()));

    let directory = TempDir::new().unwrap();
    let tiers = WaterfallSizes { gpu_bytes: 0, cpu_bytes: 1 << 30, files_bytes: 1 << 30 };
    let runs = [1, 3].map(|workers| {
        let directory = directory.path().join(workers.to_string());
        let waterfall = Waterfall::new(&directory, tiers, 42, &SystemClock).unwrap();
        let (options, progress) = (options(workers), Progress::default());
        let pace = Pace { think_scale: 1.0, thread_wait: LONG };
        let run = run_objects(&waterfall, &workload, &options, pace, &progress, &SystemClock);
        let figures = run.unwrap().0.figures;
        assert_eq!((figures.requests, figures.misses, figures.turn_hits), (12, 0, 0));
        assert_eq!(figures.written.bytes, (20 + 30 + 50 + 16_384) * 64);
        // Two and once more for each 32 tokens; the longest one only writes.
        assert_eq!(figures.read_total().bytes, 3 * (3 * 20 + 2 * 30 + 2 * 50) * 64);
        (figures.operations, figures.written_blocks)
    });
    assert_eq!(runs[0], runs[1]);
}

/// With fewer turns than threads, several requests have the same entry at once.
#[test]
fn an_entry_that_several_requests_have_is_written_once() {
    let files = Files::new();
    let path = files.conversations(&[&[(200, 40)]]);
    let workload = with(Recorded::data_set(&path, 500, None, true).unwrap(), 4);
    let directory = TempDir::new().unwrap();
    let tiers = WaterfallSizes { gpu_bytes: 0, cpu_bytes: 0, files_bytes: 1 << 30 };
    let waterfall = Waterfall::new(directory.path(), tiers, 42, &SystemClock).unwrap();
    let (options, progress) = (options(8), Progress::default());
    let pace = Pace { think_scale: 1.0, thread_wait: LONG };
    let (outcome, objects) = std::thread::scope(|scope| {
        let running = scope.spawn(|| {
            run_objects(&waterfall, &workload, &options, pace, &progress, &SystemClock).unwrap()
        });
        while progress.requests.load(Ordering::Relaxed) < 40 {
            std::thread::yield_now();
        }
        progress.is_stopped.store(true, Ordering::Relaxed);
        running.join().unwrap()
    });
    let figures = &outcome.figures;
    assert_eq!((figures.written_blocks, figures.written.bytes), (1, 200 * 64));
    assert_eq!((figures.misses, figures.wrong_blocks), (0, 0));
    assert_eq!((objects.contents[2].entries, objects.contents[2].bytes), (1, 200 * 64));
}
