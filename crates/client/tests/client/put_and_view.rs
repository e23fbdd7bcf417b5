//! A client and a node in one process: put, view and release.

use std::os::unix::net::UnixListener;

use cascade_block::BlockKey;
use cascade_client::{Client, ConnectOptions};
use cascade_node::{Node, NodeConfig, Server};
use cascade_tier::{BlockStore, CallOptions, Put, PutOutcome, ViewOutcome};

use crate::test_node::{TestNode, hits, keys, put, wait_until};

const NOW: CallOptions = CallOptions { timeout: None, writer: None };

#[test]
fn a_block_that_one_client_puts_is_read_by_another() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let socket = directory.path().join("cascade.sock");
    let listener = UnixListener::bind(&socket).expect("the directory is empty");
    let mut config = NodeConfig::new(&socket);
    config.store.dram_bytes = 32 << 20;
    let node = Node::open(config).expect("32 MiB are there");
    let server = Server::start(node.clone(), listener).expect("it can serve");
    let writer = Client::connect(ConnectOptions::new(&socket)).expect("the node serves");
    let reader = Client::connect(ConnectOptions::new(&socket)).expect("the node serves");
    let keys: Vec<BlockKey> = (0..100).map(|fill| BlockKey::from_bytes([fill; 32])).collect();
    let blocks: Vec<Vec<u8>> = (0..100).map(|fill| vec![fill; 5000]).collect();
    let puts: Vec<Put<'_>> =
        keys.iter().zip(&blocks).map(|(key, bytes)| Put::new(*key, bytes)).collect();
    let outcomes = writer.put(&puts, NOW);
    assert!(outcomes.iter().all(|outcome| matches!(outcome, PutOutcome::Stored)), "{outcomes:?}");
    let outcomes = writer.put(&puts[..2], NOW);
    assert!(outcomes.iter().all(|outcome| matches!(outcome, PutOutcome::Present)), "{outcomes:?}");
    let views = reader.view(&keys, NOW);
    for (view, bytes) in views.iter().zip(&blocks) {
        assert!(
            matches!(view, ViewOutcome::Hit { slab, .. } if slab.host() == Some(&bytes[..])),
            "{view:?}"
        );
    }
    assert!(
        node.clients().iter().any(|client| client.leases == 100),
        "the reader holds the leases"
    );
    drop(views);
    drop((writer, reader));
    wait_until("the node has noticed that its clients are gone", || node.clients().is_empty());
    drop(server);
}

/// The first blocks are sealed while the last ones are copied.
#[test]
fn all_blocks_of_a_long_put_are_stored() {
    const BLOCKS: u64 = 256;
    const BYTES: usize = 16 << 10;
    let node = TestNode::start(|config| config.store.dram_bytes = 32 << 20);
    let client = node.connect();
    let all = keys(0..BLOCKS);
    // Some are present already, and some of these have other bytes.
    let (some, few) = (keys(100..110), keys(200..203));
    assert_eq!(put(&client, &some, BYTES, NOW).len(), 10);
    let other = vec![1; BYTES];
    let conflicts: Vec<Put<'_>> = few.iter().map(|key| Put::new(*key, &other)).collect();
    assert_eq!(client.put(&conflicts, NOW).len(), 3);
    let outcomes = put(&client, &all, BYTES, NOW);
    for (key, outcome) in all.iter().zip(&outcomes) {
        let is_expected = match outcome {
            PutOutcome::Stored => !some.contains(key) && !few.contains(key),
            PutOutcome::Present => some.contains(key),
            PutOutcome::Conflict => few.contains(key),
            _ => false,
        };
        assert!(is_expected, "{key}: {outcome:?}");
    }
    let rest: Vec<BlockKey> = all.into_iter().filter(|key| !few.contains(key)).collect();
    let views = client.view(&rest, NOW);
    assert_eq!(hits(&rest, &views), rest.len());
    drop((views, client));
    node.assert_nothing_leaks();
}
