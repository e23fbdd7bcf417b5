//! A stand-in for libibverbs and a device, for tests: counts doorbells, requests and signals,
//! copies bytes between addresses of this process, and fails where it is told to.
#![expect(unsafe_code, reason = "has the C interface of libibverbs")]

use std::collections::VecDeque;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};

use cascade_runtime::Mutex;

use super::abi::{
    Channel, CompletionQueue, Context, DeviceState, MemoryRegion, OPERATION_READ, Opaque,
    Operations, PORT_ACTIVE, PortState, QueuePair, QueuePairInit, QueuePairState, SEND_SIGNALED,
    SendRequest, Work,
};
use super::device::Device;
use super::functions::{Functions, Verbs};
use super::settings::VerbsSettings;
use super::sysfs::{DeviceFacts, Gid, GidKind, LinkLayer, PortFacts};

/// What the stand-in counts and what it is told.
#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) doorbells: AtomicU64,
    pub(super) requests: AtomicU64,
    pub(super) signals: AtomicU64,
    /// Most requests that one queue pair held at a time.
    pub(super) most_held: AtomicU64,
    /// Queue pairs, completion queues, channels and registrations that exist.
    pub(super) objects: AtomicI32,
    /// Requests complete without a copy.
    pub(super) is_null: AtomicBool,
    /// Nothing completes.
    pub(super) is_held: AtomicBool,
    /// The request with this number, from 1, completes with `status`.
    pub(super) fail_at: AtomicU64,
    pub(super) status: AtomicI32,
    /// The error number of each post, unless it is 0.
    pub(super) refusal: AtomicI32,
    /// Requests are noted in `log`.
    pub(super) is_logged: AtomicBool,
    /// Operation, local and remote address of each request.
    pub(super) log: Mutex<Vec<(c_int, u64, u64)>>,
    /// Memory of a GPU that is registered.
    gpu: Mutex<Vec<GpuRange>>,
    numbers: AtomicU32,
}

/// A range of a GPU's addresses, and where its bytes are.
#[derive(Debug)]
struct GpuRange {
    address: usize,
    bytes: usize,
    start: usize,
    mapping: (usize, usize),
}

#[repr(C)]
struct FakeContext {
    base: Context,
    state: State,
}

#[repr(C)]
struct FakeCompletions {
    base: CompletionQueue,
    waiting: Mutex<VecDeque<Work>>,
    channel: *mut Channel,
    is_armed: AtomicBool,
}

#[repr(C)]
struct FakePair {
    base: QueuePair,
    has_failed: AtomicBool,
    held: Mutex<Vec<Work>>,
    posted: AtomicU64,
}

/// A device of the stand-in.
pub(super) fn device(settings: &VerbsSettings) -> Arc<Device> {
    let address = "::ffff:10.9.0.1".parse().unwrap();
    let gid = Gid { index: 1, address, kind: GidKind::Udp };
    let (number, is_active, link_layer) = (1, true, LinkLayer::Ethernet);
    let ports = vec![PortFacts { number, is_active, link_layer, gids: vec![gid] }];
    let name = "fake0".to_owned();
    let facts = DeviceFacts { name, pcie_path: Vec::new(), numa_node: None, ports };
    Device::open(&Arc::new(Verbs { functions: functions() }), &facts, settings).unwrap()
}

/// What a device of the stand-in counts.
pub(super) fn state(device: &Device) -> &State {
    // SAFETY: `open_device` below made the context, which lives as long as the device.
    let context = unsafe { device.context.cast::<FakeContext>().as_ref() };
    &context.state
}

fn functions() -> Functions {
    Functions {
        get_device_list,
        free_device_list,
        get_device_name,
        open_device,
        close_device,
        query_device,
        query_port,
        alloc_pd,
        dealloc_pd,
        reg_mr,
        dereg_mr,
        create_comp_channel,
        destroy_comp_channel,
        create_cq,
        destroy_cq,
        get_cq_event,
        ack_cq_events,
        create_qp,
        modify_qp,
        destroy_qp,
        reg_mr_iova2: None,
        reg_dmabuf_mr: Some(reg_dmabuf_mr),
    }
}

/// The stand-in's part of an object. All pointers that it is given are its own.
fn part<'a, T, U>(object: *mut T) -> &'a U {
    // SAFETY: each object was made below with the larger type, and lives until it is destroyed.
    unsafe { object.cast::<U>().as_ref() }.expect("an object of the stand-in")
}

fn state_of<'a>(context: *mut Context) -> &'a State {
    &part::<_, FakeContext>(context).state
}

fn made<T, U>(context: *mut Context, object: U) -> *mut T {
    state_of(context).objects.fetch_add(1, Ordering::Relaxed);
    Box::into_raw(Box::new(object)).cast()
}

fn destroyed<T, U>(context: *mut Context, object: *mut T) -> c_int {
    state_of(context).objects.fetch_sub(1, Ordering::Relaxed);
    // SAFETY: made by `made` with this type, and destroyed once.
    drop(unsafe { Box::from_raw(object.cast::<U>()) });
    0
}

unsafe extern "C" fn get_device_list(count: *mut c_int) -> *mut *mut Opaque {
    // SAFETY: the caller gives a place for the count.
    unsafe { count.write(1) };
    let list = Box::new([NonNull::<Opaque>::dangling().as_ptr(), ptr::null_mut()]);
    Box::into_raw(list).cast()
}

unsafe extern "C" fn free_device_list(list: *mut *mut Opaque) {
    // SAFETY: made by `get_device_list`.
    drop(unsafe { Box::from_raw(list.cast::<[*mut Opaque; 2]>()) });
}

unsafe extern "C" fn get_device_name(_: *mut Opaque) -> *const c_char {
    c"fake0".as_ptr()
}

unsafe extern "C" fn open_device(device: *mut Opaque) -> *mut Context {
    let operations = Operations {
        before_poll: [0; 11],
        poll_cq: Some(poll_cq),
        req_notify_cq: Some(req_notify_cq),
        before_send: [0; 12],
        post_send: Some(post_send),
        after_send: [0; 6],
    };
    let state = State { numbers: AtomicU32::new(1), ..State::default() };
    Box::into_raw(Box::new(FakeContext { base: Context { device, operations }, state })).cast()
}

unsafe extern "C" fn close_device(context: *mut Context) -> c_int {
    let left = state_of(context).objects.load(Ordering::Relaxed);
    assert_eq!(left, 0, "the device is closed last");
    // SAFETY: made by `open_device`, closed once.
    drop(unsafe { Box::from_raw(context.cast::<FakeContext>()) });
    0
}

unsafe extern "C" fn query_device(_: *mut Context, state: *mut DeviceState) -> c_int {
    // SAFETY: the caller gives a structure.
    let state = unsafe { state.as_mut() }.expect("a structure");
    (state.requests_max, state.reads_max, state.initiated_reads_max) = (16_384, 16, 16);
    0
}

unsafe extern "C" fn query_port(_: *mut Context, _: u8, state: *mut PortState) -> c_int {
    // SAFETY: the caller gives a structure.
    let state = unsafe { state.as_mut() }.expect("a structure");
    (state.state, state.mtu, state.message_bytes_max) = (PORT_ACTIVE, 5, 1 << 30);
    0
}

unsafe extern "C" fn alloc_pd(context: *mut Context) -> *mut Opaque {
    // The domain stands for its context.
    context.cast()
}

unsafe extern "C" fn dealloc_pd(_: *mut Opaque) -> c_int {
    0
}

unsafe extern "C" fn reg_mr(
    domain: *mut Opaque,
    address: *mut c_void,
    bytes: usize,
    _: c_int,
) -> *mut MemoryRegion {
    let context = domain.cast();
    let (handle, local_key, remote_key) = (0, 1, 2);
    made(context, MemoryRegion { context, domain, address, bytes, handle, local_key, remote_key })
}

/// Maps the file that stands for memory of a GPU. Its addresses are those of the GPU.
unsafe extern "C" fn reg_dmabuf_mr(
    domain: *mut Opaque,
    offset: u64,
    bytes: usize,
    address: u64,
    descriptor: c_int,
    _: c_int,
) -> *mut MemoryRegion {
    let context: *mut Context = domain.cast();
    let skipped = offset % 4096;
    let length = bytes + usize::try_from(skipped).unwrap();
    let start = i64::try_from(offset - skipped).unwrap();
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice overlaps nothing.
    let mapped =
        unsafe { libc::mmap(ptr::null_mut(), length, access, libc::MAP_SHARED, descriptor, start) };
    if mapped == libc::MAP_FAILED {
        return ptr::null_mut();
    }
    let mapping = (mapped.expose_provenance(), length);
    let start = mapping.0 + usize::try_from(skipped).unwrap();
    let at = usize::try_from(address).unwrap();
    state_of(context).gpu.lock().unwrap().push(GpuRange { address: at, bytes, start, mapping });
    let address = ptr::without_provenance_mut(at);
    let (handle, local_key, remote_key) = (0, 3, 4);
    made(context, MemoryRegion { context, domain, address, bytes, handle, local_key, remote_key })
}

unsafe extern "C" fn dereg_mr(region: *mut MemoryRegion) -> c_int {
    let it = part::<_, MemoryRegion>(region);
    let mut gpu = state_of(it.context).gpu.lock().unwrap();
    if let Some(at) = gpu.iter().position(|range| range.address == it.address.addr()) {
        let (start, length) = gpu.remove(at).mapping;
        // SAFETY: mapped by `reg_dmabuf_mr`, unmapped once.
        let _is_unmapped = unsafe { libc::munmap(ptr::with_exposed_provenance_mut(start), length) };
    }
    drop(gpu);
    destroyed::<_, MemoryRegion>(part::<_, MemoryRegion>(region).context, region)
}

unsafe extern "C" fn create_comp_channel(context: *mut Context) -> *mut Channel {
    // SAFETY: takes no pointers.
    let descriptor = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_SEMAPHORE) };
    made(context, Channel { context, descriptor, references: 0 })
}

unsafe extern "C" fn destroy_comp_channel(channel: *mut Channel) -> c_int {
    let it = part::<_, Channel>(channel);
    // SAFETY: the descriptor is open and closed once.
    let _is_closed = unsafe { libc::close(it.descriptor) };
    destroyed::<_, Channel>(it.context, channel)
}

unsafe extern "C" fn create_cq(
    context: *mut Context,
    _: c_int,
    _: *mut c_void,
    channel: *mut Channel,
    _: c_int,
) -> *mut CompletionQueue {
    let (waiting, is_armed) = (Mutex::new(VecDeque::new()), AtomicBool::new(false));
    made(context, FakeCompletions { base: CompletionQueue { context }, waiting, channel, is_armed })
}

unsafe extern "C" fn destroy_cq(queue: *mut CompletionQueue) -> c_int {
    destroyed::<_, FakeCompletions>(part::<_, CompletionQueue>(queue).context, queue)
}

unsafe extern "C" fn get_cq_event(
    channel: *mut Channel,
    _: *mut *mut CompletionQueue,
    _: *mut *mut c_void,
) -> c_int {
    let mut count = 0_u64;
    let descriptor = part::<_, Channel>(channel).descriptor;
    // SAFETY: the descriptor is open, and 8 bytes fit.
    let read = unsafe { libc::read(descriptor, (&raw mut count).cast(), 8) };
    if read == 8 { 0 } else { -1 }
}

unsafe extern "C" fn ack_cq_events(_: *mut CompletionQueue, _: c_uint) {}

unsafe extern "C" fn create_qp(domain: *mut Opaque, init: *mut QueuePairInit) -> *mut QueuePair {
    let context: *mut Context = domain.cast();
    let init = part::<_, QueuePairInit>(init);
    let base = QueuePair {
        context,
        user: ptr::null_mut(),
        domain,
        send_queue: init.send_queue,
        receive_queue: init.receive_queue,
        shared_receive: ptr::null_mut(),
        handle: 0,
        number: state_of(context).numbers.fetch_add(1, Ordering::Relaxed),
    };
    let (has_failed, held) = (AtomicBool::new(false), Mutex::new(Vec::new()));
    made(context, FakePair { base, has_failed, held, posted: AtomicU64::new(0) })
}

unsafe extern "C" fn modify_qp(_: *mut QueuePair, _: *mut QueuePairState, _: c_int) -> c_int {
    0
}

unsafe extern "C" fn destroy_qp(pair: *mut QueuePair) -> c_int {
    destroyed::<_, FakePair>(part::<_, QueuePair>(pair).context, pair)
}

unsafe extern "C" fn post_send(
    pair: *mut QueuePair,
    first: *mut SendRequest,
    _: *mut *mut SendRequest,
) -> c_int {
    let it = part::<_, FakePair>(pair);
    let state = state_of(it.base.context);
    state.doorbells.fetch_add(1, Ordering::Relaxed);
    let refusal = state.refusal.load(Ordering::Relaxed);
    if refusal != 0 {
        return refusal;
    }
    let is_null = state.is_null.load(Ordering::Relaxed);
    let fail_at = state.fail_at.load(Ordering::Relaxed);
    let before = state.requests.load(Ordering::Relaxed);
    let mut count = 0;
    let mut next = first;
    while !next.is_null() {
        let request = part::<_, SendRequest>(next);
        count += 1;
        let mut status = 0;
        if before + count == fail_at {
            status = state.status.load(Ordering::Relaxed);
        } else if it.has_failed.load(Ordering::Relaxed) {
            status = 5;
        }
        if status != 0 {
            it.has_failed.store(true, Ordering::Relaxed);
        } else if !is_null {
            copy(state, request);
        }
        let is_signalled = request.flags & SEND_SIGNALED != 0;
        if is_signalled {
            state.signals.fetch_add(1, Ordering::Relaxed);
        }
        if is_signalled || status != 0 {
            complete(it, state, Work { id: request.id, status, ..Work::default() });
        }
        next = ptr::with_exposed_provenance_mut(request.next);
    }
    state.requests.fetch_add(count, Ordering::Relaxed);
    let held = it.posted.fetch_add(count, Ordering::Relaxed) + count;
    state.most_held.fetch_max(held, Ordering::Relaxed);
    0
}

/// Where the bytes of an address are.
fn place(state: &State, address: u64) -> usize {
    let address = usize::try_from(address).unwrap();
    let gpu = state.gpu.lock().unwrap();
    let range = gpu.iter().find(|it| (it.address..it.address + it.bytes).contains(&address));
    range.map_or(address, |range| range.start + (address - range.address))
}

fn copy(state: &State, request: &SendRequest) {
    let element =
        part::<_, super::abi::Element>(ptr::with_exposed_provenance_mut::<u8>(request.elements));
    if state.is_logged.load(Ordering::Relaxed) {
        let mut log = state.log.lock().unwrap();
        log.push((request.operation, element.address, request.remote_address));
    }
    let (local, remote) = (place(state, element.address), place(state, request.remote_address));
    let (from, to) =
        if request.operation == OPERATION_READ { (remote, local) } else { (local, remote) };
    let from = ptr::with_exposed_provenance::<u8>(from);
    let to = ptr::with_exposed_provenance_mut::<u8>(to);
    // SAFETY: the tests name registered memory, whose addresses were exposed.
    unsafe { ptr::copy(from, to, element.bytes as usize) };
}

fn complete(pair: &FakePair, state: &State, work: Work) {
    let mut held = pair.held.lock().unwrap();
    held.push(work);
    if state.is_held.load(Ordering::Relaxed) {
        return;
    }
    let queue = part::<_, FakeCompletions>(pair.base.send_queue);
    queue.waiting.lock().unwrap().extend(held.drain(..));
    if queue.is_armed.swap(false, Ordering::Relaxed) {
        let descriptor = part::<_, Channel>(queue.channel).descriptor;
        let one = 1_u64;
        // SAFETY: the descriptor is open.
        let written = unsafe { libc::write(descriptor, (&raw const one).cast(), 8) };
        assert_eq!(written, 8);
    }
    // All before a completion are done.
    pair.posted.store(0, Ordering::Relaxed);
}

unsafe extern "C" fn poll_cq(queue: *mut CompletionQueue, most: c_int, works: *mut Work) -> c_int {
    let mut waiting = part::<_, FakeCompletions>(queue).waiting.lock().unwrap();
    let count = waiting.len().min(usize::try_from(most).unwrap());
    for (at, work) in waiting.drain(..count).enumerate() {
        // SAFETY: the caller gives room for `most` completions.
        let place = unsafe { works.add(at) };
        // SAFETY: as above.
        unsafe { place.write(work) };
    }
    c_int::try_from(count).unwrap()
}

unsafe extern "C" fn req_notify_cq(queue: *mut CompletionQueue, _: c_int) -> c_int {
    part::<_, FakeCompletions>(queue).is_armed.store(true, Ordering::Relaxed);
    0
}
