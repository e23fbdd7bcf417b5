//! Recorded requests: a trace brings lengths and arrivals, a data set conversations.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use cascade_kv_bench::KvBenchError;
use cascade_kv_bench::plan::{PlannedRequest, UserPlan, Workload};
use cascade_kv_bench::progress::Progress;
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
    let recorded = Recorded::burst_trace(&files.burst(ROWS), 1.0, Some(2)).unwrap();
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
    let recorded = Recorded::burst_trace(&files.burst(ROWS), 0.0, Some(3)).unwrap();
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
    let recorded = Recorded::data_set(&path, 500, Some(1)).unwrap();
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
        let workload = with(Recorded::data_set(&path, 500, Some(3)).unwrap(), users);
        assert_eq!(workload.users, users);
        let found = requests(&workload);
        assert_eq!(found.len(), 3 * 7 * 2, "{users} users");
        for number in 1..=7 {
            let turns = found.iter().filter(|it| it.context_tokens == number * 10).count();
            assert_eq!(turns, 6, "{users} users");
        }
    }
    let few = with(Recorded::data_set(&path, 2, Some(1)).unwrap(), 1);
    assert_eq!(requests(&few).len(), 2 * 2);
    let endless = with(Recorded::data_set(&path, 2, None).unwrap(), 1);
    let mut plan = UserPlan::new(&endless, 0);
    assert!((0..100).all(|_| plan.next_request(&endless).turn > 0 && !plan.is_exhausted()));
}

#[test]
fn a_run_of_a_data_set_ends_after_its_cycles() {
    let files = Files::new();
    let path = files.conversations(&[&[(256, 128), (300, 10)], &[(500, 5)], &[(700, 7)]]);
    let workload = with(Recorded::data_set(&path, 500, Some(2)).unwrap(), 5);
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
    let missing = Recorded::burst_trace(&files.0.path().join("none.csv"), 1.0, None).unwrap_err();
    assert!(missing.to_string().starts_with("--burst-trace-path cannot be used"), "{missing}");
    let empty = Recorded::data_set(&files.write("empty.json", "[]"), 500, None).unwrap_err();
    let KvBenchError::Trace { option, source } = empty else { panic!("{empty}") };
    assert_eq!(option, "--dataset-path");
    assert!(source.to_string().ends_with("has no requests"), "{source}");
}
