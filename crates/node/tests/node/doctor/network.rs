//! Sockets and ports that are in use, unsafe, or of another host.

use std::collections::BTreeSet;
use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;

use cascade_node::doctor::{CheckState, RunningNode};
use tempfile::TempDir;

use super::fake_machine::FakeMachine;
use super::{assert_reported, diagnose, node};

#[test]
fn a_port_in_use_is_reported() {
    let directory = TempDir::new().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut config = node(directory.path());
    config.listen = Some(listener.local_addr().unwrap());
    let report = diagnose(config, FakeMachine::healthy());
    assert_reported(&report, "port", CheckState::Failed, "in use", "ss -ltnp");

    // The node that is to be upgraded has it.
    let ports = BTreeSet::from([listener.local_addr().unwrap().port()]);
    let running = RunningNode { pid: 7, memory_bytes: 1 << 30, ports };
    let machine = FakeMachine { running: Some(running), ..FakeMachine::healthy() };
    let mut config = node(directory.path());
    config.listen = Some(listener.local_addr().unwrap());
    let report = diagnose(config, machine);
    let port = report.checks.iter().find(|check| check.id == "port").unwrap();
    assert!(port.state == CheckState::Ok && port.found.contains("process 7"), "{port:?}");
}

#[test]
fn an_address_of_another_host_is_reported() {
    let directory = TempDir::new().unwrap();
    let mut config = node(directory.path());
    // An address of TEST-NET-1, which is reserved for documentation.
    config.listen = Some("192.0.2.1:9000".parse().unwrap());
    config.security.certificate = Some("/certificate".into());
    let report = diagnose(config, FakeMachine::healthy());
    assert_reported(&report, "port", CheckState::Failed, "192.0.2.1", "ip -brief address");
}

#[test]
fn served_sockets_stale_sockets_and_unsafe_directories_are_distinguished() {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("cascade.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let report = diagnose(node(directory.path()), FakeMachine::healthy());
    assert_reported(&report, "socket", CheckState::Failed, "another process listens", "ss -xlp");
    let running = RunningNode { pid: 7, memory_bytes: 1 << 30, ports: BTreeSet::new() };
    let machine = FakeMachine { running: Some(running), ..FakeMachine::healthy() };
    let report = diagnose(node(directory.path()), machine);
    let socket = report.checks.iter().find(|check| check.id == "socket").unwrap();
    assert!(socket.state == CheckState::Ok && socket.found.contains("process 7"), "{socket:?}");
    drop(listener);
    let read_only = Some(directory.path().to_owned());
    let machine = FakeMachine { read_only, ..FakeMachine::healthy() };
    let report = diagnose(node(directory.path()), machine);
    assert_reported(&report, "socket", CheckState::Failed, "cannot create a socket", "chown");
    let report = diagnose(node(directory.path()), FakeMachine::healthy());
    let socket = report.checks.iter().find(|check| check.id == "socket").unwrap();
    assert!(socket.state == CheckState::Ok && socket.found.contains("stale"), "{socket:?}");
    fs::remove_file(&path).unwrap();
    fs::write(&path, "").unwrap();
    let report = diagnose(node(directory.path()), FakeMachine::healthy());
    assert_reported(&report, "socket", CheckState::Failed, "no socket", "move");
    fs::remove_file(&path).unwrap();
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let report = diagnose(node(directory.path()), FakeMachine::healthy());
    assert_reported(&report, "socket", CheckState::Failed, "0777", "chmod go-w");
}
