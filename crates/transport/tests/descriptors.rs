//! A process without free descriptors. Alone in its program, because the limit is the process's.

use std::fs::File;
use std::time::Duration;

use cascade_runtime::{Deadline, SystemClock, sleep};
use cascade_transport::{Endpoint, EndpointConfig};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Descriptors of the process: for its own, the test's and some connections.
const DESCRIPTORS: u64 = 64;
/// How long one attempt to connect waits for the listener.
const ATTEMPT: Duration = Duration::from_secs(1);

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("the kernel lists them").count()
}

/// Connections whose peers are gone are closed although the listener accepts no other one.
/// Otherwise they would hold the last descriptors.
#[test]
fn a_listener_without_descriptors_accepts_again_when_some_are_free() {
    let maximum = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: Some(DESCRIPTORS), maximum }).unwrap();
    let server = Endpoint::new(EndpointConfig::default()).unwrap();
    let listener = server.listen_tcp("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = listener.tcp_address().unwrap();
    let client = Endpoint::new(EndpointConfig::default()).unwrap();
    let connect = || client.connect_tcp(address, Deadline::after(&SystemClock, ATTEMPT));

    let before = open_descriptors();
    drop([(); 5].map(|()| connect().unwrap()));
    let end = Deadline::after(&SystemClock, Duration::from_secs(20));
    while open_descriptors() > before {
        assert!(!end.has_passed(&SystemClock), "{} of {before}", open_descriptors());
        sleep(Duration::from_millis(5));
    }

    // Each has a descriptor at either side.
    let mut connections: Vec<_> = std::iter::from_fn(|| connect().ok()).collect();
    assert!(connections.len() > 10, "{}", connections.len());
    // Some end, and other files take the descriptors of the clients.
    let count = connections.len() / 2;
    drop(connections.drain(..count));
    let _files: Vec<_> = (0..count).map_while(|_| File::open("/dev/null").ok()).collect();

    let end = Deadline::after(&SystemClock, Duration::from_secs(20));
    while let Err(error) = connect() {
        assert!(!end.has_passed(&SystemClock), "{error}");
        sleep(Duration::from_millis(20));
    }
}
