//! Chain keys: a block's key covers its tokens and, through its parent, all before them.

use sha2::{Digest as _, Sha256};

use crate::BlockKey;

/// Tokens that are encoded at a time, on the stack.
const TOKENS_PER_UPDATE: usize = 128;

/// Treatment of tokens that do not fill the last block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ChainTail {
    /// Only full blocks get keys.
    #[default]
    Drop,
    /// The last partial block gets a key too.
    Keep,
}

/// The keys of consecutive blocks of `block_tokens` tokens, starting below `parent`.
///
/// `parent` is a namespace's root, or the key of the block before the first token.
///
/// # Panics
/// If `block_tokens` is zero or does not fit 32 bits.
pub fn chain_keys(
    parent: BlockKey,
    tokens: &[u32],
    block_tokens: usize,
    tail: ChainTail,
) -> Vec<BlockKey> {
    let mut keys = Vec::new();
    extend_chain_keys(&mut keys, parent, tokens, block_tokens, tail);
    keys
}

/// As [`chain_keys`], but appends to `keys`. Returns the last key, or `parent` if there is none.
///
/// For batches: one list of keys for many requests, without an allocation for each.
///
/// # Panics
/// If `block_tokens` is zero or does not fit 32 bits.
pub fn extend_chain_keys(
    keys: &mut Vec<BlockKey>,
    parent: BlockKey,
    tokens: &[u32],
    block_tokens: usize,
    tail: ChainTail,
) -> BlockKey {
    assert!(block_tokens > 0, "a block holds at least one token");
    assert!(u32::try_from(block_tokens).is_ok(), "a block holds less than 2^32 tokens");
    let full = tokens.len() / block_tokens * block_tokens;
    let covered = if tail == ChainTail::Keep { tokens } else { &tokens[..full] };
    keys.reserve(covered.len().div_ceil(block_tokens));
    covered.chunks(block_tokens).fold(parent, |parent, block| {
        let key = chain_key(parent, block);
        keys.push(key);
        key
    })
}

/// The key of one block below `parent`.
///
/// Hashes a fixed-size prefix of domain, token count and parent, then the tokens. The count comes
/// first to prevent length extension: the key of a longer block cannot be derived without the
/// parent. It has 32 bits, so that a block of 16 tokens takes two rounds of SHA-256 (125 of 128
/// bytes).
fn chain_key(parent: BlockKey, block: &[u32]) -> BlockKey {
    let count = u32::try_from(block.len()).expect("the caller limits a block to 2^32 tokens");
    let mut hash = Sha256::new()
        .chain_update(b"cascade chain 1\0")
        .chain_update(count.to_le_bytes())
        .chain_update(parent.as_bytes());
    let mut bytes = [0; TOKENS_PER_UPDATE * 4];
    for tokens in block.chunks(TOKENS_PER_UPDATE) {
        for (bytes, token) in bytes.chunks_exact_mut(4).zip(tokens) {
            bytes.copy_from_slice(&token.to_le_bytes());
        }
        hash.update(&bytes[..tokens.len() * 4]);
    }
    BlockKey::from_bytes(hash.finalize().into())
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOT: BlockKey = BlockKey::from_bytes([7; 32]);

    #[test]
    fn a_chain_computed_in_pieces_has_the_same_keys() {
        let tokens: Vec<u32> = (0..1000).collect();
        let whole = chain_keys(ROOT, &tokens, 300, ChainTail::Keep);
        let mut pieces = Vec::new();
        let middle = extend_chain_keys(&mut pieces, ROOT, &tokens[..600], 300, ChainTail::Drop);
        extend_chain_keys(&mut pieces, middle, &tokens[600..], 300, ChainTail::Keep);
        assert_eq!(whole.len(), 4);
        assert_eq!(whole, pieces);
    }

    #[test]
    fn a_dropped_tail_has_no_key() {
        let tokens: Vec<u32> = (0..100).collect();
        let kept = chain_keys(ROOT, &tokens, 64, ChainTail::Keep);
        let dropped = chain_keys(ROOT, &tokens, 64, ChainTail::Drop);
        assert_eq!(dropped, kept[..1]);
        assert!(chain_keys(ROOT, &[], 64, ChainTail::Keep).is_empty());
    }

    #[test]
    fn a_partial_block_and_its_full_block_have_different_keys() {
        let tokens = [1, 2, 0, 0];
        let partial = chain_keys(ROOT, &tokens[..2], 4, ChainTail::Keep);
        let full = chain_keys(ROOT, &tokens, 4, ChainTail::Keep);
        assert_ne!(partial, full);
    }
}
