//! Chain keys: the key of a block covers the tokens of the block and, through its parent, all before.

use sha2::{Digest as _, Sha256};

use crate::BlockKey;

/// What to do with tokens that do not fill the last block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ChainTail {
    /// Only full blocks get a key.
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
/// If `block_tokens` is zero.
pub fn chain_keys(
    parent: BlockKey,
    tokens: &[u32],
    block_tokens: usize,
    tail: ChainTail,
) -> Vec<BlockKey> {
    assert!(block_tokens > 0, "a block holds at least one token");
    let full = tokens.len() / block_tokens * block_tokens;
    let covered = if tail == ChainTail::Keep { tokens } else { &tokens[..full] };
    let mut bytes = Vec::with_capacity(block_tokens * 4);
    let mut keys = Vec::with_capacity(covered.len().div_ceil(block_tokens));
    let mut parent = parent;
    for block in covered.chunks(block_tokens) {
        bytes.clear();
        block.iter().for_each(|token| bytes.extend_from_slice(&token.to_le_bytes()));
        let hash = Sha256::new()
            .chain_update(b"cascade chain 1\0")
            .chain_update(parent.as_bytes())
            .chain_update(&bytes)
            .finalize();
        parent = BlockKey::from_bytes(hash.into());
        keys.push(parent);
    }
    keys
}
