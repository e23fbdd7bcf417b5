//! TLS by the kernel. `make test-rdma` runs these tests in a virtual machine whose kernel has
//! the module `tls`; elsewhere they print why they were skipped.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::io::Write as _;
use std::sync::Arc;

use cascade_transport::conformance::{self, soon};
use cascade_transport::{
    Batch, Connection, Direction, Endpoint, Listener, Piece, Place, RecordLayer, TlsConfig,
};

use crate::tls::authority::Authority;
use crate::tls::faults;
use crate::tls::subject::{config, conforms, private};

/// A server and a connection to it. Both must be kept.
fn connected(tls: &TlsConfig) -> (Listener, Arc<dyn Connection>) {
    let endpoint = || Endpoint::new(config(Some(tls.clone()))).unwrap();
    let listener = endpoint().listen_tcp("127.0.0.1:0".parse().unwrap()).unwrap();
    let connection = endpoint().connect_tcp(listener.tcp_address().unwrap(), soon()).unwrap();
    (listener, connection)
}

/// Whether this kernel encrypts; says so if it does not.
fn has_kernel_tls() -> bool {
    let (_listener, connection) = connected(&Authority::new().config("both"));
    let is_there = connection.peer().tls == Some(RecordLayer::Kernel);
    if !is_there {
        let mut out = std::io::stdout();
        writeln!(out, "skipped: this kernel does no TLS (modprobe tls)").unwrap();
    }
    is_there
}

/// Whether QEMU emulates the processor; says so if it does. One run of the suite takes minutes on
/// it, so that only the one in which the kernel encrypts for both sides is made.
fn is_emulated() -> bool {
    let is_emulated = std::fs::read_to_string("/proc/cpuinfo").unwrap().contains("QEMU TCG");
    if is_emulated {
        let mut out = std::io::stdout();
        writeln!(out, "skipped: on an emulated processor only kernel_tls_conforms is run").unwrap();
    }
    is_emulated
}

/// By which side the kernel encrypts: client, server.
fn conforms_with(kernel_of_client: bool, kernel_of_server: bool) {
    if !has_kernel_tls() {
        return;
    }
    let authority = Authority::new();
    let tls = |file, kernel| TlsConfig { kernel, ..authority.config(file) };
    let layer = if kernel_of_client { RecordLayer::Kernel } else { RecordLayer::Userspace };
    conforms(&tls("client", kernel_of_client), &tls("server", kernel_of_server), layer);
}

#[test]
#[ignore = "needs TLS in the kernel: make test-rdma"]
fn kernel_tls_conforms() {
    conforms_with(true, true);
}

#[test]
#[ignore = "needs TLS in the kernel: make test-rdma"]
fn kernel_tls_conforms_with_a_server_that_does_without() {
    if !is_emulated() {
        conforms_with(true, false);
    }
}

#[test]
#[ignore = "needs TLS in the kernel: make test-rdma"]
fn kernel_tls_conforms_with_a_client_that_does_without() {
    if !is_emulated() {
        conforms_with(false, true);
    }
}

/// The kernel cannot replace a key: no new batch is started when it is nearly used up, and nothing
/// is sent with it when it is.
#[test]
#[ignore = "needs TLS in the kernel: make test-rdma"]
fn a_connection_ends_before_its_key_is_used_up() {
    if !has_kernel_tls() {
        return;
    }
    let authority = Authority::new();
    let tls = TlsConfig { key_records_max: 400, ..authority.config("both") };
    let configs = (config(Some(tls.clone())), config(Some(tls)));
    let (client, server, local, remote) = conformance::endpoints_of(configs, private);
    let listener = server.listen_tcp("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = listener.tcp_address().unwrap();
    let place = |region| Place { region, offset: 0 };
    let pieces = [Piece { local: place(local[0]), remote: place(remote[0]), bytes: 1 << 16 }];
    let batch = Batch { direction: Direction::Write, pieces: &pieces, notice: None };
    for _ in 0..2 {
        let connection = client.connect_tcp(address, soon()).unwrap();
        let mut batches = 0;
        while connection.is_open() {
            connection.post(&batch, soon()).unwrap().wait(soon()).unwrap();
            batches += 1;
        }
        assert!((20..120).contains(&batches), "{batches} batches of 4 or 5 records each");
        // A caller that goes on all the same.
        let error = loop {
            let sent = connection.post(&batch, soon()).and_then(|mut it| it.wait(soon()));
            if let Err(error) = sent {
                break error;
            }
        };
        assert!(error.to_string().contains("its key is used up"), "{error}");
    }
}

/// A peer that encrypts by itself replaces its key, which the kernel does not follow.
#[test]
#[ignore = "needs TLS in the kernel: make test-rdma"]
fn a_replaced_key_is_an_error_that_says_so() {
    if !has_kernel_tls() {
        return;
    }
    let authority = Authority::new();
    let server = TlsConfig { kernel: false, key_records_max: 70, ..authority.config("server") };
    let configs = (config(Some(authority.config("client"))), config(Some(server)));
    let (client, server, local, remote) = conformance::endpoints_of(configs, private);
    let listener = server.listen_tcp("127.0.0.1:0".parse().unwrap()).unwrap();
    let connection = client.connect_tcp(listener.tcp_address().unwrap(), soon()).unwrap();
    let place = |region| Place { region, offset: 0 };
    let pieces = [Piece { local: place(local[0]), remote: place(remote[0]), bytes: 1 << 20 }];
    let batch = Batch { direction: Direction::Read, pieces: &pieces, notice: None };
    let error = connection.post(&batch, soon()).and_then(|mut it| it.wait(soon())).unwrap_err();
    assert!(error.to_string().contains("replaced its key"), "{error}");
    assert!(!connection.is_open());
}

#[test]
#[ignore = "needs TLS in the kernel: make test-rdma"]
fn no_flipped_bit_is_taken_for_success() {
    if has_kernel_tls() {
        faults::no_flipped_bit_is_taken_for_success(true);
    }
}

#[test]
#[ignore = "needs TLS in the kernel: make test-rdma"]
fn a_cut_stream_is_an_error_and_no_silent_end() {
    if has_kernel_tls() {
        faults::a_cut_stream_is_an_error_and_no_silent_end(true);
    }
}

#[test]
#[ignore = "needs TLS in the kernel: make test-rdma"]
fn a_frozen_peer_holds_nobody_beyond_the_deadline() {
    if has_kernel_tls() {
        faults::a_frozen_peer_holds_nobody_beyond_the_deadline(true);
    }
}

#[test]
#[ignore = "needs TLS in the kernel: make test-rdma"]
fn bytes_that_arrive_one_by_one_arrive() {
    if has_kernel_tls() {
        faults::bytes_that_arrive_one_by_one_arrive(true);
    }
}

#[test]
#[ignore = "needs TLS in the kernel: make test-rdma"]
fn a_peer_that_sends_byte_by_byte_holds_nobody_for_ever() {
    if has_kernel_tls() {
        faults::a_peer_that_sends_byte_by_byte_holds_nobody_for_ever(true);
    }
}
