//! The cost of digests, checksums and keys, compared with one read of the same bytes.

use cascade_block::{BlockKey, ChainTail, Digest, DigestAlgorithm, chain_keys, checksum};

use crate::{Bench, Figure, MeasureError, Target, gib_per_second, timed};

const BYTES: usize = 128 << 20;

pub(super) fn run(bench: &mut Bench<'_>) -> Result<(), MeasureError> {
    content(bench)?;
    chains(bench)
}

/// A function of all bytes of a block.
type Hash = fn(&[u8]) -> u64;

fn content(bench: &mut Bench<'_>) -> Result<(), MeasureError> {
    let functions: [(&str, Hash); 3] = [
        ("crc32c", |block| u64::from(checksum(block))),
        ("blake3", |block| first_byte(&Digest::of(DigestAlgorithm::Blake3, block))),
        ("sha256", |block| first_byte(&Digest::of(DigestAlgorithm::Sha256, block))),
    ];
    let names = functions.map(|(name, _)| format!("hash/{name}/2MiB"));
    if !names.iter().any(|name| bench.wants(name)) {
        return Ok(());
    }
    let data = vec![7_u8; BYTES];
    // The result of each function is used, so that the compiler cannot remove the work.
    for ((_, function), name) in functions.iter().zip(names) {
        let (mut limit, mut value) = (Vec::new(), Vec::new());
        for _ in 0..bench.rounds() {
            limit.push(gib_per_second(BYTES, over_blocks(&data, read_once)));
            value.push(gib_per_second(BYTES, over_blocks(&data, function)));
        }
        let limit = (limit, "the sum of the same bytes as 64-bit words, one thread");
        bench.deliver(Figure::rate(name, "GiB/s", value, limit, Target::None))?;
    }
    Ok(())
}

fn over_blocks(data: &[u8], function: impl Fn(&[u8]) -> u64) -> std::time::Duration {
    timed(|| {
        let sum = data.chunks(2 << 20).map(function).fold(0, u64::wrapping_add);
        std::hint::black_box(sum);
    })
}

fn read_once(block: &[u8]) -> u64 {
    let (words, _) = block.as_chunks::<8>();
    words.iter().fold(0, |sum, word| sum.wrapping_add(u64::from_le_bytes(*word)))
}

fn first_byte(digest: &Digest) -> u64 {
    u64::from(digest.as_bytes()[0])
}

/// The keys of a prompt of 128k tokens.
fn chains(bench: &mut Bench<'_>) -> Result<(), MeasureError> {
    let tokens: Vec<u32> = (0..131_072).collect();
    for block_tokens in [16_usize, 64, 512] {
        let name = format!("hash/chain/{block_tokens}-tokens");
        if !bench.wants(&name) {
            continue;
        }
        let blocks = (tokens.len() / block_tokens) as f64;
        let mut samples = Vec::new();
        for _ in 0..bench.rounds() {
            let took = timed(|| {
                let root = BlockKey::from_bytes([7; 32]);
                std::hint::black_box(chain_keys(root, &tokens, block_tokens, ChainTail::Drop));
            });
            samples.push(took.as_secs_f64() * 1e9 / blocks);
        }
        let limit = (Vec::new(), "");
        bench.deliver(Figure::cost(name, "ns", samples, limit, Target::None))?;
    }
    Ok(())
}
