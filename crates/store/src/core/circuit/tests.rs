//! Tests of one circuit, with explicit times.

use std::time::Duration;

use cascade_tier::HealthState;
use cascade_tier::tier::TierError;

use super::{Circuit, CircuitChange, HealthConfig};

fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn circuit() -> Circuit {
    Circuit::new(HealthConfig::default(), at(0), 0)
}

fn fail(circuit: &mut Circuit, seconds: u64) -> CircuitChange {
    circuit.fail(TierError::NoResult, at(seconds), seconds * 1000)
}

#[test]
fn two_failures_among_eight_calls_open_the_circuit() {
    let mut circuit = circuit();
    assert_eq!(fail(&mut circuit, 1), CircuitChange::None);
    for _ in 0..7 {
        circuit.succeed(at(1));
    }
    assert_eq!(
        fail(&mut circuit, 2),
        CircuitChange::None,
        "the first failure is no longer within the window"
    );
    for _ in 0..6 {
        circuit.succeed(at(2));
    }
    assert_eq!(fail(&mut circuit, 3), CircuitChange::Opened);
    assert_eq!(fail(&mut circuit, 3), CircuitChange::None, "an open circuit does not open again");
    let health = circuit.health();
    assert_eq!((health.state, health.opened_count), (HealthState::Open, 1));
    assert_eq!(health.since_unix_ms, 3000);
    assert_eq!(health.last_error.as_deref(), Some("the stage returned no result"));
}

#[test]
fn a_probe_closes_the_circuit_and_a_late_success_does_not() {
    let mut circuit = circuit();
    fail(&mut circuit, 1);
    fail(&mut circuit, 1);
    circuit.succeed(at(2));
    assert!(!circuit.is_healthy());
    assert!(!circuit.begin_probe(at(5)), "the first probe is due one interval after it opened");
    assert!(circuit.begin_probe(at(6)));
    assert_eq!(circuit.health().state, HealthState::Probing);
    assert!(!circuit.begin_probe(at(60)), "only one probe at a time");
    assert_eq!(circuit.end_probe(Err(TierError::Timeout), at(9), 9000), CircuitChange::None);
    assert_eq!(circuit.health().state, HealthState::Open);
    assert!(!circuit.begin_probe(at(10)));
    assert!(circuit.begin_probe(at(11)));
    assert_eq!(circuit.end_probe(Ok(()), at(12), 12_000), CircuitChange::Closed);
    assert_eq!(circuit.health().since_unix_ms, 12_000);
    assert_eq!(fail(&mut circuit, 13), CircuitChange::None, "closing resets the window");
}

#[test]
fn probes_detect_an_idle_failed_stage_within_fifteen_seconds() {
    let mut circuit = circuit();
    let mut now = 0;
    while circuit.is_healthy() {
        now += 1;
        if circuit.begin_probe(at(now)) {
            now += 3;
            circuit.end_probe(Err(TierError::Timeout), at(now), 0);
        }
    }
    assert!(now <= 15, "{now} s");
}

#[test]
fn a_stage_with_recent_successes_is_not_probed_on_request() {
    let mut circuit = circuit();
    for second in 1..60 {
        circuit.succeed(at(second));
        circuit.suspect(at(second));
        assert!(!circuit.begin_probe(at(second)));
    }
    circuit.suspect(at(60));
    assert!(circuit.begin_probe(at(60)));
    circuit.suspect(at(60));
    assert!(!circuit.begin_probe(at(60)), "a recent probe suppresses the next request");
}

#[test]
fn successful_calls_do_not_hide_failing_probes() {
    let mut circuit = circuit();
    assert_eq!(fail(&mut circuit, 1), CircuitChange::None);
    let mut changes = Vec::new();
    for _ in 0..2 {
        for _ in 0..100 {
            circuit.succeed(at(1));
        }
        assert!(
            circuit.begin_probe(at(1)),
            "a failure requests a probe even if later calls succeed"
        );
        changes.push(circuit.end_probe(Err(TierError::NoResult), at(1), 1000));
    }
    assert_eq!(changes, [CircuitChange::None, CircuitChange::Opened]);
}

#[test]
fn a_hanging_call_opens_the_circuit_despite_successes() {
    let mut circuit = circuit();
    circuit.succeed(at(1));
    assert_eq!(circuit.hang(at(7), 7000), CircuitChange::Opened);
    assert_eq!(circuit.hang(at(8), 8000), CircuitChange::None);
}

#[test]
fn an_invalid_setting_is_refused_by_name() {
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
