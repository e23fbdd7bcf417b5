//! The model whose KV is stored: bytes of a token, tokens of a block.

use cascade_block::Geometry;

use crate::KvBenchError;

/// Largest block. Some MiB keep a disk busy with few transfers, and a pool holds many of them.
pub const BLOCK_BYTES_MAX: u64 = 4 << 20;

/// A model's KV as one rank of a tensor-parallel group stores it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvModel {
    /// The name as it was given.
    pub name: String,
    /// Layers that keep KV.
    pub layers: u32,
    /// Bytes of a token over all ranks.
    pub model_bytes_per_token: u64,
    /// Bytes of a token on one rank.
    pub bytes_per_token: u64,
    /// Tokens of a block: the largest power of two whose block has at most [`BLOCK_BYTES_MAX`].
    pub block_tokens: u64,
    /// Bytes of a block.
    pub block_bytes: usize,
}

impl KvModel {
    /// The model of this name, for a tensor-parallel group of `ranks`.
    ///
    /// # Errors
    /// If the model is unknown, or the KV of a token cannot be divided into `ranks` equal parts.
    pub fn new(name: &str, ranks: u32) -> Result<Self, KvBenchError> {
        Self::of_geometry(name, &Geometry::by_name(name)?, ranks)
    }

    /// A model of this geometry, for a tensor-parallel group of `ranks`.
    ///
    /// # Errors
    /// If the KV of a token cannot be divided into `ranks` equal parts.
    pub fn of_geometry(name: &str, geometry: &Geometry, ranks: u32) -> Result<Self, KvBenchError> {
        let whole = geometry.bytes_per_token();
        let ranks = u64::from(ranks.max(1));
        if !whole.is_multiple_of(ranks) {
            return Err(KvBenchError::usage(
                format!("--tensor-parallel {ranks}: {whole} bytes a token cannot be divided by it"),
                "give a power of two",
            ));
        }
        let bytes_per_token = whole / ranks;
        let mut block_tokens = 1;
        while block_tokens * 2 * bytes_per_token <= BLOCK_BYTES_MAX {
            block_tokens *= 2;
        }
        let block_bytes = block_tokens * bytes_per_token;
        Ok(Self {
            name: name.to_owned(),
            layers: geometry.layers,
            model_bytes_per_token: whole,
            bytes_per_token,
            block_tokens,
            block_bytes: usize::try_from(block_bytes).unwrap_or(usize::MAX),
        })
    }

    /// Whole blocks of this many tokens.
    pub fn whole_blocks(&self, tokens: u64) -> u64 {
        tokens / self.block_tokens
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names, bytes of a token and MiB of 8,192 tokens, as the original's documents give them.
    const PUBLISHED: [(&str, u64, f64); 9] = [
        ("tiny-1b", 24_576, 192.0),
        ("mistral-7b", 131_072, 1024.0),
        ("llama3.1-8b", 131_072, 1024.0),
        ("llama2-7b", 524_288, 4096.0),
        ("llama3.1-70b-instruct", 327_680, 2560.0),
        ("deepseek-v3", 70_272, 549.0),
        ("qwen3-32b", 262_144, 2048.0),
        ("gpt-oss-120b", 73_728, 576.0),
        ("gpt-oss-20b", 49_152, 384.0),
    ];

    #[test]
    fn bytes_of_a_token_and_of_8192_tokens_match_the_published_table() {
        for (name, bytes, context_mib) in PUBLISHED {
            let model = KvModel::new(name, 1).unwrap();
            assert_eq!(model.bytes_per_token, bytes, "{name}");
            let mib = (8192 * model.bytes_per_token) as f64 / f64::from(1 << 20);
            assert!((mib - context_mib).abs() < 1e-9, "{name}: {mib}");
            assert_eq!(model.name, name);
        }
    }

    #[test]
    fn blocks_have_two_to_four_mib() {
        for (name, ..) in PUBLISHED {
            let model = KvModel::new(name, 1).unwrap();
            let bytes = model.block_bytes as u64;
            assert!(bytes <= BLOCK_BYTES_MAX && bytes * 2 > BLOCK_BYTES_MAX, "{name}: {bytes}");
            assert_eq!(bytes, model.block_tokens * model.bytes_per_token);
        }
        assert_eq!(KvModel::new("llama3.1-8b", 1).unwrap().block_tokens, 32);
    }

    #[test]
    fn a_rank_stores_its_share_of_each_token() {
        let model = KvModel::new("llama3.1-70b-instruct", 8).unwrap();
        assert_eq!(model.bytes_per_token, 40_960);
        assert_eq!(model.model_bytes_per_token, 327_680);
        let refused = KvModel::new("deepseek-v3", 7).unwrap_err().to_string();
        assert!(refused.contains("--tensor-parallel 7"), "{refused}");
    }

    #[test]
    fn an_unknown_model_is_refused_with_the_known_ones() {
        let refused = KvModel::new("gpt-2", 1).unwrap_err().to_string();
        assert!(refused.contains("gpt-2") && refused.contains("deepseek-v3"), "{refused}");
    }
}
