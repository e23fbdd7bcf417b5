//! What one call costs a block: view, put, get and lookup, without the command around them.

use std::hint::black_box;

use cascade_block::{BlockKey, Manifest, Namespace, TenantSecret};
use cascade_store::{CallOptions, Put, Request, Store, StoreConfig};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};

const BATCH: usize = 256;

fn keys(count: u64) -> Vec<BlockKey> {
    let namespace =
        Namespace::new(Manifest::new().with("weights", "bench"), &TenantSecret::new("secret"));
    (0..count).map(|n| namespace.key_of_id(&n.to_le_bytes())).collect()
}

fn store(dram_bytes: u64, pipeline: &str) -> Store {
    let config = StoreConfig {
        dram_bytes,
        pipeline: pipeline.to_owned(),
        dirty_bytes_max: Some(u64::MAX),
        ..StoreConfig::default()
    };
    Store::open(config).expect("a pool of memory")
}

fn put_all(store: &Store, keys: &[BlockKey], bytes: &[u8]) {
    for some in keys.chunks(4096) {
        let batch: Vec<_> = some.iter().map(|key| Put::new(*key, bytes)).collect();
        black_box(store.put(&batch, CallOptions::default()));
    }
}

fn hot(criterion: &mut Criterion) {
    let keys = keys(BATCH as u64);
    let bytes = vec![7; 128 << 10];
    let store = store(64 << 20, "Dram");
    put_all(&store, &keys, &bytes);
    let mut group = criterion.benchmark_group("batch of 256 blocks of 128 KiB");
    group.throughput(Throughput::Elements(BATCH as u64));
    group.bench_function("view", |bencher| {
        bencher.iter(|| black_box(store.view(&keys, CallOptions::default())));
    });
    group.bench_function("lookup_prefix", |bencher| {
        bencher.iter(|| black_box(store.lookup_prefix(&Request::new(&keys))));
    });
    group.throughput(Throughput::Bytes((BATCH * bytes.len()) as u64));
    let mut buffers: Vec<Vec<u8>> = keys.iter().map(|_| vec![0; bytes.len()]).collect();
    group.bench_function("get", |bencher| {
        bencher.iter(|| {
            let mut slices: Vec<&mut [u8]> = buffers.iter_mut().map(Vec::as_mut_slice).collect();
            black_box(store.get(&keys, &mut slices, CallOptions::default()))
        });
    });
    group.bench_function("memcpy of the same buffers", |bencher| {
        let source: Vec<Vec<u8>> = keys.iter().map(|_| vec![1; bytes.len()]).collect();
        bencher.iter(|| {
            buffers.iter_mut().zip(&source).for_each(|(to, from)| to.copy_from_slice(from));
        });
    });
    group.bench_function("put and delete", |bencher| {
        bencher.iter(|| {
            store.delete(&keys);
            put_all(&store, &keys, &bytes);
        });
    });
    group.finish();
}

fn lookup_among_many(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("lookup of 256 keys");
    group.throughput(Throughput::Elements(BATCH as u64));
    for count in [1_000u64, 500_000, 10_000_000] {
        let keys = keys(count);
        let store = store(64 << 20, "Fake");
        put_all(&store, &keys, b"");
        let mut at = 0;
        group.bench_function(format!("among {count}"), |bencher| {
            bencher.iter(|| {
                at = (at + 7919 * BATCH) % (keys.len() - BATCH);
                // A stride, so that neighbouring keys share no cache line, as with real keys.
                black_box(store.contains(&keys[at..at + BATCH]))
            });
        });
    }
    group.finish();
}

/// The cost of a pool that outlives its process: writing and clearing a record of the ledger.
fn ledger(criterion: &mut Criterion) {
    let keys = keys(BATCH as u64);
    let bytes = [7; 64];
    let batch: Vec<_> = keys.iter().map(|key| Put::new(*key, &bytes)).collect();
    let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir());
    let directory = directory.expect("a place for a small file");
    let mut group = criterion.benchmark_group("put and delete 256 blocks of 64 bytes");
    group.throughput(Throughput::Elements(BATCH as u64));
    for (name, pool_file) in [("anonymous", None), ("named", Some(directory.path().join("pool")))] {
        let config = StoreConfig { dram_bytes: 1 << 30, pool_file, ..StoreConfig::default() };
        let store = Store::open(config).expect("a pool of memory");
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                black_box(store.put(&batch, CallOptions::default()));
                black_box(store.delete(&keys))
            });
        });
    }
}

criterion_group!(benches, ledger, hot, lookup_among_many);
criterion_main!(benches);
