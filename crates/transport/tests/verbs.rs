//! Links over a real verbs device. `make test-rdma` runs these tests in a virtual machine.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

#[path = "verbs/buffer.rs"]
mod buffer;
#[path = "verbs/failures.rs"]
mod failures;
#[path = "verbs/model.rs"]
mod model;
#[path = "verbs/peer_process.rs"]
mod peer_process;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use cascade_runtime::{Deadline, SystemClock};
use cascade_transport::conformance::{self, Subject};
use cascade_transport::verbs::{Device, Link, OpenLink, SYSFS, Target, Verbs, VerbsSettings};
use cascade_transport::{Batch, Direction, Piece, Place, Region};

/// The nearest device of this machine.
fn device(settings: &VerbsSettings) -> Arc<Device> {
    let verbs = Arc::new(Verbs::open().unwrap());
    Device::open_nearest(&verbs, Path::new(SYSFS), &Target::default(), settings).unwrap()
}

/// Two links of this process that are connected to each other.
fn pair(device: &Arc<Device>) -> (Link, Link) {
    let (one, other) = (OpenLink::open(device).unwrap(), OpenLink::open(device).unwrap());
    let (to_one, to_other) = (one.address(), other.address());
    (one.connect(&to_other).unwrap(), other.connect(&to_one).unwrap())
}

fn soon() -> Deadline {
    Deadline::after(&SystemClock, Duration::from_secs(60))
}

#[test]
#[ignore = "needs a verbs device: make test-rdma"]
fn the_gid_of_the_ipv4_address_is_used() {
    let device = device(&VerbsSettings::default());
    assert!(device.gid().ipv4().is_some(), "{}", device.gid());
    assert!(device.message_bytes_max() >= 1 << 20);
}

/// The conformance suite of all transports, over TCP for the handshake and RDMA for the bytes.
#[test]
#[ignore = "needs a verbs device: make test-rdma"]
fn rdma_conforms() {
    let region = |bytes, access| Region::shared(bytes, access).unwrap();
    conformance::all(&mut || {
        let (client, server, local, remote) = conformance::endpoints(region);
        client.use_device(device(&VerbsSettings::default())).unwrap();
        server.use_device(device(&VerbsSettings::default())).unwrap();
        let listener = server.listen_tcp("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = listener.tcp_address().unwrap();
        let connection = client.connect_rdma(address, conformance::soon()).unwrap();
        // The device refuses, and the connection is lost: see below.
        let sees_unregistered = false;
        Subject { client, server, listener, connection, local, remote, sees_unregistered }
    });
}

/// A region that its endpoint has unregistered is out of reach, also for peers that knew it.
#[test]
#[ignore = "needs a verbs device: make test-rdma"]
fn an_unregistered_region_is_out_of_reach() {
    let region = |bytes, access| Region::shared(bytes, access).unwrap();
    let (client, server, local, remote) = conformance::endpoints(region);
    client.use_device(device(&VerbsSettings::default())).unwrap();
    server.use_device(device(&VerbsSettings::default())).unwrap();
    let listener = server.listen_tcp("127.0.0.1:0".parse().unwrap()).unwrap();
    let connection = client.connect_rdma(listener.tcp_address().unwrap(), soon()).unwrap();
    let at = |region| Place { region, offset: 0 };
    let pieces = [Piece { local: at(local[0]), remote: at(remote[0]), bytes: 100 }];
    let batch = Batch { direction: Direction::Write, pieces: &pieces, notice: None };
    connection.post(&batch, soon()).unwrap().wait(soon()).unwrap();
    server.unregister(remote[0], soon()).unwrap();
    let error = connection.post(&batch, soon()).unwrap().wait(soon()).unwrap_err();
    assert!(error.to_string().contains("remote access error"), "{error}");
    assert!(!connection.is_open());
}
