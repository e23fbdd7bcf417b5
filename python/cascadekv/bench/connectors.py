"""Configurations of connectors for measured engines: Cascade's, embedded or served, and others."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["BASELINES", "ConnectorSetup", "embedded", "example", "lmcache", "served", "small"]

DRAM = "1GiB"
"""Size of a store: room for several of the longest prompts."""
BASELINES = ("none", "example", "lmcache")
"""Connectors to compare with."""


@dataclass(frozen=True, kw_only=True)
class ConnectorSetup:
    """The configuration of a connector in an engine."""

    transfer: Mapping[str, object] | None
    """The engine's `kv_transfer_config`; `None`: no connector."""
    environment: tuple[tuple[str, str], ...] = ()
    """Environment variables of the engine's process."""
    missing: str = ""
    """Why the connector cannot run here; empty if it can."""


def _cascade(**extra: object) -> ConnectorSetup:
    return ConnectorSetup(
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


def embedded(files: Path | None = None) -> ConnectorSetup:
    """Configure Cascade with an embedded store, with a file tier if `files` is given."""
    if files is None:
        return _cascade(pipeline="Dram", dram=DRAM)
    return _cascade(pipeline="Dram|Files", dram=DRAM, files=str(files))


def small(dram: str, files: Path | None = None, **options: object) -> ConnectorSetup:
    """Configure Cascade with less DRAM than the working set."""
    tiers = (
        {"pipeline": "Dram"} if files is None else {"pipeline": "Dram|Files", "files": f"{files}"}
    )
    return _cascade(dram=dram, load_or_compute=False, **tiers, **options)


def served(node: str) -> ConnectorSetup:
    """Configure Cascade with a node, such as `unix:/run/cascade.sock`."""
    return _cascade(node=node)


def example(directory: Path) -> ConnectorSetup:
    """Configure vLLM's ExampleConnector: one file per layer for each whole prompt."""
    return ConnectorSetup(
        transfer={
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(directory)},
        }
    )


def lmcache() -> ConnectorSetup:
    """Configure LMCache's CPU backend with the settings that its documentation recommends."""
    missing = ""
    if importlib.util.find_spec("lmcache") is None:
        missing = "the package lmcache is not in this environment"
    return ConnectorSetup(
        transfer={"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"},
        environment=(
            ("LMCACHE_LOCAL_CPU", "True"),
            ("LMCACHE_MAX_LOCAL_CPU_SIZE", "1"),
            ("LMCACHE_CHUNK_SIZE", "256"),
        ),
        missing=missing,
    )
