"""What an engine is told of a connector: ours, embedded or served, and others beside it."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["BESIDE", "Side", "embedded", "example", "lmcache", "served", "small"]

DRAM = "1GiB"
"""Memory of a store: several prompts of the longest kind."""
BESIDE = ("none", "example", "lmcache")
"""What the connector is compared with."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """A connector as an engine knows it."""

    transfer: Mapping[str, object] | None
    """The engine's `kv_transfer_config`."""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables of the engine's process."""
    missing: str = ""
    """Why it cannot run here."""


def _cascade(**extra: object) -> Side:
    return Side(
        transfer={
            "kv_connector": "CascadeConnector",
            "kv_connector_module_path": "cascadekv.connectors.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                f"cascade.{name}": value for name, value in extra.items()
            },
        }
    )


def embedded(files: Path | None = None) -> Side:
    """Name our connector with a store in the engine's process, with a file tier if given one."""
    if files is None:
        return _cascade(pipeline="Dram", dram=DRAM)
    return _cascade(pipeline="Dram|Files", dram=DRAM, files=str(files))


def small(dram: str, files: Path | None = None, **options: object) -> Side:
    """Name our connector with so little memory that not everything stays in it."""
    place = (
        {"pipeline": "Dram"} if files is None else {"pipeline": "Dram|Files", "files": f"{files}"}
    )
    return _cascade(dram=dram, load_or_compute=False, **place, **options)


def served(node: str) -> Side:
    """Name our connector with a node, such as `unix:/run/cascade.sock`."""
    return _cascade(node=node)


def example(directory: Path) -> Side:
    """Name the ExampleConnector that vLLM brings: a file a layer for each whole prompt."""
    return Side(
        transfer={
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(directory)},
        }
    )


def lmcache() -> Side:
    """Name LMCache with its CPU backend at the settings that its documentation recommends."""
    missing = ""
    if importlib.util.find_spec("lmcache") is None:
        missing = "the package lmcache is not in this environment"
    return Side(
        transfer={"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"},
        environment=(
            ("LMCACHE_LOCAL_CPU", "True"),
            ("LMCACHE_MAX_LOCAL_CPU_SIZE", "1"),
            ("LMCACHE_CHUNK_SIZE", "256"),
        ),
        missing=missing,
    )
