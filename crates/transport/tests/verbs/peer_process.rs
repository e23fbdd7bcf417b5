//! A peer in another process, which is killed.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, Command, Stdio};

use cascade_transport::Direction;
use cascade_transport::verbs::{
    FlushPlace, LinkAddress, Move, OpenLink, RemoteMemory, Status, VerbsError, VerbsSettings,
};

use super::buffer::{BOTH, Buffer};
use super::{device, soon};

const PEER: &str = "CASCADE_TEST_VERBS_PEER";

/// 6 repeats after 67 ms each, so that the test is short.
fn settings() -> VerbsSettings {
    VerbsSettings { timeout: 14, ..VerbsSettings::default() }
}

fn hex(bytes: &[u8]) -> String {
    let digits = bytes.iter().flat_map(|byte| [byte >> 4, byte & 15]);
    digits.map(|digit| char::from_digit(digit.into(), 16).unwrap()).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    let digits = text.trim().as_bytes().chunks(2);
    digits.map(|pair| u8::from_str_radix(str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
}

/// Not a test of its own: the process that `a_killed_peer_is_an_error` starts.
#[test]
#[ignore = "the peer of another test"]
#[expect(clippy::disallowed_methods, reason = "the test that starts it tells it so")]
fn peer() {
    if std::env::var_os(PEER).is_none() {
        return;
    }
    let mut out = std::io::stdout();
    let device = device(&settings());
    let link = OpenLink::open(&device).unwrap();
    let memory = Buffer::new(&device, 4096, BOTH);
    writeln!(
        out,
        "\n{} {}",
        hex(&link.address().to_bytes()),
        hex(&memory.memory.remote().to_bytes())
    )
    .unwrap();
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let _link = link.connect(&LinkAddress::from_bytes(&unhex(&line)).unwrap()).unwrap();
    writeln!(out, "\nconnected").unwrap();
    // Until it is killed.
    std::io::stdin().read_line(&mut line).unwrap();
}

fn start() -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["peer_process::peer", "--exact", "--ignored", "--nocapture"])
        .env(PEER, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

#[test]
#[ignore = "needs a verbs device: make test-rdma"]
fn a_killed_peer_is_an_error() {
    let mut child = start();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let words = lines.find(|line| line.as_ref().unwrap().contains(' ') && !is_of_harness(line));
    let words = words.unwrap().unwrap();
    let (address, memory) = words.split_once(' ').unwrap();
    let remote = RemoteMemory::from_bytes(&unhex(memory)).unwrap();
    let device = device(&settings());
    let link = OpenLink::open(&device).unwrap();
    let mut input = child.stdin.take().unwrap();
    writeln!(input, "{}", hex(&link.address().to_bytes())).unwrap();
    let link = link.connect(&LinkAddress::from_bytes(&unhex(address)).unwrap()).unwrap();
    assert!(lines.any(|line| line.unwrap() == "connected"));
    let local = Buffer::new(&device, 4096, BOTH);
    local.fill(0, b"block");
    let item = |direction, at| Move::new(direction, (&local.memory, at), (&remote, 0), 5).unwrap();
    let flushes = [FlushPlace::start_of(&remote).unwrap()];
    let write = [item(Direction::Write, 0)].into_iter();
    link.wait(&link.post(Direction::Write, write, &flushes, soon()).unwrap(), soon()).unwrap();
    let read = [item(Direction::Read, 100)].into_iter();
    link.wait(&link.post(Direction::Read, read, &[], soon()).unwrap(), soon()).unwrap();
    assert_eq!(&local.bytes()[100..105], b"block", "the bytes went to the other process and back");

    // SIGKILL.
    child.kill().unwrap();
    child.wait().unwrap();
    let write = [item(Direction::Write, 0)].into_iter();
    let posted = link.post(Direction::Write, write, &[], soon()).unwrap();
    let error = link.wait(&posted, soon()).unwrap_err();
    let status = Status::RETRIES_EXHAUSTED;
    assert!(matches!(error, VerbsError::Request { status: it, .. } if it == status), "{error}");
    assert!(!link.is_open());
}

/// A line that the test harness of the peer prints.
fn is_of_harness(line: &std::io::Result<String>) -> bool {
    let line = line.as_ref().unwrap();
    line.starts_with("running") || line.starts_with("test ")
}
