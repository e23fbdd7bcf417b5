//! The geometry of a model that a file describes: `model_configs` of the original, or the
//! `config.json` of Hugging Face.

use std::path::Path;

use cascade_block::{Geometry, KvShape};

use crate::KvBenchError;
use crate::settings_file::{Section, SettingsFile};

/// The section of the original's `config.yaml`.
pub const MODEL_CONFIGS: &str = "model_configs";
/// The settings of a model in it.
const SETTINGS: [&str; 10] = [
    "name",
    "num_layers",
    "hidden_dim",
    "num_heads",
    "kv_heads",
    "kv_dim_per_head",
    "dtype",
    "attention_type",
    "kv_lora_rank",
    "qk_rope_head_dim",
];
/// Bytes of a token that can be divided into blocks of some MiB.
const TOKEN_BYTES: std::ops::RangeInclusive<u64> = 2048..=4 << 20;
const LAYERS_MAX: u64 = 10_000;
const HEADS_MAX: u64 = 100_000;
const WIDTH_MAX: u64 = 10_000_000;

/// A model that a file describes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelConfig {
    /// Its name.
    pub name: String,
    /// Layers that keep KV, and what each keeps.
    pub geometry: Geometry,
}

impl ModelConfig {
    /// Reads a file in either form. `name` is that of `--model`, if it was given: it chooses among
    /// `model_configs`, and is only a name for a `config.json`.
    ///
    /// # Errors
    /// If the file has no such model, or does not say how large its KV is.
    pub fn read(path: &Path, name: Option<&str>) -> Result<Self, KvBenchError> {
        let file = SettingsFile::read("--model-config", path)?;
        Self::of(&file, name)
    }

    fn of(file: &SettingsFile, name: Option<&str>) -> Result<Self, KvBenchError> {
        let top = file.section();
        if let Some(models) = top.below(MODEL_CONFIGS)? {
            let only = models.names().next().filter(|_| models.names().count() == 1);
            let Some(name) = name.or(only) else {
                let names: Vec<&str> = models.names().collect();
                return Err(file.error(
                    format!("it describes {} models", names.len()),
                    format!("choose one with --model: {}", names.join(", ")),
                ));
            };
            let found = Self::of_section(&models, name)?;
            return found.ok_or_else(|| {
                let names: Vec<&str> = models.names().collect();
                file.error(
                    format!("`{MODEL_CONFIGS}` has no model {name:?}"),
                    format!("choose one with --model: {}", names.join(", ")),
                )
            });
        }
        // Models that also see or hear have the part that keeps KV below.
        let text = top.below("text_config")?;
        let text = text.as_ref().unwrap_or(&top);
        if !text.has("num_hidden_layers") && !text.has("n_layer") {
            return Err(file.error(
                "it describes no model",
                format!(
                    "give the original's config.yaml with `{MODEL_CONFIGS}`, or the config.json of \
                     a model of Hugging Face with `num_hidden_layers`"
                ),
            ));
        }
        let geometry = of_hugging_face(text)?;
        let name = match name {
            Some(name) => name,
            None => top.text("model_type")?.unwrap_or("unnamed"),
        };
        Ok(Self { name: name.to_owned(), geometry })
    }

    /// The model of this name in the original's section, if it is there.
    ///
    /// # Errors
    /// If the section does not say how large its KV is.
    pub fn of_section(models: &Section<'_>, name: &str) -> Result<Option<Self>, KvBenchError> {
        let Some(model) = models.below(name)? else { return Ok(None) };
        model.check_names(&SETTINGS)?;
        let layers = required(&model, "num_layers", LAYERS_MAX)?;
        let attention = model.text("attention_type")?.unwrap_or("mha");
        let shape = match attention {
            "mla" => KvShape::Latent {
                width: required(&model, "kv_lora_rank", WIDTH_MAX)?
                    + required(&model, "qk_rope_head_dim", WIDTH_MAX)?,
            },
            "mha" | "gqa" => {
                let kv_heads = required(&model, "kv_heads", HEADS_MAX)?;
                let names = ["kv_dim_per_head", "hidden_dim", "num_heads"];
                KvShape::Heads { kv_heads, head_dim: head_dim(&model, names)? }
            }
            other => {
                let what = format!("expected mha, gqa or mla, found {other:?}");
                return Err(model.error("attention_type", what, "change it in the file"));
            }
        };
        let bytes = element_bytes(&model, "dtype", model.text("dtype")?.unwrap_or("float16"))?;
        let geometry = geometry(&model, "num_layers", (layers, shape, bytes))?;
        Ok(Some(Self { name: name.to_owned(), geometry }))
    }
}

fn of_hugging_face(text: &Section<'_>) -> Result<Geometry, KvBenchError> {
    let first = |names: &[&'static str]| {
        names.iter().copied().find(|name| text.has(name)).unwrap_or(names[0])
    };
    let layers_name = first(&["num_hidden_layers", "n_layer"]);
    let layers = match layers_with_kv(text)? {
        Some(layers) => layers,
        None => required(text, layers_name, LAYERS_MAX)?,
    };
    let shape = if text.has("kv_lora_rank") {
        KvShape::Latent {
            width: required(text, "kv_lora_rank", WIDTH_MAX)?
                + required(text, "qk_rope_head_dim", WIDTH_MAX)?,
        }
    } else {
        let heads = first(&["num_attention_heads", "n_head"]);
        let kv_heads = first(&["num_key_value_heads", "num_kv_heads"]);
        let kv_heads = match text.whole(kv_heads, 1..=HEADS_MAX)? {
            Some(number) => narrow(number),
            None if text.flag("multi_query")? => {
                return Err(
                    text.missing(kv_heads, "the number of KV heads, as `multi_query` is set")
                );
            }
            None => required(text, heads, HEADS_MAX)?,
        };
        let names = ["head_dim", first(&["hidden_size", "n_embd"]), heads];
        KvShape::Heads { kv_heads, head_dim: head_dim(text, names)? }
    };
    let dtype = if text.has("dtype") { "dtype" } else { "torch_dtype" };
    let bytes = element_bytes(text, dtype, text.text(dtype)?.unwrap_or("float16"))?;
    geometry(text, layers_name, (layers, shape, bytes))
}

/// Layers that keep KV, if the file lists the kind of each. Layers of a sliding window count whole,
/// as in the original.
fn layers_with_kv(text: &Section<'_>) -> Result<Option<u32>, KvBenchError> {
    if let Some(kinds) = text.texts("layer_types")? {
        let keeps = |kind: &&str| kind.ends_with("attention") && *kind != "linear_attention";
        let layers = kinds.into_iter().filter(keeps).count() as u64;
        if layers == 0 || layers > LAYERS_MAX {
            let what = format!("{layers} layers keep KV");
            return Err(text.error("layer_types", what, "give the config.json of another model"));
        }
        return Ok(Some(narrow(layers)));
    }
    let hybrid = ["hybrid_override_pattern", "attn_layer_period", "full_attention_interval"];
    match hybrid.into_iter().find(|name| text.has(name)) {
        None => Ok(None),
        Some(name) => Err(text.error(
            name,
            "only some layers of this model keep KV, and `layer_types` does not say which",
            format!("describe it in YAML, with the number of such layers: `{MODEL_CONFIGS}`"),
        )),
    }
}

/// Elements of a head's key: as stated, or the model's width over its heads.
fn head_dim(model: &Section<'_>, names: [&str; 3]) -> Result<u32, KvBenchError> {
    let [own, width, heads] = names;
    if let Some(number) = model.whole(own, 1..=WIDTH_MAX)? {
        return Ok(narrow(number));
    }
    let (all, number) = (required(model, width, WIDTH_MAX)?, required(model, heads, HEADS_MAX)?);
    if all.is_multiple_of(number) {
        return Ok(all / number);
    }
    let form = format!("the size of a head, as `{heads}` does not divide `{width}`");
    Err(model.missing(own, form))
}

fn element_bytes(model: &Section<'_>, name: &str, dtype: &str) -> Result<u32, KvBenchError> {
    match dtype {
        "float32" => Ok(4),
        "float16" | "bfloat16" => Ok(2),
        "int8" | "uint8" | "fp8" | "float8_e4m3fn" | "float8_e5m2" => Ok(1),
        other => {
            let what = format!("expected float32, float16, bfloat16, int8 or fp8, found {other:?}");
            Err(model.error(name, what, "change it in the file"))
        }
    }
}

fn geometry(
    model: &Section<'_>,
    field: &str,
    (layers, shape, element_bytes): (u32, KvShape, u32),
) -> Result<Geometry, KvBenchError> {
    let elements: u64 = match shape {
        KvShape::Heads { kv_heads, head_dim } => 2 * u64::from(kv_heads) * u64::from(head_dim),
        KvShape::Latent { width } => u64::from(width),
    };
    let bytes = elements.saturating_mul(u64::from(layers) * u64::from(element_bytes));
    if TOKEN_BYTES.contains(&bytes) {
        return Ok(Geometry { name: "described in a file", layers, shape, element_bytes });
    }
    let what = format!("with the other fields it makes {bytes} bytes of KV a token");
    let advice = format!(
        "describe a model with {} bytes to {} MiB a token",
        TOKEN_BYTES.start(),
        TOKEN_BYTES.end() >> 20
    );
    Err(model.error(field, what, advice))
}

fn required(model: &Section<'_>, name: &str, most: u64) -> Result<u32, KvBenchError> {
    let number = model.whole(name, 1..=most)?;
    let form = || model.missing(name, format!("a whole number from 1 to {most}"));
    number.map(narrow).ok_or_else(form)
}

/// A number that was checked to be small.
fn narrow(number: u64) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use tempfile::TempDir;

    use super::*;

    fn read(text: &str, name: Option<&str>) -> Result<ModelConfig, String> {
        let directory = TempDir::new().unwrap();
        let path = directory.path().join("config");
        fs::write(&path, text).unwrap();
        ModelConfig::read(&path, name).map_err(|error| error.to_string())
    }

    fn bytes(text: &str, name: Option<&str>) -> u64 {
        read(text, name).unwrap().geometry.bytes_per_token()
    }

    /// The nine models as the original's config.yaml describes them.
    const ORIGINAL: &str = "
decode: {batch_size: 32}
model_configs:
  tiny-1b: {name: Tiny, num_layers: 12, hidden_dim: 1024, num_heads: 8, kv_heads: 4, dtype: float16}
  mistral-7b: {num_layers: 32, hidden_dim: 4096, num_heads: 32, kv_heads: 8, dtype: \"float16\"}
  llama2-7b: {num_layers: 32, hidden_dim: 4096, num_heads: 32, kv_heads: 32}
  llama3.1-8b: {num_layers: 32, hidden_dim: 4096, num_heads: 32, kv_heads: 8, dtype: bfloat16}
  llama3.1-70b-instruct:
    num_layers: 80
    hidden_dim: 8192
    num_heads: 64
    kv_heads: 8
    attention_type: gqa
  deepseek-v3:
    num_layers: 61
    num_heads: 128
    hidden_dim: 7168
    attention_type: \"mla\"
    kv_lora_rank: 512
    qk_rope_head_dim: 64
    dtype: \"float16\"
  qwen3-32b: {num_layers: 64, num_heads: 64, hidden_dim: 5120, kv_heads: 8, kv_dim_per_head: 128}
  gpt-oss-120b: {num_layers: 36, num_heads: 64, hidden_dim: 2880, kv_heads: 8, kv_dim_per_head: 64}
  gpt-oss-20b: {num_layers: 24, num_heads: 64, hidden_dim: 2880, kv_heads: 8, kv_dim_per_head: 64}
";

    #[test]
    fn models_of_the_original_have_the_sizes_of_the_built_in_ones() {
        for model in Geometry::all() {
            let name =
                if model.name == "llama3.1-70b" { "llama3.1-70b-instruct" } else { model.name };
            assert_eq!(bytes(ORIGINAL, Some(name)), model.bytes_per_token(), "{name}");
        }
        let one = "model_configs:\n  mine: {num_layers: 2, kv_heads: 4, kv_dim_per_head: 128, \
                   dtype: int8}\n";
        let found = read(one, None).unwrap();
        assert_eq!((&*found.name, found.geometry.bytes_per_token()), ("mine", 2048));
    }

    #[test]
    fn models_of_hugging_face_have_the_sizes_of_the_built_in_ones() {
        let llama = r#"{"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096,
            "num_attention_heads": 32, "num_key_value_heads": 8, "torch_dtype": "bfloat16"}"#;
        let found = read(llama, None).unwrap();
        assert_eq!((&*found.name, found.geometry.bytes_per_token()), ("llama", 131_072));
        assert_eq!(read(llama, Some("meta/mine")).unwrap().name, "meta/mine");
        let deepseek = r#"{"num_hidden_layers": 61, "num_attention_heads": 128,
            "num_key_value_heads": 128, "hidden_size": 7168, "kv_lora_rank": 512,
            "qk_rope_head_dim": 64, "torch_dtype": "bfloat16"}"#;
        assert_eq!(bytes(deepseek, None), 70_272);
        let qwen = r#"{"num_hidden_layers": 64, "num_attention_heads": 64, "head_dim": 128,
            "num_key_value_heads": 8, "hidden_size": 5120, "dtype": "bfloat16"}"#;
        assert_eq!(bytes(qwen, None), 262_144);
        let no_groups = r#"{"num_hidden_layers": 32, "num_attention_heads": 32,
            "hidden_size": 4096, "torch_dtype": "float16"}"#;
        assert_eq!(bytes(no_groups, None), 524_288);
        let gpt = r#"{"n_layer": 12, "n_head": 12, "n_embd": 768}"#;
        assert_eq!(bytes(gpt, None), 36_864);
        let seeing = format!("{{\"model_type\": \"sees\", \"text_config\": {llama}}}");
        assert_eq!(bytes(&seeing, None), 131_072);
        let mixed = r#"{"num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 128,
            "num_key_value_heads": 8, "layer_types": ["linear_attention", "full_attention",
            "linear_attention", "sliding_attention"]}"#;
        assert_eq!(bytes(mixed, None), 2 * 2 * 8 * 128 * 2);
    }

    #[test]
    fn what_is_not_known_is_refused_with_the_field_and_the_form() {
        let model = |fields: &str| format!("model_configs:\n  mine: {{{fields}}}\n");
        let heads = "num_layers: 32, hidden_dim: 4096, num_heads: 32";
        for (text, part) in [
            (ORIGINAL.to_owned(), "it describes 9 models\n  choose one with --model: deepseek-v3"),
            (model(heads), "field `model_configs.mine.kv_heads`: missing; expected a whole number"),
            (model("num_layers: many"), "num_layers`: expected a whole number from 1 to 10000"),
            (
                model("num_layers: 2, kv_heads: 8, hidden_dim: 100, num_heads: 3"),
                "kv_dim_per_head`: missing; expected the size of a head",
            ),
            (model(&format!("{heads}, kv_heads: 8, dtype: int4")), "dtype`: expected float32"),
            (model(&format!("{heads}, attention_type: mamba")), "expected mha, gqa or mla"),
            (model("num_layers: 2, attention_type: mla"), "mine.kv_lora_rank`: missing"),
            (model(&format!("{heads}, kv_heads: 8, window: 5")), "mine.window`: there is no such"),
            (
                model("num_layers: 1, kv_heads: 1, kv_dim_per_head: 64"),
                "with the other fields it makes 256 bytes of KV a token",
            ),
            (
                model("num_layers: 10000, kv_heads: 100000, kv_dim_per_head: 10000000"),
                "bytes of KV a token\n  describe a model with 2048 bytes to 4 MiB a token",
            ),
            ("model_configs: {mine: 3}".to_owned(), "`model_configs.mine`: expected named values"),
            ("a: 3".to_owned(), "it describes no model"),
            (
                r#"{"num_hidden_layers": 32, "attn_layer_period": 8}"#.to_owned(),
                "field `attn_layer_period`: only some layers",
            ),
            (
                r#"{"num_hidden_layers": 32, "num_attention_heads": 71, "multi_query": true}"#
                    .to_owned(),
                "field `num_key_value_heads`: missing; expected the number of KV heads",
            ),
        ] {
            let refused = read(&text, None).unwrap_err();
            assert!(refused.contains(part), "{part} is not in {refused}");
        }
        let other = read(ORIGINAL, Some("gpt-2")).unwrap_err();
        assert!(other.contains("`model_configs` has no model \"gpt-2\""), "{other}");
    }
}
