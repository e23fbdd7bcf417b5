"""What differs between the versions of vLLM that the connectors work with, and which those are.

The rest of `connectors/vllm` and `vllm_tier` asks here and knows nothing of versions. What vLLM has
decides, not its number: a release between two may have what the later one has. With a version that
is too old, importing this module raises `ImportError`.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import vllm

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

__all__ = [
    "NEWEST",
    "OLDEST",
    "block_tables",
    "chunks_of",
    "group_number",
    "hit_source",
    "is_context_sharded",
    "job_result",
    "refusal_of_groups",
    "refuse_too_old",
    "tier_arguments",
    "transfer_results",
    "untried",
]

OLDEST, NEWEST = (0, 29), (0, 32)
"""The versions that these connectors were tried with, from and to, by `make test-vllm-versions`."""


def refuse_too_old(version: str = vllm.__version__) -> None:
    """Raise `ImportError` where vLLM has no interface that these connectors can be built on."""
    release = _release(version)
    if release is not None and release < OLDEST:
        raise ImportError(
            f"cascadekv.connectors works with vLLM {_text(OLDEST)} and later, this is {version} "
            f"in {vllm.__path__[0]}: update vLLM, or leave the connector out of its configuration"
        )


def untried(version: str = vllm.__version__) -> str | None:
    """Say that nobody tried the connectors with this vLLM, if so."""
    release = _release(version)
    if release is not None and OLDEST <= release <= NEWEST:
        return None
    return (
        f"the connectors were tried with vLLM {_text(OLDEST)} to {_text(NEWEST)} and not with "
        f"{version}; compare some answers with those of an engine without them, or take one of "
        f"those versions"
    )


# The connector.


def transfer_results(arrived: set[str], failed: set[str]) -> Any:
    """Name requests whose loads ended and those that failed whole; 0.29 asks `get_finished`."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # noqa: PLC0415 # not in 0.29
        KVConnectorTransferResults,
    )

    return KVConnectorTransferResults(finished_recving=arrived, failed_recving=failed)


def refusal_of_groups(groups: int) -> str | None:
    """Say why KV in so many groups cannot be kept: 0.29 can be told of blocks alone that failed.

    A block's number says nothing of its group there, and the scheduler asks for a single one.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1 import base  # noqa: PLC0415 # once an engine

    if groups == 1 or hasattr(base, "KVConnectorTransferResults"):
        return None
    return (
        f"its layers are in {groups} groups, and vLLM {vllm.__version__} cannot be told that a "
        f"load into several failed; vLLM 0.30 can"
    )


def block_tables(output: "SchedulerOutput", request: str) -> Sequence[Sequence[int]] | None:
    """Give a request's blocks, group by group; nothing where the engine does not say in this step.

    0.29 says in steps in which a request gets blocks, so that a block that another step filled is
    known with the next one that is given.
    """
    state: Any = output.kv_connector_block_state
    if state is None:
        return None
    if hasattr(state, "get_block_ids"):
        return state.get_block_ids(request)
    return state.block_ids.get(request)


def is_context_sharded(spec: Any) -> bool:
    """Whether context parallel ranks share a layer's tokens; before 0.31 all attention does."""
    return getattr(spec, "dcp_sharded", True)


def hit_source(tier: str) -> Any:
    """Name a tier as vLLM's statistics do; versions before 0.32 do not ask."""
    from vllm.v1.metrics.cache_hit_source import CacheHitSource  # noqa: PLC0415 # since 0.32

    sources = {
        "dram": CacheHitSource.HOST,
        "files": CacheHitSource.DISK,
        "posix": CacheHitSource.DISK,
        "peers": CacheHitSource.P2P,
    }
    return sources.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)


# The secondary tier.


def tier_arguments(spec: Any, view: memoryview, tier: str, detector: Any) -> tuple[Any, ...]:
    """Give what the base of secondary tiers is made with; it throttles stores since 0.31."""
    return (spec, view, tier) if detector is None else (spec, view, tier, detector)


def chunks_of(job: Any) -> list[int]:
    """Give the chunks of a job, which 0.29 calls blocks."""
    ids = job.chunk_ids if hasattr(job, "chunk_ids") else job.block_ids
    return [int(chunk) for chunk in ids]


def group_number(group: Any, position: int) -> int:
    """Give the number of a group of layers, which is its position in 0.29."""
    return getattr(group, "group_id", position)


def job_result(**told: Any) -> Any:
    """Make the result of a job; versions before 0.31 do not count `transfer_bytes`."""
    from vllm.v1.kv_offload.tiering.base import JobResult  # noqa: PLC0415 # the tier alone needs it

    known = {field.name for field in dataclasses.fields(JobResult)}
    return JobResult(**{name: value for name, value in told.items() if name in known})


def _release(version: str) -> tuple[int, int] | None:
    """Read a version's first two numbers; a build from vLLM's sources may have none."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return None if numbers is None else (int(numbers[1]), int(numbers[2]))


def _text(release: tuple[int, int]) -> str:
    return f"{release[0]}.{release[1]}"


refuse_too_old()
