//! `cascade sim`: its processes, its exit codes, and the commands that it prints.

use std::process::Output;

use cascade_runtime::SystemClock;
use cascade_sim::{Length, Progress, SimOptions, Subject, Workers};
use serde_json::Value;

use crate::{cascade, run, stderr};

/// A few worlds, the last of them short.
const OPERATIONS: u64 = 2 * cascade_sim::WORLD_OPERATIONS + 500;

fn result(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", stderr(output)))
}

#[test]
fn the_event_hash_depends_on_neither_jobs_nor_processes() {
    let options = SimOptions {
        subject: Subject::Store,
        seed: 5,
        length: Length::Operations(OPERATIONS),
        world: None,
        jobs: 1,
        twice: false,
        plant: None,
    };
    let here = cascade_sim::run(&options, Workers::Threads, &Progress::default(), &SystemClock);
    let here = here.unwrap();
    assert!(here.is_clean(), "{:#?}", here.listed);
    for jobs in ["1", "2"] {
        let operations = OPERATIONS.to_string();
        let arguments =
            ["sim", "--seed", "5", "--operations", &operations, "--jobs", jobs, "--json", "-"];
        let output = run(&arguments);
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        let result = result(&output);
        assert_eq!(result["event_hash"], here.event_hash);
        assert_eq!(result["operations"], OPERATIONS);
    }
}

/// The command was refused: without `--operations` a simulation has 50 worlds.
#[test]
fn the_command_that_repeats_a_violation_repeats_it() {
    let planted = ["--plant", "outliving-lease", "--json", "-"];
    let found =
        run(&[&["sim", "--seed", "3", "--operations", "20000", "--twice"], &planted[..]].concat());
    assert_eq!(found.status.code(), Some(1), "{}", stderr(&found));
    let first = result(&found)["listed"][0].clone();
    let repeat = first["repeat"].as_str().unwrap().to_owned();
    let arguments = repeat.strip_prefix("cascade ").unwrap().split(' ');
    let again = cascade().args(arguments).args(["--json", "-"]).output().unwrap();
    assert_eq!(again.status.code(), Some(1), "{}", stderr(&again));
    assert_eq!(result(&again)["listed"][0], first);
}
