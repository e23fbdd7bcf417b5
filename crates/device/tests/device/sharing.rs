//! Memory of the fake device that several processes map: real processes, and descriptors that they
//! pass over a socket.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::fs::File;
use std::io::{BufRead as _, BufReader, IoSlice, IoSliceMut, Stdin, Write as _, stdin};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use cascade_device::{
    Context, Copier, Copy, CudaError, CudaMemory, CudaMemoryConfig, DeviceAllocation, DeviceUuid,
    Driver, ImportedMemory, ShareableMemory,
};
use cascade_memory::{DeviceMemory as _, Pool};
use cascade_runtime::SystemClock;
use rustix::io::{FdFlags, fcntl_getfd, read, write};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use crate::fake::{
    self, assert_nothing_left, command, context, context_on, count, empty, finish, hold, is_child,
    pattern, piece, pool, registered, release, slab, soon,
};

const MIB: usize = 1 << 20;

/// A process's access to memory of the device.
struct Side {
    context: Arc<Context>,
    pool: Pool,
    copier: Copier,
}

impl Side {
    fn new() -> Self {
        let (context, pool) = (context(), pool(4 * MIB));
        let copier = Copier::new(&context, registered(&context, &pool, MIB)).unwrap();
        Self { context, pool, copier }
    }

    fn write(&self, memory: &Arc<DeviceAllocation>, offset: usize, bytes: &[u8]) {
        let target = piece(memory, offset, bytes.len());
        let copy = Copy::ToDevice { source: slab(&self.pool, bytes), target };
        self.copier.submit(vec![copy], None).unwrap().wait(soon()).unwrap();
    }

    fn read(&self, memory: &Arc<DeviceAllocation>, offset: usize, bytes: usize) -> Vec<u8> {
        let target = empty(&self.pool, bytes);
        let copy = Copy::ToHost { source: piece(memory, offset, bytes), target };
        let copies = self.copier.submit(vec![copy], None).unwrap().wait(soon()).unwrap().unwrap();
        let [Copy::ToHost { target, .. }] = &copies[..] else { panic!("{copies:?}") };
        target.to_vec()
    }
}

/// Sends all that another process needs. No descriptor is left here.
fn send(socket: &Stdin, memory: &ShareableMemory) {
    let bytes = u64::try_from(memory.memory().bytes()).unwrap().to_le_bytes();
    let device = memory.device().bytes();
    let descriptor = memory.export().unwrap();
    assert!(fcntl_getfd(&descriptor).unwrap().contains(FdFlags::CLOEXEC));
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = [descriptor.as_fd()];
    assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
    let message = [IoSlice::new(&bytes), IoSlice::new(&device)];
    let sent = sendmsg(socket, &message, &mut control, SendFlags::NOSIGNAL).unwrap();
    assert_eq!(sent, 24);
}

fn receive(socket: &Stdin) -> (OwnedFd, usize, DeviceUuid) {
    let (mut bytes, mut device) = ([0; 8], [0; 16]);
    let mut message = [IoSliceMut::new(&mut bytes), IoSliceMut::new(&mut device)];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = recvmsg(socket, &mut message, &mut control, RecvFlags::CMSG_CLOEXEC).unwrap();
    assert_eq!(received.bytes, 24);
    let descriptor = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    let bytes = usize::try_from(u64::from_le_bytes(bytes)).unwrap();
    (descriptor.unwrap(), bytes, DeviceUuid::from_bytes(device))
}

fn import(side: &Side, socket: &Stdin) -> ImportedMemory {
    let (descriptor, bytes, device) = receive(socket);
    ImportedMemory::open(&side.context, descriptor, bytes, device).unwrap()
}

/// Waits for the other process; false if it has ended.
fn next_step(socket: &Stdin) -> bool {
    read(socket, &mut [0; 1]).unwrap() == 1
}

fn take_step(socket: &Stdin) {
    assert_eq!(write(socket, &[1]).unwrap(), 1);
}

/// An owner and a user, connected by their standard input.
fn start(owner: &str, user: &str) -> [std::process::Child; 2] {
    let (left, right) = UnixStream::pair().unwrap();
    [(owner, left), (user, right)]
        .map(|(test, end)| command(test, &[]).stdin(OwnedFd::from(end)).spawn().unwrap())
}

fn is_started(test: &str) -> bool {
    fake::variable("FAKE_CUDA_TEST").as_deref() == Some(test)
}

#[test]
fn two_processes_read_what_the_other_wrote_and_the_last_one_frees_it() {
    for child in start("own_memory_in_a_child", "use_memory_in_a_child") {
        let (succeeded, text) = finish(child);
        assert!(succeeded, "{text}");
    }
}

#[test]
fn own_memory_in_a_child() {
    if !is_started("own_memory_in_a_child") {
        return;
    }
    let (side, socket) = (Side::new(), stdin());
    let owned = ShareableMemory::new(&side.context, 3 * MIB).unwrap();
    assert_eq!(owned.memory().bytes(), 4 * MIB, "in pieces of 2 MiB");
    side.write(owned.memory(), 0, &pattern(1, MIB));
    side.write(owned.memory(), 4 * MIB - 1000, &pattern(2, 1000));
    send(&socket, &owned);
    assert!(next_step(&socket));
    assert!(side.read(owned.memory(), 2 * MIB, MIB) == pattern(3, MIB), "written by the other");
    side.write(owned.memory(), MIB, &pattern(4, MIB));
    // The other process goes on with it.
    drop((owned, side));
    assert_nothing_left();
    take_step(&socket);
    assert!(!next_step(&socket));
}

#[test]
fn use_memory_in_a_child() {
    if !is_started("use_memory_in_a_child") {
        return;
    }
    let (side, socket) = (Side::new(), stdin());
    let used = import(&side, &socket);
    assert!(side.read(used.memory(), 0, MIB) == pattern(1, MIB), "written by the other");
    assert!(side.read(used.memory(), 4 * MIB - 1000, 1000) == pattern(2, 1000));
    side.write(used.memory(), 2 * MIB, &pattern(3, MIB));
    take_step(&socket);
    assert!(next_step(&socket));
    let all = [pattern(1, MIB), pattern(4, MIB), pattern(3, MIB)];
    for (at, bytes) in all.iter().enumerate() {
        assert!(side.read(used.memory(), at * MIB, MIB) == *bytes, "{at}: its owner has freed it");
    }
    drop((used, side));
    assert_nothing_left();
}

/// The user has a copy in flight when the owner is killed.
#[test]
fn a_process_goes_on_with_memory_whose_owner_was_killed() {
    let [mut owner, mut user] = start("own_memory_until_killed", "use_memory_of_a_killed_owner");
    // Kept open, since the child says more at its end.
    let mut output = BufReader::new(user.stdout.take().unwrap()).lines().map_while(Result::ok);
    assert!(output.any(|line| line.contains("mapped")), "{:?}", finish(user));
    owner.kill().unwrap();
    owner.wait().unwrap();
    let (succeeded, text) = finish(user);
    assert!(succeeded, "{text}");
}

#[test]
fn an_owner_goes_on_when_a_process_that_uses_its_memory_was_killed() {
    let [owner, mut user] = start("own_memory_of_a_killed_user", "use_memory_until_killed");
    let mut output = BufReader::new(user.stdout.take().unwrap()).lines().map_while(Result::ok);
    assert!(output.any(|line| line.contains("mapped")), "{:?}", finish(owner));
    user.kill().unwrap();
    user.wait().unwrap();
    let (succeeded, text) = finish(owner);
    assert!(succeeded, "{text}");
}

#[test]
fn own_memory_of_a_killed_user() {
    if !is_started("own_memory_of_a_killed_user") {
        return;
    }
    let (side, socket) = (Side::new(), stdin());
    let owned = ShareableMemory::new(&side.context, 4 * MIB).unwrap();
    side.write(owned.memory(), MIB, &pattern(1, MIB));
    send(&socket, &owned);
    assert!(!next_step(&socket), "the user has ended");
    assert!(side.read(owned.memory(), MIB, MIB) == pattern(1, MIB));
    drop((owned, side));
    assert_nothing_left();
}

#[test]
fn use_memory_until_killed() {
    if !is_started("use_memory_until_killed") {
        return;
    }
    let (side, socket) = (Side::new(), stdin());
    let used = import(&side, &socket);
    hold("cuMemcpyHtoDAsync_v2");
    let source = slab(&side.pool, &pattern(2, MIB));
    let copy = Copy::ToDevice { source, target: piece(used.memory(), 0, MIB) };
    let _in_flight = side.copier.submit(vec![copy], None).unwrap();
    say_mapped();
    assert!(next_step(&socket), "it is killed before");
}

fn say_mapped() {
    let mut out = std::io::stdout().lock();
    writeln!(out, "\nmapped").and_then(|()| out.flush()).unwrap();
}

#[test]
fn own_memory_until_killed() {
    if !is_started("own_memory_until_killed") {
        return;
    }
    let (side, socket) = (Side::new(), stdin());
    let owned = ShareableMemory::new(&side.context, 4 * MIB).unwrap();
    side.write(owned.memory(), MIB, &pattern(1, MIB));
    send(&socket, &owned);
    assert!(next_step(&socket), "it is killed before");
}

#[test]
fn use_memory_of_a_killed_owner() {
    if !is_started("use_memory_of_a_killed_owner") {
        return;
    }
    let (side, socket) = (Side::new(), stdin());
    let used = import(&side, &socket);
    hold("cuMemcpyDtoHAsync_v2");
    let target = empty(&side.pool, MIB);
    let copy = Copy::ToHost { source: piece(used.memory(), MIB, MIB), target };
    let mut in_flight = side.copier.submit(vec![copy], None).unwrap();
    say_mapped();
    assert!(!next_step(&socket), "the owner has ended");
    release();
    let copies = in_flight.wait(soon()).unwrap().unwrap();
    let [Copy::ToHost { target, .. }] = &copies[..] else { panic!("{copies:?}") };
    assert!(target[..] == pattern(1, MIB), "a copy in flight when the owner was killed");
    // Copies hold the memory, and the copier, as `used` and `side` do.
    drop((copies, in_flight));
    assert!(side.read(used.memory(), MIB, MIB) == pattern(1, MIB));
    side.write(used.memory(), 0, &pattern(2, MIB));
    assert!(side.read(used.memory(), 0, MIB) == pattern(2, MIB));
    drop((used, side));
    assert_nothing_left();
}

#[test]
fn what_is_no_exported_memory_is_refused() {
    if !is_child("what_is_no_exported_memory_is_refused", &[]) {
        return;
    }
    let context = context();
    let device = context.device_uuid().unwrap();
    let (socket, _other) = UnixStream::pair().unwrap();
    let memfd = rustix::fs::memfd_create("cascade", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let file = tempfile::tempfile().unwrap();
    file.set_len(4 << 20).unwrap();
    let others: [OwnedFd; 4] =
        [File::open("/dev/null").unwrap().into(), file.into(), socket.into(), memfd];
    for descriptor in others {
        let name = format!("{descriptor:?}");
        let opened = ImportedMemory::open(&context, descriptor, 4 * MIB, device);
        assert!(matches!(opened, Err(CudaError::NotExported { .. })), "{name}: {opened:?}");
    }
    drop(context);
    assert_nothing_left();
}

#[test]
fn another_length_is_refused() {
    if !is_child("another_length_is_refused", &[]) {
        return;
    }
    let context = context();
    let owned = ShareableMemory::new(&context, 4 * MIB).unwrap();
    let live = count("live");
    let lengths = [0, 1, MIB, 2 * MIB, 4 * MIB - 1, 5 * MIB, 6 * MIB, 64 * MIB, usize::MAX];
    for bytes in lengths {
        let opened = ImportedMemory::open(&context, owned.export().unwrap(), bytes, owned.device());
        assert!(matches!(opened, Err(CudaError::OtherLength { .. })), "{bytes}: {opened:?}");
        assert_eq!(count("live"), live, "{bytes}");
    }
    let opened = ImportedMemory::open(&context, owned.export().unwrap(), 4 * MIB, owned.device());
    assert_eq!(opened.unwrap().memory().bytes(), 4 * MIB);
    assert_eq!(count("live"), live);
}

#[test]
fn another_device_is_refused() {
    if !is_child("another_device_is_refused", &[("FAKE_CUDA_DEVICES", "2")]) {
        return;
    }
    let (first, second) = (context(), context_on(1));
    let owned = ShareableMemory::new(&first, 2 * MIB).unwrap();
    let [on_first, on_second] = [&first, &second].map(|it| it.device_uuid().unwrap());
    assert_eq!(owned.device(), on_first);
    assert_ne!(on_first, on_second);
    let live = count("live");
    let open = |context, device| {
        ImportedMemory::open(context, owned.export().unwrap(), 2 * MIB, device).expect_err("other")
    };
    for (context, device) in [(&second, on_first), (&first, on_second)] {
        let error = open(context, device);
        assert!(matches!(error, CudaError::OtherDevice { .. }), "{error}");
    }
    // An owner that says something false: the driver refuses.
    let error = open(&second, on_second);
    assert!(matches!(&error, CudaError::Call(error) if error.call == "cuMemSetAccess"), "{error}");
    assert_eq!(count("live"), live);
}

#[test]
fn a_device_that_shares_no_memory_says_what_it_lacks() {
    let lacks = [("102=0", "virtual memory management"), ("103=0", "file descriptors of memory")];
    for (attribute, reason) in lacks {
        let variables = [("FAKE_CUDA_ATTRIBUTE", attribute), ("EXPECTED_REASON", reason)];
        let (succeeded, text) =
            finish(command("share_none_in_a_child", &variables).spawn().unwrap());
        assert!(succeeded, "{attribute}: {text}");
    }
}

#[test]
fn share_none_in_a_child() {
    let Some(reason) = fake::variable("EXPECTED_REASON") else { return };
    let (context, device) = (context(), DeviceUuid::from_bytes([0xfa; 16]));
    let file = File::open("/dev/null").unwrap().into();
    let refusals = [
        ShareableMemory::new(&context, MIB).expect_err("no support"),
        ImportedMemory::open(&context, file, 2 * MIB, device).expect_err("no support"),
    ];
    for error in refusals {
        let text = error.to_string();
        assert!(text.contains(&reason) && text.contains("host memory"), "{text}");
    }
    // Memory that is not shared works.
    let memory = CudaMemory::new(context.driver(), &CudaMemoryConfig::new(MIB), clock()).unwrap();
    memory.copy_in(0, &[1; 100]).unwrap();
}

fn clock() -> Arc<SystemClock> {
    Arc::new(SystemClock)
}

#[test]
fn more_than_the_device_has_is_refused() {
    if !is_child("more_than_the_device_has_is_refused", &[("FAKE_CUDA_BYTES", "4194304")]) {
        return;
    }
    let context = context();
    for bytes in [5 * MIB, usize::MAX] {
        ShareableMemory::new(&context, bytes).expect_err("too much");
    }
    let all = ShareableMemory::new(&context, 4 * MIB).unwrap();
    let error = ShareableMemory::new(&context, 1).expect_err("all is taken");
    assert!(matches!(&error, CudaError::Call(it) if it.call == "cuMemCreate"), "{error}");
    drop(all);
    drop(ShareableMemory::new(&context, 4 * MIB).unwrap());
    drop(context);
    assert_nothing_left();
}

/// `cuMemUnmap` waits for no copy, so the memory has to live until its copies are over.
#[test]
fn memory_is_unmapped_after_its_copies() {
    if !is_child("memory_is_unmapped_after_its_copies", &[]) {
        return;
    }
    let side = Side::new();
    let owned = ShareableMemory::new(&side.context, 2 * MIB).unwrap();
    let (descriptor, device) = (owned.export().unwrap(), owned.device());
    let used = ImportedMemory::open(&side.context, descriptor, 2 * MIB, device).unwrap();
    let unmapped = count("cuMemUnmap");
    hold("cuMemcpyHtoDAsync_v2");
    let copies = [owned.memory(), used.memory()].map(|memory| {
        let source = slab(&side.pool, &pattern(1, 1000));
        let copy = Copy::ToDevice { source, target: piece(memory, 0, 1000) };
        side.copier.submit(vec![copy], None).unwrap()
    });
    drop((owned, used));
    assert_eq!(count("cuMemUnmap"), unmapped, "copies are in flight");
    release();
    for mut copy in copies {
        copy.wait(soon()).unwrap();
    }
    assert_eq!(count("cuMemUnmap"), unmapped + 2);
    let driver = Arc::clone(side.context.driver());
    drop(side);
    assert_nothing_left();
    assert_eq!(driver.failed_releases(), 0, "each is released once, in an order that is allowed");
}

/// No call reaches the driver after the context was lost: it may hang.
#[test]
fn a_lost_context_shares_nothing_and_releases_nothing() {
    let dies = [("FAKE_CUDA_FAIL", "cuMemSetAccess=700@3")];
    if !is_child("a_lost_context_shares_nothing_and_releases_nothing", &dies) {
        return;
    }
    let context = context();
    let owned = ShareableMemory::new(&context, 2 * MIB).unwrap();
    let (descriptor, device) = (owned.export().unwrap(), owned.device());
    let spare = descriptor.try_clone().unwrap();
    let used = ImportedMemory::open(&context, descriptor, 2 * MIB, device).unwrap();
    let lost = ShareableMemory::new(&context, 2 * MIB).expect_err("the third one is fatal");
    assert!(lost.is_fatal(), "{lost}");
    let functions = ["cuDeviceGetAttribute", "cuDeviceGetUuid_v2", "cuMemCreate", "cuMemUnmap"];
    let calls = functions.map(count);
    let errors = [
        ShareableMemory::new(&context, 2 * MIB).expect_err("lost"),
        ImportedMemory::open(&context, spare, 2 * MIB, device).expect_err("lost"),
        owned.export().expect_err("lost"),
    ];
    drop((owned, used));
    for error in errors {
        assert!(matches!(error, CudaError::Poisoned { .. }), "{error}");
    }
    assert_eq!(functions.map(count), calls);
}

/// The memory of a store, as another process sees it.
#[test]
fn the_memory_of_a_store_is_mapped_by_others() {
    if !is_child("the_memory_of_a_store_is_mapped_by_others", &[]) {
        return;
    }
    let driver = Driver::load().unwrap();
    let plain = CudaMemory::new(&driver, &CudaMemoryConfig::new(MIB), clock()).unwrap();
    assert!(plain.shareable().is_none());
    let config = CudaMemoryConfig { shareable: true, ..CudaMemoryConfig::new(MIB) };
    let memory = CudaMemory::new(&driver, &config, clock()).unwrap();
    assert_eq!(memory.bytes(), 2 * MIB);
    memory.copy_in(5, &pattern(1, 1000)).unwrap();
    let shareable = memory.shareable().unwrap();
    let side = Side::new();
    let (descriptor, device) = (shareable.export().unwrap(), shareable.device());
    let used = ImportedMemory::open(&side.context, descriptor, 2 * MIB, device).unwrap();
    assert!(side.read(used.memory(), 5, 1000) == pattern(1, 1000));
    side.write(used.memory(), MIB, &pattern(2, 1000));
    let mut bytes = vec![0; 1000];
    memory.copy_out(MIB, &mut bytes).unwrap();
    assert!(bytes == pattern(2, 1000));
    drop((plain, memory, used, side));
    assert_nothing_left();
}
