//! A device that fails, one operation after the other: no wrong bytes, no call that hangs, and all
//! memory is free in the end.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use cascade_memory::{DeviceError, DeviceMemory, FakeDevice};
use cascade_runtime::SystemClock;
use cascade_store::stages::StageRegistry;
use cascade_store::{
    CallOptions, FilesConfig, GetOutcome, Put, PutOutcome, Store, StoreConfig, StoreError,
};

use crate::blocks::{MIB, bytes_of, key, keys, wait_until};

const NOW: CallOptions = CallOptions { timeout: Some(Duration::from_secs(30)), writer: None };
/// Lengths of blocks, by their number.
const LENGTHS: [usize; 6] = [1, 511, 4096, 65_535, 200_001, 300_000];

/// What a failing operation does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Failure {
    /// One operation fails.
    Once,
    /// All operations fail from then on.
    Lost,
    /// About one in four operations fails from then on.
    Often,
}

/// A device that fails from its operation number `first` on.
#[derive(Debug)]
struct FailingDevice {
    memory: Arc<FakeDevice>,
    operations: AtomicU64,
    first: u64,
    failure: Failure,
    is_repaired: AtomicBool,
}

impl FailingDevice {
    fn new(mib: u64, first: u64, failure: Failure) -> Arc<Self> {
        let memory = FakeDevice::new(usize::try_from(mib * MIB).unwrap()).unwrap();
        let (operations, is_repaired) = (AtomicU64::new(0), AtomicBool::new(false));
        Arc::new(Self { memory, operations, first, failure, is_repaired })
    }

    fn repair(&self) {
        self.is_repaired.store(true, Ordering::SeqCst);
    }

    fn check(&self, operation: &'static str) -> Result<(), DeviceError> {
        let number = self.operations.fetch_add(1, Ordering::SeqCst);
        let fails = match self.failure {
            Failure::Once => number == self.first,
            Failure::Lost => number >= self.first,
            Failure::Often => {
                number >= self.first && (number.wrapping_mul(0x9e37_79b9) >> 7).is_multiple_of(4)
            }
        };
        if !fails || self.is_repaired.load(Ordering::SeqCst) {
            return Ok(());
        }
        if self.failure == Failure::Lost {
            return Err(DeviceError::Lost);
        }
        let source = Arc::new(io::Error::other("the test made this operation fail"));
        Err(DeviceError::Failed { operation, offset: 0, bytes: 0, source })
    }
}

impl DeviceMemory for FailingDevice {
    fn base(&self) -> u64 {
        self.memory.base()
    }

    fn bytes(&self) -> usize {
        self.memory.bytes()
    }

    /// A failed copy has written a part.
    fn copy_in(&self, offset: usize, source: &[u8]) -> Result<(), DeviceError> {
        if let Err(error) = self.check("write") {
            self.memory.copy_in(offset, &source[..source.len() / 2])?;
            return Err(error);
        }
        self.memory.copy_in(offset, source)
    }

    fn copy_out(&self, offset: usize, target: &mut [u8]) -> Result<(), DeviceError> {
        if let Err(error) = self.check("read") {
            target.fill(0xa5);
            return Err(error);
        }
        self.memory.copy_out(offset, target)
    }

    fn zero(&self, offset: usize, bytes: usize) -> Result<(), DeviceError> {
        self.check("zero")?;
        self.memory.zero(offset, bytes)
    }
}

fn open(directory: &Path, device: &Arc<FailingDevice>) -> Store {
    let files = FilesConfig {
        capacity_bytes: 64 * MIB,
        segment_bytes: 4 * MIB,
        ..FilesConfig::new(directory)
    };
    let config = StoreConfig {
        pipeline: "Hbm|Files".to_owned(),
        files: Some(files),
        ..StoreConfig::default()
    };
    let device = Arc::clone(device) as Arc<dyn DeviceMemory>;
    Store::open_on_device(config, device, &StageRegistry::default(), Arc::new(SystemClock)).unwrap()
}

fn length(number: u64) -> usize {
    LENGTHS[usize::try_from(number).unwrap() % LENGTHS.len()]
}

fn put(store: &Store, numbers: std::ops::Range<u64>) -> Vec<PutOutcome> {
    let bytes: Vec<_> = numbers.clone().map(|at| bytes_of(&key(at), length(at))).collect();
    let batch: Vec<_> = numbers.zip(&bytes).map(|(at, bytes)| Put::new(key(at), bytes)).collect();
    store.put(&batch, NOW)
}

/// The number of hits. Each has the bytes of its key.
fn hits(store: &Store, numbers: std::ops::Range<u64>) -> usize {
    let some = keys(numbers.clone());
    let mut memory: Vec<_> = some.iter().map(|_| vec![0; 1 << 19]).collect();
    let mut buffers: Vec<&mut [u8]> = memory.iter_mut().map(Vec::as_mut_slice).collect();
    let outcomes = store.get(&some, &mut buffers, NOW);
    let is_hit = |((number, outcome), bytes): ((u64, &GetOutcome), &Vec<u8>)| match outcome {
        GetOutcome::Hit { bytes: length_of_hit, tier } => {
            assert_eq!(*length_of_hit, length(number));
            let expected = bytes_of(&key(number), *length_of_hit);
            assert!(bytes[..*length_of_hit] == expected[..], "wrong bytes of {number} from {tier}");
            true
        }
        GetOutcome::Miss | GetOutcome::Failed(_) => false,
        GetOutcome::TooShort { .. } => panic!("{number}: {outcome:?}"),
    };
    numbers.zip(&outcomes).zip(&memory).filter(|found| is_hit(*found)).count()
}

/// All calls of a store, on a device of 4 MiB: blocks are evicted and promoted.
fn use_store(store: &Store) {
    for first in [0, 24, 48] {
        put(store, first..first + 24);
        hits(store, first..first + 24);
        // It fails if the device refuses a copy.
        drop(store.flush(NOW));
    }
    hits(store, 0..72);
    // Compares the bytes.
    put(store, 0..24);
    store.prefetch(&keys(0..12));
    store.delete(&keys(60..72));
    store.scrub(NOW);
    hits(store, 0..72);
}

/// After the device works again, so does the store.
fn assert_works(store: &Store, what: (u64, Failure)) {
    let outcomes = put(store, 100..112);
    assert!(outcomes.iter().all(|o| matches!(o, PutOutcome::Stored)), "{what:?}: {outcomes:?}");
    assert_eq!(hits(store, 100..112), 12, "{what:?}");
    // What could not be copied before is reported once.
    drop(store.flush(NOW));
    put(store, 112..124);
    store.flush(NOW).unwrap_or_else(|error| panic!("{what:?}: {error:?}"));
    store.clear();
    wait_until("all slabs are free", || store.stats().pool.reserved_bytes == 0);
    assert_eq!(store.stats().counters.damaged_blocks, 0, "{what:?}: no byte was damaged");
}

#[test]
fn a_device_that_fails_at_any_operation_costs_blocks_and_nothing_else() {
    let whole = FailingDevice::new(4, u64::MAX, Failure::Once);
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), &whole);
    use_store(&store);
    assert_works(&store, (0, Failure::Once));
    drop(store);
    let operations = whole.operations.load(Ordering::SeqCst);
    assert!(operations > 300, "{operations}");
    for failure in [Failure::Once, Failure::Lost, Failure::Often] {
        for first in (0..operations).step_by(if failure == Failure::Once { 41 } else { 113 }) {
            let directory = tempfile::tempdir().unwrap();
            let device = FailingDevice::new(4, first, failure);
            let store = open(directory.path(), &device);
            use_store(&store);
            device.repair();
            assert_works(&store, (first, failure));
            drop(store);
            let again = FailingDevice::new(4, u64::MAX, Failure::Once);
            let store = open(directory.path(), &again);
            hits(&store, 0..124);
        }
    }
}

#[test]
fn calls_of_many_threads_on_a_failing_device_end() {
    for failure in [Failure::Often, Failure::Lost] {
        let directory = tempfile::tempdir().unwrap();
        let device = FailingDevice::new(4, 500, failure);
        let store = open(directory.path(), &device);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let store = &store;
                scope.spawn(move || {
                    for round in 0..30 {
                        let first = (thread * 7 + round * 5) % 60;
                        put(store, first..first + 12);
                        hits(store, first..first + 12);
                        match (thread + round) % 8 {
                            0 => drop(store.delete(&keys(first..first + 6))),
                            1 => drop(store.flush(NOW)),
                            2 => drop(store.scrub(NOW)),
                            3 => drop(store.erase(NOW)),
                            _ => assert!(store.prefetch(&keys(0..60)) <= 60),
                        }
                    }
                });
            }
        });
        device.repair();
        // An erase makes memory reusable that the device had not zeroed.
        let erased = store.erase(NOW).unwrap();
        assert!(erased.left.is_empty(), "{erased:?}");
        assert_works(&store, (500, failure));
        let closing = store.clone();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 0..50 {
                    put(&store, round..round + 12);
                    hits(&store, round..round + 12);
                }
            });
            scope.spawn(|| closing.close().unwrap());
        });
        assert_eq!(hits(&store, 0..12), 0, "it is closed");
    }
}

#[test]
fn blocks_of_no_or_too_many_bytes_cost_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let device = FailingDevice::new(4, u64::MAX, Failure::Once);
    let store = open(directory.path(), &device);
    let too_long = vec![7; (4 << 20) + 1];
    let all = [Put::new(key(0), &[]), Put::new(key(1), &too_long), Put::new(key(2), &[9])];
    let outcomes = store.put(&all, NOW);
    assert!(matches!(outcomes[2], PutOutcome::Stored), "{outcomes:?}");
    assert!(matches!(outcomes[1], PutOutcome::Declined(_) | PutOutcome::Failed(_)), "{outcomes:?}");
    let mut buffer = [1; 4];
    let [got] = &store.get(&[key(0)], &mut [&mut buffer], NOW)[..] else { panic!("one") };
    let is_consistent = matches!(
        (&outcomes[0], got),
        (PutOutcome::Stored, GetOutcome::Hit { bytes: 0, .. })
            | (PutOutcome::Declined(_) | PutOutcome::Failed(_), GetOutcome::Miss)
    );
    assert!(is_consistent, "{outcomes:?} {got:?}");
    // An empty block cannot be written to a file, which a flush says.
    let flushed = store.flush(NOW);
    assert!(matches!(flushed, Ok(()) | Err(StoreError::Tier { .. })), "{flushed:?}");
    store.flush(NOW).unwrap();
    let mut buffer = [0; 1];
    let got = store.get(&[key(2)], &mut [&mut buffer], NOW);
    assert!(matches!(got[..], [GetOutcome::Hit { bytes: 1, .. }]) && buffer == [9], "{got:?}");
}
