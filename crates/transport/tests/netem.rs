//! The conformance suite over TCP on a network that loses, delays, reorders, repeats and damages
//! packets: Linux's `netem` on the loopback interface.
//!
//! It needs root and changes the network of the whole host, so that it runs in the virtual machine
//! of `make test-rdma`.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::fs;
use std::process::Command;

use cascade_transport::Region;
use cascade_transport::conformance::{self, Subject, soon};

/// The loopback interface with a discipline, until it is dropped.
struct Impaired;

fn tc(arguments: &[&str]) -> String {
    let output = Command::new("tc").args(arguments).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "tc {arguments:?}: {errors}");
    String::from_utf8(output.stdout).unwrap()
}

impl Impaired {
    fn new(how: &str) -> Self {
        let fixed = ["qdisc", "add", "dev", "lo", "root", "netem"];
        tc(&fixed.into_iter().chain(how.split(' ')).collect::<Vec<_>>());
        Self
    }
}

/// Packets that the discipline dropped.
fn dropped() -> u64 {
    let text = tc(&["-s", "qdisc", "show", "dev", "lo"]);
    let (_, rest) = text.split_once("dropped ").unwrap();
    rest.split(|it: char| !it.is_ascii_digit()).next().unwrap().parse().unwrap()
}

impl Drop for Impaired {
    fn drop(&mut self) {
        tc(&["qdisc", "del", "dev", "lo", "root"]);
    }
}

/// A counter of the kernel's TCP. Other protocols have counters of the same names.
fn counter(name: &str) -> u64 {
    let files =
        ["/proc/net/snmp", "/proc/net/netstat"].map(|file| fs::read_to_string(file).unwrap());
    let is_of_tcp = |line: &&str| line.starts_with("Tcp: ") || line.starts_with("TcpExt: ");
    let lines: Vec<&str> = files.iter().flat_map(|text| text.lines()).filter(is_of_tcp).collect();
    let mut pairs = lines.chunks(2).flat_map(|pair| pair[0].split(' ').zip(pair[1].split(' ')));
    let (_, value) = pairs.find(|(field, _)| *field == name).unwrap();
    value.parse().unwrap()
}

/// Each of the impairments is shown to have happened: TCP sends lost packets again, sorts those
/// that come out of order, drops those that come twice, and those whose checksum is wrong.
#[test]
#[ignore = "changes the network of the host: make test-rdma"]
fn tcp_conforms_over_a_bad_network() {
    let _network =
        Impaired::new("delay 1ms 1ms reorder 10% 50% loss 0.3% duplicate 1% corrupt 0.3%");
    let names = ["TCPOFOQueue", "TCPDSACKOldSent", "InCsumErrors"];
    let before = names.map(counter);
    conformance::all(&mut || {
        let region = |bytes, access| Region::shared(bytes, access).unwrap();
        let (client, server, local, remote) = conformance::endpoints(region);
        // Not the client's address, so that each side waits as for another host.
        let listener = server.listen_tcp("127.0.0.2:0".parse().unwrap()).unwrap();
        let connection = client.connect_tcp(listener.tcp_address().unwrap(), soon()).unwrap();
        let sees_unregistered = true;
        Subject { client, server, listener, connection, local, remote, sees_unregistered }
    });
    assert!(dropped() > 0, "packets were lost");
    for (name, before) in names.into_iter().zip(before) {
        assert!(counter(name) > before, "{name} did not grow");
    }
}
