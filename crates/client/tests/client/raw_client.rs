//! Clients that violate the protocol lose their connection; other clients are not affected.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::time::Duration;

use cascade_block::NamespaceId;
use cascade_tier::{BlockStore, PutOutcome, StoreError};
use cascade_wire::{
    Access, Answer, BlockToPrepare, Call, Frame, Hello, HoldRange, KeyQuestion, Lease,
    LeasePurpose, PreparedBlock, SealedBlock, SessionId, Welcome, frame_length,
};

use crate::test_node::{NOW, TestNode, hits, key, keys, put, wait_until};

/// A client that sends arbitrary messages.
struct RawClient {
    stream: UnixStream,
    welcome: Option<Welcome>,
    calls: u32,
}

impl RawClient {
    fn connect(host: &TestNode) -> Self {
        let stream = UnixStream::connect(&host.socket).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        Self { stream, welcome: None, calls: 0 }
    }

    fn connect_writer(host: &TestNode) -> Self {
        Self::handshake(host, Access::Write)
    }

    fn handshake(host: &TestNode, access: Access) -> Self {
        let mut raw = Self::connect(host);
        let hello = hello_call(access, None);
        let Answer::Welcome(welcome) = raw.call(&hello) else { panic!("no welcome") };
        raw.welcome = Some(welcome);
        raw
    }

    fn send(&mut self, call: &Call) {
        let mut bytes = Vec::new();
        call.write(&mut bytes, self.calls, None).unwrap();
        self.stream.write_all(&bytes).unwrap();
    }

    fn call(&mut self, call: &Call) -> Answer {
        self.calls += 1;
        self.send(call);
        self.answer().expect("the node answers")
    }

    fn answer(&mut self) -> Option<Answer> {
        let mut bytes = vec![0; cascade_wire::HEADER_BYTES];
        self.stream.read_exact(&mut bytes).ok()?;
        let length = frame_length(&bytes).unwrap().unwrap();
        let header = bytes.len();
        bytes.resize(length, 0);
        self.stream.read_exact(&mut bytes[header..]).ok()?;
        Some(Answer::read(&Frame::read(&bytes).unwrap()).unwrap())
    }

    /// Whether the node closes the connection.
    fn is_closed(&mut self) -> bool {
        match self.stream.read(&mut [0; 64]) {
            Ok(count) => count == 0,
            // The node closed it with unread input.
            Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }
}

fn frame(call: &Call) -> Vec<u8> {
    let mut bytes = Vec::new();
    call.write(&mut bytes, 1, None).unwrap();
    bytes
}

/// The first message of a client that only reads.
pub(crate) fn hello() -> Vec<u8> {
    frame(&hello_call(Access::Read, None))
}

fn hello_call(access: Access, session: Option<SessionId>) -> Call {
    let name = "raw client".to_owned();
    Call::Hello(Hello { version_min: 1, version_max: 1, access, session, token: None, name })
}

pub(crate) fn lease(blocks: std::ops::Range<u64>) -> Vec<u8> {
    let purpose = LeasePurpose::Use;
    frame(&Call::Lease { timeout_ms: 1000, first_hold: 1, purpose, keys: keys(blocks) })
}

pub(crate) fn ping() -> Vec<u8> {
    frame(&Call::Ping)
}

/// Reads this many messages and ignores them.
pub(crate) fn await_answers(stream: &mut UnixStream, count: usize) {
    for _ in 0..count {
        let mut bytes = vec![0; cascade_wire::HEADER_BYTES];
        stream.read_exact(&mut bytes).unwrap();
        let length = frame_length(&bytes).unwrap().unwrap();
        let mut rest = vec![0; length - bytes.len()];
        stream.read_exact(&mut rest).unwrap();
    }
}

/// Members of `admin_group` administer another user's node without access to its KV.
#[test]
fn an_administrator_gets_neither_the_pool_nor_access_to_blocks() {
    let host = TestNode::start(|_| ());
    let client = host.connect();
    put(&client, &keys(0..1), 64, NOW);
    let mut administrator = RawClient::handshake(&host, Access::Administer);
    let welcome = administrator.welcome.clone().unwrap();
    assert_eq!((welcome.pool_bytes, welcome.hold_bytes_max), (0, 0));
    let (timeout_ms, first_hold) = (100, 1);
    for call in [
        Call::Lease { timeout_ms, first_hold, purpose: LeasePurpose::Use, keys: keys(0..1) },
        Call::Ask { question: KeyQuestion::Contains, keys: keys(0..1) },
        Call::Ask { question: KeyQuestion::Delete, keys: keys(0..1) },
        Call::Prepare { timeout_ms, first_hold, blocks: vec![unwritten(1, 64)] },
        Call::Reserve { timeout_ms, hold: 2, bytes: 64 },
        Call::Clear,
        Call::Changes { since: None, most: 10 },
        Call::Manifests { timeout_ms },
        Call::Flush { timeout_ms },
    ] {
        let answer = administrator.call(&call);
        assert!(
            matches!(answer, Answer::Failed(StoreError::Config { .. })),
            "{call:?}: {answer:?}"
        );
    }
    assert!(matches!(administrator.call(&Call::Ping), Answer::Done));
    let topic = "version".to_owned();
    let request = Call::Admin { timeout_ms, topic, arguments: "{}".to_owned() };
    assert!(matches!(administrator.call(&request), Answer::Text(_)));
    assert_eq!(hits(&keys(0..1), &client.view(&keys(0..1), NOW)), 1);
}

fn unwritten(n: u64, bytes: u32) -> BlockToPrepare {
    BlockToPrepare { key: key(n), parent: None, bytes, is_prefix: false, is_partial: false }
}

fn sealed(n: u64, hold: u64, bytes: u32) -> SealedBlock {
    SealedBlock {
        hold,
        bytes,
        key: key(n),
        parent: None,
        namespace: NamespaceId::default(),
        is_prefix: false,
        is_partial: false,
        ttl_ms: None,
    }
}

/// Checks that other clients are served.
fn assert_serves(host: &TestNode) {
    let client = host.connect();
    let some = keys(500..510);
    put(&client, &some, 4096, NOW);
    assert_eq!(hits(&some, &client.view(&some, NOW)), 10);
}

#[test]
fn invalid_bytes_close_the_connection() {
    let host = TestNode::start(|_| {});
    let mut ping = Vec::new();
    Call::Ping.write(&mut ping, 1, None).unwrap();
    let noise: [&[u8]; 5] = [b"GET / HTTP/1.1\r\n\r\n12345678", &[0; 64], &[0xFF; 64], &ping, {
        // A frame whose checksum is wrong.
        &[ping.as_slice(), &[1]].concat()
    }];
    for bytes in noise {
        let mut raw = RawClient::connect(&host);
        raw.stream.write_all(bytes).unwrap();
        assert!(raw.is_closed(), "{bytes:02x?}");
    }
    let mut raw = RawClient::connect_writer(&host);
    raw.stream.write_all(&[7; 100]).unwrap();
    assert!(raw.is_closed());
    let mut long = Vec::new();
    Frame::write(&mut long, 1, 1, None, |body| body.resize(1 << 20, 0)).unwrap();
    let mut raw = RawClient::connect(&host);
    // The node refuses it by its header, so the write may fail.
    drop(raw.stream.write_all(&long));
    assert!(raw.is_closed(), "a hello of this length is refused");
    assert_serves(&host);
    host.assert_nothing_leaks();
}

#[test]
fn an_incomplete_message_does_not_block_other_clients() {
    let host = TestNode::start(|_| {});
    let mut all = Vec::new();
    for _ in 0..20 {
        let mut raw = RawClient::connect_writer(&host);
        let mut bytes = Vec::new();
        let call = Call::Ask { question: KeyQuestion::Contains, keys: keys(0..2000) };
        call.write(&mut bytes, 1, None).unwrap();
        raw.stream.write_all(&bytes[..bytes.len() / 2]).unwrap();
        all.push((raw, bytes));
    }
    assert_serves(&host);
    for (mut raw, bytes) in all {
        raw.stream.write_all(&bytes[bytes.len() / 2..]).unwrap();
        assert!(matches!(raw.answer(), Some(Answer::Flags(flags)) if flags.len() == 2000));
    }
    host.assert_nothing_leaks();
}

#[test]
fn sealing_or_releasing_an_unknown_hold_is_refused() {
    let host = TestNode::start(|_| {});
    let other = host.connect();
    put(&other, &keys(0..1), 4096, NOW);
    let mut raw = RawClient::connect_writer(&host);
    let timeout_ms = 1000;
    let is_refused =
        |answer: Answer| {
            let Answer::Puts(outcomes) = answer else { panic!("{answer:?}") };
            assert!(outcomes.iter().all(|o| matches!(
                o,
                PutOutcome::Failed(StoreError::Config { setting: "hold", .. })
            )));
        };
    is_refused(raw.call(&Call::Seal { timeout_ms, blocks: vec![sealed(1, 77, 4096)] }));
    let answer =
        raw.call(&Call::Prepare { timeout_ms, first_hold: 1, blocks: vec![unwritten(2, 100)] });
    assert!(
        matches!(&answer, Answer::Prepared(p) if matches!(p[..], [PreparedBlock::Slab { .. }]))
    );
    // Longer than the slab.
    is_refused(raw.call(&Call::Seal { timeout_ms, blocks: vec![sealed(2, 1, 101)] }));
    // A lease cannot be sealed.
    let purpose = LeasePurpose::Use;
    let answer = raw.call(&Call::Lease { timeout_ms, first_hold: 5, purpose, keys: keys(0..1) });
    assert!(matches!(&answer, Answer::Leases(l) if matches!(l[..], [Lease::Hit { .. }])));
    is_refused(raw.call(&Call::Seal { timeout_ms, blocks: vec![sealed(3, 5, 4096)] }));
    // A hold number in use.
    let answer = raw.call(&Call::Reserve { timeout_ms, hold: 5, bytes: 100 });
    assert!(matches!(answer, Answer::Failed(StoreError::Config { .. })), "{answer:?}");
    // Larger than the pool.
    for bytes in [1 << 63, u64::MAX, 1 << 40] {
        let answer = raw.call(&Call::Reserve { timeout_ms, hold: 9, bytes });
        assert!(matches!(answer, Answer::Failed(StoreError::Config { .. })), "{answer:?}");
    }
    let holds = vec![HoldRange { first: 0, count: 60_000 }; 20_000];
    raw.send(&Call::Release { holds });
    assert!(matches!(raw.call(&Call::Ping), Answer::Done));
    assert_eq!(hits(&keys(0..1), &other.view(&keys(0..1), NOW)), 1);
    wait_until("nothing is held", || host.held_bytes() == 0);
    drop((raw, other));
    host.assert_nothing_leaks();
}

/// Empty and tiny blocks were counted by their length, although each takes 64 bytes of the pool.
#[test]
fn a_client_holds_no_more_than_its_share() {
    let host = TestNode::start(|_| {});
    let mut raw = RawClient::connect_writer(&host);
    let share = raw.welcome.as_ref().unwrap().hold_bytes_max;
    assert_eq!(share, (16 << 20) / 100 * 50);
    let mut hold = 1;
    loop {
        let blocks: Vec<_> = (hold..hold + 2048).map(|n| unwritten(n, 1)).collect();
        let answer = raw.call(&Call::Prepare { timeout_ms: 100, first_hold: hold, blocks });
        hold += 2048;
        let Answer::Prepared(prepared) = answer else { break };
        if !prepared.iter().any(|one| matches!(one, PreparedBlock::Slab { .. })) {
            break;
        }
    }
    let reserved = host.stats().pool.reserved_bytes as u64;
    assert!(reserved <= share + 2048 * 64, "{reserved} bytes are held; the share is {share}");
    // The share is per process: another process still has its own.
    put(&host.store(), &keys(0..16), 4096, NOW);
    let mut other = crate::child::Process::start("child::holder", &host.socket);
    other.await_ready();
    other.kill();
    // A range for each call, because a range may have at most 65,536 holds.
    let holds = (1..hold).step_by(2048).map(|first| HoldRange { first, count: 2048 });
    raw.send(&Call::Release { holds: holds.collect() });
    drop(raw);
    host.assert_nothing_leaks();
}

/// The node built all answers of a batch of calls in memory before it noticed that the client did
/// not read.
#[test]
fn unread_answers_are_bounded_in_memory() {
    let host = TestNode::start(|_| {});
    put(&host.store(), &keys(0..1), 100, NOW);
    let mut bytes = Vec::new();
    let call = Call::Ask { question: KeyQuestion::Locate, keys: vec![key(0); 60_000] };
    call.write(&mut bytes, 1, None).unwrap();
    let mut unread: Vec<RawClient> = (0..4).map(|_| RawClient::connect_writer(&host)).collect();
    for raw in &mut unread {
        raw.stream.set_nonblocking(true).unwrap();
        let mut sent = 0;
        // 200 MiB of calls if the node reads them all; 10 blocked writes in a row end the attempt.
        let mut blocked_writes = 0;
        while sent < 200 << 20 && blocked_writes < 10 {
            if let Ok(count) = raw.stream.write(&bytes[sent % bytes.len()..]) {
                sent += count;
            } else {
                blocked_writes += 1;
                crate::test_node::pause(Duration::from_millis(20));
            }
        }
        assert!(sent < 200 << 20, "the node keeps answering a client that reads nothing");
    }
    assert_serves(&host);
    drop(unread);
    host.assert_nothing_leaks();
}

/// Answers that wait until the client reads are sent completely and in order.
#[test]
fn a_slow_reader_gets_all_answers_in_order() {
    let host = TestNode::start(|_| {});
    let mut slow = RawClient::connect_writer(&host);
    let mut bytes = Vec::new();
    for number in 0..400 {
        let call = Call::Ask { question: KeyQuestion::Contains, keys: vec![key(0); 8000] };
        call.write(&mut bytes, number, None).unwrap();
    }
    let mut writer = slow.stream.try_clone().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || writer.write_all(&bytes).unwrap());
        crate::test_node::pause(Duration::from_millis(50));
        for number in 0..400 {
            let answer = slow.answer();
            assert!(matches!(&answer, Some(Answer::Flags(f)) if f.len() == 8000), "{number}");
        }
    });
}

#[test]
fn one_process_takes_at_most_half_of_the_connections() {
    let host = TestNode::start(|config| config.limits.connections_max = 64);
    let witness = host.connect();
    put(&witness, &keys(0..4), 4096, NOW);
    let streams: Vec<_> =
        (0..1000).filter_map(|_| UnixStream::connect(&host.socket).ok()).collect();
    assert_eq!(hits(&keys(0..4), &witness.view(&keys(0..4), NOW)), 4);
    // Another process can still connect.
    put(&witness, &keys(0..16), 4096, NOW);
    let mut other = crate::child::Process::start("child::holder", &host.socket);
    other.await_ready();
    drop((other, streams, witness));
    host.assert_nothing_leaks();
}

/// Such connections blocked new clients for ten seconds, longer than a client waits.
#[test]
fn unauthenticated_connections_do_not_block_new_clients() {
    let host = TestNode::start(|config| config.limits.connections_max = 1024);
    let unauthenticated: Vec<_> =
        (0..200).map(|_| UnixStream::connect(&host.socket).unwrap()).collect();
    let client = host.connect();
    put(&client, &keys(0..4), 4096, NOW);
    drop((unauthenticated, client));
    host.assert_nothing_leaks();
}

/// The node watched a session's process through its first connection. If that had been closed
/// before, the session outlived its process in sockets that a child had inherited.
#[test]
fn a_session_ends_with_its_process_although_a_child_inherited_its_socket() {
    let host = TestNode::start(|_| {});
    put(&host.store(), &keys(0..4), 4096, NOW);
    // The parent sends the hello, so the session belongs to it. Its child has the socket as its
    // standard input.
    let mut parent = crate::child::Process::start("raw_client::pass_socket_to_child", &host.socket);
    parent.await_ready();
    assert_eq!(host.node.clients()[0].leases, 4);
    parent.kill();
    wait_until("the session ends with its process", || host.node.clients().is_empty());
    host.assert_nothing_leaks();
}

/// The child of the test above: leases blocks, closes its first connection, and passes the second
/// one to a process that outlives it.
#[test]
#[ignore = "runs as a child"]
fn pass_socket_to_child() {
    let Some(socket) = crate::child::variable(crate::child::SOCKET) else { return };
    let connect = || {
        let stream = UnixStream::connect(&socket).unwrap();
        RawClient { stream, welcome: None, calls: 0 }
    };
    let mut first = connect();
    let hello = hello_call(Access::Read, None);
    let Answer::Welcome(welcome) = first.call(&hello) else { panic!("no welcome") };
    let mut second = connect();
    let hello = hello_call(Access::Read, Some(welcome.session));
    assert!(matches!(second.call(&hello), Answer::Welcome(_)));
    let purpose = LeasePurpose::Use;
    let lease = Call::Lease { timeout_ms: 1000, first_hold: 1, purpose, keys: keys(0..4) };
    assert!(matches!(second.call(&lease), Answer::Leases(_)));
    assert!(matches!(second.call(&Call::Ping), Answer::Done));
    drop(first);
    let socket: std::os::fd::OwnedFd = second.stream.try_clone().unwrap().into();
    let mut sleeper = Command::new("sleep")
        .arg("20")
        .stdin(Stdio::from(socket))
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    crate::child::report_ready();
    sleeper.wait().unwrap();
}

/// A further connection to the session of a welcome.
fn join(host: &TestNode, welcome: Option<&Welcome>) -> RawClient {
    let mut raw = RawClient::connect(host);
    let hello = hello_call(Access::Write, welcome.map(|welcome| welcome.session));
    assert!(matches!(raw.call(&hello), Answer::Welcome(_)));
    raw
}

/// A second connection of a session, and blocks that were leased through it.
fn lease_on_second(host: &TestNode, first: &RawClient) -> RawClient {
    let mut second = join(host, first.welcome.as_ref());
    let purpose = LeasePurpose::Use;
    let lease = Call::Lease { timeout_ms: 1000, first_hold: 1, purpose, keys: keys(0..4) };
    assert!(matches!(second.call(&lease), Answer::Leases(_)));
    second
}

/// The node released the grants of an answer that the client had read, when the client's next call
/// was cut off by its deadline.
#[test]
fn grants_of_an_answer_before_an_incomplete_call_are_kept() {
    let host = TestNode::start(|_| {});
    put(&host.store(), &keys(0..4), 4096, NOW);
    let mut first = RawClient::connect_writer(&host);
    let mut second = lease_on_second(&host, &first);
    let mut ping = Vec::new();
    Call::Ping.write(&mut ping, 2, None).unwrap();
    second.stream.write_all(&ping[..ping.len() / 2]).unwrap();
    drop(second);
    wait_until("the second connection closes", || host.node.clients()[0].connections == 1);
    assert!(matches!(first.call(&Call::Ping), Answer::Done));
    assert_eq!(host.node.clients()[0].leases, 4);
    // No call followed this answer, so the client may not have read it.
    let release = Call::Release { holds: vec![HoldRange { first: 1, count: 4 }] };
    first.send(&release);
    assert!(matches!(first.call(&Call::Ping), Answer::Done));
    drop(lease_on_second(&host, &first));
    wait_until("the second connection closes", || host.node.clients()[0].connections == 1);
    assert_eq!(host.node.clients()[0].leases, 0);
    drop(first);
    host.assert_nothing_leaks();
}

/// The session ended with its last connection, and memory that its running process still read was
/// reused for other blocks.
#[test]
fn leases_of_a_running_process_outlive_its_connections() {
    let host = TestNode::start(|_| {});
    put(&host.store(), &keys(0..4), 4096, NOW);
    let first = RawClient::connect_writer(&host);
    let mut second = lease_on_second(&host, &first);
    assert!(matches!(second.call(&Call::Ping), Answer::Done));
    let welcome = first.welcome.clone();
    drop((first, second));
    wait_until("both connections close", || host.node.clients()[0].connections == 0);
    assert_eq!(host.node.clients()[0].leases, 4);
    let mut again = join(&host, welcome.as_ref());
    again.send(&Call::Release { holds: vec![HoldRange { first: 1, count: 4 }] });
    drop(again);
    host.assert_nothing_leaks();
}
