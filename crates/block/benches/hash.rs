//! Benchmarks of keys, digests and checksums, with both hashes where there is a choice.

use std::hint::black_box;

use cascade_block::{BlockKey, ChainTail, Digest, DigestAlgorithm, checksum, extend_chain_keys};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

/// Blocks per chain, so that the cost of the call itself is negligible.
const CHAIN_BLOCKS: usize = 64;

fn chains(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("chain, a block");
    let root = BlockKey::from_bytes([7; 32]);
    for block_tokens in [16, 64, 128, 512] {
        let tokens: Vec<u32> = (0..).take(block_tokens * CHAIN_BLOCKS).collect();
        group.throughput(Throughput::Elements(CHAIN_BLOCKS as u64));
        let mut keys = Vec::new();
        group.bench_function(BenchmarkId::new("sha256", block_tokens), |bencher| {
            bencher.iter(|| {
                keys.clear();
                let tokens = black_box(tokens.as_slice());
                extend_chain_keys(&mut keys, root, tokens, block_tokens, ChainTail::Drop)
            });
        });
        group.bench_function(BenchmarkId::new("blake3", block_tokens), |bencher| {
            bencher.iter(|| blake3_chain(root, black_box(&tokens), block_tokens));
        });
    }
    group.finish();
}

/// The rejected alternative: the same messages, hashed with BLAKE3.
fn blake3_chain(root: BlockKey, tokens: &[u32], block_tokens: usize) -> [u8; 32] {
    let mut bytes = vec![0; block_tokens * 4];
    tokens.chunks(block_tokens).fold(*root.as_bytes(), |parent, block| {
        for (bytes, token) in bytes.chunks_exact_mut(4).zip(block) {
            bytes.copy_from_slice(&token.to_le_bytes());
        }
        let mut hash = blake3::Hasher::new();
        hash.update(b"cascade chain 1\0\0\0\0\0");
        hash.update(&parent);
        hash.update(&bytes);
        *hash.finalize().as_bytes()
    })
}

fn contents(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("content");
    for bytes in [16 << 10, 128 << 10, 2 << 20] {
        let block: Vec<u8> = (0..=255).cycle().take(bytes).collect();
        group.throughput(Throughput::Bytes(bytes as u64));
        for (name, algorithm) in
            [("sha256", DigestAlgorithm::Sha256), ("blake3", DigestAlgorithm::Blake3)]
        {
            group.bench_function(BenchmarkId::new(name, bytes), |bencher| {
                bencher.iter(|| Digest::of(algorithm, black_box(&block)));
            });
        }
        group.bench_function(BenchmarkId::new("crc32c", bytes), |bencher| {
            bencher.iter(|| checksum(black_box(&block)));
        });
        let mut copy = vec![0; bytes];
        group.bench_function(BenchmarkId::new("memcpy, the limit", bytes), |bencher| {
            bencher.iter(|| black_box(&mut copy).copy_from_slice(black_box(&block)));
        });
    }
    group.finish();
}

criterion_group!(benches, chains, contents);
criterion_main!(benches);
