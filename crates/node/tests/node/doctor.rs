//! The doctor reports each fault of a machine with its remedy.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]
#![expect(clippy::print_stderr, reason = "prints why a test was skipped")]

mod fake_machine;
mod faults;
mod file_systems;
mod gpus;
mod network;
mod pools;

use std::fs;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use cascade_node::NodeConfig;
use cascade_node::config::{self, ConfigSources, Environment};
use cascade_node::doctor::{CheckState, GpuAnswer, Machine, Report, check_ids, examine};
use cascade_store::{FilesConfig, IoEngine};
use tempfile::TempDir;

use fake_machine::FakeMachine;

const GIB: u64 = 1 << 30;
const LIMIT: Duration = Duration::from_secs(30);

/// A node with 8 GiB of DRAM and 16 GiB of files, with all its files in one directory.
fn node(directory: &Path) -> NodeConfig {
    let mut config = NodeConfig::new(directory.join("cascade.sock"));
    config.listen = Some("127.0.0.1:0".parse().unwrap());
    config.pool_directory = Some("/dev/shm".into());
    config.store.dram_bytes = 8 * GIB;
    "Dram|Files".clone_into(&mut config.store.pipeline);
    let mut files = FilesConfig::new(directory.join("files"));
    files.capacity_bytes = 16 * GIB;
    config.store.files = Some(files);
    config
}

fn diagnose(config: NodeConfig, machine: impl Machine + 'static) -> Report {
    let machine: Arc<dyn Machine> = Arc::new(machine);
    examine(Ok(config), &machine, LIMIT)
}

/// Asserts that the report has exactly this warning or failure.
#[track_caller]
fn assert_reported(report: &Report, id: &str, state: CheckState, found: &str, remedy: &str) {
    let is_problem = |state| matches!(state, CheckState::Warning | CheckState::Failed);
    let problems: Vec<_> = report.checks.iter().filter(|check| is_problem(check.state)).collect();
    let [check] = &problems[..] else { panic!("expected one problem, {id}: {problems:#?}") };
    assert_eq!((check.id.as_str(), check.state), (id, state), "{check:?}");
    assert!(check.found.contains(found), "{found}: {check:?}");
    assert!(check.remedy.as_ref().unwrap().contains(remedy), "{remedy}: {check:?}");
    assert_eq!(report.is_ready, state != CheckState::Failed);
}

/// The result of one check on the machine that runs the test. Other checks differ by host.
fn result_of(report: &Report, id: &str) -> (CheckState, String, String) {
    let check = report.checks.iter().find(|check| check.id == id).unwrap();
    (check.state, check.found.clone(), check.remedy.clone().unwrap_or_default())
}

#[test]
fn a_healthy_machine_has_no_problem() {
    let directory = TempDir::new().unwrap();
    let report = diagnose(node(directory.path()), FakeMachine::healthy());
    let states: Vec<_> = report.checks.iter().map(|check| (&*check.id, check.state)).collect();
    for (id, state) in states {
        let expected = if id == "valkey" { CheckState::Absent } else { CheckState::Ok };
        assert_eq!(state, expected, "{id}: {:#?}", report.checks);
    }
    assert!(report.is_ready);
}

#[test]
fn checks_of_unconfigured_features_are_absent() {
    let directory = TempDir::new().unwrap();
    let mut config = NodeConfig::new(directory.path().join("cascade.sock"));
    config.store.huge_pages = false;
    let mut machine = FakeMachine::healthy();
    machine.lists.clear();
    machine.gpus = GpuAnswer::NotAsked;
    machine.direct_refusal = Some(io::ErrorKind::InvalidInput);
    machine.ring = Err(io::ErrorKind::PermissionDenied);
    machine.huge_bytes = 0;
    let report = diagnose(config, machine);
    let absent = report.checks.iter().filter(|check| check.state == CheckState::Absent).count();
    assert!(report.is_ready && absent == 13, "{absent}: {:#?}", report.checks);
}

#[test]
fn a_configuration_that_does_not_fit_the_machine_is_reported() {
    let directory = TempDir::new().unwrap();
    let mut config = node(directory.path());
    config.store.files.as_mut().unwrap().engine = IoEngine::Uring;
    let mut machine = FakeMachine::healthy();
    machine.ring = Err(io::ErrorKind::PermissionDenied);
    let report = diagnose(config, machine);
    assert_reported(&report, "io_uring", CheckState::Failed, "io_engine is uring", "auto");
    let mut config = node(directory.path());
    config.listen = Some("0.0.0.0:0".parse().unwrap());
    let report = diagnose(config, FakeMachine::healthy());
    assert_reported(&report, "exposure", CheckState::Warning, "without TLS", "tls_certificate");
}

#[test]
fn a_refused_configuration_is_the_only_finding() {
    let file = TempDir::new().unwrap();
    let path = file.path().join("cascade.toml");
    fs::write(&path, "drma = \"1GiB\"\n").unwrap();
    let sources = ConfigSources { file: Some(path), flags: Vec::new() };
    let config = config::load(&sources, &Environment::new([("A", "")], 0));
    let machine: Arc<dyn Machine> = Arc::new(FakeMachine::healthy());
    let report = examine(config, &machine, LIMIT);
    assert_reported(&report, "configuration", CheckState::Failed, "dram", "correct");
    assert_eq!(report.checks.len(), 1);
}

#[test]
fn a_check_that_hangs_fails_and_the_others_still_answer() {
    let directory = TempDir::new().unwrap();
    let (end, until) = mpsc::channel();
    let machine: Arc<dyn Machine> =
        Arc::new(FakeMachine { hangs_until: Some(Mutex::new(until)), ..FakeMachine::healthy() });
    let limit = Duration::from_secs(5);
    let report = examine(Ok(node(directory.path())), &machine, limit);
    assert_reported(&report, "io_uring", CheckState::Failed, "no answer within 5 s", "hangs");
    drop(end);
}

#[test]
fn every_check_is_documented() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/doctor.md");
    let page = fs::read_to_string(page).unwrap();
    for id in check_ids() {
        assert!(page.contains(&format!("| `{id}` |")), "docs/doctor.md lacks {id}");
    }
}
