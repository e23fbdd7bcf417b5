//! Benchmarks of the pool: allocation and release by one and two threads, and copies in and out.
//!
//! The limit of a copy is `memcpy` between the same buffers, measured beside it.

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use cascade_memory::{HostSlabMut, HugePages, Pool, PoolConfig, copy_in, copy_out};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

fn pool(capacity_bytes: usize) -> Pool {
    Pool::new(&PoolConfig { capacity_bytes, huge_pages: HugePages::Auto, populate: true })
        .expect("the machine has that much memory")
}

fn allocate(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("allocate and release");
    for bytes in [4096, 128 << 10, 2 << 20] {
        let pool = pool(1 << 30);
        group.bench_function(BenchmarkId::new("one thread", bytes), |bencher| {
            bencher.iter(|| black_box(pool.allocate(bytes)));
        });
        group.bench_function(BenchmarkId::new("two threads", bytes), |bencher| {
            let stop = AtomicBool::new(false);
            thread::scope(|scope| {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        drop(black_box(pool.allocate(bytes)));
                    }
                });
                bencher.iter(|| black_box(pool.allocate(bytes)));
                stop.store(true, Ordering::Relaxed);
            });
        });
    }
    group.finish();
}

/// Cycles through slabs that together are larger than any cache, as a store does.
fn copies(criterion: &mut Criterion) {
    let pool = pool(1 << 30);
    let mut group = criterion.benchmark_group("copy");
    for block_bytes in [16 << 10, 128 << 10, 512 << 10, 2 << 20, 16 << 20, 64 << 20] {
        group.throughput(Throughput::Bytes(block_bytes as u64));
        let allocate = || pool.allocate(block_bytes)?.into_host().ok();
        let mut slabs: Vec<HostSlabMut> = std::iter::from_fn(allocate).collect();
        let mut memory = vec![1; block_bytes];
        let mut next = (0..slabs.len()).cycle();
        let mut next_index = || next.next().expect("a cycle has no end");
        group.bench_function(BenchmarkId::new("memcpy in", block_bytes), |bencher| {
            bencher.iter(|| slabs[next_index()].copy_from_slice(black_box(&memory)));
        });
        group.bench_function(BenchmarkId::new("copy_in", block_bytes), |bencher| {
            bencher.iter(|| copy_in(&mut slabs[next_index()], black_box(&memory)));
        });
        group.bench_function(BenchmarkId::new("memcpy out", block_bytes), |bencher| {
            bencher.iter(|| memory.copy_from_slice(black_box(&slabs[next_index()])));
        });
        group.bench_function(BenchmarkId::new("copy_out, alone", block_bytes), |bencher| {
            bencher.iter(|| copy_out(&mut memory, black_box(&slabs[next_index()]), block_bytes));
        });
        group.bench_function(BenchmarkId::new("copy_out, of many", block_bytes), |bencher| {
            bencher.iter(|| copy_out(&mut memory, black_box(&slabs[next_index()]), usize::MAX));
        });
    }
    group.finish();
}

criterion_group!(benches, allocate, copies);
criterion_main!(benches);
