//! `cascade status` and `cascade top` show the hit rate of lookups: matched over requested blocks.

use std::os::unix::net::UnixListener;
use std::process::Command;

use cascade_block::BlockKey;
use cascade_node::status::{NodeState, Status};
use cascade_node::{Node, NodeConfig, Server};
use cascade_store::{CallOptions, Put, Request};

fn key(number: u64) -> BlockKey {
    let mut bytes = [7; 32];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    BlockKey::from_bytes(bytes)
}

#[test]
fn requests_that_share_5_percent_of_their_blocks_have_a_hit_rate_of_5_percent() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("socket");
    let node = Node::open(NodeConfig::new(socket.clone())).unwrap();
    let server = Server::start(node.clone(), UnixListener::bind(&socket).unwrap()).unwrap();
    node.set_state(NodeState::Serving);
    let store = node.store();
    let put = |keys: &[BlockKey]| {
        let puts: Vec<Put<'_>> = keys.iter().map(|key| Put::new(*key, &[9; 512])).collect();
        store.put(&puts, CallOptions::default());
    };
    put(&[key(0)]);
    for request in 1..201 {
        let own = (1..20).map(|at| key(request * 20 + at));
        let chain: Vec<BlockKey> = [key(0)].into_iter().chain(own).collect();
        let matched = store.lookup_prefix(&Request::new(&chain)).tiers.len();
        drop(store.view(&chain[..matched], CallOptions::default()));
        put(&chain[matched..]);
    }
    let run = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cascade"));
        let output = command.args(arguments).arg("--socket").arg(&socket).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let status: Status = serde_json::from_str(&run(&["status", "--json"])).unwrap();
    assert_eq!(status.tenants[0].hit_rate.ratio.map(f64::to_bits), Some(0.05f64.to_bits()));
    let text = run(&["status"]);
    assert!(text.contains("hit rate  5.0 %: 200 of 4,000 blocks requested"), "{text}");
    let top = run(&["top", "--once"]);
    assert!(top.contains(" hit rate 5.0 % "), "the plot: {top}");
    assert!(top.contains("5.0 % of 4,000"), "the table: {top}");
    for page in [text, top] {
        assert!(!page.contains("100.0 %"), "{page}");
    }
    server.stop();
}
