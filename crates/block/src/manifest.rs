//! The compatibility manifest: the properties that must match for KV to be reusable.

use std::collections::BTreeMap;
use std::fmt;

use sha2::{Digest as _, Sha256};

/// Names of common fields. Any other name is allowed.
pub mod field {
    /// Fingerprint of the weights, never a path.
    pub const WEIGHTS: &str = "weights";
    /// Element type of the stored KV, such as `bf16` or `fp8_e4m3`.
    pub const DTYPE: &str = "dtype";
    /// Scaling of quantized elements; `none` without quantization.
    pub const SCALES: &str = "scales";
    /// Tokens in a full block.
    pub const BLOCK_TOKENS: &str = "block_tokens";
    /// Layers that keep KV.
    pub const LAYERS: &str = "layers";
    /// KV heads of the whole model.
    pub const KV_HEADS: &str = "kv_heads";
    /// Elements per head.
    pub const HEAD_DIM: &str = "head_dim";
    /// Order of layers, heads and elements in a block's bytes.
    pub const LAYOUT: &str = "layout";
    /// Name and version of the engine's KV format.
    pub const ENGINE_FORMAT: &str = "engine_format";
    /// Fingerprint of the adapter (`LoRA`) in use; `none` without one.
    pub const ADAPTER: &str = "adapter";
    /// This rank's share of the heads: `rank/size`.
    pub const TENSOR_PARALLEL: &str = "tensor_parallel";

    /// Required fields: without any of them, incompatible KV could be reused.
    pub const REQUIRED: [&str; 8] =
        [WEIGHTS, DTYPE, BLOCK_TOKENS, LAYERS, KV_HEADS, HEAD_DIM, LAYOUT, TENSOR_PARALLEL];
}

/// The compatibility manifest: the properties that must match for KV to be reusable.
///
/// Fields are sorted by name, so that equal manifests have equal bytes. Name weights by their
/// fingerprint, never by a path.
#[derive(Debug, Clone, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub struct Manifest {
    fields: BTreeMap<String, String>,
}

/// A field in which two manifests differ.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ManifestDifference {
    /// The field's name.
    pub field: String,
    /// Its value in the first manifest.
    pub ours: Option<String>,
    /// Its value in the other manifest.
    pub theirs: Option<String>,
}

/// A fingerprint of weights, so that equal weights under two paths share their KV.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct WeightsFingerprint(String);

impl Manifest {
    /// An empty manifest.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds or replaces a field.
    #[must_use]
    pub fn with(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.fields.insert(name.into(), value.into());
        self
    }

    /// Sets the weights that computed the KV.
    #[must_use]
    pub fn weights(self, fingerprint: &WeightsFingerprint) -> Self {
        self.with(field::WEIGHTS, fingerprint.as_str())
    }

    /// Sets the element type, such as `bf16`, and its scaling, such as `none`.
    #[must_use]
    pub fn dtype(self, dtype: &str, scales: &str) -> Self {
        self.with(field::DTYPE, dtype).with(field::SCALES, scales)
    }

    /// Sets the number of tokens of a full block.
    #[must_use]
    pub fn block_tokens(self, tokens: u32) -> Self {
        self.with(field::BLOCK_TOKENS, tokens.to_string())
    }

    /// Sets the whole model's layers, KV heads and elements per head.
    #[must_use]
    pub fn geometry(self, layers: u32, kv_heads: u32, head_dim: u32) -> Self {
        self.with(field::LAYERS, layers.to_string())
            .with(field::KV_HEADS, kv_heads.to_string())
            .with(field::HEAD_DIM, head_dim.to_string())
    }

    /// Sets the layout of a block's bytes.
    #[must_use]
    pub fn layout(self, layout: &str) -> Self {
        self.with(field::LAYOUT, layout)
    }

    /// Sets the engine and the version of its KV format.
    #[must_use]
    pub fn engine_format(self, format: &str) -> Self {
        self.with(field::ENGINE_FORMAT, format)
    }

    /// Sets the fingerprint of the adapter in use.
    #[must_use]
    pub fn adapter(self, fingerprint: &WeightsFingerprint) -> Self {
        self.with(field::ADAPTER, fingerprint.as_str())
    }

    /// Sets which of `size` equal shares of the heads this rank has.
    ///
    /// # Panics
    /// If `rank` is not below `size`.
    #[must_use]
    pub fn tensor_parallel(self, rank: u32, size: u32) -> Self {
        assert!(rank < size, "rank {rank} of {size}: ranks count from 0");
        self.with(field::TENSOR_PARALLEL, format!("{rank}/{size}"))
    }

    /// The value of a field.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.fields.get(name).map(String::as_str)
    }

    /// The fields in the order of hashing.
    pub fn fields(&self) -> impl Iterator<Item = (&str, &str)> {
        self.fields.iter().map(|(name, value)| (name.as_str(), value.as_str()))
    }

    /// The missing required fields. A connector refuses to start if there are any.
    pub fn missing(&self) -> Vec<&'static str> {
        field::REQUIRED.into_iter().filter(|name| !self.fields.contains_key(*name)).collect()
    }

    /// The fields that differ, sorted by name; empty if blocks may be reused.
    pub fn difference(&self, other: &Self) -> Vec<ManifestDifference> {
        let mut names: Vec<&String> = self.fields.keys().chain(other.fields.keys()).collect();
        names.sort_unstable();
        names.dedup();
        let differing = names.into_iter().filter(|name| self.get(name) != other.get(name));
        differing
            .map(|name| ManifestDifference {
                field: name.clone(),
                ours: self.fields.get(name).cloned(),
                theirs: other.fields.get(name).cloned(),
            })
            .collect()
    }

    /// The bytes to hash: for each field, length and bytes of its name, then of its value.
    pub fn canonical_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for text in self.fields().flat_map(|(name, value)| [name, value]) {
            bytes.extend_from_slice(&(text.len() as u64).to_le_bytes());
            bytes.extend_from_slice(text.as_bytes());
        }
        bytes
    }
}

impl WeightsFingerprint {
    /// From a hash published by a model hub or checkpoint index, with its algorithm:
    /// `("sha256", "9f86…")`.
    pub fn from_hash(algorithm: &str, hash: &str) -> Self {
        Self(format!("{}:{}", algorithm.to_ascii_lowercase(), hash.to_ascii_lowercase()))
    }

    /// From the bytes of the weight files, or of their headers and index, in a fixed order.
    pub fn of_parts<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> Self {
        let mut all = Sha256::new();
        for part in parts {
            all.update(Sha256::digest(part));
        }
        Self(format!("parts-sha256:{}", Hex(&all.finalize())))
    }

    /// The value of the manifest's field.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ManifestDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = |value: &Option<String>| value.clone().unwrap_or_else(|| "not stated".into());
        write!(f, "{}: {} here, {} there", self.field, shown(&self.ours), shown(&self.theirs))
    }
}

struct Hex<'a>(&'a [u8]);

impl fmt::Display for Hex<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn complete() -> Manifest {
        Manifest::new()
            .weights(&WeightsFingerprint::from_hash("SHA256", "9F86D081"))
            .dtype("bf16", "none")
            .block_tokens(128)
            .geometry(32, 8, 128)
            .layout("layer-kv-token-head")
            .tensor_parallel(0, 1)
    }

    #[test]
    fn a_difference_names_the_field_and_both_values() {
        let other = complete().dtype("fp8_e4m3", "none").adapter(&WeightsFingerprint::of_parts([]));
        let difference = complete().difference(&other);
        let fields: Vec<&str> = difference.iter().map(|one| one.field.as_str()).collect();
        assert_eq!(fields, ["adapter", "dtype"]);
        assert_eq!(difference[1].to_string(), "dtype: bf16 here, fp8_e4m3 there");
        assert!(difference[0].to_string().starts_with("adapter: not stated here"));
        assert!(complete().difference(&complete()).is_empty());
    }

    #[test]
    fn an_incomplete_manifest_lists_its_missing_fields() {
        assert!(complete().missing().is_empty());
        let incomplete = Manifest::new().dtype("bf16", "none");
        assert!(!incomplete.missing().contains(&field::DTYPE));
        assert!(incomplete.missing().contains(&field::WEIGHTS));
    }

    #[test]
    fn a_weights_fingerprint_depends_on_bytes_and_part_boundaries() {
        let whole = WeightsFingerprint::of_parts([b"ab".as_slice()]);
        assert_eq!(whole, WeightsFingerprint::of_parts([b"ab".as_slice()]));
        assert_ne!(whole, WeightsFingerprint::of_parts([b"a".as_slice(), b"b"]));
        let hub = WeightsFingerprint::from_hash("SHA256", "9F86");
        assert_eq!(hub.as_str(), "sha256:9f86");
    }

    #[test]
    fn a_manifest_round_trips_through_json() {
        let text = serde_json::to_string(&complete()).expect("strings are JSON");
        assert_eq!(serde_json::from_str::<Manifest>(&text).expect("as written"), complete());
    }
}
