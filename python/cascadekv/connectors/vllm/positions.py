"""What the longest sequence of a vLLM engine changes in its KV: factors of positions, or nothing.

`max_model_len` is a limit and has no effect on the KV of most models. vLLM chooses the factors of
LongRoPE by it, and some models read it themselves. `READERS` lists the files of vLLM that read it;
`test_vllm_effects` compares the list with the installed version.
"""

from collections.abc import Iterator
from typing import Any, cast

from cascadekv.connectors import vllm_versions as versions

__all__ = ["PLAIN_ROPES", "READERS", "positions_of"]

PLAIN_ROPES = frozenset(
    (
        "default",
        "mrope",
        "linear",
        "ntk",
        "llama3",
        "yarn",
        "deepseek_yarn",
        "deepseek_llama_scaling",
        "mllama4",
        "proportional",
        "openpangu",
        "bailing_mrope",
        "dynamic",
    )
)
"""Types of rotary embeddings whose factors do not depend on the longest sequence."""
LONG_ROPES = frozenset(("longrope", "su"))
"""Types with factors for short and for long sequences; vLLM chooses by the longest one."""
TABLE_ROPES = frozenset((*LONG_ROPES, "dynamic"))
"""Types whose factors depend on the size of the table of positions."""

TEMPERATURE = frozenset(("llama4", "llama4_text"))
"""Models that scale queries by their position if the longest sequence is over 32,768."""
SCALED_FROM = 32768
TABLE_BY_LENGTH = frozenset(("minimax_m2", "minimax", "plamo3", "nomic_bert"))
"""Models whose table of positions has the size of the longest sequence."""
BY_LENGTH = frozenset(
    (
        "NemotronH_Nano_VL_V2",
        "NemotronH_Nano_Omni_Reasoning_V3",
        "NemotronH_Super_Omni_Reasoning_V3",
        "NemotronH_Omni_Reasoning_V3",
        "Dots3NoteForCausalLM",
        "CohereCompassForConditionalGeneration",
    )
)
"""Architectures that scale images and video, or their positions, by the longest sequence."""

_SIZES = "sizes of buffers and limits"
READERS = {
    "model_executor/layers/rotary_embedding/phi3_long_rope_scaled_rope.py": "LONG_ROPES",
    "model_executor/models/llama4.py": "TEMPERATURE",
    "model_executor/models/minimax_m2.py": "TABLE_BY_LENGTH",
    "model_executor/models/plamo3.py": "TABLE_BY_LENGTH",
    "model_executor/models/config.py": "TABLE_BY_LENGTH, of models without keys",
    "model_executor/models/embedding_gemma2.py": "of pooling requests, which have no keys",
    "model_executor/models/colpali.py": "of pooling requests, which have no keys",
    "model_executor/models/cohere_compass.py": "BY_LENGTH",
    "model_executor/models/nano_nemotron_vl.py": "BY_LENGTH",
    "model_executor/models/parakeet.py": "BY_LENGTH",
    "transformers_utils/configs/parakeet.py": "BY_LENGTH",
    "transformers_utils/processors/nano_nemotron_vl.py": "BY_LENGTH",
    "models/dots3_note/common/processor.py": "BY_LENGTH",
    **dict.fromkeys(
        (
            *(
                f"model_executor/models/{name}.py"
                for name in (
                    *("deepseek_ocr", "deepseek_v2", "diffusion_gemma", "ernie45_vl", "gemma3_mm"),
                    *("gemma4_mm", "glm4_1v", "idefics3", "internvl", "kimi_k25", "kimi_vl"),
                    *("lfm2_vl", "minicpmv", "mllama4", "qwen2_5_vl", "qwen2_vl", "qwen3_vl"),
                    *("step3_vl", "voxtral", "voxtral_realtime"),
                )
            ),
            *(
                f"models/{name}.py"
                for name in (
                    *("deepseek_v32/amd/rocm", "deepseek_v32/attention"),
                    *("deepseek_v4/amd/rocm", "deepseek_v4/attention", "deepseek_v4/compressor"),
                    *("deepseek_v4/common/ops/cache_utils", "deepseek_v4/cpu/cpu_sparse"),
                    *("deepseek_v4/nvidia/flashinfer_sparse", "deepseek_v4/nvidia/flashmla"),
                    *("deepseek_v4/sparse_mla", "deepseek_v4/xpu/xpu_sparse"),
                    *("deepseek_v41/amd/rocm", "deepseek_v41/attention", "deepseek_v41/compressor"),
                    *("deepseek_v41/common/vl_cudagraph", "deepseek_v41/nvidia/flashmla"),
                    *("deepseek_v41/nvidia/flash_mla_mega_attn", "glm5next/amd/sparse_indexer"),
                    *("glm5next/common/attention", "glm5next/nvidia/sparse_indexer"),
                    *("glm5next/nvidia/attention", "hy_v4/nvidia/attention"),
                    *("inkling/amd/attention", "inkling/nvidia/attention", "kimi_k3/nvidia/model"),
                    *("inkling/nvidia/ops/fa4_rel_attention", "minimax_m3/amd/indexer_aiter"),
                    *("minimax_m3/amd/sparse_attention_msa", "minimax_m3/common/mm_preprocess"),
                    "minimax_m3/common/encoder_cudagraph",
                )
            ),
        ),
        _SIZES,
    ),
}
"""vLLM's files of models, processors and rotary embeddings that read the longest sequence, and why.
"""


def positions_of(model: Any, settings: dict[str, Any]) -> str:
    """Return what the longest sequence changes; `settings` are those of vLLM's `model`."""
    length: int = model.max_model_len
    exact = f"longest sequence {length}"
    kinds = {str(kind) for kind in _values(settings, "model_type")}
    if versions.untested_warning() is not None or model.architecture in BY_LENGTH:
        return exact
    facts: set[str] = set()
    for rope, original in _ropes(settings):
        if rope in LONG_ROPES and isinstance(original, int | float):
            facts.add("long factors" if length > original else "short factors")
        elif rope not in PLAIN_ROPES:
            facts.add(exact)
        if rope in TABLE_ROPES and kinds & TABLE_BY_LENGTH:
            facts.add(exact)
    if kinds & TEMPERATURE:
        # vLLM reads this setting of the model from those for sampling.
        sampling: dict[str, Any] = {
            **model.try_get_generation_config(),
            **model.override_generation_config,
        }
        is_scaled = sampling.get("attn_temperature_tuning", length > SCALED_FROM)
        facts.add("scaled queries" if is_scaled else "queries as they are")
    return ", ".join(sorted(facts)) or "the model's own"


def _ropes(settings: dict[str, Any], original: object = None) -> Iterator[tuple[str, object]]:
    """Return the types of all rotary embeddings, and the length each was trained with first."""
    name = "original_max_position_embeddings"
    original = settings.get(name) or original
    for key, value in settings.items():
        if not isinstance(value, dict):
            continue
        inner = cast("dict[str, Any]", value)
        if key in ("rope_parameters", "rope_scaling"):
            for each in (inner, *inner.values()):
                if isinstance(each, dict):
                    rope = cast("dict[str, Any]", each)
                    kind = rope.get("rope_type") or rope.get("type")
                    if kind is not None:
                        yield str(kind), rope.get(name) or original
        else:
            yield from _ropes(inner, original)


def _values(settings: dict[str, Any], name: str) -> Iterator[object]:
    for key, value in settings.items():
        if key == name:
            yield value
        elif isinstance(value, dict):
            yield from _values(cast("dict[str, Any]", value), name)
