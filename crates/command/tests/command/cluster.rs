//! Two nodes of a list of hosts: real processes, killed and restarted.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Stdio;

use rustix::process::{Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

use crate::admin::ServedNode;
use crate::{cascade, stderr, wait_until};

const KEYS: [&str; 2] = [
    "4bf5122f344554c53bde2ebb8cd2b7e3d1600ad631c385a5d7cce23c7785459a",
    "5bf5122f344554c53bde2ebb8cd2b7e3d1600ad631c385a5d7cce23c7785459a",
];

/// The files that both nodes read.
struct Shared(TempDir);

impl Shared {
    fn new() -> Self {
        let directory = TempDir::new().unwrap();
        // An address of loopback that no other test process has.
        let [low, high, ..] = std::process::id().to_le_bytes();
        let hosts = format!("one 127.1.{high}.{low}:9500\ntwo 127.2.{high}.{low}:9500\n");
        fs::write(directory.path().join("hosts"), hosts).unwrap();
        let token = directory.path().join("token");
        fs::write(&token, "a token that both nodes know\n").unwrap();
        fs::set_permissions(&token, fs::Permissions::from_mode(0o600)).unwrap();
        Self(directory)
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).display().to_string()
    }

    fn toml(&self, name: &str) -> String {
        let (hosts, token) = (self.path("hosts"), self.path("token"));
        let name = format!("advanced.node_name = \"{name}\"");
        format!("cluster = \"hosts:{hosts}\"\npeer_token_file = \"{token}\"\n{name}\n")
    }

    fn node(&self, name: &str) -> ServedNode {
        ServedNode::start(&self.toml(name))
    }
}

fn peer(node: &ServedNode) -> Value {
    node.json(&["status"])["cluster"]["nodes"][0].clone()
}

fn wait_for(node: &ServedNode, state: &str) {
    wait_until(&|| peer(node)["state"] == state, &format!("the other node is not {state}"));
}

fn fetched(node: &ServedNode, key: &str) -> Vec<u8> {
    let path = node.path("out");
    let path = path.to_str().unwrap();
    node.output(&["get", key, "-o", path]);
    fs::read(Path::new(path)).unwrap()
}

#[test]
fn a_block_of_one_node_is_read_through_the_other_and_lost_with_its_owner() {
    let shared = Shared::new();
    let (one, mut two) = (shared.node("one"), shared.node("two"));
    let bytes: Vec<u8> = (0..1_500_000_u32).flat_map(u32::to_le_bytes).collect();
    let file = shared.path("block");
    fs::write(&file, &bytes).unwrap();
    for key in KEYS {
        two.output(&["put", key, &file]);
    }
    wait_for(&one, "up");
    assert_eq!(fetched(&one, KEYS[0]), bytes);
    wait_until(&|| peer(&one)["blocks"] == 2, "it does not say what it has");
    let other = peer(&one);
    assert_eq!((&other["name"], &other["fetched_blocks"]), (&"two".into(), &1.into()), "{other}");
    assert_eq!(other["bytes"], 12_000_000, "{other}");
    let text = one.output(&["status"]);
    assert!(text.contains("two") && text.contains("peers  healthy"), "{text}");
    let tiers = one.json(&["status"])["tenants"][0]["tiers"].clone();
    let source = tiers.as_array().unwrap().iter().find(|tier| tier["name"] == "peers").unwrap();
    assert_eq!((&source["hits"], &source["hit_bytes"]), (&1.into(), &6_000_000.into()), "{source}");

    kill_process(two.process(), Signal::KILL).unwrap();
    two.child.wait().unwrap();
    wait_for(&one, "away");
    // What was fetched stays, and what was not is a miss.
    assert_eq!(fetched(&one, KEYS[0]), bytes);
    let missed = one.run(&["get", KEYS[1]]);
    assert_eq!(missed.status.code(), Some(1), "{}", stderr(&missed));
    let status = one.output(&["status"]);
    assert!(status.contains("two: "), "it does not say why: {status}");
    drop(two);
    let two = shared.node("two");
    two.output(&["put", KEYS[1], &file]);
    wait_for(&one, "up");
    assert_eq!(fetched(&one, KEYS[1]), bytes);
}

#[test]
fn settings_of_a_cluster_that_cannot_work_are_refused() {
    let shared = Shared::new();
    let (hosts, list) = (shared.path("hosts"), format!("hosts:{}", shared.path("hosts")));
    let wrong = shared.path("wrong");
    fs::write(&wrong, "one 127.0.0.1:1\ntwo\n").unwrap();
    let socket = shared.path("socket");
    for (flags, part) in [
        (vec!["--node-name", "one"], "node_name (--node-name): it has no effect"),
        (vec!["--cluster", &hosts], "is no list of hosts; use hosts:FILE"),
        (vec!["--cluster", "hosts:/nowhere/hosts"], "cannot read /nowhere/hosts"),
        (vec!["--cluster", &format!("hosts:{wrong}")], "line 2: 1 words"),
        (vec!["--cluster", &list, "--node-name", "three"], "has the name \"three\""),
        (vec!["--cluster", &list, "--peer-tls-ca", "/ca"], "needs all three: set all or none"),
        (
            vec!["--cluster", &list, "--node-name", "one", "--peer-listen", "0.0.0.0:0"],
            "configure a token or client certificates",
        ),
    ] {
        let mut command = cascade();
        command.args(["serve", "--dram", "4MiB", "--socket", &socket]).args(&flags);
        let output = command.stdin(Stdio::null()).output().unwrap();
        assert!(!output.status.success(), "{flags:?}");
        assert!(stderr(&output).contains(part), "{flags:?}: {}", stderr(&output));
    }
}
