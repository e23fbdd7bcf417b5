"""The compatibility manifest of the chunks of vLLM's native offload."""

import dataclasses
import json
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload.config import OffloadingConfig

from cascadekv.connectors import vllm_versions as versions
from cascadekv.connectors.canonical import canonical_text, text_digest
from cascadekv.connectors.effects import Effect, Numerics, Setting, counted
from cascadekv.connectors.file_changes import changed_since_start
from cascadekv.connectors.vllm.effects import OFFLOADING_CONFIGURATION
from cascadekv.connectors.vllm.engine_settings import settings_of
from cascadekv.connectors.vllm.environment import environment_of
from cascadekv.connectors.vllm.model_weights import FINGERPRINTS, NOT_DIGESTED, doubt_of_weights
from cascadekv.connectors.weight_digests import WeightDigests
from cascadekv.connectors.weights import NotDigestedError, fingerprint_of_model
from cascadekv.errors import ConfigError

if TYPE_CHECKING:
    from cascadekv.connectors.vllm.offload import Engine

__all__ = ["WEIGHTS", "doubt_of", "hash_seed", "manifest_of", "untold_settings_warning"]

WEIGHTS = "cascade.weights"
"""The setting of how weights are identified."""
_THIS_PROCESS = f"of the process {uuid.uuid4().hex}"


def untold_settings_warning(fields: Mapping[str, str]) -> str | None:
    """Return a warning if chunks with this manifest are found by this process alone."""
    if fields.get("settings") != _THIS_PROCESS:
        return None
    return (
        "vLLM does not tell its tiers the settings that KV depends on, so that chunks are found by "
        "this process alone; set kv_connector to CascadeOffloadingConnector and "
        "kv_connector_module_path to cascadekv.connectors.vllm_tier, or set cascade.weights to a "
        "name for the weights and all settings"
    )


def manifest_of(
    config: OffloadingConfig,
    chunk_bytes: int,
    weights: str,
    engine: "Engine | None" = None,
    digests: WeightDigests | None = None,
) -> dict[str, str]:
    """Return the fields of the compatibility manifest of chunks.

    vLLM names chunks by token hashes with a seed, which `PYTHONHASHSEED` sets, so the seed is a
    field. The parallel topology is a field unless the engine uses its canonical layout and declares
    it independent of the topology. `engine` is the configuration that vLLM does not tell a tier;
    `digests` has what is known of the files of weights.
    """
    import vllm  # noqa: PLC0415 # for its version

    parallel = config.parallel
    groups = [
        (versions.group_number(group, at), group.tokens_per_block, group.layer_names)
        for at, group in enumerate(config.groups)
    ]
    topology = {
        "tensor_parallel": str(parallel.tp_size),
        "context_parallel": f"{parallel.pcp_size} prefill, {parallel.dcp_size} decode",
        "pipeline": f"{parallel.pp_size} stages, {parallel.world_size} workers, "
        f"{config.worker_kv_bytes_per_block} bytes each",
    }
    is_portable = config.canonical_layout and parallel.is_parallelism_agnostic
    facts = ("canonical " if config.canonical_layout else "") + (
        "replicated " if config.replicated_layout else ""
    )
    return {
        **_untold(config),
        **_engine(engine, weights),
        "weights": _weights(config.model.name, weights, digests),
        "dtype": config.model.dtype,
        "block_tokens": str(config.cache.tokens_per_hash),
        "layout": f"{facts}{config.kv_cache_layout}, {config.cache.blocks_per_chunk} blocks",
        "chunk_bytes": str(chunk_bytes),
        "groups": text_digest(json.dumps(groups)),
        "engine_format": f"vllm {vllm.__version__} offload",
        "hash_seed": hash_seed(),
        **({"tensor_parallel": "any"} if is_portable else topology),
    }


def hash_seed() -> str:
    """Return a digest of the seed of vLLM's names of chunks; vLLM sets it after creating tiers."""
    return text_digest(kv_cache_utils.get_none_hash_seed())


def doubt_of(model: str, engine: "Engine | None", weights: str, named: str) -> str | None:
    """Return why chunks must not be used by other runs of the engine; `None` if they may.

    `named` is how the manifest names the weights. Called after their files were read for it.
    """
    if engine is not None:
        return doubt_of_weights(engine[0], weights, named)
    changed = changed_since_start(Path(model)) if weights in FINGERPRINTS else None
    return changed or (named if named == NOT_DIGESTED else None)


def _untold(config: OffloadingConfig) -> dict[str, str]:
    """Return what vLLM tells a tier and no other field has, such as settings of a new version."""
    fields: dict[str, str] = {}
    for path, part in _parts(config, "offload."):
        table = OFFLOADING_CONFIGURATION.get(type(part).__name__, {})
        settings = (
            Setting(field.name, getattr(part, field.name))
            for field in dataclasses.fields(part)
            if field.name not in table or table[field.name].effect is not Effect.NESTED
        )
        fields |= counted(settings, table, _EXACT, prefix=path)
    return fields


def _parts(config: OffloadingConfig, path: str) -> Iterator[tuple[str, Any]]:
    yield path, config
    yield from (
        (f"{path}{name}.", getattr(config, name)) for name in ("model", "cache", "parallel")
    )
    yield from ((f"{path}group {at}.", group) for at, group in enumerate(config.groups))


_EXACT = Numerics(is_quantized=True, is_batch_invariant=False)


def _engine(engine: "Engine | None", weights: str) -> dict[str, str]:
    """Return the settings of the engine, or what stands for them if vLLM does not tell them."""
    if engine is not None:
        config, cache = engine
        kinds = [type(group.kv_cache_spec).__name__ for group in cache.kv_cache_groups]
        attention: Any = config.attention_config
        chosen = [attention.backend, getattr(attention, "backend_per_kind", None)]
        return {
            **settings_of(config),
            "kv_dtype": str(config.cache_config.cache_dtype),
            "kinds": ", ".join(kinds),
            # The choice depends on these and on the device, and with it the order of bytes.
            "attention": f"{canonical_text(chosen)} on {_device()}",
        }
    if weights not in FINGERPRINTS:
        return {**environment_of(_EXACT), "settings": "named by cascade.weights"}
    return {"settings": _THIS_PROCESS}


def _device() -> str:
    from vllm.platforms import current_platform  # noqa: PLC0415 # asks the device

    return f"{current_platform.device_type} {current_platform.get_device_capability()}"


def _weights(model: str, weights: str, digests: WeightDigests | None) -> str:
    if weights not in FINGERPRINTS:
        return f"named {weights}"
    try:
        if weights == "digest" and digests is not None:
            fingerprint = digests.fingerprint(model)
        else:
            fingerprint = fingerprint_of_model(model, is_full=weights != "sampled")
    except NotDigestedError:
        return NOT_DIGESTED
    if fingerprint is None:
        raise ConfigError(
            f"{WEIGHTS}: the weights of {model} are not in a local directory of that name and "
            f"cannot be fingerprinted; set it to a name that changes whenever they change"
        )
    return fingerprint
