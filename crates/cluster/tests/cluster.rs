//! Nodes in one process, over real sockets: the conformance suite of sources, and what happens when
//! nodes come, go, freeze and lie.
#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cascade_block::{BlockKey, checksum};
use cascade_cluster::{
    Cluster, ClusterConfig, ClusterError, Contents, Host, LocalBlocks, NodeState,
};
use cascade_memory::Slab;
use cascade_runtime::{Cancel, Deadline, SystemClock, sleep};
use cascade_store::{
    CallOptions, GetOutcome, Put, PutOutcome, Request, SourceList, Store, StoreConfig,
};
use cascade_tier::conformance::source::{SourceSubject, all};
use cascade_tier::conformance::tier::pool;
use cascade_tier::source::SourceLimit;

const TOKEN: &[u8] = b"a token of at least 16 bytes";

/// The blocks of a store, which can be made to wait.
struct Blocks {
    store: Store,
    waits: Arc<Mutex<()>>,
    are_damaged: AtomicBool,
}

impl Blocks {
    fn of(store: &Store) -> Arc<Self> {
        let (waits, are_damaged) = Default::default();
        Arc::new(Self { store: store.clone(), waits, are_damaged })
    }
}

impl LocalBlocks for Blocks {
    fn view(&self, keys: &[BlockKey], timeout: Duration) -> Vec<Option<Slab>> {
        drop(self.waits.lock().unwrap());
        let options = CallOptions { timeout: Some(timeout), ..CallOptions::default() };
        let views = self.store.own().in_memory(keys, options);
        if self.are_damaged.load(Ordering::Relaxed) {
            // As after a flipped bit: the recorded checksum is not that of the bytes.
            views.iter().flatten().for_each(|slab| {
                slab.verify_checksum(checksum(slab.host().unwrap()) ^ 1);
            });
        }
        views
    }

    fn contents(&self) -> Contents {
        drop(self.waits.lock().unwrap());
        let stats = self.store.stats();
        Contents { epoch: 7, blocks: stats.dram_blocks, bytes: stats.dram_bytes }
    }
}

fn key(number: u8) -> BlockKey {
    BlockKey::from_bytes([number; 32])
}

fn store(sources: SourceList) -> Store {
    let config = StoreConfig { dram_bytes: 64 << 20, sources, ..StoreConfig::default() };
    Store::open(config).unwrap()
}

fn put(store: &Store, key: BlockKey, bytes: &[u8]) {
    let outcomes = store.put(&[Put::new(key, bytes)], CallOptions::default());
    assert!(matches!(outcomes[0], PutOutcome::Stored), "{outcomes:?}");
}

/// An address of loopback that no other test has: also not by a connection that takes any port.
fn free_address() -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let [low, high, ..] = std::process::id().to_le_bytes();
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    format!("127.{}.{high}.{low}:{}", 1 + count / 8000, 20_000 + count % 8000)
}

fn hosts(count: usize) -> Vec<Host> {
    let host = |at| Host { name: format!("node{at}"), address: free_address() };
    (0..count).map(host).collect()
}

fn config(hosts: &[Host], at: usize) -> ClusterConfig {
    ClusterConfig {
        name: hosts[at].name.clone(),
        hosts: hosts.to_vec(),
        listen: hosts[at].address.parse().unwrap(),
        token: Some(TOKEN.to_vec()),
        tls: None,
    }
}

fn cluster(hosts: &[Host], at: usize) -> Cluster {
    Cluster::start(config(hosts, at)).unwrap()
}

/// A node with a store of its own that answers the others.
fn node(hosts: &[Host], at: usize) -> (Cluster, Store, Arc<Blocks>) {
    let cluster = cluster(hosts, at);
    let store = store(SourceList::new(vec![cluster.source()]));
    let blocks = Blocks::of(&store);
    cluster.serve(Arc::<Blocks>::clone(&blocks)).unwrap();
    (cluster, store, blocks)
}

fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let until = Deadline::after(&SystemClock, Duration::from_secs(60));
    while !is_so() {
        assert!(!until.has_passed(&SystemClock), "not within 60 s: {what}");
        sleep(Duration::from_millis(5));
    }
}

fn wait_for(cluster: &Cluster, node: usize, state: NodeState) {
    wait_until(state.name(), || cluster.nodes()[node].state == state);
}

fn get(store: &Store, key: BlockKey, bytes: usize) -> (GetOutcome, Vec<u8>) {
    let mut buffer = vec![0; bytes];
    let mut outcomes = store.get(&[key], &mut [&mut buffer], CallOptions::default());
    (outcomes.remove(0), buffer)
}

#[test]
fn it_conforms() {
    let mut kept = Vec::new();
    all(&pool(), &mut || {
        let hosts = hosts(2);
        let (owner, owned, blocks) = node(&hosts, 0);
        let asking = cluster(&hosts, 1);
        wait_for(&asking, 0, NodeState::Up);
        let source = asking.source();
        let [putting, removing] = [owned.clone(), owned];
        let waits = Arc::clone(&blocks.waits);
        kept.push((owner, asking));
        SourceSubject {
            source,
            put: Box::new(move |key, bytes| put(&putting, *key, bytes)),
            remove: Box::new(move |key| drop(removing.delete(&[*key]))),
            stall: Some(Box::new(move || {
                let (waits, (ends, ended)) = (Arc::clone(&waits), std::sync::mpsc::channel::<()>());
                let (begin, begun) = std::sync::mpsc::channel();
                std::thread::spawn(move || {
                    let _held = waits.lock().unwrap();
                    begin.send(()).unwrap();
                    ended.recv().unwrap_err();
                });
                begun.recv().unwrap();
                Box::new(ends)
            })),
        }
    });
}

#[test]
fn a_prefix_of_any_node_is_a_hit_on_every_node() {
    let hosts = hosts(3);
    let nodes: Vec<_> = (0..3).map(|at| node(&hosts, at)).collect();
    for (cluster, ..) in &nodes {
        wait_for(cluster, 0, NodeState::Up);
        wait_for(cluster, 1, NodeState::Up);
    }
    let keys: Vec<BlockKey> = (1..9).map(key).collect();
    for (at, key) in keys.iter().enumerate() {
        // The chain is spread over two nodes.
        put(&nodes[at / 6].1, *key, &vec![u8::try_from(at).unwrap(); 100_000]);
    }
    let third = &nodes[2].1;
    let matched = third.lookup_prefix(&Request::new(&keys));
    assert_eq!(matched.tiers, ["peers"; 8]);
    for (at, key) in keys.iter().enumerate() {
        let (outcome, bytes) = get(third, *key, 100_000);
        assert!(matches!(outcome, GetOutcome::Hit { tier: "peers", .. }), "{outcome:?}");
        assert!(bytes.iter().all(|byte| usize::from(*byte) == at));
    }
    // From then on it has them itself.
    assert_eq!(third.lookup_prefix(&Request::new(&keys)).tiers, ["dram"; 8]);
    let from: Vec<u64> = nodes[2].0.nodes().iter().map(|node| node.fetched_blocks).collect();
    assert_eq!(from, [6, 2]);
}

#[test]
fn a_node_that_ends_costs_its_blocks_and_nothing_else_and_comes_back() {
    let hosts = hosts(2);
    let (owner, owned, _) = node(&hosts, 0);
    let (asking, mine, _) = node(&hosts, 1);
    wait_for(&asking, 0, NodeState::Up);
    put(&owned, key(1), &[1; 5000]);
    put(&mine, key(2), &[2; 5000]);
    drop((owner, owned));
    wait_for(&asking, 0, NodeState::Away);
    assert!(matches!(get(&mine, key(1), 5000).0, GetOutcome::Miss));
    assert_eq!(get(&mine, key(2), 5000).1, [2; 5000]);
    assert!(asking.nodes()[0].error.is_some(), "it says why");
    let (_again, owned, _) = node(&hosts, 0);
    wait_for(&asking, 0, NodeState::Up);
    put(&owned, key(1), &[3; 5000]);
    assert_eq!(get(&mine, key(1), 5000).1, [3; 5000]);
}

/// The first caller waits for it; the next ones do not.
#[test]
fn a_frozen_node_is_asked_nothing_until_it_answers() {
    let hosts = hosts(2);
    let (_owner, owned, blocks) = node(&hosts, 0);
    let (asking, mine, _) = node(&hosts, 1);
    wait_for(&asking, 0, NodeState::Up);
    put(&owned, key(1), &[1; 5000]);
    let held = blocks.waits.lock().unwrap();
    wait_until("suspect", || {
        // A lookup or a ping finds it.
        assert!(matches!(get(&mine, key(1), 5000).0, GetOutcome::Miss));
        asking.nodes()[0].state == NodeState::Suspect
    });
    let source = asking.source();
    let (cancel, deadline) =
        (Cancel::new(), Deadline::after(&SystemClock, Duration::from_secs(60)));
    // It would wait for a minute if it asked.
    let located = source.locate(&[key(1)], &SourceLimit { deadline, cancel: &cancel }).unwrap();
    assert_eq!(located, [None]);
    drop(held);
    wait_for(&asking, 0, NodeState::Up);
    assert_eq!(get(&mine, key(1), 5000).1, [1; 5000]);
}

/// Otherwise one caller in a hurry would take a node from all others.
#[test]
fn a_caller_with_little_time_makes_no_node_suspect() {
    let hosts = hosts(2);
    let (_owner, owned, blocks) = node(&hosts, 0);
    let (asking, mine, _) = node(&hosts, 1);
    wait_for(&asking, 0, NodeState::Up);
    put(&owned, key(1), &[1; 5000]);
    let source = asking.source();
    let held = blocks.waits.lock().unwrap();
    for _ in 0..3 {
        let deadline = Deadline::after(&SystemClock, Duration::from_millis(4));
        let cancel = Cancel::new();
        let located = source.locate(&[key(1)], &SourceLimit { deadline, cancel: &cancel });
        // A suspect node would not be asked.
        assert!(located.is_err(), "it does not answer: {located:?}, {:?}", asking.nodes()[0]);
    }
    drop(held);
    assert_eq!(get(&mine, key(1), 5000).1, [1; 5000]);
}

#[test]
fn damaged_bytes_of_another_node_are_no_hit() {
    let hosts = hosts(2);
    let (_owner, owned, blocks) = node(&hosts, 0);
    let (asking, mine, _) = node(&hosts, 1);
    wait_for(&asking, 0, NodeState::Up);
    put(&owned, key(1), &[1; 5000]);
    blocks.are_damaged.store(true, Ordering::Relaxed);
    let (outcome, _) = get(&mine, key(1), 5000);
    assert!(matches!(outcome, GetOutcome::Miss), "{outcome:?}");
    assert_eq!(mine.stats().sources[0].1.damaged_blocks, 1);
}

#[test]
fn a_node_with_another_token_is_away_and_says_so() {
    let hosts = hosts(2);
    let _owner = node(&hosts, 0);
    let other =
        ClusterConfig { token: Some(b"another token, as long".to_vec()), ..config(&hosts, 1) };
    let asking = Cluster::start(other).unwrap();
    let error = || asking.nodes()[0].error.clone();
    wait_until("an error", || error().is_some());
    assert!(error().unwrap().contains("the token is wrong"), "{:?}", error());
    assert_eq!(asking.nodes()[0].state, NodeState::Away);
}

#[test]
fn what_cannot_work_is_refused_at_the_start() {
    let hosts = hosts(2);
    let unknown = ClusterConfig { name: "node9".to_owned(), ..config(&hosts, 1) };
    let error = Cluster::start(unknown).unwrap_err();
    assert!(matches!(&error, ClusterError::NotListed { name } if name == "node9"), "{error}");
    let open =
        ClusterConfig { token: None, listen: "0.0.0.0:0".parse().unwrap(), ..config(&hosts, 0) };
    let cluster = Cluster::start(open).unwrap();
    let refused = cluster.serve(Blocks::of(&store(SourceList::default()))).unwrap_err();
    assert!(refused.to_string().contains("configure a token or client certificates"), "{refused}");
}
