"""What follows from the engine's configuration: ranks, layout, loads, and log messages at start."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cascadekv.connectors import vllm_versions as versions
from cascadekv.connectors.vllm.groups import CacheGroup
from cascadekv.connectors.vllm.layout import LayoutError, Rank
from cascadekv.connectors.vllm.settings import ConnectorSettings, read_connector_settings
from cascadekv.connectors.vllm.unused_settings import unused_settings

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig

__all__ = [
    "load_mode",
    "log_at_start",
    "rank_of",
    "wanted_layout",
]

_LOG = logging.getLogger("vllm.cascade")


def load_mode(
    config: "VllmConfig", settings: ConnectorSettings, groups: Sequence[CacheGroup]
) -> str:
    """Return how loads are carried out: `async` wherever a failed load could give wrong answers.

    vLLM learns about a failed block at the end of the step that loads it. If the next step is
    planned earlier, its output is used although it was computed from the failed block. With prefix
    caching, a block is shared as soon as it is allocated, and stays shared if its request ends
    before the block is recomputed. A request that loads asynchronously takes part in no step and
    shares no blocks until its blocks have arrived.
    """
    steps_overlap = config.parallel_config.pipeline_parallel_size > 1
    steps_overlap = steps_overlap or bool(config.scheduler_config.async_scheduling)
    has_windows = len(groups) > 1 or any(group.window is not None for group in groups)
    has_prefix_cache = bool(config.cache_config.enable_prefix_caching)
    if not (steps_overlap or has_prefix_cache or has_windows):
        return settings.load
    if settings.load == "sync" or settings.layerwise:
        reason = "of the model's sliding windows or KV cache groups"
        if steps_overlap or has_prefix_cache:
            reason = "the engine's steps overlap" if steps_overlap else "prefix caching is on"
        _LOG.warning(
            "Cascade: loads are asynchronous because %s; cascade.load: sync and "
            "cascade.layerwise are ignored",
            reason,
        )
    return "async"


def log_at_start(
    config: "VllmConfig", transfer: "KVTransferConfig", settings: ConnectorSettings
) -> None:
    """Log notes and warnings about the settings and the version of vLLM."""
    for note in settings.notes:
        _LOG.info("Cascade: %s", note)
    for line in unused_settings(config, settings, transfer.kv_connector_extra_config):
        _LOG.warning("Cascade: %s", line)
    if (warning := versions.untested_warning()) is not None:
        _LOG.warning("Cascade: %s", warning)
    if transfer.kv_load_failure_policy != "recompute":
        _LOG.warning(
            "Cascade: kv_load_failure_policy is fail, which is vLLM's default: a request fails if "
            "a block that was found cannot be loaded. Set it to recompute in --kv-transfer-config "
            "to compute such blocks instead"
        )


def wanted_layout(config: "VllmConfig") -> str | None:
    """Return the KV layout that the settings ask for; `None` for the engine's choice."""
    transfer = config.kv_transfer_config
    if transfer is None:
        return None
    return read_connector_settings(transfer.kv_connector_extra_config).kv_layout


def rank_of(config: "VllmConfig") -> Rank:
    """Return this worker's position. Raises `LayoutError` for KV that cannot be stored."""
    from vllm.distributed.parallel_state import (  # noqa: PLC0415
        get_tensor_model_parallel_rank,
    )

    model: Any = config.model_config
    parallel = config.parallel_config
    if parallel.prefill_context_parallel_size > 1:
        raise LayoutError("prefill context parallelism is not supported")
    context = parallel.decode_context_parallel_size
    rank = get_tensor_model_parallel_rank()
    return Rank(
        rank,
        parallel.tensor_parallel_size,
        rank % context,
        context,
        1 if model.use_mla else model.get_total_num_kv_heads(),
    )
