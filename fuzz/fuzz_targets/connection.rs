//! Fuzzes the bytes that a client sends to a served node: the node never panics, and no lease
//! outlives its connection.
//!
//! The input is a script. It is sent unchanged or as the bodies of valid frames, with or without a
//! hello. Then the connection is closed, and the node must hold nothing for it.
#![no_main]

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

use cascade_node::{Node, NodeConfig, Server};
use cascade_wire::{Access, Call, Frame, Hello};
use libfuzzer_sys::fuzz_target;

struct FuzzNode {
    node: Node,
    socket: PathBuf,
    _server: Server,
}

/// One node for all inputs, so that later inputs show what an earlier one broke.
fn fuzz_node() -> &'static FuzzNode {
    static FUZZ_NODE: OnceLock<FuzzNode> = OnceLock::new();
    FUZZ_NODE.get_or_init(|| {
        let directory = std::env::temp_dir().join(format!("cascade-fuzz-{}", std::process::id()));
        std::fs::create_dir_all(&directory).expect("the temporary directory can be written");
        let socket = directory.join("node.sock");
        let listener = UnixListener::bind(&socket).expect("the directory is fresh");
        let mut config = NodeConfig::new(&socket);
        config.store.dram_bytes = 8 << 20;
        config.store.huge_pages = false;
        config.store.timeout = Duration::from_millis(50);
        let node = Node::open(config).expect("the machine has 8 MiB of memory");
        let server = Server::start(node.clone(), listener).expect("the node can serve");
        FuzzNode { node, socket, _server: server }
    })
}

fn hello() -> Call {
    Call::Hello(Hello {
        version_min: 1,
        version_max: 1,
        access: Access::Write,
        session: None,
        token: None,
        name: "fuzz".to_owned(),
    })
}

fuzz_target!(|bytes: &[u8]| {
    let [mode, script @ ..] = bytes else { return };
    let fuzz_node = fuzz_node();
    let mut stream = UnixStream::connect(&fuzz_node.socket).expect("the node accepts");
    let timeout = Some(Duration::from_millis(200));
    stream.set_write_timeout(timeout).expect("a timeout is a setting");
    stream.set_read_timeout(timeout).expect("a timeout is a setting");
    let mut output = Vec::new();
    if mode & 1 == 1 {
        hello().write(&mut output, 1, None).expect("the frame is short");
    }
    if mode & 2 == 2 {
        for body in script.chunks(usize::from(*mode).max(8)) {
            // All known kinds of calls, 1 to 19, and the unknown kinds beside them.
            let kind = u16::from(body[0]) % 21;
            let written = Frame::write(&mut output, kind, 2, None, |into| {
                into.extend_from_slice(&body[1..]);
            });
            written.expect("the frame is short");
        }
    } else {
        output.extend_from_slice(script);
    }
    // The node may close the connection at any time.
    drop(stream.write_all(&output));
    drop(stream.shutdown(std::net::Shutdown::Write));
    drop(stream.read_to_end(&mut Vec::new()));
    drop(stream);
    let held = || {
        fuzz_node
            .node
            .clients()
            .iter()
            .map(|client| client.leased_bytes + client.reserved_bytes)
            .sum::<u64>()
    };
    for _ in 0..20_000 {
        if fuzz_node.node.clients().is_empty() {
            break;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(fuzz_node.node.clients().is_empty(), "a session outlived its connection");
    assert_eq!(held(), 0);
});
