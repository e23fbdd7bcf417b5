//! A node whose files are damaged: it serves, writes and ends without an error.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::{Signal, kill_process};

use crate::admin::ServedNode;

const BLOCKS: u64 = 24;
const BLOCK: usize = 256 << 10;

fn key(number: u64) -> String {
    format!("{:016x}{number:048x}", number.wrapping_mul(0x9E37_79B9_7F4A_7C15))
}

/// The bytes of a block are a function of its number.
fn bytes(number: u64) -> Vec<u8> {
    (0..BLOCK).map(|at| (at as u64).wrapping_mul(number | 1).to_le_bytes()[1]).collect()
}

/// Segments below a directory.
fn segments(directory: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for path in fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()) {
        if path.is_dir() {
            found.extend(segments(&path));
        } else if path.extension().is_some_and(|extension| extension == "segment") {
            found.push(path);
        }
    }
    found
}

impl ServedNode {
    fn put_blocks(&self, numbers: std::ops::Range<u64>) {
        let file = self.path("block");
        for number in numbers {
            fs::write(&file, bytes(number)).unwrap();
            assert!(self.output(&["put", &key(number), file.to_str().unwrap()]).contains("stored"));
        }
        assert!(self.output(&["flush"]).contains("all blocks are written"));
    }

    /// Counts the blocks that the node returns, and checks their bytes.
    fn hits(&self, numbers: std::ops::Range<u64>) -> usize {
        let has = |number: &u64| {
            let output = self.run(&["get", &key(*number), "--output", "-"]);
            let is_hit = output.status.code() == Some(0);
            assert!(!is_hit || output.stdout == bytes(*number), "block {number} has wrong bytes");
            is_hit
        };
        numbers.filter(has).count()
    }

    fn end(&mut self) -> Option<i32> {
        kill_process(self.process(), Signal::TERM).unwrap();
        self.child.wait().unwrap().code()
    }
}

/// One flipped bit in a footer made each flush fail, and the node ended with status 1.
#[test]
fn a_node_over_damaged_footers_serves_writes_and_ends_with_status_0() {
    let mut node = ServedNode::start(
        "files = \"HERE/files\"\nfiles_capacity = \"16MiB\"\n[advanced]\nsegment_size = \"1MiB\"\n",
    );
    node.put_blocks(0..BLOCKS);
    let sealed = segments(&node.path("files"));
    assert!(sealed.len() >= 4, "{sealed:?}");
    for path in &sealed {
        let mut content = fs::read(path).unwrap();
        let at = content.len() - 2048;
        content[at] ^= 1;
        fs::write(path, content).unwrap();
    }
    node.put_blocks(BLOCKS..4 * BLOCKS);
    assert!(node.hits(3 * BLOCKS..4 * BLOCKS) > 0, "new blocks are kept");
    node.hits(0..BLOCKS);
    assert_eq!(node.end(), Some(0), "{}", node.log());
}

/// `timeout` signals its child and its own process group, so the child gets one request twice. The
/// node took the second signal for an order to end at once and discarded pending blocks.
#[test]
fn a_stop_signal_that_arrives_twice_is_one_request() {
    let mut node = ServedNode::start("files = \"HERE/files\"\nfiles_capacity = \"64MiB\"\n");
    let file = node.path("block");
    for number in 0..BLOCKS {
        fs::write(&file, bytes(number)).unwrap();
        node.output(&["put", &key(number), file.to_str().unwrap()]);
    }
    kill_process(node.process(), Signal::TERM).unwrap();
    let is_stopping = (0..60_000).any(|_| {
        std::thread::park_timeout(Duration::from_millis(1));
        node.log().contains("shutting down")
    });
    assert!(is_stopping, "{}", node.log());
    // The node may have ended before these are sent.
    for signal in [Signal::TERM, Signal::HUP, Signal::TERM] {
        let _is_sent = kill_process(node.process(), signal).is_ok();
    }
    assert_eq!(node.child.wait().unwrap().code(), Some(0), "{}", node.log());
}
