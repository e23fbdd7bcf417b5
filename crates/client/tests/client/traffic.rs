//! The socket carries messages about blocks, never their bytes; and pins across clients.

use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cascade_client::{Client, ConnectOptions};
use cascade_tier::BlockStore;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use crate::child::variable;
use crate::test_node::{NOW, TestNode, bytes_of, hits, keys, put, wait_until};

const BLOCK: usize = 1 << 20;

/// A proxy between clients and a node that counts the bytes in both directions.
struct CountingProxy {
    socket: PathBuf,
    bytes: Arc<AtomicU64>,
    _directory: tempfile::TempDir,
}

impl CountingProxy {
    fn start(host: &TestNode) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("counter.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let (bytes, node) = (Arc::<AtomicU64>::default(), host.socket.clone());
        let counted = Arc::clone(&bytes);
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let node = UnixStream::connect(&node).unwrap();
                let pairs = [
                    (client.try_clone().unwrap(), node.try_clone().unwrap(), false),
                    (node, client, true),
                ];
                for (from, to, brings_pool) in pairs {
                    let counted = Arc::clone(&counted);
                    std::thread::spawn(move || forward(&from, &to, brings_pool, &counted));
                }
            }
        });
        Self { socket, bytes, _directory: directory }
    }
}

fn forward(mut from: &UnixStream, mut to: &UnixStream, brings_pool: bool, counted: &AtomicU64) {
    if brings_pool {
        counted.fetch_add(forward_pool(from, to), Ordering::Relaxed);
    }
    let mut buffer = vec![0; 64 << 10];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        counted.fetch_add(count as u64, Ordering::Relaxed);
        if to.write_all(&buffer[..count]).is_err() {
            break;
        }
    }
    drop((from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both)));
}

/// The node's first message comes with the pool's descriptor.
fn forward_pool(from: &UnixStream, to: &UnixStream) -> u64 {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut buffer = vec![0; 64 << 10];
    let mut parts = [IoSliceMut::new(&mut buffer)];
    let flags = RecvFlags::CMSG_CLOEXEC;
    let Ok(received) = recvmsg(from, &mut parts, &mut control, flags) else { return 0 };
    let pool = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors: Vec<_> = pool.iter().map(AsFd::as_fd).collect();
    if !descriptors.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
    }
    let message = [IoSlice::new(&buffer[..received.bytes])];
    let sent = sendmsg(to, &message, &mut control, SendFlags::NOSIGNAL);
    sent.unwrap_or(0) as u64
}

/// 64 MiB by default, 1 GiB in the slow gate with `CASCADE_TRAFFIC_MIB=1024`.
#[test]
fn payload_never_crosses_the_socket() {
    let mebibytes: u64 = variable("CASCADE_TRAFFIC_MIB").map_or(64, |text| text.parse().unwrap());
    let host = TestNode::start(|_| {});
    let proxy = CountingProxy::start(&host);
    let client = Client::connect(ConnectOptions::new(&proxy.socket)).unwrap();
    let some = keys(0..4);
    let mut buffers = vec![vec![0; BLOCK]; 4];
    let before = proxy.bytes.load(Ordering::Relaxed);
    for round in 0..mebibytes / 4 {
        client.clear();
        put(&client, &some, BLOCK, NOW);
        let mut slices: Vec<&mut [u8]> = buffers.iter_mut().map(Vec::as_mut_slice).collect();
        client.get(&some, &mut slices, NOW);
        assert!(buffers[3] == bytes_of(&some[3], BLOCK), "round {round}");
        assert_eq!(hits(&some, &client.view(&some, NOW)), 4);
        buffers[3].fill(0);
    }
    let crossed = proxy.bytes.load(Ordering::Relaxed) - before;
    // Put, got and viewed.
    let payload = 3 * mebibytes * BLOCK as u64;
    assert!(crossed > 0, "nothing was counted, so the test proves nothing");
    assert!(crossed * 1000 < payload, "{crossed} bytes crossed for {payload} of payload");
}

/// When a client with a pin on a deleted block ended, another client lost its pin on the block that
/// was put under the same key later.
#[test]
fn a_client_that_ends_removes_no_pin_of_a_block_that_was_put_again() {
    let host = TestNode::start(|_| {});
    let (one, other) = (host.connect(), host.connect());
    let some = keys(0..1);
    put(&one, &some, 4096, NOW);
    assert_eq!(one.pin(&some), [true]);
    assert_eq!(other.delete(&some), [true]);
    put(&other, &some, 4096, NOW);
    assert_eq!(other.pin(&some), [true]);
    drop(one);
    wait_until("the first session ends", || host.node.clients().len() == 1);
    assert_eq!(other.unpin(&some), [true], "its pin is kept");
}
