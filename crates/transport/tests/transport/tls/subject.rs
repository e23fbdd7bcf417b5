//! The conformance suite over TLS.
#![expect(unsafe_code, reason = "makes regions of memory of its own")]

use cascade_transport::conformance::{self, Subject, soon};
use cascade_transport::{Access, EndpointConfig, RecordLayer, Region, TlsConfig};

/// Memory that another process cannot map.
pub(crate) fn private(bytes: usize, access: Access) -> Region {
    let mut memory = vec![0_u8; bytes].into_boxed_slice();
    let base = std::ptr::NonNull::new(memory.as_mut_ptr()).unwrap();
    // SAFETY: the box is the region's owner, and nobody else has it.
    unsafe { Region::of_memory(base, bytes, access, memory) }
}

pub(crate) fn config(tls: Option<TlsConfig>) -> EndpointConfig {
    EndpointConfig { tls, ..Default::default() }
}

/// Runs the conformance suite; the client's records are encrypted by `layer`.
pub(crate) fn conforms(client: &TlsConfig, server: &TlsConfig, layer: RecordLayer) {
    conformance::all(&mut || {
        let configs = (config(Some(client.clone())), config(Some(server.clone())));
        let (client, server, local, remote) = conformance::endpoints_of(configs, private);
        // Not the client's address, so that each side waits as for another host.
        let listener = server.listen_tcp("127.0.0.2:0".parse().unwrap()).unwrap();
        let connection = client.connect_tcp(listener.tcp_address().unwrap(), soon()).unwrap();
        assert_eq!(connection.peer().tls, Some(layer));
        let sees_unregistered = true;
        Subject { client, server, listener, connection, local, remote, sees_unregistered }
    });
}
