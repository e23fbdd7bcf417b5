"""What an engine's configuration means for loads, and what its operator is told at start."""

import logging
from typing import TYPE_CHECKING

from cascadekv.connectors import vllm_versions as versions
from cascadekv.connectors.vllm.settings import ConnectorSettings

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig

__all__ = ["is_one_process", "load_mode", "say_at_start"]

_LOG = logging.getLogger("vllm.cascade")


def is_one_process(config: "VllmConfig") -> bool:
    """Whether scheduler and worker are in one process."""
    parallel = config.parallel_config
    return parallel.world_size == 1 and parallel.distributed_executor_backend == "uni"


def load_mode(config: "VllmConfig", settings: ConnectorSettings) -> str:
    """Say how loads are carried out: `async` wherever another way could give wrong answers.

    vLLM learns that a block did not arrive when the step that loads it is over. Where the next
    step is planned before that, its output is taken although it was computed from that block. With
    prefix caching the block is shared from the moment it is allocated, and stays shared if its
    request ends before it has computed the block. A request that loads asynchronously is in no
    step, and shares nothing, until its blocks arrived.
    """
    overlaps = config.parallel_config.pipeline_parallel_size > 1
    overlaps = overlaps or bool(config.scheduler_config.async_scheduling)
    if not (overlaps or config.cache_config.enable_prefix_caching):
        return settings.load
    if settings.load == "sync" or settings.layerwise:
        why = "the engine's steps overlap" if overlaps else "prefix caching is on"
        _LOG.warning(
            "Cascade: loads are asynchronous, because %s; cascade.load: sync and "
            "cascade.layerwise are ignored",
            why,
        )
    return "async"


def say_at_start(transfer: "KVTransferConfig", settings: ConnectorSettings) -> None:
    """Tell the operator what the settings and vLLM's version mean."""
    for note in settings.notes:
        _LOG.info("Cascade: %s", note)
    if (untried := versions.untried()) is not None:
        _LOG.warning("Cascade: %s", untried)
    if transfer.kv_load_failure_policy != "recompute":
        _LOG.warning(
            "Cascade: kv_load_failure_policy is fail, which is vLLM's default: a request ends with "
            "an error when a block that was found does not arrive. Set it to recompute in "
            "--kv-transfer-config to have such blocks computed"
        )
