//! A node in the test's process, and blocks whose bytes are a function of the key.

use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::time::Duration;

use cascade_block::BlockKey;
use cascade_client::{Client, ConnectOptions};
use cascade_node::{Node, NodeConfig, Server};
use cascade_runtime::{Clock, Deadline, SystemClock};
use cascade_store::Store;
pub(crate) use cascade_tier::conformance::block_store::{bytes_of, key, keys};
use cascade_tier::{BlockStore, CallOptions, Put, PutOutcome, StoreStats, ViewOutcome};

pub(crate) const NOW: CallOptions = CallOptions { timeout: None, writer: None };
/// How long a test waits for a condition.
const WAIT_TIMEOUT: Duration = Duration::from_secs(30);

/// A node that serves until it is dropped.
pub(crate) struct TestNode {
    pub(crate) node: Node,
    pub(crate) socket: PathBuf,
    server: Option<Server>,
    _directory: tempfile::TempDir,
}

impl TestNode {
    pub(crate) fn start(configure: impl FnOnce(&mut NodeConfig)) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("cascade.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let mut config = NodeConfig::new(&socket);
        config.store.dram_bytes = 16 << 20;
        config.store.huge_pages = false;
        configure(&mut config);
        let node = Node::open(config).unwrap();
        let server = Some(Server::start(node.clone(), listener).unwrap());
        Self { node, socket, server, _directory: directory }
    }

    /// Stops serving; the stores stay open.
    pub(crate) fn stop(&mut self) {
        drop(self.server.take());
    }

    pub(crate) fn connect(&self) -> Client {
        Client::connect(ConnectOptions::new(&self.socket)).unwrap()
    }

    pub(crate) fn store(&self) -> Store {
        self.node.tenants().all()[0].store().clone()
    }

    pub(crate) fn stats(&self) -> StoreStats {
        self.store().stats()
    }

    /// Waits until every session has ended, then clears the store: the whole pool has to be free.
    pub(crate) fn assert_nothing_leaks(&self) {
        wait_until("the sessions end", || self.node.clients().is_empty());
        self.store().clear();
        // A call of a client that died may still be in flight; it ends by its deadline.
        wait_until("the slabs are freed", || self.stats().pool.reserved_bytes == 0);
        let pool = self.stats().pool;
        assert_eq!((pool.reserved_bytes, pool.requested_bytes), (0, 0));
        assert_eq!(pool.magazine_bytes + pool.free_bytes, pool.capacity_bytes);
    }

    pub(crate) fn held_bytes(&self) -> u64 {
        self.node.clients().iter().map(|client| client.leased_bytes + client.reserved_bytes).sum()
    }
}

impl Drop for TestNode {
    fn drop(&mut self) {
        drop(self.server.take());
    }
}

#[expect(clippy::disallowed_methods, reason = "other processes and threads need real time")]
pub(crate) fn pause(time: Duration) {
    std::thread::sleep(time);
}

/// Waits until a condition holds.
pub(crate) fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let deadline = Deadline::after(&SystemClock, WAIT_TIMEOUT);
    while !condition() {
        assert!(!deadline.remaining(&SystemClock).is_zero(), "timed out waiting until {what}");
        pause(Duration::from_millis(1));
    }
}

/// Runs a call and measures its time.
pub(crate) fn timed<T>(call: impl FnOnce() -> T) -> (T, Duration) {
    let start = SystemClock.monotonic();
    let result = call();
    (result, SystemClock.monotonic().saturating_sub(start))
}

pub(crate) fn within(milliseconds: u64) -> CallOptions {
    CallOptions { timeout: Some(Duration::from_millis(milliseconds)), writer: None }
}

pub(crate) fn put(
    store: &dyn BlockStore,
    keys: &[BlockKey],
    length: usize,
    options: CallOptions,
) -> Vec<PutOutcome> {
    let bytes: Vec<_> = keys.iter().map(|key| bytes_of(key, length)).collect();
    let batch: Vec<_> = keys.iter().zip(&bytes).map(|(key, bytes)| Put::new(*key, bytes)).collect();
    store.put(&batch, options)
}

/// Counts the hits and checks that each has the bytes of its key.
pub(crate) fn hits(keys: &[BlockKey], views: &[ViewOutcome]) -> usize {
    let is_hit = |(key, view): &(&BlockKey, &ViewOutcome)| {
        let ViewOutcome::Hit { slab, .. } = view else { return false };
        assert!(slab.host() == Some(&bytes_of(key, slab.len())), "wrong bytes for {key}");
        true
    };
    keys.iter().zip(views).filter(is_hit).count()
}
