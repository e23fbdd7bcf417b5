//! The HTTP port of a node process: reload of the token, limit of descriptors, spans.

use std::fs;
use std::io::{self, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;
use std::sync::mpsc::{self, Receiver, TryRecvError};
use std::time::Duration;

use cascade_runtime::{Clock as _, SystemClock};
use rustix::process::{Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

use crate::admin::{READY_TIMEOUT, ServedNode};
use crate::{cascade, stderr};

/// The status code of a GET request.
fn get(address: &str, path: &str, header: &str) -> io::Result<String> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(READY_TIMEOUT))?;
    let head = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n");
    write!(stream, "{head}{header}\r\n")?;
    let mut response = String::new();
    stream.read_to_string(&mut response)?;
    Ok(response.split(' ').nth(1).unwrap_or_default().to_owned())
}

fn address(node: &ServedNode) -> String {
    node.json(&["status"])["node"]["listen"].as_str().unwrap().to_owned()
}

fn write_token(path: &Path, text: &str) {
    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
}

/// After a reload the old token was still accepted, and the new one refused, until a restart.
#[test]
fn a_reload_replaces_the_token() {
    let node = ServedNode::start_as(
        "listen = \"127.0.0.1:0\"\ntoken_file = \"HERE/token\"\n",
        &mut cascade(),
        |directory| write_token(&directory.path().join("token"), "the-first-token-of-this-node"),
    );
    let address = address(&node);
    let code = |token: &str| {
        get(&address, "/metrics", &format!("Authorization: Bearer {token}\r\n")).unwrap()
    };
    let codes = || [code("the-first-token-of-this-node"), code("the-second-token-of-this-node")];
    assert_eq!(codes(), ["200", "401"]);
    write_token(&node.path("token"), "the-second-token-of-this-node");
    node.output(&["reload"]);
    assert_eq!(codes(), ["401", "200"]);
    write_token(&node.path("token"), "short");
    let message = node.refused(1, &["reload"]);
    assert!(message.contains("token_file") && message.contains("16"), "{message}");
    assert_eq!(codes(), ["401", "200"], "after a refused reload the token stays");
}

/// Idle connections to the port took every descriptor of a node with a low limit. The node then
/// accepted no client, and its file tier could not open files.
#[test]
fn connections_to_the_port_leave_descriptors_for_clients_and_files() {
    const LIMIT: usize = 160;
    let mut command = Command::new("sh");
    command.arg("-c").arg(format!("ulimit -n {LIMIT}; exec \"$0\" \"$@\""));
    command.arg(cascade().get_program());
    let node = ServedNode::start_as("listen = \"127.0.0.1:0\"\n", &mut command, |_| ());
    let address = address(&node);
    let idle: Vec<_> = (0..300).map(|_| TcpStream::connect(&address).unwrap()).collect();
    let (answered, is_answered) = mpsc::channel();
    std::thread::spawn(move || answered.send(get(&address, "/healthz", "")));
    // The kernel queues connections in order, so the node has accepted all others by then.
    let descriptors = format!("/proc/{}/fd", node.child.id());
    let mut open_max = 0;
    let answer = loop {
        open_max = open_max.max(fs::read_dir(&descriptors).unwrap().count());
        match is_answered.try_recv() {
            Ok(answer) => break answer,
            Err(TryRecvError::Empty) => std::thread::park_timeout(Duration::from_millis(5)),
            Err(TryRecvError::Disconnected) => panic!("the request panicked"),
        }
    };
    assert_eq!(answer.unwrap(), "200");
    assert!(open_max < LIMIT * 3 / 4, "{open_max} descriptors are open");
    node.output(&["ping"]);
    drop(idle);
}

/// A collector of traces that returns the bytes of all batches once it has received a text.
fn collect_until(listener: TcpListener, text: &'static [u8]) -> Receiver<Vec<u8>> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let mut batches = Vec::new();
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut piece = [0; 4096];
            let start = batches.len();
            loop {
                let count = stream.read(&mut piece).unwrap();
                if count == 0 {
                    break;
                }
                batches.extend_from_slice(&piece[..count]);
                let request = String::from_utf8_lossy(&batches[start..]).to_lowercase();
                let Some((head, _)) = request.split_once("\r\n\r\n") else { continue };
                let length = head.split("content-length: ").nth(1).unwrap();
                let length: usize = length.lines().next().unwrap().parse().unwrap();
                if batches.len() >= start + head.len() + 4 + length {
                    break;
                }
            }
            stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").unwrap();
            if batches.windows(text.len()).any(|window| window == text) {
                // The test has failed if it does not wait any more.
                let _is_received = sender.send(batches).is_ok();
                return;
            }
        }
    });
    receiver
}

/// Callers without a token could fill the queue of spans, so that those of clients were lost.
#[test]
fn refused_requests_and_health_checks_have_no_spans() {
    let collector = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = collector.local_addr().unwrap();
    let batches = collect_until(collector, b"http status");
    let toml = format!(
        "listen = \"127.0.0.1:0\"\ntoken_file = \"HERE/token\"\n\
         traces_endpoint = \"http://{endpoint}\"\n"
    );
    let node = ServedNode::start_as(&toml, &mut cascade(), |directory| {
        write_token(&directory.path().join("token"), "the-first-token-of-this-node");
    });
    let address = address(&node);
    for _ in 0..20 {
        assert_eq!(get(&address, "/healthz", "").unwrap(), "200");
        assert_eq!(get(&address, "/metrics", "").unwrap(), "401");
    }
    let right = "Authorization: Bearer the-first-token-of-this-node\r\n";
    assert_eq!(get(&address, "/status.json", right).unwrap(), "200");
    let batches = batches.recv_timeout(READY_TIMEOUT).expect("the span of the last request");
    let text = String::from_utf8_lossy(&batches);
    assert_eq!(text.matches("http ").collect::<Vec<_>>(), ["http "], "only the last request");
}

#[test]
fn a_node_works_and_stops_though_its_trace_collector_hangs() {
    // The kernel accepts connections; no process answers.
    let collector = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = collector.local_addr().unwrap();
    let mut node = ServedNode::start(&format!("traces_endpoint = \"http://{endpoint}\"\n"));
    let start = SystemClock.monotonic();
    for _ in 0..5 {
        node.output(&["ping"]);
    }
    kill_process(node.process(), Signal::TERM).unwrap();
    assert!(node.child.wait().unwrap().success());
    // Its spans get 2 s.
    let took = SystemClock.monotonic().saturating_sub(start);
    assert!(took < Duration::from_secs(20), "{took:?}");
    assert!(node.log().contains("spans were dropped"), "{}", node.log());
}

/// The doctor did not count the connections of the port.
#[test]
fn the_doctor_counts_descriptors_for_the_port() {
    let directory = TempDir::new().unwrap();
    let needed = |args: &[&str]| -> u64 {
        let mut command = cascade();
        command.arg("doctor").arg("--json").args(args);
        let output = command.arg("--socket").arg(directory.path().join("sock")).output().unwrap();
        let report: Value = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("{error}: {}", stderr(&output)));
        let checks = report["checks"].as_array().unwrap();
        let found = checks.iter().find(|check| check["id"] == "open_files").unwrap();
        let found = found["found"].as_str().unwrap();
        let number = found.split("up to ").nth(1).unwrap().split(' ').next().unwrap();
        number.parse().unwrap()
    };
    assert_eq!(needed(&["--listen", "127.0.0.1:0"]), needed(&[]) + 3 * 256);
}
