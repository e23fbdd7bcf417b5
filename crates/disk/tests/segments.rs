//! Segments, end to end: what is appended is read back, also after a restart.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use cascade_block::{BlockKey, Clock, Deadline, NamespaceId, SystemClock};
use cascade_disk::{
    Address, BlockFiles, EngineKind, FileTierConfig, ReadOutcome, ReadRequest, RecordMeta,
    Recovery, open,
};
use cascade_memory::{HugePages, Pool, PoolConfig, Slab};

fn pool() -> Pool {
    let config =
        PoolConfig { capacity_bytes: 64 << 20, huge_pages: HugePages::Never, populate: false };
    Pool::new(&config).unwrap()
}

fn deadline() -> Deadline {
    Deadline::after(&SystemClock, Duration::from_secs(60))
}

fn key(number: u64) -> BlockKey {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    bytes[8..16].copy_from_slice(&number.to_le_bytes());
    BlockKey::from_bytes(bytes)
}

fn content(number: u64, length: usize) -> Vec<u8> {
    let mut state = number.wrapping_add(1);
    let step = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) as u8
    };
    (0..length).map(step).collect()
}

fn block(pool: &Pool, number: u64, length: usize) -> (RecordMeta, Slab) {
    let mut slab = pool.allocate(length).unwrap();
    slab.copy_from_slice(&content(number, length));
    let meta = RecordMeta {
        key: key(number),
        digest: None,
        parent: None,
        namespace: NamespaceId::default(),
        payload_bytes: u32::try_from(length).unwrap(),
        is_prefix: number.is_multiple_of(2),
        written_unix_ms: SystemClock.unix_ms(),
        expires_unix_ms: None,
    };
    (meta, slab.seal())
}

fn open_at(directory: &Path, engine: EngineKind, pool: &Pool) -> (Arc<dyn BlockFiles>, Recovery) {
    let config = FileTierConfig {
        capacity_bytes: 64 << 20,
        segment_bytes: 4 << 20,
        engine,
        ..FileTierConfig::new(directory)
    };
    open(config, Arc::new(SystemClock), pool, deadline()).unwrap()
}

fn assert_reads(files: &dyn BlockFiles, pool: &Pool, stored: &[(u64, usize, Address)]) {
    let requests = stored
        .iter()
        .map(|&(number, length, address)| ReadRequest {
            address,
            key: key(number),
            slab: pool.allocate(length).unwrap(),
        })
        .collect();
    for (outcome, (number, length, _)) in files.read(requests, deadline()).into_iter().zip(stored) {
        match outcome {
            ReadOutcome::Hit(slab) => assert_eq!(&slab[..], &content(*number, *length)[..]),
            other => panic!("block {number} of {length} bytes: {other:?}"),
        }
    }
}

fn round_trip(engine: EngineKind) {
    let directory = tempfile::tempdir().unwrap();
    let pool = pool();
    let lengths = [1, 511, 4096, 4097, 16 << 10, 128 << 10, (1 << 20) + 5];
    let (files, recovery) = open_at(directory.path(), engine, &pool);
    assert!(recovery.live.is_empty());
    let mut stored = Vec::new();
    for round in 0..4_u64 {
        let numbers: Vec<_> = (0..14).map(|at| round * 100 + at).collect();
        let length = |number: u64| lengths[(number % 7) as usize];
        let batch = numbers.iter().map(|&number| block(&pool, number, length(number))).collect();
        for (&number, address) in numbers.iter().zip(files.append(batch, deadline())) {
            stored.push((number, length(number), address.unwrap()));
        }
    }
    assert_reads(files.as_ref(), &pool, &stored);
    for (_, _, address) in stored.iter().step_by(3) {
        let number = stored.iter().find(|each| each.2 == *address).unwrap().0;
        files.remove(&[(key(number), *address)], deadline()).unwrap();
    }
    drop(files);
    let (files, recovery) = open_at(directory.path(), engine, &pool);
    let kept: Vec<_> =
        stored.iter().enumerate().filter(|(at, _)| at % 3 != 0).map(|(_, each)| *each).collect();
    assert_eq!(recovery.live.len(), kept.len(), "{recovery:?}");
    assert_eq!(recovery.torn_records + recovery.damaged_structures, 0);
    assert_reads(files.as_ref(), &pool, &kept);
    files.checkpoint(deadline()).unwrap();
    drop(files);
    let (files, recovery) = open_at(directory.path(), engine, &pool);
    assert!(recovery.used_checkpoint);
    assert_eq!(recovery.live.len(), kept.len(), "{recovery:?}");
    assert_reads(files.as_ref(), &pool, &kept);
}

#[test]
fn blocks_come_back_with_psync() {
    round_trip(EngineKind::Psync);
}

#[test]
fn blocks_come_back_with_io_uring() {
    round_trip(EngineKind::Uring);
}
