//! Calls with more keys than one message has room for.

use cascade_tier::{BlockStore, PutOutcome, Request};

use crate::test_node::{NOW, TestNode, keys, put};

/// Keys that one message holds.
const MESSAGE_KEYS: usize = 65_536;

#[test]
fn a_lookup_of_more_keys_than_a_message_holds_matches_them_all() {
    let node = TestNode::start(|config| config.store.dram_bytes = 64 << 20);
    let client = node.connect();
    let all = keys(0..MESSAGE_KEYS as u64 + 5_000);
    for part in all.chunks(8_192) {
        let outcomes = put(&client, part, 16, NOW);
        assert!(outcomes.iter().all(|outcome| matches!(outcome, PutOutcome::Stored)));
    }
    let matched = |count: usize| client.lookup_prefix(&Request::new(&all[..count])).tiers.len();
    for count in [MESSAGE_KEYS - 1, MESSAGE_KEYS, MESSAGE_KEYS + 1, all.len()] {
        assert_eq!(matched(count), count);
    }
    let gap = MESSAGE_KEYS + 100;
    assert_eq!(client.delete(&all[gap..=gap]), [true]);
    assert_eq!(matched(all.len()), gap, "the match ends at the first gap");
}
