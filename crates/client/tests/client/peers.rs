//! Nodes that read from each other: a source over the client of another node.

use std::sync::Arc;

use cascade_block::BlockKey;
use cascade_client::Client;
use cascade_store::{SourceList, StoreConfig};
use cascade_tier::conformance::block_store::bytes_of;
use cascade_tier::conformance::source::{SourceSubject, all};
use cascade_tier::conformance::tier::pool;
use cascade_tier::source::{Source, StoreSource};
use cascade_tier::{BlockStore, CallOptions, Put, PutOutcome, Request, ViewOutcome};

use crate::test_node::{TestNode, wait_until};

const BLOCK: usize = 64 << 10;

fn keys(range: std::ops::Range<u8>) -> Vec<BlockKey> {
    range.map(|n| BlockKey::from_bytes([n; 32])).collect()
}

fn put(client: &Client, keys: &[BlockKey]) {
    let bytes: Vec<_> = keys.iter().map(|key| bytes_of(key, BLOCK)).collect();
    let batch: Vec<_> = keys.iter().zip(&bytes).map(|(key, bytes)| Put::new(*key, bytes)).collect();
    for outcome in client.put(&batch, CallOptions::default()) {
        assert!(matches!(outcome, PutOutcome::Stored), "{outcome:?}");
    }
}

/// The tier of each block; checks every byte.
fn check(client: &Client, keys: &[BlockKey]) -> Vec<Option<&'static str>> {
    let check_one = |(key, view): (&BlockKey, ViewOutcome)| match view {
        ViewOutcome::Hit { slab, tier } => {
            assert!(
                slab.host() == Some(&bytes_of(key, BLOCK)),
                "wrong bytes for {key} from {tier}"
            );
            Some(tier)
        }
        ViewOutcome::Miss => None,
        ViewOutcome::Failed(error) => panic!("{key}: {error:?}"),
    };
    keys.iter().zip(client.view(keys, CallOptions::default())).map(check_one).collect()
}

fn reading_from(node: &TestNode) -> impl Fn(&mut StoreConfig) + use<> {
    let source = StoreSource::new("peers", Arc::new(node.connect()));
    let sources = SourceList::new(vec![Arc::new(source) as Arc<dyn Source>]);
    move |config| config.sources = sources.clone()
}

#[test]
fn a_source_over_a_client_conforms() {
    let mut nodes = Vec::new();
    all(&pool(), &mut || {
        let node = TestNode::start(|config| config.store.dram_bytes = 16 << 20);
        let [putting, removing] = [node.connect(), node.connect()];
        let source = Arc::new(StoreSource::new("peers", Arc::new(node.connect())));
        nodes.push(node);
        SourceSubject {
            source,
            put: Box::new(move |key, bytes| {
                let outcomes = putting.put(&[Put::new(*key, bytes)], CallOptions::default());
                assert!(matches!(outcomes[0], PutOutcome::Stored), "{outcomes:?}");
            }),
            remove: Box::new(move |key| drop(removing.delete(&[*key]))),
            stall: None,
        }
    });
}

#[test]
fn the_clients_of_a_node_read_blocks_of_another_node() {
    let far = TestNode::start(|_| {});
    let near = TestNode::start(|config| reading_from(&far)(&mut config.store));
    let keys = keys(1..21);
    put(&far.connect(), &keys[..15]);
    let client = near.connect();
    put(&client, &keys[..5]);
    let matched = client.lookup_prefix(&Request::new(&keys)).tiers;
    assert_eq!(matched, [["dram"; 5].as_slice(), ["peers"; 10].as_slice()].concat());
    let views = client.acquire(&Request::new(&keys), CallOptions::default());
    assert_eq!(views.len(), 15);
    assert!(views.iter().all(|view| matches!(view, ViewOutcome::Hit { .. })), "{views:?}");
    drop(views);
    assert_eq!(check(&client, &keys)[..15], [Some("dram"); 15]);
    assert_eq!(near.stats().sources[0].1.fetched_blocks, 10);
    wait_until("the far node has its memory back", || far.held_bytes() == 0);
}

#[test]
fn a_node_goes_on_when_the_node_that_it_read_from_stops() {
    let mut far = TestNode::start(|_| {});
    let near = TestNode::start(|config| reading_from(&far)(&mut config.store));
    let keys = keys(1..9);
    put(&far.connect(), &keys);
    let client = near.connect();
    assert_eq!(check(&client, &keys[..4]), [Some("peers"); 4]);
    far.stop();
    assert_eq!(check(&client, &keys)[..4], [Some("dram"); 4]);
    assert_eq!(check(&client, &keys)[4..], [None; 4]);
}

/// A node does not pass on the question of another node.
#[test]
fn a_node_is_asked_only_for_what_is_in_its_catalog() {
    let last = TestNode::start(|_| {});
    let middle = TestNode::start(|config| reading_from(&last)(&mut config.store));
    let first = TestNode::start(|config| reading_from(&middle)(&mut config.store));
    put(&last.connect(), &keys(1..3));
    assert_eq!(check(&first.connect(), &keys(1..3)), [None; 2]);
    assert_eq!(check(&middle.connect(), &keys(1..3)), [Some("peers"); 2]);
    assert_eq!(check(&first.connect(), &keys(1..3)), [Some("peers"); 2]);
}
