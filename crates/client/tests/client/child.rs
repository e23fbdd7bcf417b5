//! Child processes: this test binary run again as a node or a client, to be killed.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};

use cascade_client::{Client, ConnectOptions};
use cascade_node::{Node, NodeConfig, Server};
use cascade_tier::{BlockStore, PutSlab, StoreError};

use crate::test_node::{bytes_of, hits, keys, pause, put, wait_until, within};

pub(crate) const SOCKET: &str = "CASCADE_TEST_SOCKET";

#[expect(
    clippy::disallowed_methods,
    reason = "children and the slow gate are configured by variables"
)]
pub(crate) fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// A child process, killed when it is dropped.
pub(crate) struct Process {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Process {
    /// Runs one of the tests below in a process of its own.
    pub(crate) fn start(role: &str, socket: &Path) -> Self {
        Self::spawn(&mut Command::new(std::env::current_exe().unwrap()), role, socket)
    }

    /// As `start`, as another user, who may have no access to this binary's directory.
    pub(crate) fn start_as(user: u32, role: &str, socket: &Path) -> Self {
        use std::os::unix::process::CommandExt;
        let copy = socket.with_file_name("test");
        std::fs::copy(std::env::current_exe().unwrap(), &copy).unwrap();
        Self::spawn(Command::new(copy).uid(user).gid(user), role, socket)
    }

    fn spawn(command: &mut Command, role: &str, socket: &Path) -> Self {
        let mut child = command
            .args(["--exact", role, "--ignored", "--nocapture"])
            .env(SOCKET, socket)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Self { child, lines }
    }

    /// Waits until the child reports that it is ready.
    pub(crate) fn await_ready(&mut self) {
        let mut line = String::new();
        while !line.contains("is ready") {
            line.clear();
            assert!(self.lines.read_line(&mut line).unwrap() > 0, "the child ended early");
        }
    }

    /// Lets the child continue after `await_resume`.
    pub(crate) fn resume(&mut self) {
        self.child.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
    }

    pub(crate) fn signal(&self, signal: rustix::process::Signal) {
        let process = i32::try_from(self.child.id()).unwrap();
        let process = rustix::process::Pid::from_raw(process).unwrap();
        rustix::process::kill_process(process, signal).unwrap();
        if signal == rustix::process::Signal::STOP {
            wait_until("all of its threads have stopped", || self.is_stopped());
        }
    }

    /// A thread that has not received the signal yet would still answer calls.
    fn is_stopped(&self) -> bool {
        let threads = std::fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap();
        let mut states = threads.map(|thread| {
            let stat = std::fs::read_to_string(thread.unwrap().path().join("stat"));
            // A thread that has ended meanwhile counts as stopped.
            stat.map_or(true, |stat| stat.rsplit(") ").next().unwrap().starts_with('T'))
        });
        states.all(|is_stopped| is_stopped)
    }

    /// Directory of its open descriptors.
    pub(crate) fn descriptors(&self) -> String {
        format!("/proc/{}/fd", self.child.id())
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

pub(crate) fn report_ready() {
    let mut out = std::io::stdout().lock();
    writeln!(out, "\nis ready").and_then(|()| out.flush()).unwrap();
}

pub(crate) fn await_resume() {
    std::io::stdin().lock().read_line(&mut String::new()).unwrap();
}

fn connect() -> Option<Client> {
    let socket = variable(SOCKET)?;
    Some(Client::connect(ConnectOptions::new(socket)).unwrap())
}

/// A node that serves until it is killed.
#[test]
#[ignore = "runs as a child"]
fn node() {
    let Some(socket) = variable(SOCKET) else { return };
    drop(std::fs::remove_file(&socket));
    let mut config = NodeConfig::new(&socket);
    config.store.dram_bytes = 16 << 20;
    config.store.huge_pages = false;
    let node = Node::open(config).unwrap();
    let _server = Server::start(node, UnixListener::bind(&socket).unwrap()).unwrap();
    report_ready();
    loop {
        pause(std::time::Duration::from_secs(1));
    }
}

/// A client that its node refuses.
#[test]
#[ignore = "runs as a child"]
fn refused_client() {
    let Some(socket) = variable(SOCKET) else { return };
    let error = Client::connect(ConnectOptions::new(socket)).unwrap_err();
    assert!(matches!(error, StoreError::Refused { .. }), "{error:?}");
    report_ready();
    await_resume();
}

/// A client that makes all kinds of calls until it is killed.
#[test]
#[ignore = "runs as a child"]
fn busy_client() {
    let Some(client) = connect() else { return };
    report_ready();
    let mut views = Vec::new();
    for at in u64::from(std::process::id()).. {
        let first = at * 13 % 400;
        let some = keys(first..first + 16);
        drop(put(&client, &some, 16 << 10, within(5000)));
        let got = client.view(&some, within(5000));
        hits(&some, &got);
        views.push(got);
        let mut slab = client.reserve(16 << 10, within(5000));
        if let Ok(slab) = &mut slab {
            // In two parts, so that a kill can leave a block half written.
            let bytes = bytes_of(&some[3], 16 << 10);
            let memory = slab.host_mut().unwrap();
            memory[..8 << 10].copy_from_slice(&bytes[..8 << 10]);
            memory[8 << 10..].copy_from_slice(&bytes[8 << 10..]);
        }
        if let (Ok(slab), true) = (slab, at % 3 == 0) {
            client.put_slabs(vec![PutSlab::new(some[3], slab)], within(5000));
        }
        client.pin(&some[..1]);
        client.delete(&some[8..10]);
        if views.len() > 3 {
            views.clear();
        }
    }
}

/// A client that holds views and a reservation, and checks them again when resumed.
#[test]
#[ignore = "runs as a child"]
fn holder() {
    let Some(client) = connect() else { return };
    let some = keys(0..16);
    let views = client.view(&some, within(5000));
    assert_eq!(hits(&some, &views), 16);
    let mut slab = client.reserve(8192, within(5000)).unwrap();
    report_ready();
    await_resume();
    assert_eq!(hits(&some, &views), 16, "held views are unchanged");
    let key = keys(900..901)[0];
    slab.fill_from(&bytes_of(&key, 8192)).unwrap();
    let outcomes = client.put_slabs(vec![PutSlab::new(key, slab)], within(5000));
    assert!(matches!(outcomes[..], [cascade_tier::PutOutcome::Stored]), "{outcomes:?}");
    report_ready();
    await_resume();
}
