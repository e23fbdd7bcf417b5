//! What a device refuses, and how a link fails.

use cascade_transport::verbs::{
    Link, Move, OpenLink, Posted, RemoteMemory, Status, VerbsError, VerbsSettings,
};
use cascade_transport::{Access, Direction};

use super::buffer::{BOTH, Buffer};
use super::{device, pair, soon};

fn write(
    link: &Link,
    local: &Buffer,
    remote: &RemoteMemory,
    at: u64,
    bytes: u32,
) -> Result<Posted, VerbsError> {
    let item = Move::new(Direction::Write, (&local.memory, 0), (remote, at), bytes)?;
    link.post(Direction::Write, [item].into_iter(), &[], soon())
}

/// The description that a peer would send if it said something else of its memory.
fn forged(of: &RemoteMemory, at: usize, byte: u8) -> RemoteMemory {
    let mut bytes = of.to_bytes();
    bytes[at] = byte;
    let sum = cascade_block::checksum(&bytes[..32]).to_le_bytes();
    bytes[32..].copy_from_slice(&sum);
    RemoteMemory::from_bytes(&bytes).unwrap()
}

fn is_remote_access(error: &VerbsError) -> bool {
    matches!(error, VerbsError::Request { status: Status::REMOTE_ACCESS, .. })
}

#[test]
#[ignore = "needs a verbs device: make test-rdma"]
fn places_outside_of_the_peers_memory_are_refused() {
    let device = device(&VerbsSettings::default());
    let (link, _other) = pair(&device);
    let (local, remote) = (Buffer::new(&device, 8192, BOTH), Buffer::new(&device, 4096, BOTH));
    let description = remote.memory.remote();
    // This side looks first, and the link stays usable.
    let refused = write(&link, &local, &description, 4090, 7).unwrap_err();
    assert!(matches!(refused, VerbsError::OutOfBounds { offset: 4090, .. }), "{refused}");
    link.wait(&write(&link, &local, &description, 4090, 6).unwrap(), soon()).unwrap();
    // A peer that says that its memory is longer: its device refuses.
    let longer = forged(&description, 18, 1);
    assert_eq!(longer.bytes(), 4096 + (1 << 16));
    let posted = write(&link, &local, &longer, 4090, 7).unwrap();
    let refused = link.wait(&posted, soon()).unwrap_err();
    assert!(is_remote_access(&refused), "{refused}");
    assert!(!link.is_open());
    let after = write(&link, &local, &description, 0, 1).unwrap_err();
    assert!(is_remote_access(&after), "the first error stays: {after}");
}

#[test]
#[ignore = "needs a verbs device: make test-rdma"]
fn memory_that_may_only_be_read_is_not_written() {
    let device = device(&VerbsSettings::default());
    let (link, _other) = pair(&device);
    let access = Access { read: true, write: false };
    let (local, remote) = (Buffer::new(&device, 4096, BOTH), Buffer::new(&device, 4096, access));
    let description = remote.memory.remote();
    let refused = write(&link, &local, &description, 0, 8).unwrap_err();
    assert_eq!(refused, VerbsError::NotAllowed("write"));
    let posted = write(&link, &local, &forged(&description, 28, 3), 0, 8).unwrap();
    let refused = link.wait(&posted, soon()).unwrap_err();
    assert!(is_remote_access(&refused), "{refused}");
    assert!(remote.bytes().iter().all(|byte| *byte == 0));
}

#[test]
#[ignore = "needs a verbs device: make test-rdma"]
fn memory_that_is_no_longer_registered_is_not_written() {
    let device = device(&VerbsSettings::default());
    let (link, _other) = pair(&device);
    let (local, remote) = (Buffer::new(&device, 4096, BOTH), Buffer::new(&device, 4096, BOTH));
    let description = remote.memory.remote();
    drop(remote);
    let posted = write(&link, &local, &description, 0, 8).unwrap();
    let refused = link.wait(&posted, soon()).unwrap_err();
    assert!(is_remote_access(&refused), "{refused}");
}

#[test]
#[ignore = "needs a verbs device: make test-rdma"]
fn a_closed_link_takes_no_batch() {
    let device = device(&VerbsSettings::default());
    let (link, _other) = pair(&device);
    let (local, remote) = (Buffer::new(&device, 4096, BOTH), Buffer::new(&device, 4096, BOTH));
    link.close();
    let refused = write(&link, &local, &remote.memory.remote(), 0, 8).unwrap_err();
    assert_eq!(refused, VerbsError::Closed);
}

#[test]
#[ignore = "needs a verbs device: make test-rdma"]
fn links_with_different_numbers_of_queue_pairs_do_not_connect() {
    let one = OpenLink::open(&device(&VerbsSettings::default())).unwrap();
    let settings = VerbsSettings { queue_pairs: 1, ..VerbsSettings::default() };
    let other = OpenLink::open(&device(&settings)).unwrap();
    let refused = one.connect(&other.address()).unwrap_err();
    assert!(refused.to_string().contains("queue_pairs"), "{refused}");
}
