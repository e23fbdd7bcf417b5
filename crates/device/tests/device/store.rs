//! A store whose memory is that of the fake device, and slabs of a store that a device fills, also
//! when the process is killed with copies in flight.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;

use cascade_block::BlockKey;
use cascade_device::{
    Copier, Copy, CudaMemory, CudaMemoryConfig, DeviceAllocation, Driver, HostMemory,
    RegisteredPool,
};
use cascade_memory::DeviceError;
use cascade_runtime::SystemClock;
use cascade_store::stages::StageRegistry;
use cascade_store::{
    CallOptions, FilesConfig, GetOutcome, PrepareOutcome, Put, PutOutcome, PutSlab, Store,
    StoreConfig, StoreError, ViewOutcome,
};
use cascade_tier::conformance::block_store::bytes_of;

use crate::fake::{
    self, assert_nothing_left, command, context, empty, is_child, piece, pool, registered, soon,
};

const MIB: u64 = 1 << 20;
const BLOCK: usize = 64 << 10;
const NOW: CallOptions =
    CallOptions { timeout: Some(std::time::Duration::from_secs(30)), writer: None };
const DIRECTORY: &str = "KILL_DIRECTORY";
/// Whether the memory of a store on the device is one that other processes can map.
const SHAREABLE: &str = "SHAREABLE_MEMORY";
const BOTH: [&str; 2] = ["false", "true"];

fn key(n: u64) -> BlockKey {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&n.to_le_bytes());
    bytes[8..16].copy_from_slice(&n.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    BlockKey::from_bytes(bytes)
}

fn keys(range: std::ops::Range<u64>) -> Vec<BlockKey> {
    range.map(key).collect()
}

fn files(directory: &Path) -> FilesConfig {
    FilesConfig { capacity_bytes: 64 * MIB, segment_bytes: 4 * MIB, ..FilesConfig::new(directory) }
}

fn open_on_device(directory: &Path, mib: u64) -> Store {
    let driver = Driver::load().unwrap();
    let shareable = fake::variable(SHAREABLE).unwrap() == "true";
    let bytes = usize::try_from(mib * MIB).unwrap();
    let config = CudaMemoryConfig { shareable, ..CudaMemoryConfig::new(bytes) };
    let memory = CudaMemory::new(&driver, &config, Arc::new(SystemClock)).unwrap();
    assert_eq!(memory.shareable().is_some(), shareable);
    let pipeline = "Hbm|Files".to_owned();
    let config = StoreConfig { pipeline, files: Some(files(directory)), ..StoreConfig::default() };
    let (registry, clock) = (StageRegistry::default(), Arc::new(SystemClock));
    Store::open_on_device(config, memory, &registry, clock).unwrap()
}

/// As `is_child`, for each kind of memory.
fn is_child_on_each(test: &str, variables: &[(&str, &str)]) -> bool {
    BOTH.iter().any(|kind| is_child(test, &[variables, &[(SHAREABLE, *kind)]].concat()))
}

fn open_on_host(directory: &Path, pool_file: Option<&Path>) -> Store {
    let config = StoreConfig {
        pipeline: "Dram|Files".to_owned(),
        dram_bytes: 8 * MIB,
        huge_pages: false,
        files: Some(files(directory)),
        pool_file: pool_file.map(Path::to_owned),
        ..StoreConfig::default()
    };
    Store::open(config).unwrap()
}

fn put(store: &Store, keys: &[BlockKey]) -> Vec<PutOutcome> {
    let bytes: Vec<_> = keys.iter().map(|key| bytes_of(key, BLOCK)).collect();
    let batch: Vec<_> = keys.iter().zip(&bytes).map(|(key, it)| Put::new(*key, it)).collect();
    store.put(&batch, NOW)
}

/// The tier that each block was copied from; checks every byte.
fn tiers(store: &Store, keys: &[BlockKey]) -> Vec<Option<&'static str>> {
    let mut memory = vec![vec![0; BLOCK]; keys.len()];
    let mut buffers: Vec<&mut [u8]> = memory.iter_mut().map(Vec::as_mut_slice).collect();
    let outcomes = store.get(keys, &mut buffers, NOW);
    let check = |((key, outcome), bytes): ((&BlockKey, GetOutcome), &Vec<u8>)| match outcome {
        GetOutcome::Hit { bytes: length, tier } => {
            assert!(bytes[..length] == *bytes_of(key, length), "wrong bytes for {key} from {tier}");
            Some(tier)
        }
        GetOutcome::Miss => None,
        other => panic!("{key}: {other:?}"),
    };
    keys.iter().zip(outcomes).zip(&memory).map(check).collect()
}

#[test]
fn blocks_are_put_got_evicted_and_loaded_over_the_driver() {
    if !is_child_on_each("blocks_are_put_got_evicted_and_loaded_over_the_driver", &[]) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let store = open_on_device(directory.path(), 4);
    assert_eq!(store.tier_names(), ["hbm", "files"]);
    let all = keys(0..128);
    for some in all.chunks(16) {
        let outcomes = put(&store, some);
        assert!(outcomes.iter().all(|it| matches!(it, PutOutcome::Stored)), "{outcomes:?}");
        store.flush(NOW).unwrap();
    }
    let read = tiers(&store, &all);
    assert!(read.iter().all(Option::is_some), "the files have room for all: {read:?}");
    assert!(read.contains(&Some("files")), "half of it fits the device");
    assert!(tiers(&store, &all[120..]).contains(&Some("hbm")));
    assert!(store.stats().counters.evicted_blocks > 0);
    assert_eq!(store.scrub(NOW).damaged, 0);
    assert!(store.delete(&all[..64]).iter().all(|deleted| *deleted));
    assert_eq!(tiers(&store, &all[..64]), [None; 64]);
    drop(store);
    let store = open_on_device(directory.path(), 8);
    assert!(tiers(&store, &all[64..]).iter().all(|tier| *tier == Some("files")));
    assert!(store.erase(NOW).unwrap().left.is_empty());
    drop(store);
    assert_nothing_left();
}

/// A lost device costs the blocks in its memory: calls fail at once, and the files keep theirs.
#[test]
fn a_store_on_a_dead_device_fails_its_blocks_and_closes() {
    let dies = [("FAKE_CUDA_DIE_AT_COPY", "20")];
    if !is_child_on_each("a_store_on_a_dead_device_fails_its_blocks_and_closes", &dies) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let store = open_on_device(directory.path(), 8);
    let outcomes = put(&store, &keys(0..40));
    let stored = outcomes.iter().filter(|it| matches!(it, PutOutcome::Stored)).count();
    assert!((1..40).contains(&stored), "{outcomes:?}");
    let again = put(&store, &keys(100..102));
    let is_lost =
        |it: &PutOutcome| matches!(it, PutOutcome::Failed(StoreError::Device(DeviceError::Lost)));
    assert!(again.iter().all(is_lost), "{again:?}");
    drop(store);
    let store = open_on_host(directory.path(), None);
    let found = tiers(&store, &keys(0..102)).iter().flatten().count();
    assert!(found <= stored, "{found} of {stored} had reached the files");
}

/// Runs a test in a child until it has said enough, and kills it.
fn kill_after(test: &str, lines: usize, directory: &Path, shareable: &str) -> usize {
    let delay = ("FAKE_CUDA_DELAY_US", "*=300");
    let variables = [(DIRECTORY, directory.to_str().unwrap()), delay, (SHAREABLE, shareable)];
    let mut child = command(test, &variables).spawn().unwrap();
    let output = BufReader::new(child.stdout.take().unwrap());
    let said = output.lines().map_while(Result::ok).filter(|line| line.contains("copied"));
    let count = said.take(lines).count();
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(count, lines, "the child ended by itself");
    count
}

fn say(number: u64) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "\ncopied {number}").and_then(|()| out.flush()).unwrap();
}

#[test]
fn a_kill_under_a_device_leaves_whole_blocks_in_its_files() {
    for shareable in BOTH {
        let directory = tempfile::tempdir().unwrap();
        let mut found = 0;
        for lines in [2, 9, 23] {
            kill_after("put_on_a_device_until_killed", lines, directory.path(), shareable);
            let store = open_on_host(directory.path(), None);
            found += tiers(&store, &keys(0..64)).iter().flatten().count();
        }
        assert!(found > 0, "some blocks had reached the files");
    }
}

#[test]
fn put_on_a_device_until_killed() {
    let Some(directory) = fake::variable(DIRECTORY) else { return };
    let store = open_on_device(Path::new(&directory), 4);
    for at in 0.. {
        let first = at * 5 % 60;
        put(&store, &keys(first..first + 4));
        if at % 2 == 1 {
            store.flush(NOW).unwrap();
        }
        store.delete(&keys(first..first + 1));
        say(at);
    }
}

/// The mapping of a store, which its slabs lie in.
#[derive(Debug)]
struct OfStore(Arc<Store>);

impl HostMemory for OfStore {
    fn span(&self) -> Option<(NonNull<u8>, usize)> {
        self.0.region().host().map(|host| (host.base(), host.bytes()))
    }
}

/// A worker whose device fills slabs of a named pool: a slab is sealed after its copy, so a kill
/// leaves no half of a block behind, neither in the pool nor in the files below.
#[test]
fn a_kill_with_copies_in_flight_leaves_nothing_torn_in_a_named_pool_and_its_files() {
    let directory = tempfile::tempdir().unwrap();
    let mut found = [0, 0];
    for lines in [2, 5, 11] {
        kill_after("save_from_a_device_until_killed", lines, directory.path(), "false");
        let pool_file = directory.path().join("pool");
        let store = open_on_host(&directory.path().join("files"), Some(&pool_file));
        for tier in tiers(&store, &keys(0..64)).into_iter().flatten() {
            found[usize::from(tier == "files")] += 1;
        }
        store.close().unwrap();
    }
    assert!(found[0] + found[1] > 0, "some blocks survived: {found:?}");
}

#[test]
fn save_from_a_device_until_killed() {
    let Some(directory) = fake::variable(DIRECTORY) else { return };
    let directory = Path::new(&directory);
    let store = open_on_host(&directory.join("files"), Some(&directory.join("pool")));
    let store = Arc::new(store);
    let context = context();
    let of_store = Arc::new(OfStore(Arc::clone(&store)));
    let to_store = RegisteredPool::new(&context, of_store, 256 << 10).unwrap();
    assert_eq!(to_store.report().staged_bytes, 0);
    let saves = Copier::new(&context, to_store).unwrap();
    // The engine's pages: written by copies here, by kernels in an engine.
    let source = pool(1 << 20);
    let compute = Copier::new(&context, registered(&context, &source, 1 << 20)).unwrap();
    let pages = DeviceAllocation::new(&context, 4 * BLOCK).unwrap();
    let page = |at: usize| piece(&pages, at * BLOCK, BLOCK);
    for at in 0.. {
        let keys = keys(at * 7 % 60..at * 7 % 60 + 4);
        let writes = keys.iter().enumerate().map(|(index, key)| {
            let mut slab = empty(&source, BLOCK);
            slab.copy_from_slice(&bytes_of(key, BLOCK));
            Copy::ToDevice { source: slab.seal(), target: page(index) }
        });
        let mut written = compute.submit(writes.collect(), None).unwrap();
        let event = compute.stream().record().unwrap();
        let puts: Vec<_> = keys.iter().map(|key| Put::new(*key, &[])).collect();
        let prepared = store.prepare_all(&puts, &[BLOCK; 4], NOW);
        let (mut saved_keys, mut copies) = (Vec::new(), Vec::new());
        for (index, outcome) in prepared.into_iter().enumerate() {
            if let PrepareOutcome::Slab(slab) = outcome {
                saved_keys.push(keys[index]);
                let target = slab.into_host().unwrap();
                copies.push(Copy::ToHost { source: page(index), target });
            }
        }
        let copies = saves.submit(copies, Some(&event)).unwrap().wait(soon()).unwrap().unwrap();
        written.wait(soon()).unwrap();
        let slabs = saved_keys.into_iter().zip(copies).map(|(key, copy)| {
            let Copy::ToHost { target, .. } = copy else { panic!("{copy:?}") };
            PutSlab::new(key, target.into_slab())
        });
        store.put_slabs(slabs.collect(), NOW);
        if at % 3 == 2 {
            store.flush(NOW).unwrap();
        }
        store.delete(&keys[..2]);
        say(at);
    }
}

/// Only memory that other processes map gives slabs in place, and those have no host bytes.
#[test]
fn views_of_a_device_have_no_host_bytes() {
    if !is_child_on_each("views_of_a_device_have_no_host_bytes", &[]) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let store = open_on_device(directory.path(), 4);
    put(&store, &keys(0..1));
    let views = store.view(&keys(0..1), NOW);
    if fake::variable(SHAREABLE).unwrap() == "false" {
        assert!(matches!(views[..], [ViewOutcome::Failed(StoreError::NotHostMemory { .. })]));
        return;
    }
    let [ViewOutcome::Hit { slab, .. }] = &views[..] else { panic!("{views:?}") };
    assert_eq!((slab.host(), slab.device_address().is_some()), (None, true));
    assert_eq!(*slab.bytes_or_copy().unwrap(), *bytes_of(&key(0), BLOCK));
}
