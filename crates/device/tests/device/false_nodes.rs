//! Clients of a false node whose welcome says something wrong about memory of a device: they refuse
//! it, release what they took, and never crash.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::fs::File;
use std::io::{IoSlice, Read as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use cascade_client::{Client, ConnectOptions};
use cascade_device::{CudaImporter, CudaMemory, CudaMemoryConfig, ShareableMemory};
use cascade_memory::{DeviceImporter, DeviceMemory as _};
use cascade_runtime::{SystemClock, yield_now};
use cascade_tier::StoreError;
use cascade_wire::{Answer, VERSION, Welcome};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use crate::fake::{self, assert_nothing_left, context, count, is_child, soon};

const MIB: usize = 1 << 20;
/// Length of the memory.
const BYTES: usize = 4 * MIB;
/// The device that it is on, and the other one of the host.
const DEVICE: [u8; 16] = [0xfa; 16];
const SECOND: [u8; 16] = *b"\xfa\xfa\xfa\xfa\xfa\xfa\xfa\xfa\xfa\xfa\xfa\xfa\xfa\xfa\xfa\xfb";

fn welcome() -> Welcome {
    Welcome {
        version: VERSION,
        epoch: 1,
        session: [7; 16],
        pool_bytes: BYTES as u64,
        hold_bytes_max: BYTES as u64,
        timeout_ms: 1000,
        writes_through: false,
        tiers: vec!["hbm".to_owned()],
        tenant: "default".to_owned(),
        node_version: "0".to_owned(),
        device: Some(DEVICE),
    }
}

fn frame(welcome: Welcome) -> Vec<u8> {
    let mut frame = Vec::new();
    Answer::Welcome(welcome).write(&mut frame, 1);
    frame
}

/// Answers the first call of a connection with these bytes and this descriptor.
fn answer(stream: &mut UnixStream, message: &[u8], descriptor: Option<&OwnedFd>) {
    // The hello is one write of less than this.
    assert!(stream.read(&mut [0; 4096]).unwrap() > 0);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptor = descriptor.map(|descriptor| [descriptor.as_fd()]);
    if let Some(descriptor) = &descriptor {
        assert!(control.push(SendAncillaryMessage::ScmRights(descriptor)));
    }
    let sent = sendmsg(&*stream, &[IoSlice::new(message)], &mut control, SendFlags::NOSIGNAL);
    assert_eq!(sent.unwrap(), message.len());
}

/// What a client says to a welcome.
fn connect(
    socket: &Path,
    listener: &UnixListener,
    message: &[u8],
    descriptor: Option<OwnedFd>,
    importer: &Arc<CudaImporter>,
) -> Result<Client, StoreError> {
    std::thread::scope(|scope| {
        scope.spawn(move || {
            answer(&mut listener.accept().unwrap().0, message, descriptor.as_ref());
        });
        let devices = Some(Arc::clone(importer) as Arc<dyn DeviceImporter>);
        let timeout = Duration::from_secs(30);
        Client::connect(ConnectOptions { devices, timeout, ..ConnectOptions::new(socket) })
    })
}

fn memfd(bytes: usize) -> OwnedFd {
    let file = File::from(memfd_create("cascade-pool", MemfdFlags::CLOEXEC).unwrap());
    file.set_len(bytes as u64).unwrap();
    file.into()
}

#[test]
fn a_wrong_welcome_is_refused() {
    let devices = [("FAKE_CUDA_DEVICES", "2")];
    if !is_child("a_wrong_welcome_is_refused", &devices) {
        return;
    }
    let context = context();
    let config = CudaMemoryConfig { shareable: true, ..CudaMemoryConfig::new(BYTES) };
    let owner = CudaMemory::new(context.driver(), &config, Arc::new(SystemClock)).unwrap();
    let shared = owner.shareable().unwrap();
    assert_eq!((shared.device().bytes(), owner.bytes()), (DEVICE, BYTES));
    let other = ShareableMemory::new(&context, 2 * BYTES).unwrap();
    let of_second = ShareableMemory::new(&fake::context_on(1), BYTES).unwrap();
    let importer = Arc::new(CudaImporter::new(&context));
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("node.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let live = count("live");
    let own = || Some(shared.export().unwrap());
    let of_length = |bytes: usize| Welcome { pool_bytes: bytes as u64, ..welcome() };
    let on = |device| Welcome { device, ..welcome() };
    let wrong: Vec<(&str, Welcome, Option<OwnedFd>)> = vec![
        ("no descriptor", welcome(), None),
        ("half of the length", of_length(BYTES / 2), own()),
        ("a longer one", of_length(2 * BYTES), own()),
        ("a byte less", of_length(BYTES - 1), own()),
        ("no length", of_length(0), own()),
        ("all addresses", of_length(usize::MAX), own()),
        ("another device of this host", on(Some(SECOND)), own()),
        ("memory of another device", welcome(), Some(of_second.export().unwrap())),
        ("memory of another length", welcome(), Some(other.export().unwrap())),
        ("host memory", welcome(), Some(memfd(BYTES))),
        ("a device without memory", welcome(), Some(File::open("/dev/null").unwrap().into())),
        ("a socket", welcome(), Some(UnixStream::pair().unwrap().0.into())),
        ("no device, and a short file", on(None), Some(memfd(BYTES / 2))),
        ("no device, and no file", on(None), Some(File::open("/dev/null").unwrap().into())),
    ];
    for (name, welcome, descriptor) in wrong {
        let refused = connect(&socket, &listener, &frame(welcome), descriptor, &importer);
        assert!(refused.is_err(), "{name}: it was mapped");
        drop(refused);
        assert_eq!(count("live"), live, "{name}");
    }
    // A device that this process does not see: the driver decides by the descriptor alone.
    for right in [welcome(), on(Some([1; 16]))] {
        let client = connect(&socket, &listener, &frame(right), own(), &importer).unwrap();
        assert!(count("live") > live);
        drop(client);
        let end = soon();
        while count("live") > live && !end.has_passed(&SystemClock) {
            yield_now();
        }
        assert_eq!(count("live"), live, "the pool is unmapped with its client");
    }
    drop((owner, other, of_second, importer, context));
    assert_nothing_left();
}

/// Each byte of the message, and each shorter message. The checksum of the frame finds them.
#[test]
fn a_flipped_byte_of_a_welcome_is_refused() {
    if !is_child("a_flipped_byte_of_a_welcome_is_refused", &[]) {
        return;
    }
    let context = context();
    let config = CudaMemoryConfig { shareable: true, ..CudaMemoryConfig::new(BYTES) };
    let owner = CudaMemory::new(context.driver(), &config, Arc::new(SystemClock)).unwrap();
    let importer = Arc::new(CudaImporter::new(&context));
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("node.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let live = count("live");
    let right = frame(welcome());
    let flipped = (0..right.len()).map(|at| {
        let mut message = right.clone();
        message[at] ^= 1 << (at % 8);
        message
    });
    let shorter = (1..right.len()).map(|length| right[..length].to_vec());
    for message in flipped.chain(shorter) {
        let descriptor = Some(owner.shareable().unwrap().export().unwrap());
        let refused = connect(&socket, &listener, &message, descriptor, &importer);
        assert!(refused.is_err(), "{message:?}: it was mapped");
        drop(refused);
        assert_eq!(count("live"), live, "{message:?}");
    }
}
