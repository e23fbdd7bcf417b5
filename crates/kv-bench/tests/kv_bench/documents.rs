//! Documents of compatible runs: stored chunk by chunk, read by some requests, and asked about.

use std::collections::HashSet;
use std::time::Duration;

use cascade_kv_bench::compatible::entry::EntryName;
use cascade_kv_bench::compatible::figures::ObjectFigures;
use cascade_kv_bench::compatible::plan::{ObjectRequest, Schedule};
use cascade_kv_bench::compatible::run::{Pace, run};
use cascade_kv_bench::compatible::waterfall::{Waterfall, WaterfallSizes};
use cascade_kv_bench::plan::{Phases, Workload};
use cascade_kv_bench::progress::Progress;
use cascade_kv_bench::retrieval::Documents;
use cascade_kv_bench::run::RunOutcome;
use cascade_runtime::SystemClock;
use tempfile::TempDir;

use crate::{options, workload};

fn with_documents(requests: u64) -> Workload {
    Workload { documents: Documents { count: 3 }, ..workload(Some(requests)) }
}

fn run_with(workload: &Workload, workers: usize) -> (RunOutcome, ObjectFigures) {
    let directory = TempDir::new().unwrap();
    let tiers = WaterfallSizes { gpu_bytes: 0, cpu_bytes: 0, files_bytes: 1 << 40 };
    let waterfall = Waterfall::new(directory.path(), tiers, workload.seed, &SystemClock).unwrap();
    let (options, progress) = (options(workers), Progress::default());
    let pace = Pace { think_scale: 0.0, thread_wait: Duration::from_secs(600) };
    run(&waterfall, workload, &options, pace, &progress, &SystemClock).unwrap()
}

fn requests(workload: &Workload) -> Vec<ObjectRequest> {
    let count = usize::try_from(workload.requests_max.unwrap()).unwrap();
    Schedule::new(workload).take(count).collect()
}

#[test]
fn a_tenth_of_the_requests_read_chunks_and_a_tenth_are_followed_by_a_question() {
    let workload = with_documents(20_000);
    let all = requests(&workload);
    let share = |count: usize, of: usize| f64::from(u32::try_from(count * 1000 / of).unwrap());
    let questions: Vec<_> = all.iter().filter(|it| it.question.is_some()).collect();
    let asked = share(questions.len(), all.len() - questions.len());
    assert!((asked - 100.0).abs() < 10.0, "{asked}");
    let read = share(all.iter().filter(|it| it.retrieval.is_some()).count(), all.len());
    assert!((read - 100.0).abs() < 10.0, "{read}");
    for request in &all {
        let Some(retrieval) = &request.retrieval else { continue };
        let chunks: HashSet<_> = retrieval.chunks().collect();
        assert!(retrieval.document < 3 && chunks.len() == 5, "{retrieval:?}");
    }
    let first = questions.iter().filter(|it| it.question.is_some_and(|it| it.is_first));
    assert_eq!(first.count(), 3);
    for question in questions {
        let names: Vec<_> = (0..3).map(EntryName::Question).collect();
        assert!(names.contains(&question.own_entry()) && !question.only_writes);
        assert!((50..=200).contains(&question.generated_tokens));
        assert!(question.context_tokens <= 5 * 512 && question.context_tokens > 4 * 512);
    }
}

/// A seed repeats a limited run with documents, whatever the threads do.
#[test]
fn questions_about_a_document_share_the_context_of_the_first_one() {
    let workload = with_documents(150);
    let all = requests(&workload);
    let asked = all.iter().filter(|it| it.question.is_some_and(|it| it.is_first)).count() as u64;
    let own = all.iter().filter(|it| it.question.is_none()).count() as u64;
    assert!(asked > 0 && own < 150);
    let schedule = Schedule::new(&workload);
    let documents = schedule.documents().unwrap();
    let chunks: u64 = (0..3).map(|it| documents.chunks(it).count() as u64).sum();
    let runs = [1, 5].map(|workers| {
        let (outcome, objects) = run_with(&workload, workers);
        let figures = outcome.figures;
        assert_eq!((figures.requests, figures.wrong_blocks), (150, 0));
        // A prompt is never there, and the first question finds no context.
        assert_eq!(figures.misses, figures.prompt_requests[0] + asked);
        assert_eq!(objects.contents[2].entries, own + asked + chunks);
        assert_eq!((figures.written_blocks, figures.recomputed.bytes), (own + asked + chunks, 0));
        let retrievals = all.iter().filter(|it| it.retrieval.is_some()).count() as u64;
        assert_eq!(figures.retrieval.count(), retrievals);
        (figures.operations, figures.written.bytes, figures.read_total().bytes, figures.tokens)
    });
    assert_eq!(runs[0], runs[1]);
}

#[test]
fn prefill_alone_reads_documents_and_answers_no_question() {
    let workload = Workload { phases: Phases::PrefillOnly, ..with_documents(100) };
    let (outcome, objects) = run_with(&workload, 3);
    assert!(outcome.figures.retrieval.count() > 0);
    assert_eq!((outcome.figures.requests, outcome.figures.decode.count()), (100, 0));
    assert_eq!(outcome.figures.misses, outcome.figures.prompt_requests[0]);
    assert!(objects.contents[2].entries > 0);
}
