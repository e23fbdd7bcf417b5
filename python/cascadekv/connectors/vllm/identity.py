"""The fields of a vLLM engine's compatibility manifest.

Everything that changes a byte of the KV is a field: the weights by content, element types and
scales, the geometry, the layout of a block's bytes, the CPU's instruction set if the attention
backend packs for it, the engine's version, and all settings that are not known to have no effect
(`engine_settings`).
"""

import hashlib
from typing import TYPE_CHECKING, Any

from cascadekv.connectors.vllm.engine_settings import settings_of
from cascadekv.connectors.vllm.model_weights import (
    FINGERPRINTS,
    NOT_DIGESTED,
    doubt_of_weights,
    places_of_model,
)
from cascadekv.connectors.vllm.settings import ConnectorSettings
from cascadekv.connectors.weight_digests import WeightDigests, digests_place
from cascadekv.connectors.weights import NotDigestedError, fingerprint_of_model

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = ["identity_of", "manifest_of"]


def identity_of(
    config: "VllmConfig", cache: "KVCacheConfig", settings: ConnectorSettings, pieces: int
) -> tuple[dict[str, str], str | None, WeightDigests]:
    """Return the manifest's fields, and why its KV must not outlive this run; `None` if it may.

    Digests that are not known are computed in the background by what is returned last.
    """
    digests = WeightDigests(digests_place(settings.store_options))
    fields = manifest_of(config, cache, settings.weights, pieces, digests)
    doubt = doubt_of_weights(config, settings.weights, fields["weights"])
    if NOT_DIGESTED in fields["weights"] and config.parallel_config.rank == 0:
        digests.start(places_of_model(config))
    return fields, doubt, digests


def manifest_of(
    config: "VllmConfig",
    cache: "KVCacheConfig",
    weights: str,
    pieces: int = 1,
    digests: WeightDigests | None = None,
) -> dict[str, str]:
    """Return the fields, equal on every worker of an engine.

    `pieces` is the number of the attention backend's blocks in one block of the engine; `digests`
    has what is known of the files of weights.
    """
    import vllm  # noqa: PLC0415 # only an engine has it
    from vllm.platforms import current_platform  # noqa: PLC0415

    model: Any = config.model_config
    parallel = config.parallel_config
    fields = {
        "weights": _weights(config, weights, digests),
        "dtype": f"{model.dtype}; kv {config.cache_config.cache_dtype}",
        "scales": "none" if config.cache_config.cache_dtype == "auto" else "in the weights",
        "block_tokens": str(config.cache_config.block_size),
        "layers": str(model.get_total_num_hidden_layers()),
        "kv_heads": str(1 if model.use_mla else model.get_total_num_kv_heads()),
        "head_dim": str(model.get_head_size()),
        "layout": cache.kv_cache_layout or "LBHNC",
        "tensor_parallel": "in the part",
        "context_parallel": _context_parallel(parallel),
        "attention": f"{_attention(config, cache)}; {pieces} pieces a block",
        "engine_format": f"vllm {vllm.__version__} {current_platform.device_type}",
        "groups": _digest(repr([type(g.kv_cache_spec).__name__ for g in cache.kv_cache_groups])),
        **settings_of(config),
    }
    if current_platform.device_type == "cpu":
        fields["isa"] = _isa(config)
    return fields


def _context_parallel(parallel: Any) -> str:
    size = parallel.decode_context_parallel_size
    return "1" if size == 1 else f"{size}, {parallel.cp_kv_cache_interleave_size} tokens in turn"


def _attention(config: "VllmConfig", cache: "KVCacheConfig") -> str:
    """Return the attention backends of the layers: each has its own byte order within a page."""
    layers: dict[str, Any] = config.compilation_config.static_forward_context
    kept = [name for group in cache.kv_cache_groups for name in group.layer_names]
    names = {layers[name].get_attn_backend().get_name() for name in kept if name in layers}
    return ", ".join(sorted(names)) or "unknown"


def _weights(config: "VllmConfig", weights: str, digests: WeightDigests | None) -> str:
    if weights not in FINGERPRINTS:
        return f"named {weights}"
    model: Any = config.model_config
    load = str(config.load_config.load_format)
    if "dummy" in load:
        return f"dummy {model.model} {model.seed}"
    fingerprint = None
    for place in places_of_model(config):
        fingerprint = fingerprint or _fingerprint(place, weights, digests)
    if fingerprint is None:
        raise FileNotFoundError(
            f"the weights of {model.model_weights or model.model} are not on this machine's disks "
            f"and cannot be fingerprinted; set cascade.weights to a name that changes whenever "
            f"they change"
        )
    return f"{fingerprint} {load}"


def _fingerprint(place: str, weights: str, digests: WeightDigests | None) -> str | None:
    if weights == "digest" and digests is not None:
        try:
            return digests.fingerprint(place)
        except NotDigestedError:
            return NOT_DIGESTED
    return fingerprint_of_model(place, is_full=weights != "sampled")


def _isa(config: "VllmConfig") -> str:
    """Return how the CPU backend packs a block: its own choice, if it can be queried."""
    from vllm.v1.attention.backends import cpu_attn  # noqa: PLC0415

    model: Any = config.model_config
    choose = getattr(cpu_attn, "_get_attn_isa", None)
    if choose is None:
        import torch  # noqa: PLC0415

        return f"{torch.backends.cpu.get_cpu_capability()}, packing unknown"
    size, kind = config.cache_config.block_size, config.cache_config.cache_dtype
    return str(choose(model.dtype, size, model.get_head_size(), kind))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
