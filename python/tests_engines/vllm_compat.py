"""Adapters of the tests to older versions of vLLM."""

import importlib.util
import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest
from cascadekv.connectors import vllm_versions
from vllm.v1.core.sched.output import KVConnectorBlockState
from vllm.v1.kv_offload.config import OffloadingGroupConfig

SAYS_SOURCES = importlib.util.find_spec("vllm.v1.metrics.cache_hit_source") is not None
"""Whether vLLM reports hits by tier: since 0.32."""
needs_groups = pytest.mark.skipif(
    vllm_versions.unsupported_groups(2) is not None,
    reason="models with several groups of layers are supported with vLLM 0.30 and later",
)


def block_state(
    requests: Collection[str], tables: Callable[[str], tuple[list[int], ...]]
) -> KVConnectorBlockState:
    """Return the block tables of requests in the engine's format."""
    if "block_ids" in inspect.signature(KVConnectorBlockState).parameters:
        return KVConnectorBlockState({name: tables(name) for name in requests}, {})
    return KVConnectorBlockState(set(requests), tables, {})


def offloading_group(tokens: int, layers: Sequence[str]) -> OffloadingGroupConfig:
    """Return the first group of layers for vLLM's offload."""
    names = inspect.signature(OffloadingGroupConfig).parameters
    number = {"group_id": 0} if "group_id" in names else {}
    return OffloadingGroupConfig(tokens, tuple(layers), **number)


def chunk_ids(spec: Any) -> Sequence[int]:
    """Return the chunks of the CPU tier that a worker reads or writes."""
    return spec.chunk_ids if hasattr(spec, "chunk_ids") else spec.block_ids


def payload_of(stats: Any) -> dict[str, Any]:
    """Return the data of a connector's statistics that is sent between processes."""
    return stats.to_dict() if hasattr(stats, "to_dict") else stats.data


def child_payload_of(stats: Any) -> dict[str, Any]:
    """Return what is sent of the statistics of a child of a `MultiConnector`."""
    payload = payload_of(stats)
    return payload if hasattr(stats, "to_dict") else {"data": payload}
