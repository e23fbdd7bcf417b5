//! Tests of memory of GPUs, over the stand-in for libibverbs: files stand for the memory, in one
//! test those of the fake CUDA driver. No GPU is used.
#![expect(unsafe_code, reason = "makes regions of memory of its own")]

use std::fs::File;
use std::os::fd::{FromRawFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use cascade_device::{CudaMemory, CudaMemoryConfig, Driver};
use cascade_memory::{DeviceMemory as _, DmaBuf};
use cascade_runtime::SystemClock;

use super::abi::{OPERATION_READ, OPERATION_WRITE};
use super::device::Device;
use super::fake;
use super::settings::{Flush, VerbsSettings};
use crate::conformance::soon;
use crate::{
    Access, Batch, Connection, Direction, Endpoint, EndpointConfig, Listener, Piece, Place,
    Refusal, Region, RegionId, TransportError,
};

const BYTES: usize = 1 << 16;
/// Addresses that nothing of this process has.
const GPU_ADDRESS: u64 = 0x7000_0000_0000_0000;

/// A file that stands for memory of GPU number `gpu`.
fn memory() -> File {
    // SAFETY: takes a string.
    let descriptor = unsafe { libc::memfd_create(c"gpu".as_ptr(), libc::MFD_CLOEXEC) };
    assert!(descriptor >= 0);
    // SAFETY: a new descriptor that nothing else owns.
    let file = File::from(unsafe { OwnedFd::from_raw_fd(descriptor) });
    file.set_len(4096 + BYTES as u64).unwrap();
    file
}

fn region(file: &File, gpu: u8, access: Access) -> Region {
    let descriptor = file.try_clone().unwrap().into();
    let address = GPU_ADDRESS + u64::from(gpu) * 0x1_0000_0000 + 4096;
    let range = DmaBuf { descriptor, offset: 4096, bytes: BYTES, address };
    // SAFETY: the file keeps the memory, which only the stand-in maps.
    unsafe { Region::of_dmabuf(range, gpu, access, ()) }.unwrap()
}

fn bytes_of(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; BYTES];
    file.read_exact_at(&mut bytes, 4096).unwrap();
    bytes
}

/// Two endpoints over one device: a client with memory of the host, and a server.
struct World {
    client: Endpoint,
    server: Endpoint,
    device: Arc<Device>,
    local: RegionId,
}

fn world(settings: &VerbsSettings) -> World {
    let device = fake::device(settings);
    let [client, server] = ["client", "server"].map(|name| {
        let config = EndpointConfig { name: name.to_owned(), ..Default::default() };
        let endpoint = Endpoint::new(config).unwrap();
        endpoint.use_device(Arc::clone(&device)).unwrap();
        endpoint
    });
    let local = client.register(Region::shared(BYTES, Access::BOTH).unwrap()).unwrap();
    World { client, server, device, local }
}

impl World {
    fn connect(&self) -> (Listener, Arc<dyn Connection>) {
        let listener = self.server.listen_tcp("127.0.0.1:0".parse().unwrap()).unwrap();
        let connection = self.client.connect_rdma(listener.tcp_address().unwrap(), soon()).unwrap();
        fake::state(&self.device).is_logged.store(true, Ordering::Relaxed);
        (listener, connection)
    }

    /// Operations and remote addresses so far, of which it forgets all.
    fn log(&self) -> Vec<(i32, u64, u64)> {
        std::mem::take(&mut *fake::state(&self.device).log.lock().unwrap())
    }
}

fn piece(local: (RegionId, u64), remote: (RegionId, u64), bytes: u64) -> Piece {
    let place = |(region, offset)| Place { region, offset };
    Piece { local: place(local), remote: place(remote), bytes }
}

fn run(
    connection: &Arc<dyn Connection>,
    direction: Direction,
    pieces: &[Piece],
) -> Result<(), TransportError> {
    let batch = Batch { direction, pieces, notice: None };
    connection.post(&batch, soon())?.wait(soon())
}

#[test]
fn a_batch_writes_memory_of_a_gpu_and_reads_a_place_of_it_last() {
    let world = world(&VerbsSettings { queue_pairs: 1, ..Default::default() });
    let file = memory();
    let remote = world.server.register(region(&file, 0, Access::BOTH)).unwrap();
    let host = world.server.register(Region::shared(BYTES, Access::BOTH).unwrap()).unwrap();
    let (_listener, connection) = world.connect();
    let bytes: Vec<u8> = (0..BYTES).map(|at| u8::try_from(at % 251).unwrap()).collect();
    world.client.fill(world.local, 0, &bytes).unwrap();
    let pieces: Vec<_> = (0..100_u64)
        .map(|at| piece((world.local, at * 600), (remote, (99 - at) * 600), 500))
        .collect();
    run(&connection, Direction::Write, &pieces).unwrap();
    let there = bytes_of(&file);
    for at in 0..100 {
        let (from, to) = (at * 600, (99 - at) * 600);
        assert_eq!(there[to..to + 500], bytes[from..from + 500], "piece {at}");
    }
    let log = world.log();
    let operations: Vec<_> = log.iter().map(|(operation, ..)| *operation).collect();
    assert_eq!(operations[..100], [OPERATION_WRITE; 100]);
    assert_eq!(operations[100..], [OPERATION_READ]);
    assert_eq!(log[100].2, GPU_ADDRESS + 4096, "the last place that was written");
    // Memory of the host needs no read.
    run(&connection, Direction::Write, &[piece((world.local, 0), (host, 0), 500)]).unwrap();
    assert_eq!(world.log().iter().map(|it| it.0).collect::<Vec<_>>(), [OPERATION_WRITE]);
}

/// The notice is sent over the socket once the read has completed.
#[test]
fn each_queue_pair_reads_each_gpu_that_the_batch_wrote() {
    let world = world(&VerbsSettings { queue_pairs: 2, chain: 8, ..Default::default() });
    let files = [memory(), memory()];
    let remote: [RegionId; 2] = [0, 1].map(|gpu: u8| {
        world.server.register(region(&files[usize::from(gpu)], gpu, Access::BOTH)).unwrap()
    });
    let (_listener, connection) = world.connect();
    let pieces: Vec<_> = (0..32_u64)
        .map(|at| piece((world.local, at * 100), (remote[usize::from(at % 2 == 1)], at * 100), 50))
        .collect();
    let batch = Batch { direction: Direction::Write, pieces: &pieces, notice: Some(b"done") };
    connection.post(&batch, soon()).unwrap().wait(soon()).unwrap();
    let notice = world.server.next_notice(soon()).unwrap();
    assert_eq!(&*notice.bytes, b"done");
    let reads = world.log().iter().filter(|it| it.0 == OPERATION_READ).count();
    assert_eq!(reads, 4, "two GPUs on two queue pairs");
}

#[test]
fn no_read_follows_where_the_settings_say_so() {
    let world = world(&VerbsSettings { flush: Flush::Never, ..Default::default() });
    let file = memory();
    let remote = world.server.register(region(&file, 0, Access::BOTH)).unwrap();
    let (_listener, connection) = world.connect();
    run(&connection, Direction::Write, &[piece((world.local, 0), (remote, 0), 500)]).unwrap();
    assert_eq!(world.log().iter().map(|it| it.0).collect::<Vec<_>>(), [OPERATION_WRITE]);
}

/// What the peer's device wrote into memory of a GPU is in front of it on the bus of this host.
#[test]
fn a_read_into_memory_of_a_gpu_ends_after_a_look_at_that_memory() {
    let world = world(&VerbsSettings::default());
    let remote = world.server.register(Region::shared(BYTES, Access::READ).unwrap()).unwrap();
    world.server.fill(remote, 0, b"a block").unwrap();
    let file = memory();
    let local = world.client.register(region(&file, 3, Access::LOCAL)).unwrap();
    let (_listener, connection) = world.connect();
    run(&connection, Direction::Read, &[piece((local, 100), (remote, 0), 7)]).unwrap();
    assert_eq!(bytes_of(&file)[100..107], *b"a block");
    let log = world.log();
    assert_eq!(log.iter().map(|it| it.0).collect::<Vec<_>>(), [OPERATION_READ, OPERATION_WRITE]);
    let gpu = GPU_ADDRESS + 3 * 0x1_0000_0000 + 4096 + 100;
    assert_eq!((log[0].1, log[1].1), (gpu, gpu), "the same place of the GPU");
    // A failed one loses the connection; the next connection makes another.
    fake::state(&world.device).status.store(8, Ordering::Relaxed);
    let requests = fake::state(&world.device).requests.load(Ordering::Relaxed);
    fake::state(&world.device).fail_at.store(requests + 2, Ordering::Relaxed);
    let pieces = [piece((local, 100), (remote, 0), 7)];
    let error = run(&connection, Direction::Read, &pieces).unwrap_err();
    assert!(matches!(error, TransportError::Lost { .. }), "{error}");
    assert!(!connection.is_open());
    let (_listener, connection) = world.connect();
    run(&connection, Direction::Read, &pieces).unwrap();
}

#[test]
fn memory_of_a_gpu_needs_a_device_that_takes_it() {
    let endpoint = Endpoint::new(EndpointConfig::default()).unwrap();
    let file = memory();
    let refused = endpoint.register(region(&file, 0, Access::BOTH)).unwrap_err();
    assert!(refused.to_string().contains("only RDMA reaches"), "{refused}");
    endpoint.use_device(fake::device(&VerbsSettings::default())).unwrap();
    endpoint.register(region(&file, 0, Access::BOTH)).unwrap();
    // The stand-in cannot map it, as a driver that has no DMA-BUF.
    let nothing = File::open("/dev/null").unwrap();
    let refused = endpoint.register(region(&nothing, 1, Access::BOTH)).unwrap_err();
    assert!(refused.to_string().contains("ibv_reg_dmabuf_mr failed"), "{refused}");
}

/// Both sides refuse to touch it, and the connection stays usable.
#[test]
fn memory_of_a_gpu_is_refused_over_tcp() {
    let world = world(&VerbsSettings::default());
    let file = memory();
    let remote = world.server.register(region(&file, 0, Access::BOTH)).unwrap();
    let host = world.server.register(Region::shared(BYTES, Access::BOTH).unwrap()).unwrap();
    let local = world.client.register(region(&file, 1, Access::BOTH)).unwrap();
    let listener = world.server.listen_tcp("127.0.0.1:0".parse().unwrap()).unwrap();
    let connection = world.client.connect_tcp(listener.tcp_address().unwrap(), soon()).unwrap();
    for direction in [Direction::Write, Direction::Read] {
        let error = run(&connection, direction, &[piece((world.local, 0), (remote, 0), 9)]);
        let error = error.unwrap_err();
        let is_refused =
            matches!(error, TransportError::Refused { refusal: Refusal::GpuMemory, piece: 0, .. });
        assert!(is_refused, "{error}");
        let error = run(&connection, direction, &[piece((local, 0), (host, 0), 9)]).unwrap_err();
        let is_refused = matches!(error, TransportError::Local { refusal: Refusal::GpuMemory, .. });
        assert!(is_refused, "{error}");
    }
    run(&connection, Direction::Write, &[piece((world.local, 0), (host, 0), 9)]).unwrap();
    assert_eq!(bytes_of(&file), vec![0; BYTES], "nothing was written");
}

#[test]
fn memory_that_the_fake_cuda_driver_describes_is_written_and_read() {
    let library = std::env::current_exe().unwrap().with_file_name("libcascade_device_fake.so");
    let driver = Driver::load_from(library).unwrap();
    let config = CudaMemoryConfig { shareable: true, ..CudaMemoryConfig::new(2 << 20) };
    let gpu = CudaMemory::new(&driver, &config, Arc::new(SystemClock)).unwrap();
    let range = gpu.dmabuf().unwrap().unwrap();
    // SAFETY: the region owns the memory, and all copies are waited for.
    let region = unsafe { Region::of_dmabuf(range, 0, Access::BOTH, Arc::clone(&gpu)) }.unwrap();
    let world = world(&VerbsSettings::default());
    let remote = world.server.register(region).unwrap();
    let (_listener, connection) = world.connect();
    world.client.fill(world.local, 0, b"a block").unwrap();
    run(&connection, Direction::Write, &[piece((world.local, 0), (remote, 5000), 7)]).unwrap();
    let mut bytes = [0; 7];
    gpu.copy_out(5000, &mut bytes).unwrap();
    assert_eq!(&bytes, b"a block");
    gpu.copy_in(9000, b"another").unwrap();
    run(&connection, Direction::Read, &[piece((world.local, 100), (remote, 9000), 7)]).unwrap();
    world.client.fetch(world.local, 100, &mut bytes).unwrap();
    assert_eq!(&bytes, b"another");
}
