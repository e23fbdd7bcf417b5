"""The compatibility manifests of the KV of an SGLang rank."""

import fnmatch
import importlib
import importlib.metadata
import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cascadekv._native import Manifest, digest
from cascadekv.connectors.canonical import canonical_text
from cascadekv.connectors.effects import ABSENT, Numerics, Setting, counted
from cascadekv.connectors.model_files import is_for_media, model_files_digest
from cascadekv.connectors.sglang_effects import SGLANG_ENVIRONMENT, SGLANG_OPTIONS
from cascadekv.connectors.sglang_weights import RankWeights
from cascadekv.errors import ConfigError

__all__ = ["engine_facts", "manifests_of_pool"]

logger = logging.getLogger(__name__)

Options = Mapping[str, Mapping[str, Setting]]
"""SGLang's options by namespace and name."""
FIELDS = 200
"""Most options that are fields of their own; a manifest has at most 256."""
_SHARDED_POOLS = ("mamba",)
"""Pools that are sharded by rank even if the main KV is replicated."""


def engine_facts(model_name: str | None, weights: RankWeights) -> dict[str, str]:
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
    return facts | _option_facts(published, weights)


def _option_facts(options: Options, weights: RankWeights) -> dict[str, str]:
    """Return the facts that the running engine's options say about its KV."""

    def value(path: str, name: str) -> Any:
        setting = options.get(path, {}).get(name)
        return None if setting is None else setting.value

    model_path, revision = value("model", "model_path"), value("model", "revision")
    numerics = Numerics(
        is_quantized=value("model", "quantization") is not None
        or value("model", "kv_cache_dtype") not in (None, "auto", "bf16", "bfloat16", "fp16"),
        is_batch_invariant=bool(value("exec.deterministic", "enable_deterministic_inference")),
    )
    facts = {
        "weights": _weights(weights, model_path, revision),
        "dtype": str(value("model", "dtype")),
        "numerics": _numerics(numerics),
        "model_files": _files(model_path, revision, runs_code=value("model", "trust_remote_code")),
    }
    scales = value("model", "quantization_param_path")
    if scales:
        facts["scales"] = digest(Path(scales).read_bytes()).hex()
    tokenizer = value("serving", "tokenizer_path")
    directory = _directory(model_path, revision)
    if directory is not None and is_for_media(directory):
        # The tokenizer's mode chooses the processor of images, and its files have its settings.
        files = (
            _files(tokenizer, None, runs_code=True) if tokenizer not in (None, model_path) else ""
        )
        facts["model_files"] += f" {files} {value('serving', 'tokenizer_mode')}"
    draft = value("spec", "speculative_draft_model_path")
    if draft:
        draft_revision = value("spec", "speculative_draft_model_revision")
        runs_code = value("model", "trust_remote_code")
        files = _files(draft, draft_revision, runs_code=runs_code)
        facts["draft_weights"] = f"{_weights(weights, draft, draft_revision)} {files}"
    # SGLang identifies adapters by name and path; their content may change.
    adapters = {
        str(adapter.lora_name): _weights(weights, adapter.lora_path, None)
        for adapter in value("lora", "lora_paths") or ()
    }
    if adapters:
        facts["adapters"] = json.dumps(adapters, sort_keys=True)
    chosen = _environment()
    for path, settings in options.items():
        table = SGLANG_OPTIONS.get(path, {})
        chosen |= counted(settings.values(), table, numerics, prefix=f"{path}.")
    if len(chosen) > FIELDS:
        chosen = {"options": digest(canonical_text(chosen).encode()).hex()}
    return facts | chosen


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


def _published() -> Options | None:
    """Return the engine's published options; `None` if they are not published in this process."""
    try:
        context: Any = importlib.import_module("sglang.srt.runtime_context")
        arguments: Any = importlib.import_module("sglang.srt.arg_groups.arg_utils")
        record: Any = importlib.import_module("sglang.srt.server_args").ServerArgs
        context.get_model()  # raises if nothing is published
        defaults = {field.name: _default(field) for field in arguments.record_fields(record)}
        options: dict[str, dict[str, Setting]] = {}
        for name, path in arguments.namespace_of(record).items():
            found, bag = _bag(context, path), options.setdefault(path, {})
            if hasattr(found, name):
                bag[name] = Setting(name, getattr(found, name), defaults.get(name, ABSENT))
    except (ImportError, AttributeError, ValueError):
        return None
    return options


def _bag(context: Any, path: str) -> Any:
    """Return a namespace of options, such as `exec.kernel`."""
    top, *inner = path.split(".")
    bag: Any = getattr(context, f"get_{top}")()
    for name in inner:
        bag = getattr(bag, name)
    return bag


def _default(field: Any) -> object:
    if callable(field.default_factory):
        return field.default_factory()
    return field.default


def _environment() -> dict[str, str]:
    """Return the environment variables that SGLang knows, that are set and that may change KV."""
    try:
        known: Any = importlib.import_module("sglang.srt.environ").Envs
    except (ImportError, AttributeError):
        return {}
    names = [name for name in sorted(os.environ) if name in vars(known)]
    settings = [Setting(name, os.environ[name]) for name in names if not _has_no_effect(name)]
    return counted(
        settings, {}, Numerics(is_quantized=True, is_batch_invariant=False), prefix="environment."
    )


def _has_no_effect(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in SGLANG_ENVIRONMENT)


def _numerics(numerics: Numerics) -> str:
    """Return what decides about kernels. A device's kernels may quantize activations or not."""
    if not numerics.is_quantized and not numerics.is_batch_invariant:
        return "as the model"
    torch: Any = importlib.import_module("torch")
    device = torch.cuda.get_device_capability() if torch.cuda.is_available() else "cpu"
    batch = "equal in all batches, " if numerics.is_batch_invariant else ""
    return f"{batch}kernels for {device}"


def _files(path: str, revision: str | None, *, runs_code: object) -> str:
    """Return a digest of the files of a model that change KV, or its name if they are not here."""
    directory = _directory(path, revision)
    if directory is None:
        return "one file" if Path(path).is_file() else f"named:{path}@{revision}"
    return model_files_digest(
        directory, has_media=is_for_media(directory), runs_code=bool(runs_code)
    )


def _directory(path: str, revision: str | None) -> Path | None:
    """Return the directory of a model: its own, or that in the hub cache; `None` without one."""
    if Path(path).is_dir():
        return Path(path)
    if Path(path).exists():
        return None
    try:
        hub: Any = importlib.import_module("huggingface_hub")
        return Path(hub.snapshot_download(path, revision=revision, local_files_only=True))
    except (ImportError, OSError, ValueError):
        return None


def _weights(weights: RankWeights, path: str, revision: str | None) -> str:
    """Identify weights by content if they are on disk here, else by path and revision."""
    for place in (Path(path), _directory(path, revision)):
        if place is not None and place.exists() and (name := weights.name(place)) is not None:
            return name
    logger.warning(
        "Cascade: the weights of %s are not on this machine's disk and are identified by path and "
        "revision; clear the storage if they change under the same name",
        path,
    )
    return f"named:{path}@{revision}"
