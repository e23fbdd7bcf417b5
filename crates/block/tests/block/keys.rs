//! Keys match the test vectors, and differ whenever their inputs differ.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::fs;
use std::path::Path;

use cascade_block::{
    BlockKey, ChainTail, Digest, DigestAlgorithm, Manifest, Namespace, TenantSecret, chain_keys,
    checksum, text_key,
};
use proptest::prelude::*;
use serde_json::Value;

fn vectors(kind: &str) -> Vec<Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/key-vectors.json");
    let text = fs::read_to_string(path).unwrap();
    let all: Value = serde_json::from_str(&text).unwrap();
    let vectors = all[kind].as_array().unwrap().clone();
    assert!(vectors.len() >= 5, "{kind} has lost vectors");
    vectors
}

fn text<'a>(vector: &'a Value, name: &str) -> &'a str {
    vector[name].as_str().unwrap()
}

fn key(vector: &Value, name: &str) -> BlockKey {
    text(vector, name).parse().unwrap()
}

fn bytes(vector: &Value, name: &str) -> Vec<u8> {
    let digits = text(vector, name);
    let pairs = (0..digits.len()).step_by(2);
    pairs.map(|at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap()).collect()
}

fn repeated(vector: &Value) -> Vec<u8> {
    bytes(vector, "pattern_hex").repeat(vector["repeats"].as_u64().unwrap().try_into().unwrap())
}

#[test]
fn namespaces_match_the_vectors() {
    for vector in vectors("namespaces") {
        let manifest: Manifest = serde_json::from_value(vector["manifest"].clone()).unwrap();
        let namespace = Namespace::new(manifest, &TenantSecret::new(bytes(&vector, "secret_hex")));
        assert_eq!(namespace.root(), key(&vector, "root"));
        assert_eq!(namespace.id().to_string(), text(&vector, "id"));
    }
}

#[test]
fn keys_of_ids_match_the_vectors() {
    for vector in vectors("ids") {
        let found = cascade_block::key_of_id(key(&vector, "root"), &bytes(&vector, "id_hex"));
        assert_eq!(found, key(&vector, "key"));
    }
}

#[test]
fn text_keys_match_the_vectors() {
    for vector in vectors("texts") {
        assert_eq!(text_key(text(&vector, "text")), key(&vector, "key"));
    }
}

/// A text key must not be that of a block of KV, however the tokens or the id are chosen.
#[test]
fn no_chain_and_no_other_id_has_a_text_key() {
    let space = Namespace::of_text();
    let texts = ["a", "aaaa", "greeting"];
    for text in texts {
        let tokens: Vec<u32> = text.bytes().map(u32::from).collect();
        let packed: Vec<u32> = text
            .as_bytes()
            .chunks(4)
            .map(|four| four.iter().rev().fold(0, |all, byte| all << 8 | u32::from(*byte)))
            .collect();
        for tokens in [tokens, packed] {
            let chain = chain_keys(space.root(), &tokens, tokens.len(), ChainTail::Keep);
            assert_ne!(chain, [text_key(text)]);
        }
        let untyped = Namespace::new(Manifest::new(), &TenantSecret::new(""));
        assert_ne!(untyped.key_of_id(text.as_bytes()), text_key(text));
        let digest = Digest::of(DigestAlgorithm::Sha256, text.as_bytes());
        assert_ne!(digest.as_bytes(), text_key(text).as_bytes());
    }
}

#[test]
fn chains_match_the_vectors() {
    for vector in vectors("chains") {
        let tokens: Vec<u32> = serde_json::from_value(vector["tokens"].clone()).unwrap();
        let block_tokens = vector["block_tokens"].as_u64().unwrap().try_into().unwrap();
        let keep = vector["keep_tail"].as_bool().unwrap();
        let tail = if keep { ChainTail::Keep } else { ChainTail::Drop };
        let found = chain_keys(key(&vector, "parent"), &tokens, block_tokens, tail);
        let expected: Vec<String> = serde_json::from_value(vector["keys"].clone()).unwrap();
        assert_eq!(found.iter().map(ToString::to_string).collect::<Vec<_>>(), expected);
    }
}

#[test]
fn digests_and_checksums_match_the_vectors() {
    for vector in vectors("digests") {
        let bytes = repeated(&vector);
        let digest = |algorithm| Digest::of(algorithm, &bytes).to_string();
        assert_eq!(digest(DigestAlgorithm::Blake3), text(&vector, "blake3"));
        assert_eq!(digest(DigestAlgorithm::Sha256), text(&vector, "sha256"));
    }
    for vector in vectors("checksums") {
        assert_eq!(u64::from(checksum(&repeated(&vector))), vector["crc32c"].as_u64().unwrap());
    }
    // The check value of the algorithm's catalogue entry.
    assert_eq!(checksum(b"123456789"), 0xe306_9283);
}

fn fields() -> impl Strategy<Value = Vec<(String, String)>> {
    let field = ("[a-z_]{1,12}", "[ -~]{0,20}");
    prop::collection::btree_map(field.0, field.1, 1..10).prop_map(|map| map.into_iter().collect())
}

fn manifest<'a>(fields: impl IntoIterator<Item = &'a (String, String)>) -> Manifest {
    fields.into_iter().fold(Manifest::new(), |all, (name, value)| all.with(name, value))
}

fn root(manifest: Manifest, secret: &[u8]) -> BlockKey {
    Namespace::new(manifest, &TenantSecret::new(secret)).root()
}

proptest! {
    #[test]
    fn a_root_depends_on_every_field_and_the_secret_but_not_on_field_order(
        fields in fields(),
        secret in prop::collection::vec(any::<u8>(), 0..100),
        at: prop::sample::Index,
    ) {
        let original = root(manifest(&fields), &secret);
        prop_assert_eq!(original, root(manifest(fields.iter().rev()), &secret));

        let (name, value) = fields[at.index(fields.len())].clone();
        let changed = manifest(&fields).with(&name, format!("{value}x"));
        prop_assert_ne!(original, root(changed.clone(), &secret));
        let difference = manifest(&fields).difference(&changed);
        prop_assert_eq!(difference.len(), 1);
        prop_assert_eq!(&difference[0].field, &name);

        let without = manifest(fields.iter().filter(|(other, _)| *other != name));
        prop_assert_ne!(original, root(without.clone(), &secret));
        let renamed = without.with(format!("{name}0"), value);
        prop_assert_ne!(original, root(renamed, &secret));

        let longer = [secret.as_slice(), &[0]].concat();
        prop_assert_ne!(original, root(manifest(&fields), &longer));
    }

    #[test]
    fn a_key_depends_on_every_token_up_to_its_block(
        tokens in prop::collection::vec(any::<u32>(), 2..200),
        block_tokens in 1_usize..40,
        at: prop::sample::Index,
        other: u32,
    ) {
        let parent = root(Manifest::new(), b"");
        let keys = |tokens: &[u32]| chain_keys(parent, tokens, block_tokens, ChainTail::Keep);
        let original = keys(&tokens);

        let at = at.index(tokens.len());
        let mut changed = tokens.clone();
        changed[at] = if other == tokens[at] { !other } else { other };
        let block = at / block_tokens;
        let found = keys(&changed);
        prop_assert_eq!(&found[..block], &original[..block]);
        prop_assert!(found[block..].iter().all(|key| !original.contains(key)));

        let mut swapped = tokens.clone();
        swapped.swap(0, at);
        let is_same = swapped == tokens;
        prop_assert_eq!(keys(&swapped).last() == original.last(), is_same);

        let elsewhere = chain_keys(root(Manifest::new(), b"x"), &tokens, block_tokens,
            ChainTail::Keep);
        prop_assert!(elsewhere.iter().all(|key| !original.contains(key)));
    }

    /// Other block lengths or fewer tokens give other keys.
    #[test]
    fn blocks_of_different_lengths_have_different_keys(
        tokens in prop::collection::vec(0_u32..3, 2..100),
        cut in 1_usize..99,
    ) {
        let parent = root(Manifest::new(), b"");
        let cut = cut % tokens.len();
        let whole = chain_keys(parent, &tokens, tokens.len(), ChainTail::Keep);
        let part = chain_keys(parent, &tokens[..cut], tokens.len(), ChainTail::Keep);
        prop_assert!(part.iter().all(|key| !whole.contains(key)));
        let halves = chain_keys(parent, &tokens, cut.max(1), ChainTail::Keep);
        prop_assert_eq!(halves.contains(&whole[0]), cut.max(1) == tokens.len());
    }
}
