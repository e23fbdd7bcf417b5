//! Tests of the server without its threads: each step of a connection is made by the test.

use std::fs;
use std::io::Write;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use cascade_block::{BlockKey, Manifest, NamespaceId};
use cascade_store::{CallOptions, Put, PutOutcome, StoreError};
use cascade_wire::{Access, Answer, Call, Hello, KeyQuestion, SealedBlock, SessionId};
use rustix::event::epoll::EventFlags;

use super::connection::{Connection, NextStep, ThreadBuffers};
use super::dispatch::Dispatch;
use super::holds::HeldMemory;
use super::peer::Peer;
use super::session::ClientSession;
use super::wait_permits::WaitPermits;
use super::{Server, Shared, lock};
use crate::tenants::{DEFAULT_TENANT, pool_file};
use crate::{Node, NodeConfig};

const BLOCK_BYTES: usize = 4096;
const NOW: CallOptions = CallOptions { timeout: None, writer: None };

/// A server with a pool file, whose connections are served by the test.
struct TestServer {
    shared: Arc<Shared>,
    ledger: PathBuf,
    _directory: tempfile::TempDir,
}

/// A connection with an accepted hello.
struct TestConnection {
    connection: Arc<Connection>,
    session: Arc<ClientSession>,
    _client: UnixStream,
}

impl TestServer {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("cascade.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let mut config = NodeConfig::new(&socket);
        config.store.dram_bytes = 4 << 20;
        config.store.huge_pages = false;
        config.pool_directory = Some(directory.path().to_owned());
        let mut ledger = pool_file(&config, DEFAULT_TENANT).unwrap().into_os_string();
        ledger.push(".ledger");
        let node = Node::open(config).unwrap();
        let shared = Server::create_shared(node, listener).unwrap();
        Self { shared, ledger: ledger.into(), _directory: directory }
    }

    /// A connection that opens a session, or joins one.
    fn connect(&self, session: Option<SessionId>) -> TestConnection {
        let (stream, mut client) = UnixStream::pair().unwrap();
        let peer = Peer::of(&stream).unwrap();
        let id = self.shared.next_connection.fetch_add(2, Ordering::Relaxed);
        let connection = Connection::new(id, stream, peer, &self.shared.buffered).unwrap();
        let connection = Arc::new(connection);
        assert!(lock(&self.shared.connections).add(&connection, true).is_none());
        let hello = Hello {
            version_min: 1,
            version_max: 1,
            access: Access::Write,
            session,
            token: None,
            name: "test".to_owned(),
        };
        let mut message = Vec::new();
        Call::Hello(hello).write(&mut message, 1, None).unwrap();
        client.write_all(&message).unwrap();
        let next = connection.serve(&self.shared, EventFlags::IN, &mut ThreadBuffers::new());
        assert_eq!(next, NextStep::Read);
        let session = connection.session().expect("the hello is accepted");
        TestConnection { connection, session, _client: client }
    }

    fn dispatch<'a>(&'a self, session: &'a ClientSession) -> Dispatch<'a> {
        Dispatch { node: &self.shared.node, session, wait_permits: &self.shared.wait_permits }
    }
}

/// The number of pieces that the ledger of a pool records as held, by the layout in
/// `docs/warm-restart.md`.
fn recorded_pieces(ledger: &PathBuf) -> usize {
    let bytes = fs::read(ledger).unwrap();
    let word = |at: usize| u64::from_le_bytes(bytes[8 * at..8 * at + 8].try_into().unwrap());
    let count = |at| usize::try_from(word(at)).unwrap();
    let (blocks, held) = (count(3), count(4));
    (0..held).filter(|place| word(512 + 24 * blocks + 8 * place) != 0).count()
}

/// Counts the recorded pieces when its slab is freed or published.
struct RecordProbe {
    ledger: PathBuf,
    recorded: Arc<AtomicUsize>,
}

impl Drop for RecordProbe {
    fn drop(&mut self) {
        self.recorded.store(recorded_pieces(&self.ledger), Ordering::Release);
    }
}

/// A seal that was refused returned its slab to the pool while the ledger still recorded it. After
/// a crash in between, the next run took that record for memory in use: it dropped the block that
/// was stored there meanwhile, and did not use the memory until the client ended.
#[test]
fn no_ledger_record_outlives_its_slab() {
    let server = TestServer::new();
    let client = server.connect(None);
    let store = client.session.tenant.store();
    let key = |number: u8| BlockKey::from_bytes([number; 32]);
    store.put(&[Put::new(key(1), &[1; BLOCK_BYTES])], NOW);
    let too_long = u32::try_from(BLOCK_BYTES + 1).unwrap();
    let whole = u32::try_from(BLOCK_BYTES).unwrap();
    for (hold, number, bytes) in [(1, 1, whole), (2, 2, too_long), (3, 3, whole)] {
        let recorded = Arc::new(AtomicUsize::new(usize::MAX));
        let mut slab = store.reserve(BLOCK_BYTES, NOW).unwrap();
        slab.fill_from(&[number; BLOCK_BYTES]).unwrap();
        let probe = RecordProbe { ledger: server.ledger.clone(), recorded: Arc::clone(&recorded) };
        slab.attach_guard(Box::new(probe));
        let grants = client.session.begin_grants(hold, 1).unwrap();
        assert!(grants.grant(vec![(0, HeldMemory::Slab(slab))]).is_empty());
        drop(grants);
        assert_eq!(recorded_pieces(&server.ledger), 1);
        let block = SealedBlock {
            hold,
            bytes,
            key: key(number),
            namespace: NamespaceId::default(),
            is_prefix: false,
            is_partial: false,
            ttl_ms: None,
            parent: None,
        };
        let call = Call::Seal { timeout_ms: 1000, blocks: vec![block] };
        let Some(Answer::Puts(outcomes)) = server.dispatch(&client.session).answer(call) else {
            panic!("a seal has outcomes");
        };
        let is_expected = match number {
            1 => matches!(outcomes[..], [PutOutcome::Present]),
            2 => matches!(outcomes[..], [PutOutcome::Failed(_)]),
            _ => matches!(outcomes[..], [PutOutcome::Stored]),
        };
        assert!(is_expected, "{number}: {outcomes:?}");
        assert_eq!(recorded.load(Ordering::Acquire), 0, "{outcomes:?}");
    }
}

/// The accept loop closed a connection whose hello took too long, while another thread accepted
/// that hello. Both counted the connection down, so the session ended with another connection open,
/// and its leases were released while the client read them.
#[test]
fn a_connection_that_is_closed_during_its_hello_leaves_its_session_once() {
    let server = TestServer::new();
    let first = server.connect(None);
    let second = server.connect(Some(first.session.id));
    // The accept loop, then the thread that finds the connection closed after the hello.
    server.shared.close_connection(&second.connection);
    server.shared.leave_session(&second.connection);
    assert_eq!(server.shared.node.clients().len(), 1, "its first connection is open");
    server.shared.close_connection(&first.connection);
    assert_eq!(server.shared.node.clients().len(), 0);
}

/// A registration that got no permit to wait used up one of the client's namespaces, although
/// nothing was registered. A client that tried again reached the limit.
#[test]
fn a_registration_without_a_permit_uses_up_no_namespace() {
    let server = TestServer::new();
    let client = server.connect(None);
    let register = |wait_permits: &WaitPermits| {
        let dispatch =
            Dispatch { node: &server.shared.node, session: &client.session, wait_permits };
        let manifest = Manifest::new().with("weights", "w");
        let root = BlockKey::from_bytes([7; 32]);
        dispatch.answer(Call::Register { timeout_ms: 1000, root, manifest })
    };
    let no_permits = WaitPermits::new(0);
    for _ in 0..=super::accounts::NAMESPACES_MAX {
        let answer = register(&no_permits);
        assert!(
            matches!(answer, Some(Answer::Failed(StoreError::Limit { most: 0, .. }))),
            "{answer:?}"
        );
    }
    let answer = register(&server.shared.wait_permits);
    assert!(matches!(answer, Some(Answer::Done)), "{answer:?}");
}

#[test]
fn the_pins_of_deleted_blocks_no_longer_count() {
    let server = TestServer::new();
    let client = server.connect(None);
    let key = |number: u8| BlockKey::from_bytes([number; 32]);
    let keys: Vec<BlockKey> = (0..20).map(key).collect();
    let puts: Vec<_> = keys.iter().map(|key| Put::new(*key, &[0; BLOCK_BYTES])).collect();
    client.session.tenant.store().put(&puts, NOW);
    let available = client.session.available_bytes();
    let pinned_blocks = || (available - client.session.available_bytes()) / BLOCK_BYTES as u64;
    assert_eq!(client.session.pin(&keys[..5]), [true; 5]);
    assert_eq!(pinned_blocks(), 5);
    let delete = |keys: &[BlockKey]| {
        let question = KeyQuestion::Delete;
        let call = Call::Ask { question, keys: keys.to_vec() };
        let answer = server.dispatch(&client.session).answer(call);
        assert!(matches!(answer, Some(Answer::Flags(_))), "{answer:?}");
    };
    // Fewer keys than pins, then more.
    delete(&keys[..2]);
    assert_eq!(pinned_blocks(), 3);
    delete(&keys[3..]);
    assert_eq!(pinned_blocks(), 1);
    assert_eq!(client.session.unpin(&keys[1..4]), [false, true, false]);
    assert_eq!(pinned_blocks(), 0);
}
