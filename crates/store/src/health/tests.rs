//! The breaker alone, on a clock that is a number.

use std::time::Duration;

use super::{Breaker, HealthConfig, HealthState, Turn};
use crate::stage::StageError;

fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn breaker() -> Breaker {
    Breaker::new(HealthConfig::default(), at(0), 0)
}

fn fail(breaker: &mut Breaker, seconds: u64) -> Turn {
    breaker.fail(StageError::NoAnswer, at(seconds), seconds * 1000)
}

#[test]
fn two_failures_among_eight_calls_open_it_and_one_does_not() {
    let mut breaker = breaker();
    assert_eq!(fail(&mut breaker, 1), Turn::None);
    for _ in 0..7 {
        breaker.succeed(at(1));
    }
    assert_eq!(fail(&mut breaker, 2), Turn::None, "the first is the ninth last by now");
    for _ in 0..6 {
        breaker.succeed(at(2));
    }
    assert_eq!(fail(&mut breaker, 3), Turn::Opened);
    assert_eq!(fail(&mut breaker, 3), Turn::None, "it opens once");
    let health = breaker.health(0);
    assert_eq!((health.state, health.opened_count), (HealthState::Open, 1));
    assert_eq!(health.since_unix_ms, 3000);
    assert_eq!(health.last_error.as_deref(), Some("the stage gave no answer"));
}

#[test]
fn it_closes_after_a_probe_and_not_after_late_successes() {
    let mut breaker = breaker();
    fail(&mut breaker, 1);
    fail(&mut breaker, 1);
    breaker.succeed(at(2));
    assert!(!breaker.is_healthy());
    assert!(!breaker.begin_probe(at(5)), "an interval after it opened, not before");
    assert!(breaker.begin_probe(at(6)));
    assert_eq!(breaker.health(0).state, HealthState::Probing);
    assert!(!breaker.begin_probe(at(60)), "one at a time");
    assert_eq!(breaker.end_probe(Err(StageError::Timeout), at(9), 9000), Turn::None);
    assert_eq!(breaker.health(0).state, HealthState::Open);
    assert!(!breaker.begin_probe(at(10)));
    assert!(breaker.begin_probe(at(11)));
    assert_eq!(breaker.end_probe(Ok(()), at(12), 12_000), Turn::Closed);
    assert_eq!(breaker.health(0).since_unix_ms, 12_000);
    assert_eq!(fail(&mut breaker, 13), Turn::None, "what was before is forgotten");
}

#[test]
fn a_dead_stage_that_nobody_asks_is_found_within_fifteen_seconds() {
    let mut breaker = breaker();
    let mut now = 0;
    while breaker.is_healthy() {
        now += 1;
        if breaker.begin_probe(at(now)) {
            now += 3;
            breaker.end_probe(Err(StageError::Timeout), at(now), 0);
        }
    }
    assert!(now <= 15, "{now} s");
}

#[test]
fn a_busy_stage_is_not_probed_unless_it_keeps_somebody_waiting() {
    let mut breaker = breaker();
    for second in 1..60 {
        breaker.succeed(at(second));
        breaker.suspect(at(second));
        assert!(!breaker.begin_probe(at(second)));
    }
    breaker.suspect(at(60));
    assert!(breaker.begin_probe(at(60)));
    breaker.suspect(at(60));
    assert!(!breaker.begin_probe(at(60)), "not at every suspicion");
}

#[test]
fn reads_from_a_cache_do_not_hide_that_writes_fail() {
    let mut breaker = breaker();
    assert_eq!(fail(&mut breaker, 1), Turn::None);
    let mut turns = Vec::new();
    for _ in 0..2 {
        for _ in 0..100 {
            breaker.succeed(at(1));
        }
        assert!(breaker.begin_probe(at(1)), "a failure is looked into, whatever succeeds since");
        turns.push(breaker.end_probe(Err(StageError::NoAnswer), at(1), 1000));
    }
    assert_eq!(turns, [Turn::None, Turn::Opened]);
}

#[test]
fn a_call_that_hangs_opens_it_whatever_else_succeeds() {
    let mut breaker = breaker();
    breaker.succeed(at(1));
    assert_eq!(breaker.hang(at(7), 7000), Turn::Opened);
    assert_eq!(breaker.hang(at(8), 8000), Turn::None);
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
