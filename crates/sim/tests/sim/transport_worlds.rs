//! Worlds of the transport: nothing goes wrong, and equal seeds give equal runs.

use cascade_runtime::SystemClock;
use cascade_sim::{Length, Progress, SimOptions, SimResult, Subject, Workers, run};

fn simulate(seed: u64, worlds: u64, twice: bool) -> SimResult {
    let options = SimOptions {
        subject: Subject::Transport,
        seed,
        length: Length::Operations(worlds * Subject::Transport.world_operations()),
        world: None,
        jobs: 2,
        twice,
        plant: None,
    };
    run(&options, Workers::Threads, &Progress::default(), &SystemClock).expect("threads start")
}

#[test]
fn nothing_goes_wrong_and_a_second_run_is_the_same() {
    let result = simulate(2, 5, true);
    assert!(result.is_clean(), "{:#?}", result.listed);
    assert_eq!(result.worlds, 5);
    for outcome in ["confirmed", "cancelled", "lost", "deadlines", "kills"] {
        assert!(result.counts[outcome] > 0, "{outcome}: {:?}", result.counts);
    }
}
