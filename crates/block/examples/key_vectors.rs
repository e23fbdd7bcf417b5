//! Writes `testdata/key-vectors.json`, the test vectors of keys and digests for every language.
//!
//! Run it when a vector is added. Existing vectors never change: data on disk depends on them.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use cascade_block::{
    BlockKey, ChainTail, Digest, DigestAlgorithm, Manifest, Namespace, TenantSecret, chain_keys,
    checksum, text_key,
};
use serde_json::{Value, json};

fn main() -> std::io::Result<()> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/key-vectors.json");
    let vectors = json!({
        "namespaces": namespaces().iter().map(namespace_vector).collect::<Vec<_>>(),
        "ids": id_vectors(),
        "texts": text_vectors(),
        "chains": chain_vectors(),
        "digests": digest_vectors(),
        "checksums": checksum_vectors(),
    });
    fs::write(path, format!("{vectors:#}\n"))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").expect("a string takes all that is written");
        text
    })
}

fn full_manifest() -> Manifest {
    Manifest::new()
        .with("weights", "sha256:9f86d081884c7d659a2feaa0c55ad015")
        .dtype("bf16", "none")
        .block_tokens(128)
        .geometry(32, 8, 128)
        .layout("layer-kv-token-head")
        .engine_format("vllm-cpu 0.32 avx512")
        .with("adapter", "none")
        .tensor_parallel(1, 4)
}

fn namespaces() -> Vec<(Manifest, Vec<u8>)> {
    vec![
        (Manifest::new(), Vec::new()),
        (Manifest::new(), b"secret".to_vec()),
        (full_manifest(), Vec::new()),
        (full_manifest(), (0..=255).collect()),
        (full_manifest().dtype("fp8_e4m3", "per-head"), Vec::new()),
        // Equal if concatenated without lengths.
        (Manifest::new().with("a", "bc"), Vec::new()),
        (Manifest::new().with("ab", "c"), Vec::new()),
        (Manifest::new().with("Gewichte", "größer als ∅"), Vec::new()),
    ]
}

fn namespace_vector((manifest, secret): &(Manifest, Vec<u8>)) -> Value {
    let namespace = Namespace::new(manifest.clone(), &TenantSecret::new(secret));
    json!({
        "manifest": manifest,
        "secret_hex": hex(secret),
        "root": namespace.root().to_string(),
        "id": namespace.id().to_string(),
    })
}

fn id_vectors() -> Vec<Value> {
    let ids: [&[u8]; 4] = [b"", b"sys_prompt_v1", b"\x00\xff", &[b'x'; 200]];
    let with_id = |(manifest, secret): &(Manifest, Vec<u8>), id: &[u8]| {
        let namespace = Namespace::new(manifest.clone(), &TenantSecret::new(secret));
        json!({
            "root": namespace.root().to_string(),
            "id_hex": hex(id),
            "key": namespace.key_of_id(id).to_string(),
        })
    };
    namespaces()[1..3].iter().flat_map(|one| ids.map(|id| with_id(one, id))).collect()
}

fn text_vectors() -> Vec<Value> {
    let texts = ["greeting", "Greeting", " ", "größer als ∅", "a\0b"];
    texts.map(|text| json!({ "text": text, "key": text_key(text).to_string() })).to_vec()
}

fn chain_vectors() -> Vec<Value> {
    let root = Namespace::new(full_manifest(), &TenantSecret::new("")).root();
    let short: Vec<u32> = vec![1, 2, 3, 4, 5, 6, 7];
    let long: Vec<u32> = (0_u32..300).map(|at| at.wrapping_mul(2_654_435_761)).collect();
    let middle = chain_keys(root, &long[..128], 128, ChainTail::Drop)[0];
    let mut vectors = Vec::new();
    for tail in [ChainTail::Drop, ChainTail::Keep] {
        vectors.push(chain_vector(root, &[], 4, tail));
        for block_tokens in [1, 3, 7, 16] {
            vectors.push(chain_vector(root, &short, block_tokens, tail));
        }
        for block_tokens in [16, 64, 128, 150, 512] {
            vectors.push(chain_vector(root, &long, block_tokens, tail));
        }
        vectors.push(chain_vector(middle, &long[128..], 128, tail));
        vectors.push(chain_vector(root, &[u32::MAX, 0], 2, tail));
    }
    vectors
}

fn chain_vector(parent: BlockKey, tokens: &[u32], block_tokens: usize, tail: ChainTail) -> Value {
    let keys = chain_keys(parent, tokens, block_tokens, tail);
    json!({
        "parent": parent.to_string(),
        "tokens": tokens,
        "block_tokens": block_tokens,
        "keep_tail": tail == ChainTail::Keep,
        "keys": keys.iter().map(ToString::to_string).collect::<Vec<_>>(),
    })
}

/// Byte patterns and their repeat counts.
fn patterns() -> Vec<(Vec<u8>, usize)> {
    let all: Vec<u8> = (0..=255).collect();
    vec![
        (Vec::new(), 1),
        (b"123456789".to_vec(), 1),
        (vec![0], 1024),
        (all.clone(), 1),
        (all.clone(), 4),
        (all.clone(), 257),
        (all, 8192),
    ]
}

fn digest_vectors() -> Vec<Value> {
    let vector = |(pattern, repeats): (Vec<u8>, usize)| {
        let bytes = pattern.repeat(repeats);
        json!({
            "pattern_hex": hex(&pattern),
            "repeats": repeats,
            "blake3": Digest::of(DigestAlgorithm::Blake3, &bytes).to_string(),
            "sha256": Digest::of(DigestAlgorithm::Sha256, &bytes).to_string(),
        })
    };
    patterns().into_iter().map(vector).collect()
}

fn checksum_vectors() -> Vec<Value> {
    let vector = |(pattern, repeats): (Vec<u8>, usize)| {
        json!({
            "pattern_hex": hex(&pattern),
            "repeats": repeats,
            "crc32c": checksum(&pattern.repeat(repeats)),
        })
    };
    patterns().into_iter().map(vector).collect()
}
