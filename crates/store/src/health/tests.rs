//! One circuit alone, on a clock that is a number.

use std::time::Duration;

use super::{Circuit, HealthConfig, HealthState, Turn};
use crate::stage::StageError;

fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn circuit() -> Circuit {
    Circuit::new(HealthConfig::default(), at(0), 0)
}

fn fail(circuit: &mut Circuit, seconds: u64) -> Turn {
    circuit.fail(StageError::NoAnswer, at(seconds), seconds * 1000)
}

#[test]
fn two_failures_among_eight_calls_open_it_and_one_does_not() {
    let mut circuit = circuit();
    assert_eq!(fail(&mut circuit, 1), Turn::None);
    for _ in 0..7 {
        circuit.succeed(at(1));
    }
    assert_eq!(fail(&mut circuit, 2), Turn::None, "the first is the ninth last by now");
    for _ in 0..6 {
        circuit.succeed(at(2));
    }
    assert_eq!(fail(&mut circuit, 3), Turn::Opened);
    assert_eq!(fail(&mut circuit, 3), Turn::None, "it opens once");
    let health = circuit.health();
    assert_eq!((health.state, health.opened_count), (HealthState::Open, 1));
    assert_eq!(health.since_unix_ms, 3000);
    assert_eq!(health.last_error.as_deref(), Some("the stage gave no answer"));
}

#[test]
fn it_closes_after_a_probe_and_not_after_late_successes() {
    let mut circuit = circuit();
    fail(&mut circuit, 1);
    fail(&mut circuit, 1);
    circuit.succeed(at(2));
    assert!(!circuit.is_healthy());
    assert!(!circuit.begin_probe(at(5)), "an interval after it opened, not before");
    assert!(circuit.begin_probe(at(6)));
    assert_eq!(circuit.health().state, HealthState::Probing);
    assert!(!circuit.begin_probe(at(60)), "one at a time");
    assert_eq!(circuit.end_probe(Err(StageError::Timeout), at(9), 9000), Turn::None);
    assert_eq!(circuit.health().state, HealthState::Open);
    assert!(!circuit.begin_probe(at(10)));
    assert!(circuit.begin_probe(at(11)));
    assert_eq!(circuit.end_probe(Ok(()), at(12), 12_000), Turn::Closed);
    assert_eq!(circuit.health().since_unix_ms, 12_000);
    assert_eq!(fail(&mut circuit, 13), Turn::None, "what was before is forgotten");
}

#[test]
fn a_dead_stage_that_nobody_asks_is_found_within_fifteen_seconds() {
    let mut circuit = circuit();
    let mut now = 0;
    while circuit.is_healthy() {
        now += 1;
        if circuit.begin_probe(at(now)) {
            now += 3;
            circuit.end_probe(Err(StageError::Timeout), at(now), 0);
        }
    }
    assert!(now <= 15, "{now} s");
}

#[test]
fn a_busy_stage_is_not_probed_unless_it_keeps_somebody_waiting() {
    let mut circuit = circuit();
    for second in 1..60 {
        circuit.succeed(at(second));
        circuit.suspect(at(second));
        assert!(!circuit.begin_probe(at(second)));
    }
    circuit.suspect(at(60));
    assert!(circuit.begin_probe(at(60)));
    circuit.suspect(at(60));
    assert!(!circuit.begin_probe(at(60)), "not at every suspicion");
}

#[test]
fn reads_from_a_cache_do_not_hide_that_writes_fail() {
    let mut circuit = circuit();
    assert_eq!(fail(&mut circuit, 1), Turn::None);
    let mut turns = Vec::new();
    for _ in 0..2 {
        for _ in 0..100 {
            circuit.succeed(at(1));
        }
        assert!(circuit.begin_probe(at(1)), "a failure is looked into, whatever succeeds since");
        turns.push(circuit.end_probe(Err(StageError::NoAnswer), at(1), 1000));
    }
    assert_eq!(turns, [Turn::None, Turn::Opened]);
}

#[test]
fn a_call_that_hangs_opens_it_whatever_else_succeeds() {
    let mut circuit = circuit();
    circuit.succeed(at(1));
    assert_eq!(circuit.hang(at(7), 7000), Turn::Opened);
    assert_eq!(circuit.hang(at(8), 8000), Turn::None);
}

#[test]
fn settings_that_make_no_sense_are_refused_by_name() {
    let good = HealthConfig::default();
    good.check().unwrap();
    for (bad, setting) in [
        (HealthConfig { probe_interval: Duration::ZERO, ..good }, "probe_interval: "),
        (HealthConfig { probe_timeout: Duration::ZERO, ..good }, "probe_timeout: "),
        (HealthConfig { window: 65, ..good }, "failure_window: "),
        (HealthConfig { threshold: 9, ..good }, "failure_threshold: "),
        (HealthConfig { threshold: 0, ..good }, "failure_threshold: "),
    ] {
        let error = bad.check().unwrap_err().to_string();
        assert!(error.starts_with(setting), "{error}");
    }
}
