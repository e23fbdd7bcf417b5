//! Processes that fail, played by a shell. `cascade sim` is tested with its own processes.

use cascade_runtime::SystemClock;

use super::*;
use crate::options::{Length, SimOptions, Subject, WORLD_OPERATIONS};
use crate::report::SimResult;
use crate::run::{Progress, Workers, run};

const LONG: Duration = Duration::from_secs(300);
const WORLDS: u64 = 5;

/// A shell function that answers a number as a process does.
const ANSWER: &str = r#"answer() {
    printf '{"world":%d,"operations":1,"event_hash":7,"time_us":0,"wrong_bytes":0' "$1"
    printf ',"violations":0,"listed":[],"late_transfers":0,"is_different":false,"reopenings":0'
    printf ',"crashes":0,"recovered_blocks":0,"points":0,"switches":0,"counts":{}'
    printf ',"profile":"the process %d"}\n' "$$"
}"#;

fn simulate(script: &str, worlds_max: u64, world_time: Duration) -> SimResult {
    let script = format!("{ANSWER}\n{script}");
    let processes = Processes {
        command: ("sh".into(), vec!["-c".into(), script.into()]),
        worlds_max,
        world_time,
    };
    let options = SimOptions {
        subject: Subject::Store,
        seed: 1,
        length: Length::Operations(WORLDS * WORLD_OPERATIONS),
        world: None,
        jobs: 2,
        twice: false,
        plant: None,
    };
    let workers = Workers::Processes(&processes);
    run(&options, workers, &Progress::default(), &SystemClock).expect("there is a shell")
}

#[test]
fn a_process_that_is_killed_is_a_violation_of_its_world_only() {
    let script = r#"while read -r world; do
        if [ "$world" = 2 ]; then kill -SEGV $$; fi
        answer "$world"
    done"#;
    let result = simulate(script, 50, LONG);
    assert_eq!((result.worlds, result.operations, result.violations), (5, 4, 1));
    let violation = &result.listed[0];
    assert_eq!(violation.world, 2);
    assert!(violation.text.contains("ended early: signal: 11"), "{}", violation.text);
    assert_eq!(violation.repeat, "cascade sim --nodes 1 --seed 1 --operations 100000 --world 2");
}

#[test]
fn a_process_that_hangs_is_killed() {
    // The builtin, which no process is started for.
    let script = r#"while read -r world; do
        if [ "$world" = 3 ]; then while :; do read -r world; done; fi
        answer "$world"
    done"#;
    let result = simulate(script, 50, Duration::from_secs(2));
    assert_eq!((result.worlds, result.operations, result.violations), (5, 4, 1));
    let text = &result.listed[0].text;
    assert_eq!(text, "the process of this world gave no result within 2s");
}

#[test]
fn a_result_of_another_world_is_refused() {
    let result = simulate("while read -r world; do answer 9; done", 50, LONG);
    assert_eq!((result.worlds, result.violations), (5, 5));
    let text = &result.listed[0].text;
    assert!(text.ends_with("gave no valid result: a result of world 9"), "{text}");
}

#[test]
fn a_program_that_does_not_exist_is_an_error() {
    let processes = Processes {
        command: ("/no/such/program".into(), Vec::new()),
        worlds_max: 1,
        world_time: LONG,
    };
    let clock = SystemClock;
    let started = processes.run_world(&mut None, 0, &clock);
    assert_eq!(started.map_err(|error| error.kind()), Err(io::ErrorKind::NotFound));
}

#[test]
fn a_process_is_replaced_after_some_worlds() {
    let script = r#"while read -r world; do answer "$world"; done"#;
    let processes = |worlds_max| Processes {
        command: ("sh".into(), vec!["-c".into(), format!("{ANSWER}\n{script}").into()]),
        worlds_max,
        world_time: LONG,
    };
    let names = |processes: &Processes| {
        let mut worker = None;
        let mut name = |world| processes.run_world(&mut worker, world, &SystemClock);
        let mut names: Vec<String> =
            (0..6).map(|world| name(world).expect("there is a shell").profile).collect();
        names.dedup();
        names.len()
    };
    assert_eq!([1, 2, 6].map(|worlds_max| names(&processes(worlds_max))), [6, 3, 1]);
}
