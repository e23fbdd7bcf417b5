"""The supported versions of vLLM, and adapters for the differences between them.

`connectors/vllm` and `vllm_tier` use these adapters and do not depend on versions. The adapters
test for features rather than version numbers, because development builds may have features of the
next release. With a version that is too old, importing this module raises `ImportError`.
"""

import dataclasses
import gc
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import vllm

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

__all__ = [
    "NEWEST",
    "OLDEST",
    "block_tables",
    "check_version",
    "group_number",
    "hit_source",
    "is_context_sharded",
    "job_chunks",
    "job_result",
    "tier_arguments",
    "transfer_results",
    "unsupported_groups",
    "untested_warning",
]

OLDEST, NEWEST = (0, 29), (0, 32)
"""The oldest and the newest version that `make test-vllm-versions` tests the connectors with."""


def check_version(version: str = vllm.__version__) -> None:
    """Raise `ImportError` if vLLM is too old for these connectors."""
    release = _release(version)
    if release is not None and release < OLDEST:
        raise ImportError(
            f"cascadekv.connectors requires vLLM {_text(OLDEST)} or later; this is {version} in "
            f"{vllm.__path__[0]}: update vLLM, or remove the connector from its configuration"
        )


def untested_warning(version: str = vllm.__version__) -> str | None:
    """Return a warning if the connectors are not tested with this vLLM; `None` if they are."""
    release = _release(version)
    if release is not None and OLDEST <= release <= NEWEST:
        return None
    return (
        f"the connectors are tested with vLLM {_text(OLDEST)} to {_text(NEWEST)}, not with "
        f"{version}; compare some answers with those of an engine without them, or use a tested "
        f"version"
    )


# The connector.


def transfer_results(
    arrived: set[str], failed: set[str], sent: Collection[str] = frozenset()
) -> Any:
    """Return requests whose loads ended or failed, and those whose pages were sent.

    vLLM 0.29 calls `get_finished` instead.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # noqa: PLC0415 # not in 0.29
        KVConnectorTransferResults,
    )

    return KVConnectorTransferResults(
        finished_sending=set(sent), finished_recving=arrived, failed_recving=failed
    )


def unsupported_groups(groups: int, *, has_windows: bool = False) -> str | None:
    """Return why KV in this number of groups cannot be stored; `None` if it can.

    vLLM 0.29 accepts failed loads as block numbers only. These do not identify a group, and its
    scheduler requires a single one. It goes on at the failed block, where a layer with a sliding
    window has no pages for the blocks before.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1 import base  # noqa: PLC0415 # called once

    if (groups == 1 and not has_windows) or hasattr(base, "KVConnectorTransferResults"):
        return None
    kind = f"are in {groups} KV cache groups" if groups > 1 else "have a sliding window"
    return (
        f"its layers {kind}, and vLLM {vllm.__version__} does not accept failed loads of such "
        f"models; use vLLM 0.30 or later"
    )


def block_tables(output: "SchedulerOutput", request: str) -> Sequence[Sequence[int]] | None:
    """Return a request's block tables by group; `None` if this step does not include them.

    vLLM 0.29 includes them only in steps that allocate blocks for the request. A block that another
    step filled is then saved with the next allocation.
    """
    state: Any = output.kv_connector_block_state
    if state is None:
        return None
    if hasattr(state, "get_block_ids"):
        return state.get_block_ids(request)
    return state.block_ids.get(request)


def is_context_sharded(spec: Any) -> bool:
    """Whether a layer's tokens are split between context parallel ranks; always before 0.31."""
    return getattr(spec, "dcp_sharded", True)


def hit_source(tier: str) -> Any:
    """Return a tier's name in vLLM's statistics; only called since 0.32."""
    from vllm.v1.metrics.cache_hit_source import CacheHitSource  # noqa: PLC0415 # since 0.32

    sources = {
        "dram": CacheHitSource.HOST,
        "files": CacheHitSource.DISK,
        "peers": CacheHitSource.P2P,
    }
    return sources.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)


def hit_sources(by_tier: Mapping[str, int], tokens: int) -> dict[Any, int]:
    """Return loaded tokens by vLLM's name of their tier; the rest of them is of an unknown one."""
    sources: dict[Any, int] = {}
    left = tokens
    for tier, own in [*by_tier.items(), ("unknown", tokens)]:
        counted = min(own, left)
        if counted:
            source = hit_source(tier)
            sources[source] = sources.get(source, 0) + counted
            left -= counted
    return sources


def adapter_list(lora_config: Any) -> Callable[[], Mapping[int, Any]] | None:
    """Return what lists the loaded adapters of the engine with this configuration by number.

    No interface of connectors leads to vLLM's own list, so its keeper is searched for. `None` if it
    is not found.
    """
    from vllm.lora.worker_manager import WorkerLoRAManager  # noqa: PLC0415 # imports kernels

    for found in gc.get_objects():
        # Not `isinstance`: proxies of other libraries answer it with work of their own.
        if issubclass(type(found), WorkerLoRAManager) and found.lora_config is lora_config:
            return getattr(getattr(found, "_adapter_manager", None), "list_adapters", None)
    return None


def prefix_cache_name(adapter: Any, version: str = vllm.__version__) -> tuple[str, ...]:
    """Return what vLLM's prefix cache knows an adapter by; before 0.32 by its name alone."""
    has_path = (_release(version) or (0, 0)) >= (0, 32)
    return (adapter.lora_name, adapter.lora_path) if has_path else (adapter.lora_name,)


# The secondary tier.


def tier_arguments(spec: Any, view: memoryview, tier: str, detector: Any) -> tuple[Any, ...]:
    """Return the arguments of the base class of secondary tiers; the detector exists since 0.31."""
    return (spec, view, tier) if detector is None else (spec, view, tier, detector)


def job_chunks(job: Any) -> list[int]:
    """Return the chunks of a job, which 0.29 calls blocks."""
    ids = job.chunk_ids if hasattr(job, "chunk_ids") else job.block_ids
    return [int(chunk) for chunk in ids]


def group_number(group: Any, position: int) -> int:
    """Return the number of a group of layers; in 0.29 it is the position."""
    return getattr(group, "group_id", position)


def job_result(**fields: Any) -> Any:
    """Create the result of a job; versions before 0.31 have no `transfer_bytes`."""
    from vllm.v1.kv_offload.tiering.base import JobResult  # noqa: PLC0415 # only the tier needs it

    known = {field.name for field in dataclasses.fields(JobResult)}
    return JobResult(**{name: value for name, value in fields.items() if name in known})


def _release(version: str) -> tuple[int, int] | None:
    """Return the first two numbers of a version; a source build of vLLM may have none."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return None if numbers is None else (int(numbers[1]), int(numbers[2]))


def _text(release: tuple[int, int]) -> str:
    return f"{release[0]}.{release[1]}"


check_version()
