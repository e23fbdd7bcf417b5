//! A few worlds of each simulation: nothing goes wrong, and equal seeds give equal runs.
//!
//! A failure prints the command that runs its world again. `cascade sim` runs many more.

use std::time::Duration;

use cascade_runtime::SystemClock;
use cascade_sim::{
    Length, Progress, SimOptions, SimResult, Subject, WORLD_OPERATIONS, Workers, run,
};

const SEED: u64 = 1;
/// A few worlds, the last of them short.
const OPERATIONS: u64 = 4 * WORLD_OPERATIONS + 1000;

fn options(operations: u64) -> SimOptions {
    SimOptions {
        subject: Subject::Store,
        seed: SEED,
        length: Length::Operations(operations),
        world: None,
        jobs: 2,
        twice: false,
        plant: None,
    }
}

fn simulate(options: &SimOptions) -> SimResult {
    run(options, Workers::Threads, &Progress::default(), &SystemClock).expect("threads start")
}

/// Everything but the real time.
fn without_time(result: SimResult) -> SimResult {
    SimResult { seconds: cascade_sim::Seconds(0), ..result }
}

#[test]
fn nothing_goes_wrong_and_a_second_run_is_the_same() {
    let result = simulate(&SimOptions { twice: true, ..options(OPERATIONS) });
    assert!(result.is_clean(), "{:#?}", result.listed);
    assert_eq!((result.operations, result.worlds), (OPERATIONS, 5));
    assert!(result.recovered_blocks > 0, "a world has warm restarts");
}

#[test]
fn the_result_does_not_depend_on_the_number_of_jobs() {
    let one = simulate(&SimOptions { jobs: 1, ..options(OPERATIONS) });
    let three = simulate(&SimOptions { jobs: 3, ..options(OPERATIONS) });
    assert_eq!(without_time(one), without_time(three));
    let other = simulate(&SimOptions { seed: SEED + 1, ..options(WORLD_OPERATIONS) });
    let same = simulate(&options(WORLD_OPERATIONS));
    assert_ne!(other.event_hash, same.event_hash, "seeds differ");
}

#[test]
fn one_world_of_a_simulation_runs_alone() {
    let alone = simulate(&SimOptions { world: Some(4), ..options(OPERATIONS) });
    assert_eq!((alone.operations, alone.worlds), (1000, 1));
    let none = simulate(&SimOptions { world: Some(5), ..options(OPERATIONS) });
    assert_eq!((none.operations, none.worlds), (0, 0));
}

#[test]
fn a_simulation_with_a_time_ends() {
    let length = Length::Time(Duration::from_millis(1));
    let result = simulate(&SimOptions { length, jobs: 1, ..options(0) });
    assert_eq!((result.operations, result.worlds), (WORLD_OPERATIONS, 1));
}
