"""The compatibility manifests of the KV of an SGLang rank."""

import importlib
import importlib.metadata
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cascadekv._native import Manifest, digest
from cascadekv.connectors.weights import fingerprint_of_model
from cascadekv.errors import ConfigError

__all__ = ["engine_facts", "manifests_of_pool"]

logger = logging.getLogger(__name__)

_MODEL_SETTINGS = (
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "json_model_override_args",
    "qsa_indexer_dtype",
    "modelopt_quant",
)
"""Engine options that change KV but neither the weights nor the pools."""
_SHARDED_POOLS = ("mamba",)
"""Pools that are sharded by rank even if the main KV is replicated."""


def engine_facts(model_name: str | None) -> dict[str, str]:
    """Return the weights and options of the running engine that determine its KV.

    If the engine's configuration is not published in this process, the served model name identifies
    them. Raises `ConfigError` if there is no name either.
    """
    facts = {"engine_format": f"sglang {importlib.metadata.version('sglang')}"}
    if model_name:
        facts["model"] = model_name
    published = _published()
    if published is None:
        if not model_name:
            raise ConfigError(
                "SGLang reports neither the model nor its served name; set --served-model-name"
            )
        logger.warning(
            "Cascade: SGLang's configuration is not published in this process, so the served name "
            "%r alone identifies the weights, their precision and options; use another "
            "--served-model-name for other weights",
            model_name,
        )
        return {**facts, "weights": f"named:{model_name}"}
    model, spec, lora = published
    facts["weights"] = _weights(model.model_path, model.revision)
    for name in _MODEL_SETTINGS:
        value = getattr(model, name, None)
        if value is not None:
            facts[name] = str(value)
    scales = getattr(model, "quantization_param_path", None)
    if scales:
        facts["scales"] = digest(Path(scales).read_bytes()).hex()
    draft = getattr(spec, "speculative_draft_model_path", None)
    if draft:
        revision = getattr(spec, "speculative_draft_model_revision", None)
        facts["draft_weights"] = _weights(draft, revision)
    # SGLang identifies adapters by name and path; their content may change.
    adapters = {
        str(adapter.lora_name): _weights(adapter.lora_path, None)
        for adapter in getattr(lora, "lora_paths", None) or ()
    }
    if adapters:
        facts["adapters"] = json.dumps(adapters, sort_keys=True)
    return facts


def manifests_of_pool(  # noqa: PLR0913 # each argument is part of the identity
    config: Any,
    pool: Any,
    *,
    name: str,
    piece_bytes: Sequence[int],
    facts: Mapping[str, str],
    shards: int = 1,
) -> list[Manifest]:
    """Return a manifest for each share of the heads in this rank's pages.

    With `tp_lcm_size`, a page has `shards` equal shares. Each equals the page of a rank in an
    engine with `shards` times as many ranks.
    """
    fields = {
        **facts,
        "pool": f"{name} {type(pool).__name__}",
        "storage_format": str(getattr(pool, "storage_format_tag", None)),
        "dtype": f"{facts.get('dtype', 'auto')} kept as {pool.dtype}",
        "block_tokens": str(pool.page_size),
        "layers": f"{pool.start_layer} to {pool.end_layer}, {pool.layer_num} in a page",
        "kv_heads": _heads(pool, shards),
        "head_dim": _head_dim(pool),
        "layout": f"{pool.layout}, pieces of {'+'.join(map(str, piece_bytes))} bytes",
        "pipeline_parallel": f"{config.pp_rank}/{config.pp_size}",
        "context_parallel": f"{config.attn_cp_rank}/{config.attn_cp_size}",
    }
    if _is_replicated(config, pool, name):
        return [Manifest({**fields, "tensor_parallel": "replicated"})]
    size = config.tp_size * shards
    ranks = range(config.tp_rank * shards, (config.tp_rank + 1) * shards)
    return [Manifest({**fields, "tensor_parallel": f"{rank}/{size}"}) for rank in ranks]


def _is_replicated(config: Any, pool: Any, name: str) -> bool:
    """Whether the pages have the same bytes on every rank, so that one rank writes for all.

    A draft model's pool may have sharded heads although the main model's KV is compressed.
    """
    has_heads = hasattr(pool, "head_num")
    return bool(config.is_mla_model) and not has_heads and name not in _SHARDED_POOLS


def _heads(pool: Any, shards: int) -> str:
    heads = getattr(pool, "head_num", None)
    # Part of stored manifests: a change of this text changes all keys.
    return "none" if heads is None else f"{heads // shards} a rank"


def _head_dim(pool: Any) -> str:
    names = ("head_dim", "v_head_dim", "kv_lora_rank", "qk_rope_head_dim", "kv_cache_dim")
    known = [(name, getattr(pool, name, None)) for name in names]
    return ", ".join(f"{name} {value}" for name, value in known if value is not None) or "none"


def _published() -> tuple[Any, Any, Any] | None:
    """Return the engine's published options: of the model, the draft model and the adapters."""
    try:
        context: Any = importlib.import_module("sglang.srt.runtime_context")
        return context.get_model(), context.get_spec(), context.get_lora()
    except (ImportError, AttributeError, ValueError):
        return None


def _weights(path: str, revision: str | None) -> str:
    """Identify weights by content if they are on disk here, else by path and revision."""
    fingerprint = fingerprint_of_model(path) or _fingerprint_in_hub_cache(path, revision)
    if fingerprint is not None:
        return fingerprint
    logger.warning(
        "Cascade: the weights of %s are not on this machine's disk and are identified by path and "
        "revision; clear the storage if they change under the same name",
        path,
    )
    return f"named:{path}@{revision}"


def _fingerprint_in_hub_cache(path: str, revision: str | None) -> str | None:
    try:
        hub: Any = importlib.import_module("huggingface_hub")
        directory = hub.snapshot_download(path, revision=revision, local_files_only=True)
    except (ImportError, OSError, ValueError):
        return None
    return fingerprint_of_model(directory)
