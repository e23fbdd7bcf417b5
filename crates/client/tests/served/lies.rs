//! Clients that do not keep to the protocol: they lose their own connection and nothing else.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::time::Duration;

use cascade_block::NamespaceId;
use cascade_store::{BlockStore, PutOutcome, StoreError};
use cascade_wire::{
    Access, Answer, AskedBlock, Call, Frame, Hello, HoldRange, KeyQuestion, Lease, LeasePurpose,
    PreparedBlock, SealedBlock, Welcome, frame_length,
};

use crate::host::{Host, NOW, hits, key, keys, put, wait_until};

/// A client that says whatever a test wants it to say.
struct Liar {
    stream: UnixStream,
    welcome: Option<Welcome>,
    calls: u32,
}

impl Liar {
    fn connect(host: &Host) -> Self {
        let stream = UnixStream::connect(&host.socket).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        Self { stream, welcome: None, calls: 0 }
    }

    fn greet(host: &Host) -> Self {
        Self::greet_as(host, Access::Write)
    }

    fn greet_as(host: &Host, access: Access) -> Self {
        let mut liar = Self::connect(host);
        let hello = Hello {
            version_min: 1,
            version_max: 1,
            access,
            session: None,
            token: None,
            name: "liar".to_owned(),
        };
        let Answer::Welcome(welcome) = liar.ask(&Call::Hello(hello)) else { panic!("no welcome") };
        liar.welcome = Some(welcome);
        liar
    }

    fn tell(&mut self, call: &Call) {
        let mut bytes = Vec::new();
        call.write(&mut bytes, self.calls, None).unwrap();
        self.stream.write_all(&bytes).unwrap();
    }

    fn ask(&mut self, call: &Call) -> Answer {
        self.calls += 1;
        self.tell(call);
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
            // What it had still sent was thrown away with the connection.
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
    let name = "by hand".to_owned();
    let (version_min, version_max, access, token) = (1, 1, Access::Read, None);
    frame(&Call::Hello(Hello { version_min, version_max, access, session: None, token, name }))
}

pub(crate) fn lease(blocks: std::ops::Range<u64>) -> Vec<u8> {
    let purpose = LeasePurpose::Use;
    frame(&Call::Lease { timeout_ms: 1000, first_hold: 1, purpose, keys: keys(blocks) })
}

pub(crate) fn ping() -> Vec<u8> {
    frame(&Call::Ping)
}

/// Reads so many answers, whatever they say.
pub(crate) fn await_answers(stream: &mut UnixStream, count: usize) {
    for _ in 0..count {
        let mut bytes = vec![0; cascade_wire::HEADER_BYTES];
        stream.read_exact(&mut bytes).unwrap();
        let length = frame_length(&bytes).unwrap().unwrap();
        let mut rest = vec![0; length - bytes.len()];
        stream.read_exact(&mut rest).unwrap();
    }
}

/// Members of `admin_group` look after the node of another user; its KV is not theirs.
#[test]
fn an_administrator_gets_no_pool_and_no_say_over_blocks() {
    let host = Host::start(|_| ());
    let client = host.connect();
    put(&client, &keys(0..1), 64, NOW);
    let mut administrator = Liar::greet_as(&host, Access::Administer);
    let welcome = administrator.welcome.clone().unwrap();
    assert_eq!((welcome.pool_bytes, welcome.hold_bytes_max), (0, 0));
    let (timeout_ms, first_hold) = (100, 1);
    for call in [
        Call::Lease { timeout_ms, first_hold, purpose: LeasePurpose::Use, keys: keys(0..1) },
        Call::Ask { question: KeyQuestion::Contains, keys: keys(0..1) },
        Call::Ask { question: KeyQuestion::Delete, keys: keys(0..1) },
        Call::Prepare { timeout_ms, first_hold, blocks: vec![asked(1, 64)] },
        Call::Reserve { timeout_ms, hold: 2, bytes: 64 },
        Call::Clear,
        Call::Changes { since: None, most: 10 },
        Call::Manifests { timeout_ms },
        Call::Flush { timeout_ms },
    ] {
        let answer = administrator.ask(&call);
        assert!(
            matches!(answer, Answer::Failed(StoreError::Config { .. })),
            "{call:?}: {answer:?}"
        );
    }
    assert!(matches!(administrator.ask(&Call::Ping), Answer::Done));
    let topic = "version".to_owned();
    let asked = Call::Admin { timeout_ms, topic, arguments: "{}".to_owned() };
    assert!(matches!(administrator.ask(&asked), Answer::Text(_)));
    assert_eq!(hits(&keys(0..1), &client.view(&keys(0..1), NOW)), 1);
}

fn asked(n: u64, bytes: u32) -> AskedBlock {
    AskedBlock { key: key(n), parent: None, bytes, is_prefix: false, is_partial: false }
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

/// Others are served as if nothing had happened.
fn assert_serves(host: &Host) {
    let client = host.connect();
    let some = keys(500..510);
    put(&client, &some, 4096, NOW);
    assert_eq!(hits(&some, &client.view(&some, NOW)), 10);
}

#[test]
fn noise_costs_its_sender_the_connection() {
    let host = Host::start(|_| {});
    let mut ping = Vec::new();
    Call::Ping.write(&mut ping, 1, None).unwrap();
    let noise: [&[u8]; 5] = [b"GET / HTTP/1.1\r\n\r\n12345678", &[0; 64], &[0xFF; 64], &ping, {
        // A frame whose checksum is wrong.
        &[ping.as_slice(), &[1]].concat()
    }];
    for bytes in noise {
        let mut liar = Liar::connect(&host);
        liar.stream.write_all(bytes).unwrap();
        assert!(liar.is_closed(), "{bytes:02x?}");
    }
    let mut liar = Liar::greet(&host);
    liar.stream.write_all(&[7; 100]).unwrap();
    assert!(liar.is_closed());
    let mut long = Vec::new();
    Frame::write(&mut long, 1, 1, None, |body| body.resize(1 << 20, 0)).unwrap();
    let mut liar = Liar::connect(&host);
    // It is refused by its header, so the rest may not be taken.
    drop(liar.stream.write_all(&long));
    assert!(liar.is_closed(), "nobody says hello at such length");
    assert_serves(&host);
    host.assert_nothing_leaks();
}

#[test]
fn half_a_message_waits_and_costs_nobody_else() {
    let host = Host::start(|_| {});
    let mut all = Vec::new();
    for _ in 0..20 {
        let mut liar = Liar::greet(&host);
        let mut bytes = Vec::new();
        let call = Call::Ask { question: KeyQuestion::Contains, keys: keys(0..2000) };
        call.write(&mut bytes, 1, None).unwrap();
        liar.stream.write_all(&bytes[..bytes.len() / 2]).unwrap();
        all.push((liar, bytes));
    }
    assert_serves(&host);
    for (mut liar, bytes) in all {
        liar.stream.write_all(&bytes[bytes.len() / 2..]).unwrap();
        assert!(matches!(liar.answer(), Some(Answer::Flags(flags)) if flags.len() == 2000));
    }
    host.assert_nothing_leaks();
}

#[test]
fn what_is_not_held_is_neither_sealed_nor_given_back() {
    let host = Host::start(|_| {});
    let honest = host.connect();
    put(&honest, &keys(0..1), 4096, NOW);
    let mut liar = Liar::greet(&host);
    let timeout_ms = 1000;
    let is_refused =
        |answer: Answer| {
            let Answer::Puts(outcomes) = answer else { panic!("{answer:?}") };
            assert!(outcomes.iter().all(|o| matches!(
                o,
                PutOutcome::Failed(StoreError::Config { setting: "hold", .. })
            )));
        };
    is_refused(liar.ask(&Call::Seal { timeout_ms, blocks: vec![sealed(1, 77, 4096)] }));
    let answer =
        liar.ask(&Call::Prepare { timeout_ms, first_hold: 1, blocks: vec![asked(2, 100)] });
    assert!(
        matches!(&answer, Answer::Prepared(p) if matches!(p[..], [PreparedBlock::Slab { .. }]))
    );
    // More than the slab has.
    is_refused(liar.ask(&Call::Seal { timeout_ms, blocks: vec![sealed(2, 1, 101)] }));
    // A lease is no slab to write.
    let purpose = LeasePurpose::Use;
    let answer = liar.ask(&Call::Lease { timeout_ms, first_hold: 5, purpose, keys: keys(0..1) });
    assert!(matches!(&answer, Answer::Leases(l) if matches!(l[..], [Lease::Hit { .. }])));
    is_refused(liar.ask(&Call::Seal { timeout_ms, blocks: vec![sealed(3, 5, 4096)] }));
    // A number that is in use.
    let answer = liar.ask(&Call::Reserve { timeout_ms, hold: 5, bytes: 100 });
    assert!(matches!(answer, Answer::Failed(StoreError::Config { .. })), "{answer:?}");
    // Nothing that is so large.
    for bytes in [1 << 63, u64::MAX, 1 << 40] {
        let answer = liar.ask(&Call::Reserve { timeout_ms, hold: 9, bytes });
        assert!(matches!(answer, Answer::Failed(StoreError::Config { .. })), "{answer:?}");
    }
    let holds = vec![HoldRange { first: 0, count: 60_000 }; 20_000];
    liar.tell(&Call::Release { holds });
    assert!(matches!(liar.ask(&Call::Ping), Answer::Done));
    assert_eq!(hits(&keys(0..1), &honest.view(&keys(0..1), NOW)), 1);
    wait_until("nothing is held", || host.held_bytes() == 0);
    drop((liar, honest));
    host.assert_nothing_leaks();
}

/// Empty and tiny blocks counted with their length: 64 bytes of the pool each, held for nothing.
#[test]
fn a_client_holds_no_more_than_its_share() {
    let host = Host::start(|_| {});
    let mut liar = Liar::greet(&host);
    let share = liar.welcome.as_ref().unwrap().hold_bytes_max;
    assert_eq!(share, (16 << 20) / 100 * 50);
    let mut hold = 1;
    loop {
        let blocks: Vec<_> = (hold..hold + 2048).map(|n| asked(n, 1)).collect();
        let answer = liar.ask(&Call::Prepare { timeout_ms: 100, first_hold: hold, blocks });
        hold += 2048;
        let Answer::Prepared(prepared) = answer else { break };
        if !prepared.iter().any(|one| matches!(one, PreparedBlock::Slab { .. })) {
            break;
        }
    }
    let reserved = host.stats().pool.reserved_bytes as u64;
    assert!(reserved <= share + 2048 * 64, "{reserved} bytes are held; the share is {share}");
    // A process has its share once, so another one has to be served.
    put(&host.store(), &keys(0..16), 4096, NOW);
    let mut other = crate::child::Process::start("child::holder", &host.socket);
    other.await_ready();
    other.kill();
    let count = u32::try_from(hold).unwrap();
    liar.tell(&Call::Release { holds: vec![HoldRange { first: 0, count }] });
    drop(liar);
    host.assert_nothing_leaks();
}

/// A page of calls with long answers, sent at once, had the node make all of them before it
/// noticed that nobody reads.
#[test]
fn answers_that_nobody_reads_do_not_fill_the_memory() {
    let host = Host::start(|_| {});
    put(&host.store(), &keys(0..1), 100, NOW);
    let mut bytes = Vec::new();
    let call = Call::Ask { question: KeyQuestion::Locate, keys: vec![key(0); 60_000] };
    call.write(&mut bytes, 1, None).unwrap();
    let mut deaf: Vec<Liar> = (0..4).map(|_| Liar::greet(&host)).collect();
    for liar in &mut deaf {
        liar.stream.set_nonblocking(true).unwrap();
        let mut sent = 0;
        // 200 MiB of calls if the node took them all; 10 tries without a byte taken are enough.
        let mut refusals = 0;
        while sent < 200 << 20 && refusals < 10 {
            if let Ok(count) = liar.stream.write(&bytes[sent % bytes.len()..]) {
                sent += count;
            } else {
                refusals += 1;
                crate::host::pause(Duration::from_millis(20));
            }
        }
        assert!(sent < 200 << 20, "the node goes on answering somebody who reads nothing");
    }
    assert_serves(&host);
    drop(deaf);
    host.assert_nothing_leaks();
}

/// What was held back until the client reads is answered then, to the last call.
#[test]
fn answers_come_in_their_order_however_late_they_are_read() {
    let host = Host::start(|_| {});
    let mut slow = Liar::greet(&host);
    let mut bytes = Vec::new();
    for number in 0..400 {
        let call = Call::Ask { question: KeyQuestion::Contains, keys: vec![key(0); 8000] };
        call.write(&mut bytes, number, None).unwrap();
    }
    let mut writer = slow.stream.try_clone().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || writer.write_all(&bytes).unwrap());
        crate::host::pause(Duration::from_millis(50));
        for number in 0..400 {
            let answer = slow.answer();
            assert!(matches!(&answer, Some(Answer::Flags(f)) if f.len() == 8000), "{number}");
        }
    });
}

#[test]
fn one_process_takes_at_most_half_of_the_connections() {
    let host = Host::start(|config| config.limits.connections_max = 64);
    let witness = host.connect();
    put(&witness, &keys(0..4), 4096, NOW);
    let streams: Vec<_> =
        (0..1000).filter_map(|_| UnixStream::connect(&host.socket).ok()).collect();
    assert_eq!(hits(&keys(0..4), &witness.view(&keys(0..4), NOW)), 4);
    // Another process still gets in.
    put(&witness, &keys(0..16), 4096, NOW);
    let mut other = crate::child::Process::start("child::holder", &host.socket);
    other.await_ready();
    drop((other, streams, witness));
    host.assert_nothing_leaks();
}

/// They kept everybody else out for ten seconds, longer than a client waits.
#[test]
fn strangers_that_say_nothing_keep_nobody_out() {
    let host = Host::start(|config| config.limits.connections_max = 1024);
    let silent: Vec<_> = (0..200).map(|_| UnixStream::connect(&host.socket).unwrap()).collect();
    let client = host.connect();
    put(&client, &keys(0..4), 4096, NOW);
    drop((silent, client));
    host.assert_nothing_leaks();
}

/// The node looked a dead process's session up by its first connection. Where that had been closed
/// before, the session lived on in the sockets that a child had inherited.
#[test]
fn a_child_that_inherited_the_socket_does_not_stand_for_its_parent() {
    let host = Host::start(|_| {});
    put(&host.store(), &keys(0..4), 4096, NOW);
    // The shell connects nothing itself: this process says hello, the session is its own, and the
    // child has the socket as its standard input.
    let mut parent = crate::child::Process::start("lies::heir", &host.socket);
    parent.await_ready();
    assert_eq!(host.node.clients()[0].leases, 4);
    parent.kill();
    wait_until("the session ends with its process", || host.node.clients().is_empty());
    host.assert_nothing_leaks();
}

/// The child of the test above: leases blocks, closes its first connection, and leaves the second
/// to a process that outlives it.
#[test]
#[ignore = "runs as a child"]
fn heir() {
    let Some(socket) = crate::child::variable(crate::child::SOCKET) else { return };
    let connect = || {
        let stream = UnixStream::connect(&socket).unwrap();
        Liar { stream, welcome: None, calls: 0 }
    };
    let hello = |session| {
        let name = "parent".to_owned();
        let (version_min, version_max, access, token) = (1, 1, Access::Read, None);
        Call::Hello(Hello { version_min, version_max, access, session, token, name })
    };
    let mut first = connect();
    let Answer::Welcome(welcome) = first.ask(&hello(None)) else { panic!("no welcome") };
    let mut second = connect();
    assert!(matches!(second.ask(&hello(Some(welcome.session))), Answer::Welcome(_)));
    let purpose = LeasePurpose::Use;
    let lease = Call::Lease { timeout_ms: 1000, first_hold: 1, purpose, keys: keys(0..4) };
    assert!(matches!(second.ask(&lease), Answer::Leases(_)));
    assert!(matches!(second.ask(&Call::Ping), Answer::Done));
    drop(first);
    let socket: std::os::fd::OwnedFd = second.stream.try_clone().unwrap().into();
    let mut sleeper = Command::new("sleep")
        .arg("20")
        .stdin(Stdio::from(socket))
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    crate::child::say_ready();
    sleeper.wait().unwrap();
}

/// A second connection of a session, and blocks that were leased through it.
fn lease_on_second(host: &Host, first: &Liar) -> Liar {
    let mut second = Liar::connect(host);
    let session = first.welcome.as_ref().map(|welcome| welcome.session);
    let (version_min, version_max, access, token) = (1, 1, Access::Write, None);
    let name = "liar".to_owned();
    let hello = Hello { version_min, version_max, access, session, token, name };
    assert!(matches!(second.ask(&Call::Hello(hello)), Answer::Welcome(_)));
    let purpose = LeasePurpose::Use;
    let lease = Call::Lease { timeout_ms: 1000, first_hold: 1, purpose, keys: keys(0..4) };
    assert!(matches!(second.ask(&lease), Answer::Leases(_)));
    second
}

/// A client whose next call was cut by its deadline had read the answer before: the node took back
/// what that had granted, under the views.
#[test]
fn what_was_answered_before_a_cut_call_stays_granted() {
    let host = Host::start(|_| {});
    put(&host.store(), &keys(0..4), 4096, NOW);
    let mut first = Liar::greet(&host);
    let mut second = lease_on_second(&host, &first);
    let mut ping = Vec::new();
    Call::Ping.write(&mut ping, 2, None).unwrap();
    second.stream.write_all(&ping[..ping.len() / 2]).unwrap();
    drop(second);
    wait_until("the second connection closes", || host.node.clients()[0].connections == 1);
    assert!(matches!(first.ask(&Call::Ping), Answer::Done));
    assert_eq!(host.node.clients()[0].leases, 4);
    // Nothing followed this answer: nobody has seen it.
    let release = Call::Release { holds: vec![HoldRange { first: 1, count: 4 }] };
    first.tell(&release);
    assert!(matches!(first.ask(&Call::Ping), Answer::Done));
    drop(lease_on_second(&host, &first));
    wait_until("the second connection closes", || host.node.clients()[0].connections == 1);
    assert_eq!(host.node.clients()[0].leases, 0);
    drop(first);
    host.assert_nothing_leaks();
}

/// The session ended with its last connection, whatever closed that, and what its living process
/// held was given to others under its views.
#[test]
fn what_a_living_process_holds_outlives_its_connections() {
    let host = Host::start(|_| {});
    put(&host.store(), &keys(0..4), 4096, NOW);
    let first = Liar::greet(&host);
    let mut second = lease_on_second(&host, &first);
    assert!(matches!(second.ask(&Call::Ping), Answer::Done));
    let welcome = first.welcome.clone();
    drop((first, second));
    wait_until("both connections close", || host.node.clients()[0].connections == 0);
    assert_eq!(host.node.clients()[0].leases, 4);
    let mut again = Liar::connect(&host);
    let session = welcome.map(|welcome| welcome.session);
    let (version_min, version_max, access, token) = (1, 1, Access::Write, None);
    let name = "liar".to_owned();
    let hello = Hello { version_min, version_max, access, session, token, name };
    assert!(matches!(again.ask(&Call::Hello(hello)), Answer::Welcome(_)));
    again.tell(&Call::Release { holds: vec![HoldRange { first: 1, count: 4 }] });
    drop(again);
    host.assert_nothing_leaks();
}
