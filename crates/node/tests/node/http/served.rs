//! Test fixture: a node that serves HTTP on loopback, and a minimal HTTP client.

use std::fmt::Write as _;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cascade_block::BlockKey;
use cascade_node::config::SecurityConfig;
use cascade_node::http::{self, HttpConfig, HttpHandle};
use cascade_node::status::{NodeState, Status};
use cascade_node::traffic::{CompletedRequest, Operation};
use cascade_node::{Node, NodeConfig};
use cascade_store::{CallOptions, FilesConfig, Put, Request, ViewOutcome};

pub(crate) const BLOCK_BYTES: usize = 64 << 10;

/// A node that serves HTTP on loopback until it is dropped.
pub(crate) struct Served {
    pub(crate) node: Node,
    pub(crate) handle: HttpHandle,
    _files: tempfile::TempDir,
}

impl Served {
    pub(crate) fn start() -> Self {
        Self::start_with(SecurityConfig::default(), |_| {})
    }

    pub(crate) fn start_with(
        security: SecurityConfig,
        adjust: impl FnOnce(&mut HttpConfig),
    ) -> Self {
        Self::start_of(8 << 20, security, adjust)
    }

    /// Starts a node with this size of DRAM.
    pub(crate) fn start_of(
        dram_bytes: u64,
        security: SecurityConfig,
        adjust: impl FnOnce(&mut HttpConfig),
    ) -> Self {
        Self::start_node(security, adjust, |config| config.store.dram_bytes = dram_bytes)
    }

    /// Starts a node with adjusted settings.
    pub(crate) fn start_node(
        security: SecurityConfig,
        adjust: impl FnOnce(&mut HttpConfig),
        adjust_node: impl FnOnce(&mut NodeConfig),
    ) -> Self {
        let files = tempfile::tempdir().unwrap();
        let mut config = NodeConfig::new(files.path().join("socket"));
        "Dram|Files".clone_into(&mut config.store.pipeline);
        config.store.dram_bytes = 8 << 20;
        config.store.files = Some(files_config(files.path()));
        adjust_node(&mut config);
        let node = Node::open(config).unwrap();
        node.set_state(NodeState::Serving);
        let mut config = HttpConfig::new("127.0.0.1:0".parse().unwrap(), security);
        adjust(&mut config);
        let handle = http::serve(&node, config).unwrap();
        Self { node, handle, _files: files }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.handle.address()
    }

    /// The Unix socket where HTTP clients are identified by user.
    pub(crate) fn socket(&self) -> PathBuf {
        http::http_socket_path(&self.node.config().socket)
    }

    /// A request as the node's own user, over the Unix socket.
    pub(crate) fn get(&self, path: &str) -> Answer {
        get_as_user(&self.socket(), path, &[])
    }

    /// A request without a token, over TCP.
    pub(crate) fn get_over_tcp(&self, path: &str) -> Answer {
        get(self.address(), path, &[])
    }

    pub(crate) fn status(&self) -> Status {
        let answer = self.get("/status.json");
        assert_eq!(answer.code, 200, "{}", answer.body);
        serde_json::from_str(&answer.body).unwrap()
    }

    /// Puts the blocks with these numbers.
    pub(crate) fn put(&self, range: std::ops::Range<u64>) {
        for number in range {
            let bytes = bytes_of(number);
            let began = Instant::now();
            self.node.store().put(&[Put::new(key(number), &bytes)], CallOptions::default());
            self.record(Operation::Seal, began.elapsed(), 1, 1, BLOCK_BYTES as u64);
        }
    }

    /// Looks up a chain and reads all its blocks. Checks every byte of the hits.
    pub(crate) fn read(&self, range: std::ops::Range<u64>) {
        let keys: Vec<BlockKey> = range.clone().map(key).collect();
        let began = Instant::now();
        let matched = self.node.store().lookup_prefix(&Request::new(&keys));
        self.record(
            Operation::Lookup,
            began.elapsed(),
            keys.len() as u64,
            matched.tiers.len() as u64,
            0,
        );
        let began = Instant::now();
        let views = self.node.store().view(&keys, CallOptions::default());
        let duration = began.elapsed();
        let mut hits = 0;
        for (number, view) in range.zip(views) {
            if let ViewOutcome::Hit { slab, .. } = view {
                assert_eq!(slab.host().expect("host memory"), bytes_of(number), "block {number}");
                hits += 1;
            }
        }
        let bytes = hits * BLOCK_BYTES as u64;
        self.record(Operation::View, duration, keys.len() as u64, hits, bytes);
    }

    fn record(
        &self,
        operation: Operation,
        duration: Duration,
        blocks: u64,
        hit_blocks: u64,
        bytes: u64,
    ) {
        let answered =
            CompletedRequest { operation, duration, blocks, hit_blocks, bytes, failed: false };
        self.node.traffic().record(&answered);
    }

    /// Waits until all blocks are in the file tier, so that the counters no longer change.
    pub(crate) fn settle(&self) {
        self.node.store().flush(CallOptions::default()).unwrap();
    }
}

fn files_config(directory: &Path) -> FilesConfig {
    let mut files = FilesConfig::new(directory.join("blocks"));
    files.capacity_bytes = 256 << 20;
    files.segment_bytes = 16 << 20;
    files.direct = false;
    files
}

pub(crate) fn key(number: u64) -> BlockKey {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    bytes[31] = 1;
    BlockKey::from_bytes(bytes)
}

fn bytes_of(number: u64) -> Vec<u8> {
    (0..BLOCK_BYTES).map(|at| (number as usize * 31 + at * 7) as u8).collect()
}

/// An answer to a request.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) code: u16,
    pub(crate) head: String,
    pub(crate) body: String,
}

impl Answer {
    /// A header's value.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let mut lines = self.head.lines().filter_map(|line| line.split_once(": "));
        lines.find(|(at, _)| at.eq_ignore_ascii_case(name)).map(|(_, value)| value)
    }

    /// The sum of a metric's samples whose labels contain a text.
    pub(crate) fn metric(&self, name: &str, labels: &str) -> f64 {
        let is_sample = |rest: &str| rest.starts_with('{') || rest.starts_with(' ');
        let samples = self
            .body
            .lines()
            .filter(|line| line.strip_prefix(name).is_some_and(is_sample) && line.contains(labels));
        samples.map(|line| line.rsplit_once(' ').unwrap().1.parse::<f64>().unwrap()).sum()
    }
}

pub(crate) fn get_as_user(socket: &Path, path: &str, headers: &[&str]) -> Answer {
    let stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let anywhere = "127.0.0.1:1".parse().unwrap();
    exchange(stream, &request(anywhere, path, headers))
}

pub(crate) fn get(address: SocketAddr, path: &str, headers: &[&str]) -> Answer {
    send(address, &request(address, path, headers))
}

pub(crate) fn request(address: SocketAddr, path: &str, headers: &[&str]) -> String {
    let mut request = format!("GET {path} HTTP/1.1\r\nConnection: close\r\n");
    if !headers.iter().any(|header| header.starts_with("Host:")) {
        write!(request, "Host: {address}\r\n").unwrap();
    }
    for header in headers {
        request.push_str(header);
        request.push_str("\r\n");
    }
    request + "\r\n"
}

pub(crate) fn send(address: SocketAddr, request: &str) -> Answer {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    exchange(stream, request)
}

/// Sends a request over any stream and reads until its end.
pub(crate) fn exchange(mut stream: impl Read + Write, request: &str) -> Answer {
    stream.write_all(request.as_bytes()).unwrap();
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap();
    answer(&bytes)
}

/// Parses an answer.
pub(crate) fn answer(bytes: &[u8]) -> Answer {
    let text = String::from_utf8_lossy(bytes);
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
    let code = head.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or(0);
    let mut answer = Answer { code, head: head.to_owned(), body: body.to_owned() };
    if answer.header("transfer-encoding") == Some("chunked") {
        answer.body = join_chunks(body);
    }
    answer
}

fn join_chunks(mut body: &str) -> String {
    let mut whole = String::new();
    while let Some((length, rest)) = body.split_once("\r\n") {
        let length = usize::from_str_radix(length, 16).unwrap();
        if length == 0 {
            break;
        }
        whole.push_str(&rest[..length]);
        body = rest[length..].trim_start_matches("\r\n");
    }
    whole
}
