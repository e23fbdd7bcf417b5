//! TCP and shared memory run the conformance suite.
#![expect(unsafe_code, reason = "makes regions of memory of its own")]

use cascade_transport::conformance::{self, Subject, soon};
use cascade_transport::{Access, Region};

fn shared(bytes: usize, access: Access) -> Region {
    Region::shared(bytes, access).expect("there is memory")
}

/// Memory that another process cannot map.
fn private(bytes: usize, access: Access) -> Region {
    let mut memory = vec![0_u8; bytes].into_boxed_slice();
    let base = std::ptr::NonNull::new(memory.as_mut_ptr()).expect("a box has an address");
    // SAFETY: the box is the region's owner, and nobody else has it.
    unsafe { Region::of_memory(base, bytes, access, memory) }
}

#[test]
fn tcp_conforms() {
    conformance::all(&mut || {
        let (client, server, local, remote) = conformance::endpoints(private);
        let listener = server.listen_tcp("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = listener.tcp_address().unwrap();
        let connection = client.connect_tcp(address, soon()).unwrap();
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
        let (client, server, local, remote) = conformance::endpoints(private);
        let path = sockets.next().unwrap();
        let listener = server.listen_unix(&path).unwrap();
        let connection = client.connect_unix(&path, soon()).unwrap();
        let sees_unregistered = true;
        Subject { client, server, listener, connection, local, remote, sees_unregistered }
    });
}
