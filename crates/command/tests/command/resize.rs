//! `cascade config set dram` and `files_capacity` on a served node with a client.

use std::fs;
use std::time::Duration;

use cascade_block::BlockKey;
use cascade_client::{Client, ConnectOptions};
use cascade_runtime::{Deadline, SystemClock};
use cascade_store::{BlockStore as _, CallOptions, Put, PutOutcome, ViewOutcome};
use serde_json::Value;

use crate::admin::ServedNode;

const MIB: u64 = 1 << 20;
const BLOCK: usize = 60 << 10;

const NODE: &str = "files = \"HERE/files\"
files_capacity = \"64MiB\"
[advanced]
huge_pages = false
segment_size = \"1MiB\"
[[tenant]]
name = \"other\"
users = [4000021]
dram = \"8MiB\"
files_capacity = \"48MiB\"
[[tenant]]
name = \"third\"
users = [4000022]
";

fn key(number: u64) -> BlockKey {
    let mut bytes = [7; 32];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    BlockKey::from_bytes(bytes)
}

fn bytes_of(number: u64) -> Vec<u8> {
    let bytes = (0..BLOCK as u64).map(|at| (number * 31 + at * 7 + at / 251).to_le_bytes()[0]);
    bytes.collect()
}

fn put(client: &Client, range: std::ops::Range<u64>) {
    for number in range {
        let bytes = bytes_of(number);
        let outcomes = client.put(&[Put::new(key(number), &bytes)], CallOptions::default());
        let is_there = matches!(outcomes[0], PutOutcome::Stored | PutOutcome::Present);
        assert!(is_there, "{number}: {outcomes:?}");
    }
    client.flush(CallOptions::default()).unwrap();
}

fn is_right(view: &ViewOutcome, number: u64) -> bool {
    match view {
        ViewOutcome::Hit { slab, .. } => {
            assert!(slab.host() == Some(&bytes_of(number)[..]), "wrong bytes of {number}");
            true
        }
        ViewOutcome::Miss => false,
        ViewOutcome::Failed(error) => panic!("{number}: {error:?}"),
    }
}

/// Numbers of the blocks that are found; compares every byte.
fn found(client: &Client, range: std::ops::Range<u64>) -> Vec<u64> {
    let is_found = |number: &u64| {
        let views = client.view(&[key(*number)], CallOptions::default());
        is_right(&views[0], *number)
    };
    range.filter(is_found).collect()
}

fn tier(node: &ServedNode, tenant: usize, name: &str) -> Value {
    let status = node.json(&["status"]);
    let tiers = status["tenants"][tenant]["tiers"].as_array().unwrap();
    tiers.iter().find(|tier| tier["name"] == name).unwrap().clone()
}

fn capacity(node: &ServedNode, tenant: usize, name: &str) -> u64 {
    tier(node, tenant, name)["capacity_bytes"].as_u64().unwrap()
}

/// Shared memory that the node has.
fn shared_memory(node: &ServedNode) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", node.child.id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssShmem:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let limit = Deadline::after(&SystemClock, Duration::from_secs(60));
    while !condition() {
        assert!(!limit.has_passed(&SystemClock), "waited in vain until {what}");
        cascade_runtime::sleep(Duration::from_millis(20));
    }
}

/// A client, and blocks in both tiers of its node.
fn start() -> (ServedNode, Client) {
    let node = ServedNode::start(NODE);
    let client = connect(&node);
    put(&client, 0..600);
    assert_eq!(found(&client, 0..600).len(), 600);
    (node, client)
}

fn connect(node: &ServedNode) -> Client {
    Client::connect(ConnectOptions::new(node.path("run/cascade.sock"))).unwrap()
}

#[test]
fn dram_of_a_running_node_changes_its_size() {
    let (mut node, client) = start();
    let views = client.view(&(0..20).map(key).collect::<Vec<_>>(), CallOptions::default());
    let before = shared_memory(&node);
    let message = node.output(&["config", "set", "dram", "6MiB"]);
    assert!(message.contains("dram = 6MiB (was 16MiB)"), "{message}");
    let (dram, other) = (capacity(&node, 0, "dram"), capacity(&node, 1, "dram"));
    assert_eq!((dram, other), (6 * MIB, 8 * MIB), "a quota is above the new size, and stays");
    assert_eq!(capacity(&node, 2, "dram"), 6 * MIB, "a tenant without one follows");
    let after = shared_memory(&node);
    assert!(after + 19 * MIB <= before, "{after} of {before} bytes are left");
    for (number, view) in (0..).zip(&views) {
        assert!(is_right(view, number), "{number} is held");
    }
    assert_eq!(found(&client, 0..600).len(), 600, "the others are in the files");
    let message = node.refused(1, &["config", "set", "dram", "1MiB"]);
    assert!(message.contains("the minimum is 4MiB"), "{message}");
    let message = node.refused(1, &["config", "set", "dram", "32MiB"]);
    for part in ["at most 16MiB", "restart"] {
        assert!(message.contains(part), "{message}");
    }
    // What clients hold keeps its memory; the rest goes back.
    let held = client.view(&(100..150).map(key).collect::<Vec<_>>(), CallOptions::default());
    assert!((100..).zip(&held).all(|(number, view)| is_right(view, number)));
    let message = node.refused(1, &["config", "set", "dram", "4MiB", "--timeout", "2"]);
    assert!(message.contains("in use by clients"), "{message}");
    assert!(capacity(&node, 0, "dram") > 4 * MIB);
    drop((held, views));
    node.output(&["config", "set", "dram", "4MiB"]);
    assert_eq!(capacity(&node, 0, "dram"), 4 * MIB);
    let message = node.output(&["config", "set", "dram", "16MiB"]);
    assert!(message.contains("(was 4MiB)"), "{message}");
    assert_eq!(capacity(&node, 0, "dram"), 16 * MIB);
    assert!(shared_memory(&node) >= 40 * MIB, "all of it is allocated");
    put(&client, 600..700);
    assert_eq!(found(&client, 500..700).len(), 200);
    // A reload brings the file's value back.
    node.output(&["config", "set", "dram", "8MiB"]);
    assert_eq!(node.json(&["reload"])["changed"], serde_json::json!(["dram"]));
    assert_eq!(capacity(&node, 0, "dram"), 16 * MIB);
    node.output(&["config", "set", "dram", "8MiB"]);
    node.restart();
    assert_eq!(capacity(&node, 0, "dram"), 16 * MIB);
    assert_eq!(found(&connect(&node), 500..700).len(), 200);
}

#[test]
fn the_files_of_a_running_node_change_their_size() {
    let (mut node, client) = start();
    let used = |node: &ServedNode| tier(node, 0, "files")["used_bytes"].as_u64().unwrap();
    assert!(used(&node) > 34 * MIB);
    let message = node.output(&["config", "set", "files_capacity", "16MiB"]);
    assert!(message.contains("files_capacity = 16MiB (was 64MiB)"), "{message}");
    assert_eq!(capacity(&node, 0, "files"), 16 * MIB);
    assert_eq!(capacity(&node, 1, "files"), 48 * MIB, "a quota stays");
    assert_eq!(capacity(&node, 2, "files"), 16 * MIB);
    put(&client, 1000..1030);
    wait_until("the files fit", || used(&node) <= 15 * MIB);
    assert!(found(&client, 0..600).len() > 150, "no more is removed than needed");
    assert_eq!(found(&client, 1000..1030).len(), 30, "the newest stay");
    let message = node.refused(1, &["config", "set", "files_capacity", "1KiB"]);
    assert!(message.contains("the minimum is 1MiB"), "{message}");
    let message = node.refused(1, &["config", "set", "files_capacity", "1536KiB"]);
    assert!(message.contains("segment_size"), "{message}");
    node.output(&["config", "set", "files_capacity", "64MiB"]);
    put(&client, 2000..2500);
    assert_eq!(found(&client, 2000..2500).len(), 500);
    // More in the files than the next start allows.
    let file = node.path("cascade.toml");
    let text = fs::read_to_string(&file).unwrap();
    fs::write(&file, text.replace("\"64MiB\"", "\"12MiB\"")).unwrap();
    node.restart();
    let client = connect(&node);
    put(&client, 3000..3010);
    wait_until("the files fit", || used(&node) <= 11 * MIB);
    assert_eq!(found(&client, 3000..3010).len(), 10);
    assert!(found(&client, 2000..2500).len() > 50);
}

#[test]
fn a_node_without_files_has_no_capacity_to_change() {
    let node = ServedNode::start("");
    let message = node.refused(1, &["config", "set", "files_capacity", "1GiB"]);
    assert!(message.contains("no file tier") && message.contains("set files"), "{message}");
}
