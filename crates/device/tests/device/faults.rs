//! Every function absent, every error at every call: none panics, hangs, or leaves anything behind.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use cascade_block::with_causes;
use cascade_device::{
    Context, Copier, Copy, Costs, CudaError, CudaMemory, CudaMemoryConfig, DeviceAllocation,
    Driver, DriverReport, Fragment, ImportedMemory, RegisteredPool, ShareableMemory, Slabs,
    Transfer,
};
use cascade_memory::DeviceMemory as _;
use cascade_runtime::SystemClock;

use crate::fake::{
    self, Fastest, command, costs, empty, finish, foreign, pattern, pool, slab, soon,
};

const CHILD: &str = "use_everything_in_a_child";
/// Set in children that only share memory, and start no copies.
const ONLY_SHARING: &str = "ONLY_SHARING";
/// What children print if all works.
const ALL_OK: &str = "memory: ok\ncopier: ok\nways: ok\nsharing: ok\n";
/// Children that run at once.
const THREADS: usize = 4;
/// `CUDA_ERROR_INVALID_VALUE`, which may be of one call, and `CUDA_ERROR_ILLEGAL_ADDRESS`, which
/// ends the context.
const CODES: [&str; 2] = ["1", "700"];

/// The exported names of all functions that the loader knows.
fn names() -> Vec<&'static str> {
    let source = include_str!("../../src/functions.rs");
    let (_, table) = source.split_once("\nfunctions! {").unwrap();
    // Each entry has two names, of which the second is the exported one.
    let names: Vec<&str> =
        table.split("c\"").skip(1).filter_map(|it| it.split('"').next()).collect();
    names.chunks(2).map(|pair| pair[1]).collect()
}

fn use_memory(driver: &Arc<Driver>) -> Result<(), CudaError> {
    let copy_timeout = Duration::from_secs(5);
    let config = CudaMemoryConfig {
        buffer_bytes: 64 << 10,
        buffers: 2,
        copy_timeout,
        ..CudaMemoryConfig::new(1 << 20)
    };
    let memory = CudaMemory::new(driver, &config, Arc::new(SystemClock))?;
    let bytes = pattern(3, 200 << 10);
    let mut read = vec![0; bytes.len()];
    let copied = memory
        .copy_in(4096, &bytes)
        .and_then(|()| memory.copy_out(4096, &mut read))
        .map(|()| assert!(read == bytes, "wrong bytes without an error"));
    let zeroed = memory.zero(4096, 1000).and_then(|()| memory.copy_out(4096, &mut read[..1000]));
    if zeroed.is_ok() {
        assert_eq!(read[..1000], [0; 1000], "not zeroed without an error");
    }
    say(&format!("copies: {copied:?}, {zeroed:?}"));
    if memory.context().poison().is_some() {
        say("lost");
    }
    Ok(())
}

fn use_copier(driver: &Arc<Driver>) -> Result<(), CudaError> {
    in_context(driver, copy_blocks)
}

fn use_ways(driver: &Arc<Driver>) -> Result<(), CudaError> {
    in_context(driver, |context| {
        Costs::measure_any(context)?;
        [Fastest::Staged, Fastest::Mapped].into_iter().try_for_each(|it| transfer(context, it))
    })
}

fn in_context(
    driver: &Arc<Driver>,
    run: impl FnOnce(&Arc<Context>) -> Result<(), CudaError>,
) -> Result<(), CudaError> {
    let limit = Duration::from_secs(5);
    let context = Context::retain(driver, 0, Arc::new(SystemClock), limit)?;
    let result = run(&context);
    if context.poison().is_some() {
        say("lost");
    }
    result
}

fn copy_blocks(context: &Arc<Context>) -> Result<(), CudaError> {
    let memory = DeviceAllocation::new(context, 1 << 20)?;
    let pool = pool(2 << 20);
    let registered = RegisteredPool::new(context, Arc::new(pool.clone()), 256 << 10)?;
    let copier = Copier::new(context, registered)?;
    let bytes: Vec<Vec<u8>> = (0..4).map(|seed| pattern(seed, 100 << 10)).collect();
    let place = |at: usize| memory.piece(at * (100 << 10), 100 << 10);
    let mut loads = Vec::new();
    for (at, bytes) in bytes.iter().enumerate() {
        loads.push(Copy::ToDevice { source: slab(&pool, bytes), target: place(at)? });
    }
    let mut pending = copier.submit(loads, None)?;
    let event = copier.stream().record()?;
    pending.wait(soon())?;
    let within = Copy::Within { source: place(0)?, target: place(5)? };
    copier.submit(vec![within], Some(&event))?.wait(soon())?;
    let mut saves = Vec::new();
    for at in [5, 1, 2, 3] {
        saves.push(Copy::ToHost { source: place(at)?, target: empty(&pool, 100 << 10) });
    }
    let copies = copier.submit(saves, None)?.wait(soon())?.unwrap();
    for (copy, bytes) in copies.iter().zip(&bytes) {
        let Copy::ToHost { target, .. } = copy else { panic!("{copy:?}") };
        assert!(target[..] == bytes[..], "wrong bytes without an error");
    }
    Ok(())
}

/// Loads pages from slabs and saves them.
fn transfer(context: &Arc<Context>, fastest: Fastest) -> Result<(), CudaError> {
    const PAGE: usize = 5000;
    let memory = DeviceAllocation::new(context, 1 << 20)?;
    let pool = pool(1 << 20);
    let registered = RegisteredPool::new(context, Arc::new(pool.clone()), 256 << 10)?;
    let copier = Copier::with_costs(context, registered, costs(fastest))?;
    let block = |seed: u8| pattern(seed, 4 * PAGE);
    let fragments = (0..16).map(|at| Fragment {
        slab: at / 4,
        slab_offset: at % 4 * PAGE,
        memory: 0,
        memory_offset: at * 7 % 16 * 2 * PAGE,
        bytes: PAGE,
    });
    let fragments: Vec<Fragment> = fragments.collect();
    let memory = vec![foreign(context, &memory, 0)];
    let slabs = Slabs::ToDevice((0..4).map(|seed| slab(&pool, &block(seed))).collect());
    let load = Transfer { slabs, memory: memory.clone(), fragments: fragments.clone() };
    copier.submit_transfer(load, None)?.wait(soon())?;
    let slabs = Slabs::ToHost((0..4).map(|_| empty(&pool, 4 * PAGE)).collect());
    let saved = copier.submit_transfer(Transfer { slabs, memory, fragments }, None)?.wait(soon())?;
    let Slabs::ToHost(slabs) = saved.unwrap().slabs else { panic!("a save") };
    for (slab, seed) in slabs.iter().zip(0..) {
        assert!(slab[..] == block(seed)[..], "wrong bytes without an error");
    }
    Ok(())
}

fn use_shared(driver: &Arc<Driver>) -> Result<(), CudaError> {
    in_context(driver, |context| share(context, fake::variable(ONLY_SHARING).is_none()))
}

/// Both sides in one process: what one copies there is read by the other, after the first is gone.
fn share(context: &Arc<Context>, copies: bool) -> Result<(), CudaError> {
    let owner = ShareableMemory::new(context, 100 << 10)?;
    let (bytes, device) = (owner.memory().bytes(), owner.device());
    let other = ImportedMemory::open(context, owner.export()?, bytes, device)?;
    if !copies {
        return Ok(());
    }
    let pool = pool(1 << 20);
    let registered = RegisteredPool::new(context, Arc::new(pool.clone()), 1 << 20)?;
    let copier = Copier::new(context, registered)?;
    let bytes = pattern(5, 100 << 10);
    let target = owner.memory().piece(4096, bytes.len())?;
    drop(owner);
    copier
        .submit(vec![Copy::ToDevice { source: slab(&pool, &bytes), target }], None)?
        .wait(soon())?;
    let source = other.memory().piece(4096, bytes.len())?;
    let save = Copy::ToHost { source, target: empty(&pool, bytes.len()) };
    let copies = copier.submit(vec![save], None)?.wait(soon())?;
    let copies = copies.unwrap();
    let [Copy::ToHost { target, .. }] = &copies[..] else { panic!("{copies:?}") };
    assert!(target[..] == bytes[..], "wrong bytes without an error");
    Ok(())
}

/// Descriptors of the fake's memory that this process has.
fn open_descriptors() -> usize {
    let links = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let names = links.filter_map(|link| std::fs::read_link(link.path()).ok());
    names.filter(|name| name.to_string_lossy().contains("cascade-fake-gpu")).count()
}

/// A use of the driver, which may fail and checks what it copied.
type Use = fn(&Arc<Driver>) -> Result<(), CudaError>;

fn say(text: &str) {
    use std::io::Write as _;
    writeln!(std::io::stdout().lock(), "{text}").unwrap();
}

#[test]
fn use_everything_in_a_child() {
    if fake::variable("FAKE_CUDA_TEST").as_deref() != Some(CHILD) {
        return;
    }
    let report = DriverReport::examine();
    say(&format!("report: {}", report.map_or_else(|error| with_causes(&error), |_| "ok".into())));
    let uses: [(&str, Use); 4] = [
        ("memory", use_memory),
        ("copier", use_copier),
        ("ways", use_ways),
        ("sharing", use_shared),
    ];
    let first = if fake::variable(ONLY_SHARING).is_some() { 3 } else { 0 };
    for (name, run) in uses.into_iter().skip(first) {
        let result = Driver::load().map_err(CudaError::from).and_then(|driver| run(&driver));
        match result {
            Ok(()) => say(&format!("{name}: ok")),
            Err(error) => say(&format!("{name}: {}", with_causes(&error))),
        }
    }
    say(&format!("descriptors left: {}", open_descriptors()));
    say("over");
}

/// Runs the child with some variables. Fails if it panicked, hung or left something behind.
fn check(directory: &Path, variables: &[(&str, &str)]) -> String {
    static RUNS: AtomicUsize = AtomicUsize::new(0);
    let report = directory.join(RUNS.fetch_add(1, Ordering::SeqCst).to_string());
    let all = [variables, &[("FAKE_CUDA_REPORT", report.to_str().unwrap())]].concat();
    let (succeeded, text) = finish(command(CHILD, &all).spawn().unwrap());
    assert!(succeeded && text.contains("over"), "{variables:?}: {text}");
    // A child that met no function of the driver writes no report.
    let report = std::fs::read_to_string(report).unwrap_or_default();
    let counts: BTreeMap<&str, u64> = report
        .lines()
        .filter_map(|line| line.split_once(' '))
        .map(|(what, count)| (what, count.parse().unwrap()))
        .collect();
    let count = |what| counts.get(what).copied().unwrap_or(0);
    assert_eq!(count("misused"), 0, "{variables:?}: memory was freed under a copy: {text}");
    let is_lost = text.contains("lost") || count("deaths") > 0;
    let left = (count("live"), count("contexts"));
    let has_closed = text.contains("descriptors left: 0\n");
    assert!(is_lost || left == (0, 0) && has_closed, "{variables:?} left {left:?}: {text}");
    text
}

fn check_all(cases: &[Vec<(&str, &str)>]) -> Vec<String> {
    let directory = tempfile::tempdir().unwrap();
    let next = AtomicUsize::new(0);
    let work = || {
        let mut texts = Vec::new();
        while let Some(case) = cases.get(next.fetch_add(1, Ordering::SeqCst)) {
            texts.push(check(directory.path(), case));
        }
        texts
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(work)).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    })
}

fn used() -> Vec<&'static str> {
    let unused = [
        "cuGetErrorString",
        "cuMemGetInfo_v2",
        "cuPointerGetAttributes",
        "cuMemGetAddressRange_v2",
        "cuMemcpyPeerAsync",
        "cuMemcpy2DAsync_v2",
        "cuMemcpyBatchAsync",
        "cuStreamSynchronize",
        "cuLaunchHostFunc",
        "cuEventSynchronize",
        "cuEventElapsedTime",
    ];
    let later = ["cuIpc", "cuDeviceCan", "cuCtxEnable", "cuMemGetHandle"];
    let is_later =
        |name: &&str| unused.contains(name) || later.iter().any(|prefix| name.starts_with(prefix));
    names().into_iter().filter(|name| !is_later(name)).collect()
}

#[test]
fn without_faults_all_works_and_nothing_is_left() {
    let texts = check_all(&[Vec::new()]);
    assert!(texts[0].contains("report: ok\n"), "{}", texts[0]);
    assert!(texts[0].contains(ALL_OK), "{}", texts[0]);
    assert!(names().len() > 55, "{:?}", names());
}

#[test]
fn each_function_may_be_absent() {
    let names = names();
    let cases: Vec<_> = names.iter().map(|name| vec![("FAKE_CUDA_ABSENT", *name)]).collect();
    let texts = check_all(&cases);
    assert_eq!(texts.len(), names.len());
    // Most are not needed for this, and none may be needed by accident.
    let broken = texts.iter().filter(|text| text.contains(" has no cu")).count();
    let works = texts.iter().filter(|text| text.contains("copier: ok\nways: ok\n")).count();
    assert!(broken >= 15 && works >= 30, "{broken} {works}");
}

/// A driver without one of these shares nothing and says why. All else works.
#[test]
fn what_sharing_lacks_is_named_and_costs_nothing_else() {
    let names = [
        "cuDeviceGetUuid_v2",
        "cuMemGetAllocationGranularity",
        "cuMemCreate",
        "cuMemRelease",
        "cuMemAddressReserve",
        "cuMemAddressFree",
        "cuMemMap",
        "cuMemUnmap",
        "cuMemSetAccess",
        "cuMemExportToShareableHandle",
        "cuMemImportFromShareableHandle",
    ];
    let cases: Vec<_> = names.iter().map(|name| vec![("FAKE_CUDA_ABSENT", *name)]).collect();
    let texts = check_all(&cases);
    for name in names {
        let expected = format!(
            "copier: ok\nways: ok\nsharing: the CUDA driver has no {name}; update the driver\n"
        );
        assert_eq!(texts.iter().filter(|text| text.contains(&expected)).count(), 1, "{name}");
    }
}

#[test]
fn each_function_may_fail_at_once_or_later() {
    let mut failures = Vec::new();
    for name in used() {
        failures.extend(["=1", "=1@2", "=1@5", "=700@1", "=700@3"].map(|it| format!("{name}{it}")));
    }
    let cases: Vec<_> =
        failures.iter().map(|failure| vec![("FAKE_CUDA_FAIL", &**failure)]).collect();
    assert_eq!(check_all(&cases).len(), cases.len());
}

/// Calls are counted over all functions, so this meets calls that the other test does not.
#[test]
fn calls_may_fail_at_any_point() {
    let failures: Vec<String> =
        (1..40).flat_map(|at| CODES.map(|code| format!("*={code}@{}", at * 17))).collect();
    let cases: Vec<_> =
        failures.iter().map(|failure| vec![("FAKE_CUDA_FAIL", &**failure)]).collect();
    assert_eq!(check_all(&cases).len(), cases.len());
}

/// Without copies there are no polls, so the number of calls is always the same and each can fail.
#[test]
fn each_call_of_sharing_may_fail() {
    // The report and the driver's start look for each function before.
    let first = 2 * names().len();
    let calls = first..first + 100;
    let last = calls.end;
    let failures: Vec<String> =
        calls.flat_map(|at| CODES.map(|code| format!("*={code}@{at}"))).collect();
    let case = |failure| vec![(ONLY_SHARING, "1"), ("FAKE_CUDA_FAIL", failure)];
    let cases: Vec<_> = failures.iter().map(|failure| case(&**failure)).collect();
    let texts = check_all(&cases);
    let failed = texts.iter().filter(|text| !text.contains("sharing: ok\n")).count();
    assert!(failed >= 60, "{failed}");
    let after = check_all(&[case(&format!("*=1@{last}"))]);
    assert!(after[0].contains("report: ok\nsharing: ok\n"), "there are more calls: {after:?}");
}

#[test]
fn a_context_may_die_under_any_copy() {
    let numbers: Vec<String> = (1..=20).map(|at| at.to_string()).collect();
    let cases: Vec<_> =
        numbers.iter().map(|number| vec![("FAKE_CUDA_DIE_AT_COPY", &**number)]).collect();
    let texts = check_all(&cases);
    let died = texts.iter().filter(|text| text.contains("ILLEGAL_ADDRESS (700)")).count();
    assert!(died >= 10, "{died} of 20 met a copy");
}
