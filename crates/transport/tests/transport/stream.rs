//! TCP and shared memory run the conformance suite.

use cascade_transport::conformance::{self, Subject, soon};
use cascade_transport::{Access, EndpointConfig, Region};

fn shared(bytes: usize, access: Access) -> Region {
    Region::shared(bytes, access).expect("there is memory")
}

fn conforms(address: &str) {
    conformance::all(&mut || {
        let (client, server, local, remote) = conformance::endpoints(Region::private);
        let listener =
            server.listen_tcp(address.parse().expect("it is an address")).expect("it can listen");
        let address = listener.tcp_address().expect("it listens on TCP");
        let connection = client.connect_tcp(address, soon()).expect("it accepts");
        let sees_unregistered = true;
        Subject { client, server, listener, connection, local, remote, sees_unregistered }
    });
}

#[test]
fn tcp_conforms() {
    conforms("127.0.0.1:0");
}

/// The client's address is 127.0.0.1. If both differ, each side waits as for another host.
#[test]
fn tcp_between_hosts_conforms() {
    conforms("127.0.0.2:0");
}

/// Large batches of the suite are divided among the streams.
#[test]
fn several_tcp_streams_conform() {
    conformance::all(&mut || {
        let config = |name: &str, streams| EndpointConfig {
            name: name.to_owned(),
            streams,
            ..Default::default()
        };
        let configs = (config("client", 4), config("server", 1));
        let (client, server, local, remote) = conformance::endpoints_of(configs, Region::private);
        let listener = server.listen_tcp("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = listener.tcp_address().unwrap();
        let connection = client.connect_tcp(address, soon()).unwrap();
        assert_eq!(listener.peer_count(), 4);
        let sees_unregistered = true;
        Subject { client, server, listener, connection, local, remote, sees_unregistered }
    });
}

#[test]
fn shm_conforms() {
    let directory = tempfile::tempdir().unwrap();
    let mut sockets = (0..).map(|number| directory.path().join(format!("{number}")));
    conformance::all(&mut || {
        let (client, server, local, remote) = conformance::endpoints(shared);
        let path = sockets.next().unwrap();
        let listener = server.listen_unix(&path).unwrap();
        let connection = client.connect_unix(&path, soon()).unwrap();
        let sees_unregistered = false;
        Subject { client, server, listener, connection, local, remote, sees_unregistered }
    });
}

#[test]
fn a_unix_socket_carries_memory_that_cannot_be_mapped() {
    let directory = tempfile::tempdir().unwrap();
    let mut sockets = (0..).map(|number| directory.path().join(format!("{number}")));
    conformance::all(&mut || {
        let (client, server, local, remote) = conformance::endpoints(Region::private);
        let path = sockets.next().unwrap();
        let listener = server.listen_unix(&path).unwrap();
        let connection = client.connect_unix(&path, soon()).unwrap();
        let sees_unregistered = true;
        Subject { client, server, listener, connection, local, remote, sees_unregistered }
    });
}
