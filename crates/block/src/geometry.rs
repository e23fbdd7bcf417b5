//! Model geometry: bytes of KV per token of common models.

use std::fmt;

use thiserror::Error;

/// KV that an attention layer keeps per token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvShape {
    /// A key and a value per KV head (multi-head and grouped-query attention).
    Heads {
        /// KV heads, not query heads.
        kv_heads: u32,
        /// Elements of one head's key; its value has the same number.
        head_dim: u32,
    },
    /// One compressed vector for all heads, its rotary part included (multi-head latent attention).
    Latent {
        /// Elements of that vector.
        width: u32,
    },
}

/// The properties that determine the size of a model's KV.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Name in the table.
    pub name: &'static str,
    /// Layers that keep KV.
    pub layers: u32,
    /// KV that each layer keeps per token.
    pub shape: KvShape,
    /// Bytes of one element: 2 for bf16 and fp16, 1 for fp8.
    pub element_bytes: u32,
}

/// A model that is not in the table.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("unknown model {name:?}; known models: {}", Geometry::names())]
pub struct UnknownModel {
    name: String,
}

const MODELS: &[Geometry] = &[
    heads("tiny-1b", 12, 4, 128),
    heads("mistral-7b", 32, 8, 128),
    heads("llama2-7b", 32, 32, 128),
    heads("llama3.1-8b", 32, 8, 128),
    heads("llama3.1-70b", 80, 8, 128),
    heads("qwen3-32b", 64, 8, 128),
    heads("gpt-oss-20b", 24, 8, 64),
    heads("gpt-oss-120b", 36, 8, 64),
    // A latent of 512 and a rotary key of 64.
    latent("deepseek-v3", 61, 576),
];

/// Ends of names that do not change the geometry.
const TUNINGS: &[&str] = &["-instruct", "-chat", "-base"];

const fn heads(name: &'static str, layers: u32, kv_heads: u32, head_dim: u32) -> Geometry {
    Geometry { name, layers, shape: KvShape::Heads { kv_heads, head_dim }, element_bytes: 2 }
}

const fn latent(name: &'static str, layers: u32, width: u32) -> Geometry {
    Geometry { name, layers, shape: KvShape::Latent { width }, element_bytes: 2 }
}

impl Geometry {
    /// All models in the table, with 16-bit elements.
    pub const fn all() -> &'static [Self] {
        MODELS
    }

    /// The names of all models, for messages.
    pub fn names() -> String {
        let names: Vec<&str> = MODELS.iter().map(|model| model.name).collect();
        names.join(", ")
    }

    /// The model of this name. Case, hyphens, an organisation before it and what says how it was
    /// trained do not matter: `meta-llama/Llama-3.1-70B-Instruct` is `llama3.1-70b`.
    pub fn by_name(name: &str) -> Result<Self, UnknownModel> {
        let lower = name.to_ascii_lowercase();
        let model = lower.rsplit('/').next().unwrap_or(&lower);
        let tuning = TUNINGS.iter().find_map(|tuning| model.strip_suffix(tuning));
        let squeezed = tuning.unwrap_or(model).replace('-', "");
        let found = MODELS.iter().find(|model| model.name.replace('-', "") == squeezed);
        found.copied().ok_or_else(|| UnknownModel { name: name.chars().take(80).collect() })
    }

    /// Bytes of KV per token, over all layers.
    pub const fn bytes_per_token(&self) -> u64 {
        let elements = match self.shape {
            KvShape::Heads { kv_heads, head_dim } => 2 * kv_heads as u64 * head_dim as u64,
            KvShape::Latent { width } => width as u64,
        };
        self.layers as u64 * elements * self.element_bytes as u64
    }

    /// Bytes of a block of this many tokens.
    pub const fn block_bytes(&self, block_tokens: u64) -> u64 {
        self.bytes_per_token() * block_tokens
    }
}

impl fmt::Display for Geometry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({} bytes per token)", self.name, self.bytes_per_token())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The figures that `MLPerf`'s KV cache benchmark and the models' own configurations give.
    #[test]
    fn bytes_per_token_match_the_published_figures() {
        for (name, bytes) in [
            ("tiny-1b", 24_576),
            ("mistral-7b", 131_072),
            ("llama3.1-8b", 131_072),
            ("llama2-7b", 524_288),
            ("llama3.1-70b", 327_680),
            ("deepseek-v3", 70_272),
            ("qwen3-32b", 262_144),
            ("gpt-oss-120b", 73_728),
            ("gpt-oss-20b", 49_152),
        ] {
            assert_eq!(Geometry::by_name(name).map(|model| model.bytes_per_token()), Ok(bytes));
        }
        assert_eq!(Geometry::all().len(), 9);
    }

    #[test]
    fn a_context_of_8192_tokens_of_llama_8b_takes_one_gib() {
        let model = Geometry::by_name("Llama3.1-8B").expect("in the table");
        assert_eq!(model.block_bytes(8192), 1 << 30);
    }

    /// `llama3.1-70b-instruct`, a name of `MLPerf`'s benchmark, was refused.
    #[test]
    fn a_tuned_model_has_the_geometry_of_its_base() {
        for name in [
            "llama3.1-70b-instruct",
            "LLAMA3.1-70B-CHAT",
            "llama-3.1-70b",
            "meta-llama/Llama-3.1-70B-Instruct",
        ] {
            let model = Geometry::by_name(name).expect(name);
            assert_eq!((model.name, model.bytes_per_token()), ("llama3.1-70b", 327_680));
        }
        assert!(Geometry::by_name("llama3.1-70b-instruct-awq").is_err());
        assert!(Geometry::by_name("").is_err());
    }

    #[test]
    fn an_unknown_model_is_refused_with_a_list_of_known_models() {
        let error = Geometry::by_name("gpt-2").expect_err("not in the table").to_string();
        assert!(error.contains("gpt-2") && error.contains("deepseek-v3"), "{error}");
    }
}
