//! A get of large blocks, some in DRAM and some in files: a second thread copies the former.

use cascade_block::BlockKey;
use cascade_store::{CallOptions, FilesConfig, GetOutcome, Store, StoreConfig};
use cascade_tier::conformance::block_store::bytes_of;

use crate::blocks::{dram, keys, put};

const BLOCK: usize = 1 << 20;
/// Enough for a second thread: see `SECOND_THREAD_BYTES_MIN` in `read_flow/buffers.rs`.
const IN_DRAM: usize = 16;

/// A store with all blocks in files, and the first `IN_DRAM` of them also in 64 MiB of DRAM.
fn open(directory: &std::path::Path, keys: &[BlockKey]) -> Store {
    let files = Some(FilesConfig::new(directory));
    let config = StoreConfig { pipeline: "Dram|Files".to_owned(), files, ..dram(64) };
    let first = Store::open(config.clone()).expect("the configuration is valid");
    for some in keys.chunks(8) {
        put(&first, some, BLOCK);
        first.flush(CallOptions::default()).expect("the disk has room");
    }
    first.close().expect("the disk works");
    drop(first);
    let store = Store::open(config).expect("the configuration is valid");
    get(&store, &keys[..IN_DRAM], None);
    store
}

/// Gets blocks, and checks every byte of the buffers, and that they are still the caller's.
fn get(store: &Store, keys: &[BlockKey], short: Option<usize>) -> Vec<&'static str> {
    let length = |at| if Some(at) == short { BLOCK / 2 } else { BLOCK + 64 };
    let mut buffers: Vec<_> = (0..keys.len()).map(|at| vec![0xee; length(at)]).collect();
    let mut slices: Vec<&mut [u8]> = buffers.iter_mut().map(Vec::as_mut_slice).collect();
    let outcomes = store.get(keys, &mut slices, CallOptions::default());
    let lengths: Vec<usize> = slices.iter().map(|slice| slice.len()).collect();
    let expected: Vec<usize> = (0..keys.len()).map(length).collect();
    assert_eq!(lengths, expected, "the caller has its buffers again");
    let mut tiers = Vec::new();
    for (at, (key, outcome)) in keys.iter().zip(outcomes).enumerate() {
        let bytes = match outcome {
            GetOutcome::Hit { bytes, tier } => {
                tiers.push(tier);
                bytes
            }
            GetOutcome::TooShort { needed_bytes } => {
                assert_eq!((Some(at), needed_bytes), (short, BLOCK));
                0
            }
            other => panic!("{key}: {other:?}"),
        };
        assert!(bytes == 0 || buffers[at][..bytes] == *bytes_of(key, BLOCK), "wrong bytes: {key}");
        assert!(buffers[at][bytes..].iter().all(|byte| *byte == 0xee), "{key}: behind the block");
    }
    tiers
}

/// The order of a batch.
type Order = fn(&[BlockKey]) -> Vec<BlockKey>;

#[test]
fn each_buffer_has_its_block_whatever_the_order_of_the_tiers() {
    let keys = keys(0..64);
    let orders: [Order; 3] = [
        |keys| keys.to_vec(),
        |keys| keys.iter().rev().copied().collect(),
        // Alternately.
        |keys| (0..32).flat_map(|at| [keys[at], keys[63 - at]]).collect(),
    ];
    for order in orders {
        let directory = tempfile::tempdir().expect("the disk has room");
        let store = open(directory.path(), &keys);
        let tiers = get(&store, &order(&keys), None);
        let in_dram = tiers.iter().filter(|tier| **tier == "dram").count();
        assert!(in_dram * BLOCK >= 8 << 20, "{in_dram} blocks in DRAM start no second thread");
        assert!(tiers.contains(&"files"), "{tiers:?}");
    }
}

#[test]
fn a_buffer_that_is_too_short_stays_as_it_was() {
    let keys = keys(0..64);
    let directory = tempfile::tempdir().expect("the disk has room");
    let store = open(directory.path(), &keys);
    // One of a block in DRAM, then one of a block in files.
    for short in [3, 60] {
        assert_eq!(get(&store, &keys, Some(short)).len(), 63);
    }
}

#[test]
fn many_calls_at_once_get_their_own_blocks() {
    let keys = keys(0..48);
    let directory = tempfile::tempdir().expect("the disk has room");
    let store = open(directory.path(), &keys);
    std::thread::scope(|scope| {
        for from in 0..4 {
            let (store, keys) = (&store, &keys);
            scope.spawn(move || {
                for _ in 0..3 {
                    get(store, &keys[from * 4..], None);
                }
            });
        }
    });
}
