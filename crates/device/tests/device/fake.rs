//! Tests over the fake driver, each in a process of its own: the driver has one state and reads its
//! variables once.

#![expect(unsafe_code, reason = "calls the control functions of the fake")]
#![expect(clippy::disallowed_methods, reason = "processes are started and timed for real")]
#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::ffi::{CString, c_char, c_void};
use std::panic::Location;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cascade_device::{
    Context, Costs, Curve, DeviceAllocation, DevicePiece, Driver, ForeignMemory, Rate,
    RegisteredPool, WayCosts,
};
use cascade_memory::{HostSlab, HostSlabMut, HugePages, Pool, PoolConfig};
use cascade_runtime::{Deadline, SystemClock};

/// The test that a child process is to run.
const CHILD: &str = "FAKE_CUDA_TEST";
/// A child that takes longer hangs.
const HANG: Duration = Duration::from_secs(400);

/// The fake driver, which Cargo builds beside the tests.
pub(crate) fn library() -> PathBuf {
    std::env::current_exe().unwrap().with_file_name("libcascade_device_fake.so")
}

/// The variable of this process, or none.
pub(crate) fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// A process that runs one test of the caller's file over the fake driver.
#[track_caller]
pub(crate) fn command(test: &str, variables: &[(&str, &str)]) -> Command {
    let module = Path::new(Location::caller().file()).file_stem().unwrap().to_str().unwrap();
    let name = format!("{module}::{test}");
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", &name, "--nocapture", "--test-threads=1"])
        .env("CASCADE_CUDA_LIBRARY", library())
        .env(CHILD, test)
        .envs(variables.iter().copied())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// Whether this process is the child of a test of the caller's file. If not, runs it in one, which
/// has to succeed.
#[track_caller]
pub(crate) fn is_child(test: &str, variables: &[(&str, &str)]) -> bool {
    if variable(CHILD).as_deref() == Some(test) {
        return true;
    }
    let (succeeded, output) = finish(command(test, variables).spawn().unwrap());
    // A name that no test has runs none, which is no failure to the child.
    let has_run = output.contains("1 passed");
    assert!(succeeded && has_run, "{test} with {variables:?}: {output}");
    false
}

/// Waits for a child; whether it succeeded, and what it printed.
pub(crate) fn finish(mut child: Child) -> (bool, String) {
    let started = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if started.elapsed() > HANG {
            child.kill().unwrap();
            let output = child.wait_with_output().unwrap();
            panic!("a child hangs: {}", String::from_utf8_lossy(&output.stdout));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    let output = child.wait_with_output().unwrap();
    let text = [output.stdout, output.stderr].map(|it| String::from_utf8_lossy(&it).into_owned());
    (output.status.success(), text.concat())
}

fn control(name: &str) -> *mut c_void {
    let library = CString::new(library().into_os_string().into_string().unwrap()).unwrap();
    let name = CString::new(name).unwrap();
    // SAFETY: the library is loaded already or by this call, and never closed.
    let handle = unsafe { libc::dlopen(library.as_ptr(), libc::RTLD_NOW) };
    // SAFETY: an open library.
    let address = unsafe { libc::dlsym(handle, name.as_ptr()) };
    assert!(!address.is_null(), "the fake has {name:?}");
    address
}

/// Holds the work that a function starts.
pub(crate) fn hold(name: &str) {
    // SAFETY: the function has this type.
    let hold = unsafe {
        std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*const c_char)>(control(
            "fakeCudaHold",
        ))
    };
    let name = CString::new(name).unwrap();
    // SAFETY: takes a string.
    unsafe { hold(name.as_ptr()) };
}

/// Lets held work go on.
pub(crate) fn release() {
    // SAFETY: the function has this type.
    let release = unsafe {
        std::mem::transmute::<*mut c_void, unsafe extern "C" fn()>(control("fakeCudaRelease"))
    };
    // SAFETY: takes nothing.
    unsafe { release() };
}

/// Calls of a function, or another count of the fake.
pub(crate) fn count(name: &str) -> u64 {
    // SAFETY: the function has this type.
    let count = unsafe {
        std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*const c_char) -> u64>(control(
            "fakeCudaCount",
        ))
    };
    let name = CString::new(name).unwrap();
    // SAFETY: takes a string.
    unsafe { count(name.as_ptr()) }
}

/// Nothing is left in the driver, and no memory was released under a copy.
pub(crate) fn assert_nothing_left() {
    assert_eq!(["live", "contexts", "misused"].map(count), [0; 3], "live, contexts, misused");
}

/// On a busy machine a transfer of many slices, which are thousands of wake-ups, takes 40 s.
pub(crate) fn soon() -> Deadline {
    Deadline::after(&SystemClock, Duration::from_secs(240))
}

pub(crate) fn context() -> Arc<Context> {
    context_on(0)
}

pub(crate) fn context_on(device: usize) -> Arc<Context> {
    let driver = Driver::load().unwrap();
    Context::retain(&driver, device, Arc::new(SystemClock), Duration::from_secs(30)).unwrap()
}

pub(crate) fn pool(bytes: usize) -> Pool {
    let huge_pages = HugePages::Never;
    Pool::new(&PoolConfig { capacity_bytes: bytes, huge_pages, populate: true }).unwrap()
}

pub(crate) fn registered(context: &Arc<Context>, pool: &Pool, piece: usize) -> Arc<RegisteredPool> {
    RegisteredPool::new(context, Arc::new(pool.clone()), piece).unwrap()
}

/// Bytes that differ by seed and place.
pub(crate) fn pattern(seed: u8, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| u8::try_from((at * 7 + at / 251) % 251).unwrap() ^ seed).collect()
}

/// A sealed slab with these bytes.
pub(crate) fn slab(pool: &Pool, bytes: &[u8]) -> HostSlab {
    let mut slab = pool.allocate(bytes.len()).unwrap();
    slab.fill_from(bytes).unwrap();
    slab.seal().into_host().unwrap()
}

/// A slab to fill.
pub(crate) fn empty(pool: &Pool, bytes: usize) -> HostSlabMut {
    let mut slab = pool.allocate(bytes).unwrap();
    slab.fill_from(&vec![0; bytes]).unwrap();
    slab.into_host().unwrap()
}

pub(crate) fn piece(memory: &Arc<DeviceAllocation>, offset: usize, bytes: usize) -> DevicePiece {
    memory.piece(offset, bytes).unwrap()
}

fn curve(call_ns: u64, fragment_ns: u64) -> Curve {
    let rates = vec![Rate { fragment_bytes: 1, bytes_per_us: 1000 }];
    Curve { call_ns, fragment_ns, rates }
}

/// A machine where one way is the fastest.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Fastest {
    Direct,
    Mapped,
    Staged,
}

/// A table of such a machine. Nothing of it was measured.
pub(crate) fn costs(fastest: Fastest) -> Costs {
    let each = |way| if way == fastest { 1 } else { 1_000_000 };
    let direct = if fastest == Fastest::Mapped { 1_000_000 } else { 1000 };
    let within = Curve { rates: Vec::new(), ..curve(1, each(Fastest::Staged)) };
    let ways = WayCosts {
        direct: curve(1, direct),
        mapped: Some(curve(1, each(Fastest::Mapped))),
        within: Some(within),
    };
    Costs { to_device: ways.clone(), to_host: ways }
}

/// Memory of a device as that of another library, without its first bytes.
pub(crate) fn foreign(
    context: &Arc<Context>,
    memory: &Arc<DeviceAllocation>,
    first: usize,
) -> Arc<ForeignMemory> {
    let owner = Box::new(Arc::clone(memory));
    let (start, bytes) = (memory.base() + first as u64, memory.bytes() - first);
    // SAFETY: the owner keeps the memory; the tests order their work.
    unsafe { ForeignMemory::new(context, start, bytes, owner) }
}
